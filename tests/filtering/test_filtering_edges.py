"""What hostile input found: hard numbers, odd types, degenerate data."""

import pickle

import numpy as np
import pytest
import torch

import cumulant as cm
from switching import exact, means, model, parameters, seeded

F = cm.filtering
D = torch.float64


def level(**change):
    one = torch.ones(1, 1, dtype=D)
    given = {
        "transition": one,
        "initial": one[0],
        "dynamics": one,
        "dynamics_noise": one,
        "emission": one,
        "emission_noise": one,
        "initial_mean": torch.zeros(1, dtype=D),
        "initial_covariance": one,
    }
    return F.SwitchingLinearGaussian(**{**given, **change})


def test_standard_errors_do_not_depend_on_the_start():
    truth = means([[0.95, 0.05], [0.1, 0.9]], [0.0, 3.0], [1.0, 1.0])
    y = F.sample(truth, 300, generator=seeded(1)).observations
    starts = ([[0.5, 0.5], [0.5, 0.5]], [[0.9, 0.1], [0.1, 0.9]], [[0.4, 0.6], [0.6, 0.4]])
    found = [F.fit(means(t, [0.5, 2.5], [1.0, 1.0]), y, tol=1e-9) for t in starts]
    for other in found[1:]:
        assert abs(other.log_likelihood - found[0].log_likelihood) < 1e-5
        for name, errors in found[0].standard_errors.items():
            assert torch.allclose(other.standard_errors[name], errors, rtol=2e-3)


def test_masks_follow_the_modes_into_their_order():
    truth = means([[0.9, 0.1], [0.1, 0.9]], [0.0, 3.0], [1.0, 1.0])
    y = F.sample(truth, 200, generator=seeded(1)).observations
    mask = torch.tensor([[False], [True]])
    free = {"emission_bias": mask, "transition": True}
    found = F.fit(means([[0.9, 0.1], [0.1, 0.9]], [3.0, 0.5], [1.0, 1.0]), y, free=free)
    assert found.model.emission_bias[1] == 3.0
    assert found.standard_errors["emission_bias"][1] == 0
    assert found.standard_errors["emission_bias"][0] > 0.05
    straight = F.fit(
        means([[0.9, 0.1], [0.1, 0.9]], [0.5, 3.0], [1.0, 1.0]),
        y,
        free={"emission_bias": ~mask, "transition": True},
    )
    errors = straight.standard_errors["emission_bias"]
    assert torch.allclose(errors, found.standard_errors["emission_bias"], rtol=1e-3)


@pytest.mark.parametrize("outlier", [-99999.0, 1e8, 1e10])
def test_an_outlier_in_a_model_without_a_state(outlier):
    """The same model with a state that is not seen takes the steps one by one."""
    m = means([[0.9, 0.1], [0.2, 0.8]], [0.0, 0.0], [1e-6, 25e-6])
    general = F.SwitchingLinearGaussian(
        **{
            **m.parameters,
            "dynamics": torch.eye(1, dtype=D),
            "dynamics_noise": torch.eye(1, dtype=D),
            "emission": torch.zeros(1, 1, dtype=D),
            "initial_mean": torch.zeros(1, dtype=D),
            "initial_covariance": torch.eye(1, dtype=D),
        }
    )
    y = 0.003 * torch.randn(60, 1, dtype=D, generator=torch.Generator().manual_seed(0))
    y[20] = outlier
    a, b = F.filter(m, y), F.filter(general, y)
    assert (a.mode_probabilities.sum(-1) - 1).abs().max() < 1e-12
    assert (a.mode_probabilities - b.mode_probabilities).abs().max() < 1e-9
    keep = torch.arange(60) != 20
    assert (a.step_log_likelihood - b.step_log_likelihood)[keep].abs().max() < 1e-7
    ours = F.smooth(m, a).mode_probabilities
    assert (ours - F.smooth(general, b).mode_probabilities).abs().max() < 1e-9


def test_variances_below_zero_are_refused_however_small_beside_others():
    for x in (
        torch.diag(torch.tensor([1e6, -5.0], dtype=D)),
        torch.diag(torch.tensor([1e4, -9.0])),
    ):
        with pytest.raises(cm.InputError, match="positive semi-definite"):
            F.SwitchingLinearGaussian(**{**parameters(2, 2, 1), "dynamics_noise": x.to(D)})


