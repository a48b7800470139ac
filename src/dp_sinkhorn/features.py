"""A fixed map from images to features in which a linear classifier does well: oriented energies, pooled.

It is the first layer of a scattering transform (Bruna and Mallat 2013; Oyallon and Mallat 2015): Morlet wavelets of
eight orientations, their modulus, and Gaussian pooling on a coarse grid; coarser wavelets come from halving the image.
Nothing in it is learnt, so it is public, and it may be applied to a private record behind the barrier and to a
generated image outside of it. Linear classifiers on such features are the strongest small models known under
differential privacy (Tramèr and Boneh 2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from dp_sinkhorn.images import ImageShape

FEATURE_GRID = 2.0**-14
"""Features are whole multiples of this: sums over records are then exact (docs/privacy.md)."""
FEATURE_MARGIN = 2.0**-10
"""What the norm 1 of an image's features gives up before rounding, so that rounding cannot carry it past 1."""

_ORIENTATIONS = 8
_FILTER = 7
_MIN_SIDE = 12
_MAX_CELLS = 8
_CHUNK = 500


@dataclass(frozen=True)
class OrientedEnergy:
    """Features of images of one shape: a function, given as a plain value so that it can be compared and hashed.

    Attributes:
        image_shape: (C, H, W).
    """

    image_shape: ImageShape

    @property
    def grid(self) -> tuple[int, int]:
        """Pooling cells along height and width: one for four pixels, at most eight."""
        _, height, width = self.image_shape
        return min(_MAX_CELLS, math.ceil(height / 4)), min(_MAX_CELLS, math.ceil(width / 4))

    @property
    def octaves(self) -> int:
        """How often the image is halved, plus one: as long as its shorter side keeps twelve pixels."""
        side = min(self.image_shape[1:])
        return 1 + max(0, math.floor(math.log2(side / _MIN_SIDE)))

    @property
    def size(self) -> int:
        """Features of an image."""
        return (self.image_shape[0] + _ORIENTATIONS * self.octaves) * self.grid[0] * self.grid[1]

    def __call__(self, pixels: Tensor) -> Tensor:
        """(N, size) `int16` features, in units of `FEATURE_GRID`, of pixels in [-1, 1], (N, d) or (N, C, H, W).

        Rounded towards zero, and below norm 1: a float32 norm of so few terms is within a relative 2^-12 of the true.
        """
        images = pixels.reshape(-1, *self.image_shape)
        with torch.no_grad():
            chunks = []
            for chunk in torch.split(images, _CHUNK):
                # Chunks of one size: what is computed for an image must not depend on how many others there are.
                padded = torch.cat([chunk, chunk.new_zeros(_CHUNK - len(chunk), *self.image_shape)])
                features = self.smooth(padded.float())[: len(chunk)] * ((1.0 - FEATURE_MARGIN) / FEATURE_GRID)
                chunks.append(features.trunc().to(torch.int16))
        return torch.cat(chunks)

    def smooth(self, pixels: Tensor) -> Tensor:
        """(N, size) the same features before they are rounded, each row of norm at most 1; differentiable."""
        images = pixels.reshape(-1, *self.image_shape)
        bank = _morlet_bank().to(images.device)
        brightness = (images + 1.0) / 2.0
        groups = [self._pool(brightness)]
        level = brightness.mean(1, keepdim=True)
        for octave in range(self.octaves):
            if octave:
                level = F.avg_pool2d(level, 2)
            response = F.conv2d(level, bank, padding=_FILTER // 2).square()
            # The constant keeps the root's slope finite where an image is flat.
            energy = (response[:, :_ORIENTATIONS] + response[:, _ORIENTATIONS:] + 1e-8).sqrt()
            groups.append(self._pool(energy))
        # Each group counts alike, whatever the contrast of the image.
        standard = [
            (group - group.mean((1, 2, 3), keepdim=True)) / (group.std((1, 2, 3), keepdim=True) + 1e-3)
            for group in groups
        ]
        features = torch.cat(standard, 1).flatten(1)
        norms: Tensor = torch.linalg.vector_norm(features, dim=1, keepdim=True)
        return features / norms.clamp_min(1.0)

    def _pool(self, maps: Tensor) -> Tensor:
        rows = _windows(maps.shape[2], self.grid[0]).to(maps.device)
        columns = _windows(maps.shape[3], self.grid[1]).to(maps.device)
        return rows @ maps @ columns.T


@lru_cache(maxsize=1)
def _morlet_bank() -> Tensor:
    """(16, 1, 7, 7): real and then imaginary parts of Morlet wavelets without mean, ξ = 3π/4 and σ = 0.8."""
    axis = torch.arange(_FILTER, dtype=torch.float64) - _FILTER // 2
    down, across = torch.meshgrid(axis, axis, indexing="ij")
    wavelets = []
    for k in range(_ORIENTATIONS):
        angle = math.pi * k / _ORIENTATIONS
        along = across * math.cos(angle) + down * math.sin(angle)
        aside = down * math.cos(angle) - across * math.sin(angle)
        envelope = torch.exp(-(along.square() + (0.5 * aside).square()) / (2 * 0.8**2))
        wave = envelope * torch.exp(1j * (3 * math.pi / 4) * along)
        wave = wave - wave.sum() / envelope.sum() * envelope
        wavelets.append(wave / wave.abs().sum())
    bank = torch.stack(wavelets)
    return torch.cat([bank.real, bank.imag]).unsqueeze(1).float()


@lru_cache(maxsize=32)
def _windows(side: int, cells: int) -> Tensor:
    """(cells, side): a Gaussian window around each cell's centre, as wide as half a cell, summing to 1."""
    width = side / cells
    centres = (torch.arange(cells, dtype=torch.float64) + 0.5) * width
    positions = torch.arange(side, dtype=torch.float64) + 0.5
    windows = torch.exp(-(positions - centres.unsqueeze(1)).square() / (2 * (width / 2) ** 2))
    return (windows / windows.sum(1, keepdim=True)).float()
