"""One image file as `uint8` pixels, grey or RGB."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.images import ImageShape

EXTENSIONS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"})
# Only these decoders are tried, whatever the file's content: Pillow has others that start external programs.
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")

_GREY_16_BIT = frozenset({"I;16", "I;16L", "I;16B"})
_GREY = frozenset({"1", "L", "LA"}) | _GREY_16_BIT
_RGB = frozenset({"RGB", "RGBX", "RGBA", "RGBa", "P", "PA", "CMYK", "YCbCr", "HSV"})
_MAY_BE_TRANSPARENT = frozenset({"LA", "RGBA", "RGBa", "P", "PA"})


class ImageFile:
    """An image file whose header has been read and whose pixels have not.

    Grey modes (1-bit, 8-bit, 16-bit) become one channel and colour modes (RGB, palette, CMYK, YCbCr) become RGB.
    16-bit grey levels 0..65535 are scaled to 0..255; the scale never depends on the image. Transparency is laid
    over white. Of an animation the first frame counts.
    """

    def __init__(self, content: bytes, where: str) -> None:
        self._where = where
        try:
            self._image = Image.open(io.BytesIO(content), formats=_FORMATS)
        except Image.DecompressionBombError:
            raise UserError(f"{where}: claims far too many pixels for a small image; resize or replace it") from None
        except Exception:  # Pillow's parsers raise almost any type on a damaged file
            raise self._damaged() from None
        mode = self._image.mode
        if mode not in _GREY and mode not in _RGB:
            raise UserError(f"{where}: pixel mode {mode} is not supported; convert it to 8-bit grey or RGB")
        self.shape: ImageShape = (1 if mode in _GREY else 3, self._image.height, self._image.width)

    def pixels(self) -> np.ndarray:
        """`uint8` pixels of shape (C, H, W). Check `shape` first: this allocates what the header claims."""
        try:
            array = self._decode()
        except Exception:  # as above, and from the decoders too
            raise self._damaged() from None
        return array[None] if array.ndim == 2 else np.moveaxis(array, 2, 0)

    def _decode(self) -> np.ndarray:
        image: Image.Image = self._image
        kind = "L" if self.shape[0] == 1 else "RGB"
        if image.mode in _GREY_16_BIT:
            return np.rint(np.asarray(image) / 257.0).astype(np.uint8)
        if image.mode in _MAY_BE_TRANSPARENT or "transparency" in image.info:
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image.convert("RGBA"))
        return np.asarray(image.convert(kind))

    def _damaged(self) -> UserError:
        return UserError(f"{self._where}: cannot be read as an image (damaged, truncated or not an image); replace it")


def describe(shape: ImageShape) -> str:
    """An image's size and mode in words, such as "28x28 grey"."""
    channels, height, width = shape
    return f"{height}x{width} {'grey' if channels == 1 else 'RGB'}"
