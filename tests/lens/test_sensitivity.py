"""Sensitivity of outputs to weights, against whole Jacobians and real perturbations (T23)."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from torch import nn
from torch.func import functional_call, jacrev

import cumulant as cm
from cumulant.lens.sensitivity import Group, sensitivity
from cumulant.lens.weights import Block, projections

DOUBLE = torch.float64


class Tiny(nn.Module):
    """One head of attention with its own four matrices."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(5, 5, bias=False, dtype=DOUBLE) for _ in "qkvo")

    def forward(self, x):
        weights = (3 * self.q(x) @ self.k(x).mT).softmax(-1)
        return x + self.o(weights @ self.v(x))


def blocks(*layers):
    return [Block(layer.weight) for layer in layers]


def exact(model, run, names):
    """sqrt(sum of |W|^2/n |J_W|^2) / |y| from the full Jacobian."""
    weights = {n: p.detach() for n, p in model.named_parameters()}
    y = run(weights)
    jacobian = jacrev(run)(weights)
    parts = [weights[n].square().mean() * jacobian[n].square().sum() for n in names]
    return float(torch.stack(parts).sum().sqrt() / y.norm())


def test_against_the_full_jacobian():
    model, x = Tiny(), torch.randn(7, 5, dtype=DOUBLE)
    group = Group(3, blocks(model.q, model.k), blocks(model.v, model.o))
    (found,) = sensitivity(model, lambda: model(x), [group], probes=1000)

    def run(weights):
        return functional_call(model, weights, (x,))

    assert found.layer == 3
    assert found.query_key == pytest.approx(exact(model, run, ["q.weight", "k.weight"]), rel=0.05)
    assert found.value_output == pytest.approx(
        exact(model, run, ["v.weight", "o.weight"]), rel=0.05
    )


def test_against_perturbed_weights():
    """Weights really changed by a ten-thousandth move the output by that times the figure."""
    model, x, size = Tiny(), torch.randn(7, 5, dtype=DOUBLE), 1e-4
    group = Group(0, blocks(model.q, model.k), blocks(model.v, model.o))
    (found,) = sensitivity(model, lambda: model(x), [group], probes=500)
    weights = {n: p.detach() for n, p in model.named_parameters()}
    y = functional_call(model, weights, (x,))
    for names, figure in ((("q", "k"), found.query_key), (("v", "o"), found.value_output)):
        squares = []
        for _ in range(400):
            moved = dict(weights)
            for name in names:
                w = weights[f"{name}.weight"]
                noise = torch.randn_like(w) * w.norm() / math.sqrt(w.numel())
                moved[f"{name}.weight"] = w + size * noise
            squares.append((functional_call(model, moved, (x,)) - y).square().sum())
        measured = float(torch.stack(squares).mean().sqrt() / y.norm()) / size
        assert figure == pytest.approx(measured, rel=0.1)


def test_scaling_a_matrix_and_its_partner_changes_nothing():
    """W_q -> 10 W_q, W_k -> W_k / 10 is the same function, and relative noise is the same."""
    model, x = Tiny(), torch.randn(7, 5, dtype=DOUBLE)
    group = Group(0, blocks(model.q, model.k), blocks(model.v, model.o))
    (before,) = sensitivity(model, lambda: model(x), [group])
    with torch.no_grad():
        model.q.weight.mul_(10)
        model.k.weight.div_(10)
    (after,) = sensitivity(model, lambda: model(x), [group])
    assert after.query_key == pytest.approx(before.query_key, rel=1e-9)


def test_leaves_everything_as_it_was():
    model, x = Tiny(), torch.randn(3, 5, dtype=DOUBLE)
    model.v.weight.requires_grad_(False)
    model.q.weight.grad = torch.ones_like(model.q.weight)
    group = Group(0, blocks(model.q, model.k), blocks(model.v, model.o))
    with torch.no_grad():
        sensitivity(model, lambda: model(x), [group])
    needs = [p.requires_grad for p in (model.q.weight, model.k.weight, model.v.weight)]
    assert needs == [True, True, False]
    assert torch.equal(model.q.weight.grad, torch.ones_like(model.q.weight))
    assert model.k.weight.grad is None
    with pytest.raises(RuntimeError, match="boom"):
        sensitivity(model, lambda: (_ for _ in ()).throw(RuntimeError("boom")), [group])
    assert not model.v.weight.requires_grad


def test_fused_weights_are_told_apart():
    """GPT-2's one matrix gives the figures of the Jacobian's own columns."""
    config = transformers.GPT2Config(
        vocab_size=11, n_embd=8, n_layer=2, n_head=2, n_positions=8, attn_implementation="eager"
    )
    model = transformers.GPT2Model(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    ids = torch.tensor([[1, 5, 2]])
    found = [projections(b.attn, heads=2, key_heads=2) for b in model.h]
    groups = [Group(i, p.query_key, p.value_output) for i, p in enumerate(found)]
    results = sensitivity(model, lambda: model(ids).last_hidden_state, groups, probes=400)
    weights = {n: p.detach() for n, p in model.named_parameters()}
    for i, result in enumerate(results):
        name, out = f"h.{i}.attn.c_attn.weight", f"h.{i}.attn.c_proj.weight"

        def run(own):
            return functional_call(model, {**weights, **own}, (ids,)).last_hidden_state

        own = {n: weights[n] for n in (name, out)}
        jacobian = jacrev(run)(own)
        share = []
        for columns in (slice(0, 8), slice(8, 16), slice(16, 24)):
            part = jacobian[name][..., columns].square().sum()
            share.append(weights[name][:, columns].square().mean() * part)
        share.append(weights[out].square().mean() * jacobian[out].square().sum())
        size = run({}).norm()
        expected = [math.sqrt(share[a] + share[a + 1]) / size for a in (0, 2)]
        assert result.query_key == pytest.approx(float(expected[0]), rel=0.1)
        assert result.value_output == pytest.approx(float(expected[1]), rel=0.1)


def test_what_cannot_be_answered():
    model, x = Tiny(), torch.randn(3, 5, dtype=DOUBLE)
    group = Group(0, blocks(model.q), [])
    assert sensitivity(model, lambda: model(x), [Group(4, [], [])]) == [(4, None, None)]
    assert sensitivity(model, lambda: model(x), [group])[0].value_output is None
    with pytest.raises(cm.InputError, match="no_grad"):
        sensitivity(model, torch.no_grad()(lambda: model(x)), [group])
    with pytest.raises(cm.InputError, match="probes"):
        sensitivity(model, lambda: model(x), [group], probes=0)
