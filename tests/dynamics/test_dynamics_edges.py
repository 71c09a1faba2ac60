"""The corners where numbers overflow, vanish or coincide, and input that is almost right."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from mpmath import hyp1f1, mp

import cumulant as cm
from cumulant.dynamics.gaussianity import distance_to_normal

D = cm.dynamics
DOUBLE = torch.float64


# Sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("contraction", [D.Sphere(), D.RMSNorm(), D.LayerNorm(), D.Whiten()])
def test_contractions_do_not_know_the_scale(contraction, scale):
    x = torch.randn(9, 3)
    torch.testing.assert_close(contraction(scale * x), contraction(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("x", [torch.full((1, 7), 0.1), torch.full((1, 10), 0.3)])
def test_layer_norm_of_equal_coordinates_is_an_error_also_after_rounding(x):
    with pytest.raises(cm.InputError, match="all coordinates equal"):
        D.LayerNorm()(x)


@pytest.mark.parametrize("epsilon", [-1.0, math.nan])
def test_layer_norm_epsilon(epsilon):
    with pytest.raises(cm.InputError, match="epsilon"):
        D.LayerNorm(epsilon=epsilon)(torch.randn(3, 4))


def test_points_that_overflowed_are_called_that():
    with pytest.raises(cm.InputError, match="not finite"):
        D.Sphere()(torch.tensor([[math.inf, 1.0]]))
    with pytest.raises(cm.InputError, match="not finite"):
        D.Whiten()(torch.full((5, 2), math.inf))


@pytest.mark.parametrize("x", [torch.full((2, 2), 1e20), torch.full((2, 2), 1e155, dtype=DOUBLE)])
def test_a_step_that_overflows_says_so(x):
    with pytest.raises(cm.InputError, match="out of the range"):
        D.step(x)


def test_half_precision_runs_end_before_infinity():
    run = D.simulate(torch.randn(10, 3).half(), 60)
    assert run.states.isfinite().all()
    assert run.blow_up_time < 60
    assert len(run.times) == int(run.blow_up_time)
    flowing = D.flow(torch.randn(10, 3).half(), torch.linspace(0, 30, 31))
    assert flowing.states.isfinite().all()
    assert flowing.blow_up_time.isfinite()


def test_a_flow_that_begins_too_far_out_ends_at_once():
    run = D.flow(1e30 * torch.randn(10, 3), [0.0, 1.0])
    assert run.blow_up_time == 0
    assert run.states.shape[0] == 1


def test_the_last_finite_state_is_kept():
    run = D.simulate(1e17 * torch.randn(5, 2), 300, every=1000)
    assert run.times.tolist() == [0.0, run.blow_up_time.item() - 1]
    assert run.final.isfinite().all()


def test_a_cloud_that_is_lost_leaves_the_gradients_of_the_others_alone():
    x = torch.randn(4, 2, dtype=DOUBLE)
    beta = torch.tensor(1.0, dtype=DOUBLE, requires_grad=True)
    both = D.simulate(torch.stack([x, 1e306 * x]), 4, beta=beta)
    assert both.blow_up_time.tolist()[0] == math.inf
    ours = torch.autograd.grad(both.final[0].sum(), beta)[0]
    alone = torch.autograd.grad(D.simulate(x, 4, beta=beta).final.sum(), beta)[0]
    torch.testing.assert_close(ours, alone)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_instruments_at_extreme_scales(scale):
    x = torch.randn(60, 2, dtype=DOUBLE)
    torch.testing.assert_close(
        D.expansion(scale * x, 2 * scale * x).median, torch.tensor(2.0).double()
    )
    shift = 2 * math.log(scale)
    torch.testing.assert_close(D.cloud_entropy(scale * x), D.cloud_entropy(x) + shift)
    ours, theirs = (D.gaussianity(y, draws=9).statistic for y in (scale * x, x))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(D.participation_ratio(scale * x), D.participation_ratio(x))


@pytest.mark.parametrize("n", [3, 6, 7, 11])
@pytest.mark.parametrize("kind", [torch.float32, DOUBLE])
def test_coincident_points_fill_no_dimension(n, kind):
    assert D.participation_ratio(torch.full((n, 2), 0.1, dtype=kind)) == 0


def test_participation_ratio_in_half_precision():
    x = torch.randn(5000, 3)
    assert D.participation_ratio(x.half()).item() == pytest.approx(3, abs=0.1)


def test_memory_of_batches():
    assert D.cloud_entropy(torch.randn(60, 1000, 2)).shape == (60,)
    assert D.expansion_bounds(torch.randn(60, 1000, 2)).pairs.shape == (60,)


# Gaussianity in many dimensions ------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 3, 64, 200, 1000])
@pytest.mark.parametrize("square", [0.0, 0.3, 50.0, 4000.0])
def test_distance_to_a_normal_point(d, square):
    mp.dps = 40
    unit = mp.sqrt(2) * mp.gamma(mp.mpf(d + 1) / 2) / mp.gamma(mp.mpf(d) / 2)
    exact = float(unit * hyp1f1(mp.mpf(-1) / 2, mp.mpf(d) / 2, -mp.mpf(square) / 2))
    ours = distance_to_normal(torch.tensor([square], dtype=DOUBLE), d)
    assert ours.item() == pytest.approx(exact, rel=1e-12)


def test_energy_test_in_many_dimensions():
    scale = torch.where(torch.rand(5, 300, 1) > 0.5, 3.0, 1.0)
    mixed = D.gaussianity(scale * torch.randn(5, 300, 100), draws=39)
    assert (mixed.p_value <= 0.05).all()
    assert mixed.null_quantiles.isfinite().all()
    assert (D.gaussianity(torch.randn(20, 300, 100), draws=39).p_value > 0.05).sum() >= 15


# Clusters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [4, 10, 1000])
def test_links_of_exactly_the_distance_hold(n):
    assert D.clusters(torch.arange(float(n))[:, None], distance=1.0).count == 1


def test_clusters_of_tiny_clouds():
    x = torch.tensor([[0.0], [3.0], [3.5], [9.0]], dtype=DOUBLE)
    for scale in (1e-165, 1e165):
        assert D.clusters(scale * x, distance=scale).labels.tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize(("n", "d"), [(2000, 64), (3000, 16)])
def test_clusters_in_many_dimensions_do_not_hold_all_pairs(n, d):
    x = D.initial_cloud("sphere", n, d, dtype=DOUBLE)
    gaps = torch.cdist(x, x)
    nearest = gaps.fill_diagonal_(9).amin(-1)
    found = D.clusters(x, distance=1.0)
    alone = nearest > 1.0
    sizes = torch.bincount(found.labels)
    assert torch.equal(sizes[found.labels] == 1, alone)


# Inverse -----------------------------------------------------------------------------------------


def test_inverse_of_uniform_and_of_small_self_attention():
    x = torch.randn(6, 3, dtype=DOUBLE)
    torch.testing.assert_close(D.inverse(D.step(x, beta=0.0), beta=0.0), x)
    small = 1e-4 * x.float()
    back = D.inverse(D.step(small))
    torch.testing.assert_close(back, small, atol=1e-9, rtol=1e-4)
    tiny = 1e-9 * x
    torch.testing.assert_close(D.inverse(D.step(tiny)), tiny, atol=1e-18, rtol=1e-8)


# Fixed points ------------------------------------------------------------------------------------


def test_backward_passes_do_not_remember_each_other():
    c = torch.ones(3, requires_grad=True)
    value = D.fixed_point(lambda z: torch.tanh(0.5 * z + c), torch.zeros(3)).value
    seeds = (1.0, 1e6, 1.0, 1e-6)
    got = [
        torch.autograd.grad(value, c, s * torch.ones(3), retain_graph=True)[0] / s for s in seeds
    ]
    for other in got[1:]:
        torch.testing.assert_close(other, got[0])


@pytest.mark.parametrize("ratio", [1e2, 1e5, 1e10])
def test_rows_of_a_batch_do_not_share_their_accuracy(ratio):
    J = torch.stack([torch.zeros(30, 30), 0.9 * torch.linalg.qr(torch.randn(30, 30)).Q]).double()
    c = torch.zeros(2, 30, dtype=DOUBLE, requires_grad=True)
    value = D.fixed_point(
        lambda z: (J @ z[..., None])[..., 0] + c, torch.zeros(2, 30).double(), batch_dims=1
    ).value
    seed = torch.randn(2, 30, dtype=DOUBLE) * torch.tensor([[ratio], [1.0]], dtype=DOUBLE)
    ours = torch.autograd.grad(value, c, seed)[0]
    exact = torch.linalg.solve((torch.eye(30, dtype=DOUBLE) - J).mT, seed[..., None])[..., 0]
    torch.testing.assert_close(ours, exact, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", [torch.float32, DOUBLE])
@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0, 1e6])
def test_derivatives_do_not_know_the_scale_of_the_loss(kind, scale):
    W = 0.4 * torch.linalg.qr(torch.randn(6, 6, dtype=DOUBLE)).Q
    c = torch.randn(6, dtype=DOUBLE)

    def derivatives(solve, c, W):
        value = scale * (solve(c, W) ** 3).sum()
        out = []
        for _ in range(3):
            (slope,) = torch.autograd.grad(value, c, create_graph=True)
            out.append(slope.detach().double() / scale)
            value = (slope * torch.arange(1.0, 7.0, dtype=slope.dtype)).sum()
        return out

    def unrolled(c, W):
        z = torch.zeros_like(c)
        for _ in range(120):
            z = torch.tanh(z @ W + c)
        return z

    def solved(c, W):
        start = torch.zeros_like(c)
        return D.fixed_point(lambda z: torch.tanh(z @ W + c), start, tol=1e-6).value

    exact = derivatives(unrolled, c.clone().requires_grad_(), W)
    ours = derivatives(solved, c.to(kind).requires_grad_(), W.to(kind))
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4 * b.abs().max().item())


def test_a_map_changed_before_the_backward_pass_is_noticed():
    c = torch.tensor([0.3], dtype=DOUBLE, requires_grad=True)
    value = D.fixed_point(lambda z: torch.tanh(0.9 * z + c), torch.zeros(1).double()).value
    with torch.no_grad():
        c.fill_(3.0)
    with pytest.raises(cm.InputError, match="has changed since"):
        torch.autograd.grad(value, c)


def test_a_map_that_works_in_place():
    x0 = torch.ones(2, dtype=DOUBLE)
    found = D.fixed_point(lambda x: x.mul_(0.5).add_(1), x0)
    torch.testing.assert_close(found.value, torch.full((2,), 2.0, dtype=DOUBLE))
    assert torch.equal(x0, torch.ones(2, dtype=DOUBLE))


def test_half_precision_equilibria_are_near():
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    torch.nn.init.orthogonal_(layer[0].weight, gain=0.8)
    x = torch.randn(4, 8)
    exact = cm.nn.Equilibrium(layer)(x).detach()
    near = cm.nn.Equilibrium(layer.bfloat16(), throw=False)(x.bfloat16())
    assert (near.float() - exact).abs().max() < 0.06


def test_rounding_is_not_called_a_cycle():
    scale = torch.tensor([1.0, 1.1, 0.9, 1.2, 0.7], dtype=DOUBLE) / 1e8
    found = D.fixed_point(lambda x: 1e8 * (x * scale).cos(), torch.ones(5).double(), throw=False)
    assert found.status == "stalled" or found.status == "converged"


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_cut_short_is_unfinished(steps):
    found = D.fixed_point(torch.cos, torch.ones(2).double(), max_steps=steps, throw=False)
    assert found.status == "unfinished"


def test_degenerate_fixed_points_in_forward_mode():
    with pytest.raises(cm.ConvergenceError, match="eigenvalue close to 1"):
        torch.func.jacfwd(lambda a: D.fixed_point(lambda x: x + 0 * a, torch.ones(2)).value)(
            torch.ones(2)
        )


def test_complex_maps_and_vmap_are_named():
    with pytest.raises(cm.InputError, match="real numbers"):
        D.fixed_point(lambda x: x * 1j, torch.ones(3))
    with pytest.raises(cm.InputError, match="batch_dims"):
        torch.vmap(lambda a: D.fixed_point(lambda x: x / 2 + a, torch.ones(2)).value)(torch.ones(3))


def test_layers_of_three_inputs_are_refused():
    with pytest.raises(cm.InputError, match="requires 3 inputs"):
        cm.nn.Equilibrium(torch.nn.MultiheadAttention(4, 1))


# Gaussian populations ----------------------------------------------------------------------------


def test_exponential_growth_is_no_blow_up():
    """S12 = e^t / 2, S22 = 1 + (e^2t - 1) / 4: large, but finite for ever."""
    A, V = (
        torch.diag(torch.tensor([1.0, 0.0])).double(),
        torch.diag(torch.tensor([0.0, 1.0])).double(),
    )
    S = torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=DOUBLE)
    path = D.gaussian_flow(torch.zeros(2), S, [0.0, 5.0, 12.0], scores=A, values=V)
    assert path.blow_up_time.isinf()
    assert path.covariance[-1, 0, 1].item() == pytest.approx(0.5 * math.exp(12), rel=1e-6)
    assert path.covariance[-1, 1, 1].item() == pytest.approx(1 + (math.exp(24) - 1) / 4, rel=1e-6)


def test_a_member_that_blows_up_does_not_take_the_others_along():
    S = torch.eye(2, dtype=DOUBLE) * torch.tensor([1.0, 0.01], dtype=DOUBLE)[:, None, None]
    path = D.gaussian_flow(torch.zeros(2), S, [0.1, 1.0, 3.0], values=2.0)
    torch.testing.assert_close(
        path.blow_up_time, torch.tensor([0.25, 25.0]).double(), rtol=1e-6, atol=0
    )
    assert path.covariance[2, 0].isinf().all()
    assert path.covariance[2, 1, 0, 0].item() == pytest.approx(1 / (100 - 12), rel=1e-7)


def test_means_of_asymmetric_scores_close_to_the_blow_up():
    A = torch.tensor([[1.0, 0.5], [-0.3, 0.8]], dtype=DOUBLE)
    S = torch.tensor([[0.3, 0.1], [0.1, 0.2]], dtype=DOUBLE)
    m = torch.tensor([1.0, -2.0], dtype=DOUBLE)
    end = D.gaussian_flow(m, S, [0.0], scores=A).blow_up_time.item()
    near = D.gaussian_flow(m, S, [end * (1 - 1e-6), end * (1 - 1e-8)], scores=A).mean
    assert near.isfinite().all()
    # m' = (I + S A) m with S = L L' / (t* - t) there: a power of t* - t, so the ratio is constant.
    more = D.gaussian_flow(m, S, [end * (1 - 1e-10)], scores=A).mean
    torch.testing.assert_close(more[0] / near[1], near[1] / near[0], rtol=5e-3, atol=0)
    pair = D.gaussian_flow(torch.stack([m, m]), torch.stack([S, 0.1 * S]), [0.5, 2 * end], scores=A)
    torch.testing.assert_close(
        pair.mean[1, 1], D.gaussian_flow(m, 0.1 * S, [2 * end], scores=A).mean[0]
    )
    assert pair.mean[1, 0].isinf().all()


def test_far_times_and_backward_steps():
    path = D.gaussian_flow(torch.tensor([1.0, 0.0]), torch.eye(2), [0.0, 800.0], scores=-1.0)
    assert path.mean[1].tolist() == [math.inf, 0.0]
    back = D.gaussian_map(torch.zeros(1), torch.eye(1), 12, step_size=-1.0, scores=-1.0)
    there = D.gaussian_map(torch.zeros(1), torch.eye(1), 12)
    torch.testing.assert_close(back.covariance, there.covariance)
    assert back.times.tolist() == [-t for t in there.times.tolist()]


def test_gaussian_flow_refuses_to_lose_a_gradient():
    with pytest.raises(cm.InputError, match="no derivative"):
        D.gaussian_flow(torch.ones(2), torch.eye(2, requires_grad=True), [0.1])


# Flows, files, observables -----------------------------------------------------------------------


@pytest.mark.parametrize("contraction", [D.RMSNorm(torch.tensor([1.0, 2.0, 0.5])), lambda x: x / 2])
def test_flow_refuses_contractions_without_a_limit(contraction):
    with pytest.raises(cm.InputError, match="no limit"):
        D.flow(torch.randn(5, 3), [1.0], contraction=contraction)


def test_flow_asks_for_no_more_digits_than_there_are():
    with pytest.raises(cm.InputError, match="rtol must be finite and at least"):
        D.flow(torch.randn(5, 3), [1.0], rtol=1e-12)


def test_a_solver_that_cannot_go_on_says_so(monkeypatch):
    """x' = 1 / (1 - x) from 0 ends at t = 1/2 with x = 1: steps vanish, but nothing is large."""
    from cumulant.dynamics.field import Field

    monkeypatch.setattr(Field, "__call__", lambda self, x: 1 / (1 - x))
    start = torch.zeros(1, 1, dtype=DOUBLE)
    with pytest.raises(cm.ConvergenceError, match=r"steps vanished at t = 0\.5") as caught:
        D.flow(start, [0.0, 0.375, 5.0])
    # (1 - x)^2 = 1 - 2 t
    so_far = caught.value.result
    assert so_far.states.flatten().tolist()[:2] == pytest.approx([0.0, 0.5])
    held = D.flow(start, [0.0, 0.375, 5.0], throw=False)
    assert float(held.blow_up_time) == pytest.approx(0.5)
    assert float(held.final) == pytest.approx(1.0, abs=1e-4)


