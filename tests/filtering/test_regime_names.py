"""A name stays with its regime through a fit: in the library, the table, the CSV, JSON, picture.

The truth is simulated: growth around 1.5 in expansions and around -1 in recessions.
"""

from __future__ import annotations

import csv
import itertools
import json
import sys

import numpy as np
import pytest
import torch

import cumulant as cm
from cumulant.cli import filter_run as command
from cumulant.cli import main
from cumulant.filtering.model_files import read_model
from cumulant.filtering.recursion import scheme_of
from cumulant.filtering.regimes import matched
from switching import means, parameters, seeded

F = cm.filtering
D = torch.float64
STICKY = [[0.9, 0.1], [0.2, 0.8]]


@pytest.fixture(scope="module")
def truth():
    """Growth ``(T, 1)``, and where it is an expansion."""
    drawn = F.sample(means(STICKY, [1.5, -1.0], [0.25, 0.25]), 120, generator=seeded(3))
    return drawn.observations, drawn.modes == 0


def right(probability, expansion):
    """Whether a probability of expansion tells the truth nearly everywhere."""
    return float(((probability > 0.5) == expansion).double().mean()) > 0.95


@pytest.mark.parametrize("names", [["expansion", "recession"], ["recession", "expansion"]])
@pytest.mark.parametrize("method", ["lbfgs", "em"])
def test_order_says_which_mode_became_which(truth, names, method):
    y, expansion = truth
    biases = [1.0 if name == "expansion" else -1.0 for name in names]
    found = F.fit(means(STICKY, biases, [1.0, 1.0]), y, method=method)
    assert found.model.emission_bias[0] < found.model.emission_bias[1]
    renamed = [names[i] for i in found.order]
    assert renamed == ["recession", "expansion"]
    post = F.filter(found.model, y)
    assert right(post.mode_probabilities[:, renamed.index("expansion")], expansion)
    swapped = "modes are in rising order of emission_bias: mode 0 was mode 1, mode 1 was mode 0"
    assert (swapped in found.message) == (names[0] == "expansion")
    kept = F.fit(means(STICKY, biases, [1.0, 1.0]), y, method=method, order_by=False)
    assert kept.order == (0, 1)
    probability = F.filter(kept.model, y).mode_probabilities[:, names.index("expansion")]
    assert right(probability, expansion)


def test_names_follow_when_the_search_swaps_the_modes(truth):
    """Starts drawn far from the model lose its labels; the match finds them again."""
    y, expansion = truth
    start = means(STICKY, [0.1, -0.1], [1.0, 1.0])
    for seed in range(4):
        how = {"starts": 3, "spread": 3.0, "generator": seeded(seed), "standard_errors": False}
        kept = F.fit(start, y, order_by=False, throw=False, **how)
        assert right(F.filter(kept.model, y).mode_probabilities[:, 0], expansion)
        low_first = F.fit(start, y, throw=False, **how)
        assert low_first.order == (1, 0)
        reverse = F.fit(start, y, order_by=lambda m: -m.emission_bias[:, 0], throw=False, **how)
        assert reverse.order == (0, 1)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("kind", ["means", "noises", "states", "far"])
def test_every_permutation_is_recognized(order, kind):
    """The fitted model is the start with other numbers and its modes permuted on purpose."""
    chain = [[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]]
    if kind == "states":
        given = parameters(3, 2, 1, 4)
        start = F.SwitchingLinearGaussian(**given)
        fitted = start.replace(dynamics_noise=1.2 * given["dynamics_noise"])
    else:
        centers = {"means": [0.0, 2.0, -3.0], "noises": [0.1, 0.0, 0.05], "far": [9.0, 9.5, 10.0]}
        later = {"means": [0.4, 1.5, -2.0], "noises": [0.0, 0.02, 0.1], "far": [-4.0, 0.0, 4.0]}
        spread = [0.1, 1.0, 9.0] if kind == "noises" else [0.5, 0.5, 0.5]
        start = means(chain, centers[kind], spread)
        fitted = means(chain, later[kind], [1.3 * r for r in spread])
    y = F.sample(fitted, 40, generator=seeded(0)).observations
    y[3:6] = torch.nan
    found = matched(start, fitted.permute(order), y, None, scheme_of("test", "gpb2"))
    assert found == list(order)


