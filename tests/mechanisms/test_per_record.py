"""Per-record transport: the bound on a record's part of the answer, the exactness of the sum, and the fixed point."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.features import FEATURE_GRID, OrientedEnergy
from dp_sinkhorn.images import LabelledImages, from_pixels
from dp_sinkhorn.labelling import BIAS
from dp_sinkhorn.mechanisms import GeneratedBatch, OsEntropy, PerRecordMechanism, mechanism_class
from dp_sinkhorn.mechanisms.per_record import Schedule, class_blocks
from dp_sinkhorn.mechanisms.probe import probe_gradient
from dp_sinkhorn.records import PrivateRecords, RecordBatch
from dp_sinkhorn.settings import complete, parse_settings
from dp_sinkhorn.transport import ElementwiseCost
from dp_sinkhorn.transport.pull import (
    ATOM_GRID,
    LEVELS,
    MAX_RECORDS,
    MOST_LEVELS,
    PullSum,
    clipped_pull,
    to_levels,
)
from tests.mechanisms.worlds import CLASSES, DIMENSION, SHAPE, neighbours

KINDS = ["random", "outlier", "duplicate", "crowd", "flip"]
FALSE_ALARM = 1e-6


def make(**changes) -> PerRecordMechanism:
    values = {
        "sampling_rate": 0.5, "noise_multiplier": 1.3, "expected_batch": 30.0, "rows": 12, "own": 24, "clip": 1.0,
        "cost": ElementwiseCost(), "temperature": Schedule(4.0, 1.0), "debias": Schedule(0.5, 1.0),
        "histogram_share": 0.05, "probe_share": 0.2, "feature_scale": 0.0,
    }  # fmt: skip
    return PerRecordMechanism(**{**values, **changes})


def world(mechanism: PerRecordMechanism, seed: int, progress: float = 0.0) -> GeneratedBatch:
    """A generated batch with a companion that has learnt something, as in the middle of a run."""
    stream = torch.Generator().manual_seed(seed)
    labels = mechanism.draw_labels(CLASSES, stream)
    own_labels = mechanism.draw_own_labels(CLASSES)
    companion = mechanism.make_companion(SHAPE, CLASSES)
    companion.weight += 30 * torch.randn(companion.weight.shape, generator=stream)
    companion.summed += 0.05 * torch.randn(companion.summed.shape, generator=stream)
    pixels = torch.rand(len(labels), DIMENSION, generator=stream) * 2 - 1
    own = torch.rand(len(own_labels), DIMENSION, generator=stream) * 2 - 1
    return GeneratedBatch(pixels, labels, (), own, own_labels, progress, companion)


def answer(mechanism: PerRecordMechanism, batch: GeneratedBatch, pixels: Tensor, labels: Tensor) -> Tensor:
    features = mechanism.features(SHAPE)
    values = features(pixels.clamp(-1, 1)) if features is not None else None
    return mechanism.query(batch, mechanism.self_term(batch), RecordBatch(pixels.float(), labels, values))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("l1_weight", [0.0, 1.0])
def test_one_record_moves_the_answer_by_at_most_one(kind: str, l1_weight: float) -> None:
    largest = 0.0
    for seed in range(60):
        mechanism = make(
            clip=10.0 ** (seed % 3 - 1), cost=ElementwiseCost(l1_weight), probe_share=0.2 * (seed % 2),
            temperature=Schedule(10.0 ** (seed % 5 - 2), 1.0),
        )  # fmt: skip
        batch = world(mechanism, seed)
        without, with_one = (answer(mechanism, batch, *pair) for pair in neighbours(kind, seed))
        moved = (with_one - without).norm().item()
        assert moved <= mechanism.sensitivity
        largest = max(largest, moved)
    assert largest > 0.9, "neighbours this harmless would pass any bound"


def test_a_record_at_the_bound_reaches_it() -> None:
    """Sensitivity 1 is tight: all three parts of one record are as long as their shares allow."""
    mechanism = make(probe_share=0.5, temperature=Schedule(1e3, 1.0), clip=0.1)
    batch = world(mechanism, 0)
    batch.companion.weight.copy_(torch.tensor([[-60.0, 60.0, 0.0]]).expand_as(batch.companion.weight) * 1e3)
    pixels = torch.rand(1, DIMENSION, generator=torch.Generator().manual_seed(1)) * 2 - 1
    values = answer(mechanism, batch, pixels, torch.zeros(1, dtype=torch.long))
    assert 0.999 < values.norm().item() <= 1.0
    pull = values[: 12 * DIMENSION].norm().item() / math.sqrt(mechanism._transport_share)
    assert 1 - 1e-3 < pull < 1


def test_what_is_multiplied_lies_on_its_grid() -> None:
    mechanism = make()
    batch = world(mechanism, 0)
    odd = dataclasses.replace(batch, pixels=torch.tanh(batch.pixels * 1.2345))
    atoms = mechanism.self_term(odd).atoms
    assert torch.equal(atoms * ATOM_GRID, (atoms * ATOM_GRID).round())
    assert not torch.equal(atoms, atoms.round())
    energies = OrientedEnergy(SHAPE)
    one = energies(torch.rand(1, DIMENSION, generator=torch.Generator().manual_seed(3)) * 2 - 1)
    centre, label = batch.companion.centre, torch.zeros(1, dtype=torch.long)
    assert not torch.equal(centre / FEATURE_GRID, (centre / FEATURE_GRID).round())
    gradient = probe_gradient(batch.companion.weight * math.pi, centre, one, label, 1.0)
    assert torch.equal(gradient * 2.0**32, (gradient * 2.0**32).round())
    # Weights closer together than their grid give the same logits, and so the very same answer.
    weight = (batch.companion.weight * 64).round() / 64
    nearby = probe_gradient(weight + 2.0**-15, centre, one, label, 1.0)
    assert torch.equal(nearby, probe_gradient(weight, centre, one, label, 1.0))


def test_debiasing_follows_its_schedule() -> None:
    mechanism = make(probe_share=0.0)
    silent = torch.zeros(12 * DIMENSION + CLASSES)
    start, half = (world(mechanism, 0, progress) for progress in (0.0, 0.5))
    term = mechanism.self_term(start)
    images = [mechanism.gradient(batch, term, silent).image for batch in (start, half)]
    torch.testing.assert_close(images[0] * 1.5, images[1])
    assert Schedule(4.0, 1.0).geometric(0.5) == pytest.approx(2.0)


@pytest.mark.parametrize("l1_weight", [0.0, 2.0])
def test_the_sum_is_the_sum_of_the_records_parts_to_the_last_bit(l1_weight: float) -> None:
    """What the proof of the bound rests on: no record's part depends on the records it is summed with."""
    cost = ElementwiseCost(l1_weight)
    stream = torch.Generator().manual_seed(0)
    atoms = to_levels(torch.rand(2, 20, DIMENSION, generator=stream) * 2 - 1, ATOM_GRID)
    records = to_levels(torch.rand(2, 137, DIMENSION, generator=stream) * 2 - 1)
    everyone = torch.ones(2, 137, dtype=torch.bool)
    together = clipped_pull(atoms, records, everyone, cost, 2.0, 1.0)
    order = torch.randperm(137, generator=stream)
    shuffled = clipped_pull(atoms, records[:, order], everyone, cost, 2.0, 1.0)
    one_by_one = torch.zeros_like(atoms)
    for k in range(137):
        one_by_one += clipped_pull(atoms, records[:, k : k + 1], everyone[:, :1], cost, 2.0, 1.0).differences
    assert torch.equal(together.differences, shuffled.differences)
    assert torch.equal(together.differences, one_by_one)
    assert torch.equal(together.differences * 2**24, (together.differences * 2**24).round())


