"""A seed repeats every number exactly, on whatever number of threads the caller has."""

from __future__ import annotations

import pytest
import torch

from cumulant.lab.claims import claims, run

# Fits, simulations, sampling and a real model: what amplifies a rounding most.
NAMES = ("T17", "T29", "T31", "T34", "T38", "nce", "norms")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_the_same_numbers_twice_and_on_other_threads(name, threads, monkeypatch):
    monkeypatch.setenv("CUMULANT_CACHE", "")  # measured, not remembered
    found = []
    for count in (1, 2):
        threads(count)
        torch.manual_seed(count)  # the caller's own random numbers do not matter
        found.append(run(claims()[name], seed=7, quick=True).as_dict()["measured"])
        assert torch.get_num_threads() == count
    assert found[0] == found[1]
    assert None not in found[0].values()
