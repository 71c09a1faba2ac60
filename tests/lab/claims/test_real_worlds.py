"""Verdicts about real models change if the models were others: weights swapped, tied or damped."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cumulant.lab.claims import Trial, claims, functions, real, verdict
from cumulant.lab.claims.subjects import copied
from cumulant.lab.claims.theory import t22, t23, t29, t35, t39, t40, t41a, t41b
from cumulant.lab.studies.claiming import study_claim
from cumulant.lab.studies.recording import recorded

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


def tied_layers(patch: Patch) -> None:
    """Second weights of feed-forward layers are the transpose of the first."""

    def change(model):
        for layer in model.encoder.layer:
            layer.output.dense.weight.copy_(layer.intermediate.dense.weight.mT)

    other_weights(patch, t22, change)


def weaker_norms(patch: Patch) -> None:
    """Normalizations contract a fifth less."""

    def change(model):
        for layer in model.encoder.layer:
            layer.attention.output.LayerNorm.weight.mul_(1.2)
            layer.output.LayerNorm.weight.mul_(1.2)

    other_weights(patch, t39, change)


def in_place(patch: Patch, module, change) -> None:
    """The model that is loaded once a process has other weights for a while."""
    for own in attentions(real.loaded().model):
        change(lambda weight, new: patch.setattr(weight, "data", new), own)
    for name in ("sublayers", "attentions"):
        if hasattr(module, name):
            patch.setattr(module, name, getattr(real, name).__wrapped__)


def sharp_queries(patch: Patch) -> None:
    """Scores two and a half times as large, with which the model was not trained to work."""

    def change(put, own):
        put(own.query.weight, 2.5 * own.query.weight.detach())
        put(own.query.bias, 2.5 * own.query.bias.detach())

    in_place(patch, t23, change)


def strange_queries(patch: Patch) -> None:
    """Queries of every head belong to another."""
    in_place(
        patch, t29, lambda put, own: put(own.query.weight, own.query.weight.detach().roll(96, 0))
    )


WORLDS = {
    "T22: tied layers": ("T22", tied_layers, "holds"),
    "T23: sharp queries": ("T23", sharp_queries, "holds"),
    "T29: queries of other heads": ("T29", strange_queries, "does not hold in general"),
    "T39: norms that contract less": ("T39", weaker_norms, "holds"),
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


def labels_moved(results, by):
    """The runs of a study with every variant under the name of another."""
    names = list(results.study.variants)
    new = dict(zip(names, names[by:] + names[:by], strict=True))
    runs = [replace(x, job=replace(x.job, variant=new[x.job.variant])) for x in results.runs]
    return replace(results, runs=runs)


# Where a claim fails, a mix-up of the variants fails, too.
HOLDING = [n for n in recorded() if n in claims() and claims()[n].recorded.startswith("holds")]


@pytest.mark.parametrize("name", HOLDING)
def test_the_verdict_of_a_study_is_about_which_variant_did_what(name):
    results = recorded()[name]

    def judged(results):
        made = study_claim(results)
        return verdict(replace(made.claim, measure=made.measure).experiment(Trial()).numbers)

    assert judged(results) == claims()[name].recorded
    others = [judged(labels_moved(results, by)) for by in range(1, len(results.study.variants))]
    assert any(x != claims()[name].recorded for x in others)


def test_every_empirical_claim_has_a_world_that_changes_it():
    plain = Path(__file__).with_name("test_worlds.py").read_text()
    tried = {world[0] for world in WORLDS.values()} | set(re.findall(r': \("(\w+)", \w+\),', plain))
    studies = {name for name in recorded() if name in claims()}
    empirical = {c.id for c in claims().values() if c.evidence == "empirical"}
    assert empirical <= tried | studies
