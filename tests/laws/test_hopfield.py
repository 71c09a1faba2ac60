"""Hopfield networks: energy, bounds, capacity, density, classes (docs/theory.md, T19-T22, T33)."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate

import cumulant as cm

DOUBLE = torch.float64


@st.composite
def networks(draw):
    seed = draw(st.integers(0, 2**31))
    n, d, q = draw(st.integers(1, 12)), draw(st.integers(1, 6)), 8
    g = torch.Generator().manual_seed(seed)
    spread = draw(st.floats(0.01, 10.0))
    patterns = spread * torch.randn(n, d, dtype=DOUBLE, generator=g)
    states = draw(st.floats(0.01, 10.0)) * torch.randn(q, d, dtype=DOUBLE, generator=g)
    return cm.Memory(patterns, beta=draw(st.floats(0.01, 20.0))), states


@settings(max_examples=60, deadline=None)
@given(networks(), st.floats(0.05, 1.0))
def test_energy_never_rises_and_is_never_negative(network, step_size):
    memory, x = network
    before = memory.energy(x)
    scale = before.abs() + float((memory.patterns**2).sum(-1).max()) + 1
    for _ in range(6):
        assert (before >= 0).all()
        x = memory.retrieve(x, step_size=step_size).state
        after = memory.energy(x)
        assert (after <= before + 1e-12 * scale).all()
        before = after


@settings(max_examples=60, deadline=None)
@given(networks())
def test_the_one_step_bound_is_never_violated(network):
    """For every query and every pattern, whichever is nearest; with any fixed point too."""
    memory, x = network
    moved = memory.retrieve(x).state
    near = memory.patterns[: len(x)] + 1e-2 * x[: len(memory)]
    rest = memory.retrieve(x, 50).state
    for states, to in ((x, moved), (near, memory.retrieve(near).state)):
        for i in range(len(memory)):
            at = torch.full((len(states),), i)
            error = (to - memory.patterns[i]).norm(dim=-1)
            bound = memory.error_bound(states, at)
            slack = 1e-12 * (1 + memory.patterns.norm(dim=-1).max())
            assert (error <= bound + slack).all()
            wider = memory.error_bound(states, at, fixed_point=rest[: len(states)])
            assert (wider >= bound).all()


def test_the_bound_by_hand():
    """Two orthogonal patterns of length 3, a state on the first: D = 9, M = 3, r = 0."""
    memory = cm.Memory(3 * torch.eye(2, dtype=DOUBLE), beta=0.5)
    bound = memory.error_bound(3 * torch.eye(2, dtype=DOUBLE)[:1])
    assert float(bound) == pytest.approx(2 * 1 * 3 * math.exp(-0.5 * 9))
    torch.testing.assert_close(memory.separation(), torch.full((2,), 9.0, dtype=DOUBLE))


def test_separation_by_its_definition():
    x = torch.randn(3, 20, 4, dtype=DOUBLE)
    products = x @ x.mT
    gaps = products.diagonal(dim1=-2, dim2=-1)[..., None] - products
    expected = (gaps + torch.eye(20) * math.inf).nan_to_num(math.inf).amin(-1)
    expected = torch.where(torch.eye(20).bool(), math.inf, gaps).amin(-1)
    torch.testing.assert_close(cm.Memory(x).separation(), expected)
    assert cm.Memory(x[:, :1]).separation().eq(math.inf).all()


def test_equal_patterns_have_no_separation():
    x = torch.randn(1, 4).expand(3, 4)
    torch.testing.assert_close(cm.Memory(x).separation(), torch.zeros(3))


class TestCapacity:
    def test_the_papers_examples(self):
        """Ramsauer et al. (2021), after Theorem 3: c >= 3.1546 and c >= 1.3718."""
        first = cm.memory.capacity(20, beta=1.0, radius=3.0, failure=0.001)
        second = cm.memory.capacity(75, beta=1.0, radius=1.0, failure=0.001)
        assert first.c == pytest.approx(3.1546, abs=1e-4)
        assert second.c == pytest.approx(1.3718, abs=1e-4)
        assert first.a + math.log(first.b) > 1.27
        assert second.a + math.log(second.b) < -0.94
        assert first.applies
        assert second.applies

    @pytest.mark.parametrize("d", [2, 30, 1000])
    def test_lambert_by_mpmath(self, d):
        got = cm.memory.capacity(d, beta=500.0, radius=2.0)
        with mpmath.workdps(40):
            a = mpmath.mpf(2) / (d - 1) * (1 + mpmath.log(2 * 500 * 4 * 0.001 * (d - 1)))
            b = mpmath.mpf(2) * 4 * 500 / 5
            c = b / mpmath.lambertw(mpmath.exp(a + mpmath.log(b)))
        assert got.c == pytest.approx(float(c), rel=1e-10)

    def test_grows_exponentially_with_the_dimension(self):
        counts = [cm.memory.capacity(d, radius=3.0).patterns for d in (40, 80, 160)]
        assert counts[1] > counts[0] ** 1.5 > 1
        assert counts[2] > counts[1] ** 1.5

    def test_so_many_are_stored(self):
        """The theorem's number of random patterns: each is found again from near it."""
        d, K = 20, 3.0
        count = int(cm.memory.capacity(d, radius=K).patterns)
        g = torch.Generator().manual_seed(0)
        x = torch.randn(count, d, dtype=DOUBLE, generator=g)
        x = K * math.sqrt(d - 1) * x / x.norm(dim=-1, keepdim=True)
        found = cm.Memory(x, beta=1.0).retrieve(x + 0.01 * torch.randn(count, d), tol=1e-8)
        assert (found.index == torch.arange(count)).all()
        assert ((found.state - x).norm(dim=-1) < 0.1).all()

    @pytest.mark.parametrize(
        "bad", [{"failure": 0.0}, {"failure": 2.0}, {"beta": 0}, {"radius": -1}]
    )
    def test_bad_input(self, bad):
        with pytest.raises(cm.InputError):
            cm.memory.capacity(20, **bad)


