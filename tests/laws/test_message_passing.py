"""T25, T27: the draft's message passing, line by line, as written and as corrected.

The oracle enumerates all paths of modes in numpy: states and observations of a path are jointly
Gaussian, so that everything about them is one formula for conditioning.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linprog

import cumulant as cm
from cumulant.filtering import (
    attention_as_imm,
    sinkhorn,
    sinkhorn_attention,
    transition_from_mixing,
)
from cumulant.filtering.recursion import branch

DOUBLE = torch.float64
VISIBLE = 1e-2  # what is wrong is wrong by more than this


def parameters(seed, modes=2, states=2, seen=1):
    """A generic model: nothing in it is special, and the modes differ."""
    rng = np.random.default_rng(seed)

    def definite(size):
        root = rng.normal(size=(modes, size, size))
        return root @ root.transpose(0, 2, 1) / size + 0.1 * np.eye(size)

    transition = rng.dirichlet(2 * np.ones(modes), size=modes)
    return {
        "transition": transition,
        "initial": rng.dirichlet(3 * np.ones(modes)),
        "dynamics": rng.normal(size=(modes, states, states)),
        "dynamics_noise": definite(states),
        "dynamics_bias": 3 * rng.normal(size=(modes, states)),
        "emission": rng.normal(size=(modes, seen, states)),
        "emission_noise": definite(seen) + 2 * np.eye(seen),
        "emission_bias": rng.normal(size=(modes, seen)),
        "initial_mean": rng.normal(size=states),
        "initial_covariance": definite(states)[0],
    }


def library(given):
    return cm.filtering.SwitchingLinearGaussian(**{n: torch.tensor(x) for n, x in given.items()})


class Known(NamedTuple):
    """About the last step: modes, and the state given the mode and in all."""

    log_likelihood: float
    modes: np.ndarray
    mode_means: np.ndarray
    mode_covariances: np.ndarray
    mean: np.ndarray
    covariance: np.ndarray


class Path(NamedTuple):
    """A path of modes a_0, ..., a_T, its weight with the data, and the last state given both."""

    modes: tuple[int, ...]
    log_weight: float
    mean: np.ndarray
    covariance: np.ndarray


def paths(given, y):
    """All paths of modes; NaN in y is missing."""
    g, T, n = given, len(y), len(given["initial_mean"])
    out = []
    for modes in itertools.product(range(len(g["initial"])), repeat=T + 1):
        weight = math.log(g["initial"][modes[0]])
        weight += sum(math.log(g["transition"][i, j]) for i, j in itertools.pairwise(modes))
        # (x_1, ..., x_T) = mean + linear @ (x_0 - its mean, w_1, ..., w_T)
        state, linear = g["initial_mean"], np.eye(n, n * (T + 1))
        noise = [g["initial_covariance"], *(g["dynamics_noise"][a] for a in modes[1:])]
        source = np.zeros((n * (T + 1), n * (T + 1)))
        means, maps = [], []
        for t in range(T + 1):
            source[t * n : t * n + n, t * n : t * n + n] = noise[t]
        for t, a in enumerate(modes[1:], 1):
            state = g["dynamics"][a] @ state + g["dynamics_bias"][a]
            linear = g["dynamics"][a] @ linear + np.eye(n, n * (T + 1), t * n)
            means.append(state)
            maps.append(linear)
        steps = list(zip(modes[1:], means, maps, strict=True))
        expected = np.concatenate(
            [g["emission"][a] @ m + g["emission_bias"][a] for a, m, _ in steps]
        )
        seeing = np.concatenate([g["emission"][a] @ L for a, _, L in steps])
        rows = np.concatenate(list(y))
        spread = seeing @ source @ seeing.T
        p = len(rows) // T
        for t, a in enumerate(modes[1:]):
            spread[t * p : t * p + p, t * p : t * p + p] += g["emission_noise"][a]
        there = ~np.isnan(rows)
        surprise, spread = (rows - expected)[there], spread[np.ix_(there, there)]
        cross = (maps[-1] @ source @ seeing.T)[:, there]
        inverse = np.linalg.inv(spread)
        weight -= (
            surprise @ inverse @ surprise
            + np.linalg.slogdet(spread)[1]
            + there.sum() * math.log(2 * math.pi)
        ) / 2
        mean = means[-1] + cross @ inverse @ surprise
        covariance = maps[-1] @ source @ maps[-1].T - cross @ inverse @ cross.T
        out.append(Path(modes, weight, mean, covariance))
    return out


def mixed(weights, means, covariances):
    """Moments of a mixture; weights need not sum to one."""
    p = np.asarray(weights) / np.sum(weights)
    means = np.asarray(means)
    mean = p @ means
    away = means - mean
    spread = np.einsum("i,ijk->jk", p, np.asarray(covariances))
    return mean, spread + np.einsum("i,ij,ik->jk", p, away, away)


def enumerate_all(given, y):
    found = paths(given, y)
    top = max(x.log_weight for x in found)
    weight = np.array([math.exp(x.log_weight - top) for x in found])
    last = np.array([x.modes[-1] for x in found])
    M = len(given["initial"])
    by_mode = []
    for k in range(M):
        mine = [(w, x) for w, x, a in zip(weight, found, last, strict=True) if a == k]
        by_mode.append(
            mixed([w for w, _ in mine], [x.mean for _, x in mine], [x.covariance for _, x in mine])
        )
    mean, covariance = mixed(weight, [x.mean for x in found], [x.covariance for x in found])
    return Known(
        top + math.log(weight.sum()),
        np.array([weight[last == k].sum() for k in range(M)]) / weight.sum(),
        np.array([m for m, _ in by_mode]),
        np.array([S for _, S in by_mode]),
        mean,
        covariance,
    )


def close(ours, exact, tolerance=1e-9):
    return float(np.abs(np.asarray(ours) - np.asarray(exact)).max()) < tolerance


def gap(ours, exact):
    return float(np.abs(np.asarray(ours) - np.asarray(exact)).max())


# Models in which the observations leave the mode open; where they settle it, as in 2 and 4, no
# weight matters.
SEEDS = [0, 1, 3, 6, 7]


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_of_the_mixture_are_transition_times_modes(seed):
    """Eq. (8): P(X_2 | A_2 = k) has the weights transition[i, k] pi_i, not pi_i."""
    given = parameters(seed, modes=3)
    y = np.array([[0.7], [np.nan]])
    first, exact = enumerate_all(given, y[:1]), enumerate_all(given, y)

    def next_message(k, weights):
        W, b, Q = (given[n][k] for n in ("dynamics", "dynamics_bias", "dynamics_noise"))
        means = [W @ m + b for m in first.mode_means]
        return mixed(weights, means, [W @ S @ W.T + Q for S in first.mode_covariances])

    as_written = [next_message(k, first.modes) for k in range(3)]
    corrected = [next_message(k, given["transition"][:, k] * first.modes) for k in range(3)]
    post = cm.filtering.filter(library(given), torch.tensor(y), collapse="gpb2")
    for k in range(3):
        assert close(corrected[k][0], exact.mode_means[k])
        assert close(corrected[k][1], exact.mode_covariances[k])
        assert close(post.mode_means[1, k], exact.mode_means[k])
        assert close(post.mode_covariances[1, k], exact.mode_covariances[k])
    assert max(gap(as_written[k][0], exact.mode_means[k]) for k in range(3)) > VISIBLE
    assert max(gap(as_written[k][1], exact.mode_covariances[k]) for k in range(3)) > VISIBLE


@pytest.mark.parametrize("seed", SEEDS)
def test_the_observation_enters_modes_and_weights(seed):
    """Eq. (5): modes and weights need transition, pi and the likelihood of each pair of modes.

    As written, the modes move by the transition alone. The message about the state is a sum over
    A_1 without weights times the likelihood; eq. (8) weighs it by pi. Leaving the likelihood out of
    the weights, and only conditioning each Gaussian on the observation, is wrong as well.
    """
    given = parameters(seed)
    y = np.array([[0.7], [-1.9]])
    first, exact = enumerate_all(given, y[:1]), enumerate_all(given, y)
    M = 2
    likelihood, posterior = np.zeros((M, M)), {}
    for i, k in itertools.product(range(M), repeat=2):
        W, b, Q = (given[n][k] for n in ("dynamics", "dynamics_bias", "dynamics_noise"))
        C, d, R = (given[n][k] for n in ("emission", "emission_bias", "emission_noise"))
        m = W @ first.mode_means[i] + b
        S = W @ first.mode_covariances[i] @ W.T + Q
        spread = C @ S @ C.T + R
        surprise = y[1] - C @ m - d
        gain = S @ C.T @ np.linalg.inv(spread)
        square = surprise @ np.linalg.solve(spread, surprise)
        likelihood[i, k] = np.exp(-square / 2) / np.sqrt(np.linalg.det(2 * np.pi * spread))
        posterior[i, k] = m + gain @ surprise, S - gain @ C @ S

    def message(k, weights):
        pairs = [posterior[i, k] for i in range(M)]
        return mixed(weights, [m for m, _ in pairs], [S for _, S in pairs])[0]

    joint = first.modes[:, None] * given["transition"]
    modes_as_written, modes = joint.sum(0), (joint * likelihood).sum(0)
    modes = modes / modes.sum()
    post = cm.filtering.filter(library(given), torch.tensor(y), collapse="gpb2")
    assert close(modes, exact.modes)
    assert close(post.mode_probabilities[1], exact.modes)
    assert close(post.log_likelihood, exact.log_likelihood)
    assert gap(modes_as_written, exact.modes) > VISIBLE

    def worst(weights):
        return max(gap(message(k, weights[:, k]), exact.mode_means[k]) for k in range(M))

    assert worst(joint * likelihood) < 1e-9
    assert gap(post.mode_means[1], exact.mode_means) < 1e-9
    equation_5, equation_8 = likelihood, first.modes[:, None] * likelihood
    for wrong in (equation_5, equation_8, joint):
        assert worst(wrong) > VISIBLE


class TestMemory:
    """GPB(k) conditions on A^(t-k+2 : t+1), k modes; the draft's A^(t-k : t+1) are k + 2."""

    y = np.array([[0.7], [-1.9], [2.2], [0.4], [-0.8]])

    @pytest.mark.parametrize("k", [1, 2, 3, 4])
    @pytest.mark.parametrize("seed", SEEDS)
    def test_exact_up_to_k_steps_and_no_longer(self, seed, k):
        given = parameters(seed)
        model = library(given)
        for T in range(1, k + 2):
            exact = enumerate_all(given, self.y[:T])
            post = cm.filtering.filter(model, torch.tensor(self.y[:T]), collapse=k)
            ours = (post.mode_probabilities[-1], post.mean[-1], post.covariance[-1])
            theirs = (exact.modes, exact.mean, exact.covariance)
            if k >= T:
                assert close(post.log_likelihood, exact.log_likelihood)
                assert all(close(a, b) for a, b in zip(ours, theirs, strict=True))
                if k > 1:
                    assert close(post.mode_means[-1], exact.mode_means)
                    assert close(post.mode_covariances[-1], exact.mode_covariances)
            else:
                assert gap(post.log_likelihood, exact.log_likelihood) > 1e-5
                assert gap(post.mean[-1], exact.mean) > 1e-3

    @pytest.mark.parametrize("k", [2, 3, 4])
    def test_how_many_gaussians(self, k):
        """M^(k-1) are kept, M^k are collapsed: one for each sequence of k modes."""
        given = parameters(0, modes=3)
        T = 5
        y = torch.tensor(self.y[:T])
        post = cm.filtering.filter(library(given), y, collapse=k)
        kept = post.beliefs[-1]
        branched = branch(post.bank, kept, 0).log_weights
        assert kept.log_weights.numel() == 3 ** (k - 1)
        assert branched.numel() == 3**k
        t = T  # the next step is t + 1
        as_written, corrected = range(t - k, t + 2), range(t - k + 2, t + 2)
        assert branched.numel() == 3 ** len(corrected)
        assert branched.numel() != 3 ** len(as_written)

    @pytest.mark.parametrize("seed", SEEDS)
    def test_one_gaussian_forgets_the_mode(self, seed):
        """GPB1: what is kept about the state does not depend on the last mode."""
        post = cm.filtering.filter(library(parameters(seed)), torch.tensor(self.y), collapse=1)
        means = post.beliefs[-1].message[0]
        assert torch.equal(means[:, 0], means[:, 1])


