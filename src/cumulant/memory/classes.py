"""Global averages, metastable states, single patterns: classes of attention heads.

See docs/theory.md, T21.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cumulant.attention.inputs import Window, prepare
from cumulant.core.checks import finite, numbers, real
from cumulant.core.describing import described_fields
from cumulant.core.errors import InputError
from cumulant.core.typed import tolist
from cumulant.kernels.rows import summarize

__all__ = ["EDGES", "NAMES", "Classes", "classify"]

NAMES = ("I", "II", "III", "IV")
EDGES = (1 / 2, 1 / 8, 1 / 32)


@dataclass(frozen=True)
class Classes:
    """The result of `classify`.

    Attributes:
        k90: ``(*batch, M)``, the fewest keys that hold the mass asked for; 0 for a query that sees
            none.
        visible: ``(*batch, M)``, the number of keys the query sees.
        fraction: ``(*batch,)``, the median over queries of k90 / visible.
        number: ``(*batch,)``, 1 to 4; 0 where no query sees a key.
    """

    k90: Tensor
    visible: Tensor
    fraction: Tensor
    number: Tensor

    __repr__ = described_fields

    @property
    def names(self) -> list[str]:
        """I to IV for every head, in the order of a flattened batch; "-" where there is none."""
        return ["-" if n == 0 else NAMES[n - 1] for n in tolist(self.number.reshape(-1))]


def classify(
    query: Tensor,
    key: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    window: Window | None = None,
    mass: float = 0.9,
) -> Classes:
    """Sort attention heads by how many keys their weights spread over (T21).

    k is the fewest weights that hold 0.90 of the mass. With the median over queries of k / N: class
    I above 1/2 (a global average), II above 1/8, III above 1/32, IV at most that (a few patterns),
    as in Ramsauer et al. (2021). N counts the keys a query sees, so causal heads are judged fairly.
    Rows are sorted strip by strip, so no M x N array is kept.

    Args:
        query, key, attn_mask, is_causal, scale, enable_gqa, window: as in `cumulant.attend`; the
            scale is 1/sqrt(d) by default.
        mass: the share to be held, in (0, 1].

    >>> import torch, cumulant as cm
    >>> key = torch.eye(64)
    >>> [cm.memory.classify(key, key, scale=s).names for s in (0.0, 50.0)]
    [['I'], ['IV']]
    """
    share = real("classify", "mass", mass, least=0.0, most=1.0, open_at_least=True)
    got, _ = numbers("classify", query=query, key=key)
    for name, x in got.items():
        finite("classify", name, x)
    if got["query"].ndim < 2 or 0 in got["query"].shape[-2:] or 0 in got["key"].shape:
        raise InputError(
            "classify: there must be queries (*batch, M, d) and keys (*batch, N, d), but they have "
            f"shapes {tuple(got['query'].shape)} and {tuple(got['key'].shape)}."
        )
    query, key = (got[n].detach() for n in ("query", "key"))
    call = prepare(
        "classify",
        query,
        key,
        key[..., :0],
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        window=window,
    )
    with torch.no_grad():
        given = {n: x for n, x in call.arguments.items() if n != "value"}
        found = summarize(given, call.options, spectrum=False, mass=share)
        k, visible = (call.finish(found[n])[..., 0].long() for n in ("coverage", "visible"))
        ratio = (k / visible).masked_fill(visible == 0, torch.nan)
        fraction = ratio.nanmedian(-1).values
        number = 1 + sum((fraction <= edge).long() for edge in EDGES)
    number = torch.as_tensor(number).masked_fill(fraction.isnan(), 0)
    return Classes(k, visible, fraction.nan_to_num(0.0), number)
