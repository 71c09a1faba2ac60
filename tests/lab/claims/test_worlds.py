"""Verdicts about the world change in another one: the library is right, the facts differ.

`test_broken.py` breaks the library; here it works, and what it is applied to is different.
"""

from __future__ import annotations

import pytest
import torch

from cumulant.lab.claims import Trial, claims, verdict
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


WORLDS = {
    "T34: clusters of one size": ("T34", one_temperature),
    "T34: heavy tails": ("T34", heavy_tails),
}


@pytest.mark.parametrize(("name", "change"), WORLDS.values(), ids=WORLDS.keys())
def test_another_world_another_verdict(name, change, monkeypatch):
    change(monkeypatch)
    assert judged(name) != claims()[name].recorded
