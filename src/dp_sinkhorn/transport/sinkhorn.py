"""The Sinkhorn algorithm in the log domain (Algorithm 2 of the paper's appendix).

Conventions, and where they differ from the paper's text and from GeomLoss (docs/transport.md has the table):

* `temperature` is the paper's λ, in units of the cost. GeomLoss takes `blur` and an exponent p and uses
  λ = blur^p.
* The value is the dual one, ⟨μ, f⟩ + ⟨ν, g⟩, as Algorithm 2 and GeomLoss return. (Definition 3.1 of the paper
  writes C ⊙ P, which leaves out the entropy.)
* Algorithm 2 alternates updates at λ until converged. By default this solver does what GeomLoss does: an
  ε-scaling descent with averaged, simultaneous updates and one last extrapolation step. With a `tolerance`
  it then goes on with Algorithm 2's alternating updates until the marginals hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dp_sinkhorn.transport.costs import ElementwiseCost, PointCloud


@dataclass(frozen=True)
class SinkhornSolver:
    """Settings of the Sinkhorn solver.

    Attributes:
        temperature: λ, the strength of the entropic regularisation.
        exponent: p; the descent starts at temperature diameter^p and each step divides it by scaling^-p.
        scaling: ratio of two successive blurs, in (0, 1). 0.5 is GeomLoss's default.
        diameter: upper bound on the distance of any two points; None measures the bounding box of the
            points (with one host synchronisation on a GPU).
        tolerance: None stops after the descent, as GeomLoss does. A number goes on until the L1 error of the
            first marginal is at most this, in every problem of the batch.
        max_iterations: most iterations in all.
    """

    temperature: float
    exponent: float = 2.0
    scaling: float = 0.5
    diameter: float | None = None
    tolerance: float | None = None
    max_iterations: int = 100_000

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")
        if not 0 < self.scaling < 1:
            raise ValueError(f"scaling must lie in (0, 1), got {self.scaling}")

    def schedule(self, diameter: float) -> list[float]:
        """Temperatures of the ε-scaling descent, from diameter^p down to λ (Feydy 2020, section 3.3.3).

        The first temperature serves twice and the last is exactly λ, as in GeomLoss.
        """
        stop = math.log(self.temperature)
        # Points that coincide have diameter 0; from e^-20 λ on, a lower start would only underflow.
        start = max(self.exponent * math.log(max(diameter, 1e-300)), stop - 20.0)
        step = self.exponent * math.log(self.scaling)
        steps = max(0, math.ceil((stop - start) / step))
        return [math.exp(start), *(math.exp(start + k * step) for k in range(steps)), self.temperature]


@dataclass(frozen=True, eq=False)
class Transport:
    """A solved transport problem between two clouds: value, potentials, plan and gradients.

    Attributes:
        value: (...,) the entropic cost Ŵ_λ = ⟨μ, f⟩ + ⟨ν, g⟩.
        f: (..., n) potential on the first cloud.
        g: (..., m) potential on the second cloud.
        plan_rows: (..., n, m) plan whose rows sum exactly to the weights of the first cloud.
        plan_columns: (..., n, m) plan whose columns sum exactly to the weights of the second cloud. The two
            plans agree at convergence.
        iterations: Sinkhorn iterations done.
        marginal_error: (...,) L1 distance between the row sums of `plan_columns` and the first cloud's weights.
    """

    cost: ElementwiseCost
    x: Tensor
    y: Tensor
    value: Tensor
    f: Tensor
    g: Tensor
    plan_rows: Tensor
    plan_columns: Tensor
    iterations: int

    @cached_property
    def marginal_error(self) -> Tensor:
        """How far the two marginals are from holding at once, in L1."""
        return (self.plan_columns.sum(-1) - self.plan_rows.sum(-1)).abs().sum(-1)

    @cached_property
    def gradient_x(self) -> Tensor:
        """∇_X Ŵ_λ by the envelope theorem: the potentials are held fixed, Σ_j P_ij ∇_x c(x_i, y_j)."""
        return self.cost.pull(self.x, self.y, self.plan_rows)

    @cached_property
    def gradient_y(self) -> Tensor:
        """∇_Y Ŵ_λ, likewise; the cost is symmetric."""
        return self.cost.pull(self.y, self.x, self.plan_columns.transpose(-1, -2))


@torch.no_grad()
def transport(x: PointCloud, y: PointCloud, cost: ElementwiseCost, solver: SinkhornSolver) -> Transport:
    """Solve the entropic transport problem between two clouds with uniform weights.

    A problem whose first or second cloud is empty (no rows, or all masked) has value 0 and gradient 0: a
    Poisson batch may be empty, and then there is nothing to be pulled to.
    """
    a, b = x.weights, y.weights
    if x.points.shape[-2] == 0 or y.points.shape[-2] == 0:
        return _empty_transport(x, y, cost)
    # A problem with an empty side is made harmless: finite log-weights to iterate with, zero weight at the end.
    alive = (a.sum(-1, keepdim=True) > 0) & (b.sum(-1, keepdim=True) > 0)
    log_a, log_b = _log_weights(a, alive), _log_weights(b, alive)
    a, b = a * alive, b * alive

    matrix = cost.matrix(x, y)
    diameter = _diameter(x, y) if solver.diameter is None else solver.diameter
    temperatures = solver.schedule(diameter)
    kernel = matrix / temperatures[0]
    f, g = _softmin(temperatures[0], kernel, log_b), _softmin_columns(temperatures[0], kernel, log_a)
    for temperature in temperatures:
        kernel = matrix / temperature
        # Averaged, simultaneous updates (Feydy 2020, algorithm 3.5): the descent keeps f and g in balance.
        f, g = (
            0.5 * (f + _softmin(temperature, kernel, log_b + g / temperature)),
            0.5 * (g + _softmin_columns(temperature, kernel, log_a + f / temperature)),
        )
    iterations, final = len(temperatures), temperatures[-1]
    if solver.tolerance is not None:
        f, g, iterations = _alternate(f, g, kernel, a, log_a, log_b, final, iterations, solver)

    # The last extrapolation: each new potential fits its own marginal exactly, given the other's old value.
    f_new = _softmin(final, kernel, log_b + g / final)
    g_new = _softmin_columns(final, kernel, log_a + f / final)
    return Transport(
        cost=cost,
        x=x.points,
        y=y.points,
        value=(a * f_new).sum(-1) + (b * g_new).sum(-1),
        f=f_new,
        g=g_new,
        plan_rows=a.unsqueeze(-1) * ((f_new / final).unsqueeze(-1) + (log_b + g / final).unsqueeze(-2) - kernel).exp(),
        plan_columns=b.unsqueeze(-2)
        * ((log_a + f / final).unsqueeze(-1) + (g_new / final).unsqueeze(-2) - kernel).exp(),
        iterations=iterations,
    )


def _alternate(
    f: Tensor,
    g: Tensor,
    kernel: Tensor,
    a: Tensor,
    log_a: Tensor,
    log_b: Tensor,
    temperature: float,
    iterations: int,
    solver: SinkhornSolver,
) -> tuple[Tensor, Tensor, int]:
    """Algorithm 2: alternate f and g at λ until the first marginal holds to the tolerance."""
    assert solver.tolerance is not None
    while iterations < solver.max_iterations:
        g = _softmin_columns(temperature, kernel, log_a + f / temperature)
        f_new = _softmin(temperature, kernel, log_b + g / temperature)
        # With g just fitted the columns hold; row i has mass a_i exp((f_i − f_i') / λ).
        error = (a * torch.expm1((f - f_new) / temperature).abs()).sum(-1).max()
        f, iterations = f_new, iterations + 1
        if error.item() <= solver.tolerance:
            break
    return f, g, iterations


def _softmin(temperature: float, kernel: Tensor, logits: Tensor) -> Tensor:
    """f_i = −λ log Σ_j exp(h_j − C_ij / λ), the first update of Algorithm 2; the kernel is C / λ."""
    return _logsumexp(logits.unsqueeze(-2) - kernel, -1).mul_(-temperature)


def _softmin_columns(temperature: float, kernel: Tensor, logits: Tensor) -> Tensor:
    """g_j = −λ log Σ_i exp(h_i − C_ij / λ), the second update of Algorithm 2; the kernel is C / λ."""
    return _logsumexp(logits.unsqueeze(-1) - kernel, -2).mul_(-temperature)


def _logsumexp(values: Tensor, dim: int) -> Tensor:
    """Compute log Σ exp of a temporary, overwritten; for sums with at least one finite term.

    `torch.logsumexp` spends about as long again on the infinities that cannot occur here, and this is most of what a
    small problem costs.
    """
    largest = values.amax(dim, keepdim=True)
    return values.sub_(largest).exp_().sum(dim).log_().add_(largest.squeeze(dim))


def _log_weights(weights: Tensor, alive: Tensor) -> Tensor:
    return torch.where(alive, weights, torch.ones_like(weights)).log()


def _diameter(x: PointCloud, y: PointCloud) -> float:
    """Length of the diagonal of the bounding box of all points, GeomLoss's estimate.

    With labels the box of the class embedding is left out: it does not matter for a starting temperature.
    """
    low = torch.minimum(x.points.amin(-2), y.points.amin(-2))
    high = torch.maximum(x.points.amax(-2), y.points.amax(-2))
    dimension = x.points.shape[-1]
    extent = high.reshape(-1, dimension).amax(0) - low.reshape(-1, dimension).amin(0)
    return float(extent.norm().item())


def _empty_transport(x: PointCloud, y: PointCloud, cost: ElementwiseCost) -> Transport:
    n, m = x.points.shape[-2], y.points.shape[-2]
    batch = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        x.points.shape[:-2], y.points.shape[:-2]
    )
    plan = x.points.new_zeros(*batch, n, m)
    return Transport(cost, x.points, y.points, plan.sum((-1, -2)), plan.sum(-1), plan.sum(-2), plan, plan, iterations=0)
