"""Language modelling on characters: bits per character, and what attention came to do.

Numbers of a run: `bits` on test text; `entropy` of the weights in nats, `effective` keys e^entropy,
`top` weight, `spread` of the scores within a row; `gradient_*` norms over training.
With ``expansion``, `growth`: the mean log ratio of distances between tokens over the stack, before
training and after (T14). With ``link``, the symmetry of W_q W_k' where hidden states are white
(T35), before and after, against pairs of different heads.
"""

from __future__ import annotations

import lzma
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cumulant.core.checks import real, whole
from cumulant.core.errors import InputError
from cumulant.core.typed import functions, linalg, special
from cumulant.lab.studies.training import Training, drawn, made
from cumulant.nn import Attention, Transformer

__all__ = ["Language"]

_GROUPS = {
    "query_key": "query key",
    "value_output": "value output",
    "rest": "embedding position readout contraction parts.1",
}
# Settings that are arguments of the model.
_SWITCHES = (
    *("kernel", "query_key", "value_output", "contraction", "place", "step", "causal", "moments"),
    *("learn_beta", "width", "heads", "layers", "context", "hidden", "passes"),
)
_ATTENTION = ("entropy", "effective", "top", "spread")
_LINK = ("symmetry", "definiteness", "raw", "null")


class Language:
    """A small transformer learns to predict characters."""

    SETTINGS: Mapping[str, Any] = {
        **{"text": "austen", "steps": 500, "every": 50, "batch": 16, "windows": 128},
        **{"width": 64, "heads": 4, "layers": 2, "context": 64, "hidden": 4, "passes": 1},
        **{"causal": True, "kernel": "exp", "query_key": "trained", "value_output": "trained"},
        **{"contraction": "layer", "place": "before", "step": "one", "learn_beta": True},
        **{"clip": 1.0, "decay": 0.01, "expansion": False, "link": False, "moments": False},
    }
    objective = "bits"

    def __init__(self, settings: Mapping[str, Any], *, seed: int, rate: float, beta: float) -> None:
        s = settings
        self.settings, self.seed = s, seed
        self.text, self.symbols = _encoded(s["text"])
        self.context: int = s["context"]
        low, high = self._bounds("test")
        if high - low < self.context + 2:
            raise InputError(
                f"language: context = {self.context} is too long for the text {s['text']!r}, of "
                f"which {high - low} characters are for the test."
            )
        self.model = cast(Transformer, made(seed, lambda: _model(s, self.symbols + 1, beta)))
        self.steps, self.every = int(s["steps"]), int(s["every"])
        self.training = Training(
            self.model, rate=rate, steps=self.steps, clip=s["clip"], decay=s["decay"]
        )
        self.worst = math.log2(self.symbols)
        self.limit = 2 * self.worst
        self.gradients: dict[str, list[float]] = {}
        with torch.no_grad():
            self.before = self._looked() if s["expansion"] or s["link"] else {}

    @staticmethod
    def check(settings: Mapping[str, Any]) -> None:
        """
        Raises:
            InputError: settings with which there is no model or no run.
        """
        for name in ("steps", "every", "batch", "windows"):
            whole("language", name, settings[name], 1)
        for name in ("clip", "decay"):
            real("language", name, settings[name], least=0.0)
        try:
            with torch.device("meta"):
                _model(settings, 2, 1.0)
        except InputError:
            raise
        except (RuntimeError, OverflowError):  # more parameters than can be counted
            raise InputError("language: no model can have these sizes.") from None
        if settings["link"] and settings["query_key"] == "identity":
            raise InputError(
                "language: link = true looks at the matrices of queries and keys, and query_key = "
                "'identity' has none."
            )

    @staticmethod
    def quantities(settings: Mapping[str, Any]) -> list[str]:
        """What `finish` returns."""
        found = ["bits", "validation", *_ATTENTION]
        found += [f"gradient_{group}" for group in _GROUPS]
        looked = [*(["growth"] * settings["expansion"]), *(_LINK * settings["link"])]
        found += [f"{name}{end}" for end in ("_start", "", "_gain") for name in looked]
        return [*found, *(["symmetry_excess"] * settings["link"])]

    def step(self, n: int) -> float:
        inputs, targets = self._batch(drawn(self.seed, n), "training", self.settings["batch"])
        loss = self._loss(inputs, targets)
        self.training.update(loss, n)
        return float(loss.detach()) / math.log(2)

    def measure(self) -> dict[str, float]:
        found = self.training.gradients(_GROUPS)
        for name, x in found.items():
            self.gradients.setdefault(name, []).append(x)
        if self.settings["link"]:
            found |= self._looked()
        return {"bits": self._bits("validation", 32), **found}

    def finish(self) -> dict[str, float]:
        norms = {n: median(x) for n, x in self.gradients.items()}
        validation = self._bits("validation", self.settings["windows"])
        found = {"bits": self._bits("test", self.settings["windows"]), "validation": validation}
        found |= self._attention() | norms
        if self.before:
            after = self._looked()
            found |= {f"{n}_start": x for n, x in self.before.items()} | after
            found |= {f"{n}_gain": x - self.before[n] for n, x in after.items()}
            if "symmetry" in found:
                found["symmetry_excess"] = found["symmetry"] - found["null"]
        return found

    def state(self) -> dict[str, Any]:
        return {**self.training.state(), "gradients": self.gradients, "before": self.before}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.training.restore(state)
        self.gradients, self.before = dict(state["gradients"]), dict(state["before"])

    def _batch(self, source: torch.Generator, part: str, count: int) -> tuple[Tensor, Tensor]:
        """Windows of text, and what is to be predicted; -100 where nothing is."""
        low, high = self._bounds(part)
        starts = torch.randint(low, high - self.context - 1, (count, 1), generator=source)
        windows = self.text[starts + torch.arange(self.context + 1)].long()
        if self.settings["causal"]:
            return windows[:, :-1], windows[:, 1:]
        inputs = windows[:, :-1]
        hidden = torch.rand(inputs.shape, generator=source) < 0.15
        hidden[0, 0] |= ~hidden.any()  # a mean over none would look like a divergence
        return inputs.masked_fill(hidden, self.symbols), inputs.masked_fill(~hidden, -100)

    def _bounds(self, part: str) -> tuple[int, int]:
        edges = [int(share * len(self.text)) for share in (0.0, 0.9, 0.95, 1.0)]
        k = ("training", "validation", "test").index(part)
        return edges[k], edges[k + 1]

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def _bits(self, part: str, windows: int) -> float:
        """On the same windows for every run."""
        inputs, targets = self._batch(drawn(7, 0), part, windows)
        pieces = zip(torch.split(inputs, 32), torch.split(targets, 32), strict=True)
        losses = [float(self._loss(x, y)) * int((y >= 0).sum()) for x, y in pieces]
        return sum(losses) / int((targets >= 0).sum()) / math.log(2)

    @torch.no_grad()
    def _attention(self) -> dict[str, float]:
        """Statistics of the weights, over layers, heads and rows with at least eight keys."""
        found: dict[str, list[float]] = {n: [] for n in _ATTENTION}
        for attention, x in self._inputs():
            q, k, _ = attention.projected(x)
            weights = attention.kernel.weights(
                q, k, is_causal=attention.causal, beta=attention.beta
            )
            total = weights.sum(-1, keepdim=True)
            p = (weights / torch.where(total == 0, 1.0, total))[..., 8:, :]
            entropy = special.entr(p).sum(-1)
            scores = (q * attention.beta) @ k.mT / math.sqrt(q.shape[-1])
            if attention.kernel.cosine:
                q, k = (y / linalg.vector_norm(y, dim=-1, keepdim=True) for y in (q, k))
                scores = (q * attention.beta) @ k.mT
            seen = torch.ones_like(scores, dtype=torch.bool)
            seen = (seen.tril() if attention.causal else seen)[..., 8:, :]
            count = seen.sum(-1)
            rows = scores[..., 8:, :] * seen
            variance = (rows**2).sum(-1) / count - (rows.sum(-1) / count) ** 2
            found["entropy"].append(float(entropy.mean()))
            found["effective"].append(float(entropy.exp().mean()))
            found["top"].append(float(p.amax(-1).mean()))
            found["spread"].append(float(variance.clamp_min(0).sqrt().mean()))
        return {name: sum(x) / len(x) for name, x in found.items()}

    def _inputs(self) -> list[tuple[Attention, Tensor]]:
        """Every attention layer with what it attends to, on some test text."""
        inputs, _ = self._batch(drawn(7, 1), "test", 16)
        x, found = self.model.embedded(inputs), list[tuple[Attention, Tensor]]()
        for block in self.model.blocks:
            attention = block.parts[0]  # pyright: ignore
            first: nn.Module = block.contractions[0]  # pyright: ignore
            found.append((cast(Attention, attention), first(x) if block.first else x))
            x = block(x)
        return found

    def _looked(self) -> dict[str, float]:
        found: dict[str, float] = {}
        with torch.no_grad():
            if self.settings["expansion"]:
                found["growth"] = self._growth()
            if self.settings["link"]:
                found |= _link(self._inputs())
        return found

    def _growth(self) -> float:
        """Mean log ratio of distances between tokens of a text, after the stack to before."""
        inputs, _ = self._batch(drawn(7, 2), "test", 16)
        before, after = self.model.embedded(inputs), self.model.states(inputs)
        a, b = (torch.cdist(x, x) for x in (before, after))
        pairs = torch.ones(self.context, self.context).triu(1).bool()
        return float((b[:, pairs].clamp_min(1e-9) / a[:, pairs].clamp_min(1e-9)).log().mean())