class TestDensity:
    """T33: exp(-beta E) is a Gaussian mixture, the update its EM step."""

    def test_energy_is_its_logarithm(self):
        memory = cm.Memory(torch.randn(6, 3, dtype=DOUBLE), beta=1.7)
        x = torch.randn(10, 3, dtype=DOUBLE)
        density = memory.mixture().log_prob(x[None], torch.zeros(1, 3, dtype=DOUBLE))
        gap = density.flatten() + 1.7 * memory.energy(x)
        torch.testing.assert_close(gap, gap[:1].expand(10), rtol=1e-9, atol=1e-9)

    def test_integral_of_exp_minus_beta_energy(self):
        """Quadrature in one dimension: the mixture is that density, normalized."""
        memory = cm.Memory(torch.tensor([[-1.0], [0.3], [2.0]], dtype=DOUBLE), beta=2.0)

        def unnormalized(x):
            return float((-2.0 * memory.energy(torch.tensor([[x]], dtype=DOUBLE))).exp())

        total, _ = integrate.quad(unnormalized, -12, 14)
        zero = torch.zeros(1, 1, dtype=DOUBLE)
        for x in (-1.0, 0.0, 1.5):
            mine = memory.mixture().log_prob(torch.tensor([[[x]]], dtype=DOUBLE), zero).exp()
            assert float(mine) == pytest.approx(unnormalized(x) / total, rel=1e-7)

    def test_update_is_the_em_step(self):
        """Mean of the components under their responsibilities, by Bayes' rule written out."""
        memory = cm.Memory(torch.randn(6, 3, dtype=DOUBLE), beta=1.7)
        x = torch.randn(4, 3, dtype=DOUBLE)
        weight = (1.7 / 2 * (memory.patterns**2).sum(-1)).softmax(-1)
        near = (-1.7 / 2 * torch.cdist(x, memory.patterns) ** 2).exp() * weight
        responsibility = near / near.sum(-1, keepdim=True)
        torch.testing.assert_close(memory.retrieve(x).state, responsibility @ memory.patterns)

    def test_block_gibbs_draws_from_it(self):
        patterns = torch.tensor([[-1.0, 0.0], [1.0, 0.5], [0.0, 1.5]], dtype=DOUBLE)
        run = cm.dynamics.block_gibbs(
            patterns, 60, beta=2.0, chains=4000, generator=torch.Generator().manual_seed(0)
        )
        states = next(x for x in vars(run).values() if x.is_floating_point() and x.ndim == 3)
        mean, covariance = cm.Memory(patterns, beta=2.0).mixture().moments()
        last = states[-1]
        error = (covariance.diagonal(dim1=-2, dim2=-1) / len(last)).sqrt()
        assert ((last.mean(0) - mean).abs() < 4 * error).all()


