"""The stationary law of a chain: closed forms, slow and periodic chains, derivatives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.func import jacfwd, jacrev, vmap

from cumulant.core.chains import stationary_law

DOUBLE = torch.float64


def two_states(a, b):
    """pi = (b, a) / (a + b)."""
    return torch.stack([torch.stack([1 - a, a]), torch.stack([b, 1 - b])])


@pytest.mark.parametrize("leak", [1e-2, 1e-8, 1e-15])
def test_slow_chains_keep_their_digits(leak):
    T = torch.tensor([[1 - leak, leak], [2 * leak, 1 - 2 * leak]], dtype=DOUBLE)
    # What was stored, not what was meant: 1 - leak rounds.
    pi = T[1, 0] / (T[1, 0] + T[0, 1])
    found = stationary_law(T)
    torch.testing.assert_close(found.law, torch.stack([pi, 1 - pi]), rtol=1e-10, atol=0)
    assert found.unique


def test_small_entries_are_accurate():
    """A birth-death chain: pi_k proportional to (up / down)^k, over 90 orders of magnitude."""
    n, up, down = 31, 1e-3, 0.999
    one = torch.ones(n - 1, dtype=DOUBLE)
    T = up * torch.diag(one, 1) + down * torch.diag(one, -1)
    T[0, 0], T[-1, -1] = 1 - T[0].sum(), 1 - T[-1].sum()
    ratio = T[0, 1] / T[1, 0]
    expected = ratio ** torch.arange(n, dtype=DOUBLE)
    found = stationary_law(T).law
    torch.testing.assert_close(found, expected / expected.sum(), rtol=1e-9, atol=0)


def test_the_answer_is_the_leading_eigenvector():
    T = torch.rand(3, 6, 6, dtype=DOUBLE)
    T = T / T.sum(-1, keepdim=True)
    for one, law in zip(T, stationary_law(T).law, strict=True):
        values, vectors = np.linalg.eig(one.numpy().T)
        perron = vectors[:, values.real.argmax()].real
        np.testing.assert_allclose(law, perron / perron.sum(), rtol=1e-10)


def test_periodic_transient_and_several_classes():
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert stationary_law(swap).law.tolist() == [0.5, 0.5]
    absorbing = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
    found = stationary_law(absorbing)
    assert found.law.tolist() == [0.0, 1.0]
    assert found.unique
    both = stationary_law(torch.eye(3))
    assert both.law.tolist() == pytest.approx([1 / 3] * 3)
    assert not both.unique


def test_derivatives_are_those_of_the_closed_form():
    at = torch.tensor([0.3, 0.1], dtype=DOUBLE)
    ours = lambda p: stationary_law(two_states(*p)).law
    exact = lambda p: torch.stack([p[1], p[0]]) / p.sum()
    for outer in (jacfwd, jacrev):
        torch.testing.assert_close(outer(ours)(at), jacrev(exact)(at))
        torch.testing.assert_close(outer(jacrev(ours))(at), jacrev(jacrev(exact))(at))
        torch.testing.assert_close(
            jacrev(outer(jacrev(ours)))(at), jacrev(jacrev(jacrev(exact)))(at)
        )


def test_inside_vmap():
    T = torch.rand(4, 3, 3, dtype=DOUBLE)
    T = T / T.sum(-1, keepdim=True)
    torch.testing.assert_close(vmap(lambda t: stationary_law(t).law)(T), stationary_law(T).law)


def test_one_state_and_no_batch():
    assert stationary_law(torch.ones(1, 1)).law.tolist() == [1.0]
    assert stationary_law(torch.ones(0, 2, 2) / 2).law.shape == (0, 2)
    assert math.isclose(float(stationary_law(torch.ones(2, 2) / 2).law.sum()), 1.0)
