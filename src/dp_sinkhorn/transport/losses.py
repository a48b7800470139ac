"""The Sinkhorn losses of section 3.2: empirical, debiased and semi-debiased.

Values can be differentiated with autograd; gradients come from the envelope theorem, not from unrolling the
solver. Mechanisms use `cross_gradient` and `self_gradient`, which give the two halves of the semi-debiased
loss's gradient without an autograd graph.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dp_sinkhorn.transport.costs import ElementwiseCost, PointCloud
from dp_sinkhorn.transport.sinkhorn import SinkhornSolver, transport


def wasserstein(x: PointCloud, y: PointCloud, cost: ElementwiseCost, solver: SinkhornSolver) -> Tensor:
    """Ŵ_λ(X, Y) of Algorithm 2, differentiable in the points of both clouds."""
    value: Tensor = _Wasserstein.apply(x.points, y.points, x, y, cost, solver)  # type: ignore[no-untyped-call]
    return value


def empirical_sinkhorn_loss(x: PointCloud, y: PointCloud, cost: ElementwiseCost, solver: SinkhornSolver) -> Tensor:
    """Ŝ(X, Y) = 2Ŵ(X, Y) − Ŵ(X, X) − Ŵ(Y, Y) (Definition 3.1). Twice GeomLoss's debiased `SamplesLoss`."""
    return 2.0 * wasserstein(x, y, cost, solver) - wasserstein(x, x, cost, solver) - wasserstein(y, y, cost, solver)


def debiased_sinkhorn_loss(
    x: PointCloud,
    y: PointCloud,
    x_second: PointCloud,
    y_second: PointCloud,
    cost: ElementwiseCost,
    solver: SinkhornSolver,
) -> Tensor:
    """Ŝ(X, Y, X', Y') = 2Ŵ(X, Y) − Ŵ(X, X') − Ŵ(Y, Y') (Definition 3.2)."""
    return (
        2.0 * wasserstein(x, y, cost, solver)
        - wasserstein(x, x_second, cost, solver)
        - wasserstein(y, y_second, cost, solver)
    )


def semi_debiased_sinkhorn_loss(
    x: PointCloud, y: PointCloud, p: float, cost: ElementwiseCost, solver: SinkhornSolver
) -> Tensor:
    """Ŝ_p(X, Y) = 2Ŵ(X^[0:n], Y) − Ŵ(X^[0:n], X^[n':n+n']), with n' = ⌊np⌋ (Definition 3.3).

    Args:
        x: n + n' generated points.
        y: the real points.
        p: debiasing fraction in [0, 1]; 0 is the empirical loss and 1 the debiased one, without the terms
            in Y alone.
        cost: element-wise cost.
        solver: Sinkhorn settings.
    """
    n = cross_count(x.points.shape[-2], p)
    resampled = resampled_count(n, p)
    cross, other = x[0:n], x[resampled : n + resampled]
    return 2.0 * wasserstein(cross, y, cost, solver) - wasserstein(cross, other, cost, solver)


def resampled_count(n: int, p: float) -> int:
    """The paper's n' = ⌊np⌋, safe against products such as 100 · 0.29 = 28.999 in floating point."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"the debiasing fraction p must lie in [0, 1], got {p}")
    return math.floor(n * p + 1e-9)


def cross_count(total: int, p: float) -> int:
    """The n for which n + ⌊np⌋ rows are `total`."""
    for n in range(math.floor(total / (1.0 + p)), total + 1):
        if n + resampled_count(n, p) == total:
            return n
    raise ValueError(f"{total} points are not n + floor(n p) for any n at p = {p}")


def cross_gradient(x: PointCloud, y: PointCloud, cost: ElementwiseCost, solver: SinkhornSolver) -> Tensor:
    """∇_X of 2Ŵ(X, Y): the only part of the loss's gradient that depends on the real points."""
    return 2.0 * transport(x, y, cost, solver).gradient_x


def self_gradient(x: PointCloud, n: int, cost: ElementwiseCost, solver: SinkhornSolver) -> Tensor:
    """∇_X of −Ŵ(X^[0:n], X^[n':n+n']) for all n + n' rows; it needs no real point.

    Rows n'..n-1 stand on both sides of the transport problem and receive both contributions.
    """
    resampled = x.points.shape[-2] - n
    solved = transport(x[0:n], x[resampled : n + resampled], cost, solver)
    gradient = torch.zeros_like(x.points)
    gradient[..., :n, :] -= solved.gradient_x
    gradient[..., resampled : n + resampled, :] -= solved.gradient_y
    return gradient


class _Wasserstein(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_points: Tensor,
        y_points: Tensor,
        x: PointCloud,
        y: PointCloud,
        cost: ElementwiseCost,
        solver: SinkhornSolver,
    ) -> Tensor:
        solved = transport(x, y, cost, solver)
        ctx.save_for_backward(
            solved.gradient_x if ctx.needs_input_grad[0] else None,
            solved.gradient_y if ctx.needs_input_grad[1] else None,
        )
        return solved.value

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (outer,) = grad_outputs
        gradient_x, gradient_y = ctx.saved_tensors
        scale = outer[..., None, None]
        return (
            None if gradient_x is None else scale * gradient_x,
            None if gradient_y is None else scale * gradient_y,
            None,
            None,
            None,
            None,
        )
