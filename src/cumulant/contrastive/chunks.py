"""Encoding a batch that is larger than memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from cumulant.core.checks import whole
from cumulant.core.errors import InputError

__all__ = ["encode_in_chunks"]


def encode_in_chunks(encoder: Callable[..., Tensor], inputs: Any, chunk_size: int) -> Tensor:
    """Encode chunk by chunk, and each chunk again in the backward pass.

    This is GradCache (Gao et al., 2021) by checkpointing. Only one chunk's activations are held at
    a time, in either direction, so a contrastive batch can be as large as its embeddings allow.
    Values and gradients are those of one large batch as long as the encoder treats rows separately:
    dropout is repeated exactly, but batch normalization sees a chunk as a batch (and, in training,
    sees each chunk twice).

    Args:
        encoder: a module or function.
        inputs: a tensor, or a tuple or mapping of tensors that all have the batch in front; they
            are passed on as ``encoder(x)``, ``encoder(*x)`` or ``encoder(**x)``. A batch without
            rows, as a rank of a group may have, is passed on too.
        chunk_size: rows at a time.

    Returns:
        Tensor ``(rows, ...)``: embeddings to use in any loss.

    >>> import torch, cumulant as cm
    >>> encoder, x = torch.nn.Linear(4, 2), torch.randn(10, 4)
    >>> z = cm.contrastive.encode_in_chunks(encoder, x, 3)
    >>> torch.allclose(z, encoder(x), atol=1e-6)
    True
    """
    size = whole("encode_in_chunks", "chunk_size", chunk_size, 1)
    if not callable(encoder):
        raise InputError(
            f"encode_in_chunks: encoder must be callable, not {type(encoder).__name__}."
        )
    names: list[str] = []
    if isinstance(inputs, Mapping):
        by_name = cast(Mapping[Any, Any], inputs)
        names = [str(n) for n in by_name]
        tensors: list[Any] = list(by_name.values())
    elif isinstance(inputs, Sequence):
        tensors = list(cast(Sequence[Any], inputs))
    else:
        tensors = [inputs]
    lengths = {len(x) if isinstance(x, Tensor) and x.ndim else None for x in tensors}
    if len(lengths) != 1 or None in lengths:
        told = ", ".join(
            str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in tensors
        )
        raise InputError(
            f"encode_in_chunks: inputs must be tensors with the same number of rows. Got "
            f"{told or 'nothing'}."
        )
    checkpoint: Any = import_module("torch.utils.checkpoint").checkpoint

    def encode(*parts: Tensor) -> Tensor:
        out: Any = encoder(**dict(zip(names, parts, strict=True))) if names else encoder(*parts)
        if not isinstance(out, Tensor) or out.ndim == 0 or len(out) != len(parts[0]):
            came = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise InputError(
                f"encode_in_chunks: the encoder must return one row for each of the "
                f"{len(parts[0])} it got, not {came}. Wrap it: lambda x: model(x).pooled."
            )
        return out

    chunks = zip(*(x.split(size) for x in tensors), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([encode(*parts) for parts in chunks])
    return torch.cat([checkpoint(encode, *parts, use_reentrant=False) for parts in chunks])
