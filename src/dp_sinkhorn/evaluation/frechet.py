"""The Fréchet distance between two sets of features."""

from __future__ import annotations

import torch
from torch import Tensor


def frechet_distance(features_a: Tensor, features_b: Tensor) -> float:
    """Squared 2-Wasserstein distance between the Gaussians that have the moments of two sets of features.

        ‖μ_a − μ_b‖² + tr(Σ_a + Σ_b − 2 (Σ_a Σ_b)^½)

    Heusel et al., "GANs Trained by a Two Time-Scale Update Rule Converge to a Local Nash Equilibrium" (2017),
    equation (6); with the pool3 features of Inception it is the FID.

    The last trace is the sum of the singular values of Σ_a^½ Σ_b^½. Computed so, from the symmetric roots in
    float64, it needs no root of the non-symmetric product, stays real, and holds for singular covariances,
    hence for fewer images than features.

    Args:
        features_a: (N_a, D), at least two rows.
        features_b: (N_b, D), at least two rows.

    Returns:
        The distance, 0 for identical sets.
    """
    assert features_a.ndim == features_b.ndim == 2, (features_a.shape, features_b.shape)
    assert features_a.shape[1] == features_b.shape[1], (features_a.shape, features_b.shape)
    assert min(len(features_a), len(features_b)) >= 2, "a covariance needs two rows"
    mean_a, root_a = _moments(features_a)
    mean_b, root_b = _moments(features_b)
    traces = root_a.square().sum() + root_b.square().sum()
    cross = torch.linalg.svdvals(root_a @ root_b.T).sum()
    distance = (mean_a - mean_b).square().sum() + traces - 2.0 * cross
    return max(0.0, float(distance))  # rounding alone can make it negative


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean μ (D,) and a factor R (rank, D) of the covariance, Σ = RᵀR."""
    values = features.detach().to("cpu", torch.float64)
    mean = values.mean(dim=0)
    centred = values - mean
    covariance = centred.T @ centred / (len(values) - 1)
    eigenvalues, eigenvectors = torch.linalg.eigh(covariance)
    # An eigenvalue that is zero comes out as rounding of the largest, of either sign; its root
    # would be 1e8 times larger.
    kept = eigenvalues > eigenvalues[-1] * len(eigenvalues) * torch.finfo(torch.float64).eps
    return mean, eigenvalues[kept, None].sqrt() * eigenvectors[:, kept].T
