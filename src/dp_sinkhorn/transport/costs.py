"""Point clouds and the element-wise cost between them (section 3.4 of the paper).

    c_m(x, y) = ‖x − y‖₂² + m ‖x − y‖₁                                             ("Cost function")

Class conditioning follows Salimans et al. (2018), as in appendix C.3: x and y stand for [x, α_c onehot(l_x)]
and [y, α_c onehot(l_y)]. Two different one-hot vectors differ in two entries, by α_c each, so the embedding
adds the constant 2α_c² + 2mα_c to the cost of every pair of different classes and nothing to the others; it
is added in that form, and has no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PointCloud:
    """Points with optional class labels and an optional mask, carrying uniform weights.

    Attributes:
        points: (..., n, d).
        labels: (..., n) class indices, or None when the cost ignores classes.
        mask: (..., n) booleans, False for padding; None when every row is a point. Padding has weight zero:
            it moves no value and receives no gradient, but its coordinates must be finite.
    """

    points: Tensor
    labels: Tensor | None = None
    mask: Tensor | None = None

    def __getitem__(self, rows: slice) -> PointCloud:
        """The cloud of contiguous rows X^[a:b]."""
        return PointCloud(
            self.points[..., rows, :],
            None if self.labels is None else self.labels[..., rows],
            None if self.mask is None else self.mask[..., rows],
        )

    @property
    def weights(self) -> Tensor:
        """(..., n) uniform weights over the unmasked points; all zero where there is none."""
        mask = torch.ones_like(self.points[..., 0]) if self.mask is None else self.mask.to(self.points.dtype)
        return mask / mask.sum(-1, keepdim=True).clamp_min(1.0)


@dataclass(frozen=True)
class ElementwiseCost:
    """The cost c = l2_weight · ‖x − y‖₂² + l1_weight · ‖x − y‖₁ with class embedding scale α_c.

    Attributes:
        l1_weight: m of the paper.
        l2_weight: 1 in the paper; 0 leaves the L1 cost of its ablation (Table 2).
        class_scale: α_c of the paper; it acts where both clouds carry labels.
        memory_budget: most bytes that an n x m x d temporary of the L1 gradient may take; larger problems are
            computed in chunks of rows.
    """

    l1_weight: float = 0.0
    l2_weight: float = 1.0
    class_scale: float = 0.0
    memory_budget: int = 1 << 28

    def matrix(self, x: PointCloud, y: PointCloud) -> Tensor:
        """The cost matrix C_ij = c(x_i, y_j), of shape (..., n, m), without any n x m x d temporary."""
        cost = torch.zeros((), dtype=x.points.dtype, device=x.points.device)
        if self.l2_weight:
            cost = cost + self.l2_weight * squared_distances(x.points, y.points)
        if self.l1_weight:
            cost = cost + self.l1_weight * torch.cdist(x.points, y.points, p=1.0)
        if x.labels is not None and y.labels is not None:
            different = x.labels.unsqueeze(-1) != y.labels.unsqueeze(-2)
            cost = cost + self.class_penalty * different
        return cost.expand(*cost.shape[:-2], x.points.shape[-2], y.points.shape[-2])

    @property
    def class_penalty(self) -> float:
        """What the class embedding adds to the cost of two points of different classes."""
        return 2.0 * self.l2_weight * self.class_scale**2 + 2.0 * self.l1_weight * self.class_scale

    def pull(self, x: Tensor, y: Tensor, plan: Tensor) -> Tensor:
        """The gradient of ⟨plan, C⟩ in the first points: row i is Σ_j plan_ij ∇_x c(x_i, y_j).

        Where coordinates coincide the L1 term takes the subgradient 0.
        """
        gradient = torch.zeros_like(x)
        if self.l2_weight:
            centre = _centre(y)
            moved = plan.sum(-1, keepdim=True) * (x - centre) - plan @ (y - centre)
            gradient = gradient + 2.0 * self.l2_weight * moved
        if self.l1_weight:
            gradient = gradient + self.l1_weight * self.l1_pull(x, y, plan)
        return gradient

    def l1_pull(self, x: Tensor, y: Tensor, plan: Tensor) -> Tensor:
        """Σ_j plan_ij sign(x_i − y_j), in chunks of rows that keep within the memory budget."""
        row_bytes = max(1, y.numel() * x.element_size())
        rows = max(1, self.memory_budget // row_bytes)
        chunks = []
        for start in range(0, x.shape[-2], rows):
            difference = x[..., start : start + rows, :].unsqueeze(-2) - y.unsqueeze(-3)
            chunks.append(torch.einsum("...nm,...nmd->...nd", plan[..., start : start + rows, :], difference.sign_()))
        return torch.cat(chunks, dim=-2) if chunks else torch.zeros_like(x)


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """‖x_i − y_j‖₂² by one matrix product.

    Both clouds are first moved by the mean of the second: distances do not change, and the cancellation in
    ‖x‖² + ‖y‖² − 2⟨x, y⟩ no longer grows with the distance of the clouds from the origin.
    """
    centre = _centre(y)
    x, y = x - centre, y - centre
    products = x @ y.transpose(-1, -2)
    norms = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1).unsqueeze(-2)
    return (norms - 2.0 * products).clamp_min(0.0)


def _centre(points: Tensor) -> Tensor:
    return points.sum(-2, keepdim=True) / max(1, points.shape[-2])
