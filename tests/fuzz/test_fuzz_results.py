"""A few seconds of the fuzzer of results; the long form is `make fuzz`."""

from __future__ import annotations

import results


def test_random_lives_of_results_agree_with_dense_attention():
    failures = results.run(rounds=40, seed=0)
    assert not failures, "\n".join(failures)
