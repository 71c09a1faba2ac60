"""Hopfield layers against the same mathematics in plain torch, and against multi-head attention."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import cumulant as cm
from cumulant.nn import Hopfield, HopfieldLookup, HopfieldPooling

PLAIN = {
    **dict.fromkeys(("norm_state", "norm_stored", "norm_value"), False),
    **dict.fromkeys(("project_state", "project_stored", "project_value"), False),
    "project_output": False,
}


def reference(layer, state, stored, value, mask=None):
    """Ramsauer et al.: project, update with softmax(beta q k') k, read values last."""

    def heads(x, norm, project, size):
        x = x if norm is None else norm(x)
        if project is None:
            return torch.stack([x] * layer.heads, 1)
        return project(x).view(*x.shape[:-1], layer.heads, size).permute(0, 2, 1, 3)

    q = heads(state, layer.norm_state, layer.project_state, layer.head_size)
    k = heads(stored, layer.norm_stored, layer.project_stored, layer.head_size)
    v = heads(value, layer.norm_value, layer.project_value, layer.read_size)
    if layer.value_through_stored:
        x = value if layer.norm_value is None else layer.norm_value(value)
        v = heads(layer.project_stored(x), None, layer.project_value, layer.read_size)
    if layer.norm_space is not None:
        q, k = layer.norm_space(q), layer.norm_space(k)
    if layer.bias_stored is not None:
        k = torch.cat([k, layer.bias_stored.expand(len(k), -1, -1, -1)], 2)
        v = torch.cat([v, layer.bias_value.expand(len(v), -1, -1, -1)], 2)
    if layer.zero_pattern:
        k = torch.cat([k, torch.zeros_like(k[:, :, :1])], 2)
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
    if mask is not None:
        mask = nn.functional.pad(mask, (0, k.shape[2] - mask.shape[-1]), value=True)
    beta = layer.beta[:, None, None]
    for step in range(layer.steps):
        scores = beta * (q @ k.mT)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        A = scores.softmax(-1)
        q = A @ (v if step == layer.steps - 1 else k)
    out = q.permute(0, 2, 1, 3).flatten(2)
    return out if layer.project_output is None else layer.project_output(out)


OPTIONS = {
    "plain": {},
    "steps": {"steps": 3},
    "sizes": {"stored_size": 6, "value_size": 5, "head_size": 7, "read_size": 2, "output_size": 9},
    "beta": {"beta": 0.3, "steps": 2},
    "beta of each head": {"beta": torch.tensor([0.1, 2.0]), "steps": 2},
    "learned beta": {"learn_beta": True},
    "norm in the space": {"norm_space": True, "steps": 2},
    "without norms": dict.fromkeys(("norm_state", "norm_stored", "norm_value"), False),
    "without biases": {"bias": False},
    "bias pattern": {"bias_pattern": True, "steps": 2},
    "zero pattern": {"zero_pattern": True, "steps": 2},
    "both patterns": {"zero_pattern": True, "bias_pattern": True},
    "values through stored": {"value_through_stored": True},
    "static states": {"project_state": False},
    "static stored": {"project_stored": False},
    "static values": {"project_value": False},
    "no output projection": {"project_output": False},
    "raw": PLAIN,
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name, masked):
    layer = Hopfield(8, heads=2, **OPTIONS[name]).double()
    state = torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True)
    stored = torch.randn(3, 6, layer.stored_size, dtype=torch.float64)
    value = torch.randn(3, 6, layer.value_size, dtype=torch.float64)
    mask = None
    if masked:
        mask = (torch.rand(3, 1, 4, 6) < 0.7) | (torch.arange(6) == 0)
    ours = layer(state, stored, value, mask=mask)
    theirs = reference(layer, state, stored, value, mask)
    assert ours.shape == (3, 4, layer.output_size)
    torch.testing.assert_close(ours, theirs)
    leaves = [state, *(p for p in layer.parameters() if p.requires_grad)]
    first = [
        torch.autograd.grad((x**2).sum(), leaves, create_graph=True, allow_unused=True)
        for x in (ours, theirs)
    ]
    for a, b in zip(*first, strict=True):
        assert (a is None) == (b is None) or float((a if b is None else b).abs().max()) == 0
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
    second = [torch.autograd.grad((x[0] ** 2).sum(), state)[0] for x in first]
    torch.testing.assert_close(*second, rtol=1e-7, atol=1e-8)


