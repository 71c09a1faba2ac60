"""The sentences say what the tables say, in small tables whose answers are plain to see."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from cumulant.lens.report import ReportData, findings
from cumulant.lens.report.numbers import number, share, shortened_all


def found(section: str, **tables: pd.DataFrame):
    matching = [f for f in findings(ReportData("m", **tables)) if f.section == section]
    assert len(matching) == 1
    return matching[0]


def heads(**columns: list[object]) -> pd.DataFrame:
    size = len(next(iter(columns.values())))
    return pd.DataFrame(
        {"layer": [i // 2 for i in range(size)], "head": [i % 2 for i in range(size)]} | columns
    )


def test_nothing_is_found_in_nothing():
    assert findings(ReportData("m")) == []
    assert findings(ReportData("m", heads=heads(entropy=[1.0, 2.0]))) == []
    assert findings(ReportData("m", heads=heads(link_linear=[None, float("nan")]))) == []


def test_classes_are_counted():
    finding = found("classes", heads=heads(**{"class": ["IV", "IV", "I", "IV", "II", "IV"]}))
    assert finding.headline == "Class IV is the most frequent: 4 of 6 heads"
    assert "67%" in finding.sentence
    assert "1 of class I, 1 of class II, 0 of class III, 4 of class IV" in finding.sentence


def test_sinks_name_the_layers_above_one_half_and_the_uniform_share():
    tokens = pd.DataFrame({"input": [0, 0], "token": [0, 1], "visible": [1, 4]})
    table = heads(sink_mass=[0.1, 0.1, 0.6, 0.8, 0.7, 0.7, 0.2, 0.0])
    finding = found("maps", heads=table, tokens=tokens)
    assert finding.headline.startswith("40%")
    assert "in layers 1 and 2 it is more than half" in finding.sentence
    assert "uniform attention would put 62% there" in finding.sentence  # (1 + 1/4) / 2
    light = found("maps", heads=heads(sink_mass=[0.1, 0.1, 0.3, 0.3]))
    assert "most in layer 1, 30%" in light.sentence


@pytest.mark.parametrize(
    ("ratios", "says"), [([1.2, 1.4, 0.9], "pushes"), ([0.9, 0.8, 1.1], "does not push")]
)
def test_expansion_reads_the_median_over_layers(ratios, says):
    layers = pd.DataFrame(
        {"layer": [0, 1, 2], "attention_expansion": ratios, "norm_contraction": [0.5, 0.7, 1.3]}
    )
    finding = found("depth", layers=layers)
    assert f"Attention {says}" in finding.headline
    assert f"above 1 in {sum(r > 1 for r in ratios)} of 3 layers" in finding.sentence
    assert "ratio of 0.700, below 1 in 2 of 3 layers" in finding.sentence


def test_energy_counts_heads_and_rising_tokens():
    finding = found(
        "energy",
        heads=heads(energy_change=[-1.0, -3.0, 0.5, -2.0], energy_rises=[0.0, 0.0, 0.5, 0.1]),
    )
    assert finding.headline == "Energy falls in 3 of 4 heads"
    assert "median change −1.50" in finding.sentence
    assert "15% of the tokens" in finding.sentence


def test_potential_needs_symmetry_and_definiteness():
    table = heads(symmetry=[0.95, 0.95, 0.1, None], definiteness=[0.99, 0.2, 1.0, 1.0])
    finding = found("maps", heads=table)
    assert finding.headline == "Nearly symmetric, positive scores: 1 of 3 heads"
    assert "median 0.950" in finding.sentence


def test_link_says_how_linear_and_how_good_the_trained_map_is():
    table = heads(
        link_linear=[0.95, 0.97, 0.99, None],
        link_trained=[-5.0, 0.2, -0.1, None],
        link_exists=[1.0, 1.0, 0.5, None],
    )
    finding = found("link", heads=table)
    assert finding.headline == "The link is close to linear: R² 0.970"
    assert "median R² −0.100, better than a constant in 1 of 3 heads" in finding.sentence
    assert "83% of the means" in finding.sentence


def test_gaussianity_counts_rejections_against_chance():
    layers = pd.DataFrame({"layer": range(20), "gaussianity_p": [0.01] * 3 + [0.5] * 17})
    finding = found("shape", layers=layers)
    assert finding.headline == "Hidden states are not Gaussian in 3 of 20 layers"
    assert "(1 expected by chance)" in finding.sentence
    fine = found("shape", layers=layers.assign(gaussianity_p=0.5))
    assert fine.headline == "No layer's hidden states are told from Gaussian"


def test_partition_compares_the_smallest_and_the_largest_radius():
    table = pd.DataFrame(
        {"radius": [4.0, 0.5, 1.0], "relative_sd": [2.5, 0.004, 0.02], "mean": [1.0, 1.0, 1.0]}
    )
    finding = found("partition", partition=table)
    assert finding.headline == "The partition function is nearly constant at radius 0.5"
    assert "0.4%" in finding.sentence
    assert "250% at radius 4" in finding.sentence


def test_sentences_speak_of_these_texts():
    tokens = pd.DataFrame({"input": [0, 1, 2], "token": [0, 0, 0]})
    table = heads(energy_change=[-1.0, -1.0])
    assert "on these 3 texts" in found("energy", heads=table, tokens=tokens).sentence
    assert "on this text" in found("energy", heads=table, tokens=tokens[:1]).sentence


def test_numbers_for_people():
    assert [number(x) for x in (0, 3, 1.1, -0.0123456, 1234.5, 22_713_216)] == [
        "0",
        "3",
        "1.10",
        "−0.0123",
        "1,234",
        "2.27·10⁷",
    ]
    assert number(1e-5) == "1.00·10⁻⁵"
    assert number(float("nan")) == "–"
    assert [share(x) for x in (0, 1e-5, 0.042, 0.29, 0.9999, 1)] == [
        "0%",
        "under 0.1%",
        "4.2%",
        "29%",
        "over 99.9%",
        "100%",
    ]


def test_arrays_are_shortened_as_their_cells_are():
    rng = np.random.default_rng(0)
    values = rng.normal(size=4000) * 10.0 ** rng.integers(-12, 12, size=4000)
    values[:4] = [0, np.nan, np.inf, 123456]
    short = shortened_all(values, 4)
    assert short[:4] == [0, None, None, 123500]
    assert short[4:] == [float(f"{v:.4g}") for v in values[4:]]
