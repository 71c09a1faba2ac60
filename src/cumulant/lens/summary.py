"""Heads over many texts: sums that add up batch by batch, and merge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cumulant.lens.recorder import Layer, Record, Recorder
from cumulant.lens.weights import Projections, bilinear, projections

__all__ = ["HeadSums", "link_columns", "weight_columns", "weights_of"]

_MEANS = (
    *("entropy", "effective_keys", "log_normalizer", "score_variance"),
    *("self_mass", "sink_mass", "energy_change"),
)
# k90 / visible is counted in cells (c - 1, c] / CELLS; 1/2, 1/8 and 1/32 are edges of cells.
CELLS = 8192
_EDGES = (CELLS // 2, CELLS // 8, CELLS // 32)


class HeadSums:
    """Per layer and head: sums over tokens, largest eigenvalue, a histogram of k90 / visible."""

    def __init__(self) -> None:
        self._layers: dict[int, dict[str, Tensor]] = {}

    def add(self, record: Record) -> None:
        """Take in the real tokens of one call."""
        keep = record.real[:, None] & (record.columns["visible"] > 0)
        heads = keep.shape[1]
        count = keep.sum((0, 2)).double()
        sums = {"count": count}
        for name in _MEANS:
            if name in record.columns:
                sums[name] = torch.where(keep, record.columns[name].double(), 0.0).sum((0, 2))
        if "energy_change" in record.columns:
            change = record.columns["energy_change"]
            rises = change > 1e-4 * (1 + record.columns["fisher_trace"])
            sums["energy_rises"] = (rises & keep).sum((0, 2)).double()
        if "leading_eigenvalue" in record.columns:
            leading = torch.where(keep, record.columns["leading_eigenvalue"].double(), 0.0)
            sums["leading"] = leading.amax((0, 2))
        if "k90" in record.columns:
            share = record.columns["k90"].double() / record.columns["visible"].double()
            cell = (share * CELLS).nan_to_num(0.0).ceil().long().clamp(0, CELLS)
            cell = cell + (CELLS + 1) * torch.arange(heads)[:, None]
            flat = torch.bincount(cell[keep], minlength=heads * (CELLS + 1))
            sums["cells"] = flat.reshape(heads, CELLS + 1)
        self._join(record.layer, sums)

    def _join(self, layer: int, sums: Mapping[str, Tensor]) -> None:
        mine = self._layers.setdefault(layer, {})
        for name, x in sums.items():
            if name not in mine:
                mine[name] = x
            else:
                mine[name] = torch.maximum(mine[name], x) if name == "leading" else mine[name] + x

    def state(self) -> dict[int, dict[str, Tensor]]:
        """Plain containers and tensors, for `torch.save`."""
        return self._layers

    def merge(self, state: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Take in what another has summed."""
        for layer, sums in state.items():
            self._join(layer, sums)

    def rows(self, layer: Layer) -> list[dict[str, Any]]:
        """The means of each head of a layer."""
        sums = self._layers[layer.number]
        count = sums["count"].clamp_min(1.0)
        columns: dict[str, list[Any]] = {}
        if "cells" in sums:
            cumulative = sums["cells"].cumsum(-1).double()
            middle = (cumulative < cumulative[:, -1:] / 2).sum(-1)
            code = sum((middle <= edge).long() for edge in _EDGES)
            columns["class"] = [("I", "II", "III", "IV")[i] for i in torch.as_tensor(code).tolist()]
            columns["k90_fraction"] = (middle.double() / CELLS).tolist()
        for name in (*_MEANS, "energy_rises"):
            if name in sums:
                columns[name] = (sums[name] / count).tolist()
        if "leading" in sums and not layer.capped:  # a cap has a slope of its own
            columns["lipschitz"] = (layer.scale * sums["leading"]).tolist()
        where = {
            "layer": layer.number,
            "attention": "cross" if layer.cross else "self",
            "module": layer.name,
        }
        return [
            {"layer": layer.number, "head": h, **where, **{n: x[h] for n, x in columns.items()}}
            for h in range(layer.heads)
        ]


def weights_of(model: nn.Module, layer: Layer) -> Projections | None:
    """The weights of a layer, if they go by known names."""
    parent = layer.name.rpartition(".")[0]
    return projections(
        layer.module,
        heads=layer.heads,
        key_heads=layer.key_heads,
        parent=model.get_submodule(parent) if parent else model,
    )


def weight_columns(model: nn.Module, layer: Layer) -> list[dict[str, float | None]]:
    """What W_q, W_k, W_v and W_o say about each head (T14); nothing where they are not found."""
    found = weights_of(model, layer)
    if found is None or layer.cross:  # in cross-attention the two sides are different spaces
        return [{} for _ in range(layer.heads)]
    values = bilinear(found)._asdict()
    lists = {n: x.tolist() for n, x in values.items() if x is not None}
    return [
        {n: x[h] if x[h] == x[h] else None for n, x in lists.items()} for h in range(layer.heads)
    ]


def link_columns(recorder: Recorder, layer: Layer) -> list[dict[str, float | None]]:
    """The link conjecture of each head: the mean over the texts where it could be tested."""
    links = [x for x in recorder.links.get(layer.number, []) if x is not None]
    if not links:
        return [{} for _ in range(layer.heads)]
    named = {
        f"link_{n}": torch.stack([getattr(x, n) for x in links]).nanmean(0).tolist()
        for n in ("linear", "trained", "exists")
    }
    return [
        {n: x[h] if x[h] == x[h] else None for n, x in named.items()} for h in range(layer.heads)
    ]
