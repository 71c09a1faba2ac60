"""A few seconds of the filters' fuzzer; the long form is the command that it names."""

from __future__ import annotations

import filters
import pytest

from cumulant.kernels.engines import engines
from fuzz import driver


@pytest.mark.skipif(not engines()["native"].available, reason="no compiled engine here")
def test_the_compiled_recursion_agrees_with_the_torch_recursion():
    failures = driver.run(filters.check, "filters", rounds=40, seed=0)
    assert not failures, "\n".join(failures)
