"""What each mechanism clips, noises and returns."""

import math

import pytest
import torch

from dp_sinkhorn.accounting import Budget, Ledger, epsilon_of
from dp_sinkhorn.errors import UserError
from dp_sinkhorn.images import LabelledImages
from dp_sinkhorn.mechanisms import Barrier, OsEntropy, ParameterGradient, clip_rows, mechanism_class
from dp_sinkhorn.records import PrivateRecords
from dp_sinkhorn.transport import PointCloud, semi_debiased_sinkhorn_loss
from tests.mechanisms.worlds import PRIVATE, SHAPE, answer, generated, make, neighbours


def small_records(count: int = 6) -> PrivateRecords:
    images = torch.randint(0, 256, (count, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return PrivateRecords(LabelledImages(images, torch.arange(count) % 3, ("a", "b", "c")))


def loss_gradient(mechanism, batch, pixels, labels):
    points = batch.pixels.detach().requires_grad_()
    loss = semi_debiased_sinkhorn_loss(
        PointCloud(points, batch.labels),
        PointCloud(pixels, labels),
        mechanism.debias,
        mechanism.cost,
        mechanism._solver(batch),
    )
    return torch.autograd.grad(loss, points)[0]


def test_row_is_the_clipped_gradient_of_the_semi_debiased_loss() -> None:
    mechanism = make("row", clip=0.3)
    batch, (_, records) = generated(mechanism, 3), neighbours("random", 3)
    gradient = loss_gradient(mechanism, batch, *records)
    norms = gradient.norm(dim=1, keepdim=True)
    expected = gradient * (0.3 / norms).clamp_max(1)
    self_term = mechanism.self_term(batch)
    query = answer(mechanism, batch, *records)
    torch.testing.assert_close(query, expected[:6], rtol=1e-5, atol=1e-9)
    whole = mechanism.gradient(batch, self_term, query).value
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-9)


def test_batch_and_nonprivate_use_the_same_gradient() -> None:
    for name in ("batch", "nonprivate"):
        mechanism = make(name, clip=0.3)
        batch, (_, records) = generated(mechanism, 3), neighbours("random", 3)
        gradient = loss_gradient(mechanism, batch, *records)[:6]
        expected = gradient if name == "nonprivate" else clip_rows(gradient.reshape(1, -1), 0.3).reshape(6, -1)
        torch.testing.assert_close(answer(mechanism, batch, *records), expected)


def test_parameter_is_the_clipped_vector_jacobian_product() -> None:
    mechanism = make("parameter", clip=1e6)
    (_, records) = neighbours("random", 4)
    batch = generated(mechanism, 4)
    gradient = loss_gradient(mechanism, batch, *records)
    batch.pixels.backward(gradient)
    expected = torch.cat([parameter.grad.flatten() for parameter in batch.parameters])
    again = generated(mechanism, 4)
    query = answer(mechanism, again, *records)
    torch.testing.assert_close(query, expected)
    ParameterGradient(query).backpropagate(again)
    torch.testing.assert_close(again.parameters[1].grad, batch.parameters[1].grad)


@pytest.mark.parametrize("name", [*PRIVATE, "nonprivate"])
def test_release_has_the_same_shape_for_every_batch_even_an_empty_one(name: str) -> None:
    mechanism = make(name, rate=0.2)
    shapes = {
        tuple(mechanism.release(generated(mechanism, 0), small_records(), OsEntropy()).value.shape) for _ in range(30)
    }
    assert len(shapes) == 1


def test_nonprivate_says_so() -> None:
    mechanism = make("nonprivate")
    assert mechanism.noise_scale == 0.0
    assert epsilon_of(mechanism.event, 1e-5) == math.inf
    assert epsilon_of(mechanism.event, 1e-5, "rdp") == math.inf


def test_the_barrier_releases_only_what_the_ledger_has_reserved() -> None:
    mechanism = make("batch")
    ledger = Ledger(Budget(None, 1e-5))
    barrier = Barrier(mechanism, small_records(), OsEntropy(), ledger)
    with pytest.raises(RuntimeError, match="reserved"):
        barrier.release(generated(mechanism, 0))
    barrier.reserve(2)
    assert ledger.releases == 2
    barrier.release(generated(mechanism, 0))
    barrier.release(generated(mechanism, 0))
    with pytest.raises(RuntimeError, match="used"):
        barrier.release(generated(mechanism, 0))
    barrier.reserve(5)
    barrier.release(generated(mechanism, 0))
    barrier.settle()
    assert ledger.releases == 3
    with pytest.raises(RuntimeError, match="reserved"):
        barrier.release(generated(mechanism, 0))


def test_a_release_is_spent_before_the_records_are_looked_at(monkeypatch) -> None:
    mechanism = make("batch")
    barrier = Barrier(mechanism, small_records(), OsEntropy(), Ledger(Budget(None, 1e-5)))
    barrier.reserve(1)

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(mechanism), "query", fail)
        with pytest.raises(MemoryError):
            barrier.release(generated(mechanism, 0))
    with pytest.raises(RuntimeError, match="used"):
        barrier.release(generated(mechanism, 0))


def test_an_allowance_is_for_one_event_and_one_process() -> None:
    event = make("batch").event
    allowance = Ledger(Budget(None, 1e-5)).reserve(event, 3)
    with pytest.raises(RuntimeError, match="has reserved"):
        allowance.take(make("batch", noise=0.01).event)
    allowance.process += 1
    with pytest.raises(RuntimeError, match="another process"):
        allowance.take(event)
    with pytest.raises(AttributeError):
        Barrier(make("batch"), small_records(), OsEntropy(), Ledger(Budget(None, 1e-5))).mechanism = make("row")


def test_the_iterations_of_the_solver_do_not_depend_on_the_records(monkeypatch) -> None:
    from dp_sinkhorn.transport import sinkhorn

    counts = []
    original = sinkhorn.Transport.__init__

    def count(self, *args, **kwargs) -> None:
        original(self, *args, **kwargs)
        counts.append(self.iterations)

    monkeypatch.setattr(sinkhorn.Transport, "__init__", count)
    mechanism = make("row")
    batch = generated(mechanism, 0)
    for kind in ("random", "outlier", "crowd"):
        answer(mechanism, batch, *neighbours(kind, 2)[1])
    assert len(set(counts)) == 1


def test_unknown_mechanism_is_named_with_the_known_ones() -> None:
    with pytest.raises(
        UserError, match=r"unknown mechanism 'rows'; choose one of batch, nonprivate, parameter, per_record, row"
    ):
        mechanism_class("rows")
