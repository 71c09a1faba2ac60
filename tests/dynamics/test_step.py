"""`step`, `simulate` and the contractions against dense formulas and torch's own layers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.func import jacrev

import cumulant as cm

D = cm.dynamics
DOUBLE = torch.float64


def cloud(*shape):
    return torch.randn(*shape, dtype=DOUBLE)


def dense(x, y, beta=1.0, Wq=None, Wk=None, Wv=None, causal=False):
    one = torch.eye(x.shape[-1], dtype=x.dtype)
    q, k, v = (z @ (one if W is None else W) for z, W in ((x, Wq), (y, Wk), (y, Wv)))
    scores = beta * q @ k.mT
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_step_is_the_dense_formula(batch, causal):
    x = cloud(*batch, 7, 4)
    W = [cloud(4, 5), cloud(4, 5), cloud(4, 4)]
    ours = D.step(
        x,
        beta=0.7,
        step_size=0.3,
        is_causal=causal,
        query_weight=W[0],
        key_weight=W[1],
        value_weight=W[2],
    )
    torch.testing.assert_close(ours, x + 0.3 * dense(x, x, 0.7, *W, causal))


@pytest.mark.parametrize("shared", [False, True])
def test_fixed_patterns(shared):
    x, y = cloud(3, 5, 4), cloud(*(() if shared else (3,)), 6, 4)
    torch.testing.assert_close(D.step(x, patterns=y, beta=2.0), x + dense(x, y, 2.0))


def test_beta_may_differ_from_cloud_to_cloud_and_zero_is_uniform():
    x = cloud(3, 5, 4)
    beta = torch.tensor([0.0, 1.0, 4.0], dtype=DOUBLE)[:, None, None]
    ours = D.step(x, beta=beta)
    torch.testing.assert_close(ours, x + dense(x, x, beta))
    torch.testing.assert_close(ours[0], x[0] + x[0].mean(0))
    torch.testing.assert_close(D.step(x[0], beta=0.0), ours[0])


def test_step_is_parallel_gradient_ascent_on_the_log_normalizer():
    """T13: with the measure frozen, attention is the gradient of G(beta x) / beta."""
    x, beta = cloud(6, 3), 1.7
    g = lambda z: torch.logsumexp(beta * z @ x.mT, -1).sum() / beta
    torch.testing.assert_close(D.step(x, beta=beta, step_size=0.5), x + 0.5 * torch.func.grad(g)(x))


def test_the_joint_field_is_not_a_gradient():
    """T13: its Jacobian in all points at once is not symmetric."""
    x = cloud(4, 2)
    J = jacrev(lambda z: (D.step(z.reshape(4, 2)) - z.reshape(4, 2)).flatten())(x.flatten())
    assert (J - J.mT).abs().max() > 0.1


def test_a_gate_is_a_step_size_of_each_point():
    x, gate = cloud(5, 3), torch.rand(5, 1, dtype=DOUBLE)
    torch.testing.assert_close(D.step(x, step_size=gate), x + gate * dense(x, x))


def test_derivatives_through_a_step():
    x, W = cloud(4, 3).requires_grad_(), cloud(3, 3).requires_grad_()
    step = lambda x, W: D.step(x, value_weight=W, contraction=D.LayerNorm(), beta=0.5)
    assert torch.autograd.gradcheck(step, (x, W))
    assert torch.autograd.gradgradcheck(step, (x, W))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
def test_precision_comes_back(kind):
    x = torch.randn(5, 3).to(kind)
    out = D.step(x, contraction=D.Sphere())
    assert out.dtype == kind
    wide = D.step(x.double(), contraction=D.Sphere())
    torch.testing.assert_close(out.double(), wide, atol=2 * torch.finfo(kind).eps, rtol=0)


def test_layer_norm_is_torchs():
    x, gain, bias = cloud(5, 4), cloud(4), cloud(4)
    torch.testing.assert_close(D.LayerNorm()(x), F.layer_norm(x, (4,), eps=0))
    ours = D.LayerNorm(gain, bias, epsilon=1e-5)(x)
    torch.testing.assert_close(ours, F.layer_norm(x, (4,), gain, bias, eps=1e-5))
    torch.testing.assert_close(D.RMSNorm(gain)(x), F.rms_norm(x, (4,), gain, eps=0))
    torch.testing.assert_close(D.Sphere()(x), F.normalize(x, dim=-1))


def test_a_learned_gain_learns():
    gain = torch.ones(4, dtype=DOUBLE, requires_grad=True)
    D.simulate(cloud(5, 4), 3, contraction=D.LayerNorm(gain)).final.sum().backward()
    assert gain.grad.abs().max() > 0


def test_torchs_own_module_is_a_contraction():
    x, norm = torch.randn(5, 4), torch.nn.LayerNorm(4)
    torch.testing.assert_close(D.step(x, contraction=norm), norm(D.step(x)))


@pytest.mark.parametrize("radius", [0.5, 3.0])
def test_singular_values_of_the_contractions(radius):
    """T15: 1/|x| on the sphere, sqrt(d)/|x - mean| for layer norm; zero along what they remove."""
    d = 5
    x = radius * F.normalize(cloud(d), dim=0)
    sphere = torch.linalg.svdvals(jacrev(D.Sphere())(x[None])[0, :, 0])
    torch.testing.assert_close(sphere, torch.tensor([1 / radius] * 4 + [0.0], dtype=DOUBLE))
    norm = torch.linalg.svdvals(jacrev(D.LayerNorm())(x[None])[0, :, 0])
    size = math.sqrt(d) / float((x - x.mean()).norm())
    torch.testing.assert_close(norm, torch.tensor([size] * 3 + [0.0] * 2, dtype=DOUBLE))
    rms = torch.linalg.svdvals(jacrev(D.RMSNorm())(x[None])[0, :, 0])
    size = math.sqrt(d) / radius
    torch.testing.assert_close(rms, torch.tensor([size] * 4 + [0.0], dtype=DOUBLE))


def test_whitening_is_the_symmetric_root():
    x = cloud(2, 50, 4) @ cloud(4, 4) + 3
    away = x - x.mean(-2, keepdim=True)
    values, vectors = torch.linalg.eigh(away.mT @ away / 50)
    root = (vectors * values.rsqrt()[..., None, :]) @ vectors.mT
    torch.testing.assert_close(D.Whiten()(x), away @ root, atol=1e-8, rtol=1e-8)


def test_whitening_of_a_nearly_flat_cloud():
    x = cloud(200, 3) * torch.tensor([1.0, 1e-2, 1e-5], dtype=DOUBLE)
    y = D.Whiten()(x)
    torch.testing.assert_close(y.mT @ y / 200, torch.eye(3, dtype=DOUBLE), atol=1e-6, rtol=0)


def test_whitening_has_derivatives_where_eigenvalues_coincide():
    x = D.Whiten()(cloud(6, 2)).requires_grad_()
    assert torch.autograd.gradcheck(D.Whiten(), (x,))
    assert torch.autograd.gradgradcheck(D.Whiten(), (x,))


def test_simulate_repeats_step_and_keeps_what_it_should():
    x = cloud(2, 6, 3)
    run = D.simulate(x, 7, beta=0.5, step_size=0.25, contraction=D.Sphere())
    assert run.states.shape == (8, 2, 6, 3)
    torch.testing.assert_close(run.times, 0.25 * torch.arange(8, dtype=DOUBLE))
    assert torch.equal(run.states[0], x)
    y = x
    for k in range(1, 8):
        y = D.step(y, beta=0.5, step_size=0.25, contraction=D.Sphere())
        torch.testing.assert_close(run.states[k], y)
    some = D.simulate(x, 7, beta=0.5, step_size=0.25, contraction=D.Sphere(), every=3)
    torch.testing.assert_close(some.states, run.states[[0, 3, 6, 7]])
    assert run.observables["norm"].shape == (8, 2)


def test_simulate_has_gradients():
    x = cloud(4, 2).requires_grad_()
    run = lambda x: D.simulate(x, 3, contraction=D.Sphere(), step_size=0.5).final
    assert torch.autograd.gradcheck(run, (x,))


def test_own_observables():
    run = D.simulate(cloud(5, 2), 2, observables={"first": lambda x: x[..., 0, 0]})
    torch.testing.assert_close(run.observables["first"], run.states[:, 0, 0])


def test_growth_beyond_the_numbers_is_a_time_not_nan():
    x = torch.randn(2, 5, 2)
    x[0] *= 1e17
    run = D.simulate(x, 300)
    assert run.states.isfinite().all()
    first, second = run.blow_up_time.tolist()
    assert 1 < first < second < 150
    assert len(run.times) == int(second)
    k = int(first)
    assert torch.equal(run.states[k, 0], run.states[k - 1, 0])
    assert not torch.equal(run.states[k, 1], run.states[k - 1, 1])
    assert D.simulate(x, 5, contraction=D.Sphere()).blow_up_time.isinf().all()


def test_a_hundred_thousand_points_step():
    """The scores alone would be 40 GB."""
    x = torch.randn(100_000, 3)
    chosen = torch.arange(0, 100_000, 9973)
    out = D.step(x, contraction=D.Sphere())
    exact = x.double()[chosen]
    exact = F.normalize(exact + dense(exact, x.double()), dim=-1)
    torch.testing.assert_close(out[chosen].double(), exact, atol=2e-5, rtol=0)
