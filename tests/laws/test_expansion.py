"""T14: attention without weights and masks never brings two tokens of a cloud closer; with them it
can. T15 is in tests/dynamics/test_step.py, T30 in test_inverse_sublayer.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import jacrev

import cumulant as cm

D = cm.dynamics
DOUBLE = torch.float64

clouds = st.builds(
    lambda seed, n, d, size, shift: (
        size * torch.randn(n, d, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))
        + shift
    ),
    st.integers(0, 2**31),
    st.integers(2, 12),
    st.integers(1, 6),
    st.floats(0.01, 20),
    st.floats(-3, 3),
)
betas, steps = st.floats(0, 8), st.floats(0, 4)


def pairs(x):
    i, j = torch.triu_indices(len(x), len(x), 1)
    return (x[i] - x[j]).square().sum(-1)


@settings(deadline=None, max_examples=200)
@given(clouds, betas, steps)
def test_no_pair_gets_closer_and_none_expands_beyond_the_bound(x, beta, tau):
    y = D.step(x, beta=beta, step_size=tau)
    slack = 1e-9 * (1 + pairs(y).max())
    gradient = (y - x) / tau if tau > 0.1 else D.step(x, beta=beta) - x
    assert (pairs(y) >= pairs(x) + tau**2 * pairs(gradient) - slack).all()
    found = D.expansion(x, y)
    assert found.minimum >= 1 - 1e-7
    assert found.maximum <= D.expansion_bounds(x, beta=beta, step_size=tau).pairs * (1 + 1e-9)


@settings(deadline=None, max_examples=60)
@given(clouds, betas, steps)
def test_the_joint_bound_is_never_violated(x, beta, tau):
    J = jacrev(lambda z: D.step(z.reshape(x.shape), beta=beta, step_size=tau).flatten())(
        x.flatten()
    )
    assert torch.linalg.matrix_norm(J, 2) <= D.expansion_bounds(
        x, beta=beta, step_size=tau
    ).joint * (1 + 1e-9)


@settings(deadline=None, max_examples=60)
@given(clouds, st.floats(0, 3), st.floats(0, 3), st.integers(0, 1000))
def test_fixed_patterns_expand_too(patterns, beta, tau, seed):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(9, patterns.shape[-1], dtype=DOUBLE, generator=random)
    y = D.step(x, beta=beta, step_size=tau, patterns=patterns)
    assert D.expansion(x, y).minimum >= 1 - 1e-7


@settings(deadline=None, max_examples=60)
@given(clouds, st.integers(0, 1000))
def test_weights_expand_again_when_the_value_map_is_the_score_matrix(x, seed):
    """score y'Ax and values A'y make the field a gradient in x: in row weights W_v = W_k W_q'."""
    x = x / x.abs().max()
    d = x.shape[-1]
    random = torch.Generator().manual_seed(seed)
    Wq, Wk = torch.randn(2, d, 3, dtype=DOUBLE, generator=random)
    y = D.step(x, query_weight=Wq, key_weight=Wk, value_weight=Wk @ Wq.mT)
    assert D.expansion(x, y).minimum >= 1 - 1e-7


def test_weights_can_bring_tokens_closer():
    """A negative value map, or scores of another direction than the values."""
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=DOUBLE)
    closer = D.step(x, value_weight=-0.5 * torch.eye(2, dtype=DOUBLE))
    assert D.expansion(x, closer).maximum < 0.7
    backwards = D.step(x, query_weight=-torch.eye(2, dtype=DOUBLE), step_size=0.5)
    assert D.expansion(x, backwards).maximum < 0.7


def test_random_weights_contract_many_pairs():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(50, 8, dtype=DOUBLE, generator=random)
    W = torch.randn(3, 8, 8, dtype=DOUBLE, generator=random) / 8**0.5
    y = D.step(x, query_weight=W[0], key_weight=W[1], value_weight=W[2])
    below = (D.expansion(x, y).ratios < 1).double().mean()
    assert 0.05 < below < 0.95


