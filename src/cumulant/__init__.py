"""Cumulant: the calculus of attention.

Attention is a measure over keys tilted by the query, and everything people want from it is a
derivative of its log-normalizer G.
"""

from cumulant.attention import (
    Attended,
    attend,
    attend_packed,
    merge,
    scaled_dot_product_attention,
    sdpa_replaced,
)
from cumulant.errors import InputError

__version__ = "0.1.0"

__all__ = [
    "Attended",
    "InputError",
    "attend",
    "attend_packed",
    "merge",
    "scaled_dot_product_attention",
    "sdpa_replaced",
]
