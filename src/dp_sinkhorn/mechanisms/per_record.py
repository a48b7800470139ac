"""Per-record transport: the default mechanism.

The semi-dual form of the entropic transport loss is a sum over records, each of which pulls on the generated atoms of
its own class (`transport.pull`). So a single clip per record bounds what it moves, however many atoms there are, and a
step is a Poisson-subsampled Gaussian mechanism of the noise multiplier σ itself. docs/privacy.md, section 4, has the
proofs.

One release carries four answers about the same Poisson batch. A record's part in them is one vector,

    ( √s_T · V̄(y)/C ,   √s_N · e_l ,   √s_G · ḡ(y)/c ,   √s_M · φ(y) ),       s_T + s_N + s_G + s_M = 1,

of norm at most 1: its clipped pull on the atoms, its count in the label histogram, its clipped gradient of a linear
probe's loss, and its features, whose mean is where the probe is centred. Their shares of the squared norm decide how
the noise is divided among them.

Images are compared by ψ(x) = [x, s φ(x)]: their pixels, and what a fixed map of oriented energies φ sees in them. To a
squared distance of pixels alone, a sleeve that is moved by a pixel is as far off as one that is missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.features import FEATURE_GRID, OrientedEnergy
from dp_sinkhorn.images import ImageShape, from_pixels, to_pixels
from dp_sinkhorn.labelling import Draw, Labeller
from dp_sinkhorn.mechanisms.base import GeneratedBatch, ImageGradient, Mechanism
from dp_sinkhorn.mechanisms.knowledge import ClassKnowledge
from dp_sinkhorn.mechanisms.probe import probe_gradient
from dp_sinkhorn.records.private import RecordBatch
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

if TYPE_CHECKING:
    from dp_sinkhorn.settings import Settings

_PROBE_CLIP = 0.1
"""c. Most records are told apart well, and their gradients are short: a bound near those wastes less noise."""
_MEAN_PART = 1 / 16
"""What the mean of the features takes of the probe's share."""
_CPU_BLOCK_BYTES, _GPU_BLOCK_BYTES = 1 << 23, 1 << 30
_LEAST_CLIP = 1e-3
_MOST_ASIDE = 0.999
_MOST_ATOMS = 1024
_PADDING_DEVIATIONS = 4.0


@dataclass(frozen=True)
class Schedule:
    """A public number that changes from `start` to `end` over the training."""

    start: float
    end: float

    def linear(self, progress: float) -> float:
        """The number after a part of the training."""
        return self.start + (self.end - self.start) * progress

    def geometric(self, progress: float) -> float:
        """The same, linear in the logarithm."""
        return float(self.start * (self.end / self.start) ** progress)


@dataclass(frozen=True, eq=False)
class PerRecordGradient:
    """A released gradient of the images, with what the same release tells of the classes."""

    image: Tensor
    counts: Tensor
    mean: Tensor | None
    probe: Tensor | None

    def backpropagate(self, batch: GeneratedBatch) -> None:
        """Accumulate the generator's gradient, and let the companion learn."""
        ImageGradient(self.image).backpropagate(batch)
        _knowledge(batch).learn(self.counts, self.mean, self.probe)


@dataclass(frozen=True, eq=False)
class OwnTerms:
    """What a step owes to the generated batch alone.

    Attributes:
        atoms: (L, n/L, d + k) levels of ψ(x_i), on the atoms' grid.
        pull: (L, n/L, d + k) the mean of V̄(x') over the generator's own samples of each class, times its share.
        pixels: (n, d) x_i, a leaf of the graph of `features`.
        features: (n, k) φ(x_i), where the cost looks at features.
    """

    atoms: Tensor
    pull: Tensor
    pixels: Tensor
    features: Tensor | None


