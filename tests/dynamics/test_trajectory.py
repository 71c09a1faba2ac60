"""Trajectories: saved, loaded, interrupted, drawn."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import cumulant as cm

D = cm.dynamics


def run(d=2, n=20, batch=(), steps=6, contraction=D.Sphere(), kind=torch.float64, **how):
    x = torch.randn(*batch, n, d, dtype=kind)
    return D.simulate(x, steps, contraction=contraction, step_size=0.5, **how)


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_save_and_load(tmp_path, kind):
    first = run(batch=(3,), kind=kind)
    second = D.Trajectory.load(first.save(tmp_path / "run.npz"))
    assert second.states.dtype == kind
    for a, b in (
        (first.times, second.times),
        (first.states, second.states),
        (first.blow_up_time, second.blow_up_time),
    ):
        assert torch.equal(a, b)
    assert first.observables.keys() == second.observables.keys()
    assert all(torch.equal(x, second.observables[n]) for n, x in first.observables.items())
    with np.load(tmp_path / "run.npz") as file:  # numpy can read it without us
        assert file["states"].shape == (7, 3, 20, 2)


def test_bad_files(tmp_path):
    with pytest.raises(cm.InputError, match="there is no file"):
        D.Trajectory.load(tmp_path / "none.npz")
    (tmp_path / "bad.npz").write_text("hello")
    with pytest.raises(cm.InputError, match="not a saved trajectory"):
        D.Trajectory.load(tmp_path / "bad.npz")
    np.savez(tmp_path / "other.npz", x=np.ones(3))
    with pytest.raises(cm.InputError, match="not a saved trajectory"):
        D.Trajectory.load(tmp_path / "other.npz")
    whole = run().save(tmp_path / "whole.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(cm.InputError, match="not a saved trajectory"):
        D.Trajectory.load(tmp_path / "cut.npz")
    with pytest.raises(cm.InputError, match="cannot write"):
        run().save(tmp_path / "no" / "where.npz")


def test_an_interrupted_run_leaves_what_it_had(tmp_path):
    path = tmp_path / "run.npz"

    def interrupt(progress):
        if progress.done >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(steps=100, checkpoint=path, progress=interrupt)
    kept = D.Trajectory.load(path)
    assert kept.times.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0]
    rest = D.simulate(kept.final, 2, contraction=D.Sphere(), step_size=0.5)
    torch.manual_seed(0)
    torch.testing.assert_close(rest.final, run(steps=6).final)


KILLED = """
import os, signal, sys, torch, cumulant as cm
from cumulant.dynamics import trajectory
trajectory.PERIOD = 0.0
steps = 0
def stop(progress):
    global steps
    steps += 1
    if steps == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
x = torch.randn(2, 9, 3, generator=torch.Generator().manual_seed(0)).to(torch.{kind})
if os.path.exists(sys.argv[1]):
    x = cm.dynamics.Trajectory.load(sys.argv[1])
