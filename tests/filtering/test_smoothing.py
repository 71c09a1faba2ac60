"""Smoothers, forecasts and samples against enumeration and against what was drawn."""

import numpy as np
import pytest
import torch
from scipy import stats

import cumulant as cm
from cumulant.filtering import backward as passes
from cumulant.filtering.roots import frame_of
from switching import exact, model, parameters, seeded

F = cm.filtering


def close(a, b, tol=1e-9):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tol, atol=tol)


def series(T, p=1, seed=0):
    g = torch.Generator().manual_seed(200 + seed)
    return 2 * torch.randn(T, p, generator=g, dtype=torch.float64)


def agrees(smoothed, truth, tol=1e-8):
    close(smoothed.mode_probabilities, truth["modes"][1:], tol)
    close(smoothed.transition_probabilities, truth["pairs"], tol)
    close(smoothed.mean, truth["mean"][1:], tol)
    close(smoothed.covariance, truth["covariance"][1:], tol)
    close(smoothed.mode_means, truth["mode_means"][1:], tol)
    close(smoothed.mode_covariances, truth["mode_covariances"][1:], tol)
    close(smoothed.initial_mode_probabilities, truth["modes"][0], tol)
    close(smoothed.initial_mean, truth["mean"][0], tol)
    close(smoothed.initial_covariance, truth["covariance"][0], tol)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("k", "T"), [(2, 2), (3, 3), (4, 4), ("exact", 5)])
def test_exact_where_the_filter_has_not_collapsed(k, T, seed):
    given = parameters(2, 2, 1, seed)
    y = series(T, seed=seed)
    y[0] = torch.nan if T > 2 else y[0]
    m = F.SwitchingLinearGaussian(**given)
    agrees(F.smooth(m, F.filter(m, y, collapse=k)), exact(given, y))


@pytest.mark.parametrize("collapse", ["gpb1", "imm", "gpb2", 3])
def test_one_mode_is_rauch_tung_striebel(collapse):
    given = parameters(1, 3, 2, 3)
    y = series(6, 2, 3)
    y[2, 0] = y[4] = torch.nan
    m = F.SwitchingLinearGaussian(**given)
    agrees(F.smooth(m, F.filter(m, y, collapse=collapse)), exact(given, y))


@pytest.mark.parametrize("collapse", ["gpb1", "imm", "gpb2"])
def test_exact_without_a_state(collapse):
    given = parameters(3, 0, 2, 4)
    y = series(5, 2, 4)
    m = F.SwitchingLinearGaussian(**given)
    post = F.filter(m, y, collapse=collapse)
    truth = exact(given, y)
    close(post.log_likelihood, truth["log_likelihood"])
    close(F.smooth(m, post).mode_probabilities, truth["modes"][1:])
    close(F.smooth(m, post).transition_probabilities, truth["pairs"])


def kim(model, post):
    """Kim's smoother (1994) for GPB2, as in his paper: means and modes, last step first."""
    given, T = model.parameters, post.steps
    A = given["transition"]
    mean, covariance, modes = post.mode_means[-1], post.mode_covariances[-1], None
    modes = post.mode_probabilities[-1]
    means, probabilities = [(modes[:, None] * mean).sum(0)], [modes]
    for t in reversed(range(T - 1)):
        m, P, p = post.mode_means[t], post.mode_covariances[t], post.mode_probabilities[t]
        joint = p[:, None] * A
        joint = modes * joint / joint.sum(0)
        back, spread = torch.zeros(2, 2, 2, dtype=m.dtype), torch.zeros(2, 2, 2, 2, dtype=m.dtype)
        for i in range(2):
            for j in range(2):
                W = given["dynamics"][j]
                ahead = W @ P[i] @ W.T + given["dynamics_noise"][j]
                J = P[i] @ W.T @ torch.linalg.inv(ahead)
                back[i, j] = m[i] + J @ (mean[j] - W @ m[i] - given["dynamics_bias"][j])
                spread[i, j] = P[i] + J @ (covariance[j] - ahead) @ J.T
        modes = joint.sum(1)
        share = joint / modes[:, None]
        mean = (share[..., None] * back).sum(1)
        away = back - mean[:, None]
        spread = spread + away[..., :, None] * away[..., None, :]
        covariance = (share[..., None, None] * spread).sum(1)
        means.append((modes[:, None] * mean).sum(0))
        probabilities.append(modes)
    return torch.stack(means[::-1]), torch.stack(probabilities[::-1])


