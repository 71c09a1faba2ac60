"""`observe` and `sdpa_replaced` entered and left in every order, in one thread and in many."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.modeling_utils import AttentionInterface

import cumulant as cm

HEADS, LENGTH, FEATURES = 2, 4, 8
ROWS = HEADS * LENGTH


class Bare(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


def patches():
    return (
        F.scaled_dot_product_attention,
        F.multi_head_attention_forward,
        AttentionInterface.get_interface,
        torch.backends.mha.get_fastpath_enabled,
        torch.backends.mha.get_fastpath_enabled(),
    )


ORIGINALS = patches()


def is_restored():
    return all(a is b for a, b in zip(patches(), ORIGINALS, strict=True))


def answers_ours():
    """Torch's function raises errors of its own; unlike forward mode, threads may ask at once."""
    with pytest.raises(RuntimeError) as raised:
        F.scaled_dot_product_attention(
            torch.ones(1, 2, 3), torch.ones(1, 2, 4), torch.ones(1, 2, 4)
        )
    return raised.type is cm.InputError


class Program:
    """Contexts by number; each step enters one that is out, or leaves one that is in."""

    def __init__(self, kinds):
        self.kinds = kinds
        self.model, self.x = Bare(), torch.randn(1, HEADS, LENGTH, FEATURES)
        self.expected = (self.x @ self.x.mT / FEATURES**0.5).softmax(-1) @ self.x
        self.inside = {}
        self.problems = []

    def step(self, number):
        if number in self.inside:
            self.leave(number)
        elif self.kinds[number]:
            context = cm.lens.observe(self.model, k90=False, spectrum=False)
            self.inside[number] = [context, context.__enter__(), 0]
        else:
            context = cm.sdpa_replaced()
            self.inside[number] = [context, context.__enter__(), 0]
        out = self.model(self.x)
        for entry in self.inside.values():
            entry[2] += ROWS
        if not torch.allclose(out, self.expected, atol=1e-5):
            self.problems.append("the output is wrong")
        if answers_ours() != any(not self.kinds[k] for k in self.inside):
            self.problems.append("the wrong function answered")

    def leave(self, number):
        context, lens, rows = self.inside.pop(number)
        context.__exit__(None, None, None)
        if lens is not None and rows and len(lens.table()) != rows:
            self.problems.append(f"{len(lens.table())} rows instead of {rows}")

    def run(self, steps):
        for number in steps:
            self.step(number)
        for number in list(self.inside):
            self.leave(number)
        return self.problems


KINDS = st.lists(st.booleans(), min_size=1, max_size=4)


@st.composite
def programs(draw):
    kinds = draw(KINDS)
    return kinds, draw(st.lists(st.integers(0, len(kinds) - 1), max_size=10))


@settings(max_examples=60, deadline=None)
@given(programs())
def test_in_one_thread(program):
    kinds, steps = program
    assert Program(kinds).run(steps) == []
    assert is_restored()


