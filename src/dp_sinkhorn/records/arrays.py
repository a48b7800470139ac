"""Arrays in an .npz file: `images` and `labels`, optionally `classes`, `test_images` and `test_labels`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import IO
from zipfile import ZipFile

import numpy as np
from numpy.lib import format as npy

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.images import LabelledImages, check_labels, from_arrays
from dp_sinkhorn.records.archives import open_archive, reading_member
from dp_sinkhorn.records.limits import check_array_bytes

_LISTED_KEYS = 8


def load_npz(path: Path, split: str) -> LabelledImages:
    """The arrays in the .npz file at `path`; see `from_arrays` for their shapes and types.

    `classes` (strings) names the classes, which are the same in both splits. With `test_images` and `test_labels` in
    the file, the test split is these; otherwise both splits are `images` and `labels`. The file that
    `dp-sinkhorn sample` writes is read as it is.

    Raises:
        UserError: naming the file and array that is wrong and how to mend it.
    """
    with open_archive(path) as archive:
        keys = {name.removesuffix(".npy") for name in archive.namelist()}
        _require(keys, ("images", "labels"), path)
        prefix, where = "", str(path)
        if split == "test" and keys & {"test_images", "test_labels"}:
            _require(keys, ("test_images", "test_labels"), path)
            prefix, where = "test_", f"{path} (test split)"
        labels = _read(archive, f"{prefix}labels", path)
        images = _read(archive, f"{prefix}images", path)
        classes = None
        if "classes" in keys:
            classes = _class_names(_read(archive, "classes", path), path)
        elif prefix:
            _, classes = check_labels(_read(archive, "labels", path), None, f"{path}: labels")
    return from_arrays(images, labels, classes, where=where)


def _require(keys: set[str], names: tuple[str, str], path: Path) -> None:
    missing = [name for name in names if name not in keys]
    if missing:
        found = [ascii(key)[1:-1] for key in sorted(keys)]
        shown = ", ".join(found[:_LISTED_KEYS]) + (", ..." if len(found) > _LISTED_KEYS else "")
        raise UserError(f"{path}: no array named {' or '.join(missing)}; the file has {shown or 'no arrays'}")


def _read(archive: ZipFile, key: str, path: Path) -> np.ndarray:
    """One array, after its header has been checked against the file and our limits: numpy allocates what it claims."""
    where = f"{path}: array {key}"
    try:
        member = archive.getinfo(f"{key}.npy")
    except KeyError:
        raise UserError(f"{where}: is stored without .npy; write the file with numpy.savez") from None
    with reading_member(member, where):
        with archive.open(member) as stream:
            shape, dtype = _read_header(stream, where)
            # ZipExtFile counts the bytes that came out of it, so this is where the header ends.
            held = member.file_size - stream.tell()
        check_array_bytes(shape, dtype.itemsize, where)
        if math.prod(shape) * dtype.itemsize != held:
            raise UserError(f"{where}: truncated or damaged, its header does not match its {held} bytes of data")
        try:
            with archive.open(member) as stream:
                array = npy.read_array(stream, allow_pickle=False)
        except MemoryError:
            raise UserError(f"{where}: too large for the memory of this machine") from None
    return array


def _read_header(stream: IO[bytes], where: str) -> tuple[tuple[int, ...], np.dtype]:
    try:
        version = npy.read_magic(stream)
        # Later versions differ from 2.0 only in how structured arrays name their fields, and those are refused.
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(stream)
    except Exception:  # the header is a Python literal and names a dtype: numpy's parsing raises almost any type
        raise UserError(f"{where}: damaged, its .npy header cannot be read; write the file again") from None
    if dtype.hasobject:
        raise UserError(f"{where}: holds Python objects (pickle), which are never loaded; save it as a plain array")
    if dtype.itemsize == 0 or any(side < 0 for side in shape):
        raise UserError(f"{where}: damaged, its header has an impossible size; write the file again")
    return shape, dtype


def _class_names(names: np.ndarray, path: Path) -> tuple[str, ...]:
    where = f"{path}: array classes"
    if names.dtype.kind != "U" or names.ndim != 1:
        raise UserError(f"{where}: expected a list of strings, got dtype {names.dtype} of shape {names.shape}")
    try:
        classes = tuple(map(str, names))
    except (ValueError, SystemError):  # code points beyond Unicode, which numpy stores without a look
        raise UserError(f"{where}: holds characters that do not exist; write the file again") from None
    if len(set(classes)) != len(classes) or not all(name and name.isprintable() for name in classes):
        raise UserError(f"{where}: class names must be different from each other, not empty, and printable")
    return classes
