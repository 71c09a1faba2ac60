"""Summaries over many texts: sums of heads that add up batch by batch, and what goes with them."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cumulant.core.typed import tolist
from cumulant.lens.encoding import embeddings
from cumulant.lens.forms import FEWEST, form_rows, rotation, whitened
from cumulant.lens.partition import partition
from cumulant.lens.patterns import DISTANCES, PATTERNS
from cumulant.lens.recorder import Layer, Record, Recorder
from cumulant.lens.sensitivity import Group, sensitivity
from cumulant.lens.tables import pandas
from cumulant.lens.weights import Projections, bilinear, projections
from cumulant.memory.classes import EDGES, NAMES

if TYPE_CHECKING:
    from cumulant.lens.tables import DataFrame

__all__ = [
    "HeadSums",
    "forms_of",
    "left_out",
    "link_columns",
    "model_facts",
    "nullable",
    "partition_rows",
    "peak_memory",
    "sensitivities",
    "versions",
    "weight_columns",
    "weights_digest",
    "weights_of",
]

_MEANS = (
    *("entropy", "effective_keys", "log_normalizer", "score_variance"),
    *("self_mass", "sink_mass", "energy_change"),
)
# k90 / visible is counted in cells (c - 1, c] / CELLS; 1/2, 1/8 and 1/32 are edges of cells.
CELLS = 8192
FEWEST_AT_DISTANCE = 8  # queries; over fewer a mean says nothing of the head
# Entries of each parameter that, with its sum, identify a model.
SAMPLED = 1024


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
        for name in PATTERNS:
            if name in record.columns:
                there = keep & ~record.columns[name].isnan()
                sums[name] = torch.where(there, record.columns[name].double(), 0.0).sum((0, 2))
                sums[f"{name}_count"] = there.sum((0, 2)).double()
        sums |= record.sums
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

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The sums by layer, for a journal."""
        return {str(layer): sums for layer, sums in self._layers.items()}

    def merge(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take in what another has summed."""
        for layer, sums in state.items():
            self._join(int(layer), sums)

    def rows(self, layer: Layer) -> list[dict[str, Any]]:
        """The means of each head of a layer."""
        sums = self._layers[layer.number]
        count = sums["count"].clamp_min(1.0)
        columns: dict[str, list[Any]] = {}
        if "cells" in sums:
            cumulative = sums["cells"].cumsum(-1).double()
            middle = (cumulative < cumulative[:, -1:] / 2).sum(-1)
            code = sum((middle <= CELLS * edge).long() for edge in EDGES)
            columns["class"] = [NAMES[i] for i in tolist(torch.as_tensor(code))]
            columns["k90_fraction"] = tolist(middle.double() / CELLS)
        for name in (*_MEANS, "energy_rises"):
            if name in sums:
                columns[name] = tolist(sums[name] / count)
        columns |= _pattern_columns(sums)
        if "leading" in sums and not layer.capped:  # a cap has a slope of its own
            columns["lipschitz"] = tolist(layer.scale * sums["leading"])
        where = {
            "layer": layer.number,
            "attention": "cross" if layer.cross else "self",
            "module": layer.name,
        }
        return [
            {"layer": layer.number, "head": h, **where, **{n: x[h] for n, x in columns.items()}}
            for h in range(layer.heads)
        ]


def _pattern_columns(sums: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Means over the tokens that have the pattern, None for a head without any."""
    columns: dict[str, list[Any]] = {}
    for name in PATTERNS:
        if name in sums and bool(sums[f"{name}_count"].any()):
            mean = tolist(sums[name] / sums[f"{name}_count"])
            columns[name] = [None if x != x else x for x in mean]
    if "distances" in sums and bool((often := sums["distance_counts"] >= FEWEST_AT_DISTANCE).any()):
        mean = (sums["distances"] / sums["distance_counts"]).where(often, -1.0)
        largest = mean.max(-1)
        columns["distance"] = [DISTANCES[i] for i in tolist(largest.indices)]
        columns["distance_mass"] = tolist(largest.values)
    return columns


def weights_of(model: nn.Module, layer: Layer) -> Projections | None:
    """The weights of a layer, if they go by known names."""
    parent = layer.name.rpartition(".")[0]
    return projections(
        layer.module,
        heads=layer.heads,
        key_heads=layer.key_heads,
        parent=model.get_submodule(parent) if parent else model,
    )


def weight_columns(
    model: nn.Module, layer: Layer, states: Tensor | None = None
) -> list[dict[str, float | None]]:
    """What W_q, W_k, W_v and W_o say about each head (T14); nothing where they are not found.

    With ``states``, a sample of what the attention module is given, the same in coordinates where
    those are white (T35).
    """
    found = weights_of(model, layer)
    if found is None or layer.cross:  # in cross-attention the two sides are different spaces
        return [{} for _ in range(layer.heads)]
    values = bilinear(found)._asdict()
    if states is not None and len(states) >= FEWEST and states.shape[1] == found.query.shape[1]:
        white = bilinear(whitened(found, states))
        values["whitened_symmetry"] = white.symmetry
        values["whitened_definiteness"] = white.definiteness
    lists = {n: x.tolist() for n, x in values.items() if x is not None}
    return [
        {n: x[h] if x[h] == x[h] else None for n, x in lists.items()} for h in range(layer.heads)
    ]


def forms_of(recorder: Recorder, distances: Sequence[float]) -> list[dict[str, Any]]:
    """The scores of each head as a form, raw and in white coordinates, at given distances (T35)."""
    rows: list[dict[str, Any]] = []
    for layer in recorder.layers.values():
        found = weights_of(recorder.model, layer)
        if found is None or layer.cross:
            continue
        angles = rotation(recorder.model, layer.size)
        states = None if recorder.probe is None else recorder.probe.attended(layer.number)
        own = form_rows(found, states, angles, distances)
        rows += [{"layer": layer.number, **row} for row in own]
    return rows


def link_columns(recorder: Recorder, layer: Layer) -> list[dict[str, float | None]]:
    """The link conjecture of each head: the mean over the texts where it could be tested."""
    links = [x for x in recorder.links.get(layer.number, []) if x is not None]
    if not links:
        return [{} for _ in range(layer.heads)]
    named = {
        f"link_{n}": tolist(torch.stack([getattr(x, n) for x in links]).nanmean(0))
        for n in ("linear", "trained", "exists")
    }
    return [
        {n: x[h] if x[h] == x[h] else None for n, x in named.items()} for h in range(layer.heads)
    ]


def sensitivities(
    model: nn.Module, layers: list[Layer], arguments: Mapping[str, Tensor]
) -> dict[int, dict[str, float | None]]:
    """Of the output for these arguments to the weights of each layer (T23); takes gradients."""
    groups: list[Group] = []
    for layer in layers:
        found = weights_of(model, layer)
        if found is not None and found.value_output:
            groups.append(Group(layer.number, found.query_key, found.value_output))
    if not groups or not arguments:
        return {}

    def forward() -> Tensor:
        return model(**arguments)[0]

    return {
        x.layer: {"sensitivity_qk": x.query_key, "sensitivity_vo": x.value_output}
        for x in sensitivity(model, forward, groups)
    }


def partition_rows(model: nn.Module) -> list[dict[str, Any]]:
    """The partition function of the input embeddings (T31), where the model tells them."""
    weight = getattr(embeddings(model), "weight", None)
    return [] if weight is None or weight.ndim != 2 else partition(weight.detach())


def weights_digest(model: nn.Module) -> str:
    """A hash of names, shapes, sums and some entries of all parameters."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        few = flat[:: max(1, -(-len(flat) // SAMPLED))].double().cpu().numpy()
        # Summed by numpy: torch's order, and so the last digits, depend on the threads.
        exact = flat if flat.dtype == torch.float64 else flat.float()
        total = float(exact.cpu().numpy().sum(dtype="float64"))
        found.update(f"{name} {tuple(parameter.shape)} {total.hex()}\0".encode())
        found.update(few.tobytes())
    return found.hexdigest()


def nullable(rows: list[dict[str, Any]]) -> DataFrame:
    """A table with missing numbers as NA, never NaN; empty columns are dropped."""
    table = pandas().DataFrame(rows).dropna(axis="columns", how="all")
    for column in table.columns:
        if table[column].isna().any():
            table[column] = table[column].astype("Float64")
    return table


def left_out(skipped: Mapping[str, str]) -> str:
    """Blocks without layer statistics, by reason."""
    reasons: dict[str, list[str]] = {}
    for block, why in skipped.items():
        reasons.setdefault(why, []).append(block)
    parts = [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} ({why})"
        for why, names in reasons.items()
    ]
    return "without expansion and shape of hidden states: " + "; ".join(parts)


def peak_memory() -> float | None:
    """The most memory this process has held, in MB, where the system tells."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return round(int(line.split()[1]) / 1024, 1)
    except OSError:
        pass
    return None


def versions() -> dict[str, str | None]:
    """Of what the figures come from."""
    import cumulant

    return {
        "cumulant": cumulant.__version__,
        "torch": torch.__version__,
        "transformers": getattr(sys.modules.get("transformers"), "__version__", None),
        "python": platform.python_version(),
    }


def model_facts(model: nn.Module, name: str, layers: list[Layer], texts: str) -> dict[str, Any]:
    """What was examined."""
    config = getattr(model, "config", None)
    precision = str(next((p.dtype for p in model.parameters()), ""))
    return {
        "name": name,
        "type": str(getattr(config, "model_type", type(model).__name__)),
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": len(layers),
        "heads": max((x.heads for x in layers), default=0),
        "text": texts,
        "head size": max((x.size for x in layers), default=0),
        "hidden size": getattr(config, "hidden_size", None),
        "attention": str(getattr(config, "_attn_implementation", "")),
        "precision": precision.removeprefix("torch."),
    }