cm.dynamics.simulate(x, 6, step_size=0.5, checkpoint=sys.argv[1], progress=stop)
"""


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_a_killed_run_is_recovered_and_ends_as_an_uninterrupted_one(tmp_path, kind):
    x = torch.randn(2, 9, 3, generator=torch.Generator().manual_seed(0)).to(getattr(torch, kind))
    path, how = tmp_path / "run.npz", {"step_size": 0.5}
    straight = D.simulate(x, 12, **how)

    def killed(after):
        command = [sys.executable, "-c", KILLED.format(kind=kind), str(path), str(after)]
        assert subprocess.run(command).returncode == -signal.SIGKILL

    killed(4)
    assert not path.exists()
    found = D.Trajectory.load(path)
    assert found.times.tolist() == [0.0, 0.5, 1.0]  # the fourth state was not kept yet
    assert found.settings["step_size"] == 0.5
    first = D.simulate(found, 4, checkpoint=path, **how)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.npz"]  # the journal is done
    assert torch.equal(first.states, straight.states[:7])
    killed(4)  # in a run that continues another, which is not lost
    found = D.Trajectory.load(path)
    assert found.times.tolist() == [k / 2 for k in range(9)]
    last = D.simulate(found, 4, checkpoint=path, **how)
    for name in ("times", "states", "blow_up_time"):
        assert torch.equal(getattr(last, name), getattr(straight, name)), name
    for name, values in straight.observables.items():
        assert torch.equal(values, last.observables[name]), name


def test_half_precision_in_the_journal_of_a_killed_run(tmp_path):
    path = tmp_path / "run.npz"
    subprocess.run([sys.executable, "-c", KILLED.format(kind="bfloat16"), str(path), "5"])
    x = torch.randn(2, 9, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    found, straight = D.Trajectory.load(path), D.simulate(x, 3, step_size=0.5)
    assert found.states.dtype == torch.bfloat16
    assert torch.equal(found.states, straight.states)


def test_damage_in_the_journal_of_a_killed_run(tmp_path, caplog):
    path = tmp_path / "run.npz"
    subprocess.run([sys.executable, "-c", KILLED.format(kind="float32"), str(path), "5"])
    journal = tmp_path / "run.npz.journal"
    content = bytearray(journal.read_bytes())
    content[-5] ^= 4
    journal.write_bytes(content)
    assert len(D.Trajectory.load(path).times) == 3  # of four that were kept
    assert "run.npz.journal is damaged in record 4" in caplog.text
    finished = run()
    finished.save(path)  # newer than the journal
    assert torch.equal(D.Trajectory.load(path).states, finished.states)


def test_two_runs_with_one_checkpoint(tmp_path):
    def second(_):
        with pytest.raises(cm.InputError, match=rf"process {os.getpid()} on .*run.npz"):
            run(checkpoint=tmp_path / "run.npz")

    run(steps=2, checkpoint=tmp_path / "run.npz", progress=second)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.npz"]


def test_an_interrupted_flow_leaves_what_it_had(tmp_path):
    path = tmp_path / "flow.npz"

    def interrupt(progress):
        if progress.done >= 2:
            raise KeyboardInterrupt

    x = D.initial_cloud("sphere", 10, 3)
    with pytest.raises(KeyboardInterrupt):
        D.flow(x, torch.arange(9), contraction=D.Sphere(), checkpoint=path, progress=interrupt)
    assert D.Trajectory.load(path).times.tolist() == [0.0, 1.0, 2.0]


def test_a_contraction_that_fails_on_the_way_leaves_what_was_there(tmp_path):
    path = tmp_path / "run.npz"
    calls = []

    def fragile(x):
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("out of order")
        return x

    with pytest.raises(cm.InputError, match="out of order"):
        run(contraction=fragile, checkpoint=path)
    assert len(D.Trajectory.load(path).times) == 4


@pytest.mark.parametrize("d", [1, 2, 3, 8])
@pytest.mark.parametrize("batch", [(), (4,)])
def test_plots_show_points_in_every_panel(tmp_path, d, batch):
    contraction = D.Sphere() if d > 1 else None
    figure = run(d=d, batch=batch, contraction=contraction).plot(tmp_path / "a.png")
    clouds = [a for a in _axes(figure) if _title(a).startswith("t = ")]
    assert len(clouds) == 4
    assert all(a.collections for a in clouds)
    image = np.asarray(Image.open(tmp_path / "a.png").convert("L"))
    top = image[: image.shape[0] // 2]
    for panel in np.array_split(top, 4, axis=1):
        assert (panel < 180).mean() > 0.002
    titles = [_title(a) for a in _axes(figure)]
    assert "participation ratio" in titles
    assert "t = 0" in titles


def _title(axes):
    return axes.get_title("left") or axes.get_title()


@pytest.mark.parametrize("d", [2, 3])
def test_points_on_a_sphere_are_drawn_on_it(d):
    """The circle, or the grid of the sphere, has the radius on which the points are."""
    on, off = (_axes(run(d=d, contraction=c).plot())[0] for c in (D.Sphere(), D.Whiten()))
    assert not off.lines
    for line in on.lines:
        points = np.stack(line.get_data_3d() if d == 3 else line.get_data())
        np.testing.assert_allclose((points**2).sum(0), 1.0, atol=1e-9)
    assert len(on.lines) == (1 if d == 2 else 11)


def test_clusters_are_counted_over_time():
    """Two pairs a tenth apart on a circle: two clusters of reach 0.2, four of reach 0.05."""
    angles = torch.tensor([0.0, 0.1, 3.0, 3.1], dtype=torch.float64)
    x = torch.stack([angles.cos(), angles.sin()], -1)
    still = D.simulate(x, 3, step_size=1e-9, contraction=D.Sphere())
    for reach, count in ((0.2, 2), (0.05, 4)):
        (panel,) = [
            a
            for a in _axes(still.plot(cluster_distance=reach))
            if _title(a) == f"clusters (within {reach:g})"
        ]
        assert set(panel.lines[0].get_ydata()) == {count}


def _axes(figure):
    return [a for part in (figure.subfigs or [figure]) for a in part.axes]


def test_a_single_state_has_a_plot_too():
    assert len(_axes(D.simulate(torch.randn(5, 2), 0).plot())) == 1


def test_growing_clouds_are_drawn_each_at_its_scale():
    figure = run(steps=30, contraction=None).plot()
    widths = [a.get_xlim()[1] - a.get_xlim()[0] for a in _axes(figure) if a.collections]
    assert widths[-1] > 100 * widths[0]


@pytest.mark.parametrize("d", [1, 2, 3])
def test_animations(tmp_path, d):
    trajectory = run(d=d, contraction=None)
    trajectory.animate(tmp_path / "a.gif", frames=5)
    with Image.open(tmp_path / "a.gif") as film:
        assert film.n_frames == 5
        first = np.asarray(film.convert("L"))
        film.seek(4)
        assert (first != np.asarray(film.convert("L"))).mean() > 0.001
    page = trajectory.animate(tmp_path / "a.html", frames=3).read_text()
    assert page.count("data:image/png;base64") >= 3


def test_bad_pictures(tmp_path):
    trajectory = run()
    with pytest.raises(cm.InputError, match="suffixes are"):
        trajectory.plot(tmp_path / "a.doc")
    with pytest.raises(cm.InputError, match="no folder"):
        trajectory.plot(tmp_path / "no" / "a.png")
    with pytest.raises(cm.InputError, match=r"\.gif or \.html"):
        trajectory.animate(tmp_path / "a.mp4")
    with pytest.raises(cm.InputError, match="snapshots"):
        trajectory.plot(snapshots=0)


def test_drawing_changes_no_settings_of_the_user(tmp_path):
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    run().plot(tmp_path / "a.png")
    assert dict(mpl.rcParams) == before


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(cm.InputError, match=r"\.\[plot\]"):
        run().plot()
