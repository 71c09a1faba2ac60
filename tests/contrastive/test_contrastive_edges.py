"""Corners of the contrastive losses that were wrong once."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

import cumulant as cm
from cumulant.contrastive import (
    AliasSampler,
    KeyQueue,
    Temperature,
    contrast,
    encode_in_chunks,
    info_nce,
    nce,
    negative_sampling,
    sampled_softmax,
)

q, k = torch.randn(5, 4), torch.randn(5, 4)


class TestRangeOfNumbers:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("power", [-0.9, -0.6, 0.0, 0.6, 0.9])
    def test_cosine_of_vectors_of_any_length(self, dtype, power):
        size = torch.finfo(dtype).max ** power
        x = (q.to(dtype) * size).requires_grad_()
        loss = info_nce(x, k.to(dtype))
        torch.testing.assert_close(loss, info_nce(q.to(dtype), k.to(dtype)), rtol=1e-5, atol=1e-5)
        (g,) = torch.autograd.grad(loss, x)
        y = q.to(dtype).requires_grad_()
        (expected,) = torch.autograd.grad(info_nce(y, k.to(dtype)), y)
        torch.testing.assert_close(g * size, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(
        "call",
        [
            lambda: info_nce(q * 1e25, k * 1e25, similarity="dot"),
            lambda: info_nce(q, k, temperature=1e-39),
            lambda: info_nce(q, k, log_weights=torch.full((5,), 3e38)),
            lambda: info_nce(
                torch.randn(9000, 4).half(), torch.randn(9000, 4).half(), reduction="sum"
            ),
        ],
    )
    def test_out_of_range_is_an_error_not_nan(self, call):
        with pytest.raises(cm.InputError):
            call()

    @pytest.mark.parametrize("loss", [sampled_softmax, nce, negative_sampling])
    def test_sampled_losses(self, loss):
        sampler, target = AliasSampler(torch.ones(5)), torch.arange(5)
        for a, b in ((q * math.inf, k), (q * 1e25, k * 1e25)):
            with pytest.raises(cm.InputError):
                loss(a, b, target, sampler, 3)

    def test_nce_needs_a_finite_constant_and_noise_that_covers_the_data(self):
        target = torch.arange(5)
        with pytest.raises(cm.InputError, match="log_normalizer"):
            nce(q, k, target, AliasSampler(torch.ones(5)), 3, log_normalizer=math.inf)
        with pytest.raises(cm.InputError, match="overlap"):
            nce(q, k, target, AliasSampler(torch.tensor([0.0, 1, 1, 1, 1])), 3)

    def test_weights_whose_sum_overflows(self):
        sampler = AliasSampler(torch.full((10,), 1e308, dtype=torch.float64))
        torch.testing.assert_close(sampler.log_probability.exp(), torch.full((10,), 0.1).double())


def test_statistics_have_a_function_of_their_own():
    with pytest.raises(cm.InputError, match=r"'details' is now 'contrast\(\.\.\.\)'"):
        info_nce(q, k, details=True)


class TestBroadcastPairs:
    def test_a_row_of_positives_for_all(self):
        row = torch.tensor([[True, True, False, False, True]])
        every_row = row.expand(5, 5).contiguous()
        for options in ({}, {"exclude": torch.full((5, 1), 3)}):
            a, b = (contrast(q, k, positives=x, **options) for x in (row, every_row))
            torch.testing.assert_close(a.loss, b.loss)
            torch.testing.assert_close(a.effective_negatives, b.effective_negatives)
        every = torch.ones(1, 5).bool()
        a = info_nce(q, k, positives=every, symmetric=True)
        torch.testing.assert_close(
            a, info_nce(q, k, positives=torch.ones(5, 5).bool(), symmetric=True)
        )

    def test_exclusions_for_all(self):
        zero = torch.zeros(5).long()
        mask = torch.tensor([[False, True, False, False, False]])
        index = torch.tensor([[1]])
        expected = info_nce(q, k, positives=zero, exclude=mask.expand(5, 5))
        for exclude in (mask, index):
            got = contrast(q, k, positives=zero, exclude=exclude)
            torch.testing.assert_close(got.loss, expected)
        none = info_nce(q, k, exclude=torch.zeros(5, 0).long())
        assert none == info_nce(q, k)

    def test_self_with_more_keys_than_anchors(self):
        """The anchors are the first of the keys."""
        labels = torch.tensor([0, 1, 0, 1, 0])
        few, scores = q[:3], q[:3] @ q.T / 0.07
        scores[torch.arange(3), torch.arange(3)] = -math.inf
        pairs = (labels[:3, None] == labels) & ~torch.eye(3, 5).bool()
        logs = scores.log_softmax(1).masked_fill(~pairs, 0.0).sum(1) / pairs.sum(1)
        options = {"exclude": "self", "similarity": "dot"}
        by_label = info_nce(few, q, labels=(labels[:3], labels), **options)
        torch.testing.assert_close(by_label, -logs.mean())
        torch.testing.assert_close(info_nce(few, q, positives=pairs, **options), -logs.mean())
        with pytest.raises(cm.InputError, match="5 anchors and 3 keys"):
            info_nce(q, few, positives=torch.zeros(5).long(), exclude="self")

    def test_an_anchor_far_longer_than_its_class(self):
        """Taking the anchor off the sum of its class keeps the others' digits."""
        x = torch.randn(60, 16)
        x[0] *= 1e4
        labels = torch.arange(60) % 3
        options = {"exclude": "self", "similarity": "dot", "temperature": 1.0, "reduction": "none"}
        ours = info_nce(x, x, labels=labels, **options)
        exact = info_nce(x.double(), x.double(), labels=labels, **options)
        torch.testing.assert_close(ours.double(), exact, rtol=5e-6, atol=1e-3)


