"""`attend`: everything attention knows about a query, each field differentiable to any order."""

from __future__ import annotations

from torch import Tensor

from cumulant.attention.attended import Attended
from cumulant.attention.inputs import Keywords, Window, prepare
from cumulant.attention.sinks import attended
from cumulant.distributed.sharded import ShardedKeys

__all__ = ["attend"]


def attend(
    query: Tensor,
    key: Tensor | ShardedKeys,
    value: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    sink: float | Tensor | None = None,
    dropout_p: float = 0.0,
) -> Attended:
    """Attention with its calculus: G, mean, entropy, variances, every derivative.

    See docs/theory.md, T1, T12.

    p(j|i) = exp(scale <q_i, k_j> + bias_ij - G_i): a measure over keys tilted by the query.

    Args:
        query: ``(*batch, M, d)``.
        key: ``(*batch, N, d)``, or `cumulant.distributed.ShardedKeys`, which have the values.
        value: ``(*batch, N, e)``; defaults to the keys, so that ``mean`` is the gradient of G in
            scale * query.
        attn_mask: boolean (True = may attend; the opposite of ``key_padding_mask``) or added to
            the scores (differentiable), exactly, however large: one number added to a whole row
            changes G alone. Broadcasts to ``(*batch, M, N)``, so padding ``(B, N)`` goes in as
            ``mask[:, None, None, :]`` beside heads. Or a causal bias from
            ``torch.nn.attention.bias``: ``causal_lower_right(M, N)`` aligns to the last key. With
            sharded keys ``(*batch, M, n)``: the queries of all ranks against this rank's keys.
        is_causal: query i sees keys j <= i (torch's top-left alignment); not with `attn_mask`.
        scale: number, or tensor that broadcasts to the query, such as ``(heads, 1, 1)``
            (differentiable); the default is 1/sqrt(d).
        enable_gqa: dimension -3 holds heads, and key heads serve groups of query heads.
        window: (left, right): how many keys a query sees behind and ahead of the diagonal j = i (or
            the causal bias' own diagonal); None is no limit. Combines with any mask: (None, 0) is
            causal.
        softcap: c > 0 turns scores s = scale <q, k> into c tanh(s / c), before masks and bias.
        sink: logit of an extra atom with key 0 and value 0, which takes part in G, the entropy and
            every other field (see `Attended`): a number, one logit for each head ``(heads,)``, or a
            tensor that broadcasts to ``(*batch, M)``; differentiable. It is not capped, masked or
            dropped. With ``queries="sharded"`` it belongs to this rank's queries.
        dropout_p: probability of dropping a weight of ``mean``, which alone is affected; as in
            torch it applies whenever given. Not with sharded keys.

    Returns:
        Attended: its fields are computed on first access. Ask for ``entropy`` first to have it,
        ``mean`` and ``log_normalizer`` in one pass.

    Raises:
        InputError: the shapes, dtypes or devices do not fit; the message restates the call.
        GroupError: another rank has died, or is in another call.

    >>> import torch, cumulant as cm
    >>> key = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> a = cm.attend(torch.zeros(1, 2), key)
    >>> a.mean, a.log_normalizer.exp(), a.entropy.exp()
    (tensor([[0.5000, 0.5000]]), tensor([2.]), tensor([2.]))
    >>> a = cm.attend(torch.zeros(1, 2), key, sink=0.0)  # one more atom of the same weight
    >>> a.mean, a.log_normalizer.exp()
    (tensor([[0.3333, 0.3333]]), tensor([3.]))
    """
    keywords: Keywords = {
        "attn_mask": attn_mask,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "window": window,
        "softcap": softcap,
        "sink": sink,
        "dropout_p": dropout_p,
    }
    if isinstance(key, ShardedKeys):
        from cumulant.attention.sharded import attend_sharded

        return attend_sharded(query, key, value, **keywords)
    call = prepare("attend", query, key, key if value is None else value, **keywords)
    return attended(call, values_are_keys=value is None)