def test_flow_begins_on_the_sphere():
    run = D.flow(3 * torch.randn(5, 3), [0.0, 1.0], contraction=D.Sphere())
    torch.testing.assert_close(run.states.norm(dim=-1), torch.ones(2, 5), atol=1e-4, rtol=0)


def test_runs_go_on():
    x = torch.randn(2, 8, 3, dtype=DOUBLE)
    how = {"contraction": D.Sphere(), "step_size": 0.3, "beta": 2.0}
    whole = D.simulate(x, 9, **how)
    first = D.simulate(x, 4, observables={"norm": D.cloud_norm}, **how)
    both = D.simulate(first, 5, **how)
    torch.testing.assert_close(both.states, whole.states)
    torch.testing.assert_close(both.times, whole.times)
    for name, seen in whole.observables.items():
        torch.testing.assert_close(both.observables[name], seen)
    flowing = D.flow(whole, [0.0, 1.0], beta=2.0, contraction=D.Sphere())
    assert flowing.times[-1] == whole.times[-1] + 1
    assert len(flowing.times) == 11


def test_flows_that_go_on_lose_no_time():
    x = D.initial_cloud("sphere", 6, 3, dtype=DOUBLE)
    how = {"contraction": D.Sphere()}
    first = D.flow(x, [0.0, 0.5, 1.0], **how)
    assert D.flow(first, [0.5, 1.0], **how).times.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0]
    later = D.flow(first, [1.0], **how)
    assert later.times.tolist() == [0.0, 0.5, 1.0, 2.0]
    exact = D.flow(x, [2.0], **how).final
    torch.testing.assert_close(later.final, exact, atol=1e-7, rtol=0)


