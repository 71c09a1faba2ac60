"""`Monitor`: its figures are those of `observe`, and training does not notice it."""

from __future__ import annotations

import math
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, T5Config, T5Model

import cumulant as cm
from cumulant.core.errors import InputError
from cumulant.lens.monitoring.alarms import Bell
from cumulant.lens.monitoring.log import FIGURES, Watched
from cumulant.lens.observing import watching
from cumulant.lens.recorder import Wanted
from cumulant.lens.sampling import Sample

WORDS = 40


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gpt2(dropout=0.1, layers=2, seed=0):
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=32,
        n_embd=16,
        n_layer=layers,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    config.loss_type = "ForCausalLM"
    return GPT2LMHeadModel(config).train()


def batches(steps, size=3, length=12):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, WORDS, (size, length), generator=generator) for _ in range(steps)]


def train(model, data, monitor=None, *, called=None, lr=1e-2):
    """Losses, weights and the state of the generator after a step on each batch."""
    torch.manual_seed(1)
    called = model if called is None else called
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for ids in data:
        optimizer.zero_grad()
        loss = called(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if monitor is not None:
            monitor.step(loss)
    weights = [p.detach().clone() for p in model.parameters()]
    return losses, weights, torch.get_rng_state()


def same(one, other):
    return (
        one[0] == other[0]
        and all(map(torch.equal, one[1], other[1]))
        and torch.equal(one[2], other[2])
    )


# ------------------------------------------------------------------------------ nothing changes


def test_200_steps_are_bit_identical_with_and_without():
    data = batches(200, size=2, length=8)
    plain = train(gpt2(), data)
    model = gpt2()
    with cm.lens.Monitor(model, every=7, queries=8) as monitor:
        watched = train(model, data, monitor)
    assert same(plain, watched)
    assert sorted(set(monitor.table()["step"])) == list(range(0, 200, 7))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert "cumulant" not in F.scaled_dot_product_attention.__module__


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_count_once(reentrant):
    def checkpointed():
        model = gpt2()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    data = batches(4)
    plain = train(checkpointed(), data)
    model = checkpointed()
    with cm.lens.Monitor(model, every=1) as monitor:
        assert same(plain, train(model, data, monitor))
    model = gpt2()
    with cm.lens.Monitor(model, every=1) as simple:
        train(model, data, simple)
    assert len(monitor.table()) == 4 * 2 * 2
    np.testing.assert_allclose(
        monitor.table()[list(FIGURES)].to_numpy(),
        simple.table()[list(FIGURES)].to_numpy(),
        rtol=1e-3,
    )


class Loss(NamedTuple):
    loss: torch.Tensor


class Small(nn.Module):
    """One layer of two heads, with dropout: quick to compile."""

    def __init__(self):
        super().__init__()
        self.embedding, self.inner = nn.Embedding(WORDS, 8), nn.Linear(8, 24)
        self.dropout, self.outer = nn.Dropout(0.3), nn.Linear(8, WORDS)

    def forward(self, input_ids, labels):
        x = self.dropout(self.embedding(input_ids))
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.inner(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return Loss(F.cross_entropy(self.outer(x).flatten(0, 1), labels.flatten()))


def small():
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Small()


@pytest.mark.parametrize("how", ["wrapped", "in place", "later"])
def test_compiled_models_stay_compiled_and_bit_identical(how):
    data = batches(5)

    def compiled(model):
        if how == "in place":
            model.compile(backend="aot_eager")
            return model
        return torch.compile(model, backend="aot_eager")

    model = small()
    plain = train(model, data, called=compiled(model))
    model = small()
    if how == "later":
        monitor = cm.lens.Monitor(model, every=2, queries=8, compiled=True)
        called = compiled(model)
    else:
        called = compiled(model)
        monitor = cm.lens.Monitor(called, every=2, queries=8)
    with monitor:
        assert same(plain, train(model, data, monitor, called=called))
    table = monitor.table()
    assert table.groupby("step").size().to_dict() == {0: 2, 2: 2, 4: 2}
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0


def test_a_replayed_pass_measures_what_an_observed_one_does():
    data = batches(3)
    model = gpt2(dropout=0.0)
    with cm.lens.Monitor(model, every=1) as eager:
        train(model, data, eager)
    model = gpt2(dropout=0.0)
    with cm.lens.Monitor(model, every=1, compiled=True) as replayed:
        train(model, data, replayed)
    columns = ["step", "layer", "head", "queries", *FIGURES, "loss"]
    np.testing.assert_array_equal(eager.table()[columns], replayed.table()[columns])


def test_buffers_are_restored_after_a_replay():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
            return F.scaled_dot_product_attention(x, x, x).sum()

    def run(monitored):
        torch.manual_seed(0)
        model, x = Normed(), torch.randn(2, 5, 4)
        if monitored:
            with cm.lens.Monitor(model, every=1, compiled=True) as monitor:
                model(x).backward()
                monitor.step()
        else:
            model(x).backward()
        return model.state_dict()

    one, other = run(False), run(True)
    assert all(torch.equal(one[name], other[name]) for name in one)


# -------------------------------------------------------------------------------------- figures


def bert():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertModel(config, add_pooling_layer=False).train()


def t5():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=WORDS,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5Model(config).train()


def _text(model):
    ids = batches(1)[0]
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    mask[2, 3:] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    if isinstance(model, T5Model):
        given["decoder_input_ids"] = ids[:, :5]
    return given


MODELS = {"causal": lambda: gpt2(dropout=0.0), "padded": bert, "bias and cross": t5}


@pytest.mark.parametrize("name", MODELS)
def test_figures_equal_those_of_observe_on_the_same_batch(name):
    model = MODELS[name]()
    given = _text(model)
    with cm.lens.Monitor(model, queries=1000) as monitor:
        sum(x.sum() for x in model(**given).values() if isinstance(x, torch.Tensor)).backward()
        monitor.step()
    with cm.lens.observe(model) as lens:
        model(**given)
    tokens = lens.table()
    tokens["score_max"] = tokens["log_normalizer"] + np.log(tokens["top_weight"])
    tokens["entropy_share"] = tokens["entropy"] / np.log(
        tokens["visible"].where(tokens["visible"] > 1)
    )
    groups = tokens.groupby(["layer", "head"])
    means = ["entropy", "effective_keys", "entropy_share", "score_variance", "sink_mass"]
    expected = groups[means].mean()
    expected["score_max"] = groups["score_max"].max()
    table = monitor.table().set_index(["layer", "head"])
    for column in FIGURES:
        np.testing.assert_allclose(
            table[column], expected.loc[table.index, column], rtol=2e-5, atol=2e-6, err_msg=column
        )
    assert (table["queries"] == groups.size().loc[table.index]).all()


@pytest.mark.parametrize("name", MODELS)
def test_each_sampled_query_has_the_figures_of_its_token(name):
    model = MODELS[name]()
    given = _text(model)
    with cm.lens.observe(model, spectrum=False) as lens:
        model(**given)
    tokens = lens.table().set_index(["layer", "head", "input", "token"])
    with watching(model, Wanted(sample=Sample(7, seed=3))) as recorder:
        model(**given)
    seen = 0
    for record in recorder.records:
        assert record.real.numel() <= 7
        batch, heads, m = record.columns["entropy"].shape
        for b, h, i in np.ndindex(batch, heads, m):
            if record.real[b, i]:
                where = (record.layer, h, record.inputs[b], int(record.token[b, i]))
                for column in ("log_normalizer", "entropy", "score_variance", "sink_mass"):
                    found = float(record.columns[column][b, h, i])
                    assert found == pytest.approx(tokens.loc[where, column], rel=1e-4, abs=1e-5)
                seen += 1
    assert seen >= len(recorder.records) * 2 * 3


def test_the_sample_is_spread_over_texts_and_changes_from_step_to_step():
    model = gpt2(dropout=0.0)
    ids = batches(1, size=8, length=30)[0]
    seen = []
    for seed in range(20):
        with watching(model, Wanted(sample=Sample(16, seed=seed))) as recorder:
            model(input_ids=ids)
        record = recorder.records[0]
        assert record.inputs == list(range(8))
        assert record.token.shape == (8, 2)
        seen.append(record.token)
    tokens = torch.stack(seen)
    assert len(tokens.unique()) > 25  # of 30 positions
    assert tokens.double().mean().item() == pytest.approx(14.5, abs=3 * 8.7 / math.sqrt(320))


def test_bfloat16_is_measured_in_single_precision():
    model = gpt2(dropout=0.0).to(torch.bfloat16)
    with cm.lens.Monitor(model) as monitor:
        train(model, batches(1), monitor)
    assert np.isfinite(monitor.table()[list(FIGURES)].to_numpy()).all()


# ------------------------------------------------------------------------------ which steps count


def test_evaluation_and_further_micro_batches_do_not_count():
    model = gpt2(dropout=0.0)
    one, two, other = batches(3)
    with cm.lens.Monitor(model, every=1) as monitor:
        with torch.no_grad():
            model(input_ids=other)
        model(input_ids=one, labels=one).loss.backward()
        model(input_ids=two, labels=two).loss.backward()
        monitor.step()
    with cm.lens.Monitor(model, every=1) as alone:
        model(input_ids=one, labels=one).loss.backward()
        alone.step()
    np.testing.assert_array_equal(
        monitor.table()[list(FIGURES)].to_numpy(), alone.table()[list(FIGURES)].to_numpy()
    )


def test_a_step_that_trains_something_else_puts_the_watch_off():
    model = gpt2()
    with cm.lens.Monitor(model, every=2) as monitor:
        train(model, batches(2), monitor)
        assert monitor.step() is None  # step 2 did not call the model
        train(model, batches(2), monitor)
    assert sorted(set(monitor.table()["step"])) == [0, 3, 4]


def test_a_model_may_be_pickled_while_it_is_watched():
    model = gpt2(dropout=0.0)
    ids = batches(1)[0]
    with cm.lens.Monitor(model):
        copy = pickle.loads(pickle.dumps(model))
        torch.testing.assert_close(copy(input_ids=ids).logits, model(input_ids=ids).logits)


# -------------------------------------------------------------------------------------- bad input


class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x)
        return torch.softmax(x @ x.mT, -1) @ x


@pytest.mark.parametrize("compiled", [False, True])
def test_attention_that_never_arrives_is_an_error_at_the_first_step(compiled):
    model = ByHand()
    monitor = cm.lens.Monitor(model, compiled=compiled)
    model(torch.randn(2, 5, 4)).sum().backward()
    with pytest.raises(InputError, match="no attention of ByHand reached"):
        monitor.step()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_model_that_is_not_called_is_an_error_at_the_first_step():
    monitor = cm.lens.Monitor(gpt2())
    with pytest.raises(InputError, match="was not called in this step"):
        monitor.step()
    with pytest.raises(InputError, match="closed"):
        monitor.step()


def test_a_model_compiled_behind_the_monitors_back_is_an_error_at_the_first_step():
    model = small()
    monitor = cm.lens.Monitor(model)
    compiled = torch.compile(model, backend="aot_eager")
    ids = batches(1)[0]
    compiled(input_ids=ids, labels=ids).loss.backward()
    with pytest.raises(InputError, match="compiled=True"):
        monitor.step()


def test_passes_without_gradients_alone_are_an_error():
    model = gpt2()
    monitor = cm.lens.Monitor(model)
    with torch.no_grad():
        model(input_ids=batches(1)[0])
    with pytest.raises(InputError, match="without gradients"):
        monitor.step()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"every": 0}, "every must be an integer >= 1"),
        ({"queries": 0}, "queries must be an integer >= 1"),
        ({"alarm": "loud"}, "alarm must be a function"),
        ({"thresholds": 0.1}, "thresholds must be Thresholds"),
    ],
)
def test_settings_are_checked(given, message):
    with pytest.raises(InputError, match=message):
        cm.lens.Monitor(nn.Linear(2, 2), **given)


