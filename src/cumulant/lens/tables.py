"""What a lens saw, as tidy tables."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from cumulant.core.errors import InputError
from cumulant.lens.layers import LayerProbe
from cumulant.lens.patterns import PATTERNS
from cumulant.lens.recorder import Record, Recorder
from cumulant.memory.classes import EDGES, NAMES

if TYPE_CHECKING:
    from pandas import DataFrame  # pyright: ignore[reportMissingTypeStubs]

__all__ = ["TOKEN_COLUMNS", "Lens", "pandas", "token_table"]

_WHOLE = ("k90", "visible", "top_key")
TOKEN_COLUMNS = (
    *("input", "layer", "head", "token", "token_text", "attention", "log_normalizer", "entropy"),
    *("effective_keys", "k90", "class", "visible", "score_variance"),
    *("top_key", "top_key_text", "top_weight"),
    *("self_mass", "sink_mass", "sink_logit_mass", "fisher_trace", "leading_eigenvalue"),
    *PATTERNS,
    *("energy_change", "received"),
)


def pandas() -> Any:
    """The package, or one clear line."""
    try:
        return import_module("pandas")
    except ImportError as error:
        raise InputError("tables need pandas; install it with: pip install '.[lens]'") from error


class Lens:
    """What `observe` yields: the tables of everything seen so far."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __repr__(self) -> str:
        seen = self._recorder
        return f"Lens({seen.calls} attention calls, {seen.next_input} inputs)"

    def table(self) -> DataFrame:
        """A pandas table with one row per (input, layer, head, token), without padding.

        Columns are defined in ``cumulant.lens.COLUMNS``; `input` runs on over forward calls, and
        generation step by step continues the same input.
        """
        return token_table(self._recorder)

    def heads(self) -> DataFrame:
        """One row per (layer, head): means over the tokens seen, class, lipschitz."""
        from cumulant.lens.summary import HeadSums

        token_table(self._recorder)  # says so if there is nothing, or NaN
        sums = HeadSums()
        for record in self._recorder.records:
            sums.add(record)
        rows = [row for layer in self._recorder.layers.values() for row in sums.rows(layer)]
        return pandas().DataFrame(rows)

    def modules(self) -> DataFrame:
        """One row per layer: the module, self or cross, heads, key heads and scale."""
        rows = [
            {
                "layer": x.number,
                "module": x.name,
                "attention": "cross" if x.cross else "self",
                "heads": x.heads,
                "key_heads": x.key_heads,
                "scale": x.scale,
            }
            for x in self._recorder.layers.values()
        ]
        return pandas().DataFrame(rows)

    def layers(self) -> DataFrame:
        """One row per transformer block; needs ``observe(model, layers=True)``."""
        return pandas().DataFrame(self._probe().layers())

    def expansions(self) -> DataFrame:
        """Quantiles of distance ratios per sublayer; needs ``observe(model, layers=True)``."""
        return pandas().DataFrame(self._probe().expansions())

    def forms(self, distances: Sequence[float] = (0.0,)) -> DataFrame:
        """The score matrix of each head: symmetric, positive, the link of a Gaussian? (T35).

        A = W_q W_k' and S = C^(1/2) A C^(1/2), C the covariance of the states that the attention
        module was given; if W_q and W_k are the canonical link near a Gaussian law, S is symmetric
        and positive. ``mismatched_`` columns are the same figures for queries of one head with keys
        of another of the same layer. Needs ``observe(model, layers=True)``.

        Args:
            distances: query minus key position, for rotary models; others have 0 only.
        """
        from cumulant.lens.summary import forms_of

        self._probe()
        return pandas().DataFrame(forms_of(self._recorder, tuple(distances)))

    def _probe(self) -> LayerProbe:
        if self._recorder.probe is None:
            raise InputError("layers were not observed: use observe(model, layers=True).")
        return self._recorder.probe


def token_table(recorder: Recorder) -> DataFrame:
    """All records as one table, sorted by input, layer, head and token."""
    if not recorder.records:
        if recorder.stack.frames:
            from cumulant.lens.observing import unseen

            raise InputError(unseen(recorder.model))
        raise InputError("nothing was observed yet: call the model inside the observe block.")
    frames = pandas()
    kinds = {x.number: "cross" if x.cross else "self" for x in recorder.layers.values()}
    names = {x.number: x.name for x in recorder.layers.values()}
    parts = [_columns(r, names[r.layer]) for r in recorder.records]
    joined = {n: torch.cat([p[n] for p in parts]).numpy() for n in parts[0]}
    for name in PATTERNS:  # null where a token has no such key
        if name in joined:
            missing = joined[name] != joined[name]
            joined[name] = frames.arrays.FloatingArray(joined[name], missing)
    table = frames.DataFrame({n: joined[n] for n in TOKEN_COLUMNS if n in joined})
    layers = table["layer"].map(kinds)
    table.insert(4, "attention", frames.Categorical(layers, categories=["self", "cross"]))
    if "k90" in table:
        share = (table["k90"] / table["visible"]).to_numpy()
        codes = sum((share <= edge).astype("int8") for edge in EDGES)
        named = frames.Categorical.from_codes(codes, categories=list(NAMES), ordered=True)
        table.insert(table.columns.get_loc("k90") + 1, "class", named)
    keys = ["input", "layer", "head", "token"]
    return table.sort_values(keys, kind="stable", ignore_index=True)


def _columns(record: Record, name: str) -> dict[str, torch.Tensor]:
    """One record, flat, without padding."""
    some = record.columns["log_normalizer"]
    batch, heads, m = some.shape
    keep = record.real[:, None] & (record.columns["visible"] > 0)
    grid = {
        "input": torch.tensor(record.inputs)[:, None, None],
        "layer": torch.tensor(record.layer).reshape(1, 1, 1),
        "head": torch.arange(heads)[None, :, None],
        "token": record.token[:, None],
    }
    out = {n: x.expand(batch, heads, m)[keep] for n, x in grid.items()}
    for column, x in record.columns.items():
        values = x[keep]
        if column in _WHOLE:
            values = values.long()
        elif column not in PATTERNS and not bool(values.isfinite().all()):
            raise InputError(
                f"{column} of layer {record.layer} ({name}) is not finite: the model's queries or "
                "keys hold NaN or infinity. Load a half-precision model in float32, or look for "
                "NaN in the weights."
            )
        out[column] = values
    return out
