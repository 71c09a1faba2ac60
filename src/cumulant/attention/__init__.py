"""Attention and its calculus: torch's function, `attend`, and joining of results."""

from cumulant.attention.attend import attend
from cumulant.attention.attended import Attended
from cumulant.attention.merging import merge
from cumulant.attention.packed import attend_packed
from cumulant.attention.sdpa import scaled_dot_product_attention, sdpa_replaced

__all__ = [
    "Attended",
    "attend",
    "attend_packed",
    "merge",
    "scaled_dot_product_attention",
    "sdpa_replaced",
]
