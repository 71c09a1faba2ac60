"""`ShardedKeys`: keys and values that live on the ranks of a group, each rank its own."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.distributed.facts import Facts, describe
from cumulant.distributed.ranks import Group, Ranks

__all__ = ["Route", "ShardedKeys", "cheaper_route"]

Route = Literal["gather", "ring"]


class ShardedKeys:
    """Keys and values sharded over the ranks of a group, for `cm.attend` and `cm.Memory`.

    Keys are ordered by rank, rank 0 first; causal masks and indices follow that order. Ranks may
    hold different numbers of keys, or none. Every rank must create the object and make the same
    calls in the same order.

    Args:
        keys: ``(*batch, n, d)``, this rank's keys.
        values: ``(*batch, n, e)``; default: the keys.
        group: a process group, one dimension of a `DeviceMesh`, or None for all processes.
        queries: "replicated": every rank passes the same queries and gets all results; gradients of
            queries are complete on every rank. "sharded": every rank passes its own.
        route: for sharded queries, "gather" sends queries to the keys and results back, "ring"
            sends keys past all queries, a shard at a time. Default: the one that sends fewer bytes
            (`cheaper_route`).

    Raises:
        InputError: the ranks' inputs do not match; every rank raises.
        GroupError: another rank died, or is in a different call.

    Attributes:
        rows: number of keys on each rank.
        before: number of keys on the ranks before this one.

    >>> import torch, cumulant as cm
    >>> shard = cm.distributed.ShardedKeys(torch.eye(2))  # without torch.distributed: one rank
    >>> cm.attend(torch.zeros(1, 2), shard).mean
    tensor([[0.5000, 0.5000]])
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor | None = None,
        *,
        group: Group = None,
        queries: Literal["replicated", "sharded"] = "replicated",
        route: Route | None = None,
    ) -> None:
        self.ranks = Ranks(group)
        self.keys, self.values = keys, values

        def facts() -> Facts:
            _check(keys, values, queries, route)
            named = {"keys": keys, "values": keys if values is None else values}
            return {
                **describe(**named),
                "whether values are keys": values is None,
                "queries": queries,
                "route": "chosen by size" if route is None else route,
                "rows": keys.shape[-2],
            }

        found = self.ranks.agree("ShardedKeys", facts, differ=("rows",))
        self.sharded_queries = queries == "sharded"
        self.route: Route | None = route
        self.rows: tuple[int, ...] = tuple(found["rows"])
        self.before = sum(self.rows[: self.ranks.rank])

    def again(self, keys: Tensor, values: Tensor | None) -> ShardedKeys:
        """These keys in place of the old ones; all ranks must do it together."""
        asked = "sharded" if self.sharded_queries else "replicated"
        group = self.ranks.group
        return ShardedKeys(keys, values, group=group, queries=asked, route=self.route)

    def holding(self, keys: Tensor, values: Tensor | None) -> ShardedKeys:
        """The same shard of the same group with other tensors, as many rows on every rank."""
        other = ShardedKeys.__new__(ShardedKeys)
        other.__dict__.update(self.__dict__, keys=keys, values=values)
        return other

    def __len__(self) -> int:
        """How many keys there are on all ranks."""
        return sum(self.rows)

    def __repr__(self) -> str:
        who = "sharded" if self.sharded_queries else "replicated"
        return (
            f"ShardedKeys(keys={tuple(self.keys.shape)} of {len(self)}, rank {self.ranks.rank} of "
            f"{self.ranks.size}, queries {who})"
        )


def _check(keys: Any, values: Any, queries: Any, route: Any) -> None:
    for name, x in (("keys", keys), ("values", keys if values is None else values)):
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2 or x.is_nested:
            what = type(x).__name__
            if isinstance(x, Tensor):
                what = "a nested one" if x.is_nested else f"{tuple(x.shape)} {x.dtype}"
            raise InputError(
                f"ShardedKeys: {name} must be a real floating-point tensor (..., n, features), not "
                f"{what}."
            )
    if values is not None and values.shape[-2] != keys.shape[-2]:
        raise InputError(
            f"ShardedKeys: keys and values must have the same length, but have {keys.shape[-2]} "
            f"and {values.shape[-2]}."
        )
    if values is not None and (values.dtype, values.device) != (keys.dtype, keys.device):
        raise InputError("ShardedKeys: keys and values must have the same dtype and device.")
    if queries not in ("replicated", "sharded"):
        raise InputError(f"ShardedKeys: queries must be replicated or sharded, not {queries!r}.")
    if route not in (None, "gather", "ring"):
        raise InputError(f"ShardedKeys: route must be gather, ring or None, not {route!r}.")
    if route is not None and queries == "replicated":
        raise InputError(
            "ShardedKeys: route applies to sharded queries only; replicated ones are already on "
            "every rank."
        )


def cheaper_route(
    queries: int, keys: int, features: int, width: int, *, ranks: int, gradients: bool = True
) -> Route:
    """The route that sends fewer numbers when queries and keys are both sharded.

    For M queries and N keys of d features with values of width e, spread evenly over P ranks, a
    rank sends, in units of (P - 1) / P numbers ::

                forward                 forward and first gradient
        gather  M (d + e + 1) + 2 M     2 M (d + e + 1) + 2 M
        ring    N (d + e)               2 N (d + e) + N (d + e) P / (P - 1)

    Gather sends queries there and results back, the same for gradients, and the common maximum.
    Ring passes keys and values around, again in the backward pass, and their gradients follow all
    the way home. So the ring wins if N is less than about M; with gradients, M / 2 for two ranks
    and 2 M / 3 for many. docs/scaling.md derives it.

    >>> import cumulant as cm
    >>> cm.distributed.cheaper_route(queries=1000, keys=100_000, features=64, width=64, ranks=4)
    'gather'
    """
    there_and_back = queries * (features + width + 1)
    around = keys * (features + width)
    if gradients:
        travels = 2 + ranks / max(1, ranks - 1)
        return "gather" if 2 * there_and_back + 2 * queries <= travels * around else "ring"
    return "gather" if there_and_back + 2 * queries <= around else "ring"
