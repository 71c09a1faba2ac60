"""Series from CSV, models from TOML, and pictures: what is read, and what is refused."""

from __future__ import annotations

import math
import re
import time

import pytest
import torch

import cumulant as cm
from cumulant.core.files import whole_file
from cumulant.filtering.model_files import example_files, read_model, write_model
from cumulant.filtering.picture import picture
from cumulant.filtering.series import read_series
from cumulant.filtering.tables import episodes, summarize
from fuzz import csv_files, driver

MODEL = {
    "transition": "[[0.9, 0.1], [0.2, 0.8]]",
    "initial": "[0.5, 0.5]",
    "dynamics": "1.0",
    "dynamics_noise": "[0.1, 2.0]",
    "emission": "1.0",
    "emission_noise": "[1.0, 9.0]",
    "initial_mean": "0.0",
    "initial_covariance": "100.0",
}


def toml(path, **changes):
    both = {**MODEL, **changes}
    path.write_text("".join(f"{k} = {v}\n" for k, v in both.items() if v is not None))
    return path


def written(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "values", "labels", "names"),
    [
        ("a,b\n1,2\n3,4\n", [[1, 2], [3, 4]], None, ["a", "b"]),
        ("day,a\nMon,1\nTue,2\n", [[1], [2]], ["Mon", "Tue"], ["a"]),
        ("year,a\n1990,1\n1991,2\n", [[1], [2]], ["1990", "1991"], ["a"]),
        (",a\n0,1\n1,2\n", [[1], [2]], ["0", "1"], ["a"]),  # as pandas writes an index
        ("a;b\n1;\n;2\n", [[1, math.nan], [math.nan, 2]], None, ["a", "b"]),
        ("a\tb\n1\t\n.\tNA\n", [[1, math.nan], [math.nan, math.nan]], None, ["a", "b"]),
        ("\ufeffa,b\r\n1, nan\r\n\r\nNaN,2\r\n\r\n", [[1, math.nan], [math.nan, 2]], None, None),
        ("a\n1\n\n3\n\n\n", [[1], [math.nan], [3]], None, ["a"]),  # empty lines of one column
        ('d,a,note\n1/1,1e-3,"x, y"\n2/1,2,\n3/1,,z\n', [[1e-3], [2], [math.nan]], None, ["a"]),
        ("\n\na,b\n1,2\n", [[1, 2]], None, ["a", "b"]),
    ],
)
def test_series_as_people_write_them(tmp_path, text, values, labels, names):
    path = tmp_path / "series.csv"
    path.write_bytes(text.encode())
    found = read_series(path)
    expected = torch.tensor(values, dtype=torch.float64)
    assert torch.equal(found.values.nan_to_num(nan=-99.0), expected.nan_to_num(nan=-99.0))
    if labels is not None:
        assert found.labels == labels
    if names is not None:
        assert found.names == names


def test_columns_are_chosen_by_name_and_order(tmp_path):
    path = written(tmp_path / "series.csv", "t,a,b,c\n0,1,2,3\n1,4,5,6\n")
    found = read_series(path, ["c", "a"])
    assert found.values.tolist() == [[3, 1], [6, 4]]
    assert (found.labels, found.names) == (["0", "1"], ["c", "a"])
    assert read_series(path, ["t"]).labels is None


@pytest.mark.parametrize(
    ("text", "columns", "said"),
    [
        (None, None, "there is no file"),
        ("", None, "is empty"),
        ("a,b\n", None, "no rows"),
        ("a,b\n1,2\n3,4\n5,six\n", None, r"line 4, column 'b': 'six' is not a finite number"),
        ("a,b\n1,2\n3,inf\n", None, "line 3, column 'b': 'inf'"),
        ("a,b\n1,2\n3,1_0\n", None, "'1_0'"),
        ("day,name\nMon,x\nTue,y\n", None, "no column holds numbers; the columns are day, name"),
        ("a,b\n1,2\n3,4,5\n", None, "line 3 has 3 cells, but the header has 2"),
        ("a,b\n1,2\n3\n", None, "line 3 has 1 cell, but"),
        ("a,b\n1,2\n", ["a", "x"], "no column 'x'; its columns are a, b"),
        ("a,b\n1,2\n", ["a", "a"], "each column once"),
        ("a,a\n1,2\n", None, "two columns are called 'a'"),
        ("1,2\n3,4\n", None, "first line must name the columns"),
        ('a,b\n1,"2\n', None, "not a CSV file"),
    ],
)
def test_series_that_cannot_be_read(tmp_path, text, columns, said):
    path = tmp_path / "series.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(cm.InputError, match=said) as error:
        read_series(path, columns)
    assert "\n" not in str(error.value)
    assert "series.csv" in str(error.value)


