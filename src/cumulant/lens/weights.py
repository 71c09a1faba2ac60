"""The four projections of an attention module, by the names that libraries give them (T14, T23).

Rows are tokens, as in torch: q = x W_q, so scores are scale x W_q W_k' y' and the output adds
sum_j p_ij x_j W_v W_o. Shape legend: H heads, Hk key heads, D features of the model, d of a query,
e of a value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cumulant.core.precision import widened
from cumulant.core.typed import linalg

__all__ = [
    "Bilinear",
    "Block",
    "Projections",
    "bilinear",
    "is_attention",
    "output_block",
    "projections",
]

_SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),  # Llama, OPT, CLIP, Whisper and most others
    ("query", "key", "value"),  # BERT, RoBERTa, ViT, ALBERT
    ("q", "k", "v"),  # T5
    ("q_lin", "k_lin", "v_lin"),  # DistilBERT
    ("query_proj", "key_proj", "value_proj"),  # DeBERTa
    ("linear_q", "linear_k", "linear_v"),  # conformers
    ("Wq", "Wk", "Wv"),  # CTRL
)
# All queries, then all keys, then all values: Phi-3; ModernBERT, MPT, DBRX; vision models.
_STACKED = ("qkv_proj", "Wqkv", "qkv")
# Key head by key head: the queries it serves, its key, its value (GPT-NeoX, BLOOM, Falcon).
_INTERLEAVED = ("query_key_value",)
_OUTPUTS = (
    *("o_proj", "out_proj", "dense", "o", "out_lin", "Wo", "proj", "c_proj"),
    *("projection", "projection_layer", "output_proj", "linear_out", "output"),
)
# Numbers of a projection that are copied at a time.
_AT_ONCE = 2**22


@dataclass(frozen=True)
class Block:
    """The weights of one projection: a whole parameter, or some outputs of a fused one.

    Attributes:
        parameter: the parameter of the model.
        outputs: which of its outputs, ``(n,)`` indices; None is all of them.
        transposed: outputs are columns (GPT-2's Conv1D), not rows (``nn.Linear``).
    """

    parameter: nn.Parameter
    outputs: Tensor | None = None
    transposed: bool = False

    def take(self, like: Tensor | None = None) -> Tensor:
        """The block ``(outputs, inputs)`` of the parameter, or of its gradient."""
        whole = self.parameter.detach() if like is None else like
        whole = whole.mT if self.transposed else whole
        return whole if self.outputs is None else whole[self.outputs]

    def rows(self, start: int, stop: int) -> Block:
        return self.pick(torch.arange(start, stop))

    def pick(self, outputs: Tensor) -> Block:
        return Block(self.parameter, outputs.to(self.parameter.device), self.transposed)

    @property
    def size(self) -> int:
        """How many outputs."""
        return len(self.take())


@dataclass(frozen=True)
class Projections:
    """The weights of every head, detached, and where they are kept.

    Attributes:
        query: ``(H, D, d)``.
        key: ``(Hk, D, d)``; head h uses key head h // (H / Hk).
        value: ``(Hk, D, e)``.
        output: ``(H, e, D)``; None where it was not found.
        query_key, value_output: the blocks they were read from; the second is empty without output.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor | None
    query_key: tuple[Block, ...]
    value_output: tuple[Block, ...]


class Bilinear(NamedTuple):
    """What `bilinear` found, each ``(H,)`` in [-1, 1], NaN for weights of zero.

    The first two are None where queries and keys have inputs of different widths, the last where
    there is no output projection.
    """

    symmetry: Tensor | None
    definiteness: Tensor | None
    value_alignment: Tensor | None


def projections(
    module: nn.Module, *, heads: int, key_heads: int, parent: nn.Module | None = None
) -> Projections | None:
    """The query, key, value and output weights of an attention module, or None if unknown.

    Only names and shapes are used. Biases are ignored, and so are norms between projection and
    score (Qwen 3, OLMo 2), which make the score a different function of the tokens.

    Args:
        module: holds the projections.
        heads, key_heads: how many heads queries and keys have; keys that are repeated for their
            queries before they attend may be counted as they attend.
        parent: the module around it, where BERT keeps the output projection.

    >>> import torch
    >>> found = projections(torch.nn.MultiheadAttention(8, 2), heads=2, key_heads=2)
    >>> found.query.shape, found.output.shape
    (torch.Size([2, 8, 4]), torch.Size([2, 4, 8]))
    """
    output = _output(module, parent)
    for count in _key_heads(heads, key_heads):
        parts = _parts(module, heads, count)
        found = parts and _cut(*parts, output, heads=heads, key_heads=count)
        if found:
            return found
    return None


def output_block(module: nn.Module, parent: nn.Module | None) -> Block | None:
    """The output projection of an attention module, or None if it goes by no known name."""
    return _output(module, parent)


def is_attention(module: nn.Module) -> bool:
    """Whether a module holds projections to queries, keys and values, by their names."""
    families = (*_SEPARATE, *((name,) for name in (*_STACKED, *_INTERLEAVED, "c_attn")))
    return any(all(_weight(module, name) is not None for name in family) for family in families)


def _key_heads(heads: int, key_heads: int) -> list[int]:
    """The number given and, where keys may have been repeated, the divisors of the heads."""
    if heads < 1 or key_heads < 1 or heads % key_heads:
        return []
    fewer = [n for n in range(heads - 1, 0, -1) if heads % n == 0] if key_heads == heads else []
    return [key_heads, *fewer]


def _weight(module: Any, name: str) -> Block | None:
    linear = getattr(module, name, None)
    # Conv1D, the one linear map of Hugging Face that keeps inputs in rows, is known by its name.
    return _block(getattr(linear, "weight", None), type(linear).__name__ == "Conv1D")


def _block(weight: Any, transposed: bool = False) -> Block | None:
    good = isinstance(weight, nn.Parameter) and weight.ndim == 2 and weight.is_floating_point()
    return Block(weight, transposed=transposed) if good else None


def _output(module: nn.Module, parent: nn.Module | None) -> Block | None:
    found = [_weight(module, name) for name in _OUTPUTS]
    found.append(_weight(getattr(parent, "output", None), "dense"))
    return next((block for block in found if block is not None), None)


def _parts(module: nn.Module, heads: int, key_heads: int) -> tuple[Block, Block, Block] | None:
    """Query, key and value as blocks, from whichever family of names the module has."""
    if isinstance(module, nn.MultiheadAttention):
        fused = _block(module.in_proj_weight)
        if fused is not None:
            return _stacked(fused, heads, key_heads)
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        return _three(*(_block(getattr(module, name)) for name in names))
    for family in _SEPARATE:
        found = _three(*(_weight(module, name) for name in family))
        if found:
            return found
    for name in _STACKED:
        fused = _weight(module, name)
        if fused is not None:
            return _stacked(fused, heads, key_heads)
    for name in _INTERLEAVED:
        fused = _weight(module, name)
        if fused is not None:
            return _interleaved(fused, heads, key_heads)
    fused, query = _weight(module, "c_attn"), _weight(module, "q_attn")
    if fused is None:
        return None
    if query is not None and fused.size == 2 * query.size:  # GPT-2 attending to an encoder
        return query, fused.rows(0, query.size), fused.rows(query.size, fused.size)
    # GPT-2 stacks; GPT-BigCode, with an ordinary linear map, goes head by head.
    return (_stacked if fused.transposed else _interleaved)(fused, heads, key_heads)


def _three(*blocks: Block | None) -> tuple[Block, Block, Block] | None:
    query, key, value = blocks
    return None if query is None or key is None or value is None else (query, key, value)


def _stacked(fused: Block, heads: int, key_heads: int) -> tuple[Block, Block, Block] | None:
    width, rest = divmod(fused.size, heads + 2 * key_heads)
    if rest:
        return None
    first, second = heads * width, (heads + key_heads) * width
    return fused.rows(0, first), fused.rows(first, second), fused.rows(second, fused.size)


def _interleaved(fused: Block, heads: int, key_heads: int) -> tuple[Block, Block, Block] | None:
    width, rest = divmod(fused.size, heads + 2 * key_heads)
    if rest:
        return None
    index = torch.arange(fused.size).reshape(key_heads, heads // key_heads + 2, width)
    query, key, value = index[:, :-2].flatten(), index[:, -2].flatten(), index[:, -1].flatten()
    return fused.pick(query), fused.pick(key), fused.pick(value)


def _cut(
    query: Block, key: Block, value: Block, output: Block | None, *, heads: int, key_heads: int
) -> Projections | None:
    """Head by head, if all shapes agree."""
    per_head = (query.size / heads, key.size / key_heads, value.size / key_heads)
    if any(x != int(x) for x in per_head) or per_head[0] != per_head[1]:
        return None
    whole = None if output is None else output.take()
    if whole is not None and whole.shape[1] != heads * per_head[2]:
        return None

    def split(block: Block, count: int) -> Tensor:
        return torch.unflatten(block.take(), 0, (count, -1)).mT

    return Projections(
        split(query, heads),
        split(key, key_heads),
        split(value, key_heads),
        None if whole is None else torch.unflatten(whole.mT, 0, (heads, -1)),
        (query, key),
        () if output is None else (value, output),
    )


def bilinear(found: Projections) -> Bilinear:
    """How far each head's score is a symmetric, a positive form, and its value map a gradient.

    With A = W_q W_k' ``(D, D)``, of rank d, S = (A + A')/2 and N = (A - A')/2:

    - symmetry = (|S|^2 - |N|^2) / |A|^2 = tr(AA) / tr(AA'): 1 symmetric, -1 antisymmetric;
    - definiteness = sum of the eigenvalues of S / sum of their absolute values: 1 where x A x' is
      never negative (a token attracts its like), -1 where it is never positive;
    - value_alignment = <W_v W_o, A'> / (|W_v W_o| |A|). The score of query x with key y is x A y',
      its gradient in x is y A', so attention adds the gradient of G exactly if W_v W_o = A' up to a
      positive factor: the value map that equals the score matrix of T14 (T17: V = A'). At 1 the
      expansion law holds again.

    Everything is in terms of what the module is given, biases left out; with rotary positions A is
    the form at relative distance 0. In cross-attention, where x and y are tokens of two texts, only
    the alignment has a meaning. No D x D matrix is formed.

    >>> import torch
    >>> attention = torch.nn.MultiheadAttention(8, 1)
    >>> attention.in_proj_weight.data[:8] = attention.in_proj_weight.data[8:16]
    >>> bilinear(projections(attention, heads=1, key_heads=1)).symmetry
    tensor([1.])
    """
    kind = widened(found.query.dtype)
    square = found.query.shape[-2] == found.key.shape[-2]
    parts = [_products(x, kind) for x in _some_heads(found)]
    sizes, grams, aligned = (torch.cat(x) for x in zip(*parts, strict=True))

    def within(x: Tensor) -> Tensor:  # [-1, 1], up to rounding
        return x.clamp(-1, 1).to(kind)

    symmetry = definiteness = None
    if square:
        d = found.query.shape[-1]
        across = grams[:, d:, :d]
        symmetry = within(_trace(across, across) / sizes)
        definiteness = within(_definiteness(grams, kind))
    return Bilinear(symmetry, definiteness, within(aligned) if found.output is not None else None)


def _some_heads(found: Projections) -> Iterator[Projections]:
    """Some key heads at a time, with their queries: a copy of all may be large."""
    heads, *size = found.query.shape
    group = heads // len(found.key)
    count = max(1, _AT_ONCE // (group * math.prod(size)))
    for k in range(0, len(found.key), count):
        keys, queries = slice(k, k + count), slice(group * k, group * (k + count))
        output = None if found.output is None else found.output[queries]
        yield replace(
            found,
            query=found.query[queries],
            key=found.key[keys],
            value=found.value[keys],
            output=output,
        )


def _products(found: Projections, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """|A|^2, the Gram matrices of [q k] ``(H, 2 d, 2 d)``, and the alignment of the values.

    Products over the model's features have the precision of the weights; what is summed of them is
    double. Grams and alignment are empty where there are none.
    """
    group = len(found.query) // len(found.key)
    q, k = found.query.to(kind), found.key.to(kind)

    def shared(x: Tensor) -> Tensor:  # a key head serves several queries
        return x.repeat_interleave(group, 0)

    queries, keys = (q.mT @ q).double(), shared(k.mT @ k).double()
    size = _trace(queries, keys)
    gram = aligned = size.new_empty(0)
    if q.shape[-2] == k.shape[-2]:
        across = (shared(k).mT @ q).double()
        rows = torch.cat([queries, across.mT], -1), torch.cat([across, keys], -1)
        gram = torch.cat(rows, -2)
    if found.output is not None:
        v, o = found.value.to(kind), found.output.to(kind)
        values, outputs = shared(v.mT @ v).double(), (o @ o.mT).double()
        same = shared(v.mT @ k).double() * (o @ q).double()  # tr(W_o' W_v' W_k W_q')
        aligned = same.sum((-2, -1)) / (size * _trace(values, outputs)).sqrt()
    return size, gram, aligned


def _trace(first: Tensor, second: Tensor) -> Tensor:
    """tr(first second)."""
    return (first * second.mT).sum((-2, -1))


def _definiteness(gram: Tensor, kind: torch.dtype) -> Tensor:
    """From the Gram matrices R'R of [q k], ``(H, 2 d, 2 d)``.

    S = [q k] J [q k]' / 2, J swapping the halves, has the eigenvalues of R J R' / 2.
    """
    lower, singular = linalg.cholesky_ex(gram)
    upper = lower.mT
    if bool((failed := singular > 0).any()):
        values, axes = linalg.eigh(gram[failed])
        upper[failed] = values.clamp_min(0.0).sqrt()[..., None] * axes.mT
    values = linalg.eigvalsh((upper @ upper.roll(gram.shape[-1] // 2, -1).mT).to(kind))
    return values.sum(-1) / values.abs().sum(-1)
