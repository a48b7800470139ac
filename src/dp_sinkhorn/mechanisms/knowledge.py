"""What per-record transport learns of the classes, beside the generator and from the same releases.

Everything here is post-processing: it is computed from noised answers and public numbers, and sees no record. A
linear classifier on fixed features takes a third of the budget and knows the classes better than the generator draws
them, so it labels what that draws.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dp_sinkhorn.features import OrientedEnergy
from dp_sinkhorn.labelling import LinearProbe

_MOMENTUM = 0.9
_AVERAGE = 0.95
_MAX_RATE = 160.0
# Good rates of the probe fall with the noise in its gradient, about in proportion over a factor of twenty
# (docs/research-log.md, "The rate of the probe").
_RATE_OVER_NOISE = 0.0115
_LEAST_SHARE = 1e-3


class ClassKnowledge(nn.Module):
    """Shares of the classes, and a linear probe that tells them apart.

    Args:
        classes: L.
        features: φ, where the mechanism looks at features at all.
        probe_noise: standard deviation of the noise in the mean gradient of the probe.
        learns: whether there is a probe.

    Attributes:
        probe: the running average of the probe, which a release carries; None if the mechanism learns none.
        counted: (L,) sum of the released count vectors, as parts of a batch, and one uniform vector to begin with.
        summed: (k,) sum of the released means of the features, and one zero vector to begin with.
        releases: how many vectors are in these sums.
    """

    counted: Tensor
    summed: Tensor
    releases: Tensor
    weight: Tensor
    velocity: Tensor

    def __init__(self, classes: int, features: OrientedEnergy | None, probe_noise: float, learns: bool) -> None:
        super().__init__()
        self.register_buffer("counted", torch.full((classes,), 1.0 / classes, dtype=torch.float64))
        self.register_buffer("releases", torch.ones((), dtype=torch.float64))
        self.features = features
        self.probe = LinearProbe(features, classes) if features is not None and learns else None
        self._rate = min(_MAX_RATE, _RATE_OVER_NOISE / probe_noise) if probe_noise > 0 else _MAX_RATE
        size = self.probe.features.size if self.probe is not None else 0
        self.register_buffer("summed", torch.zeros(size, dtype=torch.float64))
        # The weights that are trained; `probe` holds their running average.
        self.register_buffer("weight", torch.zeros(size + (self.probe is not None), classes))
        self.register_buffer("velocity", torch.zeros_like(self.weight))

    @property
    def shares(self) -> Tensor:
        """(L,) estimated share of each class among the records, summing to 1."""
        shares = (self.counted / self.releases).clamp_min(_LEAST_SHARE)
        return shares / shares.sum()

    @property
    def centre(self) -> Tensor:
        """(k,) estimated mean of the records' features: what the probe looks at is the difference from it."""
        return self.summed / self.releases

    @torch.no_grad()
    def learn(self, counts: Tensor, mean: Tensor | None, probe_gradient: Tensor | None) -> None:
        """Take in one release: counts and features over the expected batch, and the mean gradient of the probe."""
        self.counted += counts.to(self.counted)
        self.releases += 1
        if probe_gradient is None or self.probe is None:
            return
        assert mean is not None
        self.summed += mean.to(self.summed)
        self.probe.centre.copy_(self.centre)
        self.velocity.mul_(_MOMENTUM).add_(probe_gradient.to(self.velocity))
        self.weight.add_(self.velocity, alpha=-self._rate)
        decay = (self.releases / (9.0 + self.releases)).clamp_max(_AVERAGE)
        self.probe.weight.lerp_(self.weight, (1.0 - decay).to(self.weight))