def test_the_global_generator_decides_without_a_seed():
    m = model(2, 1, 1)
    torch.manual_seed(0)
    first, after = F.sample(m, 5).observations, torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(F.sample(m, 5).observations, first)
    assert torch.equal(torch.rand(3), after)
    assert F.sample(m, 5, 3, generator=seeded(1)).observations.shape == (3, 5, 1)
    batch = parameters(2, 1, 1)
    batch["dynamics"] = batch["dynamics"].expand(4, 1, 2, 1, 1)
    many = F.SwitchingLinearGaussian(**batch)
    assert F.sample(many, 5, (4,)).states.shape == (4, 5, 1)
    for size in ((), (3,), None, "ab", (1.5,)):
        with pytest.raises(cm.InputError):
            F.sample(many, 5, size)


def test_em_returns_the_likelihood_of_its_model():
    given = parameters(1, 2, 1, 3)
    given["initial_covariance"] = torch.diag(torch.tensor([1.0, 2.0], dtype=D))
    y = torch.randn(4, 20, 1, dtype=D, generator=torch.Generator().manual_seed(0))
    free = ["initial_covariance", "initial_mean"]
    start = F.SwitchingLinearGaussian(**given)
    how = {"max_steps": 20, "standard_errors": False, "throw": False}
    found = F.fit(start, y, method="em", free=free, **how)
    again = float(F.filter(found.model, y).log_likelihood.sum())
    assert abs(again - found.log_likelihood) < 1e-8
    assert found.model.initial_covariance[0, 1] == 0


def test_forbidden_modes_lose_to_any_density():
    m = means([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.0], [1.0, 1e40], initial=torch.tensor([1.0, 0.0]))
    post = F.filter(m, torch.tensor([[1e16]], dtype=D))
    assert post.mode_probabilities.tolist() == [[1.0, 0.0]]


def test_forecasts_after_gpb1_keep_states_and_modes_together():
    given = parameters(2, 2, 1, 4)
    m, y = F.SwitchingLinearGaussian(**given), torch.tensor([[0.7]], dtype=D)
    truth = exact(given, np.array([[0.7], [np.nan], [np.nan], [np.nan]]))
    ahead = F.forecast(F.filter(m, y, collapse="exact"), 3)
    assert np.abs(ahead.mean.numpy() - truth["mean"][2:]).max() < 1e-9
    # GPB1 has forgotten at the last step which state belongs to which mode, and no more.
    one, two = (F.forecast(F.filter(m, y, collapse=c), 3) for c in ("gpb1", "gpb2"))
    assert (one.mode_probabilities - two.mode_probabilities).abs().max() < 1e-12
    start = F.filter(m, y, collapse="gpb1").beliefs[-1]
    by_hand = F.SwitchingLinearGaussian(
        **{
            **given,
            "initial": start.log_weights[0].exp(),
            "initial_mean": start.message[0][0, 0],
            "initial_covariance": start.message[1][0, 0],
        }
    )
    blind = exact({**by_hand.parameters}, np.full((3, 1), np.nan))
    assert np.abs(one.mean.numpy() - blind["mean"][1:]).max() < 1e-9


def test_far_too_long_a_memory():
    m, y = model(2, 1, 1), torch.zeros(6, 1, dtype=D)
    same = F.filter(m, y, collapse=10**9)
    assert torch.equal(same.mean, F.filter(m, y, collapse="exact").mean)
    with pytest.raises(cm.InputError, match="more than fit in memory"):
        F.filter(m, torch.zeros(60, 1, dtype=D), collapse="exact")
    with pytest.raises(cm.InputError, match="more than fit in memory"):
        F.fit(m, torch.zeros(60, 1, dtype=D), collapse="exact")


@pytest.mark.parametrize(
    "name",
    [
        *("transition", "dynamics", "dynamics_noise", "emission", "emission_noise"),
        *("initial_mean", "initial_covariance"),
    ],
)
def test_what_is_required(name):
    with pytest.raises(cm.InputError, match=f"{name} is required"):
        F.SwitchingLinearGaussian(**{**parameters(2, 1, 1), name: None})


