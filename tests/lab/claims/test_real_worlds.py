"""Verdicts about real models change if the models were others: weights swapped, tied or damped."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from cumulant.lab.claims import Trial, claims, functions, verdict
from cumulant.lab.claims.subjects import copied
from cumulant.lab.claims.theory import t35, t40, t41a, t41b

Patch = pytest.MonkeyPatch


def judged(name: str) -> str:
    torch.manual_seed(0)
    return verdict(claims()[name].experiment(Trial(0, quick=True)).numbers)


def other_weights(patch: Patch, module, change, key="minilm") -> None:
    """The claim looks at one model, a copy with other weights."""
    original = module.subject

    def made(_, *sizes):
        one = copied(original(key, *sizes))
        with torch.no_grad():
            change(one.model)
        return one

    patch.setattr(module, "subject", made)
    if hasattr(module, "QUICK"):
        patch.setattr(module, "QUICK", (key,))


def attentions(model):
    return [layer.attention.self for layer in model.encoder.layer]


def swapped_heads(patch: Patch) -> None:
    """The keys of every head belong to the next one."""

    def change(model):
        for own in attentions(model):
            own.key.weight.copy_(own.key.weight.roll(32, 0))

    other_weights(patch, t35, change)


def tied_heads(patch: Patch) -> None:
    """Queries are keys, so scores are symmetric and positive."""

    def change(model):
        for own in attentions(model):
            own.key.weight.copy_(own.query.weight)

    other_weights(patch, t35, change)


def mild_queries(patch: Patch) -> None:
    """Scores so small that the softmax is linear, and every head the more so."""

    def change(model):
        for own in attentions(model):
            own.query.weight.mul_(0.15)
            own.query.bias.mul_(0.15)

    other_weights(patch, t40, change)


def held_layer(patch: Patch) -> None:
    """A layer whose norms add a large constant: it contracts."""

    def change(model):
        if hasattr(model.encoder, "albert_layer_groups"):
            layer = model.encoder.albert_layer_groups[0].albert_layers[0]
            generator = torch.Generator().manual_seed(0)
            bias = torch.randn(len(layer.full_layer_layer_norm.bias), generator=generator)
            layer.full_layer_layer_norm.bias.copy_(5 * bias)
            layer.attention.LayerNorm.bias.copy_(5 * bias)
            layer.attention.dense.weight.mul_(0.1)
            layer.ffn_output.weight.mul_(0.1)

    original = t41a.subject

    def made(key, *sizes):
        one = copied(original(key, *sizes))
        with torch.no_grad():
            change(one.model)
        return one

    patch.setattr(t41a, "subject", made)


def sharp_heads(patch: Patch) -> None:
    """Cross-attention fifty times as sharp: fixed points are single patterns."""
    original = t41b.heads_of
    patch.setattr(t41b, "heads_of", lambda model, count: original(model, count, 50.0))


def needless_heads(patch: Patch) -> None:
    """A model that loses everything with any part: all heads, all feed-forward layers count."""
    original = functions.ablate

    def ruined(model, part, layers=None, **how):
        return original(model, "attention" if layers is None else part, layers, **how)

    patch.setattr(functions, "ablate", ruined)


def spare_weights(patch: Patch) -> None:
    """A model that does as well without any part."""
    patch.setattr(functions, "ablate", lambda *_, **__: nullcontext())


WORLDS = {
    "T35: heads swapped": ("T35", swapped_heads, "does not hold in general"),
    "T35: queries are keys": ("T35", tied_heads, "holds"),
    "T37a: nothing can be spared": ("T37a", needless_heads, "holds"),
    "T40: mild scores": ("T40", mild_queries, "holds"),
    "T41a: a layer that contracts": ("T41a", held_layer, "holds"),
    "T41b: sharp heads": ("T41b", sharp_heads, "holds"),
}


@pytest.mark.parametrize(("name", "change", "expected"), WORLDS.values(), ids=WORLDS.keys())
def test_another_world_another_verdict(name, change, expected, monkeypatch):
    monkeypatch.setenv("CUMULANT_CACHE", "")
    change(monkeypatch)
    found = judged(name)
    assert found == expected
    assert found != claims()[name].recorded
