"""Handlers, hooks and settings: order, contexts, threads, tasks, and other people's patches."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import inspect
import threading
import types
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right

import cumulant as cm
from cumulant.core.interception import Afterwards, Begun, Handler, Hook, Scope, Setting, Token
from cumulant.core.interception import _places as places


@pytest.fixture
def owner():
    module = types.ModuleType("somebody")
    module.say = lambda *words: list(words)
    module.level = 3
    yield module
    for key in [key for key in places if key[0] is module]:
        del places[key]


def scope(*effects):
    return Scope(lambda: Begun(None, effects))


def adding(word):
    """A handler that lets the next one answer, and puts its word in front."""
    return lambda following, *words: [word, *following(*words)]


def on(owner, word, **options):
    return scope(Handler(owner, "say", adding(word), **options))


def in_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(60)
    return found[0]


class TestOrder:
    def test_the_last_entered_is_asked_first(self, owner):
        original = owner.say
        with on(owner, "a"), on(owner, "b"):
            assert owner.say("x") == ["b", "a", "x"]
        assert owner.say is original

    def test_observers_come_before_replacements(self, owner):
        answer = scope(Handler(owner, "say", lambda following, *words: ["answer"]))
        with on(owner, "watch", observes=True), answer:
            assert owner.say("x") == ["watch", "answer"]
        with answer, on(owner, "watch", observes=True):
            assert owner.say("x") == ["watch", "answer"]

    @pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (1, 2, 0)])
    def test_left_in_any_order(self, owner, order):
        original, left = owner.say, ["c", "b", "a"]
        scopes = [on(owner, word) for word in "abc"]
        for x in scopes:
            x.__enter__()
        for k in order:
            scopes[k].__exit__()
            left.remove("abc"[k])
            assert owner.say("x") == [*left, "x"]
        assert owner.say is original

    def test_handlers_take_keywords_and_their_errors_pass_through(self, owner):
        owner.say = lambda *, word: word
        with scope(Handler(owner, "say", lambda following, **given: following(**given) * 2)):
            assert owner.say(word="a") == "aa"
        with (
            scope(Handler(owner, "say", lambda following: 1 / 0)),
            pytest.raises(ZeroDivisionError),
        ):
            owner.say()

    def test_methods_of_classes(self):
        class Speaker:
            def say(self, word):
                return [self.name, word]

        speaker, original = Speaker(), vars(Speaker)["say"]
        speaker.name = "me"
        with scope(Handler(Speaker, "say", lambda following, self, word: following(self, "no"))):
            assert speaker.say("yes") == ["me", "no"]
        assert vars(Speaker)["say"] is original

    def test_only_what_an_owner_defines_itself(self):
        class Child(nn.Linear):
            pass

        with pytest.raises(cm.InputError, match="does not define 'forward'"):
            Handler(Child, "forward", adding("a"))

    def test_signature_and_name_are_those_found(self, owner):
        def say(*words: str, loud: bool = False) -> list[str]:
            """Say words."""
            return list(words)

        owner.say = say
        with on(owner, "a"):
            assert owner.say.__name__ == "say"
            assert owner.say.__doc__ == "Say words."
            assert inspect.signature(owner.say) == inspect.signature(say)


class TestScopes:
    def test_one_entering_at_a_time(self, owner):
        one = on(owner, "a")
        with one, pytest.raises(cm.InputError, match="already entered"), one:
            pass
        with one:  # after it was left it may be entered again
            assert owner.say() == ["a"]

    def test_as_decorator_each_call_has_its_own(self, owner):
        @on(owner, "a")
        def count(n):
            return owner.say() if n == 0 else count(n - 1)

        original = owner.say
        assert count(2) == ["a", "a", "a"]
        assert owner.say is original

    def test_a_check_runs_after_leaving_and_only_without_an_exception(self, owner):
        original, checked = owner.say, []

        def check():
            checked.append(owner.say is original)

        begin = lambda: Begun("bound", [Handler(owner, "say", adding("a"))], check)
        with Scope(begin) as bound:
            assert bound == "bound"
        with pytest.raises(ZeroDivisionError), Scope(begin):
            raise ZeroDivisionError
        assert checked == [True]

    def test_an_effect_that_fails_takes_the_others_back(self, owner):
        class Broken(Afterwards):
            def put(self, token):
                raise ZeroDivisionError

        original, undone = owner.say, []
        effects = [Handler(owner, "say", adding("a")), Broken(lambda: undone.append(True))]
        with pytest.raises(ZeroDivisionError), scope(*effects):
            pass
        assert owner.say is original
        assert undone == [True]

    def test_a_scope_that_dies_is_left(self, owner):
        original, one = owner.say, on(owner, "a")
        one.__enter__()
        assert owner.say() == ["a"]
        del one
        gc.collect()
        assert owner.say is original

    @pytest.mark.parametrize("observes", [True, False])
    def test_what_is_left_behind_all_the_same_acts_no_more_and_goes(
        self, owner, observes, monkeypatch
    ):
        """A second interrupt, which cuts off the undoing itself."""
        original = owner.say
        for heal in (lambda: owner.say("x"), lambda: on(owner, "b").__enter__()):
            one = on(owner, "a", observes=observes)
            one.__enter__()
            with monkeypatch.context() as patch:
                patch.setattr(Token, "undo", lambda self: None)
                del one
                gc.collect()
            assert owner.say is not original
            assert heal() in (["x"], None)
            assert owner.say is original

    def test_settings_are_shared(self, owner):
        found = owner.level
        one, two = (scope(Setting(owner, "level", 7)) for _ in range(2))
        one.__enter__()
        two.__enter__()
        assert owner.level == 7
        one.__exit__()
        assert owner.level == 7
        two.__exit__()
        assert owner.level is found


class TestOtherPeoplesPatches:
    def wrap(self, owner, word):
        """What a foreign library does, marks and all."""
        inner = owner.say

        @functools.wraps(inner)
        def say(*words):
            return [word, *inner(*words)]

        owner.say = say
        return inner

    def test_before_us(self, owner):
        self.wrap(owner, "foreign")
        theirs = owner.say
        with on(owner, "a"):
            assert owner.say("x") == ["a", "foreign", "x"]
        assert owner.say is theirs

    def test_on_top_of_us_it_stays_when_we_leave(self, owner):
        original = owner.say
        ours = on(owner, "a")
        ours.__enter__()
        inner = self.wrap(owner, "foreign")
        theirs = owner.say
        assert owner.say("x") == ["foreign", "a", "x"]
        ours.__exit__()
        assert owner.say is theirs
        assert owner.say("x") == ["foreign", "x"]
        owner.say = inner  # they restore what they found: our stand-in, which goes when called
        assert owner.say("x") == ["x"]
        assert owner.say is original

    def test_a_stand_in_that_came_back_goes_with_the_next_scope(self, owner):
        original = owner.say
        ours = on(owner, "a")
        ours.__enter__()
        inner = self.wrap(owner, "foreign")
        ours.__exit__()
        with on(owner, "b"):  # on top of theirs
            assert owner.say("x") == ["b", "foreign", "x"]
        owner.say = inner
        with on(owner, "c"):
            assert owner.say("x") == ["c", "x"]
        assert owner.say is original

    def test_between_us(self, owner):
        original = owner.say
        with on(owner, "a"):
            inner = self.wrap(owner, "foreign")
            with on(owner, "b"):
                assert owner.say("x") == ["b", "foreign", "a", "x"]
            assert owner.say("x") == ["foreign", "a", "x"]
            owner.say = inner
            assert owner.say("x") == ["a", "x"]
        assert owner.say is original

    def test_one_who_restores_the_original_meanwhile(self, owner):
        original = owner.say
        with on(owner, "a"):
            owner.say = original
            assert owner.say("x") == ["x"]
            with on(owner, "b"):
                assert owner.say("x") == ["b", "a", "x"]
        assert owner.say is original


class TestContexts:
    def test_replacements_stay_in_their_thread_and_observers_do_not(self, owner):
        with on(owner, "a"), on(owner, "watch", observes=True):
            assert in_thread(lambda: owner.say("x")) == ["watch", "x"]
            assert owner.say("x") == ["watch", "a", "x"]

    def test_tasks_do_not_see_each_other(self, owner):
        original = owner.say

        async def task(word, observes, turn, others):
            with on(owner, word, observes=observes):
                turn.set()
                await asyncio.gather(*(x.wait() for x in others))  # now all are inside
                return owner.say("x")

        async def main():
            turns = [asyncio.Event() for _ in range(3)]
            tasks = [
                asyncio.create_task(task(word, observes, turn, turns))
                for word, observes, turn in zip("abc", (False, True, True), turns, strict=True)
            ]
            await asyncio.gather(*(x.wait() for x in turns))
            return owner.say("x"), await asyncio.gather(*tasks)

        alone, inside = asyncio.run(main())
        assert alone == ["x"]
        assert inside == [["a", "x"], ["b", "x"], ["c", "x"]]
        assert owner.say is original

    def test_tasks_and_workers_made_inside_inherit(self, owner):
        async def say():
            return owner.say("x")

        async def main():
            with on(owner, "a"):
                task = asyncio.create_task(say())
                worker = asyncio.to_thread(owner.say, "x")
                return await task, await worker

        assert asyncio.run(main()) == (["a", "x"], ["a", "x"])

    def test_a_task_that_outlives_the_scope_sees_torchs_own(self, owner):
        async def say(gate):
            await gate.wait()
            return owner.say("x")

        async def main():
            gate = asyncio.Event()
            with on(owner, "a"):
                task = asyncio.create_task(say(gate))
            gate.set()
            with on(owner, "b"):
                return await task

        assert asyncio.run(main()) == ["x"]

    def test_left_in_another_thread(self, owner):
        original, one = owner.say, on(owner, "a")
        in_thread(one.__enter__)
        assert owner.say("x") == ["x"]
        one.__exit__()
        assert owner.say is original


class TestHooks:
    def test_before_and_after(self):
        module, seen = nn.Linear(2, 2), []
        before = Hook(module, lambda m, args, given: seen.append((m, len(args))), after=False)
        after = Hook(module, lambda m, args, given, out: seen.append(out), after=True)
        with scope(before, after):
            out = module(torch.ones(1, 2))
        assert seen == [(module, 1), out]
        module(torch.ones(1, 2))
        assert len(seen) == 2
        with scope(before, after), pytest.raises(RuntimeError):
            module(torch.ones(1, 3))
        assert seen[-1] is None
        assert not any(hooks for name, hooks in vars(module).items() if "hooks" in name)

    def test_copies_drop_the_hook_when_they_run(self):
        module, seen = nn.Linear(2, 2), []
        with scope(Hook(module, lambda m, *_: seen.append(m), after=False)):
            twin = copy.deepcopy(module)
        assert twin._forward_pre_hooks
        twin(torch.ones(1, 2))
        assert seen == []
        assert not twin._forward_pre_hooks
        assert not twin._forward_pre_hooks_with_kwargs

    def test_tasks_do_not_hear_of_each_others_modules(self):
        module, seen = nn.Linear(2, 2), []

        async def watch(gate):
            with scope(Hook(module, lambda m, *_: seen.append(m), after=False)):
                await gate.wait()

        async def main():
            gate = asyncio.Event()
            task = asyncio.create_task(watch(gate))
            await asyncio.sleep(0)
            module(torch.ones(1, 2))
            gate.set()
            await task

        asyncio.run(main())
        assert seen == []


class TestTorch:
    def test_causal_bias_passes_handlers_once(self):
        """torch's bias calls the function again, under the name that we hold."""
        q, k, seen = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8), []
        expected = F.scaled_dot_product_attention(q, k, k, attn_mask=causal_lower_right(3, 5))

        def note(following, *args, **kwargs):
            seen.append(kwargs)
            return following(*args, **kwargs)

        for observes in (True, False):
            name = "scaled_dot_product_attention"
            with scope(Handler(F, name, note, observes=observes)):
                out = F.scaled_dot_product_attention(q, k, k, attn_mask=causal_lower_right(3, 5))
            assert torch.equal(out, expected)
        assert len(seen) == 2

    def test_jagged_tensors_find_their_function(self):
        """torch's nested tensors compare the function they are given with torch's own."""
        parts = [torch.randn(n, 2, 4) for n in (3, 5)]
        x = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
        expected = F.scaled_dot_product_attention(x, x, x).values()
        with scope(Handler(F, "scaled_dot_product_attention", lambda f, *a, **k: f(*a, **k))):
            assert torch.equal(F.scaled_dot_product_attention(x, x, x).values(), expected)

    def test_norms(self):
        """Modules call their functions through torch.nn.functional."""
        x, names = torch.randn(2, 4), ["layer_norm", "rms_norm"]
        original = [getattr(F, name) for name in names]
        zero = lambda following, x, *rest, **given: following(x, *rest, **given) * 0
        with scope(*(Handler(F, name, zero) for name in names), Handler(torch, "layer_norm", zero)):
            assert nn.LayerNorm(4)(x).abs().max() == 0
            assert nn.RMSNorm(4)(x).abs().max() == 0
        assert [getattr(F, name) for name in names] == original
        assert nn.LayerNorm(4)(x).abs().max() > 0

    def test_exit_stacks(self):
        original = F.scaled_dot_product_attention
        with ExitStack() as stack:
            stack.enter_context(cm.sdpa_replaced())
            stack.enter_context(cm.sdpa_replaced())
            assert F.scaled_dot_product_attention is not original
        assert F.scaled_dot_product_attention is original
