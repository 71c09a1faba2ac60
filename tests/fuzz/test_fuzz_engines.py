"""A few seconds of the compiled engine's fuzzer; the long form is the command that it names."""

from __future__ import annotations

import engine_calls
import pytest

from cumulant.kernels.engines import engines


@pytest.mark.skipif(not engines()["native"].available, reason="no compiled engine here")
def test_random_kernel_calls_agree_with_dense_attention():
    failures = engine_calls.run(rounds=200, seed=0)
    assert not failures, "\n".join(failures)