def attention_of(n=6, d=4, symmetric=False):
    """Tokens, weights of a head, and A[i, j] = p(i|j) by its definition."""
    x = torch.randn(n, d, dtype=DOUBLE)
    q, k, v = torch.randn(3, d, d, dtype=DOUBLE)
    k = q if symmetric else k
    scores = (x @ q.mT) @ (x @ k.mT).mT / math.sqrt(d)  # (query, key)
    A = scores.exp() / scores.exp().sum(-1, keepdim=True)
    return x, {"query_weight": q, "key_weight": k, "value_weight": v}, scores, A.mT


class TestAttentionIsMixing:
    """Eq. (12): normalized over the previous index, so not the transition P(j|i)."""

    def imm(self, x, w, transition, modes):
        """A filter with tokens for modes whose observation says nothing."""
        n, d = x.shape
        model = cm.filtering.SwitchingLinearGaussian(
            transition=transition,
            initial=modes,
            dynamics=w["value_weight"],
            dynamics_noise=torch.zeros(d, d, dtype=DOUBLE),
            emission=torch.zeros(1, d, dtype=DOUBLE),
            emission_noise=torch.ones(1, 1, dtype=DOUBLE),
            initial_mean=x,
            initial_covariance=torch.zeros(n, d, d, dtype=DOUBLE),
        )
        nothing = torch.zeros(1, 1, dtype=DOUBLE)
        return cm.filtering.filter(model, nothing, collapse="imm")

    @staticmethod
    def attention(x, w):
        qkv = (x @ w[f"{name}_weight"].mT for name in ("query", "key", "value"))
        return F.scaled_dot_product_attention(*qkv)

    def by_bayes(self, x, w, transition, modes):
        """E[X_1 | A_1 = j] by enumeration of A_0."""
        joint = np.asarray(modes)[:, None] * np.asarray(transition)
        return (joint / joint.sum(0)).T @ np.asarray(x) @ np.asarray(w["value_weight"]).T

    def test_rows_do_not_sum_to_one(self):
        *_, A = attention_of()
        torch.testing.assert_close(A.sum(0), torch.ones(6, dtype=DOUBLE))
        assert (A.sum(1) - 1).abs().max() > 0.1
        with pytest.raises(cm.InputError, match="rows of transition must sum to one"):
            self.imm(torch.randn(6, 4, dtype=DOUBLE), {"value_weight": torch.eye(4)}, A, A[:, 0])

    def test_as_a_transition_it_is_not_attention(self):
        """Neither transposed nor with its rows normalized, with the draft's uniform modes."""
        x, w, _, A = attention_of()
        even = torch.full((6,), 1 / 6, dtype=DOUBLE)
        attention = self.attention(x, w)
        for transition in (A.mT, A / A.sum(1, keepdim=True)):
            post = self.imm(x, w, transition, even)
            assert close(post.mode_means[0], self.by_bayes(x, w, transition, even))
            assert gap(post.mode_means[0], attention) > 0.1

    def test_as_mixing_it_is(self):
        x, w, _, A = attention_of()
        attention = self.attention(x, w)
        out = attention_as_imm(x, **w)
        torch.testing.assert_close(out.mixing, A)
        torch.testing.assert_close(out.mean, attention)
        found = transition_from_mixing(A)
        post = self.imm(x, w, found.transition, found.current)
        assert close(self.by_bayes(x, w, found.transition, found.current), attention)
        assert close(post.mode_means[0], attention)
        assert close(post.mode_covariances[0], out.covariance)
        assert close(post.mode_probabilities[0], found.following)

    def test_uniform_after_the_step_is_always_possible(self):
        """With c uniform instead of pi, the rows of A are normalized and pi is their share."""
        x, w, _, A = attention_of()
        post = self.imm(x, w, A / A.sum(1, keepdim=True), A.mean(1))
        assert close(post.mode_means[0], self.attention(x, w))
        assert close(post.mode_probabilities[0], np.full(6, 1 / 6))