def test_the_probes_gradient_is_a_sum_of_parts_to_the_last_bit() -> None:
    stream = torch.Generator().manual_seed(0)
    energies = OrientedEnergy(SHAPE)
    pixels = torch.rand(1203, DIMENSION, generator=stream) * 2 - 1
    labels = torch.randint(0, CLASSES, (1203,), generator=stream)
    features = energies(pixels)
    weight = 20 * torch.randn(energies.size + 1, CLASSES, generator=stream)
    centre = (torch.randn(energies.size, generator=stream) * 100).round().double() * FEATURE_GRID
    together = probe_gradient(weight, centre, features, labels, 0.1)
    alone = [probe_gradient(weight, centre, features[k : k + 1], labels[k : k + 1], 0.1) for k in range(1203)]
    assert torch.equal(together, torch.stack(alone).sum(0))
    assert max(part.norm().item() for part in alone) <= 1.0


def test_the_features_of_a_record_do_not_depend_on_the_other_records() -> None:
    energies = OrientedEnergy((3, 32, 24))
    pixels = torch.rand(30, 3 * 32 * 24, generator=torch.Generator().manual_seed(0)) * 2 - 1
    together = energies(pixels)
    assert torch.equal(together[1:], energies(pixels[1:]))
    assert torch.equal(together[7:8], energies(pixels[7:8]))
    assert together.shape == (30, energies.size)


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 64, 64)])
def test_the_features_of_an_image_have_norm_at_most_one(shape: tuple[int, int, int]) -> None:
    """The query adds them up as they are; noise, edges, single points and flat images are among those tried."""
    energies, (_, height, width) = OrientedEnergy(shape), shape
    stream = torch.Generator().manual_seed(0)
    images = torch.rand(40, *shape, generator=stream) * 2 - 1
    images[10:20] = images[10:20].sign()
    images[20:24] = torch.tensor([-1.0, 0.0, 0.5, 1.0]).view(4, 1, 1, 1)
    images[24:30] = -1.0
    for k in range(24, 30):
        images[k, :, k % height, (3 * k) % width] = 1.0
    images[30:35, :, : height // 2] = 1.0
    images[35:40] = torch.cos(torch.arange(width) * 2.4).expand(5, *shape)
    norms = (energies(images).double() * FEATURE_GRID).norm(dim=1)
    assert norms.max() <= 1.0
    assert norms[0] > 0.95, "no more is given up than rounding needs"


def test_the_features_of_an_image_are_the_same_in_every_place_of_a_chunk() -> None:
    energies = OrientedEnergy(SHAPE)
    stream = torch.Generator().manual_seed(0)
    image = torch.rand(1, DIMENSION, generator=stream) * 2 - 1
    alone = energies(image)[0]
    others = torch.rand(1100, DIMENSION, generator=stream) * 2 - 1
    for place in range(0, 1100, 37):
        together = torch.cat([others[:place], image, others[place:]])
        assert torch.equal(energies(together)[place], alone), place


@pytest.mark.parametrize("l1_weight", [0.0, 1.0])
def test_the_gradient_in_the_pixels_is_that_of_the_semi_dual_on_pixels_and_features(l1_weight: float) -> None:
    """By autograd through ψ(x) = [x, s φ(x)], with records that no clip touches."""
    mechanism = make(
        feature_scale=5.0, clip=1e3, probe_share=0.0, debias=Schedule(0.0, 0.0), temperature=Schedule(9.0, 9.0),
        expected_batch=1.0, cost=ElementwiseCost(l1_weight),
    )  # fmt: skip
    batch, energies = world(mechanism, 0), OrientedEnergy(SHAPE)
    stream = torch.Generator().manual_seed(5)
    pixels = (torch.randint(0, 256, (20, DIMENSION), generator=stream) / 127.5 - 1).float()
    labels = torch.arange(20) % CLASSES
    atoms = batch.pixels.clone().requires_grad_()
    embedded = torch.cat([atoms, 5.0 * energies.smooth(atoms)], 1).double()
    targets = torch.cat([pixels, 5.0 * energies.smooth(pixels)], 1).double()
    difference = embedded[:, None] - targets[None]
    costs = difference.square().sum(2) + l1_weight * difference.abs().sum(2)
    costs = costs.masked_fill(batch.labels[:, None] != labels[None], math.inf)
    (-9.0 * torch.logsumexp(-costs / 9.0, 0)).sum().backward()
    self_term = mechanism.self_term(batch)
    released = answer(mechanism, batch, pixels, labels) * 1e3
    image = mechanism.gradient(batch, self_term, released).image
    # Where coordinates all but coincide, rounding to levels turns signs of the L1 term.
    assert (image - atoms.grad).norm() < (2e-2 if l1_weight else 5e-3) * atoms.grad.norm()


def test_sums_are_exact_at_the_ends_of_their_ranges() -> None:
    """As many records as may be, all at one end of the levels and the atoms at the other, in two orders."""
    batch, most = MAX_RECORDS // 2**9, MOST_LEVELS
    atoms = torch.full((1, 1, 3), most - 1 / ATOM_GRID, dtype=torch.float64)
    atoms[0, 0, 1] *= -1
    records = torch.full((1, batch, 3), -most, dtype=torch.float64)
    records[0, ::2, 2] = 1.0
    everyone = torch.ones(1, batch, dtype=torch.bool)
    part = clipped_pull(atoms, records, everyone, ElementwiseCost(), 1.0, 5.0)
    total = PullSum.zero(atoms, ElementwiseCost())
    for _ in range(2**9):
        total.add(torch.zeros(1, dtype=torch.long), part)
    weight = clipped_pull(atoms, records[:, :1], everyone[:, :1], ElementwiseCost(), 1.0, 5.0)
    other = clipped_pull(atoms, records[:, 1:2], everyone[:, :1], ElementwiseCost(), 1.0, 5.0)
    exact = [
        (int(a * 2**24) + int(b * 2**24)) * (batch // 2) * 2**9
        for a, b in zip(weight.differences.flatten().tolist(), other.differences.flatten().tolist(), strict=True)
    ]
    assert [int(value * 2**24) for value in total.differences.flatten().tolist()] == exact
    assert max(abs(value) for value in exact) < 2**53


@pytest.mark.parametrize("l1_weight", [0.0, 1.0])
def test_the_pull_is_the_clipped_gradient_of_the_semi_dual(l1_weight: float) -> None:
    """V(y) = −λ ∇_X log Σ_i exp(−c(x_i, y)/λ), by autograd in float64, record by record."""
    cost, temperature, bound = ElementwiseCost(l1_weight), 3.0, 2.0
    stream = torch.Generator().manual_seed(0)
    atoms = to_levels(torch.rand(1, 9, DIMENSION, generator=stream) * 2 - 1, ATOM_GRID)
    images = torch.randint(0, 256, (1, 25, DIMENSION), generator=stream)
    expected = torch.zeros(9, DIMENSION, dtype=torch.float64)
    for image in images[0]:
        points = (atoms[0] / LEVELS).requires_grad_()
        difference = points - (2 * image.double() - 255) / LEVELS
        costs = difference.square().sum(1) + l1_weight * difference.abs().sum(1)
        (pull,) = torch.autograd.grad(-temperature * torch.logsumexp(-costs / temperature, 0), points)
        expected += pull * min(1.0, bound / pull.norm().item())
    records = to_levels(images.float() / 127.5 - 1)
    assert torch.equal(records, 2 * images.double() - 255), "8-bit pixels are whole levels"
    got = clipped_pull(atoms, records, torch.ones(1, 25, dtype=torch.bool), cost, temperature, bound).gradient(cost)
    # With the L1 term the bound on the norm counts equal pixels as different ones, so the clip is a little stronger.
    torch.testing.assert_close(got[0], expected, rtol=1e-3 if l1_weight else 1e-4, atol=2e-3 if l1_weight else 1e-4)


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), max_size=120),
    width=st.integers(1, 50),
    group=st.integers(1, 6),
)
def test_every_record_is_in_exactly_one_block_of_its_class(labels: list[int], width: int, group: int) -> None:
    values, group = torch.tensor(labels, dtype=torch.long), min(group, 5)
    seen = []
    for rows, index, present in class_blocks(values, 5, width, group):
        assert len(rows) == group
        assert index.shape == present.shape == (group, width), "the shape must not depend on the records"
        for row, places, there in zip(rows.tolist(), index, present, strict=True):
            assert (values[places[there]] == row).all()
            seen += places[there].tolist()
    assert sorted(seen) == list(range(len(labels)))


