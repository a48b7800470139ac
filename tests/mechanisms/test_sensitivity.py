"""The bound that every event assumes, by brute force in float64 over add/remove neighbours."""

import math

import pytest
import torch

from dp_sinkhorn.accounting import epsilon_of
from dp_sinkhorn.mechanisms import GeneratedBatch
from tests.mechanisms.worlds import DIMENSION, PRIVATE, answer, generated, make, neighbours

KINDS = ["random", "outlier", "duplicate", "crowd", "flip"]
TRIALS = 60


@pytest.mark.parametrize("name", PRIVATE)
@pytest.mark.parametrize("kind", KINDS)
def test_one_record_moves_the_query_by_no_more_than_the_sensitivity(name: str, kind: str) -> None:
    largest = 0.0
    for seed in range(TRIALS):
        mechanism = make(name, clip=10.0 ** (seed % 4 - 3), debias=(0.0, 0.5, 1.0)[seed % 3], l1_weight=float(seed % 2))
        without, with_one = neighbours(kind, seed)
        answers = [answer(mechanism, generated(mechanism, seed), *records) for records in (without, with_one)]
        moved = (answers[1] - answers[0]).norm().item()
        assert math.isfinite(moved)
        assert moved <= mechanism.sensitivity
        largest = max(largest, moved / mechanism.sensitivity)
    if kind in ("outlier", "flip"):
        assert largest > 0.4, "neighbours this harmless would pass any bound"


@pytest.mark.parametrize("name", PRIVATE)
def test_the_noise_and_the_event_speak_of_the_same_numbers(name: str) -> None:
    mechanism = make(name, rows=50, clip=0.5, noise=1.5, rate=1 / 1200)
    event = mechanism.event
    assert event.sampling_probability == 1 / 1200
    assert event.event.noise_multiplier == pytest.approx(mechanism.noise_scale / mechanism.sensitivity)
    assert mechanism.noise_scale == pytest.approx(2 * 0.5 * 1.5)
    assert event.event.noise_multiplier == pytest.approx(1.5 / math.sqrt(50) if name == "row" else 1.5)


def flipping_world(rows: int):
    """No record against one record: it turns every row's gradient round, as far as clipping allows.

    All fresh samples X' stand at one point c. Without records a row's gradient is −2(x − c)/n, the push away from
    c; a record at c adds 4(x − c)/n, which leaves 2(x − c)/n. Both are clipped to Δ, in opposite directions.
    """
    mechanism = make("row", rows=rows, debias=1.0, clip=1e-3, noise=1.5, rate=1 / 1200, l1_weight=0.0)
    stream = torch.Generator().manual_seed(0)
    centre = torch.full((1, DIMENSION), 0.5, dtype=torch.float64)
    points = torch.rand(rows, DIMENSION, generator=stream, dtype=torch.float64) * 2 - 1
    batch = GeneratedBatch(torch.cat([points, centre.expand(rows, -1)]), torch.zeros(2 * rows, dtype=torch.long))
    label = torch.zeros(1, dtype=torch.long)
    answers = [answer(mechanism, batch, centre[:k], label[:k]) for k in (0, 1)]
    return mechanism, (answers[1] - answers[0]).norm().item()


def test_the_joint_sensitivity_of_row_is_reached() -> None:
    mechanism, moved = flipping_world(rows=50)
    assert moved == pytest.approx(mechanism.sensitivity, rel=1e-5)
    assert moved > 7 * 2 * mechanism.clip, "the 2Δ of a single row says nothing of all rows together"


def attack_delta(rate: float, shift: float, epsilon: float) -> float:
    """A lower bound on δ(ε): tell the record's presence by a threshold on the noised query along its direction."""

    def tail(x: float) -> float:
        return 0.5 * math.erfc(x / math.sqrt(2))

    with_one = lambda t: rate * tail(t - shift) + (1 - rate) * tail(t)  # noqa: E731
    return max(with_one(t / 10) - math.exp(epsilon) * tail(t / 10) for t in range(-20, 120))


def test_the_as_published_accounting_of_row_fails_and_the_sound_one_holds() -> None:
    delta = 1e-5
    mechanism, moved = flipping_world(rows=50)
    shift = moved / mechanism.noise_scale
    published = epsilon_of(mechanism.as_published_event(steps=1), delta, "rdp")
    sound = epsilon_of(mechanism.event, delta)
    assert published < 2 < sound
    assert attack_delta(mechanism.sampling_rate, shift, published) > 10 * delta
    assert attack_delta(mechanism.sampling_rate, shift, sound) <= delta