def test_batched_labels_need_no_room_for_the_classes_of_others():
    """512 rows of 8 classes each: a table of all 4096 classes for each row would be 512 MB."""
    x = torch.randn(512, 16, 64, requires_grad=True)
    labels = torch.arange(512 * 16).reshape(512, 16) // 2
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        loss = info_nce(x, x, labels=labels)
    assert max(kept) <= 2 * 512 * 32 * 64
    alone = info_nce(x[7], x[7], labels=labels[7] * 0 + torch.arange(16) // 2, reduction="none")
    each = info_nce(x, x, labels=labels, reduction="none")
    torch.testing.assert_close(each[7], alone)
    loss.backward()


class TestSharedKeys:
    """One set of keys for a batch of anchors, with gradient: in the forward pass too."""

    @pytest.mark.parametrize("batch", [(3,), (2, 2)])
    @pytest.mark.parametrize("extra", ["keys", "queue", "moco"])
    def test_against_cross_entropy(self, batch, extra):
        a = torch.randn(*batch, 5, 4, dtype=torch.float64, requires_grad=True)
        shared = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
        queue = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
        options = {"similarity": "dot", "temperature": 0.5}
        target = torch.arange(5).expand(*batch, 5).flatten()
        if extra == "keys":
            ours = info_nce(a, shared, **options)
            scores = a @ shared.T / 0.5
        elif extra == "queue":
            ours = info_nce(a, shared, queue=queue, **options)
            scores = a @ torch.cat([shared, queue]).T / 0.5
        else:
            ours = info_nce(a, shared, queue=queue, in_batch=False, **options)
            own = (a * shared).sum(-1, keepdim=True)
            scores, target = torch.cat([own, a @ queue.T], -1) / 0.5, torch.zeros_like(target)
        theirs = F.cross_entropy(scores.flatten(0, -2), target)
        torch.testing.assert_close(ours, theirs)
        leaves = [a, shared] if extra == "keys" else [a, shared, queue]
        first = [torch.autograd.grad(x, leaves, create_graph=True) for x in (ours, theirs)]
        for x, y in zip(*first, strict=True):
            torch.testing.assert_close(x, y)
        second = [torch.autograd.grad(sum((g**2).sum() for g in x), leaves) for x in first]
        for x, y in zip(*second, strict=True):
            torch.testing.assert_close(x, y)


class TestMessages:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"positives": "abc"}, "positives must be a tensor"),
            ({"positives": [[1], [1, 2]]}, "positives must be a tensor"),
            ({"labels": "abcde"}, "labels"),
            ({"labels": (torch.arange(5), None)}, "labels"),
            ({"labels": (1, 2, 3)}, "tuple of 3"),
            ({"labels": {"a": 1}}, "labels"),
            ({"exclude": torch.tensor(1)}, "exclude"),
            ({"log_weights": torch.zeros(3, 5)}, "broadcast to the batch"),
            ({"temperature": "0.1"}, "number"),
            ({"temperature": True}, "number"),
        ],
    )
    def test_one_clear_error(self, options, message):
        with pytest.raises(cm.InputError, match=message):
            info_nce(q, k, **options)

    def test_nan_is_called_nan(self):
        with pytest.raises(cm.InputError, match="query holds NaN"):
            info_nce(q * math.nan, k)

    def test_no_dense_real_tensor(self):
        for bad in (q.to_sparse(), q.to(torch.float8_e4m3fn)):
            with pytest.raises(cm.InputError, match="dense real tensor"):
                info_nce(bad, k)

    def test_labels_as_a_plain_list(self):
        assert info_nce(q[:2], k[:2], labels=[0, 0]) == info_nce(
            q[:2], k[:2], labels=torch.tensor([0, 0])
        )

    @pytest.mark.parametrize("target", ["a", None, torch.zeros(5, dtype=torch.complex64)])
    def test_targets(self, target):
        with pytest.raises(cm.InputError, match="target"):
            negative_sampling(q, k, target, AliasSampler(torch.ones(5)), 2)

    def test_generators(self):
        with pytest.raises(cm.InputError, match="generator"):
            AliasSampler(torch.ones(5)).sample(3, generator=3)

    @pytest.mark.parametrize(
        "encoder", [lambda x: (x, x), lambda x: None, lambda x: x.mean(), lambda x: x.mean(0)[None]]
    )
    def test_encoders_that_do_not_return_rows(self, encoder):
        with pytest.raises(cm.InputError, match="one row for each"):
            encode_in_chunks(encoder, q, 2)