def test_fitting_inside_other_modes():
    y = F.sample(level(), 20, generator=torch.Generator().manual_seed(0)).observations
    how = {"max_steps": 3, "standard_errors": False, "throw": False}
    plain = F.fit(level(), y, **how).log_likelihood
    with torch.no_grad():
        assert F.fit(level(), y, **how).log_likelihood == plain
    with torch.inference_mode():
        z = y * 1.0
        found = F.fit(level(), z, **how)
    assert abs(found.log_likelihood - plain) < 1e-9


def test_degenerate_data_end_with_a_reason():
    flat = torch.ones(20, 1, dtype=D)
    for method in ("lbfgs", "em"):
        for m in (level(), means([[0.9, 0.1], [0.1, 0.9]], [0.0, 2.0], [1.0, 1.0])):
            found = F.fit(m, flat, method=method, max_steps=40, throw=False)
            assert np.isfinite(found.log_likelihood)
            assert found.message
    with pytest.raises(cm.InputError, match="no series to fit"):
        F.fit(level(), torch.zeros(0, 5, 1, dtype=D))
    lone = F.fit(level(), torch.ones(1, 1, dtype=D), max_steps=5, throw=False)
    assert np.isfinite(lone.log_likelihood)


def test_em_says_what_it_does_not_take():
    y = torch.zeros(5, 1, dtype=D)
    moving = F.SwitchingLinearGaussian(
        **{**parameters(2, 1, 1), "emission": torch.ones(5, 2, 1, 1, dtype=D)}
    )
    with pytest.raises(cm.InputError, match="emission changes with time"):
        F.fit(moving, y, method="em", free=["emission_noise"])
    own = F.SwitchingLinearGaussian(**parameters(2, 1, 1, own_start=True))
    with pytest.raises(
        cm.InputError, match="EM learns one initial_mean and one initial_covariance"
    ):
        F.fit(own, y, method="em", free=["initial_covariance"])


def test_interrupted_with_several_starts():
    y = F.sample(level(), 20, generator=torch.Generator().manual_seed(0)).observations

    def stop(progress):
        if progress.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(cm.ConvergenceError, match="fit: interrupted") as caught:
        F.fit(level(), y, starts=3, progress=stop, standard_errors=False)
    found = caught.value.result
    assert found.status == "interrupted"
    assert len(found.starts) == 3
    assert found.log_likelihood == max(found.starts)


@pytest.mark.parametrize(
    "call",
    [
        lambda m, p: F.update(p, "abc"),
        lambda m, p: F.update(p, None),
        lambda m, p: F.update(p, torch.tensor([1j])),
        lambda m, p: F.update(m, torch.zeros(1)),
        lambda m, p: F.forecast(m, 3),
        lambda m, p: F.forecast(None, 3),
        lambda m, p: F.filter(m, np.array([[1j]])),
        lambda m, p: F.filter(m, np.array([[True]])),
        lambda m, p: F.filter(m, torch.eye(1).to_sparse()),
        lambda m, p: F.filter(None, torch.zeros(2, 1)),
        lambda m, p: F.smooth("a", "b"),
        lambda m, p: F.sample("a", 3),
        lambda m, p: F.fit("a", torch.zeros(2, 1)),
        lambda m, p: m.permute(None),
        lambda m, p: m.permute([1.0, 0.0]),
        lambda m, p: m.permute([True, False]),
        lambda m, p: m.to(torch.int64),
        lambda m, p: F.fit(m, torch.zeros(3, 1), free=5),
        lambda m, p: F.fit(m, torch.zeros(3, 1), free=[["a"]]),
        lambda m, p: F.fit(m, torch.zeros(3, 1), free={"dynamics": "abc"}),
        lambda m, p: F.fit(m, torch.zeros(3, 1), free={"dynamics": None}),
        lambda m, p: F.fit(m, torch.zeros(3, 1), free={"dynamics_noise": np.ones(2)}),
        lambda m, p: F.fit(m, torch.zeros(3, 1), order_by=["dynamics"]),
        lambda m, p: F.fit(m, torch.zeros(3, 1), order_by=lambda m: "abc"),
        lambda m, p: F.fit(m, torch.zeros(3, 1), progress=3),
        lambda m, p: F.SwitchingLinearGaussian.embedded(
            [], dynamics=[], dynamics_noise=[], emission=[]
        ),
        lambda m, p: F.SwitchingLinearGaussian.embedded(
            [torch.eye(2)], dynamics=None, dynamics_noise=[torch.eye(2)], emission=[torch.eye(2)]
        ),
        lambda m, p: F.SwitchingLinearGaussian.embedded(
            [torch.eye(2) * torch.nan],
            dynamics=[torch.eye(2)],
            dynamics_noise=[torch.eye(2)],
            emission=[torch.eye(2)],
        ),
    ],
)
def test_odd_arguments_get_one_clear_error(call):
    m = model(2, 1, 1)
    post = F.filter(m, torch.zeros(2, 1, dtype=D))
    with pytest.raises(cm.InputError):
        call(m, post)