@dataclass(frozen=True, kw_only=True)
class PerRecordMechanism(Mechanism):
    """`per_record`: each record's clipped pull on the generated atoms of its class, summed and noised.

    Attributes:
        expected_batch: qM.
        rows: n, the atoms, in equal numbers for each class; rounded up to a multiple of the number of classes.
        own: m', the generator's own samples, likewise.
        clip: C, for the pull.
        cost: c_m; the class embedding is of no account, since classes do not meet.
        temperature: λ, over the training.
        debias: r, the weight of the pull that the generator's own samples exert, over the training.
        histogram_share: s_N.
        probe_share: s_G + s_M; 0 learns no probe.
        feature_scale: s, the weight of the features beside the pixels; 0 compares pixels alone.
    """

    name: ClassVar[str] = "per_record"

    expected_batch: float
    rows: int
    own: int
    clip: float
    cost: ElementwiseCost
    temperature: Schedule
    debias: Schedule
    histogram_share: float
    probe_share: float
    feature_scale: float

    @classmethod
    def from_settings(cls, settings: Settings, sampling_rate: float, noise_multiplier: float) -> Self:
        """Make the mechanism that these settings describe."""
        if settings.histogram_share + settings.probe_share > _MOST_ASIDE:
            raise UserError(
                f"histogram_share {settings.histogram_share:g} and probe_share {settings.probe_share:g} leave nothing "
                f"for the transport; their sum must be at most {_MOST_ASIDE:g}"
            )
        clip, slope = settings.given("clip"), settings.l2_weight + settings.l1_weight
        if clip < _LEAST_CLIP * slope:
            raise UserError(
                f"clip {clip:g} is too small for l2_weight + l1_weight = {slope:g}: the pulls would be rounded to "
                f"nothing; use at least {_LEAST_CLIP * slope:g}"
            )
        rows = settings.n
        return cls(
            sampling_rate=sampling_rate,
            noise_multiplier=noise_multiplier,
            expected_batch=settings.given("batch_size"),
            rows=rows,
            own=settings.own_samples if settings.own_samples is not None else 2 * rows,
            clip=clip,
            cost=ElementwiseCost(settings.l1_weight, settings.l2_weight),
            temperature=Schedule(settings.given("temperature"), settings.given("temperature_end")),
            debias=Schedule(settings.given("debias"), settings.given("debias_end")),
            histogram_share=settings.histogram_share,
            probe_share=settings.probe_share,
            feature_scale=settings.given("feature_scale"),
        )

    @property
    def batch_size(self) -> int:
        """The n atoms."""
        return self.rows

    def check(self, records: int, classes: int) -> None:
        """The sum is exact, and the bound with it, for so many records in a batch and so many atoms of a class.

        A larger batch must be less likely than anything δ speaks of: by Bernstein's inequality a binomial of mean μ
        exceeds μ + 14 √μ + 200 with probability below e^-90.
        """
        expected = self.sampling_rate * records
        if expected + 14.0 * math.sqrt(expected) + 200.0 > MAX_RECORDS:
            raise UserError(
                f"mechanism '{self.name}' is proven for batches of at most {MAX_RECORDS} records, and this run expects "
                f"{expected:.0f}; lower batch_size"
            )
        if self.rows > _MOST_ATOMS * classes:
            raise UserError(f"rows {self.rows}: '{self.name}' takes at most {_MOST_ATOMS} atoms of each class")

    @property
    def sensitivity(self) -> float:
        """A record's part of the answer is a vector of norm at most 1, and the answer is the sum of these parts."""
        return 1.0

    def features(self, image_shape: ImageShape) -> OrientedEnergy | None:
        """φ, which the cost and the probe look at."""
        return OrientedEnergy(image_shape) if self.probe_share or self.feature_scale else None

    def draw_labels(self, classes: int, public: torch.Generator) -> Tensor:
        """Equal numbers of each class, sorted: blocks of one class stand together."""
        return _balanced(self.rows, classes)

    def draw_own_labels(self, classes: int) -> Tensor:
        """Equal numbers of each class, sorted."""
        return _balanced(self.own, classes)

    def make_companion(self, image_shape: ImageShape, classes: int) -> ClassKnowledge:
        """Shares of the classes and the probe."""
        noise = 0.0
        if self.probe_share:
            noise = _PROBE_CLIP * self.noise_scale / math.sqrt(self._gradient_share) / self.expected_batch
        return ClassKnowledge(classes, self.features(image_shape), noise, learns=self.probe_share > 0)

    def make_labeller(self, companion: torch.nn.Module | None, draw: Draw) -> Labeller | None:
        """The probe, where one was trained."""
        assert isinstance(companion, ClassKnowledge)
        if companion.probe is None:
            return None
        return Labeller.from_probe(companion.probe, companion.shares, draw)

    def self_term(self, batch: GeneratedBatch) -> OwnTerms:
        """The atoms, and the pull of the generator's own samples on them.

        The classes are weighed by their estimated shares, as the records weigh themselves.
        """
        assert batch.own_pixels is not None
        assert batch.own_labels is not None
        knowledge = _knowledge(batch)
        classes = len(knowledge.counted)
        leaf = batch.pixels.detach().float().requires_grad_()
        features = None
        if self.feature_scale:
            assert knowledge.features is not None
            with torch.enable_grad():
                features = knowledge.features.smooth(leaf)
        atoms = self._atoms(batch.pixels.detach(), features, classes)
        # Rounded to 8 bits like the records, so that the two can have the same law.
        pixels = to_pixels(from_pixels(batch.own_pixels))
        own = RecordBatch(
            pixels,
            batch.own_labels,
            knowledge.features(pixels) if self.feature_scale and knowledge.features is not None else None,
        )
        pull = self._pull_of(batch, atoms, own, len(batch.own_labels) // classes)
        pull *= (knowledge.shares / (len(batch.own_labels) / classes)).to(pull)[:, None, None]
        return OwnTerms(atoms, pull, leaf, features)

    def query(self, batch: GeneratedBatch, self_term: OwnTerms, records: RecordBatch) -> Tensor:
        """The sums over the batch, flattened into one vector; exact, whatever the order of summation."""
        knowledge = _knowledge(batch)
        classes = len(knowledge.counted)
        # A public width: what a batch has beyond it goes into further blocks.
        expected = self.expected_batch / classes
        width = math.ceil(expected + _PADDING_DEVIATIONS * math.sqrt(expected))
        pull = self._pull_of(batch, self_term.atoms, records, width)
        counts = torch.bincount(records.labels, minlength=classes).to(pull)
        parts = [math.sqrt(self._transport_share) / self.clip * pull, math.sqrt(self.histogram_share) * counts]
        if knowledge.probe is not None:
            assert records.features is not None
            gradient = probe_gradient(knowledge.weight, knowledge.centre, records.features, records.labels, _PROBE_CLIP)
            parts.append(math.sqrt(self._gradient_share) / _PROBE_CLIP * gradient)
            mean = records.features.sum(0, dtype=torch.int64).double() * FEATURE_GRID
            parts.append(math.sqrt(self._mean_share) * mean)
        return torch.cat([part.flatten() for part in parts])

    def gradient(self, batch: GeneratedBatch, self_term: OwnTerms, released: Tensor) -> PerRecordGradient:
        """g_ψ = R/(C q M) − r · (own pull)/C, carried back to the pixels; and what was told of the classes."""
        knowledge = _knowledge(batch)
        classes, size = len(knowledge.counted), knowledge.weight.numel()
        sizes = [self_term.pull.numel(), classes, size, knowledge.summed.numel()]
        pull, counts, probe, mean = torch.split(released, sizes)
        gradient = pull.view_as(self_term.pull) / (math.sqrt(self._transport_share) * self.expected_batch)
        gradient = gradient - self.debias.linear(batch.progress) / self.clip * self_term.pull
        image = self._to_pixels(self_term, gradient.flatten(0, 1).to(batch.pixels.dtype))
        learnt = knowledge.probe is not None
        return PerRecordGradient(
            image,
            counts / (math.sqrt(self.histogram_share) * self.expected_batch),
            mean / (math.sqrt(self._mean_share) * self.expected_batch) if learnt else None,
            probe.view_as(knowledge.weight) * (_PROBE_CLIP / (math.sqrt(self._gradient_share) * self.expected_batch))
            if learnt
            else None,
        )

    @property
    def _transport_share(self) -> float:
        return 1.0 - self.histogram_share - self.probe_share

    @property
    def _mean_share(self) -> float:
        return _MEAN_PART * self.probe_share

    @property
    def _gradient_share(self) -> float:
        return self.probe_share - self._mean_share

    def _atoms(self, pixels: Tensor, features: Tensor | None, classes: int) -> Tensor:
        """(L, n/L, d + k) atoms ψ(x_i) on their grid."""
        levels = to_levels(pixels, ATOM_GRID)
        if self.feature_scale:
            assert features is not None
            scaled = to_levels(self.feature_scale * features.detach(), ATOM_GRID, MOST_LEVELS)
            levels = torch.cat([levels, scaled], dim=1)
        return levels.view(classes, -1, levels.shape[1])

    def _points(self, batch: RecordBatch, index: Tensor) -> Tensor:
        """Levels of ψ(y), whole numbers, for some of the points of a batch."""
        levels = to_levels(batch.pixels[index])
        if not self.feature_scale:
            return levels
        assert batch.features is not None
        features = batch.features[index].double() * (LEVELS * self.feature_scale * FEATURE_GRID)
        return torch.cat([levels, features.round_().clamp_(-MOST_LEVELS, MOST_LEVELS)], dim=-1)

    def _to_pixels(self, own: OwnTerms, gradient: Tensor) -> Tensor:
        """The gradient in the atoms' pixels of what has this gradient in their ψ: Jᵀ g."""
        dimension = own.pixels.shape[1]
        image = gradient[:, :dimension]
        if self.feature_scale:
            assert own.features is not None
            slope = self.feature_scale * gradient[:, dimension:].float()
            (slope,) = torch.autograd.grad(own.features, own.pixels, slope)
            image = image + torch.nan_to_num(slope).to(image.dtype)
        return image

    def _pull_of(self, batch: GeneratedBatch, atoms: Tensor, points: RecordBatch, width: int) -> Tensor:
        """Σ V̄ over points of all classes, in blocks of at most `width` points of each class."""
        classes, _, dimension = atoms.shape
        total = PullSum.zero(atoms, self.cost)
        width = min(width, max(1, _CPU_BLOCK_BYTES // (8 * dimension)))
        temperature = self.temperature.geometric(batch.progress)
        memory = _GPU_BLOCK_BYTES if atoms.device.type == "cuda" else _CPU_BLOCK_BYTES
        group = min(classes, max(1, memory // (8 * dimension * width)))
        for rows, index, present in class_blocks(points.labels, classes, width, group):
            block, there = self._points(points, index.to(points.pixels.device)), present.to(atoms.device)
            total.add(rows, clipped_pull(atoms[rows], block, there, self.cost, temperature, self.clip))
        return total.gradient(self.cost)


def class_blocks(labels: Tensor, classes: int, width: int, group: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Put points into padded blocks by class; every point is in exactly one block, and all blocks have one shape.

    Args:
        labels: (m,) classes of the points.
        classes: L.
        width: points of one class in a block; a class with more fills several.
        group: classes in a block.

    Yields:
        (group,) the block's classes, (group, width) indices of its points, and (group, width) whether there is one.
        Class 0 and index 0 stand for padding.
    """
    host = labels.cpu()
    order = torch.argsort(host, stable=True)
    counts = torch.bincount(host, minlength=classes)
    starts = counts.cumsum(0) - counts
    place = torch.arange(width)
    offset = 0
    while (remaining := torch.nonzero(counts > offset).flatten()).numel():
        for some in torch.split(remaining, group):
            rows = F.pad(some, (0, group - len(some)))
            present = offset + place < counts[rows].unsqueeze(1)
            present[len(some) :] = False
            at = (starts[rows].unsqueeze(1) + offset + place).clamp_max(len(order) - 1)
            yield rows, torch.where(present, order[at], 0), present
        offset += width


def _balanced(count: int, classes: int) -> Tensor:
    return torch.arange(classes).repeat_interleave(math.ceil(count / classes))


def _knowledge(batch: GeneratedBatch) -> ClassKnowledge:
    assert isinstance(batch.companion, ClassKnowledge), "the trainer keeps what make_companion made"
    return batch.companion
