"""Noise and sampling: stated law, no repetition. Statistical tests have a false-alarm rate of 1e-6 each."""

import math
import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy import stats

from dp_sinkhorn.images import LabelledImages, to_pixels
from dp_sinkhorn.mechanisms import GeneratedBatch, Mechanism, OsEntropy, SeededForDebugging
from dp_sinkhorn.mechanisms.base import round_to_public_grid
from dp_sinkhorn.records import PrivateRecords
from tests.mechanisms.worlds import PRIVATE, SHAPE, answer, generated, make

FALSE_ALARM = 1e-6
SOURCES = [OsEntropy(), SeededForDebugging(7)]


def within_chance(statistic: float) -> bool:
    """Whether a standard normal statistic is no further out than the false-alarm rate allows."""
    return 2 * stats.norm.sf(abs(statistic)) > FALSE_ALARM


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.name)
def test_normal_values_have_the_standard_normal_law(source) -> None:
    values = source.normal(torch.Size([401, 503]), torch.device("cpu")).numpy().ravel()
    count = len(values)
    assert within_chance(values.mean() * math.sqrt(count))
    assert within_chance((values.var() - 1) * math.sqrt(count / 2))
    assert stats.kstest(values, "norm").pvalue > FALSE_ALARM
    assert within_chance(np.corrcoef(values[:-1], values[1:])[0, 1] * math.sqrt(count))
    half = count // 2
    assert within_chance(np.corrcoef(values[:half], values[half : 2 * half])[0, 1] * math.sqrt(half)), "pairs"


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.name)
@pytest.mark.parametrize("rate", [1 / 1200, 0.1, 0.5])
def test_each_record_is_drawn_independently_at_the_stated_rate(source, rate: float) -> None:
    draws = np.stack([source.bernoulli(1000, rate) for _ in range(200)])
    count = draws.size
    assert within_chance((draws.sum() - count * rate) / math.sqrt(count * rate * (1 - rate)))
    sizes = draws.sum(axis=1)
    spread = stats.chi2.sf(((sizes - 1000 * rate) ** 2).sum() / (1000 * rate * (1 - rate)), df=200)
    assert FALSE_ALARM < spread < 1 - FALSE_ALARM, "batch sizes must vary as binomials do"
    assert source.bernoulli(10, 1.0).all()
    assert not source.bernoulli(10, 0.0).any()