def test_inputs_that_do_not_fit():
    given = parameters(2, 1, 1, inputs=1)
    m = F.SwitchingLinearGaussian(**given)
    post = F.filter(m, torch.zeros(3, 1, dtype=D), inputs=torch.zeros(3, 1))
    for u in (1.0, "a", torch.zeros(1, 3), torch.zeros(2)):
        with pytest.raises(cm.InputError, match="update: inputs"):
            F.update(post, torch.zeros(1), inputs=u)
    wide = F.SwitchingLinearGaussian(
        **{**given, "dynamics_input": given["dynamics_input"].expand(3, 1, 2, 1, 1)}
    )
    with pytest.raises(cm.InputError, match="batch dimensions must broadcast"):
        F.filter(wide, torch.zeros(2, 4, 1, dtype=D), inputs=torch.zeros(2, 4, 1))


def test_posteriors_can_be_stored_and_compared():
    m, y = model(2, 2, 1), torch.ones(3, 1, dtype=D)
    post = F.filter(m, y)
    post.observation_mean.sum()
    again = pickle.loads(pickle.dumps(post))
    assert torch.equal(again.observation_mean, post.observation_mean)
    assert post == post
    assert post != again
    assert repr(F.smooth(m, post)) == "Smoothed(batch=(), steps=3)"


def test_under_vmap():
    m = model(2, 2, 1)
    y = torch.randn(4, 3, 1, dtype=D, generator=torch.Generator().manual_seed(0))
    each = torch.vmap(lambda y: F.smooth(m, F.filter(m, y)).mean)(y)
    whole = F.smooth(m, F.filter(m, y)).mean
    assert (each - whole).abs().max() < 1e-10


def test_nonlinear_edges():
    one = torch.ones(1, 1)

    def built(**change):
        given = {
            "transition": one,
            "dynamics": torch.sin,
            "dynamics_noise": one,
            "emission": torch.exp,
            "emission_noise": one,
            "initial_mean": torch.zeros(1),
            "initial_covariance": one,
        }
        return F.SwitchingNonlinear(**{**given, **change})

    for method in ("ekf", "ukf"):
        m = built(method=method)
        assert F.filter(m, torch.zeros(0, 3, 1)).mean.shape == (0, 3, 1)
        other = m.replace(dynamics=torch.cos)
        y = torch.tensor([[1.0], [2.0]])
        assert not torch.equal(F.filter(m, y).mean, F.filter(other, y).mean)
        with pytest.raises(cm.InputError, match="another model"):
            F.smooth(other, F.filter(m, y))
        with pytest.raises(cm.InputError, match="no dynamics_bias"):
            m.replace(dynamics_bias=torch.zeros(1))
        with pytest.raises(cm.InputError, match="no density"):
            F.filter(built(method=method, dynamics=lambda x: x / 0.0), y)
        with pytest.raises(cm.InputError, match=r"torch\.where instead of if"):
            F.filter(built(method=method, dynamics=lambda x: x if x[0] > 0 else -x), y)
    for bad in (-1, 1.5, "a"):
        with pytest.raises(cm.InputError, match="input_size"):
            built(input_size=bad)
    start = torch.ones(1)
    built(dynamics=lambda x: x.mul_(0.9), initial_mean=start)
    assert start == 1


