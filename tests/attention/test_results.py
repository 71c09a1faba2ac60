"""A result's fields do not spoil each other: modes, threads, streams, copies."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import pickle
import threading
import time
import weakref

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.func import grad, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import cumulant as cm
from oracle import FIELDS, assert_close, dense, differentiate

DOUBLE = torch.float64


def normal(*shape):
    return torch.randn(*shape, dtype=DOUBLE)


def inputs(m=3, n=7):
    torch.manual_seed(0)
    return [x.requires_grad_() for x in (normal(m, 4), normal(n, 4), normal(n, 5))]


def single(q, k, v):
    return cm.attend(q, k, v)


def merged(q, k, v):
    return cm.merge(*(cm.attend(q, k[a:b], v[a:b]) for a, b in ((0, 2), (2, 6), (6, 7))))


def packed(q, k, v):
    offsets = {"query_offsets": [0, 3], "key_offsets": [0, 7]}
    return cm.attend_packed(q, k, v, **offsets)


MAKERS = [single, merged, packed]


def gradients(x, tensors):
    return torch.autograd.grad(x.sin().sum(), tensors, materialize_grads=True, retain_graph=True)


def under_no_grad(a, name):
    with torch.no_grad():
        assert not getattr(a, name).requires_grad


def in_inference_mode(a, name):
    with torch.inference_mode():
        getattr(a, name)


def in_vmap(a, name):
    vmap(lambda x: x * getattr(a, name).sum())(torch.ones(2, dtype=DOUBLE))


def in_grad(a, name):
    grad(lambda x: x * getattr(a, name).sum())(torch.ones((), dtype=DOUBLE))


def in_jvp(a, name):
    one = torch.ones((), dtype=DOUBLE)
    jvp(lambda x: x * getattr(a, name).sum(), (one,), (one,))


def under_autocast(a, name):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        getattr(a, name)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "look", [under_no_grad, in_inference_mode, in_vmap, in_grad, in_jvp, under_autocast]
)
def test_a_look_at_one_field_changes_no_other(make, look):
    q, k, v = inputs()
    truth = dense(q, k, v)
    for i, seen in enumerate(FIELDS):
        a = make(q, k, v)
        look(a, seen)
        for name in FIELDS[i:] + FIELDS[:i]:
            ours, theirs = getattr(a, name), getattr(truth, name)
            assert_close([ours], [theirs], 1e-10)
            expected = gradients(theirs, (q, k, v))
            assert_close(gradients(ours, (q, k, v)), expected, 1e-9)


def test_a_look_while_training_leaves_the_gradient_of_the_layer():
    torch.manual_seed(0)
    layer, x, k, v = torch.nn.Linear(4, 4), torch.randn(3, 4), torch.randn(6, 4), torch.randn(6, 4)
    a = cm.attend(layer(x), k, v)
    with torch.no_grad():
        a.entropy.mean().log()
    a.mean.pow(2).sum().backward()
    expected = torch.nn.functional.scaled_dot_product_attention(layer(x), k, v).pow(2).sum()
    (weight,) = torch.autograd.grad(expected, [layer.weight])
    torch.testing.assert_close(layer.weight.grad, weight)


def test_a_field_known_with_its_gradient_is_not_computed_again_without():
    a = single(*inputs())
    known = a.mean
    with torch.no_grad():
        again = a.mean
    assert not again.requires_grad
    assert again.data_ptr() == known.data_ptr()


def test_a_result_made_without_gradients_has_none():
    q, k, v = inputs()
    with torch.no_grad():
        a = single(q, k, v)
    assert not any(getattr(a, name).requires_grad for name in FIELDS)


def test_a_field_is_one_tensor():
    q, k, v = inputs()
    a = single(q, k, v)
    for name in FIELDS:
        x = getattr(a, name)
        (g,) = torch.autograd.grad(x.square().sum(), getattr(a, name))
        torch.testing.assert_close(g, 2 * x)


def test_forward_mode_with_dual_numbers_sees_its_own_tangent():
    q, k, v = (x.detach() for x in inputs())
    with fwAD.dual_level():
        a = single(fwAD.make_dual(q, torch.ones_like(q)), k, v)
        with torch.no_grad():  # which leaves forward mode on
            once = [fwAD.unpack_dual(getattr(a, n)).tangent for n in FIELDS]
        again = [fwAD.unpack_dual(getattr(a, n)).tangent for n in FIELDS]
    expected = [
        jvp(lambda q, n=n: getattr(dense(q, k, v), n), (q,), (torch.ones_like(q),))[1]
        for n in FIELDS
    ]
    assert_close(once, expected, 1e-10)
    assert_close(again, expected, 1e-10)
    assert fwAD.unpack_dual(a.mean).tangent is None


def test_fields_inside_two_transforms_of_the_same_level():
    q, k, v = (x.detach() for x in inputs())
    a = single(q, k, v)
    first = vmap(lambda s: s * a.mean)(torch.arange(2.0, dtype=DOUBLE))
    second = vmap(lambda s: s * a.mean)(torch.arange(3.0, dtype=DOUBLE))
    mean = dense(q, k, v).mean
    assert_close([first[1], second[2]], [mean, 2 * mean], 1e-12)


class TestThreads:
    def test_a_small_field_does_not_wait_for_a_large_one(self):
        big = torch.randn(1, 8, 4096, 64)
        slow, quick = cm.attend(big, big), cm.attend(torch.randn(4, 8), torch.randn(4, 8))
        started, waited = threading.Event(), []

        def large():
            started.set()
            _ = slow.score_variance
            waited.append("large")

        worker = threading.Thread(target=large)
        worker.start()
        started.wait()
        time.sleep(0.01)
        _ = quick.score_variance
        waited.append("small")
        worker.join()
        assert waited == ["small", "large"]

    def test_many_threads_ask_one_result(self):
        q, k, v = (x.detach() for x in inputs())
        a, truth = merged(q, k, v), dense(q, k, v)
        errors = []

        def ask(order):
            try:
                for name in order:
                    with torch.set_grad_enabled(len(name) % 2 == 0):
                        assert_close([getattr(a, name)], [getattr(truth, name)], 1e-10)
            except Exception as error:
                errors.append(error)

        orders = [FIELDS, FIELDS[::-1], FIELDS[3:] + FIELDS[:3]] * 4
        threads = [threading.Thread(target=ask, args=(order,)) for order in orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors


class TestStreams:
    @given(
        sizes=st.lists(st.integers(0, 3), min_size=1, max_size=8),
        asked=st.lists(st.tuples(st.sampled_from(FIELDS), st.booleans()), max_size=8),
        many=st.booleans(),
    )
    # One executor for each engine.
    @settings(
        max_examples=40,
        deadline=None,
        suppress_health_check=[HealthCheck.differing_executors],
    )
    def test_a_chain_with_fields_asked_in_between_is_exact(self, sizes, asked, many):
        q, k, v = inputs(n=1 + sum(sizes))
        cuts = list(itertools.accumulate([1, *sizes]))
        total = cm.attend(q, k[:1], v[:1])
        parts = [cm.attend(q, k[a:b], v[a:b]) for a, b in itertools.pairwise(cuts)]
        if many:
            total = cm.merge(total, *parts)
        for i, part in enumerate([] if many else parts):
            total = cm.merge(total, part)
            if i < len(asked):
                with torch.set_grad_enabled(asked[i][1]):
                    getattr(total, asked[i][0])
        truth = dense(q, k, v)
        for name in FIELDS:
            ours, theirs = getattr(total, name), getattr(truth, name)
            assert_close([ours], [theirs], 1e-9)
            assert_close(gradients(ours, (q, k, v)), gradients(theirs, (q, k, v)), 1e-8)

    @pytest.mark.parametrize("asked", [(), ("mean", "entropy")])
    @pytest.mark.parametrize("recorded", [True, False])
    def test_any_length(self, asked, recorded):
        chunks = 1000 if not asked else 500
        q, k, v = inputs(n=chunks)
        with torch.set_grad_enabled(recorded):
            total = cm.attend(q, k[:1], v[:1])
            for i in range(1, chunks):
                total = cm.merge(total, cm.attend(q, k[i : i + 1], v[i : i + 1]))
                for name in asked:
                    getattr(total, name)
            ours = [getattr(total, name) for name in FIELDS]
        truth = dense(q, k, v)
        assert_close(ours, [getattr(truth, name) for name in FIELDS], 1e-9)
        if recorded:
            expected = gradients(truth.entropy, (q, k, v))
            assert_close(gradients(total.entropy, (q, k, v)), expected, 1e-8)

    def test_memory_of_a_stream_does_not_grow(self):
        q = torch.randn(3, 4)
        keys: list[weakref.ref[torch.Tensor]] = []
        total = cm.attend(q, torch.randn(2, 4))
        for _ in range(200):
            k = torch.randn(2, 4)
            keys.append(weakref.ref(k))
            total = cm.merge(total, cm.attend(q, k))
            _ = total.mean, total.entropy
        del k
        gc.collect()
        assert sum(ref() is not None for ref in keys) < 40
        assert total.value_variance.isfinite().all()

    def test_time_of_a_stream_is_linear(self):
        class Counter(TorchDispatchMode):
            count = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                self.count += 1
                return func(*args, **(kwargs or {}))

        def operations(chunks):
            q, k = torch.randn(2, 3, requires_grad=True), torch.randn(chunks, 3)
            with Counter() as counter:
                total = cm.attend(q, k[:1])
                for i in range(1, chunks):
                    total = cm.merge(total, cm.attend(q, k[i : i + 1]))
                    _ = total.value_variance
            return counter.count

        assert operations(40) < 2.2 * operations(20)

    def test_earlier_results_of_a_stream_keep_their_gradient(self):
        q, k, v = inputs(n=60)
        total = cm.attend(q, k[:1], v[:1])
        for i in range(1, 50):
            total = cm.merge(total, cm.attend(q, k[i : i + 1], v[i : i + 1]))
            _ = total.mean
        with torch.no_grad():
            later = cm.merge(total, cm.attend(q, k[50:], v[50:]))
            assert not later.mean.requires_grad
        truth = dense(q, k[:50], v[:50])
        expected = gradients(truth.entropy, (q, k, v))
        assert_close(gradients(total.entropy, (q, k, v)), expected, 1e-9)
        assert_close([later.mean], [dense(q, k, v).mean], 1e-10)

    def test_inputs_changed_before_an_unasked_field(self):
        q, k, v = (x.detach() for x in inputs())
        a = cm.merge(cm.attend(q, k[:3], v[:3]), cm.attend(q, k[3:], v[3:]))
        mean = a.mean.clone()
        k.add_(1.0)
        assert_close([a.mean], [mean], 0.0)
        with pytest.raises(cm.InputError, match="changed in place"):
            _ = a.entropy


@pytest.mark.parametrize("hidden", [torch.finfo(torch.float32).min, -1e30, -math.inf])
def test_a_part_hidden_by_a_huge_number_has_finite_gradients(hidden):
    torch.manual_seed(0)
    q, k, v = (torch.randn(*s, requires_grad=True) for s in ((3, 4), (6, 4), (6, 5)))
    mask = torch.zeros(3, 6)
    mask[:, :2] = hidden
    parts = [cm.attend(q, k[a:b], v[a:b], attn_mask=mask[:, a:b]) for a, b in ((0, 2), (2, 6))]
    a, truth = cm.merge(*parts), dense(*(x.double() for x in (q, k[2:], v[2:])))
    for name in FIELDS:
        ours, theirs = getattr(a, name), getattr(truth, name).float()
        assert_close([ours], [theirs], 1e-5)
        weights = 100.0 * torch.ones_like(ours)
        mine, other = (
            torch.autograd.grad(x, (q, k, v), weights, materialize_grads=True, retain_graph=True)
            for x in (ours, theirs)
        )
        assert_close(mine, other, 1e-4)


class TestCopies:
    @pytest.mark.parametrize("make", MAKERS)
    @pytest.mark.parametrize("how", [copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))])
    def test_a_copy_has_every_field_as_numbers(self, make, how):
        q, k, v = inputs()
        a = make(q, k, v)
        _ = a.mean
        b = how(a)
        for name in FIELDS:
            torch.testing.assert_close(getattr(b, name), getattr(a, name).detach(), rtol=0, atol=0)
            assert not getattr(b, name).requires_grad
        more = cm.attend(q, k * 0.5, v)
        whole = dense(q, torch.cat([k, k * 0.5]), torch.cat([v, v]))
        assert_close([cm.merge(b, more).entropy], [whole.entropy], 1e-10)

    def test_a_shallow_copy_shares_the_inputs(self):
        q, k, v = inputs()
        b = copy.copy(single(q, k, v))
        expected = gradients(dense(q, k, v).mean, (q, k, v))
        assert_close(gradients(b.mean, (q, k, v)), expected, 1e-9)

    def test_not_inside_a_transform(self):
        def inside(x):
            return copy.deepcopy(cm.attend(x, x)).mean

        with pytest.raises(cm.InputError, match="inside a transform"):
            vmap(inside)(torch.randn(2, 3, 4))

    def test_repr_tells_shape_and_what_is_known(self):
        a = cm.attend(normal(2, 8, 3, 4), normal(2, 4, 5, 4), normal(2, 4, 5, 6), enable_gqa=True)
        assert repr(a) == "Attended(mean (2, 8, 3, 6) float64; computed: nothing yet)"
        _ = a.entropy, a.mean
        assert repr(a) == "Attended(mean (2, 8, 3, 6) float64; computed: mean, entropy)"
        assert repr(copy.deepcopy(a)).endswith(f"computed: {', '.join(FIELDS)}, score_max_key)")


@pytest.mark.parametrize("word", ["F", "R", "FF", "FR", "RF", "RR"])
def test_merged_single_precision_is_as_precise_as_dense(word):
    """Where the scores of a query share a large part; medians over draws."""

    def derived(make, name, dtype, seed):
        generator = torch.Generator().manual_seed(seed)
        q, k, v, *ts = (
            torch.randn(*shape, generator=generator)
            for shape in ((3, 8), (7, 8), (7, 5), (3, 8), (7, 8), (7, 5))
        )
        q[:, 0], k[:, 0] = 1.0, k[:, 0] + 3000.0
        xs, ts = ([x.to(dtype) for x in group] for group in ((q, k, v), ts))

        def function(*xs):
            return (getattr(make(*xs), name),)

        return differentiate(function, word, tuple(ts), torch.ones_like)(*xs)

    for name in ("mean", "log_normalizer", "entropy", "score_variance"):
        errors = []
        for seed in range(5):
            truth = derived(dense, name, DOUBLE, seed)
            both = (derived(make, name, torch.float32, seed) for make in (merged, dense))
            errors.append(
                [max(relative(a, b) for a, b in zip(x, truth, strict=True)) for x in both]
            )
        ours, theirs = torch.tensor(errors).median(0).values.tolist()
        assert ours <= 3 * theirs + 1e-6, f"{name}: {ours:.1e}, dense {theirs:.1e}"


def relative(found, truth):
    size = truth.abs().max().item()
    return (found.double() - truth).abs().max().item() / size if size else 0.0
