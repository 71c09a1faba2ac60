"""Trajectories: saved, loaded, interrupted, drawn."""

from __future__ import annotations

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

    def interrupt(t):
        if t >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(steps=100, checkpoint=path, progress=interrupt)
    kept = D.Trajectory.load(path)
    assert kept.times.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0]
    rest = D.simulate(kept.final, 2, contraction=D.Sphere(), step_size=0.5)
    torch.manual_seed(0)
    torch.testing.assert_close(rest.final, run(steps=6).final)


def test_an_interrupted_flow_leaves_what_it_had(tmp_path):
    path = tmp_path / "flow.npz"

    def interrupt(t):
        if t >= 2:
            raise KeyboardInterrupt

    x = D.start("sphere", 10, 3)
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
    clouds = [a for a in _axes(figure) if a.collections and not a.lines]
    assert len(clouds) == 4
    image = np.asarray(Image.open(tmp_path / "a.png").convert("L"))
    top = image[: image.shape[0] // 2]
    for panel in np.array_split(top, 4, axis=1):
        assert (panel < 180).mean() > 0.002
    titles = [a.get_title("left") or a.get_title() for a in _axes(figure)]
    assert "participation ratio" in titles
    assert "t = 0" in titles


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
    with pytest.raises(cm.InputError, match=r"cumulant\[plot\]"):
        run().plot()
