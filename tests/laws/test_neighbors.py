"""T42: systems the drafts name, each against something computed another way."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from scipy.integrate import dblquad

from cumulant.lab.claims import Trial
from cumulant.lab.claims.systems import esn, mondeq, node, rbm, wakesleep

DOUBLE = torch.float64


def test_gaussian_hidden_units_integrate_to_the_hopfield_network():
    patterns = torch.tensor([[1.0, -1.0, 1.0], [1.0, 1.0, -1.0]], dtype=DOUBLE)
    beta, s = 0.3, rbm.states(3)
    weights = []
    for row in s.numpy():
        a, b = beta**0.5 * patterns.numpy() @ row
        density = lambda y, x, a=a, b=b: np.exp(-(x * x + y * y) / 2 + a * x + b * y)
        weights.append(dblquad(density, -12, 12, -12, 12)[0])
    by_hand = np.exp(beta / 2 * ((s @ patterns.mT) ** 2).sum(-1).numpy())
    np.testing.assert_allclose(np.array(weights) / sum(weights), by_hand / by_hand.sum(), rtol=1e-6)
    law, sweep = rbm.machine(s, patterns, beta)
    np.testing.assert_allclose(law.numpy(), by_hand / by_hand.sum(), rtol=1e-9)
    torch.testing.assert_close(law @ sweep, law)
    torch.testing.assert_close(sweep.sum(-1), torch.ones(8, dtype=DOUBLE))


@pytest.mark.parametrize("seed", range(3))
def test_a_monotone_layer_has_one_fixed_point_among_all_active_sets(seed):
    random = np.random.default_rng(seed)
    n, m = 4, 0.5
    A, B, x = random.normal(size=(n, n)), random.normal(size=(n, n)), random.normal(size=n)
    W = (1 - m) * np.eye(n) - A.T @ A + B - B.T
    found = []
    for active in product((0.0, 1.0), repeat=n):
        D = np.diag(active)
        z = np.linalg.solve(np.eye(n) - D @ W, D @ x)
        if np.allclose(z, np.maximum(W @ z + x, 0)):
            found.append(z)
    assert len({tuple(z.round(9)) for z in found}) == 1
    W, x = torch.from_numpy(W), torch.from_numpy(x)
    start = 3 * torch.ones(n, dtype=DOUBLE)
    ours = mondeq.peaceman_rachford(W, x, start, 2000)[-1]
    np.testing.assert_allclose(ours.numpy(), found[0], atol=1e-9)


def test_the_adjoint_of_uniform_attention_is_known():
    """At beta = 0 every point follows the mean: x(T) = x0 + (e^T - 1) mean."""
    x, w = torch.randn(4, 2, dtype=DOUBLE), torch.randn(4, 2, dtype=DOUBLE)
    exact = w + (np.exp(node.END) - 1) * w.mean(0)
    torch.testing.assert_close(node.adjoint(x, w, 0.0), exact, rtol=1e-7, atol=1e-7)


def test_a_leaky_unit_without_weights_relaxes_geometrically():
    x, u = torch.randn(5, dtype=DOUBLE), torch.randn(5, dtype=DOUBLE)
    rest = torch.tanh(u)
    ours = esn.network(x, torch.zeros(5, 5, dtype=DOUBLE), u, 0.3, 7)
    torch.testing.assert_close(ours, rest + 0.7**7 * (x - rest))


def test_the_helmholtz_machine_is_a_law_and_its_bound_is_one():
    trial = Trial(0)
    theta, phi = trial.normal(2 + 8 + 4), trial.normal(32)
    p, q = wakesleep.log_joint(theta), wakesleep.log_recognition(phi)
    assert float(p.exp().sum()) == pytest.approx(1)
    torch.testing.assert_close(q.exp().sum(-1), torch.ones(16, dtype=DOUBLE))
    assert bool(((q.exp() * (p - q)).sum(-1) <= p.logsumexp(-1) + 1e-12).all())