def test_a_lost_cloud_stays_lost_when_a_run_goes_on():
    x = torch.randn(4, 2, dtype=DOUBLE)
    first = D.simulate(torch.stack([x, 1e306 * x]), 4)
    both = D.simulate(first, 3, contraction=D.Sphere())
    assert both.blow_up_time.tolist() == first.blow_up_time.tolist()
    assert torch.equal(both.final[1], first.final[1])
    torch.testing.assert_close(both.final[0].norm(dim=-1), torch.ones(4, dtype=DOUBLE))


def test_settings_are_saved(tmp_path):
    run = D.simulate(torch.randn(4, 2), 1, beta=3.0, contraction=D.Sphere())
    again = D.Trajectory.load(run.save(tmp_path / "a.npz"))
    assert again.settings == run.settings
    assert again.settings["beta"] == 3.0
    assert again.settings["contraction"] == "Sphere()"


@pytest.mark.parametrize(
    ("observables", "message"),
    [
        ({"own": lambda x: x[..., 0]}, "one number for each cloud"),
        ({"own": lambda x: "much"}, "must return a tensor"),
        ([torch.mean], "by name"),
    ],
)
def test_observables_are_checked(observables, message):
    with pytest.raises(cm.InputError, match=message):
        D.simulate(torch.randn(5, 2), 2, observables=observables)


