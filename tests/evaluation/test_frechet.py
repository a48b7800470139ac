from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dp_sinkhorn.evaluation import frechet_distance


def draw(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def correlated(rows: int, columns: int, seed: int) -> Tensor:
    return draw(rows, columns, seed) @ draw(columns, columns, seed + 1000) + draw(1, columns, seed + 2000)


def with_moments(mean: Tensor, covariance: Tensor, rows: int, seed: int) -> Tensor:
    """Rows whose sample mean and covariance are exactly the given ones, so that no sampling error is left."""
    values = draw(rows, len(mean), seed)
    values = values - values.mean(dim=0)
    whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(values.T.cov()), values.T, upper=False)
    return (torch.linalg.cholesky(covariance) @ whitened).T + mean


def test_equals_the_closed_form_of_gaussians_with_diagonal_covariances():
    mean_a, mean_b = torch.tensor([0.0, 1.0, -2.0]).double(), torch.tensor([1.0, 1.0, 0.0]).double()
    variance_a, variance_b = torch.tensor([1.0, 4.0, 9.0]).double(), torch.tensor([4.0, 0.25, 9.0]).double()
    a = with_moments(mean_a, torch.diag(variance_a), rows=50, seed=0)
    b = with_moments(mean_b, torch.diag(variance_b), rows=70, seed=1)
    # ‖μ_a − μ_b‖² = 5, and Σ(σ_a − σ_b)² = (1−2)² + (2−½)² + (3−3)²
    assert frechet_distance(a, b) == pytest.approx(5.0 + 1.0 + 2.25, rel=1e-10)


def test_equals_the_closed_form_of_gaussians_with_commuting_covariances():
    basis = torch.linalg.qr(draw(5, 5, seed=2)).Q
    spread_a, spread_b = torch.linspace(0.1, 3, 5).double(), torch.linspace(2, 0.5, 5).double()
    a = with_moments(torch.zeros(5).double(), basis @ torch.diag(spread_a**2) @ basis.T, rows=40, seed=3)
    b = with_moments(torch.ones(5).double(), basis @ torch.diag(spread_b**2) @ basis.T, rows=40, seed=4)
    expected = 5.0 + (spread_a - spread_b).square().sum().item()
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-10)


def test_equals_the_formula_with_scipys_matrix_root():
    a, b = correlated(200, 20, seed=5), correlated(300, 20, seed=6)
    covariance_a, covariance_b = np.cov(a.numpy(), rowvar=False), np.cov(b.numpy(), rowvar=False)
    root = scipy.linalg.sqrtm(covariance_a @ covariance_b).real
    shift = (a.mean(dim=0) - b.mean(dim=0)).square().sum().item()
    expected = shift + np.trace(covariance_a + covariance_b - 2 * root)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(("rows_a", "rows_b"), [(10, 15), (10, 200), (2, 2)])
def test_holds_for_fewer_images_than_features(rows_a, rows_b):
    a, b = correlated(rows_a, 60, seed=7), correlated(rows_b, 60, seed=8)
    scaled_a = (a - a.mean(dim=0)) / (rows_a - 1) ** 0.5
    scaled_b = (b - b.mean(dim=0)) / (rows_b - 1) ** 0.5
    # With Σ = AᵀA the trace of the root is the nuclear norm of ABᵀ: no eigenvalue is taken of a singular matrix.
    cross = torch.linalg.matrix_norm(scaled_a @ scaled_b.T, ord="nuc")
    shift = (a.mean(dim=0) - b.mean(dim=0)).square().sum()
    expected = shift + scaled_a.square().sum() + scaled_b.square().sum() - 2 * cross
    assert frechet_distance(a, b) == pytest.approx(expected.item(), rel=1e-8)


@pytest.mark.parametrize(("rows", "columns"), [(100, 8), (20, 50)])
def test_is_zero_for_identical_sets_in_any_order(rows, columns):
    features = correlated(rows, columns, seed=9)
    scale = features.square().sum().item()
    assert frechet_distance(features, features) == pytest.approx(0.0, abs=1e-12 * scale)
    assert frechet_distance(features, features.flip(0)) == pytest.approx(0.0, abs=1e-12 * scale)


def test_constant_features_leave_the_distance_of_the_means():
    a, b = torch.zeros(10, 4), torch.full((10, 4), 3.0)
    assert frechet_distance(a, b) == pytest.approx(36.0)


def test_one_feature():
    a, b = torch.tensor([[-1.0], [1.0]]), torch.tensor([[-2.0], [2.0]])
    # Standard deviations √2 and 2√2.
    assert frechet_distance(a, b) == pytest.approx(2.0)


def test_float32_features_are_not_rounded_again():
    a, b = correlated(100, 10, seed=10).float(), correlated(100, 10, seed=11).float()
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(a.double(), b.double()), rel=1e-12)


@settings(deadline=None, max_examples=50)
@given(
    rows=st.tuples(st.integers(2, 30), st.integers(2, 30)),
    columns=st.integers(1, 20),
    shift=st.floats(-100, 100),
    seed=st.integers(0, 2**32),
)
def test_is_symmetric_not_negative_and_adds_a_shift(rows, columns, shift, seed):
    a, b = correlated(rows[0], columns, seed), correlated(rows[1], columns, seed + 1)
    distance = frechet_distance(a, b)
    assert distance >= 0.0
    assert frechet_distance(a, a.flip(0)) >= 0.0
    assert distance == pytest.approx(frechet_distance(b, a), rel=1e-6, abs=1e-6)
    assert frechet_distance(a, a + shift) == pytest.approx(columns * shift**2, rel=1e-6, abs=1e-6)
