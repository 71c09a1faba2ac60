"""The test case every measure goes through.

A measure supplies `parameters(k)` (two different sets), `make(**parameters)`, `points(...)` with
log densities, and `nodes(...)`: points u of its statistic with log-masses, by enumeration or
numerical quadrature of a density that is not ours. Sums over these nodes are the oracle for
everything; torch differentiates them.
"""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, vmap

import cumulant as cm

DOUBLE = torch.float64


def close(a, b, tol=1e-9):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


class MeasureCase:
    """Inherit, and supply the four methods below."""

    scale = 0.5  # how large the natural parameters are
    tol = 1e-9  # how exact the nodes are
    unique = True  # whether eta is determined by the mean
    event = None  # dimension of x where it is not that of the statistic
    absolute = True  # whether the measure is a probability

    def parameters(self, k):
        raise NotImplementedError

    def make(self, **parameters):
        raise NotImplementedError

    def nodes(self, **parameters):
        """(u, log_mass) of shapes (K, d) and (K,)."""
        raise NotImplementedError

    def points(self, **parameters):
        """(x, log density or mass) at some x, from elsewhere."""
        raise NotImplementedError

    # ----------------------------------------------------------------------------------------------

    def cast(self, k=0, dtype=DOUBLE):
        return {
            n: x.to(dtype) if isinstance(x, torch.Tensor) else x
            for n, x in self.parameters(k).items()
        }

    def measure(self, k=0, dtype=DOUBLE):
        return self.make(**self.cast(k, dtype))

    def eta(self, m=3, dtype=DOUBLE):
        generator = torch.Generator().manual_seed(5)
        d = self.measure().dimension
        return (self.scale * torch.randn(m, d, generator=generator, dtype=DOUBLE)).to(dtype)

    def oracle(self, k=0):
        u, log_mass = self.nodes(**self.cast(k))

        def normalizer(eta):
            return (eta @ u.mT + log_mass).logsumexp(-1)

        return normalizer

    def weights(self, eta, k=0):
        u, log_mass = self.nodes(**self.cast(k))
        return u, (eta @ u.mT + log_mass).softmax(-1)

    def test_value(self):
        eta = self.eta()
        close(self.measure().log_normalizer(eta), self.oracle()(eta), self.tol)
        if self.absolute:
            close(self.measure().log_normalizer(), torch.zeros((), dtype=DOUBLE), self.tol)

    def test_mean_and_covariance(self):
        h, eta = self.measure(), self.eta()
        u, p = self.weights(eta)
        mean = p @ u
        close(h.mean(eta), mean, self.tol)
        away = u - mean[:, None]
        close(h.covariance(eta), torch.einsum("mk,mka,mkb->mab", p, away, away), self.tol)

    def test_gradient_and_hessian_of_the_log_normalizer(self):
        h, eta = self.measure(), self.eta()
        close(grad(lambda e: h.log_normalizer(e).sum())(eta), h.mean(eta))
        curvature = torch.stack([hessian(h.log_normalizer)(e) for e in eta])
        close(curvature, h.covariance(eta), 1e-8)

    @pytest.mark.parametrize("outer", [jacfwd, jacrev])
    def test_third_derivative(self, outer):
        h, eta = self.measure(), self.eta()[0]
        expected = jacrev(jacrev(jacrev(self.oracle())))(eta)
        close(outer(jacfwd(jacrev(h.log_normalizer)))(eta), expected, 10 * self.tol)
        close(outer(h.covariance)(eta), expected, 10 * self.tol)

    def test_gradients_in_the_parameters(self):
        """Finite differences of the value and of the mean."""
        given = self.cast()
        names = [n for n, x in given.items() if isinstance(x, torch.Tensor)]
        eta = self.eta(2)

        def value(*tensors):
            h = self.make(**{**given, **dict(zip(names, tensors, strict=True))})
            return h.log_normalizer(eta), h.mean(eta)

        leaves = [given[n].clone().requires_grad_() for n in names]
        assert torch.autograd.gradcheck(value, leaves, atol=1e-5, rtol=1e-4)

    def test_fisher_vector_product(self):
        h, eta = self.measure(), self.eta()
        vector = torch.randn_like(eta)
        expected = (h.covariance(eta) @ vector[..., None])[..., 0]
        close(h.fisher_vector_product(eta, vector), expected)

    def test_relative_entropy_is_a_sum_of_p_log_p_over_h(self):
        h, eta = self.measure(), self.eta()
        u, p = self.weights(eta)
        log_ratio = eta @ u.mT - self.oracle()(eta)[:, None]
        close(h.relative_entropy(eta), (p * log_ratio).sum(-1), 10 * self.tol)

    def test_kl_is_the_bregman_divergence(self):
        h, eta = self.measure(), self.eta(4)
        a, b = eta[:2], eta[2:]
        u, log_mass = self.nodes(**self.cast())
        log_p, log_q = ((x @ u.mT + log_mass).log_softmax(-1) for x in (a, b))
        close(h.kl(a, b), (log_p.exp() * (log_p - log_q)).nansum(-1), 10 * self.tol)
        close(h.kl(a, a), torch.zeros(2, dtype=DOUBLE), 1e-12)
        assert (h.kl(a, b) >= 0).all()

    def test_legendre(self):
        h, eta = self.measure(), self.eta()
        mean = h.mean(eta)
        dual = h.dual(mean)
        close(dual, (eta * mean).sum(-1) - h.log_normalizer(eta), 1e-8)
        other = eta.roll(1, 0)  # Fenchel and Young: no other eta does better
        assert (dual >= (other * mean).sum(-1) - h.log_normalizer(other) - 1e-9).all()
        # KL in the other coordinates: B_G(eta', eta) = B_G*(mean, mean').
        slope = ((mean - mean.roll(1, 0)) * h.link(mean.roll(1, 0))).sum(-1)
        close(h.kl(eta, other), dual - h.dual(mean.roll(1, 0)) - slope, 1e-7)

    def test_link_inverts_the_mean(self):
        h, eta = self.measure(), self.eta()
        mean = h.mean(eta)
        found = h.link(mean)
        close(h.mean(found), mean, 1e-8)
        if self.unique:
            close(found, eta, 1e-7)
        value, status = h.link(mean, throw=False)
        close(value, found)
        assert status.converged.all()

    def test_link_is_differentiable(self):
        h, eta = self.measure(), self.eta(1)
        mean = h.mean(eta)
        vector = torch.randn_like(mean)
        moved = h.fisher_vector_product(eta, vector)
        # d link . Cov v = v, up to directions in which nothing moves.
        slope = torch.func.jvp(h.link, (mean,), (moved,))[1]
        close(h.fisher_vector_product(eta, slope), moved, 1e-7)
        # Second order: the derivative of mean(link(m)) = m vanishes.
        curvature = jacfwd(jacrev(lambda m: h.mean(h.link(m)).sum()))
        close(curvature(mean), torch.zeros(1, h.dimension, 1, h.dimension, dtype=DOUBLE), 1e-5)

    def test_tilting_twice(self):
        h, eta = self.measure(), self.eta(3) / 3
        a, b, c = eta[:1], eta[1:2], eta
        twice = h.tilt(a).tilt(b)
        close(twice.mean(c), h.mean(a + b + c))
        close(twice.log_normalizer(c), h.log_normalizer(a + b + c) - h.log_normalizer(a + b))
        close(twice.covariance(c), h.covariance(a + b + c), 1e-8)
        close(twice.log_normalizer(torch.zeros_like(a)), torch.zeros(1, dtype=DOUBLE))
        close(h.tilt(c).mean(c), h.mean(2 * c))  # rows pair off
        close(h.tilt(c).mean(), h.mean(c))
        close(h.tilt(c).kl(torch.zeros_like(c), b), h.kl(c, c + b), 1e-8)
        close(h.tilt(c[0]).link(h.mean(c)), h.link(h.mean(c)) - self.gauge(h, c[0]), 1e-6)

    def gauge(self, h, eta):
        """The part of a tilt that the link can see."""
        return eta

    def test_vmap(self):
        h, eta = self.measure(), self.eta(4)
        for name in ("log_normalizer", "mean", "covariance", "relative_entropy"):
            method = getattr(h, name)
            close(vmap(method)(eta), method(eta))
            close(vmap(method)(eta.reshape(2, 2, -1)), method(eta).unflatten(0, (2, 2)))
        mean = h.mean(eta)
        close(vmap(h.link)(mean), h.link(mean), 1e-8)
        close(vmap(h.dual)(mean), h.dual(mean), 1e-8)

    def stacked(self):
        first, second = self.cast(0), self.cast(1)
        moving = {n for n, x in first.items() if isinstance(x, torch.Tensor)}
        return {n: torch.stack([first[n], second[n]]) for n in moving}, {
            n: x for n, x in first.items() if n not in moving
        }

    def test_vmap_over_parameters(self):
        moving, fixed = self.stacked()
        eta = self.eta()

        def both(moving):
            h = self.make(**moving, **fixed)
            return h.mean(eta), h.link(h.mean(eta))

        mean, found = vmap(both)(moving)
        for k in range(2):
            close(mean[k], self.measure(k).mean(eta))
            close(self.measure(k).mean(found[k]), mean[k], 1e-7)

    def test_batches_broadcast(self):
        moving, fixed = self.stacked()
        h = self.make(**moving, **fixed)
        assert h.batch_shape == (2,)
        eta = self.eta(3)
        d = h.dimension
        for given in (eta, eta.expand(2, 3, d), eta[None], eta.expand(4, 1, 3, d)):
            mean = h.mean(given)
            assert mean.shape == (*given.shape[:-3], 2, 3, d)
            assert h.log_normalizer(given).shape == mean.shape[:-1]
            assert h.covariance(given).shape == (*mean.shape, d)
            close(h.link(mean), h.link(mean.reshape(-1, 2, 3, d)[0]).expand(mean.shape), 1e-8)
        for k in range(2):
            one = self.measure(k)
            close(h.mean(eta)[k], one.mean(eta))
            close(h.log_normalizer(eta)[k], one.log_normalizer(eta))
            close(h.link(h.mean(eta))[k], one.link(one.mean(eta)), 1e-7)
            close(h.log_prob(h.sample(eta, 2), eta).shape, torch.Size((2, 2, 3)))

    def test_one_eta_without_a_row(self):
        h, eta = self.measure(), self.eta(1)
        close(h.mean(eta[0]), h.mean(eta)[0])
        close(h.log_normalizer(eta[0]), h.log_normalizer(eta)[0])
        close(h.covariance(eta[0]), h.covariance(eta)[0])
        close(h.link(h.mean(eta[0])), h.link(h.mean(eta))[0])
        close(h.mean(), h.mean(torch.zeros_like(eta))[0])
        assert h.sample(eta[0], 5).shape == (5, self.event or h.dimension)
        assert h.mean(eta[:0]).shape == (0, h.dimension)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_precision_follows_the_input(self, dtype):
        wide, narrow = self.measure(), self.measure(dtype=torch.float32)
        eta = self.eta().to(dtype)
        tol = 2e-4 if dtype == torch.float32 else 2e-2
        for name in ("log_normalizer", "mean", "covariance", "relative_entropy"):
            out = getattr(narrow, name)(eta)
            assert out.dtype == dtype
            close(out.to(DOUBLE), getattr(wide, name)(eta.to(DOUBLE)), tol)
        assert wide.mean(eta).dtype == DOUBLE

    def test_sample(self):
        h, eta = self.measure(), self.eta(2)
        n = 20_000
        x = h.sample(eta, n)
        assert x.shape == (n, 2, self.event or h.dimension)
        u = h.statistic(x) if hasattr(h, "statistic") else x
        spread = h.covariance(eta).diagonal(dim1=-2, dim2=-1)
        error = (u.mean(0) - h.mean(eta)).abs()
        assert (error <= 5 * (spread / n).sqrt() + 1e-12).all()
        centred = u - h.mean(eta)
        second = (centred[..., :, None] * centred[..., None, :]).mean(0)
        scale = (spread[..., :, None] * spread[..., None, :]).sqrt()
        assert ((second - h.covariance(eta)).abs() <= 0.15 * scale + 1e-12).all()

    def test_log_prob(self):
        h, eta = self.measure(), self.eta(1)
        x, log_density = self.points(**self.cast())
        u = h.statistic(x) if hasattr(h, "statistic") else x
        expected = log_density + (u * eta).sum(-1) - self.oracle()(eta)
        close(h.log_prob(x, eta), expected, 10 * self.tol)

    def test_wrong_dimension_is_one_clear_error(self):
        h = self.measure()
        wrong = torch.zeros(2, h.dimension + 1, dtype=DOUBLE)
        for call in (h.mean, h.log_normalizer, h.covariance, h.link, h.tilt, h.sample):
            with pytest.raises(cm.InputError, match=rf"\(\.\.\., M, {h.dimension}\)"):
                call(wrong)
        with pytest.raises(cm.InputError, match="finite"):
            h.mean(torch.full((1, h.dimension), float("nan"), dtype=DOUBLE))