def test_observables_may_return_numbers():
    run = D.simulate(torch.randn(5, 2), 2, observables={"size": lambda x: float(x.abs().max())})
    assert run.observables["size"].shape == (3,)


def test_files_that_are_something_else(tmp_path):
    np.save(tmp_path / "a.npz", np.ones(3))
    (tmp_path / "a.npz.npy").rename(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", format="[1, 2]", states=np.ones(3))
    whole = D.simulate(torch.randn(5, 2), 3)
    D.Trajectory(whole.times[:2], whole.states).save(tmp_path / "f.npz")
    D.Trajectory(whole.times, whole.states, {"x": torch.ones(2)}).save(tmp_path / "g.npz")
    D.Trajectory(whole.times, whole.states, {}, torch.ones(5)).save(tmp_path / "h.npz")
    for name in ("b.npz", "c.npz", "f.npz", "g.npz", "h.npz"):
        with pytest.raises(cm.InputError, match="not a saved trajectory"):
            D.Trajectory.load(tmp_path / name)
    (tmp_path / "d.npz").mkdir()
    run = D.simulate(torch.randn(5, 2), 2)
    with pytest.raises(cm.InputError, match="cannot write"):
        run.save(tmp_path / "d.npz")
    assert not list(tmp_path.glob(".cumulant-*"))
    for suffix in ("png", "gif", "html"):
        (tmp_path / f"e.{suffix}").mkdir()
    with pytest.raises(cm.InputError, match="cannot write"):
        run.plot(tmp_path / "e.png")
    for suffix in ("gif", "html"):
        with pytest.raises(cm.InputError, match="cannot write"):
            run.animate(tmp_path / f"e.{suffix}", frames=2)


@pytest.mark.parametrize("d", [2, 4])
def test_plots_of_huge_states_and_broken_observables(tmp_path, d):
    x = 1e305 * torch.randn(5, d, dtype=DOUBLE)
    seen = {"bad": lambda x: torch.tensor(math.nan), "far": lambda x: torch.tensor(math.inf)}
    run = D.simulate(x, 3, contraction=lambda y: y, step_size=0.0, beta=0.0, observables=seen)
    figure = run.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000
    limits = [a.get_xlim() for part in figure.subfigs for a in part.axes]
    assert np.isfinite(limits).all()


def test_many_long_names_fit(tmp_path):
    names = [f"the mean length of the average of {k} points" for k in range(6)]
    run = D.simulate(torch.randn(5, 2), 3, observables=dict.fromkeys(names, D.cloud_norm))
    figure = run.plot(tmp_path / "a.png")
    figure.canvas.draw()
    for part in figure.subfigs[1:]:
        boxes = [a._left_title.get_window_extent() for a in part.axes]
        for left, right in itertools.pairwise(boxes):
            assert left.x1 < right.x0


# Shapes that are almost right --------------------------------------------------------------------


def test_empty_batches():
    x = torch.zeros(0, 4, 2)
    assert D.step(x).shape == (0, 4, 2)
    assert D.simulate(x, 3).states.shape == (4, 0, 4, 2)
    assert D.flow(x, [0.0, 1.0]).states.shape == (2, 0, 4, 2)
    assert D.inverse(x).shape == (0, 4, 2)
    for call in (
        D.clusters,
        D.cloud_entropy,
        D.expansion_bounds,
        D.gaussianity,
        lambda x: D.expansion(x, x),
    ):
        with pytest.raises(cm.InputError, match="empty"):
            call(x)


def test_weights_of_their_own_with_shared_patterns():
    x, y, W = (
        torch.randn(3, 5, 2).double(),
        torch.randn(6, 2).double(),
        torch.randn(3, 2, 2).double(),
    )
    together = D.step(x, patterns=y, query_weight=W)
    alone = torch.stack([D.step(a, patterns=y, query_weight=b) for a, b in zip(x, W, strict=True)])
    torch.testing.assert_close(together, alone)


def test_lists_and_arrays_are_clouds():
    assert D.clusters([[0.0], [1.0]]).count == 2
    assert D.participation_ratio([[0, 0], [1, 0]]) == 1
    assert D.gaussianity(np.random.default_rng(0).normal(size=(50, 2))).p_value > 0
    gained = D.RMSNorm(gain=[1.0, 2.0, 3.0])(torch.ones(2, 3))
    torch.testing.assert_close(gained, torch.tensor([[1.0, 2.0, 3.0]] * 2))
    assert D.local_lipschitz(lambda z: 2 * z, 1.0).value == 2
    for bad in (torch.ones(3), "x", 3.0):
        with pytest.raises(cm.InputError):
            D.participation_ratio(bad)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: D.step(x, beta=torch.tensor(1j)), "beta must be real"),
        (lambda x: D.expansion_bounds(x, beta=math.nan), "beta must be finite"),
        (lambda x: D.expansion_bounds(x, beta="hot"), "beta must be a number"),
        (lambda x: D.clusters(x, distance=-1.0), "distance must be"),
        (lambda x: D.expansion(x, x, levels=(2.0,)), "levels"),
        (lambda x: D.gaussianity(x, levels=(2.0,)), "levels"),
        (lambda x: D.gaussianity(x, generator=0), "torch.Generator, not int"),
        (lambda x: D.gaussianity(x, seed=0), "'seed' is now 'generator'"),
        (lambda x: D.initial_cloud("sphere", 3, 2, generator=3), "torch.Generator, not int"),
        (lambda x: D.initial_cloud("sphere", 3, 2, dtype=torch.int32), "floating-point"),
        (lambda x: D.spectral_radius(torch.sqrt, torch.zeros(3)), "Jacobian must be finite"),
        (lambda x: D.spectral_radius(torch.sin, x, max_dimension=0), "max_dimension"),
        (lambda x: D.fixed_point(torch.cos, x, tol="small"), "tol must be a number"),
        (lambda x: D.gaussian_map(torch.zeros(2), torch.eye(2), 1, step_size="x"), "step_size"),
        (lambda x: D.gaussian_flow(torch.zeros(0), torch.zeros(0, 0), [0.0]), "d at least 1"),
        (lambda x: D.stationary(torch.eye(3)), "several stationary laws"),
        (lambda x: D.block_gibbs(1e30 * x, 3, beta=1e30), "overflowed"),
        (lambda x: D.step(x, contraction=lambda y: [y]), "must return a tensor"),
        (lambda x: D.simulate(x, True), "an integer"),
    ],
)
def test_almost_right(call, message):
    with pytest.raises(cm.InputError, match=message):
        call(torch.randn(20, 3))


def test_flat_measures_have_no_linear_link():
    h = cm.Empirical(torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]]))
    with pytest.raises(cm.InputError, match="singular"):
        D.alternate(h, torch.tensor([[0.5, 0.0]]), 3, link="linear")


def test_stationary_keeps_its_digits():
    """pi = (2, 1) / 3 for leaving rates e and 2e, however small."""
    for e in (1e-3, 1e-6):
        T = torch.tensor([[1 - e, e], [2 * e, 1 - 2 * e]], dtype=torch.float32)
        torch.testing.assert_close(D.stationary(T), torch.tensor([2 / 3, 1 / 3]), rtol=1e-4, atol=0)


def test_mean_field_of_mixed_precision_and_bad_starts():
    sites = cm.VonMisesFisher(torch.ones(1, dtype=DOUBLE), 0.0)
    J = 0.1 * (1 - torch.eye(5))
    assert D.mean_field(sites, J).mean.dtype == DOUBLE
    with pytest.raises(cm.InputError, match="start must have shape"):
        D.mean_field(sites, J, start=torch.zeros(4, 1))
