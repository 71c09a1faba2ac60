"""Exponential families, p(x | theta) = b(x) exp(<u(x), theta> - A(theta)).

Tilting by eta adds eta to the natural parameter theta (docs/theory.md, T2). With h the member at
theta, G(eta) = A(theta + eta) - A(theta), and everything else follows from A and its derivatives.

Shapes: theta is ``(*batch, R, d)``, where R is 1 unless the measure was tilted by R natural
parameters at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor
from torch.distributions import Distribution

from cumulant.core.checks import broadcast, finite, numbers, require
from cumulant.core.errors import InputError
from cumulant.core.outcome import Code, Outcome, Solution
from cumulant.core.precision import widened
from cumulant.measures.calculus import gradient, jacobian
from cumulant.measures.frame import no_frame
from cumulant.measures.measure import Measure, not_negative
from cumulant.measures.newton import Problem, link_by_newton, wide

__all__ = ["ExponentialFamily"]


class ExponentialFamily(Measure):
    """A member of an exponential family as a measure; tilting adds eta to theta (T2)."""

    _parameters: ClassVar[Mapping[str, int]] = {"_theta": 2}
    _double: bool = True
    # True where distributions on the boundary of the hull, such as p = 0, are members too.
    _closed: ClassVar[bool] = False
    _theta: Tensor

    # What a family supplies -----------------------------------------------------------------------

    @abstractmethod
    def _potential(self, theta: Tensor) -> Tensor:
        """A(theta), up to a constant."""

    @abstractmethod
    def _distribution(self, theta: Tensor) -> Distribution:
        """torch's distribution with this natural parameter, of batch shape ``(*batch, M)``."""

    @abstractmethod
    def _log_base(self, x: Tensor) -> Tensor:
        """log b(x), with the constant that `_potential` omits; -inf outside the support."""

    @abstractmethod
    def _hull(self, mean: Tensor) -> Tensor:
        """`Code` of each mean: inside, on the boundary of or outside the hull of u's support."""

    def _gradient(self, theta: Tensor) -> Tensor:
        return gradient(self._potential, theta)

    def _increment(self, theta: Tensor, eta: Tensor) -> Tensor:
        """A(theta + eta) - A(theta)."""
        return self._potential(theta + eta) - self._potential(theta)

    def _valid(self, theta: Tensor) -> Tensor | None:
        """Where A is finite; None means everywhere."""
        return None

    def _inverse(self, mean: Tensor) -> Solution:
        """The theta with that mean, for means inside the hull. Uses Newton's method; families with
        a closed form override this with `solved`."""
        family, wide_mean, resolution = wide(self, mean)
        code = torch.full(mean.shape[:-1], int(Code.CONVERGED), device=mean.device)
        frame = no_frame(wide_mean)
        found = link_by_newton(_Potential(family), wide_mean, code, frame, resolution)
        return Solution(found.value.to(mean.dtype), found.status)

    def _start(self, mean: Tensor) -> Tensor:
        """Starting point of Newton's method for theta, in families without `_inverse`."""
        raise NotImplementedError(f"{type(self).__name__} must supply _inverse or _start")

    def statistic(self, x: Tensor) -> Tensor:
        """u(x) ``(..., d)``; default x itself."""
        return x

    def _event(self, x: Tensor) -> Tensor:
        """torch's event as the last dimension of x."""
        return x[..., None]

    # The measure ----------------------------------------------------------------------------------

    @property
    def dimension(self) -> int:
        return self._theta.shape[-1]

    def _row_count(self) -> int:
        return self._theta.shape[-2]

    def _log_normalizer(self, eta: Tensor) -> Tensor:
        return self._increment(self._theta, eta)

    def _mean(self, eta: Tensor) -> Tensor:
        return self._gradient(self._theta + eta)

    def _inside(self, eta: Tensor) -> Tensor | None:
        return self._valid(self._theta + eta)

    def _tilted(self, eta: Tensor) -> Measure:
        return self._rebuilt({"_theta": self._theta + eta})

    def _sample(self, eta: Tensor, n: int) -> Tensor:
        distribution = cast(Any, self._distribution(self._theta + eta))
        return self._event(distribution.sample((n,)))

    def _log_density(self, x: Tensor, eta: Tensor) -> Tensor:
        theta = self._theta + eta
        base = self._log_base(x)
        inside = base > -torch.inf
        u = self.statistic(torch.where(inside[..., None], x, self._typical(x)))
        product = torch.where(u == 0, 0.0, u * theta).sum(-1)
        value = torch.where(inside, base, 0.0) + product - self._potential(theta)
        return torch.where(inside, value, -torch.inf)

    def _typical(self, x: Tensor) -> Tensor:
        """A point of the support, used in place of x outside it."""
        return torch.zeros_like(x)

    def _link(self, mean: Tensor) -> Solution:
        code = self._hull(mean)
        fixed = ~self._theta.isfinite()
        own = self._gradient(self._theta)
        # A degenerate member cannot be tilted off its single point.
        same = (mean - own).abs().amax(-1) <= 1e-6 * (1 + own.abs().amax(-1))
        frozen = torch.where(same, int(Code.CONVERGED), int(Code.OUTSIDE))
        code = torch.where(fixed.any(-1), frozen, code)
        good = (code == Code.CONVERGED)[..., None] & ~fixed
        inner = torch.where(good, mean, self._interior(mean))
        found = self._inverse(inner)
        code = torch.where(code == Code.CONVERGED, found.status.code, code)
        eta = torch.where(good, found.value - torch.where(fixed, 0.0, self._theta), 0.0)
        return Solution(eta, Outcome(code))

    def _relative_entropy(self, eta: Tensor) -> Tensor:
        return not_negative(super()._relative_entropy(eta))

    def _edge(self, mean: Tensor, near: Tensor) -> Tensor:
        # h has no mass on the boundary, so the KL of a distribution there is infinite.
        return torch.full_like(near, torch.inf)

    def _interior(self, mean: Tensor) -> Tensor:
        """A placeholder mean inside the hull, for rows where `mean` is not."""
        return torch.full_like(mean, 0.5)

    # Coordinates ----------------------------------------------------------------------------------

    def _shown(self, x: Tensor, tail: int) -> Tensor:
        """A parameter, with the row dimension dropped unless there are several rows."""
        x = x.to(torch.get_default_dtype()) if self._weak else x
        return x if self._rows else x.squeeze(-1 - tail)

    @property
    def natural(self) -> Tensor:
        """theta, ``(*batch, d)`` (``(*batch, M, d)`` after tilting by M natural parameters)."""
        return self._shown(self._theta, 1)

    @property
    def expectation(self) -> Tensor:
        """E[u] ``(*batch, d)``, the expectation parameters of the same member."""
        return self._shown(self._gradient(self._theta), 1)

    @classmethod
    def _empty(cls, d: int, **fixed: Any) -> Self:
        """An instance without theta; subclasses with further parameters set them here."""
        if fixed:
            raise InputError(f"{cls.__name__} has no fixed parameter {', '.join(fixed)}.")
        if d == 0:
            raise InputError(f"{cls.__name__}: parameters must end in a dimension of at least 1.")
        return cls.__new__(cls)

    @classmethod
    def from_natural(cls, natural: Tensor, **fixed: Any) -> Self:
        """The member with natural parameter theta ``(*batch, d)``."""
        got, weak = numbers(f"{cls.__name__}.from_natural", natural=natural)
        theta = got["natural"]
        if theta.ndim < 1:
            raise InputError(f"{cls.__name__}.from_natural: natural must have shape (..., d).")
        new = cls._empty(theta.shape[-1], **fixed)
        new._theta, new._weak = theta[..., None, :], weak
        new._check_size()
        new._check_natural(f"{cls.__name__}.from_natural")
        return new

    def _check_natural(self, owner: str) -> None:
        finite(owner, "natural", self._theta)
        valid = self._valid(self._theta)
        if valid is not None:
            require(valid, lambda: f"{owner}: some natural parameters lie outside the domain.")

    @classmethod
    def from_expectation(cls, expectation: Tensor, **fixed: Any) -> Self:
        """The member with E[u] = expectation ``(*batch, d)`` (T11); differentiable.

        Raises:
            NoSolutionError: no member has this expectation.
            ConvergenceError: Newton's method stalled.
        """
        return cls._expecting(f"{cls.__name__}.from_expectation", expectation, **fixed)

    @classmethod
    def _expecting(cls, call: str, expectation: Tensor, **fixed: Any) -> Self:
        """`from_expectation`; errors name `call`."""
        got, weak = numbers(call, expectation=expectation)
        mean = finite(call, "expectation", got["expectation"])
        if mean.ndim < 1:
            raise InputError(f"{call}: expectation must have shape (..., d).")
        new = cls._empty(mean.shape[-1], **fixed)
        new._theta, new._weak = torch.zeros_like(mean)[..., None, :], weak
        new._check_size()
        double, wide_mean, _ = wide(new, mean[..., None, :])
        code = double._hull(wide_mean)
        if cls._closed:
            code = torch.where(code == Code.BOUNDARY, int(Code.CONVERGED), code)
        found = double._inverse_inside(wide_mean, code)
        found.status.check(call, found)
        return double._rebuilt({"_theta": found.value})._to(mean.dtype)

    def _inverse_inside(self, mean: Tensor, code: Tensor) -> Solution:
        """The theta of each mean whose code is good; the rest use a placeholder inside the hull."""
        good = code == Code.CONVERGED
        found = self._inverse(torch.where(good[..., None], mean, self._interior(mean)))
        return Solution(found.value, Outcome(torch.where(good, found.status.code, code)))

    def _check_size(self) -> None:
        """Raise if the natural parameter has the wrong size for this family."""
        self._needs(1)

    def _needs(self, d: int) -> None:
        broadcast(type(self).__name__, **{n: x.shape[:-2] for n, (x, _) in self._leaves().items()})
        if self._theta.shape[-1] != d:
            raise InputError(
                f"{type(self).__name__} has {d} statistic{'s' * (d > 1)}, so parameters end in a "
                f"dimension of {d}; got {self._theta.shape[-1]}."
            )

    def to_torch(self, eta: Tensor | None = None) -> Distribution:
        """p_eta as a torch distribution of batch shape ``(*batch, M)``."""
        entry = self._enter("to_torch", eta=eta)
        narrow = widened(entry.dtype)
        measure, eta = entry.measure._to(narrow), entry.arguments[0].to(narrow)
        if entry.flat:  # one row, dropped from every parameter
            leaves = {n: x[..., 0, :] for n, (x, _) in measure._leaves().items()}
            measure, eta = measure._rebuilt(leaves), eta[..., 0, :]
        return measure._distribution(measure._theta + eta)


