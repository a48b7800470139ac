"""`DPSinkhorn`: the package as a scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from dp_sinkhorn.devices import pick_device
from dp_sinkhorn.images import from_arrays
from dp_sinkhorn.records import PrivateRecords
from dp_sinkhorn.release import PrivacyStatement, Release, write_release
from dp_sinkhorn.settings import parse_settings
from dp_sinkhorn.training import train


class DPSinkhorn(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Learn a generator of labelled images under differential privacy.

    Args:
        epsilon: the budget. None accepts what the noise and the steps of the preset or settings cost.
        delta: δ; by default the largest power of ten below one over the number of records, at most 1e-5.
        mechanism: name of the mechanism; that of the preset or the default if None.
        classes: names of all classes, in label order. Declare them, so that neither their number nor an empty class
            tells anything of the data; they are the labels that occur if None.
        preset: named settings to start from.
        settings: any further settings by name (docs/settings.md).
        seed: seed of public randomness: initial weights, latents and labels. Noise never comes from it.
        device: auto, cpu or cuda.
        run_folder: where to keep ledger, checkpoints and the release. None keeps nothing on disk.

    Attributes:
        release_: the fitted `Release`.
        privacy_: the guarantee, as counted by the ledger.
        classes_: class names, in label order.

    Examples:
        >>> from dp_sinkhorn import DPSinkhorn
        >>> model = DPSinkhorn(epsilon=10, preset="digits").fit(images, labels)   # doctest: +SKIP
        >>> synthetic, their_labels = model.sample(1000)                          # doctest: +SKIP
    """

    def __init__(
        self,
        epsilon: float | None = 10.0,
        delta: float | None = None,
        *,
        mechanism: str | None = None,
        classes: Sequence[str] | None = None,
        preset: str | None = None,
        settings: Mapping[str, Any] | None = None,
        seed: int = 0,
        device: str = "auto",
        run_folder: str | Path | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.mechanism = mechanism
        self.classes = classes
        self.preset = preset
        self.settings = settings
        self.seed = seed
        self.device = device
        self.run_folder = run_folder

    def fit(self, images: object, labels: object) -> Self:
        """Train on private records.

        Args:
            images: (N, H, W), (N, H, W, 1|3) or (N, 1|3, H, W); `uint8`, or floats in [0, 1]. Arrays or tensors.
            labels: (N,) class numbers 0..L-1.
        """
        overrides = dict(self.settings or {})
        for name in ("epsilon", "delta", "mechanism"):
            value = getattr(self, name)
            if value is not None:
                overrides[name] = value
        chosen = parse_settings(self.preset, {**overrides, "seed": self.seed})
        declared = tuple(self.classes) if self.classes is not None else None
        data = from_arrays(images, labels, declared, may_be_empty=declared is not None)
        records = PrivateRecords(data, pick_device(self.device))
        self.release_: Release = train(records, chosen, Path(self.run_folder) if self.run_folder is not None else None)
        self.privacy_: PrivacyStatement = self.release_.privacy
        self.classes_: list[str] = self.release_.classes
        return self

    def sample(
        self, n: int | None = None, labels: int | Sequence[int] | NDArray[np.integer] | None = None,
        seed: int | None = None,
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:  # fmt: skip
        """Draw `n` synthetic images with their labels; sampling costs no privacy. See `Release.sample`."""
        check_is_fitted(self)
        return self.release_.sample(n, labels, seed)

    def save(self, path: str | Path) -> Path:
        """Write the publishable release folder."""
        check_is_fitted(self)
        write_release(self.release_, Path(path))
        return Path(path)
