"""The callbacks of `Monitor`, in real runs of transformers' `Trainer` and of Lightning."""

from __future__ import annotations

import csv
import math

import lightning
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import cumulant as cm
from cumulant.core.errors import InputError
from cumulant.integrations import lightning as ours
from cumulant.integrations.transformers_trainer import MonitorCallback

WORDS = 24
SCALARS = {
    f"attention/{figure}/layer_{layer}"
    for figure in (
        *("entropy", "effective_keys", "entropy_share", "score_max", "score_variance"),
        "sink_mass",
    )
    for layer in range(2)
}


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    config.loss_type = "ForCausalLM"
    return GPT2LMHeadModel(config)


class Small(nn.Module):
    """Two layers of one head: quick to compile."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.inner = nn.Embedding(WORDS, 8), nn.Linear(8, 24)

    def forward(self, input_ids, labels):
        x = self.embedding(input_ids)
        for _ in range(2):
            q, k, v = (y.unsqueeze(1) for y in self.inner(F.dropout(x, 0.2)).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        logits = (x @ self.embedding.weight.T).flatten(0, 1)
        return {"loss": F.cross_entropy(logits, labels.flatten())}


def texts(count=32):
    ids = torch.randint(1, WORDS, (count, 10), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": x, "labels": x} for x in ids]


# ------------------------------------------------------------------------- transformers' Trainer


def run_trainer(folder, *, every=None, **options):
    """A trainer after six steps, and its monitor if it has one."""
    torch._dynamo.reset()
    model = Small() if options.get("torch_compile") else gpt2()
    given = {"per_device_train_batch_size": 4, "max_steps": 6, "logging_steps": 1} | options
    args = TrainingArguments(
        str(folder), seed=1, use_cpu=True, disable_tqdm=True, save_strategy="no", **given
    )
    trainer = Trainer(model, args, train_dataset=texts())
    monitor = None
    if every is not None:
        monitor = cm.lens.Monitor(model, every=every)
        trainer.add_callback(MonitorCallback(monitor, trainer.log))
    trainer.train()
    return trainer, monitor


def losses(trainer):
    return [x["loss"] for x in trainer.state.log_history if "loss" in x]


def logged(trainer):
    return {
        x["step"]: set(x) for x in trainer.state.log_history if "attention/entropy/layer_0" in x
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"gradient_checkpointing": True},
        {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 3},
    ],
    ids=["plain", "accumulated", "checkpointed", "compiled"],
)
def test_the_trainer_logs_figures_and_trains_as_without(tmp_path, options):
    plain, _ = run_trainer(tmp_path / "plain", report_to="none", **options)
    trainer, monitor = run_trainer(tmp_path / "watched", every=2, report_to="none", **options)
    assert losses(trainer) == losses(plain)
    for p, q in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(p, q)
    steps = [s for s in (0, 2, 4) if s < trainer.state.max_steps]
    table = monitor.table()
    heads = 2 if options.get("torch_compile") else 4
    assert table.groupby("step").size().to_dict() == dict.fromkeys(steps, heads)
    found = logged(trainer)
    assert sorted(found) == [s + 1 for s in steps]  # steps done when the figures are logged
    assert all(names >= SCALARS for names in found.values())
    assert not any(m._forward_pre_hooks for m in trainer.model.modules())


def test_the_trainers_figures_reach_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    _, monitor = run_trainer(tmp_path, every=3, report_to="tensorboard")
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    found = events.Scalars("train/attention/score_max/layer_1")
    table = monitor.table()
    expected = table[table["layer"] == 1].groupby("step")["score_max"].max()
    assert [x.step for x in found] == [1, 4]
    assert [x.value for x in found] == pytest.approx(expected.tolist(), rel=1e-6)


def test_a_trainer_that_resumes_continues_the_numbers(tmp_path):
    model = gpt2()
    options = {"per_device_train_batch_size": 4, "report_to": "none", "seed": 1, "use_cpu": True}
    first = TrainingArguments(
        str(tmp_path), max_steps=3, save_steps=3, disable_tqdm=True, **options
    )
    Trainer(model, first, train_dataset=texts()).train()
    args = TrainingArguments(str(tmp_path), max_steps=6, disable_tqdm=True, **options)
    trainer = Trainer(model, args, train_dataset=texts())
    monitor = cm.lens.Monitor(model, every=2)
    trainer.add_callback(MonitorCallback(monitor, trainer.log))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert sorted(set(monitor.table()["step"])) == [4]


def test_a_trainer_of_another_model_stops_at_the_first_step(tmp_path):
    args = TrainingArguments(str(tmp_path), max_steps=4, report_to="none", use_cpu=True)
    trainer = Trainer(gpt2(), args, train_dataset=texts())
    trainer.add_callback(MonitorCallback(cm.lens.Monitor(gpt2()), trainer.log))
    with pytest.raises(InputError, match="was not called in this step"):
        trainer.train()
    assert trainer.state.global_step == 1


# -------------------------------------------------------------------------------------- Lightning


class Module(lightning.LightningModule):
    def __init__(self, attention=True):
        super().__init__()
        torch.manual_seed(0)
        self.net = gpt2() if attention else nn.Embedding(WORDS, WORDS)

    def training_step(self, batch, _):
        if isinstance(self.net, nn.Embedding):
            return self.net(batch["input_ids"]).square().mean()
        return self.net(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def run_lightning(folder, module, monitor=None, **options):
    torch.manual_seed(3)
    given = {"max_steps": 6, "logger": CSVLogger(folder, name="", version="")} | options
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[] if monitor is None else [ours.MonitorCallback(monitor)],
        **given,
    )
    loader = torch.utils.data.DataLoader(texts(), batch_size=4)
    trainer.fit(module, loader)
    return trainer


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("whole", [True, False], ids=["module", "part"])
def test_lightning_logs_figures_and_trains_as_without(tmp_path, accumulated, whole):
    plain, module = Module(), Module()
    run_lightning(tmp_path / "plain", plain, accumulate_grad_batches=accumulated)
    monitor = cm.lens.Monitor(module if whole else module.net, every=2)
    run_lightning(tmp_path, module, monitor, accumulate_grad_batches=accumulated)
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
    table = monitor.table()
    assert table.groupby("step").size().to_dict() == {0: 4, 2: 4, 4: 4}
    assert all(math.isfinite(x) for x in table["loss"])
    with open(tmp_path / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["attention/entropy/layer_0"]]
    assert [int(row["step"]) for row in rows] == [1, 3, 5]
    assert set(rows[0]) >= SCALARS


def test_lightning_without_attention_stops_at_the_first_step(tmp_path):
    module = Module(attention=False)
    monitor = cm.lens.Monitor(module)
    with pytest.raises(InputError, match="no attention of Module reached"):
        run_lightning(tmp_path, module, monitor, logger=False)