class TestClassical:
    def test_one_update_by_hand(self):
        x = (torch.randn(3, 30) > 0).double() * 2 - 1
        state = (torch.randn(5, 30) > 0).double() * 2 - 1
        W = x.T @ x / 30
        W.fill_diagonal_(0)
        found = cm.memory.ClassicalMemory(x).retrieve(state)
        assert torch.equal(found.state, (state @ W.T).sign())
        torch.testing.assert_close(
            found.energy, -0.5 * torch.einsum("qi,ij,qj->q", found.state, W, found.state)
        )

    def test_is_unnormalized_linear_attention_then_sign(self):
        """T22, with the diagonal, which is the same number for every unit."""
        x = (torch.randn(4, 40) > 0).double() * 2 - 1
        state = (torch.randn(6, 40) > 0).double() * 2 - 1
        attention = (state @ x.T) @ x / 40  # scores are weights: no softmax, no normalizer
        torch.testing.assert_close(cm.memory.LinearMemory(x).retrieve(state).state, attention)
        own = attention - state * 4 / 40
        assert torch.equal(cm.memory.ClassicalMemory(x).retrieve(state).state, own.sign())

    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 2**31), st.integers(1, 30))
    def test_energy_never_rises_one_unit_at_a_time(self, seed, n):
        g = torch.Generator().manual_seed(seed)
        x = 2.0 * torch.randint(0, 2, (n, 25), generator=g).double() - 1
        state = 2.0 * torch.randint(0, 2, (4, 25), generator=g).double() - 1
        memory = cm.memory.ClassicalMemory(x, asynchronous=True)
        before = memory.energy(state)
        for _ in range(4):
            state = memory.retrieve(state).state
            after = memory.energy(state)
            assert (after <= before + 1e-9).all()
            before = after

    def test_capacity_is_0_14_of_the_dimension(self):
        """Hopfield (1982): recall breaks down near N = 0.14 d."""
        d = 400
        counts = [int(load * d) for load in (0.08, 0.11, 0.19, 0.25)]
        found = cm.memory.recall(cm.memory.ClassicalMemory, d, counts, flips=0.05)
        assert found.rate[0] > 0.95
        assert found.rate[1] > 0.9
        assert found.rate[2] < 0.3
        assert found.rate[3] < 0.05
        assert 0.1 * d < found.capacity < 0.19 * d

    def test_dense_holds_far_more_than_classical_and_linear(self):
        d, counts = 32, [4, 400, 4000]
        rates = {
            name: cm.memory.recall(make, d, counts, steps=1 if name == "linear" else 20).rate
            for name, make in {
                "dense": lambda x: cm.Memory(x, beta=1.0),
                "classical": cm.memory.ClassicalMemory,
                "linear": cm.memory.LinearMemory,
            }.items()
        }
        assert rates["dense"][2] > 0.9
        assert rates["classical"][1] < 0.05
        assert rates["linear"][1] < 0.05

    def test_linear_overflow_is_an_error(self):
        with pytest.raises(cm.InputError, match="fewer steps"):
            cm.memory.LinearMemory(torch.ones(1000, 4)).retrieve(torch.ones(1, 4), 60)

    def test_bad_input(self):
        with pytest.raises(cm.InputError, match="-1 or 1"):
            cm.memory.ClassicalMemory(torch.tensor([[1.0, 0.0]]))
        with pytest.raises(cm.InputError, match=r"\(N, d\)"):
            cm.memory.LinearMemory(torch.ones(3))
        with pytest.raises(cm.InputError, match="state must have shape"):
            cm.memory.LinearMemory(torch.ones(3, 2)).retrieve(torch.ones(3))
        with pytest.raises(cm.InputError, match="counts"):
            cm.memory.recall(cm.memory.LinearMemory, 4, [])