@pytest.mark.parametrize("count", [0, 1, 30, 400])
@pytest.mark.parametrize("feature_scale", [0.0, 7.0])
def test_no_record_is_dropped_at_the_tails_of_the_batch_size(count: int, feature_scale: float) -> None:
    """A batch ten times the expected one fills further blocks; each record's pull is in the sum."""
    mechanism = make(expected_batch=30.0, probe_share=0.0, feature_scale=feature_scale)
    batch = world(mechanism, 0)
    stream = torch.Generator().manual_seed(count)
    pixels = torch.rand(count, DIMENSION, generator=stream) * 2 - 1
    labels = torch.randint(0, 2, (count,), generator=stream)  # one class stays empty
    whole = answer(mechanism, batch, pixels, labels)
    parts = [answer(mechanism, batch, pixels[k : k + 1], labels[k : k + 1]) for k in range(count)]
    torch.testing.assert_close(whole, sum(parts, torch.zeros_like(whole)), rtol=0, atol=1e-12)
    atoms = mechanism.self_term(batch).atoms
    # To the last bit, before the final factor rounds each coordinate once.
    features = mechanism.features(SHAPE)
    points = RecordBatch(pixels, labels, features(pixels) if features is not None else None)
    width = {w: mechanism._pull_of(batch, atoms, points, w) for w in (1, 7, 13, 1000)}
    assert all(torch.equal(values, width[13]) for values in width.values())
    assert whole[-CLASSES:].sum().item() == pytest.approx(count * math.sqrt(mechanism.histogram_share))


