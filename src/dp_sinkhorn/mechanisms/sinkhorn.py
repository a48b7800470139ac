"""The paper's mechanisms: four ways to sanitise the gradient of the semi-debiased Sinkhorn loss.

`row` is the paper's text, `batch` the authors' published code, `parameter` the ablation of Table 2 and
`nonprivate` the first rows of Table 1. They share the gradient and differ in what they clip, and so in what
one record can move:

    mechanism   clipped to Δ              sensitivity     noise per coordinate     multiplier of the event
    row         each of the n rows        2Δ√n            2Δσ                      σ/√n
    batch       the n × d gradient        2Δ              2Δσ                      σ
    parameter   the parameter gradient    2Δ              2Δσ                      σ

The loss is not a sum over records: through the dual potentials one record moves every row, from any place in
the ball of radius Δ to any other. Hence 2Δ, and for `row` the joint 2Δ√n (docs/privacy.md, section 3).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import dp_accounting
import torch
from torch import Tensor

from dp_sinkhorn.mechanisms.base import GeneratedBatch, ImageGradient, Mechanism, ParameterGradient, SanitisedGradient
from dp_sinkhorn.mechanisms.clipping import clip_rows, clip_whole
from dp_sinkhorn.records.private import RecordBatch
from dp_sinkhorn.transport import (
    ElementwiseCost,
    PointCloud,
    SinkhornSolver,
    cross_gradient,
    resampled_count,
    self_gradient,
)

if TYPE_CHECKING:
    from dp_sinkhorn.settings import Settings


@dataclass(frozen=True, kw_only=True)
class SinkhornMechanism(Mechanism):
    """The gradient of Ŝ_p(X, Y) with respect to the generated images (Algorithm 1).

    Attributes:
        rows: n, the generated images that are compared with records.
        debias: p, the debiasing fraction; n' = ⌊np⌋ more images are made.
        clip: Δ.
        cost: element-wise cost c_m with the class embedding.
        solver: Sinkhorn settings with λ.
    """

    rows: int
    debias: float
    clip: float
    cost: ElementwiseCost
    solver: SinkhornSolver

    @classmethod
    def from_settings(cls, settings: Settings, sampling_rate: float, noise_multiplier: float) -> Self:
        """Make the mechanism that these settings describe."""
        return cls(
            sampling_rate=sampling_rate,
            noise_multiplier=noise_multiplier,
            rows=settings.n,
            debias=settings.given("debias"),
            clip=settings.given("clip"),
            cost=ElementwiseCost(settings.l1_weight, settings.l2_weight, settings.class_scale),
            solver=SinkhornSolver(settings.given("temperature"), exponent=settings.exponent, scaling=settings.scaling),
        )

    @property
    def batch_size(self) -> int:
        """The n + n' images of Definition 3.3."""
        return self.rows + resampled_count(self.rows, self.debias)

    @property
    def sensitivity(self) -> float:
        """Two vectors of norm at most Δ are at most 2Δ apart."""
        return 2.0 * self.clip

    def self_term(self, batch: GeneratedBatch) -> Tensor:
        """∇_X of −Ŵ(X^[0:n], X^[n':n+n']), for all n + n' rows."""
        return self_gradient(self._cloud(batch), self.rows, self.cost, self._solver(batch))

    def _row_gradients(self, batch: GeneratedBatch, self_term: Tensor, records: RecordBatch) -> Tensor:
        """∇ Ŝ_p(X, Y) for the rows 0..n-1, the only ones that records move."""
        real = PointCloud(records.pixels.to(batch.pixels.dtype), records.labels)
        cross = cross_gradient(self._cloud(batch)[: self.rows], real, self.cost, self._solver(batch))
        return cross + self_term[: self.rows]

    def _solver(self, batch: GeneratedBatch) -> SinkhornSolver:
        """The solver with the diameter of [-1, 1]^d: the number of iterations must not depend on the records."""
        return dataclasses.replace(self.solver, diameter=2.0 * math.sqrt(batch.pixels.shape[1]))

    @staticmethod
    def _cloud(batch: GeneratedBatch) -> PointCloud:
        return PointCloud(batch.pixels.detach(), batch.labels)


