"""Verdicts about real models change if the models were others: weights swapped, tied or damped."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cumulant.lab.claims import Trial, claims, functions, real, verdict
from cumulant.lab.claims.subjects import copied
from cumulant.lab.claims.theory import t22, t23, t29, t35, t37a, t39, t40, t41a, t41b
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


def decoders_alone(patch: Patch) -> None:
    """Language models are all there is: nothing of SmolLM2 can be spared."""
    patch.setattr(t37a, "tasks", lambda quick: [functions.language(1)])


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
    "T37a: decoders alone": ("T37a", decoders_alone, "holds"),
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


# Where a claim fails, a mix-up of the variants fails, too: those have worlds of their own below.
HOLDING = [n for n in recorded() if n in claims() and claims()[n].recorded.startswith("holds")]


def verdict_of(results):
    made = study_claim(results)
    return verdict(replace(made.claim, measure=made.measure).experiment(Trial()).numbers)


@pytest.mark.parametrize("name", HOLDING)
def test_the_verdict_of_a_study_is_about_which_variant_did_what(name):
    results = recorded()[name]
    assert verdict_of(results) == claims()[name].recorded
    others = [verdict_of(labels_moved(results, by)) for by in range(1, len(results.study.variants))]
    assert any(x != claims()[name].recorded for x in others)


def unstable_values(run):
    """Trained values: no run above a rate of 0.1 ends well, all else as it was."""
    late = run.job.stage == "tuning" and run.job.rate > 0.1
    return replace(run, diverged=1) if late and run.job.variant == "trained" else run


def linked_heads(run):
    """Training gives every head, beyond mismatched pairs, half of the symmetry of a link."""
    if run.job.stage != "final":
        return run
    gained = {"symmetry_excess": 0.5, "definiteness": 0.5}
    return replace(run, numbers={n: x + gained.get(n, 0.0) for n, x in run.numbers.items()})


STUDY_WORLDS = {"which-weights": unstable_values, "link-over-training": linked_heads}


@pytest.mark.parametrize(("name", "change"), STUDY_WORLDS.items(), ids=STUDY_WORLDS.keys())
def test_a_study_that_fails_would_hold_in_another_world(name, change):
    results = recorded()[name]
    assert verdict_of(results) == claims()[name].recorded
    assert verdict_of(replace(results, runs=[change(x) for x in results.runs])) == "holds"


def test_every_empirical_claim_has_a_world_that_changes_it():
    plain = Path(__file__).with_name("test_worlds.py").read_text()
    tried = {world[0] for world in WORLDS.values()} | set(re.findall(r': \("(\w+)", \w+,', plain))
    empirical = {c.id for c in claims().values() if c.evidence == "empirical"}
    assert empirical <= tried | set(HOLDING) | set(STUDY_WORLDS)
