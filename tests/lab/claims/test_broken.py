"""A ledger that cannot fail proves nothing: break the library a little, and the verdict changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import cumulant as cm
from cumulant.lab.claims import Trial, claims, verdict

Patch = pytest.MonkeyPatch


def judged(name: str) -> str:
    torch.manual_seed(0)
    return verdict(claims()[name].experiment(Trial(0, quick=True)).numbers)


@cache
def unbroken(name: str) -> str:
    return judged(name)


def changed(owner: Any, name: str, change: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """What `owner.name` returns, changed."""

    def apply(patch: Patch) -> None:
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda *a, **k: change(original(*a, **k)))

    return apply


def field(owner: Any, name: str, change: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """A cached field of a result, changed."""

    def apply(patch: Patch) -> None:
        original = vars(owner)[name].func
        patch.setattr(owner, name, property(lambda self: change(original(self))))

    return apply


def without(owner: Any, name: str, *left_out: str, **instead: Any) -> Callable[[Patch], None]:
    """`owner.name` deaf to some of its keywords, or with others than it was given."""

    def apply(patch: Patch) -> None:
        original = getattr(owner, name)

        def deaf(*a: Any, **k: Any) -> Any:
            k = {key: x for key, x in k.items() if key not in left_out} | instead
            return original(*a, **k)

        patch.setattr(owner, name, deaf)

    return apply


def slightly(x: Any) -> Any:
    """A thousandth more, of a tensor; results of other kinds stay."""
    return 1.001 * x if isinstance(x, torch.Tensor) else x


def unweighted(patch: Patch) -> None:
    """Mixtures forget the weights of their components."""
    original = cm.GaussianMixture.__init__

    def init(self: Any, means: Any, covariances: Any, log_weights: Any = None, **k: Any) -> None:
        original(self, means, covariances, None, **k)

    patch.setattr(cm.GaussianMixture, "__init__", init)


def no_skip(patch: Patch) -> None:
    """A step loses the point it starts from."""
    original = cm.dynamics.step
    patch.setattr(cm.dynamics, "step", lambda x, **k: original(x, **k) - x)


def swapped_transition(patch: Patch) -> None:
    """P(i | j) where P(j | i) belongs."""
    from cumulant.lab.claims.theory import t25

    original = t25.SwitchingLinearGaussian

    def other(*, transition: Any, **k: Any) -> Any:
        back = transition.mT / transition.mT.sum(-1, keepdim=True)
        return original(transition=back, **k)

    patch.setattr(t25, "SwitchingLinearGaussian", other)


def own_weight(patch: Patch) -> None:
    """Units of the classical network act on themselves."""
    original = cm.memory.ClassicalMemory.__init__

    def init(self: Any, patterns: Any, **k: Any) -> None:
        original(self, patterns, **k)
        self._sums = self.patterns.mT @ self.patterns

    patch.setattr(cm.memory.ClassicalMemory, "__init__", init)


def wrong_noise(patch: Patch) -> None:
    """The sampler's Gaussians are too wide."""
    from cumulant.lab.claims.theory import t33

    original = t33.block_gibbs

    def wider(*a: Any, **k: Any) -> Any:
        run = original(*a, **k)
        noise = torch.randn(run.states[1:].shape, generator=k["generator"], dtype=torch.float64)
        states = run.states.clone()
        states[1:] += 0.4 * noise
        return dataclasses.replace(run, states=states)

    patch.setattr(t33, "block_gibbs", wider)


def nothing(contraction: Any) -> Callable[[Patch], None]:
    """A contraction that does not contract."""

    def apply(patch: Patch) -> None:
        patch.setattr(contraction, "__call__", lambda self, x: x)

    return apply


BREAKS = {
    "T1: the mean a thousandth too long": ("T1", changed(cm.Empirical, "mean", slightly)),
    "T3: the mean a thousandth too long": ("T3", changed(cm.Gaussian, "mean", slightly)),
    "T4: no weights": ("T4", unweighted),
    "T4: the mean": ("T4", changed(cm.GaussianMixture, "mean", slightly)),
    "T7: entropy shifted": ("T7", field(cm.Attended, "entropy", lambda h: h + 1e-3)),
    "T8: the link": ("T8", changed(cm.Empirical, "link", slightly)),
    "T12: attention": ("T12", field(cm.Attended, "mean", slightly)),
    "T13: no skip connection": ("T13", no_skip),
    "T14: no skip connection": ("T14", no_skip),
    "T15: no contraction": ("T15", nothing(cm.dynamics.LayerNorm)),
    "T19: energy": ("T19", changed(cm.Memory, "energy", slightly)),
    "T19: half a step": ("T19", without(cm.Memory, "retrieve", step_size=0.5)),
    "T20: another step": ("T20", without(cm.memory, "compare", beta=1.01)),
    "T21: half the bound": ("T21", changed(cm.Memory, "error_bound", lambda b: b / 2)),
    "T22: units see themselves": ("T22", own_weight),
    "T24: another temperature": (
        "T24",
        without(cm.contrastive, "info_nce", temperature=1.001),
    ),
    "T24: a biased normalizer": (
        "T24",
        changed(cm.contrastive, "sampled_softmax", lambda x: x + 1.0),
    ),
    "T25: transition transposed": ("T25", swapped_transition),
    "T30: not quite the inverse": ("T30", changed(cm.dynamics, "inverse", slightly)),
    "T33: all patterns weigh the same": ("T33", unweighted),
    "T33: too much noise": ("T33", wrong_noise),
    "simclr: views meet themselves": (
        "simclr",
        without(cm.contrastive, "info_nce", "exclude"),
    ),
    "clip: one side alone": ("clip", without(cm.contrastive, "info_nce", "symmetric")),
    "word2vec: another temperature": (
        "word2vec",
        without(cm.contrastive, "info_nce", temperature=2.0),
    ),
    "nce: the loss": ("nce", changed(cm.contrastive, "nce", slightly)),
    "ntm: heat capacity": ("ntm", field(cm.Attended, "score_variance", slightly)),
}


@pytest.mark.parametrize(("name", "spoil"), BREAKS.values(), ids=BREAKS.keys())
def test_a_broken_library_loses_the_verdict(name, spoil, monkeypatch):
    recorded = claims()[name].recorded
    assert unbroken(name) == recorded
    spoil(monkeypatch)
    assert judged(name) != recorded