def test_a_causal_mask_can_bring_tokens_closer():
    """The first token sees itself only, the second both: they are under different measures."""
    x = torch.tensor([[0.0], [1.0]], dtype=DOUBLE)
    y = D.step(x + 5, is_causal=True, beta=0.0)
    assert D.expansion(x, y).maximum == pytest.approx(1.5)
    x = torch.tensor([[-1.0], [-2.0]], dtype=DOUBLE)  # -1 -> -2, -2 -> -2 - (1 + 2)/2 = -3.5
    y = D.step(x.flip(0), is_causal=True, beta=0.0)  # -2 -> -4, -1 -> -1 - 1.5 = -2.5
    assert D.expansion(x.flip(0), y).maximum == pytest.approx(1.5)
    x = torch.tensor([[1.0], [1.2], [-5.0], [2.0]], dtype=DOUBLE)
    y = D.step(x, is_causal=True, beta=0.0)
    assert D.expansion(x, y).minimum < 0.9
    assert D.expansion(x, D.step(x, beta=0.0)).minimum >= 1 - 1e-12


def test_two_configurations_can_get_closer():
    """The whole map is not expansive: values of the others count too."""
    x = torch.tensor([[1.0], [-1.0]], dtype=DOUBLE)
    low = torch.linalg.svdvals(
        jacrev(lambda z: D.step(z.reshape(2, 1), beta=2.0, step_size=1.0).flatten())(x.flatten())
    )[-1]
    found = 1.0
    random = torch.Generator().manual_seed(0)
    for _ in range(200):
        x = 2 * torch.randn(3, 2, dtype=DOUBLE, generator=random)
        J = jacrev(lambda z: D.step(z.reshape(3, 2), beta=2.0).flatten())(x.flatten())
        found = min(found, torch.linalg.svdvals(J)[-1].item())
    assert min(found, low.item()) < 0.99


@settings(deadline=None, max_examples=60)
@given(clouds, betas)
def test_norms_do_not_fall_when_the_cloud_is_centred(x, beta):
    x = x - x.mean(0)
    y = D.step(x, beta=beta)
    assert (y.norm(dim=-1) >= x.norm(dim=-1) - 1e-9 * (1 + x.abs().max())).all()


def test_centring_is_not_preserved():
    x = torch.tensor([[2.0], [-1.0], [-1.0]], dtype=DOUBLE)
    assert D.step(x).mean().abs() > 0.04


def test_iterated_without_contraction_it_diverges():
    x = torch.randn(4, 6, 3, dtype=DOUBLE)
    run = D.simulate(x, 60)
    assert (run.observables["norm"][-1] > 1e10).all()


def test_local_lipschitz_is_the_largest_singular_value():
    x = torch.randn(5, 3, dtype=DOUBLE)
    f = lambda z: D.step(z, beta=1.5)
    J = jacrev(lambda z: f(z.reshape(5, 3)).flatten())(x.flatten())
    found = D.local_lipschitz(f, x, tol=1e-12, max_steps=5000)
    assert found.converged
    assert found.value.item() == pytest.approx(torch.linalg.matrix_norm(J, 2).item(), rel=1e-6)


def test_local_lipschitz_of_a_batch_and_of_other_shapes():
    A = torch.randn(4, 6, 3, dtype=DOUBLE)
    found = D.local_lipschitz(
        lambda x: (A @ x[..., None])[..., 0],
        torch.zeros(4, 3, dtype=DOUBLE),
        batch_dims=1,
        tol=1e-12,
        max_steps=5000,
    )
    torch.testing.assert_close(found.value, torch.linalg.matrix_norm(A, 2), rtol=1e-6, atol=0)
    scalar = D.local_lipschitz(torch.sin, torch.zeros(4, dtype=DOUBLE), batch_dims=1)
    torch.testing.assert_close(scalar.value, torch.ones(4, dtype=DOUBLE))
