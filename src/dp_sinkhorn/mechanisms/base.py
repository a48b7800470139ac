"""What a mechanism is: the one kind of object that may look at private records.

The object that adds the noise is the object that states its cost. A mechanism owns its sampling rate, its
clipped query, its noise and the `DpEvent` of one release; `event` is computed from the very numbers that
`release` uses. To add one, subclass `Mechanism` and say two things: how far the query can move when one
record is added or removed (`sensitivity`), and what the query is (`query`). docs/new-mechanism.md shows it
in thirty lines.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, final

import dp_accounting
import torch
from torch import Tensor

from dp_sinkhorn.images import ImageShape
from dp_sinkhorn.records.private import PrivateRecords, RecordBatch

if TYPE_CHECKING:
    from dp_sinkhorn.features import OrientedEnergy
    from dp_sinkhorn.labelling import Draw, Labeller
    from dp_sinkhorn.mechanisms.randomness import Randomness
    from dp_sinkhorn.settings import Settings


@dataclass(frozen=True, eq=False)
class GeneratedBatch:
    """What the generator made in this step; public.

    Attributes:
        pixels: (N, d) pixels in [-1, 1], attached to the generator's autograd graph.
        labels: (N,) class indices.
        parameters: the generator's parameters.
        own_pixels: (N', d) further images, of the labels that the mechanism asked for; without a graph.
        own_labels: (N',) their labels.
        progress: the part of the training that is done, in [0, 1).
        companion: what the mechanism has learnt beside the generator from its earlier releases.
    """

    pixels: Tensor
    labels: Tensor
    parameters: Sequence[torch.nn.Parameter] = ()
    own_pixels: Tensor | None = None
    own_labels: Tensor | None = None
    progress: float = 0.0
    companion: torch.nn.Module | None = None


class SanitisedGradient(Protocol):
    """A released gradient: safe to use in any way."""

    def backpropagate(self, batch: GeneratedBatch) -> None:
        """Accumulate the gradient in the generator's parameters."""


@dataclass(frozen=True, eq=False)
class ImageGradient:
    """A gradient with respect to the generated pixels, (N, d)."""

    value: Tensor

    def backpropagate(self, batch: GeneratedBatch) -> None:
        """The paper's `backprop`: the Jacobian-vector product of the generator with this gradient."""
        torch.autograd.backward(batch.pixels, self.value)


@dataclass(frozen=True, eq=False)
class ParameterGradient:
    """A gradient with respect to the generator's parameters, flattened in their order."""

    value: Tensor

    def backpropagate(self, batch: GeneratedBatch) -> None:
        """Hand each parameter its slice."""
        slices = torch.split(self.value, [parameter.numel() for parameter in batch.parameters])
        for parameter, piece in zip(batch.parameters, slices, strict=True):
            gradient = piece.reshape(parameter.shape)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@dataclass(frozen=True, kw_only=True)
class Mechanism(ABC):
    """A Poisson-subsampled Gaussian mechanism on a bounded query.

    A mechanism is a plain value made of public parameters; records are handed to `release`.

    Attributes:
        sampling_rate: q, the probability with which each record enters a batch.
        noise_multiplier: σ as the mechanism's own text states it.
    """

    name: ClassVar[str]
    """The name by which settings, ledgers and releases call this mechanism."""

    sampling_rate: float
    noise_multiplier: float

    @classmethod
    @abstractmethod
    def from_settings(cls, settings: Settings, sampling_rate: float, noise_multiplier: float) -> Self:
        """Make the mechanism that these settings describe."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """How many images the generator makes for one release."""

    def features(self, image_shape: ImageShape) -> OrientedEnergy | None:
        """Which features of the records the query looks at, beside their pixels; none by default."""
        return None

    def draw_labels(self, classes: int, public: torch.Generator) -> Tensor:
        """Labels of the images that the generator makes for one release: Unif{0, …, L-1}, as in Algorithm 1."""
        return torch.randint(classes, (self.batch_size,), generator=public)

    def draw_own_labels(self, classes: int) -> Tensor:
        """Labels of the generator's further images (`GeneratedBatch.own_pixels`); none by default."""
        return torch.empty(0, dtype=torch.int64)

    def make_companion(self, image_shape: ImageShape, classes: int) -> torch.nn.Module | None:
        """What this mechanism learns beside the generator, from its own releases alone; the trainer keeps it."""
        return None

    def make_labeller(self, companion: torch.nn.Module | None, draw: Draw) -> Labeller | None:
        """What labels the generator's images, from what the companion has learnt; by default what was asked for."""
        return None

    def check(self, records: int, classes: int) -> None:
        """Raise `UserError` for a run that the proof of the bound does not cover; asked before anything is spent.

        Args:
            records: how many records there are.
            classes: L.
        """
        return

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """The most, in Euclidean norm, that `query` moves when one record is added or removed."""

    @property
    def noise_scale(self) -> float:
        """Standard deviation of the noise on each coordinate of the query."""
        return self.noise_multiplier * self.sensitivity

    @property
    def event(self) -> dp_accounting.DpEvent:
        """The cost of one release: what leaves is the query plus noise of `noise_scale`, on a Poisson sample."""
        gaussian = dp_accounting.GaussianDpEvent(self.noise_scale / self.sensitivity)
        return dp_accounting.PoissonSampledDpEvent(self.sampling_rate, gaussian)

    def self_term(self, batch: GeneratedBatch) -> Any:
        """What query and gradient owe to the generator's own samples; it sees no record. Nothing by default."""
        return torch.zeros_like(batch.pixels)

    @abstractmethod
    def query(self, batch: GeneratedBatch, self_term: Any, records: RecordBatch) -> Tensor:
        """The exact answer that is to be noised, of a shape that does not depend on the records."""

    def gradient(self, batch: GeneratedBatch, self_term: Any, released: Tensor) -> SanitisedGradient:
        """Post-processing: turn the noised answer into a gradient for the generator."""
        return ImageGradient(released)

    @final
    def release(self, batch: GeneratedBatch, records: PrivateRecords, randomness: Randomness) -> SanitisedGradient:
        """Draw a Poisson batch, ask the query, add noise; what returns is the only thing that leaves."""
        self_term = self.self_term(batch)
        drawn = records.poisson_sample(self.sampling_rate, randomness, self.features(records.shape))
        answer = self.query(batch, self_term, drawn)
        if not self.noise_scale >= 0.0:
            raise ValueError(f"the noise scale of '{self.name}' is {self.noise_scale}")
        if self.noise_scale > 0.0:
            noise = self.noise_scale * randomness.normal(answer.shape, answer.device)
            answer = round_to_public_grid(answer.double() + noise, self.noise_scale).to(answer.dtype)
        return self.gradient(batch, self_term, answer)


def round_to_public_grid(values: Tensor, noise_scale: float) -> Tensor:
    """Round float64 sums of answer and noise to multiples of 2^-24 of the noise, rounded down to a power of two.

    The spacing of floating-point numbers depends on their size, so which sums can occur tells of the answer's last
    bits. A grid that only public numbers decide drops those bits of every sum, also of one that is near zero by
    cancellation (docs/privacy.md, section 6). What a format rounds off after that is post-processing.
    """
    spacing = 2.0 ** (math.floor(math.log2(noise_scale)) - 24)
    return torch.round(values / spacing) * spacing