def test_what_is_fixed_keeps_the_modes_apart(truth):
    """Modes that a fixed parameter tells apart cannot trade places, wherever their means go."""
    y, _ = truth
    start = means(STICKY, [-2.0, 2.0], [0.25, 1.0])
    found = F.fit(start, y, free=["emission_bias"], order_by="emission_bias", throw=False)
    noise = found.model.emission_noise.flatten().tolist()
    assert [noise[found.order.index(k)] for k in (0, 1)] == [0.25, 1.0]
    chain = means([[0.9, 0.1], [0.0, 1.0]], [1.0, -1.0], [1.0, 1.0], initial=torch.ones(2) / 2)
    left = F.fit(chain, y, order_by=False, throw=False, max_steps=20, standard_errors=False)
    assert left.order == (0, 1)
    assert left.model.transition[1, 0] == 0


@pytest.fixture
def fitted(truth, tmp_path, monkeypatch, capsys):
    """Run ``cumulant filter --fit`` on a file with these names: output, drawings, folder."""

    def run(names, *arguments):
        y, _ = truth
        rows = "".join(f"{t},{v!r}\n" for t, v in enumerate(y[:, 0].tolist()))
        (tmp_path / "s.csv").write_text(f"t,growth\n{rows}")
        biases = [1.0 if name == "expansion" else -1.0 for name in names]
        (tmp_path / "m.toml").write_text(
            f"names = {json.dumps(names)}\ntransition = [[0.9, 0.1], [0.1, 0.9]]\n"
            f"initial = [0.5, 0.5]\nemission_bias = {biases}\nemission_noise = [1.0, 1.0]\n"
        )
        drawn, draw = [], command.picture

        def picture(*args, **kwargs):
            drawn.append(draw(*args, **kwargs))
            return drawn[-1]

        monkeypatch.setattr(command, "picture", picture)
        files = [tmp_path / "s.csv", "-m", tmp_path / "m.toml", "-o", tmp_path / "out", "--fit"]
        told = [str(x) for x in [*files, *arguments]]
        monkeypatch.setattr(sys, "argv", ["cumulant", "filter", *told])
        with pytest.raises(SystemExit) as left:
            main()
        assert not left.value.code
        return capsys.readouterr(), drawn, tmp_path / "out"

    return run


ORDERS = pytest.mark.parametrize(
    "names", [["expansion", "recession"], ["recession", "expansion"]], ids=["falling", "rising"]
)


