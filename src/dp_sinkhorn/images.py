"""Labelled images in memory: the one layout that every part of the package exchanges.

Images are `uint8` of shape (N, C, H, W), grey (C = 1) or RGB (C = 3); labels are `int64` class indices
0..L-1; `classes` names them. Generators and costs work on pixels in [-1, 1] (`to_pixels`, `from_pixels`).
The same layout holds private records, real test sets and synthetic images; what is private is decided by who
holds it (`dp_sinkhorn.records`), not by this type.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dp_sinkhorn.errors import UserError

MIN_SIDE, MAX_SIDE = 8, 64
ImageShape = tuple[int, int, int]


@dataclass(frozen=True, eq=False, repr=False)
class LabelledImages:
    """N images with a label each.

    Attributes:
        images: `uint8` tensor of shape (N, C, H, W).
        labels: `int64` tensor of shape (N,), values in 0..len(classes)-1.
        classes: the class names, in label order.
        classes_declared: whether the classes were named beforehand. False: they are the labels that occur.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    classes_declared: bool = True

    def __post_init__(self) -> None:
        assert self.images.dtype == torch.uint8, self.images.dtype
        assert self.images.ndim == 4, self.images.shape
        assert self.labels.dtype == torch.int64, self.labels.dtype
        assert self.labels.shape == self.images.shape[:1], self.labels.shape

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        # Says nothing about any image: these may be private records.
        return f"LabelledImages(shape={self.shape}, classes={len(self.classes)})"

    @property
    def shape(self) -> ImageShape:
        """(C, H, W) of one image."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width


def to_pixels(images: Tensor) -> Tensor:
    """`uint8` images, any shape, as float32 pixels in [-1, 1]."""
    return images.to(torch.float32) / 127.5 - 1.0


def from_pixels(pixels: Tensor) -> Tensor:
    """Pixels in [-1, 1] as `uint8`, rounded to the nearest grey level."""
    return ((pixels + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)


def check_shape(shape: ImageShape, where: str) -> None:
    """Refuse images outside what generators are built for: 1 or 3 channels, 8 to 64 pixels a side."""
    channels, height, width = shape
    if channels not in (1, 3):
        raise UserError(f"{where}: images have {channels} channels; grey (1) or RGB (3) is supported")
    if not (MIN_SIDE <= height <= MAX_SIDE and MIN_SIDE <= width <= MAX_SIDE):
        raise UserError(
            f"{where}: images are {height}x{width}; each side must have {MIN_SIDE} to {MAX_SIDE} pixels, "
            "resize them first"
        )


def from_arrays(
    images: object,
    labels: object,
    classes: tuple[str, ...] | None = None,
    *,
    where: str = "",
    may_be_empty: bool = False,
) -> LabelledImages:
    """Check and convert a caller's arrays (numpy, torch, or nested lists).

    Args:
        images: (N, H, W), (N, H, W, 1|3) or (N, 1|3, H, W); `uint8`, or floats in [0, 1].
        labels: (N,) integers 0..L-1, every class present.
        classes: names of the classes; the numbers themselves by default.
        may_be_empty: accept classes without a record, where `classes` was declared and not read off the data.
        where: what the arrays were read from, such as a path; error messages start with it.

    Raises:
        UserError: naming what is wrong and how to mend it.
    """
    prefix = f"{where}: " if where else ""
    images_at, labels_at = f"{prefix}images", f"{prefix}labels"
    array, values = _as_numpy(images, images_at), _as_numpy(labels, labels_at)
    given = array.shape
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and array.shape[1] not in (1, 3):
        array = np.moveaxis(array, 3, 1)
    if array.ndim != 4 or array.shape[1] not in (1, 3):
        raise UserError(f"{images_at}: expected shape (N, H, W), (N, H, W, 3) or (N, 3, H, W), got {given}")
    check_shape((array.shape[1], array.shape[2], array.shape[3]), images_at)
    pixels = _as_uint8(array, images_at)
    if values.ndim != 1 or len(values) != len(pixels):
        raise UserError(
            f"{labels_at}: expected one label for each of the {len(pixels)} images, got shape {values.shape}"
        )
    index, names = check_labels(values, classes, labels_at, may_be_empty=may_be_empty)
    if len(pixels) < 2:
        raise UserError(f"{images_at}: at least two records are needed, got {len(pixels)}")
    return LabelledImages(torch.from_numpy(pixels), torch.from_numpy(index), names, classes is not None)


def check_labels(
    values: np.ndarray, classes: tuple[str, ...] | None, where: str, *, may_be_empty: bool = False
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Class indices as `int64` with the class names; refuse gaps, negatives, fractions and empty classes."""
    if values.dtype.kind not in "iuf":
        raise UserError(f"{where}: labels must be integers 0..L-1, got dtype {values.dtype}; encode them first")
    if values.ndim != 1 or len(values) == 0:
        raise UserError(f"{where}: expected a list with a label for each image, got shape {values.shape}")
    if not np.all(np.isfinite(values)) or not np.array_equal(values, np.trunc(values)):
        raise UserError(f"{where}: labels must be whole numbers 0..L-1; some are not")
    # The range is checked before the cast: a large float or unsigned label would wrap around in int64.
    if values.min() < 0:
        raise UserError(f"{where}: label {values.min()} is out of range; labels must be 0..L-1")
    highest = values.max()
    if classes is None and highest >= len(values):
        raise UserError(f"{where}: label {highest} with only {len(values)} records; number the classes 0..L-1")
    count = len(classes) if classes is not None else int(highest) + 1
    if highest >= count:
        raise UserError(f"{where}: label {highest} is out of range for {count} classes")
    index = values.astype(np.int64)
    empty = np.flatnonzero(np.bincount(index, minlength=count) == 0)
    if len(empty) and not may_be_empty:
        raise UserError(
            f"{where}: labels are not contiguous, class {empty[0]} of 0..{count - 1} has no record; "
            "renumber the classes or remove the empty one"
        )
    return index, classes if classes is not None else tuple(str(k) for k in range(count))


def _as_numpy(value: object, where: str) -> np.ndarray:
    try:
        return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    except (TypeError, ValueError):  # nested lists of uneven lengths, or a dtype that numpy lacks (bfloat16)
        raise UserError(f"{where}: cannot be read as one rectangular array of numbers") from None


def _as_uint8(array: np.ndarray, where: str) -> np.ndarray:
    if array.dtype.kind not in "iuf":
        raise UserError(f"{where}: dtype {array.dtype} is not supported; use uint8, or floats in [0, 1]")
    if array.dtype == np.uint8:
        return np.require(array, requirements=["C", "W"])  # torch shares the memory and wants it writable
    if not np.all(np.isfinite(array)):
        raise UserError(f"{where}: some pixels are NaN or infinite; remove or repair those images")
    low, high = (array.min(), array.max()) if array.size else (0, 0)
    if array.dtype.kind in "iu":
        if low < 0 or high > 255:
            raise UserError(f"{where}: integer pixels must be 0..255, found {low}..{high}")
        return np.ascontiguousarray(array.astype(np.uint8))
    if low < 0 or high > 1:
        raise UserError(f"{where}: float pixels must lie in [0, 1], found {low:g}..{high:g}; rescale them")
    return np.ascontiguousarray((array * 255.0).round().astype(np.uint8))
