"""Filters against enumeration of all mode paths, and against themselves in other shapes."""

import numpy as np
import pytest
import torch

import cumulant as cm
from switching import exact, model, parameters

F = cm.filtering
ALL = ["gpb1", "imm", "gpb2", 1, 2, 3, 4, "exact"]


def series(T, p=1, seed=0):
    g = torch.Generator().manual_seed(100 + seed)
    return 2 * torch.randn(T, p, generator=g, dtype=torch.float64)


def close(a, b, tol=1e-9):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tol, atol=tol)


def agrees(post, given, y, u=None):
    """Everything at the last step against enumeration, and each step's likelihood."""
    T = len(y)
    truth = exact(given, y, u)
    close(post.log_likelihood, truth["log_likelihood"])
    close(post.mode_probabilities[-1], truth["modes"][-1])
    close(post.mean[-1], truth["mean"][-1])
    close(post.covariance[-1], truth["covariance"][-1])
    if post.scheme.memory != 1:  # GPB1 keeps one Gaussian for all modes
        close(post.mode_means[-1], truth["mode_means"][-1])
        close(post.mode_covariances[-1], truth["mode_covariances"][-1])
    blind = y.clone().numpy()
    blind[-1] = np.nan
    before = exact(given, blind, u) if T > 1 else None
    if before is not None:
        close(post.predicted_mode_probabilities[-1], before["modes"][-1])
        close(post.predicted_mean[-1], before["mean"][-1])
        close(post.predicted_covariance[-1], before["covariance"][-1])
        close(post.step_log_likelihood[-1], truth["log_likelihood"] - before["log_likelihood"])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("k", [1, 2, 3, 4, "exact"])
def test_gpb_k_is_exact_up_to_k_steps(k, seed):
    given = parameters(2, 2, 2, seed)
    for T in range(1, (5 if k == "exact" else k) + 1):
        y = series(T, 2, seed)
        post = F.filter(F.SwitchingLinearGaussian(**given), y, collapse=k)
        agrees(post, given, y)
        assert post.beliefs[-1].log_weights.shape[-2] <= 2 ** max(T - 1, 0)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_gpb_k_is_an_approximation_beyond(k):
    given = parameters(3, 2, 1, 1)
    y = series(k + 1)
    post = F.filter(F.SwitchingLinearGaussian(**given), y, collapse=k)
    off = abs(float(post.log_likelihood) - exact(given, y)["log_likelihood"])
    assert 1e-7 < off < 0.2
    assert post.beliefs[-1].log_weights.shape[-2:] == (3 ** max(k - 2, 0), 3)


def test_longer_memory_is_closer():
    given = parameters(2, 2, 1, 4)
    m, y = F.SwitchingLinearGaussian(**given), series(9, seed=4)
    truth = float(F.filter(m, y, collapse="exact").log_likelihood)
    off = [abs(float(F.filter(m, y, collapse=k).log_likelihood) - truth) for k in (1, 2, 4, 7)]
    assert off[0] > off[1] > off[2] > off[3]
    imm = abs(float(F.filter(m, y, collapse="imm").log_likelihood) - truth)
    assert off[1] < imm < off[0]


def test_names_are_numbers():
    m, y = model(2, 2, 1), series(6)
    for name, k in (("gpb1", 1), ("gpb2", 2)):
        a, b = F.filter(m, y, collapse=name), F.filter(m, y, collapse=k)
        assert torch.equal(a.mean, b.mean)


def test_imm_is_exact_for_one_step_and_by_hand_for_two():
    given = parameters(2, 1, 1, 7)
    m, y = F.SwitchingLinearGaussian(**given), series(2, seed=7)
    agrees(F.filter(m, y[:1], collapse="imm"), given, y[:1])
    # Bar-Shalom's cycle, written out for scalars.
    A, mu = given["transition"].numpy(), given["initial"].numpy()
    x, P = np.full(2, float(given["initial_mean"])), np.full(2, float(given["initial_covariance"]))
    total = 0.0
    flat = {k: v.numpy().reshape(2) for k, v in given.items() if v.numel() == 2}
    for z in y.numpy().reshape(-1):
        c = mu @ A
        mix = A * mu[:, None] / c
        x0 = mix.T @ x
        P0 = np.array([mix[:, j] @ (P + (x - x0[j]) ** 2) for j in range(2)])
        xp = flat["dynamics"] * x0 + flat["dynamics_bias"]
        Pp = flat["dynamics"] ** 2 * P0 + flat["dynamics_noise"]
        S = flat["emission"] ** 2 * Pp + flat["emission_noise"]
        e = z - flat["emission"] * xp - flat["emission_bias"]
        like = np.exp(-(e**2) / S / 2) / np.sqrt(2 * np.pi * S)
        K = Pp * flat["emission"] / S
        x, P = xp + K * e, Pp - K * S * K
        total += np.log(c @ like)
        mu = c * like / (c @ like)
    post = F.filter(m, y, collapse="imm")
    close(post.log_likelihood, total)
    close(post.mode_probabilities[-1], mu)
    close(post.mode_means[-1].flatten(), x)
    close(post.mode_covariances[-1].flatten(), P)