def test_files_that_are_no_text(tmp_path):
    path = tmp_path / "series.csv"
    path.write_bytes(b"\xff\xfe\x00\x01")
    for read in (read_series, read_model):
        with pytest.raises(cm.InputError, match="not a text file in UTF-8"):
            read(path)
        with pytest.raises(cm.InputError, match="cannot read"):
            read(tmp_path)


def test_numbers_stand_for_matrices(tmp_path):
    short, names = read_model(toml(tmp_path / "a.toml", names='["calm", "wild"]', states='["x"]'))
    full, default = read_model(
        toml(
            tmp_path / "b.toml",
            dynamics="[[1.0]]",
            dynamics_noise="[[[0.1]], [[2.0]]]",
            emission="[[[1.0]], [[1]]]",
            emission_noise="[[[1.0]], [[9.0]]]",
            initial_mean="[0.0]",
            initial_covariance="[[100]]",
        )
    )
    assert names == (["calm", "wild"], ["x"], {})
    assert default == (["mode 1", "mode 2"], ["state 1"], {})
    y = torch.randn(9, 1, dtype=torch.float64)
    one, two = (cm.filtering.filter(m, y).log_likelihood for m in (short, full))
    assert short.dtype == torch.float64
    assert torch.equal(one, two)


def test_biases_for_each_mode_and_matrices(tmp_path):
    model, _ = read_model(toml(tmp_path / "a.toml", emission_bias="[1, 2]", initial_mean="[3, 4]"))
    assert model.emission_bias.tolist() == [[1], [2]]
    assert model.initial_mean.tolist() == [[3], [4]]
    model, _ = read_model(
        toml(
            tmp_path / "b.toml",
            dynamics="[[1, 1], [0, 1]]",
            dynamics_noise="[[[1, 0], [0, 1]], [[2, 0], [0, 2]]]",
            emission="[[1, 0]]",
            initial_mean="[0, 0]",
            initial_covariance="[[1, 0], [0, 1]]",
        )
    )
    assert (model.modes, model.state_size, model.observation_size) == (2, 2, 1)
    assert model.emission_noise.shape == (2, 1, 1)


def test_one_mode_and_parameters_that_change_with_time(tmp_path):
    one = {"transition": "1", "initial": "1", "dynamics_noise": "2", "emission_noise": "[3]"}
    model, _ = read_model(toml(tmp_path / "a.toml", **one))
    assert (model.modes, model.emission_noise.tolist()) == (1, [[[3]]])
    model, _ = read_model(
        toml(tmp_path / "b.toml", emission_noise="[[[[1]], [[2]]], [[[3]], [[4]]]]")
    )
    assert model.steps == 2


