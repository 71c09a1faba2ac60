"""How much a map stretches: pairs of points, the Jacobian, upper bounds (docs/theory.md, T14)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cumulant.core.checks import finite, numbers, real, whole
from cumulant.core.describing import described_fields
from cumulant.core.errors import InputError
from cumulant.core.typed import linalg
from cumulant.dynamics.cloud_checks import levels_of, some_points
from cumulant.dynamics.krylov import largest_singular_value
from cumulant.dynamics.shape import rows_at_once, size_of

__all__ = [
    "Expansion",
    "ExpansionBounds",
    "Lipschitz",
    "expansion",
    "expansion_bounds",
    "local_lipschitz",
]


class Expansion(NamedTuple):
    """Ratios of distances after and before, over pairs of points.

    ``ratios`` ``(*batch, pairs)`` has NaN where two points coincided before; ``quantiles``
    ``(len(levels), *batch)`` ignores these.
    """

    ratios: Tensor
    levels: Tensor
    quantiles: Tensor

    __repr__ = described_fields

    @property
    def minimum(self) -> Tensor:
        return self.ratios.nan_to_num(float("inf"), posinf=float("inf")).amin(-1)

    @property
    def median(self) -> Tensor:
        return self.ratios.nanquantile(0.5, -1)

    @property
    def maximum(self) -> Tensor:
        return self.ratios.nan_to_num(-float("inf"), posinf=float("inf")).amax(-1)


def expansion(
    before: Tensor,
    after: Tensor,
    *,
    levels: tuple[float, ...] = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0),
    pairs: int = 100_000,
    generator: torch.Generator | None = None,
) -> Expansion:
    """||f(x_i) - f(x_j)|| / ||x_i - x_j|| for the points of a cloud before and after a map.

    Args:
        before, after: ``(*batch, N, d)`` and ``(*batch, N, e)``.
        levels: quantiles to return.
        pairs: number of random pairs; all pairs if there are no more than this.
        generator: of the random pairs; torch's own by default.

    >>> import torch, cumulant as cm
    >>> x = torch.randn(50, 4)
    >>> float(cm.dynamics.expansion(x, cm.dynamics.step(x)).minimum) >= 1
    True
    """
    x = some_points("expansion", before, "before")
    y = some_points("expansion", after, "after")
    if x.shape[:-1] != y.shape[:-1]:
        raise InputError(
            f"expansion: before and after must hold the same points, but have shapes "
            f"{tuple(x.shape)} and {tuple(y.shape)}."
        )
    n = x.shape[-2]
    whole("expansion", "pairs", pairs, 1)
    if n < 2:
        raise InputError("expansion: expected at least two points, but N is 1.")
    if n * (n - 1) // 2 <= pairs:
        i, j = torch.triu_indices(n, n, 1)
    else:
        i = torch.randint(n, (pairs,), generator=generator)
        j = (i + torch.randint(1, n, (pairs,), generator=generator)) % n
    i, j = i.to(x.device), j.to(x.device)
    size = size_of(x)  # lengths in units of it do not overflow
    lengths = [
        linalg.vector_norm(z[..., i, :] - z[..., j, :], dim=-1) for z in (x / size, y / size)
    ]
    apart = lengths[0] > 0
    if not bool(apart.any(-1).all()):
        raise InputError("expansion: all points of a cloud coincide, so no distance can grow.")
    ratios = torch.where(apart, lengths[1] / lengths[0].where(apart, 1.0), float("nan"))
    at = levels_of("expansion", levels, ratios)
    return Expansion(ratios, at, ratios.nanquantile(at, -1))


class Lipschitz(NamedTuple):
    """The largest singular value of a Jacobian, ``(*batch,)``.

    Attributes:
        value: the largest one found, a lower bound.
        steps: rounds taken.
        converged: whether `upper` is at most 1 + tol times `value`.
        upper: an upper bound, valid except for one random start in a million.
    """

    value: Tensor
    steps: int
    converged: Tensor
    upper: Tensor

    __repr__ = described_fields


def local_lipschitz(
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    batch_dims: int = 0,
    tol: float = 1e-6,
    max_steps: int = 500,
) -> Lipschitz:
    """The largest singular value of f's Jacobian at x: how much f can stretch nearby.

    Golub and Kahan's method from a random start, one Jacobian-vector and one vector-Jacobian
    product a round. The value is a lower bound. That it stopped growing proves nothing, so an upper
    bound is computed too, and `converged` says that the two agree to a relative tol. Leading
    singular values closer than tol count as one.

    Args:
        f: any differentiable map; its output may have another shape.
        x: where.
        batch_dims: the number of leading dimensions that are separate problems to f.
        tol: relative distance of the bound above, at which it stops.
        max_steps: maximum number of rounds; memory is twice that many states.

    Returns:
        `Lipschitz`. A Jacobian that is not finite has value and upper inf and has not converged.

    >>> import torch, cumulant as cm
    >>> A = torch.diag(torch.tensor([3.0, 1.0]))
    >>> cm.dynamics.local_lipschitz(lambda x: A @ x, torch.zeros(2)).value
    tensor(3.)
    """
    state = finite("local_lipschitz", "x", numbers("local_lipschitz", x=x)[0]["x"]).detach()
    if not 0 <= batch_dims <= state.ndim or state.numel() == 0:
        raise InputError(
            f"local_lipschitz: batch_dims must lie between 0 and {state.ndim} and the state not be "
            f"empty, but its shape is {tuple(state.shape)} and batch_dims {batch_dims}."
        )
    whole("local_lipschitz", "max_steps", max_steps, 1)
    batch = state.shape[:batch_dims]
    rows = math.prod(batch)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(state.shape, dtype=torch.float64, generator=generator).to(state)
    broken = torch.zeros(rows, 1, dtype=torch.bool, device=state.device)

    def sound(products: Tensor) -> Tensor:
        """Flat rows; those with products that are not finite are zero from then on."""
        nonlocal broken
        flat = products.detach().reshape(rows, -1)
        broken = broken | ~flat.isfinite().all(-1, keepdim=True)
        return flat.masked_fill(broken, 0.0)

    with torch.no_grad():
        image, pull = cast("tuple[Tensor, Any]", torch.func.vjp(f, state))
        if image.shape[:batch_dims] != batch:
            raise InputError(
                f"local_lipschitz: f must keep the {batch_dims} batch dimensions of x, "
                f"{tuple(batch)}, but returned shape {tuple(image.shape)}."
            )

        def pushed(v: Tensor) -> Tensor:
            return sound(cast(Any, torch.func.jvp(f, (state,), (v.reshape(state.shape),)))[1])

        def pulled(u: Tensor) -> Tensor:
            return sound(pull(u.reshape(image.shape))[0])

        found = largest_singular_value(
            pushed, pulled, start.reshape(rows, -1), tol=tol, limit=max_steps
        )
    lost = broken[:, 0].cpu()
    converged = (found.upper <= (1 + tol) * found.value) & ~lost
    value, upper = (
        t.masked_fill(lost, math.inf).to(state).reshape(batch) for t in (found.value, found.upper)
    )
    return Lipschitz(value, found.steps, converged.to(state.device).reshape(batch), upper)


class ExpansionBounds(NamedTuple):
    """Upper bounds on the effect of one step, each ``(*batch,)``.

    ``pairs``: on the ratio of distances of two points that see the same measure.
    ``joint``: on the Lipschitz constant of the whole map, with all points moving.
    """

    pairs: Tensor
    joint: Tensor

    __repr__ = described_fields


def expansion_bounds(x: Tensor, *, beta: float = 1.0, step_size: float = 1.0) -> ExpansionBounds:
    """Upper bounds on what a step without weights and contraction does to a cloud x (T14).

    Two points under one measure: 1 + tau beta diam^2 / 4, because no law on a set of that diameter
    has more variance in any direction (Popoviciu). All points together, with R the largest norm:
    1 + tau (beta R^2 (1 + sqrt N) + sqrt N), from the three terms of attention's derivative (query,
    key, value), where sqrt N bounds the norm of a row-stochastic matrix; Castin, Ablin and Peyré
    (2024) show that the order sqrt N is right.

    >>> import torch, cumulant as cm
    >>> cm.dynamics.expansion_bounds(torch.tensor([[1.0], [-1.0]])).pairs
    tensor(2.)
    """
    points = some_points("expansion_bounds", x).detach()
    kind, points = points.dtype, points if points.device.type == "mps" else points.double()
    beta = real("expansion_bounds", "beta", beta, least=0.0)
    tau = abs(real("expansion_bounds", "step_size", step_size))
    n = points.shape[-2]
    farthest = points.new_zeros(points.shape[:-2])
    for piece in torch.split(points, rows_at_once(points), -2):
        gaps = torch.cdist(piece, points, compute_mode="donot_use_mm_for_euclid_dist")
        farthest = torch.maximum(farthest, gaps.amax((-2, -1)))
    radius = linalg.vector_norm(points, dim=-1).amax(-1).square()
    joint = 1 + tau * (beta * radius * (1 + n**0.5) + n**0.5)
    return ExpansionBounds((1 + tau * beta * farthest.square() / 4).to(kind), joint.to(kind))
