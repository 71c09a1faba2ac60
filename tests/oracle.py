"""`attend` written out densely, and derivatives of any order and direction of any function."""

from __future__ import annotations

import itertools
import math

import torch
from torch.func import jvp, vjp

from dense import dense_attention

FIELDS = (
    "mean",
    "log_normalizer",
    "key_mean",
    "entropy",
    "score_mean",
    "score_variance",
    "value_variance",
    "score_max",
)

# What a number added to all scores of a query is added to; -inf where there is no key.
LEVELS = ("log_normalizer", "score_max")


def band_mask(m, n, lower=None, upper=None):
    offset = torch.arange(n)[None, :] - torch.arange(m)[:, None]
    seen = torch.ones(m, n, dtype=torch.bool)
    if lower is not None:
        seen &= offset >= lower
    if upper is not None:
        seen &= offset <= upper
    return seen


def dense(query, key, value, *, scale=None, bias=None, mask=None, softcap=None, sink=None):
    """The oracle's fields, with torch's default scale."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    options = {"bias": bias, "mask": mask, "softcap": softcap, "sink": sink}
    return dense_attention(query * scale, key, value, **options)


def finite(x):
    """-inf (a row without keys) replaced by 0, so that sums and derivatives can be compared."""
    return torch.where(x == -math.inf, torch.zeros((), dtype=x.dtype), x)


def directions(order):
    """All words over F(orward) and R(everse) of that length."""
    return ["".join(word) for word in itertools.product("FR", repeat=order)]


def differentiate(function, word, tangents, cotangent_of):
    """Apply derivatives from the last letter of the word to the first.

    F is a Jacobian-vector product along `tangents`, R a vector-Jacobian product with a cotangent
    that depends on the output (so that outer derivatives see it).
    """
    for letter in reversed(word):
        function = _once(function, letter, tangents, cotangent_of)
    return function


def _once(function, letter, tangents, cotangent_of):
    if letter == "F":
        return lambda *xs: jvp(function, xs, tangents)[1]

    def reverse(*xs):
        value, pull = vjp(function, *xs)
        return pull(tuple(cotangent_of(v) for v in value))

    return reverse


def cotangent(x):
    weights = torch.linspace(0.3, 1.7, x.numel(), dtype=x.dtype).reshape(x.shape)
    return x.cos() * weights


def assert_close(ours, theirs, tolerance):
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        error = (a - b).abs().max().item() if a.numel() else 0.0
        size = 1 + (b.abs().max().item() if b.numel() else 0.0)
        assert error <= tolerance * size, f"off by {error:.2e} at magnitude {size:.2e}"