@ORDERS
def test_csv_and_the_fitted_model(truth, fitted, names):
    _, _, folder = fitted(names, "--no-picture", "--json")
    with open(folder / "filtered.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for given in ("so far", "all"):
        probability = torch.tensor([float(row[f"P(expansion | {given})"]) for row in rows])
        assert right(probability, truth[1])
    model, found = read_model(folder / "fitted.toml")
    assert found.modes == names
    bias = dict(zip(names, model.emission_bias.flatten().tolist(), strict=True))
    assert 1.3 < bias["expansion"] < 1.7
    assert -1.2 < bias["recession"] < -0.8


@ORDERS
def test_json(truth, fitted, names):
    said, _, folder = fitted(names, "--no-picture", "--json")
    report = json.loads(said.out)
    share = float(truth[1].double().mean())
    modes = {mode["name"]: mode for mode in report["modes"]}
    assert abs(modes["expansion"]["share"] - share) < 0.05
    longest = modes["expansion"]["episodes"][0]
    during = slice(longest["first_step"] - 1, longest["first_step"] - 1 + longest["steps"])
    assert float(truth[0][during].mean()) > 1
    assert report["fit"]["converged"]
    assert report["fit"]["model"] == str(folder / "fitted.toml")
    changes = {change["name"]: change for change in report["fit"]["regimes"]}
    assert changes["expansion"]["start"]["emission_bias"] == 1.0
    assert 1.3 < changes["expansion"]["fitted"]["emission_bias"] < 1.7
    assert -1.2 < changes["recession"]["fitted"]["emission_bias"] < -0.8


@ORDERS
def test_the_printed_table(truth, fitted, names):
    said, _, _ = fitted(names, "--no-picture")
    share = 100 * float(truth[1].double().mean())
    (row,) = [line for line in said.out.splitlines() if line.startswith("│ expansion")]
    assert abs(float(row.split("│")[2].strip().rstrip("%")) - share) < 5
    (line,) = [line for line in said.out.splitlines() if line.startswith("  expansion: ")]
    after = float(line.split("emission_bias 1 -> ")[1].split(",")[0])
    assert 1.3 < after < 1.7


@ORDERS
def test_the_picture(truth, fitted, names):
    """The area labelled expansion is tall where growth is high; the shade, where it is low."""
    _, (figure,), _ = fitted(names)
    panel = figure.axes[-1]
    areas = {patch.get_label(): patch.get_data() for patch in panel.patches}
    assert set(areas) == {"expansion", "recession"}
    for name, where in (("expansion", truth[1]), ("recession", ~truth[1])):
        values, _, baseline = areas[name]
        tall = torch.from_numpy(np.asarray(values - baseline)) > 0.5
        assert float((tall == where).double().mean()) > 0.95
    shades = [p for p in figure.axes[0].patches if p.get_label() == "mostly recession"]
    assert len(shades) == 1
    at = int(np.ceil(shades[0].get_x()))
    assert not truth[1][at]


@pytest.mark.parametrize("switching", ["mean", "mean,variance"])
def test_regimes_of_the_command(truth, tmp_path, monkeypatch, capsys, switching):
    """Names of --regimes go in rising order, in table, summary, CSV, file and picture."""
    y, expansion = truth
    rows = "".join(f"{t},{v!r}\n" for t, v in enumerate(y[:, 0].tolist()))
    (tmp_path / "s.csv").write_text(f"t,growth\n{rows}")
    drawn, draw = [], command.picture
    monkeypatch.setattr(command, "picture", lambda *a, **k: drawn.append(draw(*a, **k)))
    given = ["--regimes", "recession,expansion", "--switching", switching, "--forecast", "2"]
    told = [str(tmp_path / "s.csv"), "-o", str(tmp_path / "out"), *given]
    monkeypatch.setattr(sys, "argv", ["cumulant", "filter", *told])
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    said = capsys.readouterr().out
    (row,) = [line for line in said.splitlines() if line.startswith("│ expansion")]
    share = 100 * float(expansion.double().mean())
    assert abs(float(row.split("│")[2].strip().rstrip("%")) - share) < 5
    with open(tmp_path / "out" / "filtered.csv", newline="") as file:
        found = list(csv.DictReader(file))
    probability = torch.tensor([float(r["P(expansion | all)"]) for r in found[: len(y)]])
    assert right(probability, expansion)
    model, names = read_model(tmp_path / "out" / "fitted.toml")
    bias = dict(zip(names.modes, model.emission_bias.flatten().tolist(), strict=True))
    assert bias["recession"] < 0 < bias["expansion"]
    areas = {patch.get_label(): patch.get_data() for patch in drawn[0].axes[-1].patches}
    values, _, baseline = areas["expansion"]
    tall = torch.from_numpy(np.asarray(values - baseline))[: len(y)] > 0.5
    assert float((tall == expansion[: len(tall)]).double().mean()) > 0.95


def test_names_of_a_ready_model_reach_frames_summary_and_path(truth):
    y, expansion = truth
    found = F.fit(F.switching_mean_variance(["recession", "expansion"], switching="mean"), y)
    for frame in (found.posterior.to_pandas(), found.smoothed.to_pandas()):
        (column,) = [c for c in frame.columns if "expansion" in str(c)]
        assert right(torch.tensor(frame[column].to_numpy()), expansion)
    table = found.summary().table
    assert table.loc[("recession", "mean"), "coef"] < 0 < table.loc[("expansion", "mean"), "coef"]
    modes = F.most_likely_path(found.model, y).modes
    assert float(((modes == 1) == expansion).double().mean()) > 0.95