def small_records(count: int = 5) -> PrivateRecords:
    images = torch.randint(0, 256, (count, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return PrivateRecords(LabelledImages(images, torch.arange(count) % CLASSES, ("a", "b", "c")))


def test_the_noise_that_leaves_has_the_stated_deviation_in_every_part() -> None:
    mechanism = make(sampling_rate=1.0, noise_multiplier=1.7)
    batch, records = world(mechanism, 0), small_records()
    drawn = records.poisson_sample(1.0, OsEntropy(), mechanism.features(SHAPE))
    self_term = mechanism.self_term(batch)
    exact = mechanism.gradient(batch, self_term, mechanism.query(batch, self_term, drawn))
    deviation = {
        "image": math.sqrt(0.75), "counts": math.sqrt(0.05), "probe": math.sqrt(0.2 * 15 / 16) / 0.1,
        "mean": math.sqrt(0.2 / 16),
    }  # fmt: skip
    noises: dict[str, list[Tensor]] = {name: [] for name in deviation}
    for _ in range(300):
        released = mechanism.release(batch, records, OsEntropy())
        for name, root in deviation.items():
            noise = (getattr(released, name) - getattr(exact, name)).double() * mechanism.expected_batch * root
            noises[name].append(noise.flatten() / mechanism.noise_scale)
    for name, values in noises.items():
        assert stats.kstest(torch.cat(values).numpy()[:20_000], "norm").pvalue > FALSE_ALARM, name
        first, second = values[0], values[1]
        assert not torch.equal(first, second)


def test_the_event_is_a_subsampled_gaussian_of_sigma_itself() -> None:
    mechanism = make(rows=300, sampling_rate=0.1, noise_multiplier=1.749)
    assert mechanism.event.sampling_probability == 0.1
    assert mechanism.event.event.noise_multiplier == 1.749
    assert mechanism.noise_scale == 1.749


def pull_at_the_law_of_the_data(
    debias: float, shares: list[float], told: list[float], feature_scale: float = 0.0
) -> Tensor:
    """(L,) norms of the gradient by class, when records and the generator's images have the same law."""
    mechanism = make(
        probe_share=0.0, expected_batch=40_000.0, own=3 * 40_000, rows=60, debias=Schedule(debias, debias),
        temperature=Schedule(5.0, 5.0), feature_scale=feature_scale,
    )  # fmt: skip
    stream = torch.Generator().manual_seed(0)
    centres = torch.rand(CLASSES, 1, DIMENSION, generator=stream) - 0.5

    def draw(labels: Tensor) -> Tensor:
        spread = torch.rand(len(labels), 1, generator=stream) * 1.2 - 0.6
        return (centres[labels, 0] + spread).clamp(-1, 1)

    labels, own_labels = mechanism.draw_labels(CLASSES, stream), mechanism.draw_own_labels(CLASSES)
    counts = (torch.tensor(shares) * 40_000).long()
    of_records = torch.arange(CLASSES).repeat_interleave(counts)
    companion = mechanism.make_companion(SHAPE, CLASSES)
    companion.counted.copy_(torch.tensor(told))
    batch = GeneratedBatch(draw(labels), labels, (), draw(own_labels), own_labels, 0.0, companion)
    self_term = mechanism.self_term(batch)
    pixels = from_pixels(draw(of_records)).float() / 127.5 - 1
    features = mechanism.features(SHAPE)
    records = RecordBatch(pixels, of_records, features(pixels) if features is not None else None)
    exact = mechanism.query(batch, self_term, records)
    image = mechanism.gradient(batch, self_term, exact).image
    return image.view(CLASSES, -1).norm(dim=1) / torch.tensor(shares)


@pytest.mark.parametrize("feature_scale", [0.0, 10.0])
def test_the_law_of_the_data_is_a_fixed_point_at_full_debiasing_and_only_there(feature_scale: float) -> None:
    even = [1 / 3, 1 / 3, 1 / 3]
    attracted = pull_at_the_law_of_the_data(0.0, even, even, feature_scale)
    balanced = pull_at_the_law_of_the_data(1.0, even, even, feature_scale)
    assert (balanced < 0.1 * attracted).all()


def test_classes_are_balanced_by_their_shares() -> None:
    shares = [0.1, 0.3, 0.6]
    attracted = pull_at_the_law_of_the_data(0.0, shares, shares)
    assert (pull_at_the_law_of_the_data(1.0, shares, shares) < 0.2 * attracted).all()
    # Weighed by uniform labels, a rare class is pushed off its own records, harder than they pull.
    assert pull_at_the_law_of_the_data(1.0, shares, [1 / 3] * 3)[0] > attracted[0]


def test_shares_are_learnt_from_releases() -> None:
    mechanism = make(sampling_rate=0.5, expected_batch=500.0)
    labels = (torch.arange(1000) % 10 >= 9).long()  # 9 to 1, and a third class that has no record
    records = PrivateRecords(LabelledImages(torch.zeros(1000, *SHAPE, dtype=torch.uint8), labels, ("a", "b", "c")))
    batch = world(mechanism, 0)
    for _ in range(200):
        released = mechanism.release(batch, records, OsEntropy())
        batch.companion.learn(released.counts, released.mean, released.probe)
    assert batch.companion.shares.tolist() == pytest.approx([0.9, 0.1, 0.0], abs=0.02)


def test_the_probe_learns_classes_from_releases() -> None:
    stream = torch.Generator().manual_seed(0)
    images = torch.randint(0, 60, (900, *SHAPE), dtype=torch.uint8, generator=stream)
    labels = torch.arange(900) % CLASSES
    for label in range(CLASSES):
        images[labels == label, :, 2 * label : 2 * label + 3] += 150
    records = PrivateRecords(LabelledImages(images[:600], labels[:600], ("a", "b", "c")))
    mechanism = make(sampling_rate=0.5, expected_batch=300.0)
    batch = world(mechanism, 0)
    batch.companion.weight.zero_()
    for _ in range(60):
        released = mechanism.release(batch, records, OsEntropy())
        batch.companion.learn(released.counts, released.mean, released.probe)
    predicted = batch.companion.probe(images[600:].float().flatten(1) / 127.5 - 1).argmax(1)
    assert (predicted == labels[600:]).double().mean() > 0.95


def test_a_diverged_generator_lets_nothing_through() -> None:
    mechanism = make()
    batch = world(mechanism, 0)
    batch.pixels[3] = math.nan
    batch.companion.weight[0] = math.inf
    batch.companion.summed[0] = math.nan
    batch.companion.summed[1] = math.inf
    (_, records) = neighbours("random", 1)
    assert answer(mechanism, batch, *records).isfinite().all()
    assert answer(mechanism, batch, records[0][:1], records[1][:1]).norm() <= 1.0


@pytest.mark.parametrize("clip", [1e-3, 1.0, 1e9])
@pytest.mark.parametrize("temperature", [1e-6, 1.0, 1e9])
@pytest.mark.parametrize(("l2_weight", "l1_weight"), [(1.0, 0.0), (0.0, 1.0), (1e-12, 1e6), (1e6, 1e-12)])
def test_extreme_settings_keep_the_bound(clip: float, temperature: float, l2_weight: float, l1_weight: float) -> None:
    mechanism = make(
        clip=clip, temperature=Schedule(temperature, temperature), cost=ElementwiseCost(l1_weight, l2_weight), rows=3
    )
    batch = world(mechanism, 1)
    for seed in range(6):
        pixels = torch.randint(0, 256, (1, DIMENSION), generator=torch.Generator().manual_seed(seed)) / 127.5 - 1
        norm = answer(mechanism, batch, pixels, torch.tensor([seed % CLASSES])).norm()
        assert norm <= 1.0


def test_settings_outside_the_proof_are_refused() -> None:
    def refused(records: int = 60_000, **overrides) -> str:
        with pytest.raises(UserError) as caught:
            complete(parse_settings(None, overrides), records).make_mechanism(records).check(records, 2)
        return str(caught.value)

    assert "the pulls would be rounded to nothing; use at least 1" in refused(l2_weight=1000, clip=0.5)
    assert "at most 1024 atoms of each class" in refused(rows=3000)
    assert "probe_share must be 0 (no probe) or at least 0.0001" in refused(probe_share=1e-9)
    mechanism = complete(parse_settings(None, {"batch_size": 2**18}), 3_000_000).make_mechanism(3_000_000)
    with pytest.raises(UserError, match="proven for batches of at most 262144 records, and this run expects 262144"):
        mechanism.check(3_000_000, 2)
    largest = complete(parse_settings(None, {}), 100_000_000).make_mechanism(100_000_000)
    largest.check(100_000_000, 2)


def test_settings_make_the_mechanism() -> None:
    chosen = complete(parse_settings(None, {"rows": 100, "clip": 2.0}), 1000, (1, 16, 16))
    mechanism = chosen.make_mechanism(1000)
    assert isinstance(mechanism, mechanism_class("per_record"))
    assert mechanism.clip == 2.0
    assert mechanism.debias.start < mechanism.debias.end
    held = complete(parse_settings(None, {"debias": 0.3, "temperature": 9.0}), 1000).make_mechanism(1000)
    assert (held.debias, held.temperature) == (Schedule(0.3, 0.3), Schedule(9.0, 9.0))
    assert mechanism.own == 200
    assert len(mechanism.draw_labels(7, torch.Generator())) == 105
    with pytest.raises(UserError, match=r"leave nothing for the transport; their sum must be at most 0\.999"):
        complete(parse_settings(None, {"probe_share": 0.99, "histogram_share": 0.01}), 1000).make_mechanism(1000)
    assert round(BIAS / FEATURE_GRID) == BIAS / FEATURE_GRID
