"""Labels by the probe: what a release says of its images is what the probe sees in them."""

import math

import pytest
import torch
from torch import Tensor

from dp_sinkhorn.features import OrientedEnergy
from dp_sinkhorn.images import to_pixels
from dp_sinkhorn.labelling import Labeller, LinearProbe

SHAPE = (1, 8, 8)
CLASSES = 3
ENERGIES = OrientedEnergy(SHAPE)


def image_of(label: int, stream: torch.Generator) -> Tensor:
    """A bright bar whose place tells the class, and noise."""
    image = torch.randint(0, 20, SHAPE, dtype=torch.uint8, generator=stream)
    image[:, :, 3 * label : 3 * label + 2] += 220
    return image


def trained_probe(classes: int = CLASSES) -> LinearProbe:
    """Weights towards the mean of each class: enough to tell bars apart."""
    stream = torch.Generator().manual_seed(0)
    means = torch.stack(
        [
            ENERGIES.smooth(to_pixels(torch.stack([image_of(k, stream) for _ in range(30)]))).mean(0)
            for k in range(CLASSES)
        ]
    )
    probe = LinearProbe(ENERGIES, classes)
    probe.centre.copy_(means.mean(0))
    probe.weight[:-1, :CLASSES] = 50 * (means - means.mean(0)).T
    return probe


class Confused:
    """A generator that draws a bar of the next class in a part of the cases; it remembers what it was asked for."""

    def __init__(self, errors: list[float], seed: int = 0) -> None:
        self.errors, self.stream, self.asked = errors, torch.Generator().manual_seed(seed), 0

    def __call__(self, labels: Tensor) -> Tensor:
        self.asked += len(labels)
        images = []
        for label in labels.tolist():
            wrong = torch.rand((), generator=self.stream) < self.errors[label]
            image = image_of((label + int(wrong)) % CLASSES, self.stream)
            image[0, 7, 7] = label  # says what it was asked for, too faintly for the probe
            images.append(image)
        return torch.stack(images) if images else torch.empty(0, *SHAPE, dtype=torch.uint8)


def even_shares(classes: int = CLASSES) -> Tensor:
    return torch.full((classes,), 1 / classes, dtype=torch.float64)


def test_images_are_of_the_class_that_the_probe_sees_and_in_the_order_asked_for() -> None:
    labeller = Labeller.from_probe(trained_probe(), even_shares(), Confused([0.4, 0.0, 0.1]))
    wanted = torch.tensor([2, 0, 0, 1, 2, 1, 0])
    images = labeller.fill(wanted, Confused([0.4, 0.0, 0.1]))
    assert torch.equal(labeller.label(images), wanted)
    assert images.shape == (7, *SHAPE)


def test_images_of_a_class_come_from_wherever_the_generator_draws_it() -> None:
    """Asked for 0 it draws a 1 two times in five, so of all that is seen as 1, two sevenths were asked for as 0."""
    labeller = Labeller.from_probe(trained_probe(), even_shares(), Confused([0.4, 0.0, 0.0]))
    assert labeller.sources.tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 1]]
    images = labeller.fill(torch.ones(1400, dtype=torch.long), Confused([0.4, 0.0, 0.0], seed=1))
    asked_for_zero = (images[:, 0, 7, 7] == 0).double().mean().item()
    assert asked_for_zero == pytest.approx(2 / 7, abs=0.06)


def test_candidates_are_asked_for_where_they_are_found() -> None:
    draw = Confused([0.0, 0.0, 0.0])
    labeller = Labeller.from_probe(trained_probe(), even_shares(), draw)
    draw.asked = 0
    labeller.fill(torch.full((500,), 2), draw)
    assert draw.asked < 700, "classes that never look like the wanted one are not drawn"


def test_a_class_that_the_probe_never_sees_is_drawn_as_asked_for() -> None:
    labeller = Labeller.from_probe(
        trained_probe(classes=4), even_shares(4), lambda labels: Confused([0] * 4)(labels % 3)
    )
    draw = Confused([0.0, 0.0, 0.0, 0.0])
    labeller.weight[:, 3] = -1e3
    images = labeller.fill(torch.tensor([3, 0, 3]), draw)
    assert labeller.label(images)[1] == 0
    assert images[[0, 2], 0, 7, 7].tolist() == [3, 3]


def test_the_same_public_randomness_gives_the_same_images() -> None:
    labeller = Labeller.from_probe(trained_probe(), even_shares(), Confused([0.3, 0.3, 0.3]))
    wanted = torch.arange(50) % CLASSES
    first, second = (labeller.fill(wanted, Confused([0.3, 0.3, 0.3], seed=4)) for _ in range(2))
    assert torch.equal(first, second)


def test_the_shares_of_the_records_are_taken_off() -> None:
    """Bayes: trained where class 0 is nine times as frequent, and asked where all are equal."""
    shares = torch.tensor([0.9, 0.05, 0.05], dtype=torch.float64)
    probe = trained_probe()
    labeller = Labeller.from_probe(probe, shares, Confused([0.0, 0.0, 0.0]))
    pixels = to_pixels(Confused([0.0] * 3)(torch.arange(3)))
    difference = labeller(pixels) - probe(pixels)
    assert difference[0].tolist() == pytest.approx([-math.log(share) for share in shares.tolist()], abs=1e-3)
