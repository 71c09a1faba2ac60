"""The command as a person runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import cumulant as cm
from command import cumulant as run
from cumulant.cli import main


def test_help_and_version():
    command = [sys.executable, "-m", "cumulant", "--version"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert process.stdout.strip() == f"cumulant {cm.__version__}"
    assert "bench" in run("--help").stdout
    for bare in (run(), run("bench")):
        assert bare.returncode == 0
        assert "Usage" in bare.stdout


def test_bench_as_json_and_as_a_page(tmp_path):
    page = tmp_path / "page.md"
    out = run("bench", "calculus", "--quick", "--rounds", "1", "--json", "-o", str(page))
    assert out.returncode == 0, out.stderr
    report = json.loads(out.stdout)
    quantities = {row["quantity"] for row in report["rows"]}
    assert {"attention forward", "JVP, all tangents", "double backward alone"} <= quantities
    assert all(row["ratio"] > 0 for row in report["rows"])
    assert "| (1, 8, 1024, 64) | JVP, all tangents |" in page.read_text()


@pytest.mark.parametrize("name", ["memory", "contrastive", "vocabulary"])
def test_bench_of_stores(name, tmp_path):
    page = tmp_path / "page.md"
    out = run("bench", name, "--quick", "--rounds", "1", "--json", "-o", str(page))
    assert out.returncode == 0
    rows = json.loads(out.stdout)["rows"]
    assert rows
    assert all(row["ratio"] > 0 for row in rows)
    assert rows[0]["quantity"] in page.read_text()


def test_bench_measures(tmp_path):
    page = tmp_path / "page.md"
    out = run("bench", "measures", "--quick", "--rounds", "1", "--json", "-o", str(page))
    assert out.returncode == 0, out.stderr
    rows = json.loads(out.stdout)["rows"]
    assert {row["quantity"] for row in rows} == {
        "empirical mean",
        "mixture G",
        "mixture mean",
        "empirical link",
    }
    assert "| 128 x 4000 x 16 | empirical link |" in page.read_text()


def test_bad_input_is_one_line_and_exit_2(tmp_path):
    for arguments in (
        ["bench", "calculus", "--rounds", "0"],
        ["bench", "calculus", "--threads", "0"],
        ["bench", "calculus", "-o", str(tmp_path / "missing" / "page.md")],
        ["bench", "calculus", "-o", str(tmp_path)],
    ):
        out = run(*arguments)
        assert out.returncode == 2
        assert len(out.stderr.strip().splitlines()) == 1
        assert out.stderr.startswith("cumulant: ")
    assert "cumulant bench --help" in refused("bench", "nonsense")
    assert "leave out --threads 2" in refused("bench", "front", "--threads", "2")
    assert "there is no command 'filtr'; there are report," in refused("filtr")
    assert "--rounds must be a valid integer" in refused("bench", "front", "--rounds", "x")
    assert "--forecast" in refused("filter", "--forcast", "3")


def refused(*arguments):
    """What a command says as it refuses its arguments: one line."""
    out = run(*arguments)
    assert out.returncode == 2, arguments
    assert out.stdout == ""
    (line,) = out.stderr.splitlines()
    assert line.startswith("cumulant: ")
    return line


def test_bench_distributed(tmp_path):
    page = tmp_path / "page.md"
    out = run("bench", "distributed", "--quick", "--rounds", "1", "--json", "-o", str(page))
    assert out.returncode == 0, out.stderr
    rows = json.loads(out.stdout)["rows"]
    counted = [row for row in rows if row["quantity"].endswith("bytes counted")]
    assert len(counted) == 6
    assert all(row["ratio"] == pytest.approx(1, rel=1e-12) for row in counted)
    assert all(row["ratio"] > 0 for row in rows)
    assert "| ring, training step, bytes counted |" in page.read_text()


def test_bench_dynamics():
    out = run("bench", "dynamics", "--quick", "--rounds", "1", "--json")
    assert out.returncode == 0, out.stderr
    rows = json.loads(out.stdout)["rows"]
    assert {row["quantity"] for row in rows} == {
        "step",
        "step onto the sphere",
        "one batched call",
        "Anderson",
    }
    assert all(row["met"] for row in rows if row["quantity"] == "Anderson")


def test_simulate_writes_data_and_pictures(tmp_path):
    files = [tmp_path / name for name in ("run.npz", "a.png", "a.gif")]
    out = run(
        *("simulate", "sphere", "--points", "30", "--beta", "9", "--time", "5", "--steps", "20"),
        *("-o", str(files[0]), "-p", str(files[1]), "-a", str(files[2])),
    )
    assert out.returncode == 0, out.stderr
    assert all(path.stat().st_size > 1000 for path in files)
    assert "participation ratio" in out.stdout
    trajectory = cm.dynamics.Trajectory.load(files[0])
    assert trajectory.states.shape == (21, 30, 3)
    assert trajectory.times[-1] == 5.0  # in double precision
    # The last column counts clusters: chains of points with gaps up to 0.1.
    near = torch.cdist(trajectory.final, trajectory.final) <= 0.1
    linked = torch.linalg.matrix_power(near.double(), 30) > 0
    last = [line for line in out.stdout.splitlines() if line.startswith("│")][-1]
    assert int(last.split("│")[-2]) == len({tuple(row) for row in linked.int().tolist()})
    longer = tmp_path / "longer.npz"
    how = ("--time", "2", "--steps", "2", "--json", "-o", str(longer))
    again = run("simulate", str(files[0]), *how)
    report = json.loads(again.stdout)
    assert report["times"][:21] == trajectory.times.tolist()
    assert report["blow_up_time"] is None
    joined = cm.dynamics.Trajectory.load(longer)
    assert joined.settings["beta"] == 9.0  # as the first part was made
    expected = cm.dynamics.flow(
        trajectory.final, [1.0, 2.0], beta=9.0, contraction=cm.dynamics.Sphere()
    )
    assert (joined.final - expected.final).abs().max() < 1e-6


def test_simulate_names_the_option_or_the_file_at_fault(tmp_path):
    assert "--points must be at least 1, not 0" in refused("simulate", "--points", "0")
    assert "--dimension must be at least 1" in refused("simulate", "--dimension", "-3")
    assert "is a folder" in refused("simulate", tmp_path)
    (tmp_path / "a.npy").write_text("x")
    said = refused("simulate", tmp_path / "a.npy")
    assert "numpy saved" in said
    assert "allow_pickle" not in said  # numpy's advice, which nobody should follow


def test_simulate_your_own_points(tmp_path):
    table = tmp_path / "points.csv"
    table.write_text("x,y\n1,0\n0,1\n-1,0\n")
    out = run(
        "simulate", str(table), "--contraction", "none", "--beta", "0", "--steps", "1", "--json"
    )
    report = json.loads(out.stdout)
    # uniform attention moves every point by 0.1 times the mean (0, 1/3)
    moved = [(1, 1 / 30), (0, 1 + 1 / 30), (-1, 1 / 30)]
    expected = (sum(x * x + y * y for x, y in moved) / 3) ** 0.5
    assert abs(report["observables"]["norm"][-1] - expected) < 1e-12


def test_tables_as_other_programs_write_them(tmp_path):
    from cumulant.cli.simulate_run import read_points

    path = tmp_path / "points.csv"
    for text, rows in (
        ("\ufeff1,2\n3,4\n5,6\n", 3),  # with a byte order mark
        ("x,y\n\n1,2\n3,4\n", 2),
        ("# a comment\n1 2 # and another\n3 4\n", 2),
        ("1\n2\n3\n", 3),
    ):
        path.write_text(text, encoding="utf-8")
        assert len(read_points(str(path), None, 3, 0)) == rows


def test_an_orthonormal_start_has_as_many_points_as_fit():
    from cumulant.cli.simulate_run import read_points

    assert read_points("orthonormal", None, 5, 0).shape == (5, 5)


def test_simulate_reports_blow_up():
    out = run(
        "simulate", "gaussian", "--contraction", "none", "--step-size", "5", "--steps", "2000"
    )
    assert out.returncode == 0
    assert "overflowed at t =" in out.stdout


def test_simulate_bad_input(tmp_path, monkeypatch, capsys):
    bad = tmp_path / "bad.csv"
    bad.write_text("1,2\n3,four\n")
    holes = tmp_path / "holes.csv"
    holes.write_text("1,2\n3,nan\n")
    short = tmp_path / "short.csv"
    short.write_text("1,,2\n3,4,5\n")
    (tmp_path / "folder.npz").mkdir()
    x, D = torch.randn(4, 3), cm.dynamics
    D.flow(x, [0.0, 1.0]).save(tmp_path / "flow.npz")
    D.simulate(x, 1, patterns=x).save(tmp_path / "patterns.npz")
    D.simulate(x, 1, value_weight=-torch.eye(3)).save(tmp_path / "weights.npz")
    D.simulate(x, 1, step_size=torch.ones(4, 1)).save(tmp_path / "gate.npz")
    made = [[str(tmp_path / f"{n}.npz")] for n in ("flow", "patterns", "weights", "gate")]
    for arguments in (
        *made,
        ["nowhere.csv"],
        [str(bad)],
        [str(short)],
        ["--seed", "99999999999999999999999"],
        ["--cluster-distance", "-1"],
        ["-o", str(tmp_path / "folder.npz")],
        [str(holes)],
        ["--beta", "-1"],
        ["--contraction", "box"],
        ["--steps", "0"],
        ["--time", "-3"],
        ["orthonormal", "--points", "9", "--dimension", "3"],
        ["ring", "--dimension", "1"],
        ["-o", str(tmp_path / "run.txt")],
        ["-p", str(tmp_path / "missing" / "a.png")],
        ["-a", str(tmp_path / "a.mp4")],
    ):
        monkeypatch.setattr(sys, "argv", ["cumulant", "simulate", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr().err
        assert left.value.code == 2, arguments
        assert len(said.strip().splitlines()) == 1, said
        assert said.startswith("cumulant: ")


def test_simulate_interrupted_leaves_what_it_had(tmp_path):
    import signal

    path = tmp_path / "run.npz"
    arguments = ["simulate", "sphere", "--points", "400", "--steps", "1000000", "-o", str(path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "cumulant", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert "simulating" in process.stderr.readline()  # its progress, after two seconds
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "the run so far is in" in said
    assert len(cm.dynamics.Trajectory.load(path).times) > 3


def test_help_of_every_command_comes_without_torch():
    """Nobody waits two seconds to read what the command can do."""
    program = """if True:
        import sys
        from cumulant.cli.main import COMMANDS, main

        def run(*words):
            sys.argv = ["cumulant", *words]
            try:
                main()
            except SystemExit as end:
                assert not end.code, words
            assert "torch" not in sys.modules, words

        run("--help")
        run("--version")
        for name in COMMANDS:
            run(name, "--help")
        from cumulant.cli.bench import bench
        for each in bench.registered_commands:
            run("bench", each.name, "--help")
    """
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert done.stdout.count(b"Usage") > 15


def test_names_in_the_help_are_those_of_the_library():
    """The help knows them without torch, so it has its own copies."""
    from cumulant.cli import simulate, simulate_run
    from cumulant.dynamics.initial import STARTS

    assert set(STARTS) == set(simulate.STARTS)
    assert set(simulate_run.CONTRACTIONS) == set(simulate.CONTRACTIONS)
