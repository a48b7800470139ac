"""Whatever is done to the bytes of a file, loading it succeeds or says in one line what is wrong."""

import gzip
import zipfile
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.images import LabelledImages, check_shape
from dp_sinkhorn.records.decoding import ImageFile
from dp_sinkhorn.records.sources import load_source
from tests.records.builders import encode, grey_images, idx_bytes, npy_bytes, tree, write_idx, zip_bytes

COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
ARRAYS = {
    "images.npy": npy_bytes(grey_images(4)),
    "labels.npy": npy_bytes(np.array([0, 1, 0, 1])),
    "classes.npy": npy_bytes(np.array(["a", "b"])),
}
COLOUR = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 9, 3), dtype=np.uint8))
IMAGE_FILES = (
    encode(COLOUR, "PNG"),
    encode(COLOUR.convert("RGBA"), "PNG"),
    encode(COLOUR.quantize(8), "PNG"),
    encode(grey_images(1)[0].astype(np.uint16) * 257, "PNG"),
    encode(COLOUR, "JPEG"),
    encode(COLOUR, "BMP"),
    encode(COLOUR, "GIF"),
    encode(COLOUR, "TIFF"),
    encode(COLOUR, "WEBP"),
)

fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def edits(draw, allow_none=False):
    """A way to damage bytes: some are overwritten, some inserted or removed, the end may be lost."""
    # Headers, where most of the meaning lies, are hit as often as all the rest.
    place = st.one_of(st.floats(0, 0.1), st.floats(0, 1))
    byte = st.one_of(st.sampled_from([0, 1, 127, 128, 255]), st.integers(0, 255))
    changes = draw(
        st.lists(st.tuples(place, st.sampled_from("=+-"), byte), min_size=0 if allow_none else 1, max_size=6)
    )
    kept = draw(st.one_of(st.just(1.0), st.floats(0, 1)))

    def apply(content):
        damaged = bytearray(content)
        for at, kind, value in changes:
            index = int(at * len(damaged))
            damaged[index : index + (kind != "+")] = b"" if kind == "-" else bytes([value])
        return bytes(damaged[: round(kept * len(damaged))])

    return apply


def loads_or_refuses(load):
    refusal = ""
    try:
        result = load()
    except UserError as error:
        refusal = str(error)
    else:
        assert isinstance(result, LabelledImages)
    assert refusal == "" or refusal.isprintable()
    assert len(refusal) < 800


def test_the_files_are_valid_before_they_are_damaged(tmp_path):
    for compression in COMPRESSIONS:
        (tmp_path / "set.zip").write_bytes(zip_bytes(tree(a=1, b=1), compression))
        (tmp_path / "set.npz").write_bytes(zip_bytes(ARRAYS, compression))
        assert len(load_source(tmp_path / "set.zip")) == 2
        assert len(load_source(tmp_path / "set.npz")) == 4
    for content in IMAGE_FILES:
        assert ImageFile(content, "file").pixels().shape[1:] == (8, 9)


@fuzz
@given(edit=edits(), compression=st.sampled_from(COMPRESSIONS))
def test_zip_of_images(tmp_path, edit, compression):
    (tmp_path / "set.zip").write_bytes(edit(zip_bytes(tree(a=1, b=1), compression)))
    loads_or_refuses(lambda: load_source(tmp_path / "set.zip"))


@fuzz
@given(edit=edits(), compression=st.sampled_from(COMPRESSIONS))
def test_npz(tmp_path, edit, compression):
    (tmp_path / "set.npz").write_bytes(edit(zip_bytes(ARRAYS, compression)))
    loads_or_refuses(lambda: load_source(tmp_path / "set.npz"))


@fuzz
@given(edit=edits(), member=st.sampled_from(sorted(ARRAYS)))
def test_npy_member_inside_a_sound_archive(tmp_path, edit, member):
    (tmp_path / "set.npz").write_bytes(zip_bytes(ARRAYS | {member: edit(ARRAYS[member])}))
    loads_or_refuses(lambda: load_source(tmp_path / "set.npz"))


@fuzz
@given(images=edits(allow_none=True), labels=edits(allow_none=True))
def test_idx_inside_sound_gzip(tmp_path, images, labels):
    write_idx(tmp_path, "train", images(idx_bytes(grey_images(20))), labels(idx_bytes(np.arange(20) % 10)))
    loads_or_refuses(lambda: load_source("mnist", data_dir=tmp_path))


@fuzz
@given(edit=edits())
def test_gzip(tmp_path, edit):
    write_idx(tmp_path, "train", grey_images(20), np.arange(20) % 10)
    packed = gzip.compress(idx_bytes(grey_images(20)))
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(edit(packed))
    loads_or_refuses(lambda: load_source("mnist", data_dir=tmp_path))


@pytest.mark.filterwarnings("ignore")  # as the loader does: Pillow warns about damaged metadata
@fuzz
@given(edit=edits(), content=st.sampled_from(IMAGE_FILES))
def test_image_file(edit, content):
    with suppress(UserError):
        image = ImageFile(edit(content), "file")
        check_shape(image.shape, "file")
        pixels = image.pixels()
        assert pixels.shape == image.shape
        assert pixels.dtype == np.uint8
