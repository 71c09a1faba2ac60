"""Numbers that an independent audit of the first ledger corrected come out as it had them."""

from __future__ import annotations

import pytest
import torch

from cumulant.lab.claims import claims, run
from cumulant.lab.claims.measuring import median
from cumulant.lab.claims.real import sublayers
from cumulant.lab.claims.subjects import subject
from cumulant.lab.claims.theory import t22, t23, t29

# Medians over MiniLM's six blocks: `torch.median` would take the lower of the middle two.
MISSED = {
    "query_key": 0.957,
    "uniform": 0.897,
    "value_output": 0.994,
    "heads": 0.750,
    "feed_forward": 0.424,
    "constant": 0.758,
}


@torch.no_grad()
def test_what_replaced_parts_miss_in_minilm():
    lost = [t23.ablated(layer) for layer in sublayers()]
    found = {name: median([x[name] for x in lost]) for name in MISSED}
    assert found == pytest.approx(MISSED, abs=6e-4)


@torch.no_grad()
def test_how_much_of_the_link_trained_weights_explain():
    layers = sublayers()
    tokens = layers[0].query.shape[1]
    trained = t29.flat([t29.of_head(layer, 0, tokens).trained for layer in layers])
    assert median(trained) == pytest.approx(0.143, abs=6e-4)


@torch.no_grad()
def test_neurons_of_minilm_whose_first_and_second_weights_are_aligned():
    """14 to 64 % of a layer have a cosine beyond 0.3 or below -0.3; the mean is negative."""
    rows = t22.trained(subject("minilm", 2, 1))["aligned"]
    shares = [sum(abs(x) > 0.3 for x in row) / len(row) for row in rows]
    assert (min(shares), max(shares)) == pytest.approx((0.14, 0.64), abs=5e-3)
    assert t22.mean(rows) < 0


@pytest.mark.parametrize("name", ["gaussian_error", "sphere_error"])
def test_rates_of_growth_are_within_two_percent_of_theory(name):
    found = run(claims()["T34"], quick=True).as_dict()["measured"]
    assert 0 < found[name] < 0.02