def test_the_cache_of_fake_tensors_is_no_trap():
    m, y = model(2, 3, 1), torch.zeros(2, 1, dtype=D)
    compiled = torch.compile(lambda y: F.filter(m, y).log_likelihood, backend="eager")
    assert torch.isfinite(compiled(y))
    assert torch.isfinite(F.filter(m, y).log_likelihood)


@pytest.mark.parametrize("seed", range(6))
def test_smoothing_where_covariances_are_singular(seed):
    """Observations without noise leave a direction of the state certain, off the axes."""
    given = parameters(2, 2, 1, seed)
    given["emission_noise"] = torch.zeros(2, 1, 1, dtype=D)
    m = F.SwitchingLinearGaussian(**given)
    y = torch.randn(5, 1, dtype=D, generator=torch.Generator().manual_seed(seed))
    truth = exact(given, y)
    found = F.smooth(m, F.filter(m, y, collapse="exact"))
    assert np.abs(found.mean.numpy() - truth["mean"][1:]).max() < 1e-7
    assert np.abs(found.covariance.numpy() - truth["covariance"][1:]).max() < 1e-7
    for collapse in ("gpb1", "gpb2", "imm"):
        near = F.smooth(m, F.filter(m, y, collapse=collapse))
        assert np.abs(near.mean.numpy() - truth["mean"][1:]).max() < 3
        assert float(torch.linalg.eigvalsh(near.covariance).min()) > -1e-6


def test_one_mode_without_observation_noise():
    """Rauch, Tung and Striebel by conditioning the joint Gaussian."""
    given = parameters(1, 2, 1, 0)
    given |= {
        "dynamics": torch.tensor([[[0.9, 0.3], [-0.2, 0.7]]], dtype=D),
        "dynamics_noise": torch.eye(2, dtype=D)[None],
        "emission": torch.tensor([[[1.0, 1 / 3]]], dtype=D),
        "emission_noise": torch.zeros(1, 1, 1, dtype=D),
    }
    y = torch.tensor([[1.0], [2.0], [0.0], [1.0]], dtype=D)
    m = F.SwitchingLinearGaussian(**given)
    found, truth = F.smooth(m, F.filter(m, y)), exact(given, y)
    assert np.abs(found.covariance.numpy() - truth["covariance"][1:]).max() < 1e-8
    assert np.abs(found.mean.numpy() - truth["mean"][1:]).max() < 1e-8


def test_a_likelihood_without_a_maximum_has_not_converged():
    m = means([[0.9, 0.1], [0.1, 0.9]], [0.0, 2.0], [1.0, 1.0])
    found = F.fit(m, torch.zeros(30, 1, dtype=D), max_steps=100, throw=False)
    assert not found.converged
    assert found.status != "unfinished"
    assert "emission_noise goes to zero" in found.message
    y = F.sample(level(), 30, generator=torch.Generator().manual_seed(0)).observations
    with pytest.raises(cm.ConvergenceError, match=r"fit: unfinished: .* Try: a larger max_steps"):
        F.fit(level(), y, max_steps=1)
    short = F.fit(level(), y, max_steps=1, throw=False)
    assert short.status == "unfinished"
    assert "max_steps reached" in short.message


def test_conjugate_modes_start_where_they_last():
    T = torch.tensor([[0.9, 0.1], [0.3, 0.7]], dtype=D)
    about = {"transition": T, "prior": cm.Gamma(2.0, 1.0), "likelihood": cm.Poisson}
    y = torch.tensor([1.0, 4.0, 2.0], dtype=D)
    lasting = torch.tensor([0.75, 0.25], dtype=D)
    a = F.filter(F.SwitchingConjugate(**about), y)
    b = F.filter(F.SwitchingConjugate(**about, initial=lasting), y)
    assert torch.allclose(a.log_likelihood, b.log_likelihood)


def test_a_fit_given_in_place_of_its_posterior_is_told_so():
    found = F.fit(
        F.switching_mean_variance(1), torch.randn(30, 1, generator=torch.Generator().manual_seed(0))
    )
    with pytest.raises(cm.InputError, match=r"not Fit; give its \.posterior"):
        F.forecast(found, 3)
