"""Verdicts about the world change in another one: the library is right, the facts differ.

`test_broken.py` breaks the library; here it works, and what it is applied to is different.
"""

from __future__ import annotations

import lzma
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cumulant as cm
from cumulant.lab.claims import Trial, claims, verdict
from cumulant.lab.claims.systems import norms
from cumulant.lab.claims.theory import t17, t20, t31, t38
from cumulant.lab.fixed_points import rates

Patch = pytest.MonkeyPatch


def judged(name: str) -> str:
    torch.manual_seed(0)
    return verdict(claims()[name].experiment(Trial(0, quick=True)).numbers)


def one_temperature(patch: Patch) -> None:
    """Clusters form at one scale, whatever β is."""
    original = rates.simulate
    patch.setattr(rates, "simulate", lambda x, n, **k: original(x, n, **{**k, "beta": 16.0}))


def heavy_tails(patch: Patch) -> None:
    """The population on the line is logistic, not Gaussian."""
    original = rates._normal  # pyright: ignore[reportPrivateUsage]

    def logistic(*a: object) -> torch.Tensor:
        return torch.logit(torch.special.ndtr(original(*a)))

    patch.setattr(rates, "_normal", logistic)


def diffusion(patch: Patch) -> None:
    """Points under whitening diffuse instead of attending: a Gaussian attracts them."""
    original = t17.dynamics.simulate
    generator = torch.Generator().manual_seed(0)

    def moved(x: torch.Tensor, steps: int, **k: Any) -> Any:
        run = original(x, steps, **k)
        if not isinstance(k.get("contraction"), cm.dynamics.Whiten):
            return run
        states = [run.states[0]]
        for _ in range(len(run.states) - 1):
            noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
            states.append(cm.dynamics.Whiten()(0.5 * states[-1] + noise))
        return SimpleNamespace(states=torch.stack(states), final=states[-1])

    patch.setattr(t17.dynamics, "simulate", moved)


def cold(patch: Patch) -> None:
    """All temperatures are low, so that fixed and changing patterns end alike."""
    patch.setattr(t20, "SHOWN", 2.0)
    patch.setattr(t20, "QUICK_BETAS", (1.5, 2.0, 3.0))


def noisier(patch: Patch) -> None:
    """Three signs in ten are flipped, not one."""
    original = cm.memory.recall
    patch.setattr(cm.memory, "recall", lambda *a, **k: original(*a, **{**k, "flips": 0.3}))


def walked_text(patch: Patch) -> None:
    """The novels were written by the walk: word vectors, contexts that drift, words by softmax."""
    size, width = 250, 20
    random = torch.Generator().manual_seed(0)
    v = torch.randn(size, width, generator=random) * (
        0.3 + 1.2 * torch.rand(size, 1, generator=random)
    )
    c = torch.nn.functional.normalize(torch.randn(3000, width, generator=random), dim=-1)
    p = (width**0.5 * c @ v.mT).softmax(-1).double()
    pairs = (p.mT @ p / p.sum() * 4e6).round().long()
    words = t31.austen(size).words
    patch.setattr(t31, "austen", lambda _: t31.Corpus(words, pairs, 1_000_000))


def other_partners(patch: Patch) -> None:
    """Pairs change at every step, so that nothing can be learned apart."""
    random = torch.Generator().manual_seed(0)
    patch.setattr(norms, "positives", lambda: torch.randperm(norms.COUNT, generator=random))


def hasty(patch: Patch) -> None:
    """Walks are fast and words short, so that nothing is strongly coupled."""
    patch.setattr(t38, "STIFFNESS", (0.03, 0.06, 0.09, 0.125))
    patch.setattr(t38, "LENGTHS", (0.06, 0.125))


WORLDS = {
    "T38: fast walks, short words": ("T38", hasty, "holds"),
    "norms: pairs that change": ("norms", other_partners, "does not hold in general"),
    "T34: clusters of one size": ("T34", one_temperature, "does not hold in general"),
    "T34: heavy tails": ("T34", heavy_tails, "does not hold in general"),
    "T17: diffusion": ("T17", diffusion, "holds"),
    "T20: always cold": ("T20", cold, "does not hold in general"),
    "T21: more noise": ("T21", noisier, "does not hold in general"),
    "T31: a text that walks": ("T31", walked_text, "open"),
}


@pytest.mark.parametrize(("name", "change", "expected"), WORLDS.values(), ids=WORLDS.keys())
def test_another_world_another_verdict(name, change, expected, monkeypatch):
    change(monkeypatch)
    found = judged(name)
    assert found == expected
    assert found != claims()[name].recorded


def test_the_counts_of_the_novels_are_those_of_the_text():
    path = Path(__file__).parents[3] / "examples" / "data" / "austen.txt.xz"
    with lzma.open(path, "rt", encoding="utf-8") as file:
        counted = t31.counted(file, 500)
    stored = t31.austen(500)
    assert counted.words == stored.words
    assert counted.length == stored.length
    assert torch.equal(counted.pairs, stored.pairs)
