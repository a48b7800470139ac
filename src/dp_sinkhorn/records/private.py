"""The holder of private records.

What is public about a set of records is its number M, the image shape and the class names: they are
parameters of a run (docs/privacy.md, "What is public"). Everything else stays here. `PrivateRecords` has no
indexing, no iteration and no pickling, and its repr shows public facts only; records leave through
`poisson_sample`, which mechanisms call and nothing else does (tests/test_barrier.py checks the package for it).
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch
from torch import Tensor

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.images import ImageShape, LabelledImages, check_shape, to_pixels

if TYPE_CHECKING:
    from dp_sinkhorn.features import OrientedEnergy
    from dp_sinkhorn.mechanisms.randomness import Randomness


@dataclass(frozen=True, eq=False, repr=False)
class RecordBatch:
    """The records of one Poisson sample.

    Attributes:
        pixels: (m, d) in [-1, 1], m >= 0.
        labels: (m,).
        features: (m, k), where the mechanism asks for features of the records.
    """

    pixels: Tensor
    labels: Tensor
    features: Tensor | None = None


class PrivateRecords:
    """M private images with their labels, kept on one device."""

    def __init__(self, data: LabelledImages, device: torch.device | str = "cpu") -> None:
        if len(data) < 2:
            raise UserError(f"at least two records are needed, got {len(data)}")
        check_shape(data.shape, "records")
        self.count: int = len(data)
        self.shape: ImageShape = data.shape
        self.classes: tuple[str, ...] = data.classes
        self.classes_declared = data.classes_declared
        self.device = torch.device(device)
        self.__images = data.images.to(self.device)
        self.__labels = data.labels.to(self.device)
        self.__features: dict[OrientedEnergy, Tensor] = {}

    def __repr__(self) -> str:
        return f"PrivateRecords(count={self.count}, shape={self.shape}, classes={len(self.classes)})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("private records cannot be pickled or copied")

    def fingerprint(self, key: bytes) -> str:
        """Tell these records from others, to whoever has the key; for RUN/private only, like the key."""
        digest = hmac.new(key, digestmod="sha256")
        for tensor in (self.__images, self.__labels):
            digest.update(tensor.cpu().numpy().tobytes())
        return digest.hexdigest()

    def poisson_sample(
        self, rate: float, randomness: Randomness, features: OrientedEnergy | None = None
    ) -> RecordBatch:
        """Algorithm 1 of the appendix: take each record independently with probability `rate`.

        The batch may have any size from 0 to M; it is private, and so is its size. Features of the records, if asked
        for, are computed once, each from its own record alone, and kept behind the barrier like the images.
        """
        chosen = torch.from_numpy(np.flatnonzero(randomness.bernoulli(self.count, rate))).to(self.device)
        return RecordBatch(
            to_pixels(self.__images[chosen]).flatten(1),
            self.__labels[chosen],
            self._all_features(features)[chosen] if features is not None else None,
        )

    def _all_features(self, features: OrientedEnergy) -> Tensor:
        if features not in self.__features:
            # On the CPU: a GPU may choose another algorithm for a convolution from call to call.
            self.__features[features] = torch.cat(
                [features(to_pixels(images.cpu())) for images in torch.split(self.__images, 2_000)]
            ).to(self.device)
        return self.__features[features]
