"""A short run of the coverage of intervals; the long form is `make fuzz`."""

from __future__ import annotations

import intervals
from scipy import stats


def test_intervals_hold_what_they_promise():
    found = intervals.covered("two means", rounds=25, seed=0)
    assert len(found) == 14
    for key, inside in found.items():
        assert stats.binomtest(inside, 25, key[2]).pvalue > 1e-3, key
