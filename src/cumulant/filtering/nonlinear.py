"""`SwitchingNonlinear`: modes with functions in place of matrices (docs/theory.md, T25).

The filter, the smoother and everything else stay linear: at each message a function is replaced by
the affine map with noise that stands for it there, by its Jacobian (extended Kalman filter) or by
regression over sigma points (unscented). A linear function is its own replacement in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor

from cumulant.core.checks import whole
from cumulant.core.errors import InputError
from cumulant.core.renamed import renamed
from cumulant.core.typed import linalg
from cumulant.filtering.model import REQUIRED, SwitchingLinearGaussian
from cumulant.filtering.moments import Affine, symmetric

__all__ = ["SwitchingNonlinear"]

Function = Callable[..., Tensor]


class SwitchingNonlinear(SwitchingLinearGaussian):
    """x_t = f_j(x_{t-1}) + N(0, Q_j) and y_t = h_j(x_t) + N(0, R_j) in mode j.

    `filter`, `update`, `smooth`, `forecast` and `sample` take it as they take the linear model.

    Args:
        transition, initial, initial_mean, initial_covariance: as in `SwitchingLinearGaussian`.
        dynamics: f, one function for all modes or a list of M, from ``(n,)`` to ``(n,)``, written
            in torch for one state; with inputs ``f(x, u)``.
        emission: h, likewise, from ``(n,)`` to ``(p,)``.
        dynamics_noise, emission_noise: Q and R.
        method: ``"ekf"``, Jacobians by ``torch.func.jacfwd`` at the mean, or ``"ukf"``, sigma
            points that see the curvature.
        input_size: m, if the functions take inputs.

    >>> import torch, cumulant as cm
    >>> model = cm.filtering.SwitchingNonlinear(
    ...     transition=torch.ones(1, 1), initial=torch.ones(1),
    ...     dynamics=lambda x: x + 0.1 * x.sin(), dynamics_noise=torch.eye(1),
    ...     emission=lambda x: x.square(), emission_noise=torch.eye(1),
    ...     initial_mean=torch.ones(1), initial_covariance=torch.eye(1), method="ukf")
    >>> cm.filtering.filter(model, torch.tensor([[1.0], [4.0]])).mean.shape
    torch.Size([2, 1])
    """

    @renamed(input_dimension="input_size")
    def __init__(
        self,
        *,
        transition: Tensor,
        initial: Tensor | None = None,
        dynamics: Function | Sequence[Function],
        dynamics_noise: Tensor,
        emission: Function | Sequence[Function],
        emission_noise: Tensor,
        initial_mean: Tensor,
        initial_covariance: Tensor,
        method: Literal["ekf", "ukf"] = "ekf",
        input_size: int = 0,
    ) -> None:
        if method not in ("ekf", "ukf"):
            raise InputError(f"SwitchingNonlinear: method must be 'ekf' or 'ukf', not {method!r}.")
        if not isinstance(initial_mean, Tensor) or not isinstance(emission_noise, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError("SwitchingNonlinear: initial_mean and emission_noise must be tensors.")
        mean = initial_mean
        n, p = mean.shape[-1] if mean.ndim else 0, emission_noise.shape[-1:]
        if n < 1 or not p:
            raise InputError(
                "SwitchingNonlinear: initial_mean must have shape (..., n), n >= 1, and "
                "emission_noise (..., p, p)."
            )
        square = torch.zeros(n, n, dtype=mean.dtype, device=mean.device)
        super().__init__(
            transition=transition,
            initial=initial,
            dynamics=square,
            dynamics_noise=dynamics_noise,
            emission=square.new_zeros(p[0], n),
            emission_noise=emission_noise,
            initial_mean=initial_mean,
            initial_covariance=initial_covariance,
        )
        self.method = method
        self.input_size = whole("SwitchingNonlinear", "input_size", input_size, 0)
        self.functions = {
            "dynamics": self._functions("dynamics", dynamics, n),
            "emission": self._functions("emission", emission, p[0]),
        }

    def _functions(self, which: str, given: Any, size: int) -> list[Function]:
        several = isinstance(given, Sequence)
        found = list(cast(Sequence[Any], given)) if several else [given] * self.modes
        if len(found) != self.modes or not all(callable(f) for f in found):
            raise InputError(
                f"SwitchingNonlinear: {which} must be a function or a list of {self.modes} "
                f"functions, one for each mode (transition), not {given!r}."
            )
        x = self.parameters["initial_mean"].detach()
        x = x.reshape(-1, x.shape[-1])[0]
        u = (x.new_zeros(self.input_size),) if self.input_size else ()
        for j, f in enumerate(found):
            y: Any = f(x.clone(), *u)
            if not isinstance(y, Tensor) or y.shape != (size,):
                came = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
                raise InputError(
                    f"SwitchingNonlinear: {which} of mode {j} must map a state ({x.shape[0]},) to "
                    f"({size},); it gave {came}."
                )
        return found

    def _again(self, given: Mapping[str, Any]) -> Self:
        rest = {n: x for n, x in given.items() if n not in ("dynamics", "emission")}
        own: Any = {"method": self.method, "input_size": self.input_size}
        for name, functions in self.functions.items():
            new = given.get(name)
            own[name] = functions if new is None or isinstance(new, Tensor) else new
        unknown = rest.keys() - {*REQUIRED, "initial"}
        if unknown:
            raise InputError(f"replace: a nonlinear model has no {', '.join(sorted(unknown))}.")
        return type(self)(**rest, **own)

    def permute(self, order: Sequence[int]) -> Self:
        """The same model with its modes in another order."""
        linear = SwitchingLinearGaussian(**self.parameters).permute(order)
        new = self._again(dict(linear.parameters))
        new.functions = {w: [f[i] for i in order] for w, f in self.functions.items()}
        return new

    def linearize(
        self, step: Affine, mean: Tensor, covariance: Tensor, which: str, inputs: Tensor | None
    ) -> Affine:
        """The affine maps that stand for the functions at these messages."""
        rule = _by_jacobian if self.method == "ekf" or covariance.ndim == 0 else _by_points
        lead = mean.shape[:-2]
        each: list[Affine] = []
        for j, f in enumerate(self.functions[which]):
            at = min(j, mean.shape[-2] - 1)
            m = mean[..., at, :]
            P = covariance[..., at, :, :] if covariance.ndim else covariance
            u = None
            if inputs is not None:
                u = inputs.expand(*lead, 1, inputs.shape[-1])[..., 0, :]
            each.append(rule(f, m, P, u))
        matrix, offset, noise = (torch.stack(list(x), len(lead)) for x in zip(*each, strict=True))
        return Affine(matrix, offset, noise + step.noise)


def _rows(f: Function, x: Tensor, u: Tensor | None) -> Tensor:
    """f of every state ``(..., n)``."""
    return _mapped(f, x, u).reshape(*x.shape[:-1], -1) if x.numel() else _empty(f, x, u)


def _mapped(f: Function, x: Tensor, u: Tensor | None) -> Tensor:
    """f, or its Jacobian, of every state at once."""
    flat = [x.reshape(-1, x.shape[-1])]
    if u is not None:
        flat.append(u.expand(*x.shape[:-1], u.shape[-1]).reshape(-1, u.shape[-1]))
    try:
        return torch.vmap(f)(*flat)
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        raise InputError(
            "SwitchingNonlinear: functions run on many states at once by torch.vmap, so they must "
            "be torch operations that do not branch on values (torch.where instead of if): "
            f"{str(error).splitlines()[0][:200]}"
        ) from error


def _empty(f: Function, x: Tensor, u: Tensor | None) -> Tensor:
    one = (x.new_zeros(x.shape[-1]), *(() if u is None else (u.new_zeros(u.shape[-1]),)))
    return x.new_zeros(*x.shape[:-1], f(*one).shape[-1])


def _by_jacobian(f: Function, mean: Tensor, covariance: Tensor, u: Tensor | None) -> Affine:
    value = _rows(f, mean, u)
    matrix = value.new_zeros(*value.shape, mean.shape[-1])
    if mean.numel():
        # jacfwd promotes entries like 0.1 * x[1] to double (torch 2.13).
        matrix = _mapped(torch.func.jacfwd(f), mean, u).to(mean.dtype).reshape(matrix.shape)
    offset = value - (matrix @ mean[..., None])[..., 0]
    size = offset.shape[-1]
    return Affine(matrix, offset, offset.new_zeros(*offset.shape, size))


def _by_points(f: Function, mean: Tensor, covariance: Tensor, u: Tensor | None) -> Affine:
    """Regression of f over 2 n points at distance c along the columns of a root of P.

    Weights are 1 / (2 c^2), and 1 - n / c^2 at the mean, with c^2 = max(n, 3): none is negative,
    so no covariance can be.
    """
    n = mean.shape[-1]
    spread = float(max(n, 3))
    c = math.sqrt(spread)
    variances = covariance.detach().diagonal(dim1=-2, dim2=-1)
    slack = 10 * n * torch.finfo(mean.dtype).eps
    # Where the state is certain, the root needs a trace of noise.
    trace = torch.where(variances > 0, slack * variances, torch.finfo(mean.dtype).eps ** 1.5)
    found = linalg.cholesky_ex(symmetric(covariance) + torch.diag_embed(trace))
    root = torch.where(found.info[..., None, None] == 0, found.L, torch.nan)
    away = c * root.mT
    points = torch.cat(
        [mean[..., None, :], mean[..., None, :] + away, mean[..., None, :] - away], -2
    )
    y = _rows(f, points, None if u is None else u[..., None, :])
    weights = y.new_full((2 * n + 1,), 0.5 / spread)
    weights[0] = 1 - n / spread
    center = (weights[:, None] * y).sum(-2)
    slopes = (y[..., 1 : n + 1, :] - y[..., n + 1 :, :]).mT / (2 * c)
    matrix = linalg.solve_triangular(root, slopes, upper=False, left=False)
    left = y - center[..., None, :] - (points - mean[..., None, :]) @ matrix.mT
    noise = (left * weights[:, None]).mT @ left
    return Affine(matrix, center - (matrix @ mean[..., None])[..., 0], symmetric(noise))
