"""Mean-field spins: the same map with the sites' own log-normalizers (docs/theory.md, T32)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cumulant.core.checks import finite, numbers, require
from cumulant.core.describing import described_fields
from cumulant.core.errors import InputError
from cumulant.dynamics.fixed_point import FixedPoint, fixed_point
from cumulant.measures.measure import Measure

__all__ = ["MeanField", "mean_field"]


@dataclass(frozen=True)
class MeanField:
    """A solution of the mean-field equations.

    Attributes:
        mean: E[x_i], ``(n, d)``.
        natural_parameter: eta_i = sum_j J_ij m_j + field_i, ``(n, d)``.
        free_energy: of the product of the tilted sites; at least -log Z, and stationary here.
        solution: the `FixedPoint` it came from, with its status.
    """

    mean: Tensor
    natural_parameter: Tensor
    free_energy: Tensor
    solution: FixedPoint

    __repr__ = described_fields


def mean_field(
    sites: Measure,
    couplings: Tensor,
    field: Tensor | None = None,
    *,
    start: Tensor | None = None,
    solver: str = "damped",
    tol: float | None = None,
    max_steps: int = 10_000,
    damping: float = 0.5,
    throw: bool = True,
) -> MeanField:
    """Solve m_i = grad G_i(sum_j J_ij m_j + field_i) (T32).

    The law is prod_i h_i(x_i) exp(sum_{i<j} J_ij <x_i, x_j> + sum_i <field_i, x_i>), temperature
    absorbed in J and the fields; its best approximation by a product of tilted sites minimizes
    F = sum_i KL(p_i, h_i) - sum_{i<j} J_ij <m_i, m_j> - sum_i <field_i, m_i>, and here F is
    stationary. Attention is the case of sites N(0, I), whose grad G is the identity, with J the
    softmax of the states: not symmetric, so without such an F.

    Args:
        sites: any probability measure of `cumulant.measures` with u(x) = x, one for all sites or
            with batch shape ``(n,)``: `VonMisesFisher` for spins on a sphere (d = 1: plus and minus
            one), `Gaussian`, `Empirical` with normalized weights, ...
        couplings: J ``(n, n)``, symmetric, zero on the diagonal.
        field: ``(n, d)`` or ``(d,)``; zero by default.
        start: ``(n, d)``. By default means tilted along the field and in fixed pseudo-random
            directions. There may be several solutions, and the start decides.
        solver, tol, max_steps, damping, throw: see `fixed_point`. Damped iteration leaves solutions
            that are not a minimum of F.

    Returns:
        `MeanField`; ``mean`` is differentiable in couplings, field and the sites' parameters.

    Three spins on a circle that like to agree, each with two neighbors:

    >>> import torch, cumulant as cm
    >>> up = cm.VonMisesFisher(torch.tensor([1.0, 0.0], dtype=torch.float64), 0.0)
    >>> J = 3.0 * (1 - torch.eye(3, dtype=torch.float64))
    >>> cm.dynamics.mean_field(up, J).mean.norm(dim=-1)
    tensor([0.9022, 0.9022, 0.9022], dtype=torch.float64)
    """
    J, h = _checked("mean_field", sites, couplings, field)
    n, d = len(J), sites.dimension
    own = len(sites.batch_shape) == 1

    def spins(function: Callable[[Tensor], Tensor], eta: Tensor) -> Tensor:
        return function(eta[:, None])[:, 0] if own else function(eta)

    def tilt(m: Tensor) -> Tensor:
        return J @ m + h

    if start is None:
        generator = torch.Generator().manual_seed(0)
        eta = torch.randn(n, d, dtype=torch.float64, generator=generator).to(J)
        start = spins(sites.mean, eta + h).detach()
    elif tuple(start.shape) != (n, d):
        raise InputError(
            f"mean_field: start must have shape ({n}, {d}), but has {tuple(start.shape)}."
        )
    solution = fixed_point(
        lambda m: spins(sites.mean, tilt(m)).to(J.dtype),
        start.to(J.dtype),
        solver=solver,
        tol=tol,
        max_steps=max_steps,
        damping=damping,
        throw=throw,
    )
    m = solution.value
    eta = tilt(m)
    entropy = spins(sites.relative_entropy, eta).sum()
    free = entropy - 0.5 * (m * (J @ m)).sum() - (m * h).sum()
    return MeanField(m, eta, free, solution)


def _checked(
    call: str, sites: Measure, couplings: Tensor, field: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Couplings ``(n, n)`` and fields ``(n, d)`` or ``(d,)``, in one precision with the sites."""
    given = {"couplings": couplings} if field is None else {"couplings": couplings, "field": field}
    got, _ = numbers(call, **given)
    kind = torch.promote_types(got["couplings"].dtype, sites.dtype)
    J = finite(call, "couplings", got["couplings"].to(kind))
    if J.ndim != 2 or J.shape[0] != J.shape[1] or not len(J):
        raise InputError(f"{call}: couplings must be a matrix (n, n), but have {tuple(J.shape)}.")
    n, d = len(J), sites.dimension
    require(
        (J - J.mT).abs() <= 1e-6 * (1 + J.abs().amax()),
        lambda: f"{call}: couplings must be symmetric; use (J + J.mT) / 2.",
    )
    require(
        J.diagonal() == 0,
        lambda: f"{call}: couplings of a site with itself must be zero; put them into the sites.",
    )
    h = J.new_zeros(n, d) if field is None else finite(call, "field", got["field"].to(kind))
    if h.shape not in ((n, d), (d,)):
        raise InputError(
            f"{call}: field must have shape ({n}, {d}) or ({d},), but has {tuple(h.shape)}."
        )
    if tuple(sites.batch_shape) not in ((), (n,)):
        raise InputError(
            f"{call}: sites must be one measure or a batch of {n}, but have batch shape "
            f"{tuple(sites.batch_shape)}."
        )
    return J, h
