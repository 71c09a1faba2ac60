"""A made-up examination: random causal attention with a sink, its statistics by plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from cumulant.lens.report import ReportData

LAYERS, HEADS, TOKENS = 6, 12, 130
HOSTILE = ["<script>document.title='run'</script>", "</script>", "<img src=x onerror=alert(1)>"]
WORDS = [
    "the",
    "history",
    "of",
    "a",
    "city",
    "is",
    "written",
    "in",
    "its",
    "streets",
    "and",
    "in",
    "what",
    "people",
    "remember",
    "of",
    "them",
]


def words(amount: int) -> list[str]:
    plain = [w if i % 7 else f"##{w}" for i, w in enumerate(WORDS * (amount // len(WORDS) + 1))]
    return ["[CLS]", *HOSTILE, "a\u2028b", *plain][:amount]


def attention(rng: np.random.Generator, layer: int, head: int, tokens: int) -> np.ndarray:
    """Weights (query, key): sharper in later heads, more on the first key in later layers."""
    scores = rng.normal(size=(tokens, tokens)) * (0.3 + 0.35 * head)
    scores[:, 0] += 1.4 * layer
    scores[np.triu_indices(tokens, 1)] = -np.inf
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def classify(fraction: float) -> str:
    return (
        "I"
        if fraction > 1 / 2
        else "II"
        if fraction > 1 / 8
        else "III"
        if fraction > 1 / 32
        else "IV"
    )


def made_up(
    *, layers: int = LAYERS, heads: int = HEADS, tokens: int = TOKENS, seed: int = 0
) -> ReportData:
    rng = np.random.default_rng(seed)
    parts: list[pd.DataFrame] = []
    rows: list[dict[str, Any]] = []
    top: list[Any] = []
    for layer in range(layers):
        top.append([])
        for head in range(heads):
            p = attention(rng, layer, head, tokens)
            entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(1)
            order = np.argsort(-p, axis=1)
            k90 = (np.cumsum(-np.sort(-p, axis=1), axis=1) < 0.9 - 1e-12).sum(1) + 1
            visible = np.arange(1, tokens + 1)
            spread = rng.gamma(2, 1.5 + head / 4, size=tokens)
            part = pd.DataFrame(
                {
                    "input": 0,
                    "layer": layer,
                    "head": head,
                    "token": np.arange(tokens),
                    "attention": "self",
                    "log_normalizer": np.log(visible) + rng.normal(size=tokens) / 5 + head / 3,
                    "entropy": entropy,
                    "effective_keys": np.exp(entropy),
                    "k90": k90,
                    "class": [classify(k / v) for k, v in zip(k90, visible, strict=True)],
                    "visible": visible,
                    "score_variance": rng.gamma(2, 0.2 + head / 8, size=tokens),
                    "top_key": order[:, 0],
                    "top_weight": p.max(1),
                    "self_mass": np.diag(p),
                    "sink_mass": p[:, 0],
                    "sink_logit_mass": 0.0,
                    "fisher_trace": spread * 4,
                    "leading_eigenvalue": spread,
                }
            )
            parts.append(part)
            top[-1].append(
                [
                    [(int(j), float(p[i, j])) for j in order[i, :5] if p[i, j] > 0]
                    for i in range(tokens)
                ]
            )
            fraction = float(np.median(k90 / visible))
            means = part[
                ["entropy", "effective_keys", "log_normalizer", "score_variance", "self_mass"]
            ].mean()
            symmetry = float(np.clip(rng.normal(0.35, 0.35), -1, 0.99))
            rows.append(
                {
                    **{"layer": layer, "head": head, "attention": "self"},
                    "module": f"encoder.layer.{layer}.attention.self",
                    "class": classify(fraction),
                    "k90_fraction": fraction,
                    **means.to_dict(),
                    "sink_mass": float(p[:, 0].mean()),
                    "lipschitz": float(spread.max() / 5.6),
                    "energy_change": -float(rng.gamma(2, 1 + layer)),
                    "energy_rises": 0.0,
                    "symmetry": symmetry,
                    "definiteness": float(np.clip(symmetry + rng.normal() / 5, -1, 1)),
                    "value_alignment": float(rng.normal() / 10),
                    "link_linear": float(1 - rng.gamma(1, 0.15)) if head else None,
                    "link_trained": float(0.6 - rng.gamma(1, 0.6)) if head else None,
                    "link_exists": float(rng.uniform(0.8, 1)),
                }
            )
    return ReportData(
        title="made-up/six-layers",
        facts={"parameters": 22_713_216, "hidden size": 384, "attention": "causal"},
        tokens=pd.concat(parts, ignore_index=True),
        heads=pd.DataFrame(rows),
        layers=depth_table(rng, layers),
        expansions=expansion_table(rng, layers),
        partition=partition_table(),
        texts=[("passage", words(tokens))],
        top=[top],
        run={"seconds": 12.3, "peak_memory_mb": 812.4, "versions": {"torch": "2.13.0"}},
        notes=["One text was cut to 130 tokens."],
    )


def depth_table(rng: np.random.Generator, layers: int) -> pd.DataFrame:
    def wobble(level: float) -> np.ndarray:
        return level * np.exp(rng.normal(size=layers) / 12)

    return pd.DataFrame(
        {
            "layer": range(layers),
            "module": [f"encoder.layer.{i}" for i in range(layers)],
            "attention_expansion": wobble(1.12),
            "cross_attention_expansion": None,
            "feed_forward_expansion": wobble(1.3),
            "norm_contraction": wobble(0.8),
            "participation_ratio": wobble(31),
            "anisotropy": np.linspace(0.12, 0.44, layers),
            "rank_residual": np.linspace(0.94, 0.7, layers),
            "gaussianity": wobble(2.1),
            "gaussianity_null": wobble(1.1),
            "gaussianity_p": [0.01] * (layers - 1) + [0.4],
            "sensitivity_qk": wobble(0.02),
            "sensitivity_vo": wobble(0.11),
        }
    )


def expansion_table(rng: np.random.Generator, layers: int) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    norms = (("norm", "norm_1"), ("norm", "norm_2"))
    named = (("attention", ""), ("feed_forward", ""), *norms, ("block", ""))
    level = {"attention": 1.12, "feed_forward": 1.3, "norm": 0.8, "block": 1.05}
    for layer in range(layers):
        for sublayer, name in named:
            for which in ("all", "without_sinks"):
                middle = level[sublayer] * np.exp(rng.normal() / 10)
                quantiles = dict(
                    zip(
                        ("q05", "q25", "median", "q75", "q95"),
                        middle * np.exp(np.array([-0.4, -0.15, 0, 0.15, 0.5])),
                        strict=True,
                    )
                )
                place = {"layer": layer, "module": f"encoder.layer.{layer}", "sublayer": sublayer}
                rows.append({**place, "name": name, "tokens": which, "pairs": 2048, **quantiles})
    return pd.DataFrame(rows)


def partition_table() -> pd.DataFrame:
    """Two rows for each radius: vectors as they are, and about their mean."""
    radius = np.repeat([0.25, 0.5, 1, 2, 4, 8], 2)
    centered = np.tile([False, True], 6)
    sd = np.where(centered, 0.02, 0.06) * radius**1.5
    mean = np.log(30522) + radius**2 / 40
    return pd.DataFrame(
        {
            **{"radius": radius, "norm": 18 * radius, "centered": centered},
            **{"directions": "random", "mean": mean, "sd": sd},
            **{"q025": mean - 2 * sd, "q975": mean + 2 * sd, "relative_sd": np.exp(3 * sd) - 1},
        }
    )
