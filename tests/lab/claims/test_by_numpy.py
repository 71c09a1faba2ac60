"""Headline numbers about MiniLM in the recorded ledger, again by numpy and scipy from its weights.

Nothing of the library is used but the loader: hidden states come from transformers, sublayers are
written out.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist
from scipy.special import erf, softmax
from scipy.stats import gmean

import cumulant as cm
from cumulant.lab.claims.subjects import texts

LEDGER = Path(__file__).parents[3] / "docs" / "claims" / "claims.json"
HEADS, WIDTH = 12, 32


def told(name: str) -> str:
    rows = json.loads(LEDGER.read_text(encoding="utf-8"))["claims"]
    return next(row["finding"] for row in rows if row["id"] == name)


@cache
def weights() -> dict[str, Any]:
    state = cm.lens.load("minilm").model.state_dict()
    return {name: x.double().numpy() for name, x in state.items()}


def linear(layer: int, name: str, x):
    w = weights()
    at = f"encoder.layer.{layer}.{name}"
    return x @ w[f"{at}.weight"].T + w[f"{at}.bias"]


@cache
@torch.no_grad()
def states(count: int = 16) -> list[list[Any]]:
    """The states ``(N, D)`` before each layer and after the last, text by text."""
    model, tokenizer, *_ = cm.lens.load("minilm")
    found = []
    for line in texts("austen")[:count]:
        ids = tokenizer(line, return_tensors="pt", truncation=True, max_length=128)
        hidden = model(**ids, output_hidden_states=True).hidden_states
        found.append([x[0].double().numpy() for x in hidden])
    return found


def heads_of(layer: int, x) -> list[tuple[Any, Any, Any]]:
    """Queries with their scale, keys and values, head by head."""
    parts = [linear(layer, f"attention.self.{n}", x) for n in ("query", "key", "value")]
    split = [p.reshape(len(x), HEADS, WIDTH).swapaxes(0, 1) for p in parts]
    return [(q / WIDTH**0.5, k, v) for q, k, v in zip(*split, strict=True)]


def layer_norm(layer: int, name: str, x):
    w = weights()
    at = f"encoder.layer.{layer}.{name}.LayerNorm"
    away = x - x.mean(-1, keepdims=True)
    scaled = away / np.sqrt(away.var(-1, keepdims=True) + 1e-12)
    return scaled * w[f"{at}.weight"] + w[f"{at}.bias"]


def test_symmetry_of_heads_where_their_states_are_white():
    """T35: tr(SS) / tr(SS') of S = C^(1/2) W_q' W_k C^(1/2), the median over heads."""
    found = []
    for layer in range(6):
        pooled = np.concatenate([x[layer] for x in states()])
        values, axes = np.linalg.eigh(np.cov(pooled.T))
        root = axes * np.sqrt(values.clip(0)) @ axes.T
        query, key = (
            root @ weights()[f"encoder.layer.{layer}.attention.self.{n}.weight"].T
            for n in ("query", "key")
        )
        for h in range(HEADS):
            at = slice(h * WIDTH, (h + 1) * WIDTH)
            S = query[:, at] @ key[:, at].T
            found.append(np.trace(S @ S) / np.sum(S * S))
    recorded = float(re.search(r"MiniLM ([\d.]+)", told("T35"))[1])
    assert np.median(found) == pytest.approx(recorded, abs=0.02)  # the lens leaves sinks out


def test_distances_over_the_parts_of_every_layer():
    """T39: medians over pairs of tokens of one text, the geometric mean over layers."""
    found = {name: [] for name in ("attention", "feed_forward", "norm", "block")}
    for layer in range(6):
        ratios: dict[str, list[Any]] = {name: [] for name in ("a", "n", "f", "m", "b")}
        for one in states():
            x = one[layer]
            mixed = [softmax(q @ k.T, -1) @ v for q, k, v in heads_of(layer, x)]
            after = x + linear(layer, "attention.output.dense", np.concatenate(mixed, -1))
            middle = layer_norm(layer, "attention.output", after)
            z = linear(layer, "intermediate.dense", middle)
            z = z * (1 + erf(z / 2**0.5)) / 2
            fed = middle + linear(layer, "output.dense", z)
            end = layer_norm(layer, "output", fed)
            np.testing.assert_allclose(end, one[layer + 1], atol=1e-3)
            steps = {"a": (x, after), "n": (after, middle), "f": (middle, fed), "m": (fed, end)}
            for name, (before, then) in (steps | {"b": (x, end)}).items():
                ratios[name].append(pdist(then) / pdist(before))
        middle_of = {name: np.median(np.concatenate(x)) for name, x in ratios.items()}
        found["attention"].append(middle_of["a"])
        found["feed_forward"].append(middle_of["f"])
        found["norm"] += [middle_of["n"], middle_of["m"]]
        found["block"].append(middle_of["b"])
    ours = [gmean(found[name]) for name in ("attention", "feed_forward", "norm")]
    numbers = re.search(r"MiniLM ([\d.]+), ([\d.]+), ([\d.]+), ([\d.]+)", told("T39"))
    recorded = [float(x) for x in numbers.groups()]
    assert [*ours, np.prod(found["block"])] == pytest.approx(
        recorded, rel=0.04
    )  # pairs are sampled


def test_what_a_gaussian_in_place_of_the_keys_leaves():
    """T40: of the square that uniform attention misses, the median over heads."""
    missed = np.zeros((2, 6, HEADS))
    for one in states()[:8]:
        for layer in range(6):
            for h, (q, k, v) in enumerate(heads_of(layer, one[layer])):
                truth = softmax(q @ k.T, -1) @ v
                slope = (k - k.mean(0)).T @ v / len(k)
                missed[:, layer, h] += [
                    np.sum((v.mean(0) + q @ slope - truth) ** 2),
                    np.sum((v.mean(0) - truth) ** 2),
                ]
    recorded = float(re.search(r"([\d.]+)% in MiniLM", told("T40"))[1]) / 100
    assert np.median(missed[0] / missed[1]) == pytest.approx(recorded, abs=0.02)
