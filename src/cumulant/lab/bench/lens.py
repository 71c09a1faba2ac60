"""The lens against the model's own forward pass and eager weights; the monitor against training."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from cumulant.core.progress import ProgressCallback, counted
from cumulant.core.typed import functions
from cumulant.lab.bench.peak import growth
from cumulant.lab.bench.timing import Row, clock, interleave, row
from cumulant.lens.examining import examine
from cumulant.lens.models import load
from cumulant.lens.monitoring import Monitor
from cumulant.lens.observing import observe

__all__ = ["run"]

BATCH, LENGTH = 16, 512
LONG = 8192
STEPS = 200


def _ids(batch: int, length: int, words: int) -> dict[str, Tensor]:
    ids = torch.randint(5, words, (batch, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _minilm(implementation: str) -> Any:
    model = load().model
    model.set_attn_implementation(implementation)
    return model


def _forward(model: Any, inputs: dict[str, Tensor], **options: Any) -> object:
    with torch.no_grad():
        return model(**inputs, **options)


def _observed(model: Any, inputs: dict[str, Tensor], **wanted: bool) -> object:
    with observe(model, **wanted) as lens:
        _forward(model, inputs)
    return lens


def model_cases(batch: int, length: int) -> dict[str, Callable[[], object]]:
    plain, eager = _minilm("sdpa"), _minilm("eager")
    inputs = _ids(batch, length, plain.config.vocab_size)
    return {
        "sdpa forward": lambda: _forward(plain, inputs),
        "eager, output_attentions": lambda: _forward(eager, inputs, output_attentions=True),
        "G, entropy, variances": lambda: _observed(plain, inputs, k90=False, spectrum=False),
        "and k90, class, top key": lambda: _observed(plain, inputs, spectrum=False),
        "and leading eigenvalue": lambda: _observed(plain, inputs),
    }


def _examined(texts: int, length: int) -> dict[str, Callable[[], object]]:
    """SmolLM2 on texts of random tokens: its forward passes, and all default statistics."""
    loaded = load("smollm2")
    model, tokenizer = loaded.model, loaded.tokenizer
    ids = _ids(texts, length, len(tokenizer))["input_ids"]
    said = [str(tokenizer.decode(x)) for x in ids]
    # Decoded and encoded again: the lengths that the examination has.
    inputs = [dict(tokenizer(x, return_tensors="pt")) for x in said]

    def forward() -> None:
        for one in inputs:
            _forward(model, one)

    return {
        "forward pass": forward,
        "examine, every default statistic": lambda: examine(model, tokenizer, said, batch_size=1),
    }


def examinations(rounds: int, tick: Callable[[str], None]) -> list[Row]:
    """`examine` of one text, where what is done once for a model counts fully, and of four."""
    rows: list[Row] = []
    for texts in (1, 4):
        label = f"SmolLM2, {texts} text{'s' * (texts > 1)} of about {LENGTH} tokens"
        cases = _examined(texts, LENGTH)
        seconds = interleave(
            cases, rounds=rounds, tick=lambda what, at=label: tick(f"{at}: {what}"), clock=clock()
        )
        rows.append(row(seconds, label, "examine, every default statistic", "forward pass", 3.0))
    return rows


def eager_weights() -> Callable[[], object]:
    """MiniLM with the matrices of weights kept."""
    return model_cases(BATCH, LENGTH)["eager, output_attentions"]


def all_statistics() -> Callable[[], object]:
    """MiniLM with every per-token statistic."""
    return model_cases(BATCH, LENGTH)["and leading eigenvalue"]


def long_text() -> Callable[[], object]:
    """One text of 8,192 tokens through a small random BERT of 24 heads."""
    transformers = import_module("transformers")
    config = transformers.BertConfig(
        vocab_size=100,
        hidden_size=96,
        num_hidden_layers=1,
        num_attention_heads=24,
        intermediate_size=96,
        max_position_embeddings=LONG,
    )
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    inputs = _ids(1, LONG, 100)
    return lambda: _observed(model, inputs)


def _training(monitored: bool) -> Callable[[], object]:
    """A training step of a small GPT-2, with a monitor at its defaults or without."""
    transformers = import_module("transformers")
    config = transformers.GPT2Config(
        vocab_size=1000,
        n_positions=128,
        n_embd=128,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    config.loss_type = "ForCausalLM"
    ids = _ids(8, 128, 1000)["input_ids"]
    functions.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).train()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = Monitor(model) if monitored else None

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        if monitor is not None:
            monitor.step()

    return step


def monitoring(steps: int, tick: Callable[[str], None]) -> Row:
    """What `Monitor` adds to training time: two trainings, step by step in turn."""
    label = f"GPT-2, 4 layers of width 128, 8 x 128, {steps} steps"
    cases = {"training, monitored": _training(True), "training": _training(False)}
    now, spent = clock(), dict.fromkeys(cases, 0.0)
    tick(label)
    for _ in range(steps):
        for name, step in cases.items():
            start = now()
            step()
            spent[name] += now() - start
    seconds = {name: [total] for name, total in spent.items()}
    return row(seconds, label, "training, monitored", "training", 1.02)


def run(
    *, rounds: int = 7, quick: bool = False, progress: ProgressCallback | None = None
) -> list[Row]:
    """Measure everything; `progress` is called before every single run."""
    batch, length = (4, 256) if quick else (BATCH, LENGTH)
    label = f"MiniLM, {batch} x {length}"
    few = max(3, rounds // 2)
    cases = model_cases(batch, length)
    # Quick, a run of 50 steps: as many watched steps for each other one.
    steps = 50 if quick else STEPS
    tick = counted(progress, len(cases) * (few + 1) + 1 + (0 if quick else 3 + 4 * (few + 1)))

    def told(what: str) -> None:
        tick(f"{label}: {what}")

    seconds = interleave(cases, rounds=few, tick=told, clock=clock())
    weights = "eager, output_attentions"
    rows = [
        row(seconds, label, "G, entropy, variances", "sdpa forward", 2.0),
        row(seconds, label, "and k90, class, top key", weights, 0.6),
        row(seconds, label, "and leading eigenvalue", weights, 1.5),
    ]
    rows.append(monitoring(steps, tick))
    if quick:
        return rows
    rows += examinations(few, tick)
    tick("peak memory of eager attention")
    theirs = growth(__name__, "eager_weights")
    tick("peak memory of the lens")
    ours = growth(__name__, "all_statistics")
    if ours is not None and theirs is not None:
        rows.append(
            Row(label, "all statistics", weights, ours, theirs, ours / theirs, 1 / 4, unit="MB")
        )
    tick("8192 tokens")
    ours = growth(__name__, "long_text")
    if ours is not None:
        scores = 24 * LONG**2 * 4 / 2**20  # one array of weights of one layer in single precision
        rows.append(
            Row(
                f"1 x {LONG}, 24 heads, one layer",
                "all statistics",
                "its weights alone",
                ours,
                scores,
                ours / scores,
                1 / 4,
                unit="MB",
            )
        )
    return rows