def test_closer_to_the_truth_than_the_filter_and_than_kim():
    off = {"ours": [], "kim": [], "filter": []}
    for seed in range(12):
        m, y = model(2, 2, 1, seed), series(7, seed=seed)
        truth = F.smooth(m, F.filter(m, y, collapse="exact"))
        post = F.filter(m, y)
        ours = F.smooth(m, post)
        found = {
            "ours": (ours.mean, ours.mode_probabilities),
            "kim": kim(m, post),
            "filter": (post.mean, post.mode_probabilities),
        }
        for name, (mean, modes) in found.items():
            off[name].append(
                [
                    float((mean - truth.mean).abs().mean()),
                    float((modes - truth.mode_probabilities).abs().mean()),
                ]
            )
    mean = {name: np.mean(x, 0) for name, x in off.items()}
    assert (mean["ours"] < 0.3 * mean["kim"]).all()
    assert (mean["kim"] < mean["filter"]).all()


def turning(rate):
    """Position and velocity in the plane, one second of a turn."""
    if rate == 0:
        x = [[1.0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1]]
    else:
        s, c = np.sin(rate), np.cos(rate)
        x = [
            [1, s / rate, 0, -(1 - c) / rate],
            [0, c, 0, -s],
            [0, (1 - c) / rate, 1, s / rate],
            [0, s, 0, c],
        ]
    return torch.tensor(x, dtype=torch.float64)


def informed(own, filtered, smoothed):
    """What the smoother makes of the messages `own`, where it made `smoothed` of `filtered`."""
    frame, root = frame_of(filtered[1]), frame_of(smoothed[1]).root
    after = passes._After(
        *own, frame_of(own[1]).root, *filtered, frame.root, frame.inverse, frame.void
    )
    count = own[0].shape[0]
    return passes._informed(after, smoothed, root, lambda x: x.expand(count, *x.shape[1:]))