@dataclass(frozen=True, kw_only=True)
class RowMechanism(SinkhornMechanism):
    """`row`: clip each row's gradient to Δ, add noise of 2Δσ to every coordinate (the paper's Algorithm 1)."""

    name: ClassVar[str] = "row"

    @property
    def sensitivity(self) -> float:
        """Each of the n rows may move by 2Δ, all in one step: 2Δ√n together."""
        return 2.0 * self.clip * math.sqrt(self.rows)

    @property
    def noise_scale(self) -> float:
        """2Δσ, the paper's noise, which takes no account of the number of rows."""
        return 2.0 * self.clip * self.noise_multiplier

    def query(self, batch: GeneratedBatch, self_term: Tensor, records: RecordBatch) -> Tensor:
        """The clipped rows G̃^[0:n] before noise."""
        return clip_rows(self._row_gradients(batch, self_term, records), self.clip)

    def gradient(self, batch: GeneratedBatch, self_term: Tensor, released: Tensor) -> SanitisedGradient:
        """Append the rows n..n+n'-1: clipped for a common scale, without noise, since no record moves them."""
        return ImageGradient(torch.cat([released, clip_rows(self_term[self.rows :], self.clip)]))

    def as_published_event(self, steps: int) -> dp_accounting.DpEvent:
        """The paper's recipe: T·n independent Poisson-subsampled Gaussians of multiplier σ.

        It is wrong, and kept to print beside the sound figure: the n rows of a step see the same Poisson
        batch, so amplification by sampling does not apply to each row anew. No guarantee is ever stated from it.
        """
        one_row = dp_accounting.PoissonSampledDpEvent(
            self.sampling_rate, dp_accounting.GaussianDpEvent(self.noise_multiplier)
        )
        return dp_accounting.SelfComposedDpEvent(one_row, steps * self.rows)


@dataclass(frozen=True, kw_only=True)
class BatchMechanism(SinkhornMechanism):
    """`batch`: clip the whole n x d gradient to Δ, add noise of 2Δσ (the authors' published code)."""

    name: ClassVar[str] = "batch"

    def query(self, batch: GeneratedBatch, self_term: Tensor, records: RecordBatch) -> Tensor:
        """The gradient of rows 0..n-1, clipped as one vector."""
        return clip_whole(self._row_gradients(batch, self_term, records), self.clip)

    def gradient(self, batch: GeneratedBatch, self_term: Tensor, released: Tensor) -> SanitisedGradient:
        """Append the rows n..n+n'-1, clipped as one vector, without noise."""
        return ImageGradient(torch.cat([released, clip_whole(self_term[self.rows :], self.clip)]))


@dataclass(frozen=True, kw_only=True)
class ParameterMechanism(SinkhornMechanism):
    """`parameter`: clip and noise the gradient of the generator's parameters (Table 2, first row)."""

    name: ClassVar[str] = "parameter"

    def query(self, batch: GeneratedBatch, self_term: Tensor, records: RecordBatch) -> Tensor:
        """The parameter gradient backprop(X, θ, ∇_X Ŝ_p), clipped as one vector."""
        image_gradient = self_term.clone()
        image_gradient[: self.rows] = self._row_gradients(batch, self_term, records)
        gradients = torch.autograd.grad(batch.pixels, batch.parameters, image_gradient)
        return clip_whole(torch.cat([gradient.flatten() for gradient in gradients]), self.clip)

    def gradient(self, batch: GeneratedBatch, self_term: Tensor, released: Tensor) -> SanitisedGradient:
        """The noised parameter gradient is used as it is."""
        return ParameterGradient(released)


@dataclass(frozen=True, kw_only=True)
class NonPrivateMechanism(SinkhornMechanism):
    """`nonprivate`: the exact gradient. It protects nobody, and its event says so."""

    name: ClassVar[str] = "nonprivate"

    @property
    def sensitivity(self) -> float:
        """Nothing is clipped, so nothing bounds what one record moves."""
        return math.inf

    @property
    def noise_scale(self) -> float:
        """No noise."""
        return 0.0

    @property
    def event(self) -> dp_accounting.DpEvent:
        """A release without protection: every accountant answers ε = ∞."""
        return dp_accounting.NonPrivateDpEvent()

    def query(self, batch: GeneratedBatch, self_term: Tensor, records: RecordBatch) -> Tensor:
        """The gradient of rows 0..n-1 as it is."""
        return self._row_gradients(batch, self_term, records)

    def gradient(self, batch: GeneratedBatch, self_term: Tensor, released: Tensor) -> SanitisedGradient:
        """Append the rows n..n+n'-1."""
        return ImageGradient(torch.cat([released, self_term[self.rows :]]))
