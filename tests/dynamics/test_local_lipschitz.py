"""The largest singular value of a Jacobian against dense decompositions, of maps that are hard."""

from __future__ import annotations

import pytest
import torch

from cumulant import InputError
from cumulant import dynamics as D

DOUBLE = torch.float64


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def with_spectrum(values: torch.Tensor, rows: int, columns: int, seed: int) -> torch.Tensor:
    """A matrix with these singular values and random singular vectors."""
    k = len(values)
    left, right = (
        torch.linalg.qr(torch.randn(n, k, dtype=DOUBLE, generator=generator(seed + i)))[0]
        for i, n in enumerate((rows, columns))
    )
    return left @ torch.diag(values) @ right.T


def stretch(A: torch.Tensor, **options):
    x = torch.zeros(*A.shape[:-2], A.shape[-1], dtype=A.dtype)
    return D.local_lipschitz(lambda x: (A @ x[..., None])[..., 0], x, **options)


def test_four_hundred_random_maps_are_right_where_converged():
    for seed in range(400):
        rows, columns = torch.randint(1, 13, (2,), generator=generator(seed)).tolist()
        A = torch.randn(rows, columns, dtype=DOUBLE, generator=generator(seed + 1000))
        found = stretch(A)
        assert found.converged
        largest = torch.linalg.matrix_norm(A, 2)
        torch.testing.assert_close(found.value, largest, rtol=1e-9, atol=0)


@pytest.mark.parametrize("gap", [0.3, 1e-2, 1e-3, 1e-4, 1e-6, 1e-9, 0.0])
@pytest.mark.parametrize("size", [8, 40, 120])
def test_clusters_of_leading_singular_values(gap, size):
    """Each within `gap` of the next: what is called converged is right to tol."""
    values = torch.cat([1 - gap * torch.arange(4), torch.linspace(0.7, 0.0, size - 4)]).double()
    for seed in range(5):
        found = stretch(with_spectrum(values.clamp_min(0), size + 3, size, seed))
        assert found.converged
        assert 1 - 1e-6 <= float(found.value) <= 1 + 1e-12
        assert float(found.upper) >= 1 - 1e-12


def test_rank_deficient_and_zero_maps():
    for rank in (1, 2, 5):
        values = torch.linspace(2.0, 1.0, rank, dtype=DOUBLE)
        found = stretch(with_spectrum(values, 30, 20, rank))
        assert found.converged
        assert float(found.value) == pytest.approx(2.0, rel=1e-12)
    nothing = stretch(torch.zeros(3, 4, dtype=DOUBLE))
    assert nothing.converged
    assert nothing.value == nothing.upper == 0


def test_a_batch_is_its_rows():
    A = torch.stack(
        [
            with_spectrum(torch.tensor([5.0, 5.0 - 1e-4, 1.0], dtype=DOUBLE), 9, 7, 1),
            torch.zeros(9, 7, dtype=DOUBLE),
            1e-30 * torch.randn(9, 7, dtype=DOUBLE, generator=generator(2)),
            1e30 * torch.randn(9, 7, dtype=DOUBLE, generator=generator(3)),
        ]
    ).reshape(2, 2, 9, 7)
    found = stretch(A, batch_dims=2)
    assert found.converged.all()
    assert found.value.shape == found.upper.shape == found.converged.shape == (2, 2)
    torch.testing.assert_close(found.value, torch.linalg.matrix_norm(A, 2), rtol=1e-9, atol=0)


@pytest.mark.parametrize("steps", [5, 10, 20])
def test_what_is_not_known_is_not_called_converged(steps):
    """A dense spectrum cut short: the value is low, its status says so, the bound above holds."""
    values = torch.linspace(1.0, 0.0, 200, dtype=DOUBLE)
    for seed in range(20):
        found = stretch(with_spectrum(values, 200, 200, seed), max_steps=steps)
        assert found.steps == steps
        assert float(found.value) < 1 - 1e-6
        assert not found.converged
        assert float(found.upper) >= 1


def test_single_precision():
    for seed in range(20):
        A = torch.randn(30, 30, generator=generator(seed))
        found = stretch(A)
        assert found.converged
        assert found.value.dtype == found.upper.dtype == torch.float32
        largest = torch.linalg.matrix_norm(A.double(), 2)
        assert float(found.value) == pytest.approx(float(largest), rel=3e-6)


def test_a_jacobian_that_is_not_finite_spoils_its_own_row():
    x = torch.tensor([[0.0, 1.0], [4.0, 1.0]], dtype=DOUBLE)
    found = D.local_lipschitz(torch.sqrt, x, batch_dims=1)
    assert found.converged.tolist() == [False, True]
    assert found.value.tolist() == pytest.approx([float("inf"), 0.5])


def test_a_map_that_mixes_the_batch_is_refused():
    with pytest.raises(InputError, match="keep the 1 batch dimensions"):
        D.local_lipschitz(lambda x: x.sum(0), torch.zeros(3, 2), batch_dims=1)