def solved(theta: Tensor) -> Solution:
    """Wrap a closed form as a link in which every problem converged."""
    code = torch.full(theta.shape[:-1], int(Code.CONVERGED), device=theta.device)
    return Solution(theta, Outcome(code))


def interval(mean: Tensor, low: float | None, high: float | Tensor | None) -> Tensor:
    """Codes for a scalar mean that must lie between two bounds."""
    x = mean[..., 0]
    outside, boundary = torch.zeros_like(x, dtype=torch.bool), torch.zeros_like(x, dtype=torch.bool)
    if low is not None:
        outside, boundary = outside | (x < low), boundary | (x == low)
    if high is not None:
        outside, boundary = outside | (x > high), boundary | (x == high)
    return coded(outside, boundary)


def coded(outside: Tensor, boundary: Tensor) -> Tensor:
    """Codes from two masks."""
    code = torch.where(boundary, int(Code.BOUNDARY), int(Code.CONVERGED))
    return torch.where(outside, int(Code.OUTSIDE), code)


class _Potential:
    """A as Newton's method sees it, independent of the member theta."""

    def __init__(self, family: ExponentialFamily) -> None:
        self.family = family

    @property
    def batch_shape(self) -> torch.Size:
        return torch.Size(())

    def _leaves(self) -> dict[str, tuple[Tensor, int]]:
        return {n: leaf for n, leaf in self.family._leaves().items() if n != "_theta"}

    def _rebuilt(self, leaves: Mapping[str, Tensor]) -> _Potential:
        return _Potential(self.family._rebuilt(leaves))

    def _problem(self) -> Problem:
        family = self.family

        def value_and_gradient(theta: Tensor) -> tuple[Tensor, Tensor]:
            valid = family._valid(theta)
            if valid is None:
                return family._potential(theta), family._gradient(theta)
            safe = torch.where(valid[..., None], theta, family._start(family._interior(theta)))
            value = torch.where(valid, family._potential(safe), torch.inf)
            return value, family._gradient(safe)

        def hessian(theta: Tensor) -> Tensor:
            return jacobian(family._gradient, theta)

        return Problem(value_and_gradient, hessian, start=family._start)
