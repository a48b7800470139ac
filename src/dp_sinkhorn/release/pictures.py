"""Sample grids and folders of PNG files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

GRID_COLUMNS = 12
_MIN_TILE = 50
_GAP_GREY = 255


def grid(images: NDArray[np.uint8], labels: NDArray[np.int64], classes: int) -> Image.Image:
    """One row for each class that occurs, showing the first twelve images of it: nobody chooses."""
    tiles = np.pad(images, [(0, 0), (1, 1), (1, 1)] + [(0, 0)] * (images.ndim - 3), constant_values=_GAP_GREY)
    rows = []
    for label in range(classes):
        chosen = tiles[labels == label][:GRID_COLUMNS]
        if len(chosen):
            blank = np.full((GRID_COLUMNS - len(chosen), *tiles.shape[1:]), _GAP_GREY, dtype=np.uint8)
            rows.append(np.concatenate([*chosen, *blank], axis=1))
    picture = np.concatenate(rows, axis=0)
    scale = max(1, -(-_MIN_TILE // max(tiles.shape[1:3])))
    size = (picture.shape[1] * scale, picture.shape[0] * scale)
    return Image.fromarray(picture).resize(size, Image.Resampling.NEAREST)


def write_folder(images: NDArray[np.uint8], labels: NDArray[np.int64], classes: Sequence[str], folder: Path) -> None:
    """One sub-folder of PNG files for each class: a layout that `train` and `evaluate` read as a source."""
    names = folder_names(classes)
    for label in np.unique(labels):
        (folder / names[label]).mkdir(parents=True, exist_ok=True)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        Image.fromarray(image).save(folder / names[label] / f"{number:06d}.png")


def folder_names(classes: Sequence[str]) -> list[str]:
    """Class names that are safe as folder names, distinct, and sort in label order when the names do."""
    names = [re.sub(r"[^\w.+ -]", "_", name).strip(". ") or "class" for name in classes]
    if len(set(names)) < len(names) or sorted(names) != names:
        digits = len(str(len(names) - 1))
        names = [f"{k:0{digits}d}-{name}" for k, name in enumerate(names)]
    return names
