"""The pull of single records on generated atoms, and its clipped sum, computed exactly (per-record transport).

For a record (y, l) and the atoms x_i of its class, with cost c_m and entropic scale λ:

    w_i(y) = softmax_i(−c_m(x_i, y) / λ)               its column of the Gibbs plan at zero potential
    V_i(y) = w_i(y) ∇_{x_i} c_m(x_i, y)                 its pull on the atoms
    V̄(y)   = V(y) · min(1, C / ‖V(y)‖_F)

Only Σ_y V̄(y) is ever wanted. For the squared L2 cost it is two matrix products for each class, and nothing of the size
atoms × records × pixels is formed; the L1 term takes that in chunks.

**The sum is exact.** Coordinates of records become whole levels, −255..255 for pixels and −1020..1020 for features, and
those of atoms sixteenths of a level; the clipped weights are rounded *down* to multiples of 2^-20. Then every product
and every partial sum is a whole multiple of 2^-24 below 2^29,
which float64 holds without rounding, in any order of summation, on any hardware. So what is summed is Σ_y V̄(y) for
vectors whose norm is at most C, and not merely close to it (docs/privacy.md, section 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dp_sinkhorn.transport.costs import ElementwiseCost

LEVELS = 255.0
"""A pixel of [-1, 1] is this many levels; an 8-bit grey value b is the whole level 2b − 255."""
MOST_LEVELS = 1020.0
"""No coordinate, pixel or feature, is larger than this many levels."""

ATOM_GRID = 16.0
WEIGHT_GRID = 2.0**20
MARGIN = 2.0**-20
MAX_RECORDS = 2**18
"""Most records in one sum for which it is exact."""


@dataclass(frozen=True, eq=False)
class PullSum:
    """Σ_y of weighted differences between atoms and records, in exact parts.

    Attributes:
        differences: (L, a, d) Σ_y w̄_i(y) (x_i − y), in levels.
        signs: (L, a, d) Σ_y w̄_i(y) sign(x_i − y), where the cost has an L1 term.
    """

    differences: Tensor
    signs: Tensor | None

    @classmethod
    def zero(cls, atoms: Tensor, cost: ElementwiseCost) -> PullSum:
        """The sum over no record."""
        return cls(torch.zeros_like(atoms), torch.zeros_like(atoms) if cost.l1_weight else None)

    def add(self, rows: Tensor, other: PullSum) -> None:
        """Add sums for some of the classes in place, which may name a class more than once; exact."""
        rows = rows.to(self.differences.device)
        self.differences.index_add_(0, rows, other.differences)
        if self.signs is not None and other.signs is not None:
            self.signs.index_add_(0, rows, other.signs)

    def gradient(self, cost: ElementwiseCost) -> Tensor:
        """Σ_y V̄(y), of ∇_x c_m = 2a (x − y) + m sign(x − y)."""
        pull = (2.0 * cost.l2_weight / LEVELS) * self.differences
        return pull if self.signs is None else pull + cost.l1_weight * self.signs


def to_levels(values: Tensor, grid: float = 1.0, most: float = LEVELS) -> Tensor:
    """Values as float64 levels, rounded to whole multiples of 1/grid and kept within ±most; NaN becomes 0."""
    levels = torch.nan_to_num(values * (LEVELS * grid), nan=0.0).round_().clamp_(-most * grid, most * grid)
    return levels.double().div_(grid)


def clipped_pull(
    atoms: Tensor, records: Tensor, present: Tensor, cost: ElementwiseCost, temperature: float, bound: float
) -> PullSum:
    """Σ_y V̄(y) for each class.

    What concerns one record is computed along one row, (…, record, atoms), and does not depend on other rows.

    Args:
        atoms: (L, a, d) levels of a atoms for each of L classes, from `to_levels(·, ATOM_GRID)`.
        records: (L, b, d) levels of b records of each class, from `to_levels`.
        present: (L, b) False for padding, which pulls nothing.
        cost: c_m; classes do not meet here, so its class embedding is of no account.
        temperature: λ.
        bound: C.
    """
    squares = _squared_level_distances(records, atoms) / LEVELS**2
    costs, gradient_squares = cost.l2_weight * squares, 4.0 * cost.l2_weight**2 * squares
    if cost.l1_weight:
        distances = torch.cdist(records, atoms, p=1.0) / LEVELS
        costs = costs + cost.l1_weight * distances
        # ‖2a(x − y) + m sign(x − y)‖² = 4a² ‖x − y‖₂² + 4am ‖x − y‖₁ + m² · (number of differing pixels ≤ d)
        gradient_squares = gradient_squares + 4.0 * cost.l2_weight * cost.l1_weight * distances
        gradient_squares = gradient_squares + cost.l1_weight**2 * atoms.shape[-1]
    weights = torch.softmax(costs / -temperature, dim=-1)
    norms = (weights.square() * gradient_squares).sum(-1, keepdim=True).sqrt()
    limit = bound * (1.0 - MARGIN)
    weights = weights * (limit / norms.clamp_min(limit)) * present.unsqueeze(-1)
    weights = torch.floor(weights * WEIGHT_GRID).div_(WEIGHT_GRID).transpose(1, 2)
    return PullSum(
        weights.sum(2, keepdim=True) * atoms - weights @ records,
        cost.l1_pull(atoms, records, weights) if cost.l1_weight else None,
    )


def _squared_level_distances(records: Tensor, atoms: Tensor) -> Tensor:
    """(L, b, a) ‖x_i − y_j‖² in squared levels: whole multiples of 2^-8 below 2^34, so the expansion is exact."""
    norms = records.square().sum(-1).unsqueeze(2) + atoms.square().sum(-1).unsqueeze(1)
    return torch.baddbmm(norms, records, atoms.transpose(1, 2), alpha=-2.0)