class TestState:
    def test_a_temperature_at_its_least_comes_back(self):
        temperature = Temperature(0.01)
        optimizer = torch.optim.SGD(temperature.parameters(), 0.5)
        for step in range(60):
            optimizer.zero_grad()
            value = temperature()
            loss = 100 * value if step == 0 else (10 * value - 0.5) ** 2
            loss.backward()
            assert temperature.log_value.grad != 0
            optimizer.step()
        torch.testing.assert_close(temperature(), torch.tensor(0.05), rtol=0.05, atol=0)

    def test_a_temperature_above_its_least_is_left_alone(self):
        temperature = Temperature(0.2)
        square = temperature.log_value.square()
        (temperature() + square).backward()
        expected = 0.2 + 2 * math.log(0.2)
        assert float(temperature.log_value.grad) == pytest.approx(expected, rel=1e-5)

    def test_half_a_checkpoint(self):
        queue = KeyQueue(4, 2)
        with pytest.raises(RuntimeError, match="KeyQueue needs"):
            queue.load_state_dict({"pushed": torch.tensor(2)}, strict=False)
        assert len(queue) == 0

    def test_a_refused_checkpoint_changes_nothing(self):
        queue, other = KeyQueue(4, 2), KeyQueue(8, 2)
        queue.push(torch.ones(3, 2))
        other.push(torch.zeros(8, 2))
        with pytest.raises(RuntimeError, match="KeyQueue needs"):
            queue.load_state_dict(other.state_dict())
        assert torch.equal(queue.keys, torch.ones(3, 2))

    def test_what_is_finite_only_when_wide(self):
        queue = KeyQueue(4, 2).half()
        with pytest.raises(cm.InputError, match=r"finite as torch\.float16"):
            queue.push(torch.full((1, 2), 1e6))
        assert len(queue) == 0

    def test_its_own_keys(self):
        queue = KeyQueue(3, 2)
        queue.push(torch.arange(6.0).view(3, 2))
        queue.push(queue.stored)
        assert torch.equal(queue.keys, torch.arange(6.0).view(3, 2))

    @pytest.mark.parametrize("dtype", [torch.long, torch.complex64])
    def test_keys_are_real(self, dtype):
        with pytest.raises(cm.InputError, match="real"):
            KeyQueue(3, 2).push(torch.ones(1, 2, dtype=dtype))


def test_second_derivative_of_cosine_rescaled():
    x = (q.double() * 1e200).requires_grad_()
    y = q.double().requires_grad_()
    (a,) = torch.autograd.grad(info_nce(x, k.double()), x, create_graph=True)
    (b,) = torch.autograd.grad(info_nce(y, k.double()), y, create_graph=True)
    (a2,) = torch.autograd.grad((a * 1e200).square().sum(), x)
    (b2,) = torch.autograd.grad(b.square().sum(), y)
    torch.testing.assert_close(a2 * 1e200, b2, rtol=1e-8, atol=1e-8)


def test_shifted_softmax_of_torch_agrees_at_the_edges():
    scores = q.double() @ k.double().T * 500
    ours = info_nce(q.double(), k.double(), similarity="dot", temperature=1 / 500)
    torch.testing.assert_close(ours, F.cross_entropy(scores, torch.arange(5)))
