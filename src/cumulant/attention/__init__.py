"""Attention and its calculus: torch's function, `attend`, and joining of results."""

from cumulant.attention.attend import attend
from cumulant.attention.attended import Attended, TopKeys
from cumulant.attention.merging import merge
from cumulant.attention.packed import attend_packed
from cumulant.attention.receiving import Received
from cumulant.attention.rollout import rollout
from cumulant.attention.sdpa import scaled_dot_product_attention, sdpa_replaced

__all__ = [
    "Attended",
    "Received",
    "TopKeys",
    "attend",
    "attend_packed",
    "merge",
    "rollout",
    "scaled_dot_product_attention",
    "sdpa_replaced",
]