@pytest.mark.parametrize("collapse", [2, 3, "exact"])
def test_modes_that_start_differently(collapse):
    given = parameters(2, 2, 1, 3, own_start=True)
    y = series(1, seed=3)
    agrees(F.filter(F.SwitchingLinearGaussian(**given), y, collapse=collapse), given, y)


def test_parameters_that_change_with_time_and_inputs():
    given = parameters(2, 2, 1, 5, inputs=2, lead=(3,))
    u = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = series(3, seed=5)
    post = F.filter(F.SwitchingLinearGaussian(**given), y, collapse=3, inputs=u)
    agrees(post, given, y, u.numpy())
    truth = exact(given, np.concatenate([y.numpy()[:2], [[np.nan]]]), u.numpy())
    C, d, D = (given[k][2].numpy() for k in ("emission", "emission_bias", "emission_input"))
    per_mode = [C[j] @ truth["mode_means"][-1][j] + d[j] + D[j] @ u[2].numpy() for j in range(2)]
    close(post.observation_mean[-1], truth["modes"][-1] @ np.array(per_mode))


def test_the_spread_between_modes_is_in_the_predicted_observation():
    given = parameters(2, 2, 1, 6)
    y = series(2, seed=6)
    post = F.filter(F.SwitchingLinearGaussian(**given), y)
    blind = exact(given, np.array([[float(y[0])], [np.nan]]))
    mean, second = 0.0, 0.0
    for j in range(2):
        C = given["emission"][j].numpy()
        m = (C @ blind["mode_means"][-1][j] + given["emission_bias"][j].numpy()).item()
        v = (C @ blind["mode_covariances"][-1][j] @ C.T + given["emission_noise"][j].numpy()).item()
        mean += blind["modes"][-1][j] * m
        second += blind["modes"][-1][j] * (v + m * m)
    close(post.observation_mean[-1], [mean])
    close(post.observation_covariance[-1], [[second - mean**2]])


@pytest.mark.parametrize("collapse", ALL)
def test_missing_elements(collapse):
    given = parameters(2, 2, 3, 8)
    y = series(2, 3, 8)
    y[0, 1] = y[1, 0] = y[1, 2] = torch.nan
    post = F.filter(F.SwitchingLinearGaussian(**given), y, collapse=collapse)
    if collapse in (2, 3, 4, "gpb2", "exact"):
        agrees(post, given, y)
    assert post.mean.isfinite().all()
    # A step that shows nothing is worth nothing, and changes nothing but the prediction.
    gone = torch.cat([y, torch.full_like(y[:1], torch.nan)])
    more = F.filter(F.SwitchingLinearGaussian(**given), gone, collapse=collapse)
    assert abs(float(more.step_log_likelihood[-1])) < 1e-12
    close(more.mean[-1], more.predicted_mean[-1])
    close(more.mode_probabilities[-1], more.predicted_mode_probabilities[-1])


@pytest.mark.parametrize("collapse", ALL)
def test_batches_lengths_and_updates_agree_with_single_series(collapse):
    m = model(2, 2, 1, 9)
    y = torch.stack([series(5, seed=s) for s in range(6)]).reshape(2, 3, 5, 1)
    lengths = torch.tensor([[5, 3, 1], [2, 5, 4]])
    whole = F.filter(m, y, collapse=collapse, lengths=lengths)
    assert whole.mean.shape == (2, 3, 5, 2)
    for a in range(2):
        for b in range(3):
            n = int(lengths[a, b])
            alone = F.filter(m, y[a, b, :n], collapse=collapse)
            close(whole.log_likelihood[a, b], alone.log_likelihood)
            for name in ("mean", "covariance", "mode_probabilities", "mode_means"):
                close(getattr(whole, name)[a, b, :n], getattr(alone, name))
            close(whole.observation_covariance[a, b, :n], alone.observation_covariance)
    post = F.filter(m, y[..., :2, :], collapse=collapse)
    light = post.latest()
    for t in range(2, 5):
        post, light = F.update(post, y[..., t, :]), F.update(light, y[..., t, :]).latest()
    batch = F.filter(m, y, collapse=collapse)
    for name in (
        *("log_likelihood", "step_log_likelihood", "mean", "covariance", "mode_covariances"),
        *("mode_probabilities", "predicted_mode_probabilities", "predicted_covariance"),
        *("observation_mean", "observation_covariance"),
    ):
        close(getattr(post, name), getattr(batch, name), 1e-12)
    close(light.mean[..., -1, :], batch.mean[..., -1, :], 1e-12)
    close(light.observation_mean[..., -1, :], batch.observation_mean[..., -1, :], 1e-12)


