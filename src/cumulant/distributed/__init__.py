"""Beyond one machine: keys sharded over the ranks of a torch.distributed group.

`ShardedKeys` is what `cm.attend` and `cm.Memory` take; `total` and `spread`, mutually adjoint, are
what losses of your own are made of; `traffic` counts what is sent, `cost` says so beforehand.
"""

from cumulant.core.errors import GroupError
from cumulant.distributed.cost import Cost, cost, seconds
from cumulant.distributed.maps import gather, spread, total
from cumulant.distributed.ranks import Ranks, Traffic, launched, traffic
from cumulant.distributed.sharded import ShardedKeys, cheaper_route

__all__ = [
    "Cost",
    "GroupError",
    "Ranks",
    "ShardedKeys",
    "Traffic",
    "cheaper_route",
    "cost",
    "gather",
    "launched",
    "seconds",
    "spread",
    "total",
    "traffic",
]