class TestFixedAgainstChanging:
    """T20."""

    def test_both_runs_by_hand(self):
        x = torch.randn(7, 3, dtype=DOUBLE)
        both = cm.memory.compare(x, 3, beta=1.3)
        fixed, changing = x, x
        for t in range(3):
            fixed = (1.3 * fixed @ x.mT).softmax(-1) @ x
            changing = (1.3 * changing @ changing.mT).softmax(-1) @ changing
            torch.testing.assert_close(both.fixed.states[t + 1], fixed)
            torch.testing.assert_close(both.changing.states[t + 1], changing)
        torch.testing.assert_close(both.fixed.states[1], both.changing.states[1])
        moved = (both.changing.states[1:] - both.changing.states[:-1]).norm(dim=-1)
        torch.testing.assert_close(both.changing.change, moved)
        torch.testing.assert_close(
            both.changing.energy[2],
            cm.Memory(both.changing.states[2], 1.3).energy(both.changing.states[2]),
        )

    def test_fixed_patterns_keep_what_changing_patterns_lose(self):
        """Between one blend and all patterns apart: memory has several minima, self-attention one
        point."""
        g = torch.Generator().manual_seed(0)
        x = 2.0 * torch.randn(20, 8, dtype=DOUBLE, generator=g)
        both = cm.memory.compare(x, 100, beta=0.2)
        assert (both.fixed.energy.diff(dim=0) <= 1e-9).all()
        spread = [run.states[-1].std(0).norm() for run in (both.fixed, both.changing)]
        assert spread[1] < 1e-9 * spread[0]
        assert both.changing.distinct[-1] == 1 < both.fixed.distinct[-1]

    def test_other_patterns_and_batches(self):
        x, y = torch.randn(2, 5, 3), torch.randn(2, 9, 3)
        both = cm.memory.compare(x, 2, patterns=y, step_size=0.5)
        expected = 0.5 * x + 0.5 * (x @ y.mT).softmax(-1) @ y
        torch.testing.assert_close(both.fixed.states[1], expected)
        assert both.changing.index.shape == (3, 2, 5)
        assert cm.memory.compare(x, 0).fixed.change.shape == (0, 2, 5)

    def test_bad_input(self):
        with pytest.raises(cm.InputError, match="steps"):
            cm.memory.compare(torch.randn(3, 2), -1)


class TestClasses:
    """T21."""

    def dense_k(self, weights, mass=0.9):
        sums = weights.sort(-1, descending=True).values.cumsum(-1)
        return (sums < mass - 1e-9).sum(-1) + 1

    @pytest.mark.usefixtures("small_tiles")
    @pytest.mark.parametrize("causal", [False, True])
    def test_k90_by_sorting(self, causal):
        q, k = torch.randn(2, 3, 40, 8, dtype=DOUBLE), torch.randn(2, 3, 40, 8, dtype=DOUBLE)
        found = cm.memory.classify(q, k, is_causal=causal)
        scores = q @ k.mT / math.sqrt(8)
        visible = torch.full((40,), 40)
        if causal:
            scores = scores.masked_fill(torch.ones(40, 40).triu(1).bool(), -math.inf)
            visible = torch.arange(1, 41)
        assert torch.equal(found.k90, self.dense_k(scores.softmax(-1)))
        assert torch.equal(found.visible, visible.expand(2, 3, 40))
        ratio = (found.k90 / visible).median(-1).values
        torch.testing.assert_close(found.fraction, ratio)

    def test_the_four_classes(self):
        """Uniform over a known number of keys of 320: 0.9 k / N decides."""
        n = 320
        names = []
        for keys in (320, 200, 160, 100, 40, 30, 12, 11, 1):
            mask = torch.zeros(5, n, dtype=torch.bool)
            mask[:, :keys] = True
            bias = torch.where(mask, 0.0, -200.0)
            q = torch.zeros(5, 4)
            found = cm.memory.classify(q, torch.zeros(n, 4), attn_mask=bias)
            assert (found.k90 == math.ceil(0.9 * keys - 1e-9)).all()
            names += found.names
        # 288, 180, 144 > 160? no: II; 90: II; 36: III; 27: III; 11: III; 10: IV; 1: IV
        assert names == ["I", "I", "II", "II", "III", "III", "III", "IV", "IV"]

    def test_grouped_heads_and_rows_without_keys(self):
        q, k = torch.randn(4, 6, 8), torch.randn(2, 9, 8)
        found = cm.memory.classify(q, k, enable_gqa=True)
        assert found.k90.shape == (4, 6)
        single = cm.memory.classify(q[3], k[1])
        assert torch.equal(found.k90[3], single.k90)
        nothing = cm.memory.classify(q, k, enable_gqa=True, attn_mask=torch.zeros(6, 9).bool())
        assert nothing.names == ["-"] * 4
        assert (nothing.k90 == 0).all()

    def test_bad_mass(self):
        with pytest.raises(cm.InputError, match="mass"):
            cm.memory.classify(torch.ones(2, 2), torch.ones(2, 2), mass=0.0)