def test_each_series_may_have_its_own_parameters():
    one, two = parameters(2, 2, 1, 10), parameters(2, 2, 1, 11)
    both = {
        k: torch.stack([one[k], two[k]])
        if k.startswith("initial")
        else torch.stack([one[k], two[k]])[:, None]
        for k in one
    }
    both["initial_mean"] = both["initial_mean"][:, None].expand(2, 2, 2)
    both["initial_covariance"] = both["initial_covariance"][:, None].expand(2, 2, 2, 2)
    y = torch.stack([series(6, seed=1), series(6, seed=2)])
    post = F.filter(F.SwitchingLinearGaussian(**both), y)
    for s, given in enumerate((one, two)):
        alone = F.filter(F.SwitchingLinearGaussian(**given), y[s])
        close(post.mean[s], alone.mean)
        close(post.log_likelihood[s], alone.log_likelihood)


def test_shared_parameters_are_repeated_ones():
    given = parameters(3, 2, 1, 12)
    shared = {**given, "emission": given["emission"][0], "dynamics_bias": given["dynamics_bias"][1]}
    repeated = {
        **given,
        "emission": given["emission"][:1].expand(3, 1, 2),
        "dynamics_bias": given["dynamics_bias"][1:2].expand(3, 2),
    }
    a, b = (F.filter(F.SwitchingLinearGaussian(**g), series(5)) for g in (shared, repeated))
    assert torch.equal(a.mean, b.mean)


def test_many_series_at_once_take_another_way_to_the_same_numbers():
    m = model(3, 3, 2, 13)
    y = torch.randn(200, 4, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y[3, 2, 0] = torch.nan
    for collapse in ("gpb2", "imm", 3):
        post = F.filter(m, y, collapse=collapse)
        for s in (0, 3, 199):
            alone = F.filter(m, y[s], collapse=collapse)
            close(post.mean[s], alone.mean, 1e-10)
            close(post.covariance[s], alone.covariance, 1e-10)
            close(post.log_likelihood[s], alone.log_likelihood, 1e-10)


def test_forbidden_transitions_and_modes():
    given = parameters(3, 2, 1, 14)
    given["transition"] = torch.tensor([[0.5, 0.5, 0], [0, 0.5, 0.5], [0, 0, 1.0]]).double()
    given["initial"] = torch.tensor([1.0, 0, 0]).double()
    for k, T in ((2, 2), (3, 3), ("exact", 4)):
        y = series(T, seed=14)
        post = F.filter(F.SwitchingLinearGaussian(**given), y, collapse=k)
        truth = exact(given, y)
        close(post.log_likelihood, truth["log_likelihood"])
        close(post.mode_probabilities[-1], truth["modes"][-1])
        close(post.mean[-1], truth["mean"][-1])
    first = F.filter(F.SwitchingLinearGaussian(**given), series(1)).mode_probabilities[0]
    assert first[2] == 0
    given["emission_bias"] = given["emission_bias"].requires_grad_()
    F.filter(F.SwitchingLinearGaussian(**given), series(5)).log_likelihood.backward()
    assert given["emission_bias"].grad.isfinite().all()


def test_modes_at_time_zero_default_to_those_that_last():
    given = parameters(3, 1, 1, 15)
    del given["initial"]
    lasting = torch.linalg.matrix_power(given["transition"], 500)[0]
    y = series(4)
    a = F.filter(F.SwitchingLinearGaussian(**given), y)
    b = F.filter(F.SwitchingLinearGaussian(**given, initial=lasting), y)
    close(a.log_likelihood, b.log_likelihood, 1e-12)


def test_dimensions_that_differ_between_modes():
    """A level without and with a slope: in the mode without, the slope is dropped."""
    level, trend = torch.eye(2)[:, :1].double(), torch.eye(2).double()
    W = torch.tensor([[1.0, 1.0], [0.0, 1.0]]).double()
    rest = {
        "transition": torch.tensor([[0.7, 0.3], [0.4, 0.6]], dtype=torch.float64),
        "initial": torch.tensor([0.5, 0.5]).double(),
        "emission_noise": torch.eye(1).double(),
        "initial_mean": torch.tensor([0.0, 0.4], dtype=torch.float64),
        "initial_covariance": torch.eye(2).double(),
    }
    m = F.SwitchingLinearGaussian.embedded(
        [level, trend],
        dynamics=[0.9 * torch.eye(1, dtype=torch.float64), W],
        dynamics_noise=[torch.eye(1).double(), 0.1 * torch.eye(2, dtype=torch.float64)],
        emission=[torch.ones(1, 1).double(), torch.tensor([[1.0, 0.0]]).double()],
        **rest,
    )
    hand = dict(
        rest,
        dynamics=torch.stack([torch.diag(torch.tensor([0.9, 0.0], dtype=torch.float64)), W]),
        dynamics_noise=torch.stack(
            [torch.diag(torch.tensor([1.0, 0.0])).double(), 0.1 * torch.eye(2, dtype=torch.float64)]
        ),
        emission=torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]]).double(),
    )
    y = series(4, seed=16)
    post = F.filter(m, y, collapse="exact")
    agrees(post, hand, y)
    assert post.mode_means[-1, 0, 1] == 0
    smoothed = F.smooth(m, post)
    close(smoothed.mean, exact(hand, y)["mean"][1:], 1e-7)


