"""IDX files, the format in which MNIST and Fashion-MNIST are published, and where to find these sets.

An IDX file is two zero bytes, a byte for the element type, a byte for the number of dimensions, each dimension as a
big-endian 32-bit integer, and the values.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import numpy as np

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.images import LabelledImages, check_shape, from_arrays
from dp_sinkhorn.records.archives import unreadable
from dp_sinkhorn.records.limits import check_array_bytes

DATA_DIR_VARIABLE = "DP_SINKHORN_DATA"
_UNSIGNED_BYTE = 0x08
_CHUNK = 2**20
_FILE_PREFIX = {"train": "train", "test": "t10k"}


@dataclass(frozen=True)
class PublishedSet:
    """A data set as its authors publish it: four IDX files, told from others by the folder they are kept in."""

    name: str
    folders: tuple[str, ...]
    classes: tuple[str, ...]


PUBLISHED_SETS = {
    published.name: published
    for published in (
        PublishedSet("mnist", ("mnist",), tuple("0123456789")),
        PublishedSet(
            "fashion-mnist",
            ("fashion_mnist", "fashion-mnist"),
            (
                "T-shirt/top",
                "Trouser",
                "Pullover",
                "Dress",
                "Coat",
                "Sandal",
                "Shirt",
                "Sneaker",
                "Bag",
                "Ankle boot",
            ),
        ),
    )
}


def load_published(published: PublishedSet, split: str, data_dir: Path | None) -> LabelledImages:
    """One split of a published set, found under `data_dir` or the folder that $DP_SINKHORN_DATA names.

    Raises:
        UserError: saying where the files were looked for, or what is wrong with one of them.
    """
    images_path, labels_path = _find(published, split, data_dir)
    image_shape, label_shape = read_shape(images_path, 3), read_shape(labels_path, 1)
    count, height, width = image_shape
    check_shape((1, height, width), str(images_path))
    if label_shape != (count,):
        raise UserError(f"{images_path}: has {count} images, but {labels_path} has {label_shape[0]} labels")
    labels = read_values(labels_path, label_shape)
    images = read_values(images_path, image_shape)
    return from_arrays(images, labels, published.classes, where=f"{images_path.parent} ({split} split)")


def _find(published: PublishedSet, split: str, data_dir: Path | None) -> tuple[Path, Path]:
    """The files of images and labels, in the first folder that has both."""
    roots = [Path(root) for root in (data_dir, os.environ.get(DATA_DIR_VARIABLE)) if root]
    advice = f"set the folder with --data-dir or {DATA_DIR_VARIABLE}"
    if not roots:
        raise UserError(f"{published.name}: no folder to look for its files in; {advice}")
    stems = [f"{_FILE_PREFIX[split]}-{suffix}" for suffix in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    folders = _folders_to_search(published, roots)
    fewest_missing = [f"{stem}.gz" for stem in stems]
    for folder in folders:
        found = [_existing(folder / f"{stem}.gz", folder / stem) for stem in stems]
        images, labels = found
        if images and labels:
            return images, labels
        missing = [f"{stem}.gz" for stem, path in zip(stems, found, strict=True) if path is None]
        fewest_missing = min(fewest_missing, missing, key=len)
    raise UserError(
        f"{published.name}: {' and '.join(fewest_missing)} not found in {', '.join(map(str, folders))}; {advice}"
    )


def _folders_to_search(published: PublishedSet, roots: list[Path]) -> list[Path]:
    """Sub-folders of the set's name first, then the root itself.

    The sets share their file names, so a root that is named after another set is not searched for this one.
    """
    foreign = {name for other in PUBLISHED_SETS.values() if other is not published for name in other.folders}
    folders = []
    for root in roots:
        folders += [root / name for name in published.folders]
        if root.absolute().name not in foreign:
            folders.append(root)
    return folders


def _existing(*candidates: Path) -> Path | None:
    for path in candidates:
        try:
            if path.is_file():
                return path
        except OSError as error:
            raise unreadable(str(path), error) from None
    return None


def read_shape(path: Path, dimensions: int) -> tuple[int, ...]:
    """The shape that the header of an IDX file of unsigned bytes promises."""
    with _opened(path) as stream:
        header = stream.read(4 + 4 * dimensions)
    if len(header) < 4 or header[:2] != b"\0\0":
        raise UserError(f"{path}: not an IDX file (bad magic number); fetch it again")
    if header[2] != _UNSIGNED_BYTE:
        raise UserError(f"{path}: IDX element type {header[2]:#04x}, expected unsigned bytes ({_UNSIGNED_BYTE:#04x})")
    if header[3] != dimensions:
        raise UserError(
            f"{path}: IDX data has {header[3]} dimensions, expected {dimensions}; are images and labels swapped?"
        )
    if len(header) < 4 + 4 * dimensions:
        raise UserError(f"{path}: the IDX header is cut short; fetch the file again")
    shape: tuple[int, ...] = struct.unpack(f">{dimensions}I", header[4:])
    check_array_bytes(shape, 1, str(path))
    return shape


def read_values(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """The values of an IDX file whose header promised `shape`: exactly so many, or it is refused."""
    promised = math.prod(shape)
    try:
        values = np.empty(promised, np.uint8)
    except MemoryError:
        raise UserError(f"{path}: {promised} values are too many for the memory of this machine") from None
    # By chunks: a single read would set the whole size aside again, however few bytes there are.
    view, filled = values.data, 0
    with _opened(path) as stream:
        stream.read(4 + 4 * len(shape))
        while part := stream.read(min(_CHUNK, promised - filled)):
            view[filled : filled + len(part)] = part
            filled += len(part)
        # This read also makes gzip compare its checksum.
        excess = bool(stream.read(1))
    if filled < promised or excess:
        held = "more" if excess else f"only {filled}"
        raise UserError(f"{path}: the IDX header promises {promised} values, the file holds {held}; fetch it again")
    return values.reshape(shape)


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            yield cast(IO[bytes], stream)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise UserError(f"{path}: truncated or corrupt gzip file; fetch it again") from None
    except OSError as error:
        raise unreadable(str(path), error) from None