def test_a_model_without_a_state(tmp_path):
    state = ("dynamics", "dynamics_noise", "emission", "initial_mean", "initial_covariance")
    gone = dict.fromkeys(state)
    model, names = read_model(toml(tmp_path / "a.toml", emission_bias="[-1, 1]", **gone))
    assert (model.state_size, names.states) == (0, [])
    y = torch.tensor([[-0.5]], dtype=torch.float64)
    # at the first step the modes are (0.5, 0.5) moved once: 0.55 and 0.45
    normal = torch.distributions.Normal(torch.tensor([-1.0, 1.0]), torch.tensor([1.0, 3.0]))
    expected = (torch.tensor([0.55, 0.45]) * normal.log_prob(y).exp()).sum().log()
    found = cm.filtering.filter(model, y).log_likelihood
    assert abs(float(found) - float(expected)) < 1e-6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"noise": "1"}, "no key is called 'noise'; the keys are names, states, units, transition"),
        ({"emission": None}, "emission is missing"),
        ({"emission": None, "dynamics": None}, "dynamics, emission are missing"),
        ({"dynamics": "= 3"}, r"not valid TOML: .*line 3"),
        ({"transition": "[[0.9, 0.2], [0.2, 0.8]]"}, "rows of transition must sum to one; row 0"),
        ({"transition": "[0.9, 0.1]"}, "transition must be nested as 2 x 2; it is 2"),
        ({"initial": "[0.5, 0.4]"}, "sum to one"),
        (
            {"dynamics_noise": "[0.1, 2.0, 3.0]"},
            r"dynamics_noise must be nested as 1 x 1 for all 2",
        ),
        ({"dynamics_noise": "[-0.1, 2.0]"}, "semi-definite"),
        ({"dynamics_noise": "[[0.1], [2.0]]"}, r"must have shape \(2, 1, 1\)"),
        (
            {"dynamics": "[[1, 0], [0, 1]]"},
            "dynamics_noise must be nested as 2 x 2 for all 2 modes",
        ),
        ({"dynamics_noise": "[[0.1], [2.0, 3.0]]"}, "its parts differ in length"),
        ({"dynamics_noise": "[0.1, [2.0]]"}, "its parts differ in length"),
        ({"dynamics_noise": '["a", 2.0]'}, "must hold numbers only, not 'a'"),
        ({"dynamics_noise": "true"}, "must hold numbers only"),
        ({"dynamics_noise": "[nan, 1.0]"}, "NaN"),
        ({"names": '["a"]'}, "names must be 2 names"),
        ({"names": '["a", "a"]'}, "must differ"),
        ({"states": "[1]"}, "states must be 1 name"),
    ],
)
def test_models_that_cannot_be_read(tmp_path, changes, said):
    path = toml(tmp_path / "model.toml", **changes)
    with pytest.raises(cm.InputError, match=said) as error:
        read_model(path)
    assert "\n" not in str(error.value)
    assert "model.toml" in str(error.value)


def test_episodes_are_runs_of_the_most_probable_mode():
    p = torch.tensor([0.9, 0.8, 0.1, 0.6, 0.7, 0.9])
    first, second = episodes(torch.stack([p, 1 - p], -1))
    assert first == [(0, 1), (3, 5)]
    assert second == [(2, 2)]


def test_summary_of_a_chain(tmp_path):
    model, names = read_model(toml(tmp_path / "a.toml", transition="[[0.75, 0.25], [0, 1]]"))
    y = torch.randn(20, 1, dtype=torch.float64)
    smoothed = cm.filtering.smooth(model, cm.filtering.filter(model, y))
    first, second = summarize(model, names.modes, smoothed)
    assert (first.duration, second.duration) == (4.0, math.inf)
    assert abs(first.share + second.share - 1) < 1e-12
    assert sum(e.steps for mode in (first, second) for e in mode.episodes) == 20
    labels = [str(k) for k in range(20)]
    assert second.as_dict(labels)["expected_duration"] is None


def test_files_are_whole_or_not_there(tmp_path):
    def fail():
        with whole_file(tmp_path / "a.txt") as part:
            part.write_text("half")
            raise KeyboardInterrupt

    written(tmp_path / "a.txt", "before")
    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "before"


@pytest.mark.parametrize("steps", [1, 2, 700])
def test_pictures_of_any_size(tmp_path, steps):
    model, names = read_model(toml(tmp_path / "a.toml", names='["$calm", "wild"]'))
    y = torch.randn(steps, 1, dtype=torch.float64)
    post = cm.filtering.filter(model, y)
    smoothed = cm.filtering.smooth(model, post)
    future = cm.filtering.forecast(post, 3)
    figure = picture(post, smoothed, tmp_path / "a.png", names=names, forecast=future)
    assert len(figure.axes) == 3
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert len(picture(post, names=["calm", "wild"]).axes) == 3


