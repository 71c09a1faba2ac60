"""T30: a cross-attention sublayer can be run backwards, by a proximal map that is 1-Lipschitz."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

import cumulant as cm

D = cm.dynamics
DOUBLE = torch.float64


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 2**31),
    st.integers(1, 10),
    st.integers(1, 5),
    st.floats(0, 5),
    st.sampled_from([0.0, 1e-300, 1e-20, 1e-8]) | st.floats(1e-3, 4),
    st.floats(0.1, 20),
)
def test_inverse_undoes_the_step(seed, n, d, beta, tau, size):
    random = torch.Generator().manual_seed(seed)
    patterns = size * torch.randn(n, d, dtype=DOUBLE, generator=random)
    x = torch.randn(7, d, dtype=DOUBLE, generator=random)
    y = D.step(x, patterns=patterns, beta=beta, step_size=tau)
    back = D.inverse(y, patterns=patterns, beta=beta, step_size=tau)
    torch.testing.assert_close(back, x, atol=1e-7 * (1 + size**2), rtol=1e-7)


def test_inverse_is_the_proximal_map():
    patterns, y = 3 * torch.randn(6, 2, dtype=DOUBLE), torch.randn(1, 2, dtype=DOUBLE)
    beta, tau = 2.0, 1.5

    def objective(z):
        z = torch.from_numpy(z)
        height = torch.logsumexp(beta * patterns @ z, 0) / beta
        return (0.5 * (z - y[0]).square().sum() + tau * height).item()

    best = minimize(
        objective, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-14}
    )
    ours = D.inverse(y, patterns=patterns, beta=beta, step_size=tau)
    torch.testing.assert_close(ours[0], torch.from_numpy(best.x), atol=1e-6, rtol=0)


def test_inverse_is_one_lipschitz():
    patterns, y = 4 * torch.randn(9, 3, dtype=DOUBLE), 5 * torch.randn(40, 3, dtype=DOUBLE)
    found = D.expansion(y, D.inverse(y, patterns=patterns, beta=1.3))
    assert found.maximum <= 1 + 1e-9


def test_undamped_newton_fails_where_damped_does_not():
    patterns = 12 * torch.randn(10, 2, dtype=DOUBLE)
    y = 3 * torch.randn(200, 2, dtype=DOUBLE)
    h = cm.Empirical(patterns)
    z = y.clone()
    for _ in range(60):
        slope = z + h.mean(z) - y
        z = z - torch.linalg.solve(torch.eye(2, dtype=DOUBLE) + h.covariance(z), slope)
    plain = (z + h.mean(z) - y).abs().amax(-1)
    assert (plain > 1e-3).any()
    back = D.inverse(y, patterns=patterns)
    torch.testing.assert_close(D.step(back, patterns=patterns), y, atol=1e-8, rtol=0)


def test_inverse_has_derivatives():
    patterns = torch.randn(5, 2, dtype=DOUBLE, requires_grad=True)
    y = torch.randn(3, 2, dtype=DOUBLE, requires_grad=True)
    back = lambda y, p: D.inverse(y, patterns=p, beta=0.7, step_size=0.8)
    assert torch.autograd.gradcheck(back, (y, patterns))
    assert torch.autograd.gradgradcheck(back, (y, patterns))


def test_batches_and_shared_patterns():
    x, patterns = torch.randn(3, 4, 2, dtype=DOUBLE), torch.randn(5, 2, dtype=DOUBLE)
    torch.testing.assert_close(D.inverse(D.step(x, patterns=patterns), patterns=patterns), x)


@pytest.mark.parametrize(
    ("size", "beta", "tau"), [(0.4, 1.0, 0.5), (1.0, 8.0, 1.0), (30, 5.0, 3.0)]
)
def test_self_attention_by_a_joint_solve(size, beta, tau):
    x = size * torch.randn(6, 3, dtype=DOUBLE)
    y = D.step(x, step_size=tau, beta=beta)
    back = D.inverse(y, step_size=tau, beta=beta)
    torch.testing.assert_close(D.step(back, step_size=tau, beta=beta), y, atol=1e-8, rtol=0)


def test_self_attention_may_have_no_inverse():
    """At low temperature attention jumps from one maximum to the next, and what lies between is
    never reached."""
    y = 30 * torch.randn(20, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    with pytest.raises(cm.ConvergenceError, match="need not have an inverse") as caught:
        D.inverse(y, beta=5.0, step_size=3.0)
    value, status = D.inverse(y, beta=5.0, step_size=3.0, throw=False)
    assert not status.converged.any()
    assert status.code.shape == (20,)
    assert torch.equal(caught.value.result.value, value)
    assert (D.step(value, beta=5.0, step_size=3.0) - y).abs().max() > 1e-3


def test_the_outcome_of_each_point():
    y, patterns = torch.randn(2, 4, 3, dtype=DOUBLE), torch.randn(5, 3, dtype=DOUBLE)
    for how in ({"patterns": patterns}, {"step_size": 0.1}, {"step_size": 0.0}):
        value, status = D.inverse(y, throw=False, **how)
        assert status == "converged"
        assert status.code.shape == (2, 4)
        assert torch.equal(value, D.inverse(y, **how))


def test_nothing_to_undo():
    y, patterns = torch.randn(4, 2), torch.randn(3, 2)
    assert torch.equal(D.inverse(y, step_size=0.0), y)
    torch.testing.assert_close(D.inverse(y, patterns=patterns, beta=0.0), y - patterns.mean(0))
    with pytest.raises(cm.InputError, match="not negative"):
        D.inverse(y, patterns=patterns, step_size=-1.0)
