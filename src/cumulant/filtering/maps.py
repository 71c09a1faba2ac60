"""Maps that keep a law in its family, and the image of a law under them (docs/theory.md, T26).

A map acts on the natural parameters theta ``(*batch, R, d)`` of a family's members. Its own tensors
may have batch dimensions, which broadcast with those of the law.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from cumulant.core.checks import broadcast, finite, numbers, positive, require, whole
from cumulant.core.describing import described_fields
from cumulant.core.errors import InputError
from cumulant.core.typed import functions, linalg, tolist
from cumulant.filtering.model_checks import semi_definite, sized
from cumulant.filtering.moments import symmetric
from cumulant.measures.gaussian import Gaussian, MeanCovarianceGaussian, inverse, packed_natural
from cumulant.measures.measure import Measure
from cumulant.measures.newton import wide
from cumulant.measures.positive import Gamma
from cumulant.measures.simplex import Beta, Dirichlet

__all__ = ["Flip", "Linear", "Map", "Merge", "Permute", "Renew", "Scale", "push"]

_M = TypeVar("_M", bound=Measure)

FAMILIES = (Gamma, Beta, Dirichlet, MeanCovarianceGaussian)
CLOSED = """Gamma under Scale, Beta under Flip, Dirichlet under Permute and Merge, Gaussian \
under Linear, each under None (unchanged) and under Renew (by a member of the same family)"""


class Map(ABC):
    """A change of the state under which some families are closed."""

    _families: ClassVar[tuple[type, ...]]
    # What was given as tensors, and so decides on precision, device and derivatives.
    _tensors: tuple[Tensor, ...] = ()
    _batch: torch.Size = torch.Size()

    __repr__ = described_fields

    @abstractmethod
    def _move(self, member: Any, theta: Tensor) -> Tensor:
        """The natural parameter of the image of each theta, in the family of `member`."""

    def _image_size(self, owner: str, member: Any) -> int:
        """How many numbers the image is a law of; raises if the map does not fit the member."""
        return member._event_size()


class Scale(Map):
    """x to c x with c > 0, for a gamma: the rate becomes rate / c."""

    _families = (Gamma,)

    def __init__(self, c: Tensor | float) -> None:
        got, weak = numbers("Scale", c=c)
        self.c = positive("Scale", "c", got["c"])
        self._tensors, self._batch = () if weak else (self.c,), self.c.shape

    def _move(self, member: Any, theta: Tensor) -> Tensor:
        rate = theta[..., 0] / self.c.to(theta)[..., None]
        return torch.stack(functions.broadcast_tensors(rate, theta[..., 1]), -1)


class Flip(Map):
    """x to 1 - x, for a beta: the two concentrations change places."""

    _families = (Beta,)

    def _move(self, member: Any, theta: Tensor) -> Tensor:
        return theta.flip(-1)


class Merge(Map):
    """Coordinates of a Dirichlet summed within groups; their concentrations are summed too.

    Each coordinate 0, 1, ..., K - 1 belongs to exactly one of at least two groups.
    """

    _families = (Dirichlet,)

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        try:
            self.groups = [[whole("", "", k, 0) for k in group] for group in groups]
        except (TypeError, InputError):
            self.groups = []
        named = sorted(k for group in self.groups for k in group)
        if named != list(range(len(named))) or not all(self.groups) or len(self.groups) < 2:
            raise InputError(
                f"{type(self).__name__}: each coordinate 0, 1, ..., K - 1 must be named once, and "
                f"at least two must be left; got {groups!r}."
            )

    def _image_size(self, owner: str, member: Any) -> int:
        size = sum(len(group) for group in self.groups)
        if member.dimension != size:
            name = type(self).__name__
            raise InputError(f"{owner}: {name} of {size} coordinates for {member.dimension}.")
        return len(self.groups)

    def _move(self, member: Any, theta: Tensor) -> Tensor:
        return torch.stack([theta[..., group].sum(-1) for group in self.groups], -1)


class Permute(Merge):
    """Coordinates of a Dirichlet in another order: the new x_k is the old x_order[k]."""

    def __init__(self, order: Sequence[int] | Tensor) -> None:
        if isinstance(order, Tensor):
            order = tolist(order)
        super().__init__([[k] for k in order] if isinstance(order, list | tuple) else [])


class Linear(Map):
    """x to W x + b + N(0, Q), for a Gaussian.

    Args:
        W: ``(a, k)``.
        b: ``(a,)``; zero by default.
        Q: ``(a, a)``, positive semi-definite; zero by default. W W' + Q must be positive definite,
            or the image has no density.
    """

    _families = (MeanCovarianceGaussian,)

    def __init__(self, W: Tensor, b: Tensor | None = None, Q: Tensor | None = None) -> None:
        parts = {"W": W, "b": b, "Q": Q}
        got, weak = numbers("Linear", **{n: x for n, x in parts.items() if x is not None})
        shape = sized("Linear", "W", finite("Linear", "W", got["W"]), 2)
        a = shape[-2]
        self.W, self._tensors = got["W"], () if weak else tuple(got.values())
        self.b = finite("Linear", "b", got.get("b", self.W.new_zeros(a)))
        self.Q = finite("Linear", "Q", got.get("Q", self.W.new_zeros(a, a)))
        if self.b.shape[-1:] != (a,) or self.Q.shape[-2:] != (a, a):
            raise InputError(
                f"Linear: with W {tuple(shape)}, b must be ({a},) and Q ({a}, {a}), but they are "
                f"{tuple(self.b.shape)} and {tuple(self.Q.shape)}."
            )
        self._batch = broadcast("Linear", W=shape[:-2], b=self.b.shape[:-1], Q=self.Q.shape[:-2])
        semi_definite("Linear", "Q", self.Q)
        reached = symmetric(self.W @ self.W.mT + self.Q).detach()
        require(
            linalg.matrix_rank(reached, hermitian=True) == a,
            lambda: "Linear: W W' + Q is singular, so the image has no density: give more noise Q.",
        )

    def _image_size(self, owner: str, member: Any) -> int:
        if self.W.shape[-1] != member._event_size():
            raise InputError(
                f"{owner}: W of Linear is {tuple(self.W.shape)}, but the Gaussian is a law of "
                f"{member._event_size()} numbers."
            )
        return self.W.shape[-2]

    def _move(self, member: Any, theta: Tensor) -> Tensor:
        mean, covariance = member._member(theta)
        W, Q = (x.to(theta)[..., None, :, :] for x in (self.W, self.Q))
        mean = (W @ mean[..., None])[..., 0] + self.b.to(theta)[..., None, :]
        precision = inverse(symmetric(W @ covariance @ W.mT + Q))
        first, second = (precision @ mean[..., None])[..., 0], packed_natural(precision)
        return torch.cat([first, second.expand(*first.shape[:-1], -1)], -1)


class Renew(Map):
    """The state is redrawn from a member of its family: a change point."""

    _families = FAMILIES

    def __init__(self, measure: Measure) -> None:
        self.measure = member_of("Renew", measure)
        self._tensors = tuple(tensors_of("measure", self.measure).values())
        self._batch = self.measure.batch_shape

    def _image_size(self, owner: str, member: Any) -> int:
        if type(self.measure) is not type(member) or self.measure.dimension != member.dimension:
            raise InputError(
                f"{owner}: Renew draws from {self.measure!r}, but the state is a {member!r}: they "
                "must be of one family and dimension."
            )
        return member._event_size()

    def _move(self, member: Any, theta: Tensor) -> Tensor:
        own = self.measure._theta.to(theta)
        return own.expand(functions.broadcast_shapes(own.shape, theta.shape))


def member_of(owner: str, measure: Any) -> Any:
    """The measure as a member of one of the families; in a Gaussian the covariance moves too."""
    kind = cast(type[object], type(measure))
    if kind is not Gaussian and kind not in FAMILIES:
        raise InputError(
            f"{owner}: expected a Gamma, Beta, Dirichlet, Gaussian or MeanCovarianceGaussian, not "
            f"{kind.__name__}."
        )
    if measure._rows:
        raise InputError(f"{owner}: the measure must not be tilted by several eta at once.")
    if kind is Gaussian:
        return MeanCovarianceGaussian(measure.loc, measure.covariance_matrix)
    return measure


def tensors_of(name: str, part: Any) -> dict[str, Tensor]:
    """The tensors that a map or a measure was given, if any."""
    found: Sequence[Tensor] = part._tensors if isinstance(part, Map) else ()
    if isinstance(part, Measure) and not part._weak:
        found = [x for x, _ in part._leaves().values()]
    return {f"{name} {i}": x for i, x in enumerate(found)}


def image_size(owner: str, member: Any, map: Any) -> int:
    """How many numbers the image is a law of; raises unless the family is closed under the map."""
    if map is None:
        return member._event_size()
    if not isinstance(map, Map) or type(member) not in map._families:
        raise InputError(
            f"{owner}: {type(member).__name__} is not closed under {type(map).__name__}. Closed "
            f"are {CLOSED}."
        )
    return map._image_size(owner, member)


def push(measure: _M, map: Map | None) -> _M:
    """The law of map(x) for x from the measure: again a member of its family (T26).

    Gamma is closed under `Scale`, Beta under `Flip`, Dirichlet under `Permute` and `Merge`,
    Gaussians under `Linear`, and each under None (unchanged) and `Renew`.

    Args:
        measure: of batch shape ``(*batch,)``.
        map: with parameters of one law, or for each of the batch.

    Raises:
        InputError: a family that is not closed under the map, or sizes that do not fit.

    >>> import torch, cumulant as cm
    >>> from cumulant.filtering.maps import Merge, push
    >>> push(cm.Dirichlet(torch.tensor([1.0, 2.0, 3.0])), Merge([[0, 2], [1]])).concentration
    tensor([4., 2.])
    """
    member = member_of("push", measure)
    image_size("push", member, map)
    if map is None:
        return measure
    broadcast("push", measure=member.batch_shape, map=map._batch)
    got, weak = numbers("push", **tensors_of("measure", member), **tensors_of("map", map))
    family, theta, _ = wide(member, member._theta)
    image = family._rebuilt({"_theta": map._move(family, theta)})
    image = image._to(torch.float64 if weak else next(iter(got.values())).dtype)
    image._weak = weak
    if isinstance(measure, Gaussian):
        return cast(_M, Gaussian(image.loc, image.covariance_matrix))
    return image
