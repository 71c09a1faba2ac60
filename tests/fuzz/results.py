"""Random lives of results: merged, packed, copied, asked in any order and any mode, then compared.

A program of random operations runs on results of `attend`; at the end every field and its gradient
must be those of dense attention over the same keys. A program follows from its seed alone:

    python tests/fuzz/results.py --seed 17 --rounds 1
"""

from __future__ import annotations

import copy
import math
import random
import sys
import threading
from pathlib import Path

import torch
from torch.func import jvp, vmap

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cumulant as cm
from fuzz import driver
from oracle import FIELDS, dense

DOUBLE = torch.float64


def ask(a, name, mode):
    """Look at a field in some mode, and throw it away."""
    one = torch.ones((), dtype=DOUBLE)
    if mode == "no_grad":
        with torch.no_grad():
            getattr(a, name)
    elif mode == "inference":
        with torch.inference_mode():
            getattr(a, name)
    elif mode == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            getattr(a, name)
    elif mode == "vmap":
        vmap(lambda s: s * getattr(a, name))(one.expand(2))
    elif mode == "jvp":
        jvp(lambda s: s * getattr(a, name), (one,), (one,))
    elif mode == "thread":
        thread = threading.Thread(target=getattr, args=(a, name))
        thread.start()
        thread.join()
    else:
        getattr(a, name)


MODES = ["grad", "no_grad", "inference", "autocast", "vmap", "jvp", "thread"]


def check(seed: int) -> str | None:
    """What is wrong after the program of this seed, if anything."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    m, d, e = draw.randint(1, 4), draw.randint(1, 4), draw.randint(1, 4)
    parts = draw.choice([1, 2, 3, 8, 40])
    sizes = [draw.choice([0, 1, 1, 3]) for _ in range(parts)]
    total = sum(sizes)

    def normal(*shape):
        x = torch.randn(*shape, generator=generator, dtype=DOUBLE)
        return x.requires_grad_() if draw.random() < 0.8 else x

    q, k, v = normal(m, d), normal(total, d), normal(total, e)
    mask = torch.randn(m, total, generator=generator, dtype=DOUBLE)
    if draw.random() < 0.5:  # some keys hidden by a huge number, some for good
        pick = torch.rand(m, total, generator=generator)
        mask = mask.masked_fill(pick < 0.2, -1e30).masked_fill(pick < 0.1, -math.inf)
    mask = mask.requires_grad_(draw.random() < 0.5)
    moving = [x for x in (q, k, v, mask) if x.requires_grad]

    def attend(a, b):
        return cm.attend(q, k[a:b], v[a:b], attn_mask=mask[:, a:b])

    said, result, start = [], None, 0
    waiting = []
    for size in sizes:
        waiting.append(attend(start, start + size))
        start += size
        if result is None or draw.random() < 0.7:
            joined = [*([] if result is None else [result]), *waiting]
            result = cm.merge(*joined) if len(joined) > 1 or draw.random() < 0.3 else joined[0]
            waiting = []
        for _ in range(draw.choice([0, 0, 1, 2])):
            name, mode = draw.choice(FIELDS), draw.choice(MODES)
            said.append(f"{name} in {mode}")
            ask(result, name, mode)
        if draw.random() < 0.1:
            result = copy.copy(result)
            said.append("copied")
    result = cm.merge(result, *waiting)
    copied = copy.deepcopy(result) if draw.random() < 0.3 else None
    truth = dense(q, k, v, bias=mask)
    told = f"{m} queries, keys {sizes}, {', '.join(said)}"
    for name in draw.sample(FIELDS, len(FIELDS)):
        ours, theirs = getattr(result, name), getattr(truth, name)
        same = torch.where(ours == theirs, 0.0, ours - theirs).detach()
        scale = 1 + theirs.detach().nan_to_num(0.0, 0.0, 0.0).abs().max().item()
        if not float(same.abs().max()) <= 1e-9 * scale:
            return f"{told}: {name} is off by {float(same.abs().max()):.1e}"
        if copied is not None:
            other = getattr(copied, name)
            if other.requires_grad or not torch.allclose(other, ours, 1e-12, 1e-12):
                return f"{told}: {name} of a deep copy differs"
        if not moving:
            continue
        finite = ours.isfinite() & (theirs.detach().abs() < 1e20)  # G of a row hidden by -1e30
        pulled = [
            torch.autograd.grad(
                x[finite].sin().sum(),
                moving,
                materialize_grads=True,
                allow_unused=True,
                retain_graph=True,
            )
            if x.requires_grad
            else [torch.zeros_like(y) for y in moving]
            for x in (ours, theirs)
        ]
        for one, other in zip(*pulled, strict=True):
            gap = (one - other).abs().max().item() if one.numel() else 0.0
            if not gap <= 1e-7 * (1 + (other.abs().max().item() if other.numel() else 0.0)):
                return f"{told}: the gradient of {name} is off by {gap:.1e}"
    return None


def run(rounds: int, seed: int) -> list[str]:
    """The failures of so many cases from this seed on."""
    return driver.run(check, "results", rounds, seed)


if __name__ == "__main__":
    sys.exit(driver.main(check, "results", __doc__, rounds=500))