@settings(max_examples=25, deadline=None)
@given(st.lists(programs(), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_in_threads_in_a_chosen_order(several, choose):
    """One thread for each program; one of them moves at a time."""
    runs = [(Program(kinds), list(steps)) for kinds, steps in several]
    pools = [ThreadPoolExecutor(1) for _ in runs]
    try:
        while left := [k for k, (_, steps) in enumerate(runs) if steps]:
            k = choose.choice(left)
            program, steps = runs[k]
            pools[k].submit(program.step, steps.pop(0)).result(60)
    finally:  # also where hypothesis gives an example up
        problems = [
            pool.submit(program.run, []).result(60)
            for pool, (program, _) in zip(pools, runs, strict=True)
        ]
        for pool in pools:
            pool.shutdown()
    assert problems == [[] for _ in runs]
    assert is_restored()


def test_in_threads_all_at_once():
    start, problems = threading.Barrier(4), []

    def run(seed):
        generator = torch.Generator().manual_seed(seed)
        start.wait(60)
        for _ in range(8):
            kinds = torch.randint(2, (3,), generator=generator).bool().tolist()
            problems.extend(
                Program(kinds).run(torch.randint(3, (8,), generator=generator).tolist())
            )

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert is_restored()


@pytest.mark.parametrize("lens_outside", [True, False])
def test_the_lens_sees_what_a_replacement_answers(lens_outside):
    layer = nn.TransformerEncoderLayer(FEATURES, HEADS, 16, batch_first=True).eval()
    x = torch.randn(1, LENGTH, FEATURES)
    observe = lambda: cm.lens.observe(layer)
    contexts = [observe(), cm.sdpa_replaced()] if lens_outside else [cm.sdpa_replaced(), observe()]
    with torch.no_grad():
        expected = layer(x)
        with contexts[0] as one, contexts[1] as two:
            assert answers_ours()
            out = layer(x)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    with torch.no_grad(), cm.lens.observe(layer) as alone:
        layer(x)
    lens = one or two
    assert len(lens.table()) == ROWS
    torch.testing.assert_close(
        torch.tensor(lens.table()["entropy"].to_numpy()),
        torch.tensor(alone.table()["entropy"].to_numpy()),
    )


def test_crossed_contexts_do_not_call_themselves_for_ever():
    model, x = Bare(), torch.randn(1, HEADS, LENGTH, FEATURES)
    lens, replaced = cm.lens.observe(model), cm.sdpa_replaced()
    lens.__enter__()
    replaced.__enter__()
    model(x)
    lens.__exit__(None, None, None)
    model(x)
    replaced.__exit__(None, None, None)
    model(x)
    assert is_restored()


def test_two_lenses_on_weights_that_are_asked_for():
    """Multi-head attention is asked once more for all lenses, and each takes it down once."""
    model = nn.MultiheadAttention(FEATURES, HEADS, batch_first=True).eval()
    x = torch.randn(1, LENGTH, FEATURES)
    with cm.lens.observe(model) as one, cm.lens.observe(model) as two:
        _, weights = model(x, x, x, average_attn_weights=False)
    entropy = -(weights * weights.log()).sum(-1).flatten()
    for lens in (one, two):
        found = torch.tensor(lens.table()["entropy"].to_numpy())
        torch.testing.assert_close(found, entropy.detach(), check_dtype=False)


def test_tasks_have_their_own_lenses():
    """Of one model, in one thread: each table has the rows of its own task."""
    model = Bare()

    async def task(length, started):
        with cm.lens.observe(model, k90=False, spectrum=False) as lens:
            for _ in range(3):
                started.append(length)
                await asyncio.sleep(0)
                model(torch.randn(1, HEADS, length, FEATURES))
        return lens.table()

    async def main():
        started = []
        tables = await asyncio.gather(*(task(n, started) for n in (3, 5)))
        return started, tables

    started, tables = asyncio.run(main())
    assert started[:2] == [3, 5]  # they did take turns
    for length, table in zip((3, 5), tables, strict=True):
        assert len(table) == 3 * HEADS * length
        assert table.groupby("input")["token"].max().tolist() == [length - 1] * 3
    assert is_restored()


def test_tasks_keep_torchs_function():
    async def inside(entered, done):
        with cm.sdpa_replaced():
            entered.set()
            await done.wait()
            return answers_ours()

    async def main():
        entered, done = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(inside(entered, done))
        await entered.wait()
        outside = answers_ours()
        done.set()
        return outside, await task

    assert asyncio.run(main()) == (False, True)
    assert is_restored()


@pytest.mark.filterwarnings("ignore:the model is compiled")
def test_compiled_models_compile_again_whichever_lens_is_left_first():
    import torch._dynamo as dynamo

    stance = dynamo.eval_frame._stance
    compiled = torch.compile(Bare(), backend="eager")
    one, two = cm.lens.observe(compiled), cm.lens.observe(compiled)
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert dynamo.eval_frame._stance.stance == "force_eager"
    two.__exit__(None, None, None)
    assert dynamo.eval_frame._stance is stance
