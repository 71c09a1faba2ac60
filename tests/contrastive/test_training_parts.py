"""Queues, temperatures, chunks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import cumulant as cm
from cumulant.contrastive import KeyQueue, Temperature, encode_in_chunks, info_nce


class TestKeyQueue:
    @pytest.mark.parametrize("sizes", [[3], [3, 3], [3, 3, 3, 3], [10], [7, 1, 12], [5, 0, 2]])
    def test_holds_the_last_oldest_first(self, sizes):
        queue, seen = KeyQueue(7, 2), []
        for n in sizes:
            keys = torch.randn(n, 2)
            queue.push(keys)
            seen.append(keys)
            last = torch.cat(seen)[-7:]
            assert torch.equal(queue.keys, last)
            assert len(queue) == len(last)

    @pytest.mark.parametrize("before", [0, 3, 7, 9])
    def test_restores_mid_fill(self, before):
        queue = KeyQueue(7, 2)
        queue.push(torch.randn(before, 2))
        copy = KeyQueue(7, 2)
        copy.load_state_dict(queue.state_dict())
        more = torch.randn(3, 2)
        queue.push(more)
        copy.push(more)
        assert torch.equal(copy.keys, queue.keys)
        assert len(copy) == len(queue)

    def test_keys_do_not_change_later(self):
        queue = KeyQueue(4, 2)
        queue.push(torch.ones(2, 2))
        held = queue.keys
        queue.push(torch.zeros(4, 2))
        assert (held == 1).all()

    def test_no_gradient_is_held(self):
        queue = KeyQueue(4, 2)
        queue.push(torch.randn(2, 2, requires_grad=True) * 2)
        assert not queue.keys.requires_grad

    def test_empty_is_no_key(self):
        x = torch.randn(4, 2)
        assert info_nce(x, x.flip(1), queue=KeyQueue(4, 2).keys) == info_nce(x, x.flip(1))

    @pytest.mark.parametrize(
        "keys", [torch.zeros(2, 3), torch.zeros(2), [1.0], torch.full((1, 2), math.nan)]
    )
    def test_bad_keys_change_nothing(self, keys):
        queue = KeyQueue(4, 2)
        queue.push(torch.ones(2, 2))
        with pytest.raises(cm.InputError):
            queue.push(keys)
        assert torch.equal(queue.keys, torch.ones(2, 2))

    @pytest.mark.parametrize("size", [0, -1, 2.5, "4"])
    def test_bad_size(self, size):
        with pytest.raises(cm.InputError, match="size"):
            KeyQueue(size, 2)


class TestTemperature:
    def test_gradient_is_in_the_logarithm(self):
        temperature = Temperature(0.2)
        q, k = torch.randn(6, 4), torch.randn(6, 4)
        info_nce(q, k, temperature=temperature()).backward()
        step = 1e-3
        up, down = (
            info_nce(q.double(), k.double(), temperature=0.2 * math.exp(s)) for s in (step, -step)
        )
        torch.testing.assert_close(
            temperature.log_value.grad.double(), (up - down) / (2 * step), rtol=1e-3, atol=1e-4
        )

    def test_held_above_its_least(self):
        temperature = Temperature(0.02, least=0.01)
        with torch.no_grad():
            temperature.log_value.fill_(-20.0)
        torch.testing.assert_close(temperature(), torch.tensor(0.01))

    @pytest.mark.parametrize("start", [0.0, -1.0, math.nan, 0.001])
    def test_bad_start(self, start):
        with pytest.raises(cm.InputError, match="start"):
            Temperature(start)


class TestChunks:
    @pytest.mark.parametrize("chunk", [1, 3, 10, 100])
    def test_values_and_gradients_of_one_batch(self, chunk):
        encoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        a, b = torch.randn(2, 10, 4, dtype=torch.float64)

        def gradients(encode):
            encoder.zero_grad()
            loss = info_nce(encode(a), encode(b))
            loss.backward()
            return [loss.detach(), *(p.grad.clone() for p in encoder.parameters())]

        whole = gradients(encoder)
        parts = gradients(lambda x: encode_in_chunks(encoder, x, chunk))
        for x, y in zip(whole, parts, strict=True):
            torch.testing.assert_close(x, y)

    def test_dropout_is_repeated(self):
        """The second encoding drops the same units, so the gradient is that of the value."""
        encoder = nn.Dropout(0.5)
        x = torch.ones(8, 50, requires_grad=True)
        z = encode_in_chunks(encoder, x, 3)
        z.sum().backward()
        assert torch.equal(x.grad, z.detach())

    def test_several_inputs(self):
        x, y = torch.randn(5, 2), torch.randn(5, 2)
        expected = x - y
        assert torch.equal(encode_in_chunks(torch.sub, (x, y), 2), expected)
        named = {"input": x, "other": y}
        assert torch.equal(encode_in_chunks(torch.sub, named, 2), expected)

    def test_a_batch_without_rows_still_knows_the_encoder(self):
        encoder = torch.nn.Linear(4, 2)
        z = encode_in_chunks(encoder, torch.zeros(0, 4), 3)
        assert z.shape == (0, 2)
        z.sum().backward()
        assert encoder.weight.grad.eq(0).all()

    @pytest.mark.parametrize("inputs", [(), (torch.ones(2), torch.ones(3)), 3.0])
    def test_bad_inputs(self, inputs):
        with pytest.raises(cm.InputError, match="inputs must be"):
            encode_in_chunks(torch.sum, inputs, 2)

    def test_bad_chunk(self):
        with pytest.raises(cm.InputError, match="chunk_size"):
            encode_in_chunks(torch.sum, torch.ones(2, 2), 0)
