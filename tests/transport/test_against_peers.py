"""Agreement with GeomLoss (same schedule) and POT (converged), to 1e-5 relative in float64."""

import ot
import pytest
import torch
from geomloss import SamplesLoss
from torch import Tensor

from dp_sinkhorn.transport import (
    ElementwiseCost,
    PointCloud,
    SinkhornSolver,
    empirical_sinkhorn_loss,
    semi_debiased_sinkhorn_loss,
    transport,
    wasserstein,
)

RELATIVE = 1e-5
CLASS_SCALE = 1.5
KINDS = ["random", "coincident", "one cloud twice", "far", "badly scaled"]


def embedded(points: Tensor, labels: Tensor) -> Tensor:
    """[x, α_c onehot(l)], the form in which the paper states class conditioning."""
    return torch.cat([points, CLASS_SCALE * torch.nn.functional.one_hot(labels, 3).to(points)], -1)


def dense_cost(l1_weight: float):
    """c_m on embedded points by the definition, with the full n x m x d difference."""

    def cost(x: Tensor, y: Tensor) -> Tensor:
        difference = x.unsqueeze(-2) - y.unsqueeze(-3)
        return difference.square().sum(-1) + l1_weight * difference.abs().sum(-1)

    return cost


def clouds(kind: str, n: int, m: int) -> tuple[PointCloud, PointCloud]:
    generator = torch.Generator().manual_seed(1000 * KINDS.index(kind) + 10 * n + m)
    draw = lambda rows: torch.rand(rows, 6, generator=generator, dtype=torch.float64) * 2 - 1  # noqa: E731
    x, y = draw(n), draw(m)
    if kind == "coincident":
        x[:], y[:] = x[0], x[0]
    elif kind == "one cloud twice":
        y = x[torch.arange(m) % n].clone()
    elif kind == "far":
        y = y + 1e3
    elif kind == "badly scaled":
        scales = torch.logspace(-3, 2, 6, dtype=torch.float64)
        x, y = x * scales + 50, y * scales + 50
    labels = [torch.randint(0, 3, (rows,), generator=generator) for rows in (n, m)]
    return PointCloud(x, labels[0]), PointCloud(y, labels[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("l1_weight", [0.0, 1.0, 3.0])
@pytest.mark.parametrize(("n", "m"), [(12, 9), (5, 1), (1, 1)])
@pytest.mark.parametrize("exponent", [1, 2])
def test_value_and_gradients_are_geomlosss(kind: str, l1_weight: float, n: int, m: int, exponent: int) -> None:
    temperature, diameter = 0.05, 4.0
    x, y = clouds(kind, n, m)
    x.points.requires_grad_()
    y.points.requires_grad_()
    solver = SinkhornSolver(temperature, exponent=exponent, diameter=diameter)
    ours = wasserstein(x, y, ElementwiseCost(l1_weight, class_scale=CLASS_SCALE), solver)
    ours_x, ours_y = torch.autograd.grad(ours, [x.points, y.points])

    blur = temperature ** (1 / exponent)
    peer = SamplesLoss(
        p=exponent, blur=blur, diameter=diameter, debias=False, cost=dense_cost(l1_weight), backend="tensorized"
    )
    theirs = peer(embedded(x.points, x.labels), embedded(y.points, y.labels))
    theirs_x, theirs_y = torch.autograd.grad(theirs, [x.points, y.points])

    assert_close(ours, theirs)
    assert_close(ours_x, theirs_x)
    assert_close(ours_y, theirs_y)


@pytest.mark.parametrize("l1_weight", [0.0, 1.0])
def test_diameter_and_schedule_are_geomlosss_without_labels(l1_weight: float) -> None:
    x, y = clouds("random", 12, 9)
    x, y = PointCloud(x.points.requires_grad_()), PointCloud(y.points)
    peer = SamplesLoss(p=2, blur=0.1, scaling=0.7, debias=False, cost=dense_cost(l1_weight), backend="tensorized")
    ours = wasserstein(x, y, ElementwiseCost(l1_weight), SinkhornSolver(0.1**2, scaling=0.7))
    theirs = peer(x.points, y.points)
    assert_close(ours, theirs)
    assert_close(*[torch.autograd.grad(value, x.points)[0] for value in (ours, theirs)])


def test_empirical_loss_is_twice_geomlosss_debiased_divergence() -> None:
    x, y = clouds("random", 12, 9)
    x, y = PointCloud(x.points.requires_grad_()), PointCloud(y.points)
    options = {"p": 2, "blur": 0.3, "diameter": 4.0, "cost": dense_cost(1.0), "backend": "tensorized"}
    theirs = 2 * SamplesLoss(debias=True, **options)(x.points, y.points)
    ours = empirical_sinkhorn_loss(x, y, ElementwiseCost(1.0), SinkhornSolver(0.3**2, diameter=4.0))
    assert_close(ours, theirs)
    assert_close(*[torch.autograd.grad(value, x.points)[0] for value in (ours, theirs)])


@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
def test_semi_debiased_loss_has_the_index_ranges_of_the_definition(p: float) -> None:
    n = 10
    resampled = int(n * p)
    x, y = clouds("random", n + resampled, 8)
    x = PointCloud(x.points.requires_grad_(), x.labels)
    ours = semi_debiased_sinkhorn_loss(
        x, y, p, ElementwiseCost(1.0, class_scale=CLASS_SCALE), SinkhornSolver(0.05, exponent=1, diameter=5.0)
    )
    peer = SamplesLoss(p=1, blur=0.05, diameter=5.0, debias=False, cost=dense_cost(1.0), backend="tensorized")
    points_x, points_y = embedded(x.points, x.labels), embedded(y.points, y.labels)
    theirs = 2 * peer(points_x[0:n], points_y) - peer(points_x[0:n], points_x[resampled : n + resampled])
    assert_close(ours, theirs)
    assert_close(*[torch.autograd.grad(value, x.points)[0] for value in (ours, theirs)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("l1_weight", [0.0, 1.0])
@pytest.mark.parametrize(("n", "m"), [(12, 9), (5, 1), (1, 1)])
def test_converged_solver_is_pots(kind: str, l1_weight: float, n: int, m: int) -> None:
    x, y = clouds(kind, n, m)
    temperature = {"far": 300.0, "badly scaled": 300.0, "coincident": 3.0}.get(kind, 0.3)
    solver = SinkhornSolver(temperature, tolerance=1e-12)
    cost = ElementwiseCost(l1_weight, class_scale=CLASS_SCALE)
    solved = transport(x, y, cost, solver)
    matrix = dense_cost(l1_weight)(embedded(x.points, x.labels), embedded(y.points, y.labels))
    plan = ot.sinkhorn(
        torch.full((n,), 1 / n, dtype=torch.float64),
        torch.full((m,), 1 / m, dtype=torch.float64),
        matrix,
        temperature,
        method="sinkhorn_log",
        numItermax=100_000,
        stopThr=1e-13,
    )
    assert_close(solved.plan_rows, plan)
    assert_close(solved.plan_columns, plan)
    # Primal value ⟨P, C⟩ + λ KL(P | μ ⊗ ν) of POT's plan against our dual value.
    entropy = (plan * (plan * n * m).clamp_min(1e-300).log()).sum()
    assert_close(solved.value, (plan * matrix).sum() + temperature * entropy)
    assert solved.marginal_error.item() < 1e-9


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    scale = theirs.abs().max().clamp_min(1e-12)
    assert ((ours - theirs).abs().max() / scale).item() <= RELATIVE