def test_one_step_is_torchs_multi_head_attention():
    theirs = nn.MultiheadAttention(16, 4, batch_first=True)
    off = dict.fromkeys(("norm_state", "norm_stored", "norm_value"), False)
    ours = Hopfield(16, heads=4, **off)
    with torch.no_grad():
        layers = (ours.project_state, ours.project_stored, ours.project_value)
        for layer, w, b in zip(
            layers, theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True
        ):
            layer.weight.copy_(w)
            layer.bias.copy_(b)
        ours.project_output.load_state_dict(theirs.out_proj.state_dict())
    x, y = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    padded = torch.zeros(2, 7, dtype=torch.bool)
    padded[1, 4:] = True
    expected, _ = theirs(x, y, y, key_padding_mask=padded)
    torch.testing.assert_close(ours(x, y, mask=~padded[:, None, None, :]), expected)


class TestEnergy:
    def test_is_that_of_a_memory(self):
        layer = Hopfield(6, heads=1, beta=0.7, steps=2, **PLAIN).double()
        x, y = torch.randn(1, 4, 6).double(), torch.randn(1, 9, 6).double()
        done = layer.associate(x, y)
        memory = cm.Memory(y[0], beta=float(layer.beta))
        found = memory.retrieve(x[0], 2)
        torch.testing.assert_close(done.state[0, 0], found.state)
        torch.testing.assert_close(done.energy[0, 0], found.energy)
        torch.testing.assert_close(done.output[0], found.state)

    def test_hidden_patterns_do_not_count(self):
        layer = Hopfield(6, heads=2)
        x, y = torch.randn(2, 4, 6), torch.randn(2, 9, 6)
        y[:, 5:] = y[:, :4]  # so that the largest norm is the same
        mask = (torch.arange(9) < 5)[None, None, None, :]
        a = layer.associate(x, y, mask=mask)
        b = layer.associate(x, y[:, :5])
        torch.testing.assert_close(a.energy, b.energy)
        assert (a.energy >= 0).all()

    def test_falls_with_steps(self):
        x, y = torch.randn(2, 4, 6), torch.randn(2, 9, 6)
        layer = Hopfield(6, heads=2)
        energies = []
        for steps in (1, 2, 4, 8):
            layer.steps = steps
            energies.append(layer.associate(x, y).energy.detach())
        for a, b in itertools.pairwise(energies):
            assert (b <= a + 1e-5).all()

    def test_has_a_gradient(self):
        layer = Hopfield(6, heads=2, learn_beta=True)
        layer.associate(torch.randn(2, 4, 6)).energy.sum().backward()
        assert layer.log_beta.grad.abs().min() > 0


class TestSteps:
    def test_counted_exactly(self, monkeypatch):
        """k steps are k associations: not one more, not one fewer."""
        from cumulant.nn import hopfield

        calls = []
        original = hopfield.scaled_dot_product_attention
        monkeypatch.setattr(
            hopfield,
            "scaled_dot_product_attention",
            lambda *a, **k: calls.append(1) or original(*a, **k),
        )
        for steps in (1, 2, 5):
            calls.clear()
            done = Hopfield(6, steps=steps).associate(torch.randn(2, 4, 6))
            assert len(calls) == steps
            assert (done.steps == steps).all()

    def test_each_state_stops_by_itself(self):
        layer = Hopfield(6, heads=2, tol=1e-5, beta=1.5, **PLAIN)
        x, y = torch.randn(1, 10, 6), torch.randn(1, 9, 6)
        done = layer.associate(x, y)
        assert len(done.steps.unique()) > 1
        assert done.converged.all()
        capped = Hopfield(6, heads=2, tol=1e-5, steps=2, beta=1.5, **PLAIN).associate(x, y)
        assert not capped.converged.all()
        for i in range(10):
            alone = layer.associate(x[:, i : i + 1], y)
            assert torch.equal(alone.steps, done.steps[:, :, i : i + 1])
            torch.testing.assert_close(alone.output, done.output[:, i : i + 1])


