import io

import numpy as np
import pytest
from PIL import Image

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.records.decoding import EXTENSIONS, ImageFile, describe
from tests.records.builders import encode

GREY = np.random.default_rng(0).integers(0, 256, (8, 9), dtype=np.uint8)
COLOUR = np.random.default_rng(1).integers(0, 256, (8, 9, 3), dtype=np.uint8)


def decode(content):
    return ImageFile(content, "file").pixels()


@pytest.mark.parametrize(
    ("pixels", "image_format"),
    [(GREY, "PNG"), (GREY, "BMP"), (GREY, "TIFF"), (COLOUR, "PNG"), (COLOUR, "BMP"), (COLOUR, "TIFF")],
)
def test_lossless_formats_are_exact(pixels, image_format):
    expected = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    image = ImageFile(encode(pixels, image_format), "file")
    assert image.shape == expected.shape
    np.testing.assert_array_equal(image.pixels(), expected)
    assert image.pixels().dtype == np.uint8


@pytest.mark.parametrize("image_format", ["JPEG", "WEBP", "GIF"])
def test_other_formats_are_near(image_format):
    flat = np.full((8, 9, 3), (200, 100, 50), np.uint8)
    np.testing.assert_allclose(decode(encode(flat, image_format)), flat.transpose(2, 0, 1), atol=6)


def test_one_bit_images_become_black_and_white():
    content = encode(Image.fromarray(GREY > 127))
    np.testing.assert_array_equal(decode(content)[0], np.where(GREY > 127, 255, 0))


@pytest.mark.parametrize("image_format", ["PNG", "TIFF"])
def test_sixteen_bit_grey_is_scaled_by_a_fixed_factor(image_format):
    levels = np.zeros((8, 9), np.uint16)
    levels[0, :4] = (65535, 257, 128, 129)
    assert decode(encode(levels, image_format))[0, 0, :5].tolist() == [255, 1, 0, 1, 0]
    # A dark image stays dark: its own maximum must not set the scale.
    assert decode(encode(levels // 256, image_format)).max() == 1


def test_palette_images_become_rgb():
    palette = Image.fromarray(COLOUR).quantize(16)
    np.testing.assert_array_equal(decode(encode(palette)), np.asarray(palette.convert("RGB")).transpose(2, 0, 1))


def test_transparency_is_laid_over_white():
    alpha = np.full((8, 9), 255, np.uint8)
    alpha[0, 0] = 0
    grey, colour = np.dstack([GREY, alpha]), np.dstack([COLOUR, alpha])
    for pixels, opaque in ((grey, GREY[None]), (colour, COLOUR.transpose(2, 0, 1))):
        expected = opaque.copy()
        expected[:, 0, 0] = 255
        np.testing.assert_array_equal(decode(encode(pixels)), expected)


def test_a_transparent_colour_is_laid_over_white():
    pixels = np.full((8, 9), 7, np.uint8)
    pixels[0, 0] = 40
    result = decode(encode(Image.fromarray(pixels), transparency=7))
    assert result.shape == (1, 8, 9)
    assert result[0, 0, 0] == 40
    assert result[0, 1, 1] == 255


def test_cmyk_becomes_rgb():
    assert decode(encode(Image.new("CMYK", (9, 8)), "JPEG")).tolist() == np.full((3, 8, 9), 255).tolist()


def test_the_first_frame_of_an_animation_counts():
    frames = [Image.new("RGB", (9, 8), colour) for colour in ("red", "blue")]
    assert decode(encode(frames[0], "GIF", save_all=True, append_images=frames[1:]))[:, 0, 0].tolist() == [255, 0, 0]


def test_floating_point_images_are_refused():
    with pytest.raises(UserError, match="file: pixel mode F is not supported; convert it to 8-bit grey or RGB"):
        ImageFile(encode(Image.new("F", (9, 8)), "TIFF"), "file")


def test_formats_outside_the_list_are_not_even_tried():
    content = io.BytesIO()
    Image.new("RGB", (9, 8)).save(content, "EPS")
    with pytest.raises(UserError, match="file: cannot be read as an image"):
        ImageFile(content.getvalue(), "file")


def test_every_extension_has_a_decoder():
    formats = {Image.registered_extensions()[extension] for extension in EXTENSIONS}
    assert formats == {"PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP"}


def test_describe():
    assert (describe((1, 28, 30)), describe((3, 8, 8))) == ("28x30 grey", "8x8 RGB")
