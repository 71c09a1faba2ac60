"""Steps of continuous-time dynamics at unequal intervals, against closed forms."""

import pandas as pd
import pytest
import torch

import cumulant as cm

F = cm.filtering
D = torch.float64


def test_an_ornstein_uhlenbeck_process():
    rate, level, spread = 0.7, 3.0, 1.3
    dt = torch.tensor([0.0, 0.1, 1.0, 25.0], dtype=D)
    found = F.discretize(
        torch.tensor([[-rate]], dtype=D),
        torch.tensor([[spread**2]], dtype=D),
        dt,
        bias=torch.tensor([rate * level], dtype=D),
    )
    decay = torch.exp(-rate * dt)
    torch.testing.assert_close(found.dynamics[:, 0, 0], decay)
    variance = spread**2 * (1 - decay**2) / (2 * rate)
    torch.testing.assert_close(found.dynamics_noise[:, 0, 0], variance)
    torch.testing.assert_close(found.dynamics_bias[:, 0], level * (1 - decay))


def test_modes_with_their_own_agility():
    drift = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=D)
    rates = torch.tensor([0.5, 4.0], dtype=D)
    diffusion = rates[:, None, None] * torch.tensor([[0.0, 0.0], [0.0, 1.0]], dtype=D)
    dt = torch.tensor([0.5, 2.0, 1.0], dtype=D)
    found = F.discretize(drift, diffusion, dt)
    assert found.dynamics.shape == found.dynamics_noise.shape == (3, 2, 2, 2)
    t = dt[:, None]
    cells = [[t**3 / 3, t**2 / 2], [t**2 / 2, t]]
    expected = torch.stack([torch.stack([rates * x for x in row], -1) for row in cells], -2)
    torch.testing.assert_close(found.dynamics_noise, expected)
    m = F.SwitchingLinearGaussian(
        transition=torch.full((2, 2), 0.5, dtype=D),
        **found._asdict(),
        emission=torch.tensor([[1.0, 0.0]], dtype=D),
        emission_noise=torch.eye(1, dtype=D),
        initial_mean=torch.zeros(2, dtype=D),
        initial_covariance=torch.eye(2, dtype=D),
    )
    y = torch.tensor([[0.3], [1.0], [2.0]], dtype=D)
    assert F.filter(m, y).log_likelihood.isfinite()


def test_two_steps_are_one_long_step():
    g = torch.Generator().manual_seed(0)
    drift = torch.randn(3, 3, generator=g, dtype=D)
    root = torch.randn(3, 3, generator=g, dtype=D)
    b = torch.randn(3, generator=g, dtype=D)
    times = torch.tensor([0.4, 0.9, 1.3], dtype=D)
    W, Q, c = F.discretize(drift, root @ root.mT, times, bias=b)
    torch.testing.assert_close(W[1] @ W[0], W[2])
    torch.testing.assert_close(W[1] @ Q[0] @ W[1].mT + Q[1], Q[2])
    torch.testing.assert_close(W[1] @ c[0] + c[1], c[2])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"intervals": torch.tensor([-1.0])}, "must not be negative"),
        ({"intervals": torch.ones(2, 2)}, r"shape \(T,\)"),
        ({"diffusion": -torch.eye(2)}, "positive semi-definite"),
        ({"drift": torch.ones(2, 3)}, "drift must be"),
    ],
)
def test_what_does_not_fit(change, match):
    given = {"drift": torch.eye(2), "diffusion": torch.eye(2), "intervals": torch.ones(3)} | change
    with pytest.raises(cm.InputError, match=match):
        F.discretize(**given)


def test_intervals_of_time_stamps():
    days = pd.to_datetime(["2024-02-28 00:00", "2024-03-01 00:00", "2024-03-01 12:00"])
    under = pd.Series([1.0, 2.0, 3.0], index=days)
    expected = torch.tensor([0.0, 2.0, 0.5], dtype=torch.float64)  # 2024 has a 29th of February
    for times in (days, days.tz_localize("UTC"), under, days.to_numpy()):
        torch.testing.assert_close(F.intervals(times), expected)
    assert F.intervals(days, unit="hours", first=3.0).tolist() == [3.0, 48.0, 12.0]
    quarters = pd.period_range("2023Q4", periods=2, freq="Q")
    assert F.intervals(quarters).tolist() == [0.0, 92.0]
    assert F.intervals([1.0, 1.5, 4.0]).tolist() == [0.0, 0.5, 2.5]


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (pd.to_datetime(["2024-01-02", "2024-01-01"]), "sort them first"),
        (pd.to_datetime(["2024-01-02", None]), "none missing"),
        (["yesterday", "today"], "dates or numbers"),
        ([], "one or more"),
    ],
)
def test_times_that_are_none(times, said):
    with pytest.raises(cm.InputError, match=said):
        F.intervals(times)
