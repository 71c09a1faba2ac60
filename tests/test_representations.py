"""What the REPL says about every public object: what it is and its shape, at no cost."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import is_dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cumulant as cm
from cumulant.core.describing import described, described_fields
from cumulant.core.outcome import Outcome
from cumulant.lab import claims

MODULES = (
    *("attention", "measures", "derivatives", "dynamics", "memory", "contrastive", "filtering"),
    *("nn", "lens", "lens.report", "distributed", "lab.claims", "lab.report"),
)


def public_classes():
    found = {}
    for name in ("", *(f".{m}" for m in MODULES)):
        module = importlib.import_module(f"cumulant{name}")
        for each in module.__all__:
            thing = getattr(module, each)
            if inspect.isclass(thing) and not issubclass(thing, BaseException):
                found[f"{thing.__module__}.{thing.__qualname__}"] = thing
    return found


CLASSES = public_classes()


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_public_class_has_a_repr_of_its_own(name):
    """Not an address; and not one made of all fields, where a field may be a tensor or a table."""
    kind = CLASSES[name]
    if inspect.isabstract(kind) or getattr(kind, "_is_protocol", False):
        return
    assert kind.__repr__ is not object.__repr__, f"{name} prints its address"
    made = kind.__repr__.__qualname__ != "described_fields" and (
        (is_dataclass(kind) and hasattr(kind.__repr__, "__wrapped__"))
        or kind.__repr__.__module__ == "collections"
    )
    if made:
        kinds = " ".join(str(x) for x in kind.__annotations__.values())
        large = re.search(r"Tensor|Sequence|Mapping|dict|list|Callable|DataFrame|Frame", kinds)
        assert large is None, f"{name} prints all of its fields: __repr__ = described_fields"


def one_mode():
    one = torch.ones(1, 1, 1)
    return cm.filtering.SwitchingLinearGaussian(
        transition=torch.ones(1, 1),
        initial=torch.ones(1),
        dynamics=one,
        dynamics_noise=one,
        emission=one,
        emission_noise=one,
        initial_mean=torch.zeros(1),
        initial_covariance=torch.zeros(1, 1),
    )


def results():
    """Results of the library on inputs large enough that no value belongs in a line."""
    x, y = torch.randn(64, 8), torch.randn(40, 1)
    patterns = torch.randn(20, 8)
    model = one_mode()
    post = cm.filtering.filter(model, y)
    found = cm.filtering.fit(model, y, standard_errors=False, throw=False, max_steps=3)
    memory = cm.Memory(patterns)
    signs = torch.randn(4, 8).sign()
    claim = claims.claims()["T1"]
    entry = claims.run(claim, quick=True)
    attended = cm.attend(x, x)
    sample = cm.filtering.sample(model, 50)
    loss = {"return_lse": True, "return_entropy": True}
    drawn = cm.contrastive.AliasSampler(torch.ones(50))
    report = cm.check_derivatives(torch.sin, (torch.ones(3, dtype=torch.float64),), order=1)
    moments = cm.nn.MomentAttention(8, 2)(torch.randn(2, 5, 8))
    hopfield = cm.nn.Hopfield(8)
    return {
        "attended": attended,
        "top keys": attended.top_keys(5),
        "received": cm.Received.of(attended),
        "measure": cm.Gaussian(torch.zeros(2), torch.eye(2)),
        "empirical": cm.Empirical(x),
        "tilted": cm.Empirical(x).tilt(x[:3]),
        "solution": cm.Poisson(torch.ones(50)).link(torch.rand(50, 7, 1) + 0.1, throw=False),
        "posterior": cm.posterior(cm.Gamma(2.0, 1.0), cm.Poisson, torch.tensor([3.0, 5.0])),
        "trajectory": cm.dynamics.simulate(x, 3, contraction=cm.dynamics.Sphere()),
        "fixed point": cm.dynamics.fixed_point(lambda x: x / 2, x),
        "clusters": cm.dynamics.clusters(x),
        "gaussian path": cm.dynamics.gaussian_flow(torch.zeros(3), torch.eye(3), [0.0, 0.1]),
        "memory": memory,
        "retrieval": memory.retrieve(x),
        "linear memory": cm.memory.LinearMemory(patterns),
        "classical memory": cm.memory.ClassicalMemory(signs),
        "sampler": drawn,
        "loss": cm.linear_cross_entropy(x, patterns, torch.zeros(64).long(), **loss),
        "contrast": cm.contrastive.contrast(x, x, reduction="none"),
        "filtered": post,
        "smoothed": cm.filtering.smooth(model, post),
        "fit": found,
        "summary": found.summary(),
        "sample": sample,
        "map": cm.filtering.Linear(torch.eye(9)),
        "moments": moments,
        "association": hopfield.associate(torch.randn(2, 5, 8)),
        "report": report,
        "claim": claim,
        "entry": entry,
        "result": claim.experiment(claims.Trial(0, quick=True)),
        "trial": claims.Trial(0),
        "outcome": Outcome(torch.zeros(30, dtype=torch.long)),
    }


def short(text):
    lines = text.splitlines()
    assert not re.search(r"0x[0-9a-f]{6,}|object at|<function|<bound", text), text
    assert len(lines) <= 8, text
    assert all(len(line) <= 140 for line in lines), text
    return True


def test_results_say_what_they_are_in_a_line_or_a_few():
    for name, result in results().items():
        text = repr(result)
        assert text.startswith((type(result).__name__, "30 of 30 converged")), name
        assert short(text), name


def test_a_repr_computes_nothing():
    x = torch.randn(5, 3, requires_grad=True)
    a = cm.attend(x, x)
    assert repr(a) == "Attended(mean (5, 3) float32; computed: nothing yet)"
    assert a._kept == {}
    post = cm.filtering.filter(one_mode(), torch.randn(9, 1))
    smoothed = cm.filtering.smooth(post.model, post)
    before = set(post._kept), set(smoothed._kept)
    _ = repr(post), repr(smoothed)
    assert (set(post._kept), set(smoothed._kept)) == before


def test_values_are_written_where_they_are_few_and_at_hand():
    few = cm.attend(torch.zeros(1, 2), torch.zeros(4, 2)).top_keys(2)
    assert repr(few) == "TopKeys(weights=tensor([[0.2500, 0.2500]]), indices=tensor([[0, 1]]))"
    many = cm.attend(torch.zeros(9, 2), torch.zeros(4, 2)).top_keys(2)
    assert repr(many) == "TopKeys(weights=(9, 2) float32, indices=(9, 2) int64)"
    assert described(torch.zeros(2, device="meta")) == "(2,) float32 meta"
    assert described(lambda: 0).endswith("<lambda>")
    assert described({"a": 1, "b": torch.zeros(99)}) == "{a, b}"
    assert described("x" * 500) == "'" + "x" * 55 + "...'"
    assert described((torch.ones(1), 2.0)) == "(tensor([1.]), 2.0)"


def told(x):
    """Reprs of results made of x alone."""
    a = cm.attend(x, x)
    run = cm.dynamics.Trajectory(x[:, 0], x[None], {}, x.sum())
    return [a, a.top_keys(1), run, cm.Memory(x).retrieve(x), cm.Empirical(x)]


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "meta", "fake"])
def test_reprs_work_in_transforms_and_without_values(transform):
    x = torch.randn(2, 5, 3)
    seen = []

    def look(x):
        seen.extend(repr(each) for each in told(x))
        return x.sum()

    if transform == "vmap":
        torch.func.vmap(look)(x)
    elif transform == "grad":
        torch.func.grad(look)(x[0])
    elif transform == "jvp":
        torch.func.jvp(look, (x[0],), (x[0],))
    elif transform == "meta":
        meta = x.to("meta")
        seen += [repr(cm.Attended.from_lse(meta, meta[..., 0])), described(meta)]
        seen += [repr(Outcome(torch.zeros(3, dtype=torch.long, device="meta")))]
    else:
        with FakeTensorMode() as mode:
            fake, small = mode.from_tensor(x), torch.zeros(2)
            seen += [repr(cm.attend(fake, fake)), described(fake), described(small)]
    assert len(seen) >= 3
    assert all(short(text) for text in seen)
    if transform == "vmap":
        assert any(text.startswith("Retrieval(state (5, 3) float32") for text in seen)


def test_long_fields_break_into_lines():
    class Many:
        def __init__(self):
            for i in range(9):
                setattr(self, f"name_of_a_field_{i}", torch.zeros(99))

        __repr__ = described_fields

    text = repr(Many())
    assert short(text)
    assert text.startswith("Many(name_of_a_field_0=(99,) float32, name_of_a_field_1")
    assert 3 <= len(text.splitlines()) <= 5
    assert text.endswith("name_of_a_field_8=(99,) float32)")
