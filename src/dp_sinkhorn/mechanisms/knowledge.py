"""What per-record transport learns of the classes, beside the generator and from the same releases.

Everything here is post-processing: it is computed from noised answers and public numbers, and sees no record. A
linear classifier on fixed features takes little of the budget and knows the classes better than the generator draws
them, so it guides the generator.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dp_sinkhorn.features import OrientedEnergy

_MOMENTUM = 0.9
_AVERAGE = 0.95
_MAX_RATE = 16.0
# Good rates of the probe fall with the noise in its gradient, about in proportion over a factor of twenty
# (docs/research-log.md, "The rate of the probe").
_RATE_OVER_NOISE = 0.0115
_LEAST_SHARE = 1e-3


BIAS = 0.25
"""A constant feature, in the features' own scale; a multiple of `FEATURE_GRID`."""


class LinearProbe(nn.Module):
    """p(l | x) = softmax_l(⟨weight_l, [φ(x), BIAS]⟩) with φ the oriented energies of x.

    Args:
        features: φ.
        classes: L.
    """

    weight: Tensor

    def __init__(self, features: OrientedEnergy, classes: int) -> None:
        super().__init__()
        self.features = features
        self.register_buffer("weight", torch.zeros(features.size + 1, classes))

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits (N, L) of pixels (N, d) or (N, C, H, W); differentiable in the pixels."""
        return self.features.smooth(pixels) @ self.weight[:-1] + BIAS * self.weight[-1]


class ClassKnowledge(nn.Module):
    """Shares of the classes, and a linear probe that tells them apart.

    Attributes:
        probe: the running average of the probe, which guides; None if the mechanism learns none.
        counted: (L,) sum of the released count vectors, as parts of a batch, and one uniform vector to begin with.
        releases: how many vectors are in that sum.
    """

    counted: Tensor
    releases: Tensor
    weight: Tensor
    velocity: Tensor

    def __init__(self, classes: int, features: OrientedEnergy | None, probe_noise: float) -> None:
        super().__init__()
        self.register_buffer("counted", torch.full((classes,), 1.0 / classes, dtype=torch.float64))
        self.register_buffer("releases", torch.ones((), dtype=torch.float64))
        self.probe = LinearProbe(features, classes) if features is not None else None
        self._rate = min(_MAX_RATE, _RATE_OVER_NOISE / probe_noise) if probe_noise > 0 else _MAX_RATE
        size = features.size + 1 if features is not None else 0
        # The weights that are trained; `probe` holds their running average.
        self.register_buffer("weight", torch.zeros(size, classes))
        self.register_buffer("velocity", torch.zeros(size, classes))

    @property
    def shares(self) -> Tensor:
        """(L,) estimated share of each class among the records, summing to 1."""
        shares = (self.counted / self.releases).clamp_min(_LEAST_SHARE)
        return shares / shares.sum()

    @torch.no_grad()
    def learn(self, counts: Tensor, probe_gradient: Tensor | None) -> None:
        """Take in one release: count vector over the expected batch, and mean gradient of the probe's loss."""
        self.counted += counts.to(self.counted)
        self.releases += 1
        if probe_gradient is None or self.probe is None:
            return
        self.velocity.mul_(_MOMENTUM).add_(probe_gradient.to(self.velocity))
        self.weight.add_(self.velocity, alpha=-self._rate)
        decay = (self.releases / (9.0 + self.releases)).clamp_max(_AVERAGE)
        self.probe.weight.lerp_(self.weight, (1.0 - decay).to(self.weight))
