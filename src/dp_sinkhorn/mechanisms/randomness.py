"""Private random bits: which records are drawn, and the noise.

A reader who knew these bits could subtract the noise, so they are as private as the records. They come from
the operating system's cryptographic generator, fresh for every draw: there is no seed to leak, to log or to
repeat after a resume. A general-purpose generator would not do: PyTorch's CPU generator keeps 32 bits of its
seed, which an attacker can try one by one.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RandomnessName = Literal["os-entropy", "seeded"]


class Randomness(ABC):
    """Draws Bernoulli trials and Gaussian noise from a source of uniform bytes."""

    name: ClassVar[RandomnessName]

    @abstractmethod
    def take_bytes(self, count: int) -> bytes:
        """Return `count` uniform random bytes, never the same ones twice."""

    def bernoulli(self, count: int, rate: float) -> NDArray[np.bool_]:
        """Return `count` independent trials that succeed with probability `rate`.

        64-bit integers are compared with ⌊rate · 2^64⌋, so the true probability is never above `rate` and at
        most 2^-53 below it: the accounted sampling rate is an upper bound.
        """
        if rate >= 1.0:
            return np.ones(count, dtype=np.bool_)
        draws = np.frombuffer(self.take_bytes(8 * count), dtype=np.uint64)
        trials: NDArray[np.bool_] = draws < np.uint64(math.floor(rate * 2.0**64))
        return trials

    def normal(self, shape: torch.Size, device: torch.device) -> Tensor:
        """Independent standard normal values in float64, by the Box-Muller transform.

        The radius comes from a uniform of 106 bits, 0 excluded: the tails reach ±12.1 and are as finely graded as
        the middle; what lies beyond has mass 2^-106 a pair, which no number of draws makes matter.
        """
        count = math.prod(shape)
        pairs = (count + 1) // 2
        words = np.frombuffer(self.take_bytes(24 * pairs), dtype=np.uint64).reshape(3, pairs) >> np.uint64(11)
        uniform = (words[0] + (words[1] + 1.0) * 2.0**-53) * 2.0**-53
        radius = np.sqrt(-2.0 * np.log(uniform))
        angle = (2.0 * math.pi * 2.0**-53) * words[2]
        values = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
        return torch.from_numpy(values).reshape(shape).to(device)


class OsEntropy(Randomness):
    """The operating system's cryptographic generator (`os.urandom`)."""

    name = "os-entropy"

    def take_bytes(self, count: int) -> bytes:
        """Read from the operating system's generator."""
        return os.urandom(count)


class SeededForDebugging(Randomness):
    """A reproducible stream, for debugging only: who knows the seed can remove the noise.

    Args:
        seed: the stream's key.
        first_release: how many releases the ledger holds already. It selects a stream of its own, so that a
            resumed run does not draw its earlier noise again.
    """

    name = "seeded"

    def __init__(self, seed: int, first_release: int = 0) -> None:
        self._generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, first_release])))

    def take_bytes(self, count: int) -> bytes:
        """Read from the seeded stream."""
        return self._generator.bytes(count)
