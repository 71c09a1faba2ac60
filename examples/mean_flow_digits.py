"""One-step digits: MeanFlow (Geng et al., 2025) with a small diffusion transformer.

The network predicts the mean velocity u(z, r, t) between two times, so a single evaluation turns
noise into an image. Its loss contains a Jacobian-vector product of the whole transformer:

    u(z, r, t) = v - (t - r) du/dt,      du/dt = v grad_z u + d_t u

Inside `cm.differentiable()` both the product and its gradient are right. By default the target is
detached, as in the paper. `--through` backpropagates through the product as well: then the loss is
an honest squared residual, and torch's own layer_norm gives a wrong gradient, which is measured.
Run it: python examples/mean_flow_digits.py (about two minutes; needs scikit-learn, matplotlib)
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.func import functional_call, jvp

import cumulant as cm

CLASSES, SIDE, PATCH, BATCH = 10, 8, 2, 64
TOKENS, PIXELS = (SIDE // PATCH) ** 2, PATCH**2


class Block(nn.Module):
    """A transformer block whose norms are shifted, scaled and gated by the condition (adaLN)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first = nn.LayerNorm(width, elementwise_affine=False)
        self.second = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, -1)
        y = self.first(x) * (1 + scale) + shift
        x = x + gate * self.attention(y, y, y, need_weights=False)[0]
        return x + gate2 * self.feed(self.second(x) * (1 + scale2) + shift2)


class MeanVelocity(nn.Module):
    """u(z, r, t) for images ``(B, 64)`` and their classes: a diffusion transformer."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.patch = nn.Linear(PIXELS, width)
        self.place = nn.Parameter(0.02 * torch.randn(TOKENS, width))
        self.label = nn.Embedding(CLASSES, width)
        self.times = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, PIXELS)
        nn.init.zeros_(self.out.weight)
        self.register_buffer("rates", torch.pi * 2.0 ** torch.arange(4))

    def forward(self, z: Tensor, r: Tensor, t: Tensor, label: Tensor) -> Tensor:
        angles = torch.stack([t, t - r], -1)[..., None] * self.rates  # (B, 2, 4)
        waves = torch.cat([angles.sin(), angles.cos()], -1).flatten(1)
        condition = nn.functional.silu(self.times(waves) + self.label(label))
        x = self.patch(to_patches(z)) + self.place
        for block in self.blocks:
            x = block(x, condition)
        return from_patches(self.out(self.norm(x)))


def to_patches(z: Tensor) -> Tensor:
    n = SIDE // PATCH
    return z.view(-1, n, PATCH, n, PATCH).transpose(2, 3).reshape(-1, TOKENS, PIXELS)


def from_patches(x: Tensor) -> Tensor:
    n = SIDE // PATCH
    return x.view(-1, n, n, PATCH, PATCH).transpose(2, 3).reshape(-1, SIDE * SIDE)


@dataclass(frozen=True)
class Batch:
    """Noisy images z at time t on the line from an image (t = 0) to noise (t = 1)."""

    z: Tensor
    r: Tensor
    t: Tensor
    velocity: Tensor
    label: Tensor


def draw(images: Tensor, labels: Tensor, size: int, generator: torch.Generator) -> Batch:
    pick = torch.randint(len(images), (size,), generator=generator)
    image, noise = images[pick], torch.randn(size, SIDE * SIDE, generator=generator)
    # Times as in the paper: logistic-normal; in half of the batch r = t, plain flow matching.
    two = torch.randn(2, size, generator=generator).sub(0.4).sigmoid().sort(0).values
    r, t = torch.where(torch.rand(size, generator=generator) < 0.5, two[1], two[0]), two[1]
    z = (1 - t)[:, None] * image + t[:, None] * noise
    return Batch(z, r, t, noise - image, labels[pick])


def residual(model: Callable[..., Tensor], batch: Batch, *, through: bool) -> Tensor:
    """u - (v - (t - r) du/dt), ``(B, 64)``; the second part is a constant unless `through`."""

    def u(z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        return model(z, r, t, batch.label)

    tangents = (batch.velocity, torch.zeros_like(batch.r), torch.ones_like(batch.t))
    value, slope = jvp(u, (batch.z, batch.r, batch.t), tangents)
    target = batch.velocity - (batch.t - batch.r)[:, None] * slope
    return value - (target if through else target.detach())


def loss_of(square: Tensor, *, through: bool) -> Tensor:
    """The mean squared residual, with the paper's adaptive weight where the target is detached.

    The weight keeps rare large residuals from taking over.
    """
    weight = 1.0 if through else (square.detach() + 1e-2).reciprocal()
    return (weight * square).mean()


def sample(model: nn.Module, labels: Tensor, generator: torch.Generator) -> Tensor:
    """Images from noise, by one evaluation of the network."""
    z = torch.randn(len(labels), SIDE * SIDE, generator=generator)
    zero, one = torch.zeros(len(labels)), torch.ones(len(labels))
    with torch.no_grad():
        return z - model(z, zero, one, labels)


def gradient_error(model: nn.Module, batch: Batch, *, right: bool) -> float:
    """How wrong the gradient through the product is, along a random direction in the weights.

    Relative error against finite differences in float64, inside `cm.differentiable()` or with
    torch's own norms.
    """
    torch.manual_seed(0)
    model = copy.deepcopy(model).double().requires_grad_(False)
    named = dict(model.named_parameters())
    move = {n: torch.randn_like(x) * x.std() for n, x in named.items()}
    double = Batch(*(x.double() if x.is_floating_point() else x for x in vars(batch).values()))

    def loss(step: Tensor) -> Tensor:
        moved = {n: x + step * move[n] for n, x in named.items()}

        def call(*inputs: Tensor) -> Tensor:
            return functional_call(model, moved, inputs)

        return residual(call, double, through=True).square().mean()

    with cm.differentiable() if right else cm.sdpa_replaced():
        step = torch.zeros((), dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(loss(step), step)
        h = 1e-4
        ahead, behind, far, back = (loss(step.new_tensor(s)) for s in (h, -h, 2 * h, -2 * h))
    truth = (8 * (ahead - behind) - (far - back)) / (12 * h)
    return float((slope - truth).abs() / truth.abs())


def train(
    images: Tensor, labels: Tensor, *, steps: int, through: bool, seed: int, right: bool
) -> nn.Module:
    """A trained network: the exponential moving average of its weights."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = MeanVelocity()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.995)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.1)
    begun, total, told = time.perf_counter(), 0.0, 0
    with cm.differentiable() if right else cm.sdpa_replaced():
        for step in range(1, steps + 1):
            batch = draw(images, labels, BATCH, generator)
            square = residual(model, batch, through=through).square().mean(-1)
            optimizer.zero_grad()
            loss_of(square, through=through).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
            total += square.mean().item()
            if step % 500 == 0 or step == steps:
                seconds = time.perf_counter() - begun
                mean = total / (step - told)
                print(f"step {step:5d}   residual {mean:7.4f}   {seconds:4.0f} s", flush=True)
                total, told = 0.0, step
    return average.module


