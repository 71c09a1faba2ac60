"""The sentences say what the tables say, in small tables whose answers are plain to see."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from cumulant.lens.report import ReportData, findings
from cumulant.lens.report.numbers import shortened_all
from cumulant.pages import deviation, number, share, typeset


def found(section: str, **tables):
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
    assert finding.headline == "Class IV is the most common: 4 of 6 heads"
    assert "67%" in finding.sentence
    assert "1 of class I, 1 of class II, 0 of class III, 4 of class IV" in finding.sentence


def test_kinds_of_heads_that_there_are_come_first():
    table = heads(
        repeat_induction=[0.02, 0.01, 0.0, 0.0],
        repeat_previous=[0.1, 0.9, 0.0, 0.0],
        sink_mass=[0.1, 0.2, 0.1, 0.2],
    )
    told = [x.headline for x in findings(ReportData("m", heads=table))]
    assert told[0] == "Layer 0 head 1 is the strongest previous-token head: 0.90"
    assert told[-1] == "No induction head: the strongest, layer 0 head 0, scores 0.02"
    assert len(told) == 3


@pytest.mark.parametrize(
    ("second", "says"),
    [(0.1, "1 head puts at least 0.4 of its weight"), (0.5, "2 heads put at least 0.4 of their")],
)
def test_positional_heads_are_counted(second, says):
    table = heads(distance=[2, -1], distance_mass=[0.7, second])
    told = [f for f in findings(ReportData("m", heads=table)) if "positional" in f.headline]
    assert told[0].headline.endswith("0.70 of its weight is 2 tokens back")
    assert told[0].sentence.startswith(says)
    assert ("layer 0 head 1 (1 token ahead, 0.50)" in told[0].sentence) == (second > 0.4)


def test_sinks_name_the_layers_above_one_half_and_the_uniform_share():
    tokens = pd.DataFrame({"input": [0, 0], "token": [0, 1], "visible": [1, 4]})
    table = heads(sink_mass=[0.1, 0.1, 0.6, 0.8, 0.7, 0.7, 0.2, 0.0])
    finding = found("maps", heads=table, tokens=tokens)
    assert finding.headline.startswith("40%")
    assert "the share exceeds one half in layers 1 and 2" in finding.sentence
    assert "uniform attention would put 62% there" in finding.sentence  # (1 + 1/4) / 2
    light = found("maps", heads=heads(sink_mass=[0.1, 0.1, 0.3, 0.3]))
    assert "the largest share is 30%, in layer 1" in light.sentence


@pytest.mark.parametrize(
    ("ratios", "says"), [([1.2, 1.4, 0.9], "pushes"), ([0.9, 0.8, 1.1], "does not push")]
)
def test_expansion_reads_the_median_over_layers(ratios, says):
    layers = pd.DataFrame(
        {"layer": [0, 1, 2], "attention_expansion": ratios, "norm_contraction": [0.5, 0.7, 1.3]}
    )
    finding = found("depth", layers=layers)
    assert f"Attention {says}" in finding.headline
    assert f"by more than 1 in {sum(r > 1 for r in ratios)} of 3 layers" in finding.sentence
    assert "by 0.700, and by less than 1 in 2 of 3 layers" in finding.sentence


def test_energy_counts_heads_and_rising_tokens():
    finding = found(
        "energy",
        heads=heads(energy_change=[-1.0, -3.0, 0.5, -2.0], energy_rises=[0.0, 0.0, 0.5, 0.1]),
    )
    assert finding.headline == "Energy falls in 3 of 4 heads"
    assert "median change is −1.50" in finding.sentence
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
    assert finding.headline == "The trained weights explain R² −0.100 of the link"
    assert "a linear map fits says little" in finding.sentence  # as T29 finds
    assert "median R² of −0.100 and beats a constant in 1 of 3 heads" in finding.sentence
    assert "83% of the means" in finding.sentence


def test_gaussianity_counts_rejections_with_a_warning():
    layers = pd.DataFrame({"layer": range(20), "gaussianity_p": [0.01] * 3 + [0.5] * 17})
    finding = found("shape", layers=layers)
    assert finding.headline == "Hidden states are not Gaussian in 3 of 20 layers"
    assert "3 of 20 layers" in finding.sentence
    assert "independent points, which tokens of one text are not" in finding.sentence
    fine = found("shape", layers=layers.assign(gaussianity_p=0.5))
    assert fine.headline == "Hidden states are compatible with a Gaussian in every layer"


RADII = [4.0, 0.25, 0.5, 1.0, 8.0, 2.0]


def test_partition_quotes_the_centered_rows():
    centered = pd.DataFrame(
        {"radius": RADII, "centered": True, "relative_sd": [11.5, 0.002, 0.008, 0.04, 15.8, 0.27]}
    )
    plain = centered.assign(centered=False, relative_sd=[12.6, 0.025, 0.05, 0.12, 15.9, 0.3])
    both = pd.concat([plain, centered], ignore_index=True).assign(mean=1.0)
    finding = found("partition", partition=both)
    assert finding.headline == "The partition function is nearly constant up to radius 1"
    assert "0.2% to 4.0% (relative sd) at radii 0.25 to 1" in finding.sentence
    assert "by more than 11 times its mean at radius 4" in finding.sentence
    assert "with the mean left in, by 12% at radius 1" in finding.sentence
    assert "radius 8" not in finding.sentence  # where one direction outweighs all others


def test_partition_without_centered_rows():
    table = pd.DataFrame({"radius": [4.0, 0.5], "relative_sd": [1.5, 0.4], "mean": [1.0, 1.0]})
    finding = found("partition", partition=table)
    assert finding.headline == "The partition function is not constant, even at radius 0.5"
    assert "varies by 40% (relative sd) at radius 0.5, and by 150% at radius 4." in finding.sentence
    far = found("partition", partition=table.assign(radius=[20.0, 10.0]))
    assert "by 40% (relative sd) at radius 10." in far.sentence


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ([0.4, 0.5, 0.2], [0.6, 0.4, 0.8], "value and output weights: 2 of 3 layers"),
        ([0.4, 0.5, 0.9], [0.6, 0.4, 0.8], "query and key weights: 2 of 3 layers"),
        ([0.4, 0.5, None], [0.6, 0.4, 0.8], "value and output weights: 1 of 2 layers"),
    ],
)
def test_sensitivity_says_which_weights_and_in_how_many_layers(first, second, says):
    layers = pd.DataFrame({"layer": range(3), "sensitivity_qk": first, "sensitivity_vo": second})
    assert found("sensitivity", layers=layers).headline == f"The output depends more on {says}"


def test_sensitivity_states_medians_as_percentages():
    layers = pd.DataFrame(
        {"layer": [0, 1, 2], "sensitivity_qk": [0.1, 0.3, 0.2], "sensitivity_vo": [0.5, 0.7, 1.2]}
    )
    sentence = found("sensitivity", layers=layers, run={"texts": 40}).sentence
    assert "1% change in the value and output weights of one layer" in sentence
    assert "moves the output by 0.70%; in the query and key weights, by 0.20%" in sentence
    assert "on the first text" in sentence


def test_sentences_speak_of_these_texts():
    tokens = pd.DataFrame({"input": [0, 1, 2], "token": [0, 0, 0]})
    table = heads(energy_change=[-1.0, -1.0])
    assert "on these 3 texts" in found("energy", heads=table, tokens=tokens).sentence
    assert "on this text" in found("energy", heads=table, tokens=tokens[:1]).sentence
    # The heads are of all texts, the table of tokens of those shown: the run knows how many.
    run = {"texts": 1200, "inputs": 1300}
    assert "on these 1,200 texts" in found("energy", heads=table, tokens=tokens, run=run).sentence
    sinks = heads(sink_mass=[0.1, 0.1])
    seen = tokens.assign(visible=4)
    assert "uniform" in found("maps", heads=sinks, tokens=seen).sentence
    assert "uniform" not in found("maps", heads=sinks, tokens=seen, run=run).sentence


def test_a_sink_logit_is_named_where_there_is_one():
    tokens = pd.DataFrame({"input": [0, 0], "token": [0, 1], "sink_logit_mass": [0.0, 0.0]})
    table = heads(sink_mass=[0.1, 0.1])
    assert "sink logit" not in found("maps", heads=table, tokens=tokens).sentence
    with_sink = tokens.assign(sink_logit_mass=[0.0, 0.2])
    assert "or the sink logit" in found("maps", heads=table, tokens=with_sink).sentence


@pytest.mark.parametrize(
    ("plain", "shown"),
    [
        ("H_i = -sum_j p_ij log p_ij", "H{sub i} = −Σ{sub j} p{sub ij} log p{sub ij}"),
        ("tr(AA') of A = W_q W_k': 1", "tr(AA{sup T}) of A = W{sub q} W{sub k}{sup T}: 1"),
        ("s * lambda_max(Cov_i[k]), q -> E[k]", "s · λ{sub max}(Cov{sub i}[k]), q → E[k]"),
        ("exp <v_w, c> in [-1, 1], |x|^2", "exp ⟨v{sub w}, c⟩ in [−1, 1], |x|{sup 2}"),
        ("p_η, e^{ηx}, e^⟨v,c⟩, Σ^½(A)", "p{sub η}, e{sup ηx}, e{sup ⟨v,c⟩}, Σ{sup ½}(A)"),
        ("info_nce, repeat_previous, a^{", None),
        ("feed_forward, the hidden states' sum of the text's k90", None),
        ("cross-validated; sink_mass < 3 > 2", None),
    ],
)
def test_formulas_are_set_and_words_left_alone(plain, shown):
    pieces = [f"{{{e} {text}}}" if e else text for e, text in typeset(plain)]
    assert "".join(pieces) == (shown or plain)


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
    assert [deviation(x) for x in (0.004, 1.99, 11.9)] == [
        "0.4%",
        "199%",
        "more than 11 times its mean",
    ]


def test_arrays_are_shortened_as_their_cells_are():
    rng = np.random.default_rng(0)
    values = rng.normal(size=4000) * 10.0 ** rng.integers(-12, 12, size=4000)
    values[:4] = [0, np.nan, np.inf, 123456]
    short = shortened_all(values, 4)
    assert short[:4] == [0, None, None, 123500]
    assert short[4:] == [float(f"{v:.4g}") for v in values[4:]]