@pytest.mark.parametrize("name", PRIVATE)
def test_the_noise_that_leaves_has_the_stated_deviation(name: str) -> None:
    """With q = 1 the batch is known, so release − query is the noise itself."""
    mechanism = make(name, rate=1.0, noise=1.7, clip=0.05)
    images = torch.randint(0, 256, (5, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    records = PrivateRecords(LabelledImages(images, torch.tensor([0, 1, 2, 0, 1]), ("a", "b", "c")))
    pixels = images.double().flatten(1) / 127.5 - 1
    exact = answer(mechanism, generated(mechanism, 0), pixels, torch.tensor([0, 1, 2, 0, 1]))
    noises = []
    while sum(noise.numel() for noise in noises) < 20_000:
        released = mechanism.release(generated(mechanism, 0), records, OsEntropy()).value
        noises.append((released.flatten()[: exact.numel()] - exact.flatten()) / mechanism.noise_scale)
    values = torch.cat(noises)
    count = len(values)
    # Pixels pass through float32, so the answer is known to about 1e-7: far below the noise.
    assert within_chance(values.mean().item() * math.sqrt(count))
    assert within_chance((values.var().item() - 1) * math.sqrt(count / 2))
    assert stats.kstest(values.numpy(), "norm").pvalue > FALSE_ALARM
    first, second = noises[0], noises[1]
    assert within_chance(torch.corrcoef(torch.stack([first, second]))[0, 1].item() * math.sqrt(len(first)))
    assert not torch.equal(first, second)


@dataclass(frozen=True, kw_only=True)
class CountingMechanism(Mechanism):
    """Asks for nothing but remembers how many records it was shown."""

    name = "counting"
    seen: list[int]

    @classmethod
    def from_settings(cls, settings, sampling_rate, noise_multiplier):
        raise AssertionError("made by hand")

    batch_size = 1
    sensitivity = 1.0

    def query(self, batch, self_term, records):
        self.seen.append(len(records.labels))
        return torch.zeros(50, dtype=torch.float64)


def counting_world(rate: float) -> tuple[CountingMechanism, PrivateRecords, GeneratedBatch]:
    images = torch.zeros(500, *SHAPE, dtype=torch.uint8)
    records = PrivateRecords(LabelledImages(images, torch.arange(500) % 2, ("a", "b")))
    batch = GeneratedBatch(torch.zeros(1, 64, dtype=torch.float64), torch.zeros(1, dtype=torch.long))
    return CountingMechanism(sampling_rate=rate, noise_multiplier=1.5, seen=[]), records, batch


def test_a_release_samples_at_the_rate_of_its_event() -> None:
    """The accountant's amplification rests on this rate: the batches that a query really sees are binomial with it."""
    mechanism, records, batch = counting_world(rate=0.1)
    rate, releases = mechanism.event.sampling_probability, 400
    for _ in range(releases):
        mechanism.release(batch, records, OsEntropy())
    sizes = np.array(mechanism.seen)
    deviation = math.sqrt(500 * rate * (1 - rate))
    assert within_chance((sizes.mean() - 500 * rate) / deviation * math.sqrt(releases))
    spread = stats.chi2.sf(((sizes - 500 * rate) ** 2).sum() / deviation**2, df=releases)
    assert FALSE_ALARM < spread < 1 - FALSE_ALARM


def test_an_answer_of_zeros_is_noised_like_any_other() -> None:
    mechanism, records, batch = counting_world(rate=0.1)
    values = torch.cat([mechanism.release(batch, records, OsEntropy()).value for _ in range(200)]).numpy()
    assert stats.kstest(values / mechanism.noise_scale, "norm").pvalue > FALSE_ALARM


def test_coins_and_noise_come_from_the_operating_system_alone(monkeypatch) -> None:
    mechanism, records, batch = counting_world(rate=0.1)
    taken = []
    original = os.urandom

    def counted(count: int) -> bytes:
        taken.append(count)
        return original(count)

    with monkeypatch.context() as patch:
        patch.setattr(os, "urandom", counted)
        mechanism.release(batch, records, OsEntropy())
    assert sum(taken) == 8 * 500 + 24 * 25, "eight bytes a coin, 24 a pair of normal values"
    with monkeypatch.context() as patch:
        patch.setattr(os, "urandom", lambda count: b"\xff" * count)
        released = [mechanism.release(batch, records, OsEntropy()).value for _ in range(2)]
    assert mechanism.seen[-2:] == [0, 0], "coins that all show the largest number draw nobody"
    assert torch.equal(*released), "nothing else moves the noise"


def test_releases_lie_on_a_grid_that_the_answer_does_not_decide() -> None:
    """A sum near zero keeps every bit of the answer, unless the grid is public (docs/privacy.md, section 6)."""
    scale, answer = 1.7, torch.full((200_000,), math.pi * 1000, dtype=torch.float64)
    noise = -answer + torch.linspace(-1e-9, 1e-9, len(answer), dtype=torch.float64)
    sums = round_to_public_grid(answer + noise, scale)
    spacing = 2.0**-24
    assert torch.equal(sums, torch.round(sums / spacing) * spacing)
    assert not sums.any(), "what is left of an answer that the noise cancels is below the grid"
    mechanism, records, batch = counting_world(rate=1.0)
    released = mechanism.release(batch, records, OsEntropy()).value
    assert torch.equal(released / spacing, torch.round(released / spacing))


def test_float32_releases_do_not_give_the_answer_away_in_their_low_bits() -> None:
    """Noise rounded to float32 before it is added reaches only some sums, and which ones tells the answer.

    An attacker who guesses the answer `a` asks which float32 noise z would have given the release r: does
    fl(a + z) = r have a solution? With sums taken in float64 a right guess explains no more than a wrong one.
    """
    mechanism = make("batch", rate=1.0, noise=1.0, clip=0.05)
    images = torch.randint(0, 256, (5, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    records = PrivateRecords(LabelledImages(images, torch.tensor([0, 1, 2, 0, 1]), ("a", "b", "c")))
    batch = generated(mechanism, 0)
    single = GeneratedBatch(batch.pixels.detach().float(), batch.labels)
    pixels = to_pixels(images).flatten(1)
    right = answer(mechanism, single, pixels, torch.tensor([0, 1, 2, 0, 1]))
    wrong = -right  # as large as the right guess, so that nothing but the low bits can tell them apart
    releases = [mechanism.release(single, records, OsEntropy()).value[:6] for _ in range(60)]

    def explained(guess: torch.Tensor) -> float:
        return torch.stack([(guess + (release - guess)) == release for release in releases]).double().mean().item()

    naive = [right + 0.1 * torch.randn(right.shape) for _ in releases]
    naively = lambda guess: torch.stack([(guess + (r - guess)) == r for r in naive]).double().mean().item()  # noqa: E731
    assert naively(right) - naively(wrong) > 0.02, "the attack must work on what it is made for"
    assert abs(explained(right) - explained(wrong)) < 0.01


def test_a_seeded_stream_repeats_itself_and_differs_after_a_resume() -> None:
    draw = lambda source: source.normal(torch.Size([1000]), torch.device("cpu"))  # noqa: E731
    unbroken, resumed = draw(SeededForDebugging(3)), draw(SeededForDebugging(3, first_release=50))
    torch.testing.assert_close(unbroken, draw(SeededForDebugging(3)), rtol=0, atol=0)
    correlation = torch.corrcoef(torch.stack([unbroken, resumed]))[0, 1].item()
    assert within_chance(correlation * math.sqrt(1000))