def test_the_factor_of_the_future_on_other_messages():
    """Against products of Gaussians written with precisions: mean, covariance and mass."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def definite(*shape):
        x = normal(*shape, shape[-1])
        return x @ x.mT + 0.2 * torch.eye(shape[-1], dtype=torch.float64)

    n = 3
    m, P = normal(1, 1, n), definite(1, 1, n)  # what the filter collapsed to
    own_m, own_P = normal(4, 1, n), definite(4, 1, n)  # the pairs before
    precision, shift = definite(n), normal(n)  # the factor exp(-x' precision x / 2 + shift' x)

    def times_factor(mean, covariance):
        inverse = torch.linalg.inv(covariance)
        spread = torch.linalg.inv(inverse + precision)
        start = (inverse @ mean[..., None])[..., 0] + shift
        out = (spread @ start[..., None])[..., 0]
        log_mass = (
            (start * out).sum(-1) / 2
            - ((inverse @ mean[..., None])[..., 0] * mean).sum(-1) / 2
            + torch.logdet(spread) / 2
            - torch.logdet(covariance) / 2
        )
        return log_mass, out, spread

    base, smoothed_m, smoothed_P = times_factor(m, P)
    found = informed((own_m, own_P), (m, P), (smoothed_m, smoothed_P))
    log_mass, mean, spread = times_factor(own_m, own_P)
    close(found[0], log_mass - base, 1e-8)
    close(found[1], mean, 1e-8)
    close(found[2], spread, 1e-8)
    close(found[3] @ found[3].mT, spread, 1e-8)
    # The same in a larger space, of which all messages know one direction.
    E = torch.linalg.qr(normal(n + 1, n + 1)).Q[:, :n]

    def embedded(mean, covariance):
        return mean @ E.T, E @ covariance @ E.T

    wide = informed(embedded(own_m, own_P), embedded(m, P), embedded(smoothed_m, smoothed_P))
    close(wide[0], log_mass - base, 1e-8)
    close(wide[1], mean @ E.T, 1e-8)
    close(wide[2], E @ spread @ E.T, 1e-8)


def test_a_future_that_widens_is_not_applied_as_a_factor():
    """Where the smoothed message is wider than the filtered one, wider pairs must not explode."""
    eye = torch.eye(2, dtype=torch.float64)
    P, wider = eye[None, None], torch.diag(torch.tensor([0.5, 3.0], dtype=torch.float64))
    split = passes._split(eye, wider[None, None], wider.sqrt()[None, None], torch.zeros(1, 1, 2))
    close(split.information[0, 0], [[0.5, 0], [0, 0]])
    close(split.wider_root[0, 0] @ split.wider_root[0, 0].mT, [[0, 0], [0, 2.0]])
    zero = torch.zeros(2, 1, 2, dtype=torch.float64)
    own = torch.stack([eye, 1.49 * eye])[:, None]  # A = I + N (P' - P) would be near zero
    shift = torch.tensor([[[0.1, 0.1]]], dtype=torch.float64)
    found = informed((zero, own), (zero[:1], P), (shift, wider[None, None]))
    close(found[1][0, 0], [0.1, 0.1])  # the same message: what the smoother said
    close(found[2][0, 0], wider)
    assert found[1].abs().max() < 0.3
    assert found[2].max() < 4


@pytest.mark.parametrize("gusts", [0.0, 3.0])
@pytest.mark.parametrize("collapse", ["gpb2", 3])
def test_little_noise_in_the_dynamics(collapse, gusts):
    """Circles and lines: errors of the past must not be carried back and grow."""
    W = torch.stack([turning(w) for w in (0.0, 0.1, -0.1)])
    push = torch.tensor([[0.5, 0], [1, 0], [0, 0.5], [0, 1]], dtype=torch.float64)
    g = torch.Generator().manual_seed(0)
    x = torch.tensor([0.0, 50, 0, 0], dtype=torch.float64).expand(8, 4)
    mode, states = torch.zeros(8, dtype=torch.long), []
    for _ in range(100):
        switch = torch.rand(8, generator=g) < 0.05
        mode = torch.where(switch, torch.randint(0, 3, (8,), generator=g), mode)
        x = (W[mode] @ x[..., None])[..., 0]
        x = x + gusts * torch.randn(8, 2, generator=g, dtype=torch.float64) @ push.T
        states.append(x)
    states = torch.stack(states, 1)
    C = torch.tensor([[1.0, 0, 0, 0], [0, 0, 1, 0]], dtype=torch.float64)
    y = states @ C.T + 100 * torch.randn(8, 100, 2, generator=g, dtype=torch.float64)
    m = F.SwitchingLinearGaussian(
        transition=0.925 * torch.eye(3, dtype=torch.float64) + 0.025,
        dynamics=W,
        dynamics_noise=(0.1 + gusts**2 / 9) * push @ push.T,
        emission=C,
        emission_noise=1e4 * torch.eye(2, dtype=torch.float64),
        initial_mean=torch.tensor([0.0, 50, 0, 0], dtype=torch.float64),
        initial_covariance=torch.diag(torch.tensor([100.0, 400, 100, 400], dtype=torch.float64)),
    )
    post = F.filter(m, y, collapse=collapse)
    smoothed = F.smooth(m, post)

    def error(mean):
        return float((mean - states)[..., [0, 2]].square().sum(-1).mean().sqrt())

    assert error(smoothed.mean) < 0.7 * error(post.mean)


def test_batches_and_lengths():
    m = model(2, 2, 1, 5)
    y = torch.stack([series(6, seed=s) for s in range(4)])
    lengths = torch.tensor([6, 3, 1, 5])
    whole = F.smooth(m, F.filter(m, y, lengths=lengths))
    for s, n in enumerate(lengths.tolist()):
        alone = F.smooth(m, F.filter(m, y[s, :n]))
        for name in ("mean", "covariance", "mode_probabilities"):
            close(getattr(whole, name)[s, :n], getattr(alone, name))


def test_chunks_do_not_matter(monkeypatch):
    m, y = model(2, 2, 1, 6), series(9, seed=6)
    whole = F.smooth(m, F.filter(m, y))
    monkeypatch.setattr(passes, "MOST_NUMBERS", 40)
    pieces = F.smooth(m, F.filter(m, y))
    close(whole.mean, pieces.mean, 1e-12)
    close(whole.transition_probabilities, pieces.transition_probabilities, 1e-12)


def test_forecasts_are_those_of_the_full_mixture():
    given = parameters(2, 2, 1, 7)
    y = series(2, seed=7)
    m = F.SwitchingLinearGaussian(**given)
    blind = np.concatenate([y.numpy(), np.full((3, 1), np.nan)])
    truth = exact(given, blind)
    for collapse in ("gpb2", 3, "exact"):
        ahead = F.forecast(F.filter(m, y, collapse=collapse), 3)
        close(ahead.mode_probabilities, truth["modes"][3:])
        close(ahead.mean, truth["mean"][3:])
        close(ahead.covariance, truth["covariance"][3:])
    C, d = given["emission"].numpy(), given["emission_bias"].numpy()
    per_mode = np.einsum("jpn,tjn->tjp", C, truth["mode_means"][3:]) + d
    close(ahead.observation_mean, np.einsum("tj,tjp->tp", truth["modes"][3:], per_mode))


def test_forecasts_of_models_that_change_with_time():
    given = parameters(2, 2, 1, 8, lead=(5,), inputs=1)
    u = torch.randn(5, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    m = F.SwitchingLinearGaussian(**given)
    y = series(2, seed=8)
    post = F.filter(m, y, collapse="exact", inputs=u[:2])
    ahead = F.forecast(post, 3, inputs=u[2:])
    blind = np.concatenate([y.numpy(), np.full((3, 1), np.nan)])
    close(ahead.mean, exact(given, blind, u.numpy())["mean"][3:])
    with pytest.raises(cm.InputError, match=r"cover 5 steps.*step 6"):
        F.forecast(post, 4, inputs=torch.zeros(4, 1))


def test_samples_follow_the_model():
    given = parameters(2, 2, 1, 9)
    m = F.SwitchingLinearGaussian(**given)
    drawn = F.sample(m, 3, (20000,), generator=seeded(0))
    # What enumeration expects without data: all but a useless element missing.
    truth = exact(given, np.full((3, 1), np.nan))
    count = 20000
    share = torch.nn.functional.one_hot(drawn.modes, 2).double().mean(0)
    assert (share - torch.tensor(truth["modes"][1:])).abs().max() < 4 * 0.5 / count**0.5
    pairs = torch.stack([drawn.modes[:, :-1], drawn.modes[:, 1:]], -1).reshape(-1, 2, 2)
    both = ((pairs == 1).all(-1)).double().mean(0)
    assert (both - torch.tensor(truth["pairs"][1:, 1, 1])).abs().max() < 2 / count**0.5
    error = np.sqrt(truth["covariance"][1:].diagonal(axis1=1, axis2=2) / count)
    assert (np.abs(drawn.states.mean(0).numpy() - truth["mean"][1:]) < 4.5 * error).all()
    spread = np.stack([np.cov(drawn.states[:, t].T.numpy()) for t in range(3)])
    assert np.allclose(spread, truth["covariance"][1:], rtol=0.15, atol=0.15)
    assert torch.equal(
        F.sample(m, 3, (4,), generator=seeded(1)).states,
        F.sample(m, 3, (4,), generator=seeded(1)).states,
    )
    assert F.sample(m, 3).observations.shape == (3, 1)


def test_simulation_based_calibration():
    """Where states and modes are drawn from the model, their posterior quantiles are uniform."""
    m = model(2, 1, 1, 10)
    count = 3000
    drawn = F.sample(m, 4, (count,), generator=seeded(3))
    post = F.filter(m, drawn.observations, collapse="exact")
    weights, (means, covariances) = post.beliefs[-1]
    away = (drawn.states[:, -1, None, None, :] - means) / covariances[..., 0].sqrt()
    quantile = (weights.exp()[..., None] * torch.special.ndtr(away)).sum((1, 2, 3))
    assert stats.kstest(quantile.numpy(), "uniform").pvalue > 1e-3
    smoothed = F.smooth(m, post)
    for probabilities, t in ((post.mode_probabilities, 3), (smoothed.mode_probabilities, 0)):
        p = probabilities[:, t, 1]
        surprise = ((drawn.modes[:, t] == 1).double() - p) / (p * (1 - p)).clamp_min(1e-12).sqrt()
        for weight in (torch.ones_like(p), p - p.mean()):
            score = (surprise * weight).sum() / weight.square().sum().sqrt()
            assert abs(float(score)) < 4
    # GPB2 is an approximation that keeps its promises nearly as well.
    long = F.sample(m, 30, (400,), generator=seeded(4))
    post = F.filter(m, long.observations)
    for x, truth in ((post, long.states), (F.smooth(m, post), long.states)):
        inside = ((x.mean - truth).abs() <= 1.645 * x.covariance[..., 0].sqrt()).double().mean()
        assert 0.87 < float(inside) < 0.93
