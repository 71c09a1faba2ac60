"""`cumulant filter --regimes`: no model file, the table of a fit, and files as people have them."""

from __future__ import annotations

import csv
import json
import sys

import numpy as np
import pytest
import torch
from statsmodels.datasets import macrodata
from statsmodels.tsa.api import MarkovAutoregression, MarkovRegression

import cumulant as cm
from cumulant.cli import main
from cumulant.filtering.dates import calendar_of
from cumulant.filtering.model_files import read_model
from cumulant.filtering.series import read_series


@pytest.fixture
def cumulant(monkeypatch, capsys):
    """Run the command in this process: exit code, standard output, standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["cumulant", "filter", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        return left.value.code or 0, said.out, said.err

    return run


def growth():
    data = macrodata.load_pandas().data
    values = 100 * np.diff(np.log(data["realgdp"].to_numpy()))
    years, quarters = data["year"].to_numpy(), data["quarter"].to_numpy()
    labels = [f"{y:.0f}Q{q:.0f}" for y, q in zip(years, quarters, strict=True)]
    return values, labels[1:]


@pytest.fixture
def file(tmp_path):
    values, labels = growth()
    rows = "".join(f"{d},{x!r}\n" for d, x in zip(labels, values.tolist(), strict=True))
    path = tmp_path / "growth.csv"
    path.write_text(f"quarter,growth\n{rows}")
    return path


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_regimes_are_those_of_statsmodels(file, cumulant, tmp_path):
    code, out, _ = cumulant(
        *(file, "--regimes", "recession,expansion", "--forecast", 8, "--json", "--no-picture"),
        *("-o", tmp_path / "out"),
    )
    assert code == 0
    told = json.loads(out)
    y, _ = growth()
    np.random.seed(0)
    theirs = MarkovRegression(y, 2).fit(search_reps=5)
    fit = told["fit"]
    assert fit["log_likelihood"] == pytest.approx(theirs.llf, abs=1e-3)
    for name in ("aic", "bic", "hqic"):
        assert fit[name] == pytest.approx(getattr(theirs, name), abs=1e-3)
    found = {(x["regime"], x["parameter"]): x for x in fit["estimates"]}
    low, high = np.sort(theirs.params[2:4])
    assert found["recession", "mean"]["coefficient"] == pytest.approx(low, abs=1e-3)
    assert found["expansion", "mean"]["coefficient"] == pytest.approx(high, abs=1e-3)
    assert fit["about"] == "a mean plus noise, where mean switches between 2 regimes"
    rows = rows_of(tmp_path / "out" / "filtered.csv")
    assert [r["label"] for r in rows[-8:]][:2] == ["2009Q4", "2010Q1"]
    smoothed = np.array([float(r["P(recession | all)"]) for r in rows[:-8]])
    at = int(np.argmin(theirs.params[2:4]))
    assert smoothed == pytest.approx(theirs.smoothed_marginal_probabilities[:, at], abs=5e-3)
    model, names = read_model(tmp_path / "out" / "fitted.toml")
    assert names.modes == ["recession", "expansion"]
    assert model.emission_bias[0] < model.emission_bias[1]


def test_the_sentence_and_the_table_are_printed(file, cumulant, tmp_path):
    code, out, _ = cumulant(
        *(file, "--regimes", 2, "--switching", "mean,variance", "--starts", 1),
        *("--no-picture", "-o", tmp_path / "out"),
    )
    assert code == 0
    plain = " ".join(out.split())
    assert (
        "Fitted by maximum likelihood: a mean plus noise, where mean and variance switch between 2 "
        "regimes. The series is growth, 1959Q2 to 2009Q3, 202 observations." in plain
    )
    for word in ("coef std err z P>|z|", "HQIC", "duration", "to regime 1", "Sample: 1959Q2"):
        assert word in plain


def test_an_autoregression_is_that_of_statsmodels(file, cumulant, tmp_path):
    values, labels = growth()
    rows = zip(labels[:70], values[:70].tolist(), strict=True)
    file.write_text("quarter,growth\n" + "".join(f"{d},{x!r}\n" for d, x in rows))
    code, out, _ = cumulant(
        *(file, "--regimes", 2, "--ar", 1, "--starts", 1, "--json", "--no-picture"),
        *("-o", tmp_path / "out", "--forecast", 2),
    )
    assert code == 0
    fit = json.loads(out)["fit"]
    found = {(x["regime"], x["parameter"]): x["coefficient"] for x in fit["estimates"]}
    theirs = MarkovAutoregression(values[:70], 2, 1, switching_ar=False)
    chain = fit["transition"]
    at = [
        *(chain[0][0], chain[1][0], found["regime 1", "mean"], found["regime 2", "mean"]),
        *(found[None, "variance"], found[None, "ar.L1"]),
    ]
    assert fit["log_likelihood"] == pytest.approx(theirs.loglike(at), abs=1e-4)
    assert np.abs(theirs.score(np.array(at))).max() < 0.05  # at their maximum, too
    assert fit["converged"]


def test_semicolons_decimal_commas_and_dates_of_all_kinds(file, cumulant, tmp_path):
    values, _ = growth()
    options = ("--regimes", 2, "--starts", 1, "--json", "--no-picture", "-o", tmp_path / "out")
    _, out, _ = cumulant(file, *options)
    expected = json.loads(out)["log_likelihood"]
    months = [f"31.{3 * k % 12 + 1:02d}.{1959 + k // 4}" for k in range(len(values))]
    months = [x.replace("31.04", "30.04") for x in months]
    cells = [repr(x).replace(".", ",") for x in values.tolist()]
    lines = [f"{d};{x}" for d, x in zip(months, cells, strict=True)]
    file.write_text("Datum;Wachstum\n" + "\n".join(lines))
    code, out, err = cumulant(file, *options, "--forecast", 2)
    assert code == 0
    assert json.loads(out)["log_likelihood"] == pytest.approx(expected, abs=1e-9)
    assert "evenly" not in err
    rows = rows_of(tmp_path / "out" / "filtered.csv")
    assert [r["label"] for r in rows[-2:]] == ["31.07.2009", "31.10.2009"]


@pytest.mark.parametrize(
    ("labels", "ahead"),
    [
        (["2001Q1", "2001Q2", "2001Q3"], ["2001Q4", "2002Q1"]),
        (["2001", "2002", "2003"], ["2004", "2005"]),
        (["1950", "1960", "1970"], ["1980", "1990"]),
        (["2001-10", "2001-11", "2001-12"], ["2002-01", "2002-02"]),
        (["11/2001", "12/2001", "01/2002"], ["02/2002", "03/2002"]),
        (["31.01.2001", "28.02.2001", "31.03.2001"], ["30.04.2001", "31.05.2001"]),
        (["01/31/2001", "02/28/2001", "03/31/2001"], ["04/30/2001", "05/31/2001"]),
        (["20010101", "20010108", "20010115"], ["20010122", "20010129"]),
        (["2001-01-30", "2001-01-31", "2001-02-01"], ["2001-02-02", "2001-02-03"]),
        (["2001-01-15", "2001-02-15", "2001-03-15"], ["2001-04-15", "2001-05-15"]),
    ],
)
def test_dates_continue(labels, ahead):
    found = calendar_of(labels)
    assert found.backward is None
    assert found.ahead(2) == ahead


@pytest.mark.parametrize(
    "labels",
    [
        ["01/02/2001", "01/03/2001", "01/04/2001"],  # days in January, or months
        ["week 1", "week 2", "week 3"],
        ["2001-13", "2001-14", "2001-15"],
        ["1", "2", "3"],
    ],
)
def test_what_could_be_read_in_two_ways_is_not_guessed(labels):
    assert calendar_of(labels) is None


def test_uneven_dates_have_no_continuation_and_are_told(file, cumulant, tmp_path):
    assert calendar_of(["2001-01", "2001-02", "2001-05"]).ahead is None
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:50] + lines[60:]))
    options = ("--regimes", 2, "--starts", 1, "--json", "--no-picture", "-o", tmp_path / "out")
    code, _, err = cumulant(file, *options, "--forecast", 2)
    assert code == 0
    assert "the dates are not evenly spaced; each row counts as one step" in err
    assert [r["label"] for r in rows_of(tmp_path / "out" / "filtered.csv")[-2:]] == ["+1", "+2"]


def test_columns_are_never_dropped_in_silence(file, cumulant, tmp_path):
    lines = file.read_text().splitlines()
    noted = [
        f"{lines[0]},note",
        *(f"{x},{'war' if k % 2 else ''}" for k, x in enumerate(lines[1:])),
    ]
    file.write_text("\n".join(noted))
    options = ("--regimes", 2, "--starts", 1, "--json", "--no-picture", "-o", tmp_path / "out")
    code, _, err = cumulant(file, *options)
    assert code == 0
    assert "columns of text are left out: 'note'" in err
    assert read_series(file).skipped == ("note",)
    for cell in ("5 %", "$1,200", "€5", "12€", "(3)", "1.234,5"):
        quoted = [f"{lines[0]},share", *(f'{x},"{cell}"' for x in lines[1:])]
        file.write_text("\n".join(quoted))
        code, _, err = cumulant(file, *options)
        assert code == 2
        assert f"column 'share': {cell!r} is not a finite number" in err
        assert "\n" not in err.strip()


@pytest.mark.parametrize(
    ("change", "arguments", "said"),
    [
        (lambda x: [x[0], *x[:0:-1]], [], "dates must run forward, but 2009Q2 comes after 2009Q3"),
        (lambda x: [*x[:9], x[5], *x[9:]], [], "comes after"),
        (None, ["--switching", "slope"], "--switching must name some of mean, variance, not"),
        (None, ["--switching", "coefficients"], "--switching must name some of mean, variance"),
        (None, ["--ar", "-1"], "--ar must be from 0 to 12"),
        (lambda x: x[:5], [], "4 observations cannot tell 5 parameters; ask for fewer regimes"),
        (
            lambda x: [x[0], *(f"{r.split(',')[0]},5" for r in x[1:])],
            [],
            "every observation is 5, so there are no regimes to find",
        ),
        (None, ["--starts", "0"], "--starts must be from 1 to 1000"),
        (None, ["--fit"], "--regimes makes and fits its own model"),
        (None, ["--model", "m.toml"], "--regimes makes and fits its own model"),
        (lambda x: [f"{x[0]},more", *(f"{r},1" for r in x[1:])], [], "Choose with --columns"),
    ],
)
def test_bad_input_is_one_clear_line(file, cumulant, tmp_path, change, arguments, said):
    if change is not None:
        file.write_text("\n".join(change(file.read_text().splitlines())))
    code, out, err = cumulant(file, "--regimes", 2, "-o", tmp_path / "out", *arguments)
    assert code == 2
    assert said in " ".join(err.split())
    assert out == ""


@pytest.mark.parametrize("regimes", ["0", "10", "a,a", "a,", "low", "1.5"])
def test_bad_regimes(file, cumulant, regimes):
    code, _, err = cumulant(file, "--regimes", regimes)
    assert code == 2
    assert "--regimes must be" in err


def test_options_of_regimes_alone(file, cumulant):
    code, _, err = cumulant(file, "--ar", 1)
    assert code == 2
    assert "go with --regimes" in err
    code, _, err = cumulant(file)
    assert code == 2
    assert "--regimes (how many) or --model" in err


def test_one_regime_and_missing_cells(tmp_path, cumulant):
    y = torch.randn(40, generator=torch.Generator().manual_seed(0)).tolist()
    cells = ["" if k in (3, 17) else repr(x) for k, x in enumerate(y)]
    path = tmp_path / "s.csv"
    path.write_text("t,x\n" + "".join(f"{k},{x}\n" for k, x in enumerate(cells)))
    code, out, _ = cumulant(path, "--regimes", 1, "--json", "--no-picture", "-o", tmp_path / "o")
    assert code == 0
    there = np.array([x for k, x in enumerate(y) if k not in (3, 17)])
    fit = json.loads(out)["fit"]
    found = {x["parameter"]: x for x in fit["estimates"]}
    assert found["mean"]["coefficient"] == pytest.approx(there.mean(), abs=1e-4)
    assert found["variance"]["coefficient"] == pytest.approx(there.var(), rel=1e-4)
    assert found["mean"]["standard_error"] == pytest.approx(there.std() / np.sqrt(38), rel=1e-3)
    assert fit["transition"] == [[1.0]]
    assert isinstance(cm.filtering.read_series(path).skipped, tuple)


def test_the_command_says_where_the_forecast_is(file, cumulant, tmp_path):
    folder = tmp_path / "out"
    options = ("--regimes", 1, "--starts", 1, "--no-picture", "-o", folder, "--forecast", 3)
    code, out, _ = cumulant(file, *options)
    assert code == 0
    assert "the forecast is the last 3 rows of" in out
    assert [r["forecast"] for r in rows_of(folder / "filtered.csv")[-4:]] == ["0", "1", "1", "1"]
