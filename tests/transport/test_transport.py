"""Costs, solver and losses against their definitions."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dp_sinkhorn.transport import (
    ElementwiseCost,
    PointCloud,
    SinkhornSolver,
    cross_gradient,
    resampled_count,
    self_gradient,
    semi_debiased_sinkhorn_loss,
    transport,
    wasserstein,
)
from dp_sinkhorn.transport.losses import cross_count

SOLVER = SinkhornSolver(0.5, tolerance=1e-13)


def points(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2 - 1


class LargestTensor(TorchDispatchMode):
    """Records the size in bytes of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            # A broadcast view owns no memory of its own.
            if isinstance(value, torch.Tensor) and value._base is None:
                self.bytes = max(self.bytes, value.numel() * value.element_size())
        return out


@pytest.mark.parametrize("l1_weight", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("l2_weight", [0.0, 1.0])
def test_cost_and_pull_are_the_definition_and_its_gradient(l1_weight: float, l2_weight: float) -> None:
    x, y = points(7, 5).requires_grad_(), points(4, 5, seed=1)
    plan = points(7, 4, seed=2).abs()
    difference = x[:, None] - y[None]
    dense = l2_weight * difference.square().sum(-1) + l1_weight * difference.abs().sum(-1)
    cost = ElementwiseCost(l1_weight, l2_weight)
    torch.testing.assert_close(cost.matrix(PointCloud(x.detach()), PointCloud(y)), dense.detach())
    if l1_weight or l2_weight:
        expected = torch.autograd.grad((plan * dense).sum(), x)[0]
        torch.testing.assert_close(cost.pull(x.detach(), y, plan), expected)


def test_memory_budget_bounds_every_temporary_and_changes_nothing() -> None:
    n, m, d = 60, 50, 400
    x, y, plan = points(n, d), points(m, d, seed=1), points(n, m, seed=2)
    dense_bytes = n * m * d * 8
    budget = dense_bytes // 10
    free, bound = ElementwiseCost(1.0), ElementwiseCost(1.0, memory_budget=budget)
    with LargestTensor() as seen:
        chunked = bound.pull(x, y, plan)
        matrix = bound.matrix(PointCloud(x), PointCloud(y))
    assert seen.bytes <= budget
    with LargestTensor() as seen_free:
        torch.testing.assert_close(chunked, free.pull(x, y, plan))
    assert seen_free.bytes == dense_bytes, "the probe must see the temporary that the budget avoids"
    torch.testing.assert_close(matrix, free.matrix(PointCloud(x), PointCloud(y)))


def test_gradient_is_that_of_the_converged_value() -> None:
    """The envelope theorem against central differences of the value."""
    x, y = points(6, 3), points(5, 3, seed=1)
    cost = ElementwiseCost(l1_weight=1.0)
    gradient_x = transport(PointCloud(x), PointCloud(y), cost, SOLVER).gradient_x
    gradient_y = transport(PointCloud(x), PointCloud(y), cost, SOLVER).gradient_y
    for tensor, gradient in ((x, gradient_x), (y, gradient_y)):
        for index in [(0, 0), (3, 2), (4, 1)]:
            values = []
            for step in (1e-5, -1e-5):
                tensor[index] += step
                values.append(transport(PointCloud(x), PointCloud(y), cost, SOLVER).value)
                tensor[index] -= step
            assert ((values[0] - values[1]) / 2e-5).item() == pytest.approx(gradient[index].item(), rel=1e-4, abs=1e-6)


def test_marginals_hold_and_iterations_are_counted() -> None:
    x, y = PointCloud(points(9, 4)), PointCloud(points(7, 4, seed=1))
    descent = SinkhornSolver(0.05, diameter=4.0)
    loose = transport(x, y, ElementwiseCost(), descent)
    tight = transport(x, y, ElementwiseCost(), SinkhornSolver(0.05, diameter=4.0, tolerance=1e-10))
    torch.testing.assert_close(loose.plan_rows.sum(-1), torch.full((9,), 1 / 9, dtype=torch.float64))
    torch.testing.assert_close(loose.plan_columns.sum(-2), torch.full((7,), 1 / 7, dtype=torch.float64))
    assert tight.marginal_error < 1e-9 < loose.marginal_error
    assert tight.iterations > loose.iterations == len(descent.schedule(4.0))
    capped = transport(x, y, ElementwiseCost(), SinkhornSolver(0.05, tolerance=1e-10, max_iterations=20))
    assert capped.iterations == 20


def test_schedule_halves_the_blur_down_to_the_temperature() -> None:
    schedule = SinkhornSolver(0.05, exponent=2, scaling=0.5).schedule(4.0)
    assert schedule[:3] == pytest.approx([16.0, 16.0, 4.0])
    assert schedule[-1] == 0.05
    assert all(later <= earlier for earlier, later in itertools.pairwise(schedule))


def test_masks_are_the_same_as_leaving_the_points_out() -> None:
    x, y = points(8, 3), points(6, 3, seed=1)
    labels_x, labels_y = torch.arange(8) % 2, torch.arange(6) % 2
    mask_x, mask_y = torch.arange(8) < 5, torch.arange(6) < 4
    cost = ElementwiseCost(1.0, class_scale=1.0)
    solver = SinkhornSolver(0.1, diameter=4.0)
    padded = transport(PointCloud(x, labels_x, mask_x), PointCloud(y, labels_y, mask_y), cost, solver)
    plain = transport(PointCloud(x[:5], labels_x[:5]), PointCloud(y[:4], labels_y[:4]), cost, solver)
    torch.testing.assert_close(padded.value, plain.value)
    torch.testing.assert_close(padded.gradient_x[:5], plain.gradient_x)
    torch.testing.assert_close(padded.gradient_y[:4], plain.gradient_y)
    assert not padded.gradient_x[5:].any()
    assert not padded.gradient_y[4:].any()


def test_batches_are_solved_side_by_side_empty_ones_included() -> None:
    x, y = points(3, 6, 4), points(3, 5, 4, seed=1)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1] = False
    cost, solver = ElementwiseCost(1.0), SinkhornSolver(0.1, diameter=4.0)
    batched = transport(PointCloud(x), PointCloud(y, mask=mask), cost, solver)
    for k in (0, 2):
        single = transport(PointCloud(x[k]), PointCloud(y[k]), cost, solver)
        torch.testing.assert_close(batched.value[k], single.value)
        torch.testing.assert_close(batched.gradient_x[k], single.gradient_x)
    assert batched.value[1] == 0
    assert not batched.gradient_x[1].any()