def test_a_model_must_be_a_module():
    with pytest.raises(InputError, match="not a int"):
        cm.lens.Monitor(3)


def test_a_table_of_nothing_is_an_error(tmp_path):
    monitor = cm.lens.Monitor(gpt2())
    for ask in (monitor.table, lambda: monitor.report(tmp_path / "x.html")):
        with pytest.raises(InputError, match="nothing was watched yet"):
            ask()


# ------------------------------------------------------------------------------------------ files


def test_a_folder_that_cannot_be_written_stops_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot make the folder"):
        cm.lens.Monitor(gpt2(), folder=tmp_path / "file" / "log")


def test_the_folder_keeps_every_watched_step_and_a_table(tmp_path):
    model = gpt2()
    with cm.lens.Monitor(model, every=2, folder=tmp_path / "log") as monitor:
        train(model, batches(5), monitor)
        running = cm.lens.MonitorLog.load(tmp_path / "log").table()
    assert running.equals(monitor.table())
    written = pq.read_table(tmp_path / "log" / "monitor.parquet")
    assert written.to_pandas().equals(monitor.table())
    assert written.schema.field("score_max").metadata[b"unit"] == b"nats"
    assert pq.read_table(monitor.save(tmp_path / "own.parquet")).num_rows == 3 * 4