def test_singular_noise_where_the_mathematics_allows_it():
    given = parameters(2, 2, 1, 17)
    given["emission_noise"] = torch.zeros(2, 1, 1).double()
    given["dynamics_noise"][0] = torch.tensor([[1.0, 0.5], [0.5, 0.25]])
    y = series(2, 1, 17)
    post = F.filter(F.SwitchingLinearGaussian(**given), y)
    agrees(post, given, y)
    assert float(post.covariance[-1].diagonal().min()) > -1e-12
    still = dict(given, dynamics_noise=torch.zeros(2, 2, 2).double())
    still["initial_covariance"] = torch.zeros(2, 2).double()
    with pytest.raises(cm.InputError, match=r"step 0 .* no density"):
        F.filter(F.SwitchingLinearGaussian(**still), y)
    certain = dict(still, emission_noise=parameters(2, 2, 1, 17)["emission_noise"])
    post = F.filter(F.SwitchingLinearGaussian(**certain), y, collapse="exact")
    agrees(post, certain, y)


def test_likelihoods_that_underflow():
    """e^-50000 apart, and still the right modes afterwards."""
    given = parameters(2, 1, 1, 18)
    given |= {
        "transition": torch.tensor([[0.99, 0.01], [0.01, 0.99]]).double(),
        "dynamics": torch.zeros(2, 1, 1).double(),
        "dynamics_bias": torch.tensor([[0.0], [100.0]]).double(),
        "dynamics_noise": torch.full((2, 1, 1), 0.05).double(),
        "emission": torch.ones(2, 1, 1).double(),
        "emission_bias": torch.zeros(2, 1).double(),
        "emission_noise": torch.full((2, 1, 1), 0.05).double(),
    }
    y = torch.tensor([[0.0], [100.0], [100.0]]).double()
    for collapse in ALL:
        post = F.filter(F.SwitchingLinearGaussian(**given), y, collapse=collapse)
        close(post.mode_probabilities[:, 1], [0, 1, 1])
    close(post.log_likelihood, exact(given, y)["log_likelihood"])
    # Modes that never meet: the ratio e^-1e5 is remembered, and returns.
    given["transition"] = torch.eye(2).double()
    there = torch.cat([torch.zeros(10, 1), torch.full((11, 1), 100.0)]).double()
    post = F.filter(F.SwitchingLinearGaussian(**given), there)
    assert post.mode_probabilities[9, 0] == 1
    assert post.mode_probabilities[20, 1] == 1


def test_interface_of_what_was_asked_for(engine):
    m, y = model(2, 2, 1), series(3)
    calls = []
    post = F.filter(m, y, progress=lambda x: calls.append((x.done, x.total)))
    assert calls == ([(1, 3), (2, 3), (3, 3)] if engine == "torch" else [(3, 3)])
    assert repr(post) == (
        "Posterior(SwitchingLinearGaussian(modes=2, state_size=2, observation_size=1), "
        "collapse='gpb2', batch=(), steps=3)"
    )
    assert torch.equal(post.covariance, post.covariance.mT)
    assert torch.equal(post.observation_covariance, post.observation_covariance.mT)
    numpy = F.filter(m, y.numpy())
    assert torch.equal(numpy.mean, post.mean)
    assert m.permute([1, 0]).transition[0, 0] == m.transition[1, 1]
    swapped = F.filter(m.permute([1, 0]), y)
    close(swapped.log_likelihood, post.log_likelihood)
    close(swapped.mode_probabilities.flip(-1), post.mode_probabilities)