def test_pooling():
    layer = HopfieldPooling(8, quantity=3, heads=2, steps=2).double()
    x = torch.randn(4, 6, 8).double()
    expected = reference(layer, layer.states.expand(4, -1, -1), x, x)
    torch.testing.assert_close(layer(x), expected)
    layer(x).sum().backward()
    assert layer.states.grad is not None
    shuffled = layer(x[:, torch.randperm(6)])
    torch.testing.assert_close(shuffled, expected)
    fixed = HopfieldPooling(8, learn_states=False)
    assert not fixed.states.requires_grad
    value = torch.randn(4, 6, 8).double()
    torch.testing.assert_close(
        layer(x, value=value), reference(layer, layer.states.expand(4, -1, -1), x, value)
    )


@pytest.mark.parametrize("separate", [False, True])
def test_lookup(separate):
    layer = HopfieldLookup(8, quantity=5, heads=2, separate_values=separate, learn_values=False)
    layer = layer.double()
    x = torch.randn(4, 6, 8).double()
    patterns = layer.patterns.expand(4, -1, -1)
    values = layer.values.expand(4, -1, -1) if separate else patterns
    torch.testing.assert_close(layer(x), reference(layer, x, patterns, values))
    layer(x).sum().backward()
    assert layer.patterns.grad is not None
    assert not separate or layer.values.grad is None


def test_compiled_and_checkpointed(tmp_path):
    torch._dynamo.reset()
    layer = Hopfield(8, heads=2, steps=3, learn_beta=True, zero_pattern=True)
    x = torch.randn(2, 5, 8)
    compiled = torch.compile(layer, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    compiled(x).sum().backward()
    assert layer.log_beta.grad is not None
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    again = Hopfield(8, heads=2, steps=3, learn_beta=True, zero_pattern=True)
    again.load_state_dict(torch.load(tmp_path / "layer.pt"))
    assert torch.equal(again(x), layer(x))


def test_dropout_in_training_alone():
    layer = Hopfield(8, heads=2, dropout=0.5)
    x = torch.randn(2, 5, 8)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_reads_of_what_a_layer_is():
    text = repr(Hopfield(8, heads=2, steps=3))
    assert "heads=2" in text
    assert "steps=3" in text


x = torch.randn(2, 5, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Hopfield(8, heads=3), "multiple of 3 heads"),
        (lambda: Hopfield(8, steps=0), "at least 1"),
        (lambda: Hopfield(8, beta=-1.0), "at least 0"),
        (lambda: Hopfield(8, heads=2, beta=torch.ones(3)), "each of 2 heads"),
        (lambda: Hopfield(8, dropout=2.0), "dropout"),
        (lambda: Hopfield(0), "state_size"),
        (lambda: Hopfield(8, project_state=False, head_size=4), "head_size"),
        (lambda: Hopfield(8, stored_size=4, project_state=False, project_stored=False), "be equal"),
        (lambda: Hopfield(8, project_value=False, read_size=3), "read_size"),
        (lambda: Hopfield(8, project_output=False, output_size=3), "output_size"),
        (lambda: Hopfield(8, value_through_stored=True, project_stored=False), "project_stored"),
        (lambda: Hopfield(8, value_through_stored=True, value_size=3), "value_size"),
        (lambda: Hopfield(8)(x[0]), r"x\[None\]"),
        (lambda: Hopfield(8)(x, x[:1]), "batch"),
        (lambda: Hopfield(8)(x, x, x[:, :2]), "length"),
        (lambda: Hopfield(8)(x[..., :3]), "state must have shape"),
        (lambda: Hopfield(8)(x, mask=torch.ones(3, 3).bool()), "mask must be"),
        (lambda: Hopfield(8)(x, mask=torch.ones(5, 5).long()), "mask must be"),
        (lambda: Hopfield(8, zero_pattern=True)(x, mask=torch.ones(3).bool()), "mask"),
        (lambda: HopfieldPooling(8)(x, x), "by name"),
        (lambda: HopfieldLookup(8)(x, x), "its own patterns"),
        (lambda: HopfieldLookup(8, quantity=0), "quantity"),
        (lambda: HopfieldLookup(8, value_size=3), "separate_values"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(cm.InputError, match=message):
        call()
