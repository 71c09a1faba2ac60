"""beta = 0 is uniform attention, in memories and layers, and small beta comes there (T19)."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch

import cumulant as cm
from cumulant.nn import Hopfield

DOUBLE = torch.float64


def draw(*shape, seed=0):
    return torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def exact_energy(patterns, state, beta):
    """E with 60 digits; at beta = 0 its limit |xi|^2 / 2 - <mean, xi> + M^2 / 2."""
    with mpmath.workdps(60):
        rows = [[mpmath.mpf(v) for v in row] for row in patterns.double().tolist()]
        most = max(mpmath.fdot(row, row) for row in rows)
        out = []
        for xi in state.double().tolist():
            scores = [mpmath.fdot(row, xi) for row in rows]
            n = len(scores)
            if beta == 0:
                tilted = mpmath.fsum(scores) / n
            else:
                total = mpmath.fsum(mpmath.exp(mpmath.mpf(beta) * s) for s in scores)
                tilted = mpmath.log(total / n) / beta
            out.append(float(mpmath.fdot(xi, xi) / 2 - tilted + most / 2))
    return torch.tensor(out, dtype=DOUBLE)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize(
    "beta", [0.0, 1e-30, 1e-12, 1e-7, 1e-4, 1e-3, 3e-3, 0.01, 0.02, 0.05, 0.1, 1.0]
)
def test_energy_at_every_small_beta(beta, dtype):
    """No digits are lost on the way to 0, for states of every length."""
    patterns = draw(40, 3).to(dtype)
    lengths = torch.tensor([0.0, 1e-3, 0.1, 1.0, 1.0, 3.0, 10.0, 30.0]).to(dtype)
    state = draw(8, 3, seed=1).to(dtype) * lengths[:, None]
    expected = exact_energy(patterns, state, beta)
    for given in (beta, torch.tensor(beta, dtype=dtype)):
        memory = cm.Memory(patterns, beta=given)
        if isinstance(given, torch.Tensor):
            expected = exact_energy(patterns, state, float(given))
        slack = 40 * torch.finfo(dtype).eps
        torch.testing.assert_close(memory.energy(state).double(), expected, rtol=slack, atol=0)


def test_retrieval_goes_to_the_mean_pattern():
    patterns, state, values = draw(7, 3), draw(5, 3, seed=1), draw(7, 2, seed=2)
    memory = cm.Memory(patterns, beta=0.0, values=values)
    found = memory.retrieve(state, tol=1e-12)
    torch.testing.assert_close(found.state, patterns.mean(0).expand(5, 3))
    torch.testing.assert_close(found.value, values.mean(0).expand(5, 2))
    assert found.converged.all()
    assert (found.steps == 2).all()
    assert (found.energy <= memory.energy(state)).all()
    # the error bound of T21 is 2 (N - 1) M there, and holds
    bound = memory.error_bound(state)
    torch.testing.assert_close(bound, 12 * patterns.norm(dim=-1).max().expand(5))
    away = (memory.retrieve(state).state - patterns[memory.retrieve(state).index]).norm(dim=-1)
    assert (away <= bound).all()


def test_derivatives_at_zero_are_cumulants():
    """E = -(k1 + beta k2 / 2 + beta^2 k3 / 6 + ...) + ..., k_n the cumulants of the scores."""
    patterns, state = draw(9, 3), draw(4, 3, seed=1)
    s = state @ patterns.mT
    away = s - s.mean(-1, keepdim=True)
    k2, k3 = away.square().mean(-1), away.pow(3).mean(-1)
    k4 = away.pow(4).mean(-1) - 3 * k2.square()
    beta = torch.zeros((), dtype=DOUBLE, requires_grad=True)
    xi = state.clone().requires_grad_()
    total = cm.Memory(patterns, beta=beta).energy(xi).sum()
    by_state, slope = torch.autograd.grad(total, (xi, beta), create_graph=True)
    torch.testing.assert_close(by_state, state - patterns.mean(0))
    torch.testing.assert_close(slope, -k2.sum() / 2)
    (second,) = torch.autograd.grad(slope, beta, create_graph=True)
    torch.testing.assert_close(second, -k3.sum() / 3)
    (third,) = torch.autograd.grad(second, beta)
    torch.testing.assert_close(third, -k4.sum() / 4)


def test_one_head_of_several():
    patterns, state = draw(3, 6, 4), draw(3, 5, 4, seed=1)
    beta = torch.tensor([0.7, 0.0, 2.0], dtype=DOUBLE)
    memory = cm.Memory(patterns, beta=beta)
    found, energies = memory.retrieve(state, 2), memory.energy(state)
    for head, b in enumerate(beta.tolist()):
        alone = cm.Memory(patterns[head], beta=b).retrieve(state[head], 2)
        torch.testing.assert_close(found.state[head], alone.state)
        expected = exact_energy(patterns[head], state[head], b)
        torch.testing.assert_close(energies[head], expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.state[1], patterns[1].mean(0).expand(5, 4))


def test_fixed_and_changing_patterns_agree_after_one_uniform_step():
    both = cm.memory.compare(draw(6, 2), 3, beta=0.0)
    mean = draw(6, 2).mean(0).expand(3, 6, 2)
    for run in (both.fixed, both.changing):
        torch.testing.assert_close(run.states[1:], mean)


def test_a_beta_that_rounds_to_zero_is_zero():
    memory = cm.Memory(draw(4, 2).float(), beta=torch.tensor(1e-60, dtype=DOUBLE))
    torch.testing.assert_close(
        memory.retrieve(draw(1, 2).float()).state, memory.patterns.mean(0)[None]
    )


def test_it_is_saved(tmp_path):
    cm.Memory(draw(4, 2), beta=0.0).save(tmp_path / "m")
    assert cm.Memory.load(tmp_path / "m").beta == 0


@pytest.mark.parametrize("beta", [0.0, torch.tensor([0.0, 1.0])])
def test_what_needs_a_positive_beta_says_so(beta):
    patterns = torch.randn(2, 4, 3) if isinstance(beta, torch.Tensor) else torch.randn(4, 3)
    with pytest.raises(cm.InputError, match="above 0"):
        cm.Memory(patterns, beta=beta).mixture()
    with pytest.raises(cm.InputError, match="above 0"):
        cm.memory.capacity(20, beta=0.0)
    with pytest.raises(cm.InputError, match="above 0"):
        cm.dynamics.block_gibbs(torch.randn(4, 3), 2, beta=0.0)
    with pytest.raises(cm.InputError, match="learned beta must start above 0"):
        Hopfield(8, beta=0.0, learn_beta=True)


@pytest.mark.parametrize("masked", [False, True])
def test_a_layer_with_a_head_at_zero(masked):
    """That head reads the mean of what it sees, whatever the state."""
    torch.manual_seed(0)
    layer = Hopfield(8, heads=2, beta=torch.tensor([0.0, 0.5]), steps=2).double()
    state, stored = draw(3, 4, 8), draw(3, 6, 8, seed=1)
    seen = torch.ones(4, 6).bool()
    if masked:
        seen = seen.tril()
    found = layer.associate(state, stored, mask=seen if masked else None)
    keys = layer.project_stored(layer.norm_stored(stored) if layer.norm_stored else stored)
    keys = keys.unflatten(-1, (2, 4)).transpose(1, 2)[:, 0]
    mean = (seen.double() / seen.sum(-1, keepdim=True)) @ keys
    torch.testing.assert_close(found.state[:, 0], mean)
    longest = keys.norm(dim=-1)[:, None].expand(3, 4, 6).masked_fill(~seen, -math.inf).amax(-1)
    # at its own mean the energy is (M^2 - |mean|^2) / 2
    expected = (longest.square() - mean.square().sum(-1)) / 2
    torch.testing.assert_close(found.energy[:, 0], expected)
    assert (found.energy >= 0).all()


def test_attention_with_scale_zero():
    q, k, v = draw(2, 5, 4), draw(2, 6, 4, seed=1), draw(2, 6, 3, seed=2)
    seen = torch.ones(5, 6).bool().tril()
    p = (seen.double() / seen.sum(-1, keepdim=True)).expand(2, 5, 6)
    for scale in (0.0, torch.zeros(2, 1, 1, dtype=DOUBLE)):
        a = cm.attend(q, k, v, attn_mask=seen, scale=scale)
        torch.testing.assert_close(a.mean, p @ v)
        torch.testing.assert_close(a.key_mean, p @ k)
        torch.testing.assert_close(a.entropy, seen.sum(-1).double().log().expand(2, 5))
        torch.testing.assert_close(a.log_normalizer, a.entropy)
        torch.testing.assert_close(a.score_variance, torch.zeros(2, 5, dtype=DOUBLE))
        out = cm.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
        torch.testing.assert_close(out, p @ v)


def test_dynamics_at_beta_zero():
    x = draw(6, 3)
    torch.testing.assert_close(cm.dynamics.step(x, beta=0.0), x + x.mean(0))
    patterns = draw(5, 3, seed=1)
    y = cm.dynamics.step(x, beta=0.0, patterns=patterns)
    torch.testing.assert_close(y, x + patterns.mean(0))
    torch.testing.assert_close(cm.dynamics.inverse(y, beta=0.0, patterns=patterns), x)
    assert float(cm.dynamics.expansion_bounds(x, beta=0.0).pairs) == 1
