"""Labels that a release gives to its images: by a linear probe, not by what the generator was asked for.

A generator that is trained under noise draws some images of one class when it is asked for another. The probe that was
trained in the same releases knows the classes better (docs/research-log.md), so a release carries it, and an image is
of the class that the probe sees in it. That is post-processing and costs no privacy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dp_sinkhorn.features import OrientedEnergy
from dp_sinkhorn.images import to_pixels

BIAS = 0.25
"""A constant feature, in the features' own scale; a multiple of `FEATURE_GRID`."""

_PILOT = 200
_FILL = 1.1
_MOST_CANDIDATES = 1000
_MOST_ROUNDS = 500
_MOST_IDLE_ROUNDS = 20

Draw = Callable[[Tensor], Tensor]
"""Images of the generator, `uint8` (N, C, H, W), for labels (N,)."""


class LinearProbe(nn.Module):
    """p(l | x) = softmax_l(⟨weight_l, [φ(x) − centre, BIAS]⟩) with φ the oriented energies of x.

    Args:
        features: φ.
        classes: L.
    """

    weight: Tensor
    centre: Tensor

    def __init__(self, features: OrientedEnergy, classes: int) -> None:
        super().__init__()
        self.features = features
        self.register_buffer("weight", torch.zeros(features.size + 1, classes))
        self.register_buffer("centre", torch.zeros(features.size))

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits (N, L) of pixels (N, d) or (N, C, H, W)."""
        return (self.features.smooth(pixels) - self.centre) @ self.weight[:-1] + BIAS * self.weight[-1]


class Labeller(LinearProbe):
    """A probe for images of which each class is asked for equally often, and where to find images of a class.

    Attributes:
        sources: (L, L) `uint8`; 1 at (k, l) where images asked for as k come out as l.
    """

    sources: Tensor

    def __init__(self, features: OrientedEnergy, classes: int) -> None:
        super().__init__(features, classes)
        self.register_buffer("sources", torch.eye(classes, dtype=torch.uint8))

    @classmethod
    @torch.no_grad()
    def from_probe(cls, probe: LinearProbe, shares: Tensor, draw: Draw) -> Labeller:
        """The probe of a finished run.

        By Bayes' rule a probe that was trained on classes of unequal shares takes log share_l off the logit of class l
        where classes are equal. `sources` comes from a pilot of a few hundred images of each class.
        """
        labeller = cls(probe.features, len(shares)).to(probe.weight.device)
        labeller.weight.copy_(probe.weight)
        labeller.centre.copy_(probe.centre)
        labeller.sources.zero_()
        labeller.weight[-1] -= (shares.log() / BIAS).to(labeller.weight)
        for label in range(len(shares)):
            asked = torch.full((_PILOT,), label, dtype=torch.int64, device=labeller.weight.device)
            labeller.sources[label, labeller.label(draw(asked))] = 1
        return labeller

    @torch.no_grad()
    def label(self, images: Tensor) -> Tensor:
        """(N,) the class that the probe sees in `uint8` images (N, C, H, W)."""
        logits: Tensor = self(to_pixels(images))
        return logits.argmax(1)

    def fill(self, wanted: Tensor, draw: Draw) -> Tensor:
        """Images for which the probe sees the wanted classes (N,), in their order, on the CPU.

        Candidates are drawn evenly from all classes whose images come out as a wanted one, so the images of a class
        have the law of the generator's images, given that the probe sees that class. A class that the probe never sees,
        in the pilot or in so many candidates, is drawn as the generator has it.
        """
        images = torch.empty(len(wanted), *self.features.image_shape, dtype=torch.uint8)
        open_slots = {label: (wanted == label).nonzero().flatten().cpu() for label in sorted(set(wanted.tolist()))}
        seen = [label for label in open_slots if self.sources[:, label].any()]
        asked = self.sources[:, seen].any(1).nonzero().flatten()
        position, idle = 0, 0
        for _ in range(_MOST_ROUNDS + len(wanted) // 10):
            missing = sum(len(open_slots[label]) for label in seen)
            if not missing or idle == _MOST_IDLE_ROUNDS:
                break
            widest = max(len(open_slots[label]) for label in seen)
            count = min(_MOST_CANDIDATES, max(missing, int(_FILL * widest * len(asked)) + len(asked)))
            candidates = draw(asked[(position + torch.arange(count, device=asked.device)) % len(asked)])
            position += count
            labels, before = self.label(candidates), missing
            for label in seen:
                found = candidates[labels == label][: len(open_slots[label])].cpu()
                images[open_slots[label][: len(found)]] = found
                open_slots[label] = open_slots[label][len(found) :]
                missing -= len(found)
            idle = idle + 1 if missing == before else 0
        for label, slots in open_slots.items():
            for part in torch.split(slots, _MOST_CANDIDATES):
                if len(part):
                    images[part] = draw(torch.full((len(part),), label, dtype=torch.int64, device=asked.device)).cpu()
        return images