@pytest.mark.parametrize(
    ("labels", "ticks"),
    [
        ([f"{1990 + k // 4}Q{k % 4 + 1}" for k in range(40)], [str(y) for y in range(1991, 2000)]),
        ([f"2020-01-{k + 1:02d}" for k in range(20)], ["2020-01-01", "2020-01-20"]),
        (["a"] * 20, ["a", "a"]),
    ],
)
def test_labels_of_the_axis(tmp_path, labels, ticks):
    model, _ = read_model(toml(tmp_path / "a.toml"))
    post = cm.filtering.filter(model, torch.randn(len(labels), 1, dtype=torch.float64))
    shown = [x.get_text() for x in picture(post, labels=labels).axes[-1].get_xticklabels()]
    assert [shown[0], shown[-1]] == [ticks[0], ticks[-1]]
    if len(ticks) > 2:
        assert shown == ticks


def test_labels_that_are_numbers_are_the_axis(tmp_path):
    model, _ = read_model(toml(tmp_path / "a.toml"))
    post = cm.filtering.filter(model, torch.randn(3, 1, dtype=torch.float64))
    low, high = picture(post, labels=["0.5", "1.0", "1.5"]).axes[-1].get_xlim()
    assert (low, high) == (0.25, 1.75)


def test_pictures_that_cannot_be(tmp_path):
    model, _ = read_model(toml(tmp_path / "a.toml"))
    post = cm.filtering.filter(model, torch.randn(2, 3, 1, dtype=torch.float64))
    with pytest.raises(cm.InputError, match="draws one series"):
        picture(post)
    post = cm.filtering.filter(model, torch.randn(3, 1, dtype=torch.float64))
    with pytest.raises(cm.InputError, match="3 labels and 1 columns"):
        picture(post, labels=["a"])
    with pytest.raises(cm.InputError, match="needs names of 2 modes"):
        picture(post, names=["a"])
    with pytest.raises(cm.InputError, match="suffixes"):
        picture(post, path=tmp_path / "a.xyz")


# --- CSV as it comes


@pytest.mark.parametrize(
    ("text", "values", "names"),
    [
        ("a;b\n1,5;2\n-,5;3,25e2\n7;\n", [[1.5, 2], [-0.5, 325], [7, math.nan]], ["a", "b"]),
        ("a\tb\n1,5\t2\n", [[1.5, 2]], ["a", "b"]),
        ("date;a\n01.02.2020;1,234\n02.02.2020;0,5\n", [[1.234], [0.5]], ["a"]),
        ("t;a\n0.5;1,5\n1.0;2,5\n", [[1.5], [2.5]], ["a"]),  # a label has its own way
        ("day;GDP, real;b\n1;2.5;3\n", [[2.5, 3]], ["GDP, real", "b"]),
        ('"a, b";"c"\n1;2\n', [[1, 2]], ["a, b", "c"]),
        ('a,b\n"1","2.5"\n', [[1, 2.5]], ["a", "b"]),
        ('"a\nb",c\n1,2\n', [[1, 2]], ["a\nb", "c"]),
        ("a,b\n1,2\n,\n", [[1, 2], [math.nan, math.nan]], ["a", "b"]),
        ("a,b\n1,2\n,\n,\n\n\n", [[1, 2]] + 2 * [[math.nan] * 2], ["a", "b"]),
        ("a\tb\n1\t2\n\t\n", [[1, 2], [math.nan, math.nan]], ["a", "b"]),
        ("a,b\n1,2\n \n3,4\n\t\n", [[1, 2], [3, 4]], ["a", "b"]),
        ('a\n1\n""\n', [[1], [math.nan]], ["a"]),
        ('a\n1\n""\n\n \n', [[1], [math.nan]], ["a"]),
        ("a\n1\n \n3\n", [[1], [math.nan], [3]], ["a"]),
        ("a,b,\n1,2,\n3,4,\n", [[1, 2], [3, 4]], ["a", "b"]),  # a separator at every end
        ("a,,b\n1,,2\n3,5,4\n", [[1, math.nan, 2], [3, 5, 4]], ["a", "column 2", "b"]),
        ("a,b\r1,2\r3,4\r", [[1, 2], [3, 4]], ["a", "b"]),
        ('\ufeff"a",b\r\n1,2\r\n', [[1, 2]], ["a", "b"]),
        ("a,when,b\n1,2020-01-05,2\n3,5/1/2020,4\n", [[1, 2], [3, 4]], ["a", "b"]),
        ("a,b\n1,2\x0c\n", [[1, 2]], ["a", "b"]),
    ],
)
def test_series_that_programs_write(tmp_path, text, values, names):
    path = tmp_path / "series.csv"
    path.write_bytes(text.encode())
    found = read_series(path)
    expected = torch.tensor(values, dtype=torch.float64)
    assert found.names == names
    assert torch.equal(found.values.nan_to_num(nan=-99.0), expected.nan_to_num(nan=-99.0))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a;b\n1,5;2.5\n", r"holds '1,5' and '2\.5': write all numbers with a decimal point"),
        ("a;b\n1,234;2\n5,678;3\n", r"'1,234' may be 1\.234 or 1234"),
        ('a,b\n"1,234",2\n', "line 2, column 'a': '1,234' is not .* without thousands separators"),
        ('a,b\n"1,5",2\n"2,5",3\n', "line 2, column 'a': '1,5' is not a finite number"),
        ("a;b\n1.234,5;2\n", r"'1\.234,5' is not a finite number; write numbers with a decimal"),
        ("a;b\n1.234.567;2\n", r"'1\.234\.567' is not a finite number"),
        ("a,b\n1 234,2\n2 345,3\n", "'1 234' is not a finite number"),
        ("a,b\n1'234,2\n", '"1\'234" is not a finite number'),
        ("a,b\n\u2212 5,2\n\u22125,2\n", "is not a finite number"),
        ("a;b, c\n1;2,5\n", "the header can be cut at ',' and at ';'; put quotes around"),
        ("a\n1,5\n", "line 2 has 2 cells, but the header has 1"),
        ("a,b\n1,2\n\0\n", "NUL characters"),
        ("a,b\n1,2\n".encode("utf-16-le"), "NUL characters"),
        ("a,b\n1,2\n".encode("utf-16"), "not a text file in UTF-8"),
        ("größe,b\n1,2\n".encode("latin-1"), "not a text file in UTF-8"),
        ("a,b\n" + "9" * 200_000 + ",2\n", "not a CSV file: line 2: field larger than"),
        ('a,b\n1,2\n"3"4,5\n', "not a CSV file: line 3"),
        ("a,b,a\n1,2,3\n", "two columns are called 'a'; rename one"),
        (",,\n,,\n", "holds empty cells only"),
    ],
)
def test_series_that_could_be_read_in_two_ways_or_none(tmp_path, content, said):
    path = tmp_path / "series.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(cm.InputError, match=said) as error:
        read_series(path)
    assert "\n" not in str(error.value)
    assert "series.csv" in str(error.value)


