"""Where records come from: a built-in name, published files, a folder or zip of images, or an .npz file."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Literal

import numpy as np

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.images import LabelledImages, from_arrays
from dp_sinkhorn.records.archives import unreadable
from dp_sinkhorn.records.arrays import load_npz
from dp_sinkhorn.records.folders import load_folder
from dp_sinkhorn.records.idx import PUBLISHED_SETS, load_published

Split = Literal["train", "test"]

NAMES = ("digits", *PUBLISHED_SETS)
_DIGITS_MAX = 16
_DIGITS_TEST_EVERY = 6


def load_source(source: str | Path, *, split: Split = "train", data_dir: Path | None = None) -> LabelledImages:
    """The records that SOURCE names, checked and in memory. Only the files of `split` are read.

    Args:
        source: one of

            - `"digits"`: scikit-learn's 8x8 digits. They have no official split; every sixth record is `test`.
            - `"mnist"`, `"fashion-mnist"`: the published IDX files, found under `data_dir`, then under
              $DP_SINKHORN_DATA, in the folder itself or in a sub-folder of the set's name.
            - a folder or .zip of images, one sub-folder per class; see `load_folder`.
            - an .npz file with arrays `images` and `labels`; see `load_npz`.

            A `str` that is a known name means that name; write `./mnist`, or pass a `Path`, for a folder so called.
        split: `"train"` or `"test"`. A source without a split of its own returns everything for both.
        data_dir: the folder to look for published files in.

    Raises:
        UserError: one line that says what is wrong with the source, where, and what to do.
    """
    if source == "digits":
        return _load_digits(split)
    if isinstance(source, str) and source in PUBLISHED_SETS:
        return load_published(PUBLISHED_SETS[source], split, data_dir)
    if source == "celeba":
        raise UserError(
            "celeba: this version does not read the published archive; make a folder of 8 to 64 pixel images with one "
            "sub-folder per class, and name it (./celeba, if it is called so)"
        )
    path = Path(source)
    is_folder = _is_folder(source)
    if is_folder or path.suffix.lower() == ".zip":
        return load_folder(path, split)
    if path.suffix.lower() == ".npz":
        return load_npz(path, split)
    raise UserError(f"{path}: unsupported kind of file; expected a folder of images, a .zip of one, or an .npz file")


def _is_folder(source: str | Path) -> bool:
    """Whether `source` is a folder rather than a regular file; anything else is refused."""
    try:
        mode = Path(source).stat().st_mode if source != "" else 0
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null character in the name
        mode = 0
    except OSError as error:
        raise unreadable(str(source), error) from None
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        raise UserError(
            f"{ascii(str(source))[1:-1]}: no such folder or file, nor a known source; "
            f"known are {', '.join(NAMES)}, a folder or .zip of images, and an .npz file"
        )
    return stat.S_ISDIR(mode)


def _load_digits(split: Split) -> LabelledImages:
    from sklearn.datasets import load_digits

    digits = load_digits()
    chosen = (np.arange(len(digits.target)) % _DIGITS_TEST_EVERY == _DIGITS_TEST_EVERY - 1) == (split == "test")
    images = np.rint(digits.images[chosen] * (255.0 / _DIGITS_MAX)).astype(np.uint8)
    return from_arrays(images, digits.target[chosen], tuple("0123456789"), where="digits")
