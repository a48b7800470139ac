"""What a file may claim about itself before we believe it.

A header can promise any size at no cost to whoever wrote it. Sizes are therefore checked against the limits here
before anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dp_sinkhorn.errors import UserError

GIB = 2**30
# Holds 1.3 million RGB images of 64x64 pixels, the largest that the generators are built for.
MAX_ARRAY_BYTES = 16 * GIB
# An image file of at most 64x64 pixels is a few kilobytes; this leaves room for any metadata, and for telling the
# owner of large photographs that they need resizing.
MAX_IMAGE_FILE_BYTES = 32 * 2**20


def check_array_bytes(shape: Sequence[int], itemsize: int, where: str) -> None:
    """Refuse an array that would take more memory than any data set this software is made for."""
    size = math.prod(shape) * itemsize
    if size > MAX_ARRAY_BYTES:
        raise UserError(
            f"{where}: claims an array of {size / GIB:,.0f} GiB; at most {MAX_ARRAY_BYTES // GIB} GiB is supported"
        )


def check_image_file_bytes(size: int, where: str) -> None:
    """Refuse an image file that is far larger than a small image can be."""
    if size > MAX_IMAGE_FILE_BYTES:
        raise UserError(
            f"{where}: {size / 2**20:,.0f} MiB is too large for a small image (at most "
            f"{MAX_IMAGE_FILE_BYTES // 2**20} MiB); resize it first"
        )
