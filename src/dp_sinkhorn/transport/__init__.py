"""Optimal transport: element-wise costs, the Sinkhorn solver and the Sinkhorn losses.

Pure functions on tensors, float32 or float64, on any device; leading batch dimensions are allowed everywhere.
Nothing here knows about privacy: whatever looks at private records does so inside a mechanism.
"""

from dp_sinkhorn.transport.costs import ElementwiseCost, PointCloud
from dp_sinkhorn.transport.losses import (
    cross_gradient,
    debiased_sinkhorn_loss,
    empirical_sinkhorn_loss,
    resampled_count,
    self_gradient,
    semi_debiased_sinkhorn_loss,
    wasserstein,
)
from dp_sinkhorn.transport.sinkhorn import SinkhornSolver, Transport, transport

__all__ = [
    "ElementwiseCost",
    "PointCloud",
    "SinkhornSolver",
    "Transport",
    "cross_gradient",
    "debiased_sinkhorn_loss",
    "empirical_sinkhorn_loss",
    "resampled_count",
    "self_gradient",
    "semi_debiased_sinkhorn_loss",
    "transport",
    "wasserstein",
]