def test_many_columns_take_linear_time_and_short_errors(tmp_path):
    def seconds(width):
        head = ",".join(f"x{k}" for k in range(width))
        path = written(tmp_path / "wide.csv", f"{head}\n{','.join(['1.5'] * width)}\n")
        began = time.process_time()
        found = read_series(path, [f"x{k}" for k in range(width)])
        spent = time.process_time() - began
        assert found.values.shape == (1, width)
        with pytest.raises(cm.InputError, match=f"x0, x1, .* and {width - 12} more") as error:
            read_series(path, ["none"])
        assert len(str(error.value)) < 300
        return spent

    few, many = (min(seconds(width) for _ in range(3)) for width in (4000, 40_000))
    assert many < 40 * few  # comparing every name with all before it: 100 times


def test_random_files_as_pandas_reads_them():
    assert driver.run(csv_files.check, "csv_files", rounds=250, seed=0) == []


def test_units_of_a_model_file_stand_at_the_axes(tmp_path):
    series, parameters = example_files()
    model, names = read_model(parameters)
    assert dict(names.units) == {"inflation": "percent per year", "trend": "percent per year"}
    again = read_model(write_model(tmp_path / "m.toml", model, names))
    assert again.names == names
    values = read_series(series).values
    figure = cm.filtering.picture(
        cm.filtering.filter(model, values), names=names, columns=["inflation"]
    )
    assert [a.get_ylabel() for a in figure.axes] == ["percent per year", "percent per year", ""]
    text = parameters.read_text()
    (tmp_path / "bad.toml").write_text(re.sub("(?m)^units = .*", "units = 3", text))
    with pytest.raises(cm.InputError, match="units must be a table of texts"):
        read_model(tmp_path / "bad.toml")
