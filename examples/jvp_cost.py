"""What a JVP costs in training, by sequence length: CPU time of one encoder layer, one thread.

Prints multiples of a plain step (forward and backward): the JVP alone, the recipe of
docs/training-with-jvps.md (a JVP without gradient, then a plain forward pass), and the gradient
through the product.

    OMP_NUM_THREADS=1 python examples/jvp_cost.py 64 256 1024
"""

import sys
import time

import torch
from torch import nn
from torch.func import jvp

import cumulant as cm

TOKENS, WIDTH, HEADS, REPETITIONS = 1024, 384, 6, 3


def seconds(function):
    function()
    times = []
    for _ in range(REPETITIONS):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def measure(length):
    torch.manual_seed(0)
    # (length, batch, width): with batch_first=True torch's linear map of a transposed batch takes
    # one product for each token backwards, which would cost more than everything measured here.
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0)
    z, velocity = torch.randn(2, length, TOKENS // length, WIDTH)
    heads = torch.randn(TOKENS // length, HEADS, length, WIDTH // HEADS)

    def plain():
        (layer(z) - velocity).square().mean().backward()

    def slope():
        with torch.no_grad(), cm.sdpa_replaced():
            return jvp(layer, (z,), (velocity,))[1]

    def recipe():
        target = velocity - slope()
        (layer(z) - target).square().mean().backward()

    def through():
        with cm.differentiable():
            u, tangent = jvp(layer, (z,), (velocity,))
            (u + tangent - velocity).square().mean().backward()

    def attention():
        with torch.no_grad():
            jvp(cm.scaled_dot_product_attention, (heads,) * 3, (heads,) * 3)

    one, *others = (seconds(f) for f in (plain, slope, recipe, through, attention))
    return [x / one for x in others[:3]] + [others[3] / others[0]]


if __name__ == "__main__":
    print("length   JVP   recipe   through   attention's share of the JVP")
    for length in [int(x) for x in sys.argv[1:]] or [64, 256, 1024]:
        product, recipe, through, share = measure(length)
        print(f"{length:6d} {product:5.2f} {recipe:8.2f} {through:9.2f} {share:10.0%}", flush=True)