def test_empty_cloud_pulls_nothing() -> None:
    x = PointCloud(points(4, 3))
    solved = transport(x, PointCloud(points(0, 3)), ElementwiseCost(1.0), SinkhornSolver(0.1))
    assert solved.value == 0
    assert solved.gradient_x.shape == (4, 3)
    assert not solved.gradient_x.any()


@pytest.mark.parametrize("p", [0.0, 0.25, 0.4, 1.0])
def test_the_two_halves_add_up_to_the_losss_gradient(p: float) -> None:
    n = 8
    x, y = points(n + resampled_count(n, p), 3).requires_grad_(), PointCloud(points(5, 3, seed=1))
    cost, solver = ElementwiseCost(1.0), SinkhornSolver(0.1, diameter=4.0)
    loss = semi_debiased_sinkhorn_loss(PointCloud(x), y, p, cost, solver)
    halves = self_gradient(PointCloud(x.detach()), n, cost, solver)
    halves[:n] += cross_gradient(PointCloud(x.detach())[0:n], y, cost, solver)
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], halves)


def test_fully_debiased_gradient_vanishes_on_average_at_the_fixed_point() -> None:
    """At p = 1 and equal laws the expected gradient is zero (Salimans et al.); at p = 0 it is not."""
    n, cost, solver = 16, ElementwiseCost(), SinkhornSolver(0.5, diameter=4.0)
    means = {}
    for p in (0.0, 1.0):
        rows = n + resampled_count(n, p)
        x = points(200, rows, 1, seed=3)
        y = points(200, n, 1, seed=4)
        gradient = self_gradient(PointCloud(x), n, cost, solver)
        gradient[:, :n] += cross_gradient(PointCloud(x)[0:n], PointCloud(y), cost, solver)
        # The pull along x itself: contraction or expansion of the cloud.
        means[p] = (gradient * x).sum((-1, -2)).mean().item()
    assert abs(means[1.0]) < 0.25 * abs(means[0.0])


def test_float32_follows_float64() -> None:
    x, y = points(20, 784), points(15, 784, seed=1)
    cost, solver = ElementwiseCost(1.0), SinkhornSolver(5.0, diameter=56.0)
    exact = transport(PointCloud(x), PointCloud(y), cost, solver)
    single = transport(PointCloud(x.float()), PointCloud(y.float()), cost, solver)
    assert single.value.item() == pytest.approx(exact.value.item(), rel=1e-5)
    assert (single.gradient_x - exact.gradient_x).norm() <= 1e-3 * exact.gradient_x.norm()


def test_resampled_count_is_the_mathematical_floor() -> None:
    assert resampled_count(100, 0.29) == 29
    assert resampled_count(50, 0.4) == 20
    assert resampled_count(7, 0.5) == 3
    assert cross_count(70, 0.4) == 50
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        resampled_count(10, 1.5)


def test_values_flow_through_autograd_with_an_outer_factor() -> None:
    x, y = points(5, 2).requires_grad_(), points(4, 2, seed=1)
    solver = SinkhornSolver(0.3, diameter=3.0)
    value = 3.0 * wasserstein(PointCloud(x), PointCloud(y), ElementwiseCost(), solver)
    expected = 3.0 * transport(PointCloud(x.detach()), PointCloud(y), ElementwiseCost(), solver).gradient_x
    torch.testing.assert_close(torch.autograd.grad(value, x)[0], expected)