def test_a_log_is_continued_only_if_asked(tmp_path):
    data = batches(6)
    model = gpt2()
    with cm.lens.Monitor(model, every=2, folder=tmp_path) as monitor:
        train(model, data[:3], monitor)
    with pytest.raises(InputError, match="resume=True"):
        cm.lens.Monitor(model, every=2, folder=tmp_path)
    with cm.lens.Monitor(model, every=2, folder=tmp_path, resume=True) as monitor:
        monitor.start(2)  # from a checkpoint after two steps: step 2 is done again
        train(model, data[2:], monitor)
    table = cm.lens.MonitorLog.load(tmp_path).table()
    assert table.groupby("step").size().to_dict() == {0: 4, 2: 4, 4: 4}


def test_what_a_killed_training_logged_is_kept(tmp_path):
    code = f"""
    import os, signal, torch, cumulant as cm
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    monitor = cm.lens.Monitor(layer, every=2, folder={str(tmp_path / "log")!r})
    for step in range(6):
        layer(torch.randn(3, 5, 8)).sum().backward()
        monitor.step()
    os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=os.environ)
    assert done.returncode == -signal.SIGKILL
    log = cm.lens.MonitorLog.load(tmp_path / "log")
    assert sorted(set(log.table()["step"])) == [0, 2, 4]
    assert "3 watched steps from 0 to 4, 2 heads" in repr(log)
    with pytest.raises(InputError, match="holds no monitor"):
        cm.lens.MonitorLog.load(tmp_path)


# ----------------------------------------------------------------------------------------- alarms


def repeated(steps):
    """Texts whose second half repeats the first: attention has something to learn."""
    generator = torch.Generator().manual_seed(0)
    halves = [torch.randint(0, 16, (16, 12), generator=generator) for _ in range(steps)]
    return [torch.cat([half, half], 1) for half in halves]


@pytest.mark.parametrize(
    ("lr", "steps", "kinds"), [(0.1, 81, {"entropy", "logits"}), (3e-3, 201, set())]
)
def test_the_alarm_rings_where_training_collapses_and_only_there(lr, steps, kinds):
    model = gpt2(dropout=0.0)
    heard = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with cm.lens.Monitor(model, every=20, alarm=heard.append) as monitor:
            train(model, repeated(steps), monitor, lr=lr)
    told = [w for w in caught if issubclass(w.category, cm.lens.AttentionAlarm)]
    assert {alarm.kind for alarm in monitor.alarms} == kinds
    assert heard == monitor.alarms
    assert [str(w.message) for w in told] == [alarm.message for alarm in heard]
    assert all(w.filename == __file__ for w in told)


def step_of(step=0, **figures):
    """A watched step of one layer with two heads."""
    usual = dict.fromkeys(FIGURES, 0.5) | {"score_max": 1.0} | figures
    rows = {name: torch.full((2,), float(x)) for name, x in usual.items()}
    return Watched(
        step, {0: "attention"}, {"layer": torch.zeros(2), "head": torch.arange(2), **rows}
    )


def kinds(bell, **figures):
    return [alarm.kind for alarm in bell.check(step_of(**figures))]


def test_thresholds_are_those_that_are_documented():
    limits = cm.lens.Thresholds()
    assert (limits.entropy, limits.sink, limits.logits, limits.growth) == (0.05, 0.5, 100.0, 2.0)
    page = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text("utf-8")
    for name in ("entropy", "sink", "logits", "growth"):
        assert f"| `{name}` | {getattr(limits, name):g} |" in page
    with pytest.raises(InputError, match="entropy must be"):
        cm.lens.Thresholds(entropy=2.0)


def test_low_entropy_rings_except_on_a_sink():
    assert kinds(Bell(cm.lens.Thresholds()), entropy_share=0.04, sink_mass=0.1) == ["entropy"]
    assert kinds(Bell(cm.lens.Thresholds()), entropy_share=0.06, sink_mass=0.1) == []
    assert kinds(Bell(cm.lens.Thresholds()), entropy_share=0.04, sink_mass=0.9) == []


def test_large_scores_ring_if_they_grew():
    bell = Bell(cm.lens.Thresholds())
    assert kinds(bell, score_max=80.0) == []
    assert kinds(bell, score_max=150.0) == []
    assert kinds(bell, score_max=161.0) == ["logits"]


def test_an_alarm_rings_once_until_the_layer_has_recovered():
    bell = Bell(cm.lens.Thresholds())
    low = {"entropy_share": 0.01, "sink_mass": 0.0}
    assert [kinds(bell, **x) for x in (low, low, {}, low)] == [["entropy"], [], [], ["entropy"]]


def test_nan_rings_and_stays_in_the_table():
    model = gpt2(dropout=0.0)
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[0, 0] = torch.nan
    with cm.lens.Monitor(model) as monitor:
        model(input_ids=batches(1)[0]).logits.sum().backward()
        with pytest.warns(cm.lens.AttentionAlarm, match="NaN"):
            monitor.step()
    assert [(a.kind, a.layer) for a in monitor.alarms] == [("finite", 1)]
    assert monitor.table()["entropy"].isna().any()


def test_the_page_is_one_file_with_alarms_and_curves(tmp_path):
    model = gpt2(dropout=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with cm.lens.Monitor(model, every=10) as monitor:
            train(model, repeated(41), monitor, lr=0.1)
    page = monitor.report(tmp_path / "page.html").read_text("utf-8")
    assert "Growing logits in layer 0" in page
    assert "default-src 'none'" in page
    assert page.count('data-plot="curves"') == 1
    assert len(page) < 300_000
    again = cm.lens.MonitorLog(monitor.log.steps[:1]).report(tmp_path / "one.html")
    assert "No alarm" in again.read_text("utf-8")
