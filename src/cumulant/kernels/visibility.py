"""Which query sees which keys: sums of marks over visible pairs, without scores."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.core.typed import functions
from cumulant.kernels import formulas
from cumulant.kernels.formulas import INDEX
from cumulant.kernels.tiles import Arguments, Band, Named, Program, Result, Tile, evaluate

__all__ = ["PAIRS", "marks_seen", "within"]

# What hides pairs beside the band.
PAIRS = ("mask", "bias", "query_tag", "key_tag")


def marks_seen(arguments: Named, band: Band, marks: Tensor) -> Tensor:
    """The sum of the marks ``(*batch, N, c)`` of the keys each query sees, ``(*batch, M, c)``."""
    m, n = arguments["query"].shape[-2], arguments["key"].shape[-2]
    pairs = {name: arguments[name].detach() for name in PAIRS if name in arguments}
    if not pairs:
        return within(band, m, marks)
    # Without features every score is 0, or -inf where a pair is hidden.
    given = {name: arguments[name].detach()[..., :0] for name in ("query", "key")}
    given = {**given, **pairs, "marks of keys": marks}
    batch = functions.broadcast_shapes(*(x.shape[:-2] for x in given.values()))
    program = Program(
        function=_on_tile,
        indices={**INDEX, "marks of keys": "j"},
        results=(Result("seen", "i", (*batch, m, marks.shape[-1])),),
        grid=(m, n),
        band=band,
    )
    return evaluate(program, given)["seen"]


def _on_tile(tile: Tile, a: Arguments) -> Arguments:
    seen = (formulas.scores(tile, a, 1.0) != -torch.inf).to(a["marks of keys"].dtype)
    return {"seen": tile.work.matmul(seen, a["marks of keys"])}


def within(band: Band, m: int, marks: Tensor) -> Tensor:
    """`marks_seen` for a band alone: differences of running sums."""
    n = marks.shape[-2]
    i = torch.arange(m, device=marks.device)
    start = torch.zeros_like(i) if band.lower is None else (i + band.lower).clamp(0, n)
    stop = torch.full_like(i, n) if band.upper is None else (i + band.upper + 1).clamp(0, n)
    sums = torch.nn.functional.pad(marks.cumsum(-2), (0, 0, 1, 0))
    return sums[..., torch.maximum(start, stop), :] - sums[..., start, :]
