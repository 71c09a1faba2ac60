"""The checks every measure must pass: inherit `MeasureCase` and supply four methods.

The oracle is a sum over `nodes`: points of the statistic with log-masses, from enumeration or from
quadrature of an independent density. torch differentiates it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, vmap

from cumulant.core.errors import InputError
from cumulant.measures import Measure

__all__ = ["MeasureCase"]

DOUBLE = torch.float64


def close(a: Any, b: Any, tol: float = 1e-9) -> None:
    """Assert that two tensors or shapes agree to `tol`, absolutely and relatively."""
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def _statistic(h: Measure, x: Tensor) -> Tensor:
    """u(x): the family's statistic, or x itself."""
    statistic: Callable[[Tensor], Tensor] | None = getattr(h, "statistic", None)
    return x if statistic is None else statistic(x)


class MeasureCase:
    """A pytest test case: inherit it, supply the four methods below, and get every check.

    They cover values, mean and covariance against the nodes; derivatives through third order and in
    the parameters; Fisher products, KL, dual and link; tilting; vmap, batches and precision;
    samples, densities and invalid input.

    >>> import torch, cumulant as cm
    >>> from cumulant.testing import MeasureCase
    >>> class TestCoin(MeasureCase):
    ...     def parameters(self, k):
    ...         return {"probs": torch.tensor([0.3, 0.8][k])}
    ...     def make(self, **parameters):
    ...         return cm.Bernoulli(**parameters)
    ...     def nodes(self, *, probs):
    ...         masses = torch.stack([1 - probs, probs])
    ...         return torch.tensor([[0.0], [1.0]], dtype=masses.dtype), masses.log()
    ...     def points(self, **parameters):
    ...         return self.nodes(**parameters)
    >>> TestCoin().test_mean_and_covariance()
    """

    scale = 0.5  # how large the natural parameters are
    tol = 1e-9  # how exact the nodes are
    unique = True  # whether eta is determined by the mean
    event: int | None = None  # dimension of x where it is not that of the statistic
    absolute = True  # whether the measure is a probability

    def parameters(self, k: int) -> dict[str, Any]:
        """The first (k = 0) or second (k = 1) of two different sets of parameters."""
        raise NotImplementedError("a MeasureCase supplies parameters(k)")

    def make(self, **parameters: Any) -> Measure:
        """The measure with these parameters."""
        raise NotImplementedError("a MeasureCase supplies make(**parameters)")

    def nodes(self, **parameters: Any) -> tuple[Tensor, Tensor]:
        """Points u ``(K, d)`` of the statistic and their log-masses ``(K,)``."""
        raise NotImplementedError("a MeasureCase supplies nodes(**parameters)")

    def points(self, **parameters: Any) -> tuple[Tensor, Tensor]:
        """Some x and their log-densities or log-masses, from an independent source."""
        raise NotImplementedError("a MeasureCase supplies points(**parameters)")

    def cast(self, k: int = 0, dtype: torch.dtype = DOUBLE) -> dict[str, Any]:
        return {
            n: x.to(dtype) if isinstance(x, torch.Tensor) else x
            for n, x in self.parameters(k).items()
        }

    def measure(self, k: int = 0, dtype: torch.dtype = DOUBLE) -> Measure:
        return self.make(**self.cast(k, dtype))

    def eta(self, m: int = 3, dtype: torch.dtype = DOUBLE) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        d = self.measure().dimension
        return (self.scale * torch.randn(m, d, generator=generator, dtype=DOUBLE)).to(dtype)

    def oracle(self, k: int = 0) -> Callable[[Tensor], Tensor]:
        u, log_mass = self.nodes(**self.cast(k))

        def normalizer(eta: Tensor) -> Tensor:
            return (eta @ u.mT + log_mass).logsumexp(-1)

        return normalizer

    def weights(self, eta: Tensor, k: int = 0) -> tuple[Tensor, Tensor]:
        u, log_mass = self.nodes(**self.cast(k))
        return u, (eta @ u.mT + log_mass).softmax(-1)

    def test_value(self) -> None:
        eta = self.eta()
        close(self.measure().log_normalizer(eta), self.oracle()(eta), self.tol)
        if self.absolute:
            close(self.measure().log_normalizer(), torch.zeros((), dtype=DOUBLE), self.tol)

    def test_mean_and_covariance(self) -> None:
        h, eta = self.measure(), self.eta()
        u, p = self.weights(eta)
        mean = p @ u
        close(h.mean(eta), mean, self.tol)
        away = u - mean[:, None]
        close(h.covariance(eta), torch.einsum("mk,mka,mkb->mab", p, away, away), self.tol)

    def test_gradient_and_hessian_of_the_log_normalizer(self) -> None:
        h, eta = self.measure(), self.eta()

        def total(e: Tensor) -> Tensor:
            return h.log_normalizer(e).sum()

        close(grad(total)(eta), h.mean(eta))
        curvature = torch.stack([hessian(h.log_normalizer)(e) for e in eta])
        close(curvature, h.covariance(eta), 1e-8)

    @pytest.mark.parametrize("outer", [jacfwd, jacrev])
    def test_third_derivative(self, outer: Any) -> None:
        h, eta = self.measure(), self.eta()[0]
        expected = jacrev(jacrev(jacrev(self.oracle())))(eta)
        close(outer(jacfwd(jacrev(h.log_normalizer)))(eta), expected, 10 * self.tol)
        close(outer(h.covariance)(eta), expected, 10 * self.tol)

    def test_gradients_in_the_parameters(self) -> None:
        """Finite differences of the value and of the mean."""
        given = self.cast()
        names = [n for n, x in given.items() if isinstance(x, torch.Tensor)]
        eta = self.eta(2)

        def value(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            h = self.make(**{**given, **dict(zip(names, tensors, strict=True))})
            return h.log_normalizer(eta), h.mean(eta)

        leaves = [given[n].clone().requires_grad_() for n in names]
        assert torch.autograd.gradcheck(value, leaves, atol=1e-5, rtol=1e-4)

    def test_fisher_vector_product(self) -> None:
        h, eta = self.measure(), self.eta()
        vector = torch.randn_like(eta)
        expected = (h.covariance(eta) @ vector[..., None])[..., 0]
        close(h.fisher_vector_product(eta, vector), expected)

    def test_relative_entropy_is_a_sum_of_p_log_p_over_h(self) -> None:
        h, eta = self.measure(), self.eta()
        u, p = self.weights(eta)
        log_ratio = eta @ u.mT - self.oracle()(eta)[:, None]
        close(h.relative_entropy(eta), (p * log_ratio).sum(-1), 10 * self.tol)

    def test_kl_is_the_bregman_divergence(self) -> None:
        h, eta = self.measure(), self.eta(4)
        a, b = eta[:2], eta[2:]
        u, log_mass = self.nodes(**self.cast())
        log_p, log_q = ((x @ u.mT + log_mass).log_softmax(-1) for x in (a, b))
        close(h.kl(a, b), (log_p.exp() * (log_p - log_q)).nansum(-1), 10 * self.tol)
        close(h.kl(a, a), torch.zeros(2, dtype=DOUBLE), 1e-12)
        assert (h.kl(a, b) >= 0).all()

    def test_legendre(self) -> None:
        h, eta = self.measure(), self.eta()
        mean = h.mean(eta)
        dual = h.dual(mean)
        close(dual, (eta * mean).sum(-1) - h.log_normalizer(eta), 1e-8)
        other = eta.roll(1, 0)  # Fenchel and Young: no other eta does better
        assert (dual >= (other * mean).sum(-1) - h.log_normalizer(other) - 1e-9).all()
        # KL in the other coordinates: B_G(eta', eta) = B_G*(mean, mean').
        slope = ((mean - mean.roll(1, 0)) * h.link(mean.roll(1, 0))).sum(-1)
        close(h.kl(eta, other), dual - h.dual(mean.roll(1, 0)) - slope, 1e-7)

    def test_link_inverts_the_mean(self) -> None:
        h, eta = self.measure(), self.eta()
        mean = h.mean(eta)
        found = h.link(mean)
        close(h.mean(found), mean, 1e-8)
        if self.unique:
            close(found, eta, 1e-7)
        value, status = h.link(mean, throw=False)
        close(value, found)
        assert status.converged.all()

    def test_link_is_differentiable(self) -> None:
        h, eta = self.measure(), self.eta(1)
        mean = h.mean(eta)
        vector = torch.randn_like(mean)
        moved = h.fisher_vector_product(eta, vector)
        # d link . Cov v = v, up to directions in which nothing moves.
        slope = torch.func.jvp(h.link, (mean,), (moved,))[1]
        close(h.fisher_vector_product(eta, slope), moved, 1e-7)
        # Second order: the derivative of mean(link(m)) = m vanishes.

        def returned(m: Tensor) -> Tensor:
            return h.mean(h.link(m)).sum()

        curvature = jacfwd(jacrev(returned))
        close(curvature(mean), torch.zeros(1, h.dimension, 1, h.dimension, dtype=DOUBLE), 1e-5)

    def test_tilting_twice(self) -> None:
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

    def gauge(self, h: Measure, eta: Tensor) -> Tensor:
        """The component of a tilt that the link can recover."""
        return eta

    def test_vmap(self) -> None:
        h, eta = self.measure(), self.eta(4)
        for name in ("log_normalizer", "mean", "covariance", "relative_entropy"):
            method = getattr(h, name)
            close(vmap(method)(eta), method(eta))
            close(vmap(method)(eta.reshape(2, 2, -1)), torch.unflatten(method(eta), 0, (2, 2)))
        mean = h.mean(eta)
        close(vmap(h.link)(mean), h.link(mean), 1e-8)
        close(vmap(h.dual)(mean), h.dual(mean), 1e-8)

    def stacked(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        first, second = self.cast(0), self.cast(1)
        moving = {n for n, x in first.items() if isinstance(x, torch.Tensor)}
        return {n: torch.stack([first[n], second[n]]) for n in moving}, {
            n: x for n, x in first.items() if n not in moving
        }

    def test_vmap_over_parameters(self) -> None:
        moving, fixed = self.stacked()
        eta = self.eta()

        def both(moving: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            h = self.make(**moving, **fixed)
            return h.mean(eta), h.link(h.mean(eta))

        mean, found = vmap(both)(moving)
        for k in range(2):
            close(mean[k], self.measure(k).mean(eta))
            close(self.measure(k).mean(found[k]), mean[k], 1e-7)

    def test_batches_broadcast(self) -> None:
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

    def test_one_eta_without_a_row(self) -> None:
        h, eta = self.measure(), self.eta(1)
        close(h.mean(eta[0]), h.mean(eta)[0])
        close(h.log_normalizer(eta[0]), h.log_normalizer(eta)[0])
        close(h.covariance(eta[0]), h.covariance(eta)[0])
        close(h.link(h.mean(eta[0])), h.link(h.mean(eta))[0])
        close(h.mean(), h.mean(torch.zeros_like(eta))[0])
        assert h.sample(eta[0], 5).shape == (5, self.event or h.dimension)
        assert h.mean(eta[:0]).shape == (0, h.dimension)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_precision_follows_the_input(self, dtype: torch.dtype) -> None:
        wide, narrow = self.measure(), self.measure(dtype=torch.float32)
        eta = self.eta().to(dtype)
        tol = 2e-4 if dtype == torch.float32 else 2e-2
        for name in ("log_normalizer", "mean", "covariance", "relative_entropy"):
            out = getattr(narrow, name)(eta)
            assert out.dtype == dtype
            close(out.to(DOUBLE), getattr(wide, name)(eta.to(DOUBLE)), tol)
        assert wide.mean(eta).dtype == DOUBLE

    def test_sample(self) -> None:
        h, eta = self.measure(), self.eta(2)
        n = 20_000
        x = h.sample(eta, n)
        assert x.shape == (n, 2, self.event or h.dimension)
        u = _statistic(h, x)
        spread = h.covariance(eta).diagonal(dim1=-2, dim2=-1)
        error = (u.mean(0) - h.mean(eta)).abs()
        assert (error <= 5 * (spread / n).sqrt() + 1e-12).all()
        centered = u - h.mean(eta)
        second = (centered[..., :, None] * centered[..., None, :]).mean(0)
        scale = (spread[..., :, None] * spread[..., None, :]).sqrt()
        assert ((second - h.covariance(eta)).abs() <= 0.15 * scale + 1e-12).all()

    def test_log_prob(self) -> None:
        h, eta = self.measure(), self.eta(1)
        x, log_density = self.points(**self.cast())
        u = _statistic(h, x)
        expected = log_density + (u * eta).sum(-1) - self.oracle()(eta)
        close(h.log_prob(x, eta), expected, 10 * self.tol)

    def test_wrong_dimension_is_one_clear_error(self) -> None:
        h = self.measure()
        wrong = torch.zeros(2, h.dimension + 1, dtype=DOUBLE)
        for call in (h.mean, h.log_normalizer, h.covariance, h.link, h.tilt, h.sample):
            with pytest.raises(InputError, match=rf"\(\.\.\., M, {h.dimension}\)"):
                call(wrong)
        with pytest.raises(InputError, match="finite"):
            h.mean(torch.full((1, h.dimension), float("nan"), dtype=DOUBLE))
