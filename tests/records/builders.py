"""Small valid files of every kind of source, for tests to load or to damage."""

import gzip
import io
import struct
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

IDX_IMAGES, IDX_LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"


def grey_images(count, height=8, width=9):
    return np.random.default_rng(count).integers(0, 256, (count, height, width), dtype=np.uint8)


def encode(pixels, image_format="PNG", **options):
    content = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(content, image_format, **options)
    return content.getvalue()


def png(height=8, width=9, *, rgb=False, value=100):
    return encode(np.full((height, width, 3) if rgb else (height, width), value, np.uint8))


def idx_bytes(values, *, shape=None, magic=0, element_type=8):
    shape = values.shape if shape is None else shape
    header = struct.pack(">HBB", magic, element_type, len(shape)) + struct.pack(f">{len(shape)}I", *shape)
    return header + values.astype(np.uint8).tobytes()


def write_idx(folder, prefix, images, labels, *, zipped=True):
    """`images` and `labels` are arrays, or the bytes of the unpacked IDX file."""
    folder.mkdir(parents=True, exist_ok=True)
    for stem, values in ((IDX_IMAGES, images), (IDX_LABELS, labels)):
        content = values if isinstance(values, bytes) else idx_bytes(values)
        name = f"{prefix}-{stem}"
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)


def tree(**classes):
    """Files of a small image folder: `tree(a=2, b=3)` has two PNGs in `a` and three in `b`."""
    return {
        f"{name}/{index}.png": png(value=50 * column + index)
        for column, (name, count) in enumerate(classes.items())
        for index in range(count)
    }


def zip_bytes(files, compression=zipfile.ZIP_DEFLATED):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


def write_folder(path: Path, files):
    """The files of a tree below `path`: a zip archive if the name says so, otherwise a directory."""
    if path.suffix == ".zip":
        path.write_bytes(zip_bytes(files))
        return path
    for name, data in files.items():
        if name.endswith("/"):
            (path / name).mkdir(parents=True, exist_ok=True)
        else:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
    return path


def npy_bytes(array):
    content = io.BytesIO()
    np.lib.format.write_array(content, np.asarray(array), allow_pickle=True)
    return content.getvalue()


def npy_claiming(descr, shape, data=b""):
    """A .npy file whose header says what you like."""
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": descr, "fortran_order": False, "shape": shape})
    return content.getvalue() + data