class TestWhichTransitions:
    """T_ij = A_ij c_j / pi_i iff A c = pi for some c >= 0."""

    @pytest.mark.parametrize("seed", range(5))
    def test_uniform_modes_fail_for_softmax(self, seed):
        """The draft's pi = 1/M. A is invertible, so c is unique, and it is not nonnegative."""
        torch.manual_seed(seed)
        *_, A = attention_of(8)
        even = torch.full((8,), 1 / 8, dtype=DOUBLE)
        unique = np.linalg.solve(A.numpy(), even.numpy())
        assert unique.min() < -VISIBLE
        infeasible = 2
        program = linprog(np.zeros(8), A_eq=A.numpy(), b_eq=even.numpy(), bounds=(0, None))
        assert program.status == infeasible
        found = transition_from_mixing(A, even)
        assert found.residual > VISIBLE
        assert not found.consistent
        assert (found.following >= 0).all()
        assert (found.transition.sum(-1) - 1).abs().max() > 8 * VISIBLE

    @pytest.mark.parametrize("seed", range(5))
    def test_uniform_modes_hold_for_doubly_stochastic(self, seed):
        torch.manual_seed(seed)
        x, w, scores, _ = attention_of(8)
        A = sinkhorn(scores).mT
        even = torch.full((8,), 1 / 8, dtype=DOUBLE)
        assert close(A.sum(0), 1)
        assert close(A.sum(1), 1)
        found = transition_from_mixing(A, even)
        assert found.consistent
        torch.testing.assert_close(found.following, even)
        torch.testing.assert_close(found.transition, A)
        qkv = [x @ w[f"{name}_weight"].mT for name in ("query", "key", "value")]
        post = TestAttentionIsMixing().imm(x, w, found.transition, even)
        assert close(post.mode_means[0], sinkhorn_attention(*qkv))
        assert gap(post.mode_means[0], TestAttentionIsMixing.attention(x, w)) > 0.1

    @pytest.mark.parametrize("seed", range(5))
    def test_the_perron_vector_always_works(self, seed):
        torch.manual_seed(seed)
        *_, A = attention_of(8)
        found = transition_from_mixing(A)
        assert found.consistent
        assert (found.current > 0).all()
        assert close(A @ found.current, found.current, 1e-14)
        assert close(found.transition.sum(1), 1, 1e-12)
        joint = found.current[:, None] * found.transition
        torch.testing.assert_close(joint / joint.sum(0), A)
        assert (found.transition - A.mT).abs().max() > VISIBLE  # scores are not symmetric here

    @pytest.mark.parametrize("seed", range(5))
    def test_symmetric_scores(self, seed):
        """pi_j is proportional to e^G(x_j), and T is the transpose of A: a reversible chain."""
        torch.manual_seed(seed)
        x, w, scores, A = attention_of(8, symmetric=True)
        normalizer = scores.exp().sum(-1)
        expected = normalizer / normalizer.sum()
        found = transition_from_mixing(A)
        torch.testing.assert_close(found.current, expected)
        torch.testing.assert_close(found.transition, A.mT)
        G = cm.attend(x @ w["query_weight"].mT, x @ w["key_weight"].mT).log_normalizer
        torch.testing.assert_close(found.current, G.softmax(-1))
        post = TestAttentionIsMixing().imm(x, w, A.mT, G.softmax(-1))
        assert close(post.mode_means[0], TestAttentionIsMixing.attention(x, w))