def _model(settings: Mapping[str, Any], symbols: int, beta: float) -> Transformer:
    chosen: dict[str, Any] = {name: settings[name] for name in _SWITCHES}
    return Transformer(symbols, beta=beta, **chosen)


def _link(layers: list[tuple[Attention, Tensor]]) -> dict[str, float]:
    """Symmetry tr(SS)/|S|^2 and definiteness of S = C^1/2 M C^1/2, M = W_q W_k' of a head, C the
    covariance of its inputs; `null` pairs the query map of one head with the key map of another."""
    found: dict[str, list[float]] = {n: [] for n in _LINK}
    for attention, x in layers:
        rows = x.flatten(0, -2).double()
        rows = rows - rows.mean(0)
        value, vector = linalg.eigh(rows.mT @ rows / len(rows))
        root = (vector * value.clamp_min(0).sqrt()) @ vector.mT
        query, key = (
            torch.unflatten(cast(nn.Linear, y).weight.double(), 0, (attention.heads, -1))
            for y in (attention.query, attention.key)
        )
        for i in range(attention.heads):
            for j in range(attention.heads):
                raw = query[i].mT @ key[j]
                S = root @ raw @ root
                found["symmetry" if i == j else "null"].append(_symmetry(S))
                if i == j:
                    found["raw"].append(_symmetry(raw))
                    e = linalg.eigvalsh((S + S.mT) / 2)
                    found["definiteness"].append(float(e.sum() / e.abs().sum()))
    return {name: sum(x) / len(x) for name, x in found.items()}


def _symmetry(S: Tensor) -> float:
    return float((S * S.mT).sum() / S.square().sum())


@cache
def _encoded(name: str) -> tuple[Tensor, int]:
    """The text as numbers of its characters, and how many characters there are."""
    points = np.frombuffer(_text(name).encode("utf-32-le"), dtype=np.uint32)
    symbols, numbers = np.unique(points, return_inverse=True)
    return functions.from_numpy(numbers.astype(np.uint8)), len(symbols)


def _text(name: str) -> str:
    path = Path(name)
    if name == "austen":  # comes with the source, not with the wheel
        path = Path(__file__).parents[4] / "examples" / "data" / "austen.txt.xz"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read the text {name!r}: {error.strerror}. Name another file with --text; the "
            "novels come with the source of this library (examples/data)."
        ) from None
    text = (lzma.decompress(content) if path.suffix == ".xz" else content).decode("utf-8")
    if len(set(text)) > 255 or len(text) < 10_000:
        raise InputError(
            f"the text {name!r} must have at least 10,000 characters and at most 255 different "
            f"ones; it has {len(text)} and {len(set(text))}."
        )
    return text
