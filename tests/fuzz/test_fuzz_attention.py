"""A few seconds of the fuzzer; the long form is the command that it names."""

from __future__ import annotations

import attention_calls


def test_random_calls_agree_with_dense_attention():
    failures = attention_calls.run(rounds=150, seed=0)
    assert not failures, "\n".join(failures)


def test_a_call_follows_from_its_seed():
    first, second = attention_calls.draw(3), attention_calls.draw(3)
    assert first.told == second.told
    assert all((a == b).all() for a, b in zip(first.tensors, second.tensors, strict=True))
