"""Tilted measures: p(x | eta) = h(x) exp(<u(x), eta> - G(eta)) (docs/theory.md, T1, T7-T10).

Shape legend: a measure is a batch of measures ``(*batch,)``; natural parameters eta are
``(*batch, M, d)``, M per measure; u(x) in R^d is the statistic that eta multiplies, x itself
unless a class overrides it.

A measure supplies `_log_normalizer`; gradients and Hessians follow from it, and classes with a
closed form override them. Public methods check and broadcast once; the underscore methods take
the result.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self, overload
from typing import Literal as Lit

import torch
from torch import Tensor

from cumulant.core.checks import broadcast, numbers, require, whole
from cumulant.core.errors import InputError
from cumulant.core.outcome import Code, Outcome, Solution
from cumulant.core.precision import widened
from cumulant.core.randomness import drawing_from
from cumulant.core.typed import functions
from cumulant.measures.calculus import gradient, jacobian, pullback
from cumulant.measures.entry import Entry, enter
from cumulant.measures.frame import whitening
from cumulant.measures.newton import Problem, link_by_newton, wide

__all__ = ["Measure", "Tilted", "not_negative"]


class Measure(ABC):
    """A measure h that can be tilted.

    =============================== ===============================================================
    `log_normalizer(eta)`           G(eta) ``(*batch, M)``; +inf outside the domain
    `mean(eta)`                     E[u] ``(*batch, M, d)``, the gradient of G
    `covariance(eta)`               Cov[u] ``(*batch, M, d, d)``, the Hessian of G
    `fisher_vector_product(eta, v)` Cov[u] v, without the matrix
    `relative_entropy(eta)`         KL(p_eta || h) = <eta, mean> - G
    `kl(eta_p, eta_q)`              KL(p_eta_p || p_eta_q), a Bregman divergence of G
    `link(mean)`                    the eta with that mean; `dual(mean)` is G* there
    `tilt(eta)`                     p_eta as a normalized measure
    `sample(eta, n)`                ``(n, *batch, M, d)``; `log_prob(x, eta)`: log density or mass
    =============================== ===============================================================

    Everything except samples is differentiable in eta and in the measure's own parameters. A single
    eta ``(d,)`` gives results without the dimension M; eta defaults to 0. Batch dimensions
    broadcast. Outside its domain a family has G = +inf and infinite mean, covariance and KL.
    """

    # Names of the tensors that make up the measure, with their number of non-batch dimensions.
    _parameters: ClassVar[Mapping[str, int]] = {}
    # True if every parameter was a plain number: these take the precision of eta.
    _weak: bool = False
    # True to compute in double precision: cheap here, and prone to cancellation.
    _double: bool = False
    # True if the measure was tilted by several natural parameters at once.
    _rows: bool = False

    # What a class supplies ------------------------------------------------------------------------

    @property
    @abstractmethod
    def dimension(self) -> int:
        """d, the number of statistics."""

    @abstractmethod
    def _log_normalizer(self, eta: Tensor) -> Tensor:
        """G for eta of the full shape ``(*batch, M, d)``, inside the domain."""

    @abstractmethod
    def _sample(self, eta: Tensor, n: int) -> Tensor:
        """``(n, *batch, M, ...)``."""

    @abstractmethod
    def _log_density(self, x: Tensor, eta: Tensor) -> Tensor:
        """log p(x | eta)."""

    def _mean(self, eta: Tensor) -> Tensor:
        return gradient(self._log_normalizer, eta)

    def _product(self, eta: Tensor, vector: Tensor) -> Tensor:
        """Cov[u] vector: the Jacobian of the mean is symmetric, so one reverse pass gives it."""
        return pullback(self._mean, eta)[1](vector)

    def _covariance(self, eta: Tensor) -> Tensor:
        return jacobian(self._mean, eta)

    def _value_and_mean(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        return self._log_normalizer(eta), self._mean(eta)

    def _relative_entropy(self, eta: Tensor) -> Tensor:
        return (eta * self._mean(eta)).sum(-1) - self._log_normalizer(eta)

    def _inside(self, eta: Tensor) -> Tensor | None:
        """Where eta lies in the domain; None means everywhere."""
        return None

    def _visible(self, eta: Tensor) -> Tensor:
        """eta without its component orthogonal to the support."""
        return eta

    def _extent(self) -> tuple[Tensor, Tensor]:
        """A center ``(*batch, 1, d)`` and covariance ``(*batch, d, d)`` of the support."""
        zero = torch.zeros(1, self.dimension, dtype=self.dtype, device=self.device)
        zero = zero.expand(*self.batch_shape, 1, self.dimension)
        return self._mean(zero), self._covariance(zero)[..., 0, :, :]

    def _problem(self) -> Problem:
        """The objective that Newton's method minimizes to find the link."""

        def value_and_mean(eta: Tensor) -> tuple[Tensor, Tensor]:
            inside = self._inside(eta)
            if inside is None:
                return self._value_and_mean(eta)
            value, mean = self._value_and_mean(torch.where(inside[..., None], eta, 0.0))
            return torch.where(inside, value, torch.inf), mean

        return Problem(value_and_mean, self._covariance)

    def _link(self, mean: Tensor) -> Solution:
        measure, mean, resolution = wide(self, mean)
        center, spread = measure._detached()._extent()
        frame, off = whitening(center, spread, mean.detach(), resolution)
        code = torch.where(off, int(Code.OUTSIDE), int(Code.CONVERGED))
        return link_by_newton(measure, mean, code, frame, resolution)

    # The tensors behind the measure ---------------------------------------------------------------

    def _leaves(self) -> dict[str, tuple[Tensor, int]]:
        """The tensors that make up the measure, each with its number of non-batch dimensions."""
        given = ((n, getattr(self, n), k) for n, k in self._parameters.items())
        return {n: (x, k) for n, x, k in given if x is not None}

    def _rebuilt(self, leaves: Mapping[str, Tensor]) -> Self:
        """The same measure with other tensors."""
        new = copy.copy(self)
        for name, x in leaves.items():
            setattr(new, name, x)
        return new

    def _to(self, dtype: torch.dtype) -> Self:
        if dtype == self.dtype:
            return self
        return self._rebuilt({n: x.to(dtype) for n, (x, _) in self._leaves().items()})

    def _detached(self) -> Self:
        return self._rebuilt({n: x.detach() for n, (x, _) in self._leaves().items()})

    @property
    def batch_shape(self) -> torch.Size:
        """The shape of the batch of measures."""
        own = ((x, max(0, x.ndim - k)) for x, k in self._leaves().values())
        return functions.broadcast_shapes((), *(x.shape[:n] for x, n in own))

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the measure's own parameters."""
        leaves = self._leaves().values()
        return next((x.dtype for x, _ in leaves), torch.get_default_dtype())

    @property
    def device(self) -> torch.device:
        """The device of the measure's parameters."""
        leaves = self._leaves().values()
        return next((x.device for x, _ in leaves), torch.device("cpu"))

    def __repr__(self) -> str:
        batch = tuple(self.batch_shape)
        return f"{type(self).__name__}(dimension={self.dimension}, batch_shape={batch})"

    # The public edge ------------------------------------------------------------------------------

    def _enter(self, call: str, **given: Tensor | None) -> Entry:
        """Check natural parameters or means, and broadcast them to ``(*batch, M, d)``."""
        return enter(self, call, given)

    def _row_count(self) -> int:
        return 1

    def log_normalizer(self, eta: Tensor | None = None) -> Tensor:
        """G(eta) = log of the integral of h exp<u, eta> (T1); +inf outside the domain."""
        entry = self._enter("log_normalizer", eta=eta)
        return entry.finish(entry.measure._guarded(*entry.arguments), 0)

    def _guarded(self, eta: Tensor) -> Tensor:
        inside = self._inside(eta)
        if inside is None:
            return self._log_normalizer(eta)
        safe = torch.where(inside[..., None], eta, 0.0)
        return torch.where(inside, self._log_normalizer(safe), float("inf"))

    def mean(self, eta: Tensor | None = None) -> Tensor:
        """E[u] under p_eta: the gradient of G (T1)."""
        entry = self._enter("mean", eta=eta)
        measure, (eta,) = entry.measure, entry.arguments
        return entry.finish(_where_inside(measure, eta, measure._mean, 1), 1)

    def covariance(self, eta: Tensor | None = None) -> Tensor:
        """Cov[u] under p_eta: the Hessian of G and the Jacobian of the mean (T1)."""
        entry = self._enter("covariance", eta=eta)
        measure, (eta,) = entry.measure, entry.arguments
        return entry.finish(_where_inside(measure, eta, measure._covariance, 2), 2)

    def fisher_vector_product(self, eta: Tensor | None, vector: Tensor) -> Tensor:
        """Cov[u] vector, without forming the matrix (T1)."""
        entry = self._enter("fisher_vector_product", eta=eta, vector=vector)
        measure, (eta, vector) = entry.measure, entry.arguments

        def product(eta: Tensor) -> Tensor:
            return measure._product(eta, vector)

        return entry.finish(_where_inside(measure, eta, product, 1), 1)

    def relative_entropy(self, eta: Tensor | None = None) -> Tensor:
        """KL(p_eta || h) = <eta, E[u]> - G(eta), which is G* at the mean (T7).

        If h is not a probability measure, this is still the integral of p log(p / h): for the
        counting measure, minus the Shannon entropy.
        """
        entry = self._enter("relative_entropy", eta=eta)
        measure, (eta,) = entry.measure, entry.arguments
        return entry.finish(_where_inside(measure, eta, measure._relative_entropy, 0), 0)

    def kl(self, eta_p: Tensor | None, eta_q: Tensor | None) -> Tensor:
        """KL(p || q) = G(eta_q) - G(eta_p) - <eta_q - eta_p, E_p[u]> (T10)."""
        entry = self._enter("kl", eta_p=eta_p, eta_q=eta_q)
        measure, (p, q) = entry.measure, entry.arguments

        def divergence(p: Tensor) -> Tensor:
            slope = ((q - p) * measure._mean(p)).sum(-1)
            return not_negative(measure._guarded(q) - measure._log_normalizer(p) - slope)

        return entry.finish(_where_inside(measure, p, divergence, 0), 0)

    @overload
    def link(self, mean: Tensor, *, throw: Lit[True] = True) -> Tensor: ...

    @overload
    def link(self, mean: Tensor, *, throw: Lit[False]) -> Solution: ...

    def link(self, mean: Tensor, *, throw: bool = True) -> Tensor | Solution:
        """The eta whose mean is `mean`, of smallest norm: the canonical link (T8).

        It exists exactly for means in the relative interior of the convex hull of u's support.

        Args:
            mean: ``(*batch, M, d)``.
            throw: False returns a `Solution` (the value and the `Outcome` of each mean) instead of
                raising.

        Raises:
            NoSolutionError: a mean lies on the boundary of the hull or outside it. Subclass of
                `InputError` and `ConvergenceError`.
            ConvergenceError: Newton's method stalled.

        >>> import torch, cumulant as cm
        >>> die = cm.Empirical(torch.arange(1.0, 7.0)[:, None])
        >>> die.link(torch.tensor([[3.5], [7.0]]), throw=False).status.outside
        tensor([False,  True])
        """
        entry = self._enter("link", mean=mean)
        found: Solution = entry.measure._link(*entry.arguments)
        top = torch.finfo(entry.dtype).max
        code = found.status.code.squeeze(-1) if entry.flat else found.status.code
        found = Solution(entry.finish(found.value.clamp(-top, top), 1), Outcome(code))
        return found.status.check("link", found).value if throw else found

    def dual(self, mean: Tensor) -> Tensor:
        """G*(mean) = max over eta of <eta, mean> - G(eta) (T7, T8); +inf outside the hull."""
        entry = self._enter("dual", mean=mean)
        measure, (mean,) = entry.measure, entry.arguments
        found: Solution = measure._link(mean)
        eta = found.value
        measure, mean = measure._to(eta.dtype), mean.to(eta.dtype)
        value = (eta * mean).sum(-1) - measure._log_normalizer(eta)
        value = torch.where(found.status.boundary, measure._edge(mean, value), value)
        return entry.finish(torch.where(found.status.outside, float("inf"), value), 0)

    def _edge(self, mean: Tensor, near: Tensor) -> Tensor:
        """G* on the boundary, given its value at the last interior eta."""
        return near

    def tilt(self, eta: Tensor) -> Measure:
        """p_eta as a normalized measure: tilt(a).tilt(b) is tilt(a + b) (T2).

        With M natural parameters the result is M measures, paired with the rows of eta: later
        calls take an eta with M rows, or one row for all.
        """
        entry = self._enter("tilt", eta=eta)
        measure, (eta,) = entry.measure, entry.arguments
        _require_inside("tilt", measure, eta)
        narrow = widened(entry.dtype)
        out: Measure = measure._tilted(eta)._to(narrow)
        out._rows, out._weak = not entry.flat, False
        return out

    def _tilted(self, eta: Tensor) -> Measure:
        return Tilted(self, eta)

    def sample(
        self,
        eta: Tensor | None = None,
        n: int = 1,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """n draws from p_eta for each eta: ``(n, *batch, M, d)`` (no gradient).

        Args:
            eta: ``(*batch, M, d)``.
            n: number of draws.
            generator: random generator; default torch's global one.
        """
        whole("sample", "n", n, 0)
        entry = self._enter("sample", eta=eta)
        measure, (eta,) = entry.measure, entry.arguments
        _require_inside("sample", measure, eta)
        shape = (n, *eta.shape[:-1], measure._event_size())
        with torch.no_grad(), drawing_from("sample", generator, self.device):
            empty = 0 in shape
            return entry.finish(eta.new_empty(shape) if empty else measure._sample(eta, n), 1)

    def log_prob(self, x: Tensor, eta: Tensor | None = None) -> Tensor:
        """log p(x | eta): log density, or log mass where the support is discrete.

        Args:
            x: points ``(..., *batch, M, k)``, paired with eta as samples are, with any number of
                leading dimensions. Without eta, or with a single one, ``(..., *batch, k)``.
            eta: ``(*batch, M, d)``.

        Returns:
            The shape of x without its last dimension; -inf outside the support.
        """
        owner, size = f"{type(self).__name__}.log_prob", self._event_size()
        got, weak = numbers(owner, x=x)
        if not weak and eta is None:  # x counts towards the precision
            eta = torch.zeros(self.dimension, dtype=got["x"].dtype, device=self.device)
        entry = self._enter("log_prob", eta=eta)
        measure, (eta,) = entry.measure, entry.arguments
        x = got["x"].to(eta.dtype)
        if x.device != self.device:
            raise InputError(f"{owner}: x is on {x.device}, the measure on {self.device}.")
        if x.ndim < 1 or x.shape[-1] != size:
            raise InputError(
                f"{owner}: x must have shape (..., M, {size}), but has {tuple(x.shape)}."
                + (" Add a dimension with x[..., None]." if size == 1 else "")
            )
        # If eta has no rows, neither has x, as with samples.
        x = x[..., None, :] if entry.flat or x.ndim == 1 else x
        broadcast(owner, x=x.shape[:-1], eta=eta.shape[:-1])

        def density(eta: Tensor) -> Tensor:
            return measure._log_density(x, eta)

        return entry.finish(_where_inside(measure, eta, density, 0), 0)

    def _event_size(self) -> int:
        """The dimension k of x."""
        return self.dimension

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean ``(*batch, k)`` and covariance ``(*batch, k, k)`` of x itself, untilted."""
        return self.mean(), self.covariance()


class Tilted(Measure):
    """p_eta as base and shift, for measures without a compact closed form under tilting."""

    def __init__(self, base: Measure, shift: Tensor) -> None:
        self.base = base
        self.shift = shift
        self._double = base._double

    def _leaves(self) -> dict[str, tuple[Tensor, int]]:
        inner = {"base." + n: leaf for n, leaf in self.base._leaves().items()}
        return {**inner, "shift": (self.shift, 2)}

    def _rebuilt(self, leaves: Mapping[str, Tensor]) -> Self:
        new = copy.copy(self)
        inner = {n.removeprefix("base."): x for n, x in leaves.items() if n.startswith("base.")}
        new.base = self.base._rebuilt(inner)
        new.shift = leaves.get("shift", self.shift)
        return new

    def _row_count(self) -> int:
        return self.shift.shape[-2]

    @property
    def dimension(self) -> int:
        return self.base.dimension

    def _log_normalizer(self, eta: Tensor) -> Tensor:
        return self.base._log_normalizer(self.shift + eta) - self.base._log_normalizer(self.shift)

    def _mean(self, eta: Tensor) -> Tensor:
        return self.base._mean(self.shift + eta)

    def _covariance(self, eta: Tensor) -> Tensor:
        return self.base._covariance(self.shift + eta)

    def _product(self, eta: Tensor, vector: Tensor) -> Tensor:
        return self.base._product(self.shift + eta, vector)

    def _inside(self, eta: Tensor) -> Tensor | None:
        return self.base._inside(self.shift + eta)

    def _link(self, mean: Tensor) -> Solution:
        found = self.base._link(mean)
        shift = self.shift.to(found.value.dtype)
        return Solution(found.value - self.base._visible(shift), found.status)

    def _edge(self, mean: Tensor, near: Tensor) -> Tensor:
        shift = self.shift.to(mean.dtype)
        own = self.base._log_normalizer(shift) - (shift * mean).sum(-1)
        return self.base._edge(mean, near - own) + own

    def _tilted(self, eta: Tensor) -> Measure:
        return Tilted(self.base, self.shift + eta)

    def _sample(self, eta: Tensor, n: int) -> Tensor:
        return self.base._sample(self.shift + eta, n)

    def _log_density(self, x: Tensor, eta: Tensor) -> Tensor:
        return self.base._log_density(x, self.shift + eta)

    def _event_size(self) -> int:
        return self.base._event_size()


def _where_inside(measure: Measure, eta: Tensor, function: Any, tail: int) -> Tensor:
    """`function(eta)`, +inf outside the domain; `tail` dimensions follow the rows."""
    inside = measure._inside(eta)
    if inside is None:
        return function(eta)
    value = function(torch.where(inside[..., None], eta, 0.0))
    return torch.where(inside[(..., *(None,) * tail)], value, float("inf"))


def _require_inside(call: str, measure: Measure, eta: Tensor) -> None:
    inside = measure._inside(eta)
    if inside is not None:
        name = type(measure).__name__
        require(inside, lambda: f"{name}.{call}: some eta lie outside the domain (G = +inf).")


def not_negative(x: Tensor) -> Tensor:
    """Clamp negative rounding errors in the value, but not in the derivatives."""
    return x + (-x).clamp_min(0.0).detach()