def spread(images: Tensor, labels: Tensor) -> float:
    """The variance of a pixel within a class, averaged over pixels and classes."""
    each = [images[labels == c].var(0).mean() for c in range(CLASSES)]
    return float(torch.stack(each).mean())


def picture(images: Tensor, path: Path) -> None:
    """One row for each class."""
    import matplotlib.pyplot as plt

    rows = nn.functional.pad(images.view(CLASSES, -1, SIDE, SIDE), (1, 1, 1, 1), value=-1.0)
    whole = torch.cat([torch.cat(list(row), 1) for row in rows]).clamp(-1, 1)
    large = whole.repeat_interleave(6, 0).repeat_interleave(6, 1)
    plt.imsave(path, large.numpy(), cmap="gray_r")
    print(f"one row of samples for each class: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--through", action="store_true", help="backpropagate through the product as well"
    )
    parser.add_argument(
        "--torch-norms", action="store_true", help="train with torch's layer_norm, to compare"
    )
    parser.add_argument("--picture", type=Path, default=Path("digits.png"))
    chosen = parser.parse_args()
    digits, classes = load_digits(return_X_y=True)
    images, labels = torch.tensor(digits).float() / 8 - 1, torch.tensor(classes)

    model = train(
        images,
        labels,
        steps=chosen.steps,
        through=chosen.through,
        seed=chosen.seed,
        right=not chosen.torch_norms,
    )
    batch = draw(images, labels, 32, torch.Generator().manual_seed(0))
    for right, name in ((True, "inside cm.differentiable()"), (False, "with torch's layer_norm")):
        error = gradient_error(model, batch, right=right)
        print(f"gradient through the product, {name}: relative error {error:.1e}")
    wanted = torch.arange(CLASSES).repeat_interleave(100)
    made = sample(model, wanted, torch.Generator().manual_seed(chosen.seed))
    judge = SVC(gamma=0.02, C=10).fit(images.numpy(), classes)
    right = judge.predict(made.numpy()) == wanted.numpy()
    print(f"one-step samples that a classifier puts in their class: {right.mean():.1%}")
    share = spread(made, wanted) / spread(images, labels)
    print(f"their variance within a class, as a share of the data's: {share:.2f}")
    picture(made.view(CLASSES, 100, -1)[:, :16], chosen.picture)


if __name__ == "__main__":
    main()
