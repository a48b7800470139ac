import io
import struct

import numpy as np
import pytest
import torch

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.records.arrays import load_npz
from tests.records.builders import grey_images, npy_bytes, npy_claiming, zip_bytes

GOOD = {"images": grey_images(6), "labels": np.array([0, 1, 2, 0, 1, 2])}


def write(path, **arrays):
    np.savez(path, **arrays)
    return path


def write_members(path, **members):
    """An .npz whose members are arrays or the raw bytes of .npy files."""
    content = {f"{key}.npy": value if isinstance(value, bytes) else npy_bytes(value) for key, value in members.items()}
    path.write_bytes(zip_bytes(content))
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "set.npz"


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_grey_images(path, save):
    save(path, **GOOD)
    data = load_npz(path, "train")
    assert torch.equal(data.images[:, 0], torch.from_numpy(GOOD["images"]))
    assert data.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert data.classes == ("0", "1", "2")


@pytest.mark.parametrize("order", ["C", "F"])
def test_rgb_images_with_channels_last_and_class_names(path, order):
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 9, 3), dtype=np.uint8)
    write(path, images=np.asarray(images, order=order), labels=np.array([1, 0, 1, 0], np.uint8), classes=["cat", "dog"])
    data = load_npz(path, "train")
    np.testing.assert_array_equal(data.images.numpy(), images.transpose(0, 3, 1, 2))
    assert data.classes == ("cat", "dog")


def test_float_pixels_are_rounded(path):
    write(path, images=GOOD["images"] / 255.0, labels=GOOD["labels"])
    assert torch.equal(load_npz(path, "train").images[:, 0], torch.from_numpy(GOOD["images"]))


def test_without_test_arrays_both_splits_are_everything(path):
    write(path, **GOOD)
    assert len(load_npz(path, "test")) == 6


def test_test_arrays_are_the_test_split(path):
    write(path, **GOOD, test_images=grey_images(3), test_labels=[2, 1, 0], classes=["a", "b", "c"])
    assert len(load_npz(path, "train")) == 6
    test = load_npz(path, "test")
    assert torch.equal(test.images[:, 0], torch.from_numpy(grey_images(3)))
    assert test.labels.tolist() == [2, 1, 0]
    assert test.classes == ("a", "b", "c")


def test_only_the_split_asked_for_is_read(path):
    write_members(path, images=b"broken", labels=GOOD["labels"], test_images=grey_images(3), test_labels=np.arange(3))
    assert len(load_npz(path, "test")) == 3
    with pytest.raises(UserError, match="array images: damaged"):
        load_npz(path, "train")


def test_a_class_without_test_records_is_noticed_though_its_number_is_the_last(path):
    write(path, **GOOD, test_images=grey_images(3), test_labels=[0, 1, 0])
    with pytest.raises(UserError, match=r"\(test split\): labels: .* class 2 of 0..2 has no record"):
        load_npz(path, "test")


@pytest.mark.parametrize("given", ["test_images", "test_labels"])
def test_half_a_test_split(path, given):
    (missing,) = {"test_images", "test_labels"} - {given}
    write(path, **GOOD, **{given: [0]})
    with pytest.raises(UserError, match=f"no array named {missing}; the file has images, labels, {given}"):
        load_npz(path, "test")


def test_missing_arrays_list_what_is_there(path):
    write(path, x=[0], labels=[0])
    with pytest.raises(UserError, match=r"set\.npz: no array named images; the file has labels, x$"):
        load_npz(path, "train")
    write(path, **{f"array_{k}": [0] for k in range(20)})
    with pytest.raises(UserError, match=r"no array named images or labels; the file has array_0, .*array_15, \.\.\.$"):
        load_npz(path, "train")
    path.write_bytes(zip_bytes({}))
    with pytest.raises(UserError, match=r"the file has no arrays$"):
        load_npz(path, "train")


def test_odd_array_names_stay_on_one_line(path):
    path.write_bytes(zip_bytes({"line\nbreak": b""}))
    with pytest.raises(UserError, match=r"the file has line\\nbreak$"):
        load_npz(path, "train")


def test_members_without_their_suffix(path):
    path.write_bytes(zip_bytes({"images": b"", "labels": b""}))
    with pytest.raises(UserError, match=r"array labels: is stored without \.npy; write the file with numpy\.savez"):
        load_npz(path, "train")


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", npy_bytes(grey_images(3))])
def test_not_an_npz(path, content):
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"set\.npz: not a zip archive, or a damaged one"):
        load_npz(path, "train")


def test_truncated_file(path):
    write(path, **GOOD)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"set\.npz: not a zip archive, or a damaged one"):
        load_npz(path, "train")


@pytest.mark.parametrize(
    ("size", "message"),
    # The checksum of a small member is compared when its header is read, that of a large one at its end.
    [(8, r"damaged, its \.npy header cannot be read"), (64, "damaged, or packed in an unsupported way")],
)
def test_damaged_member(path, size, message):
    images = grey_images(6, size, size)
    write(path, images=images, labels=GOOD["labels"])
    content = bytearray(path.read_bytes())
    content[content.index(images.tobytes()[:20])] ^= 255
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"array images: {message}"):
        load_npz(path, "train")


def test_encrypted_member(path):
    write(path, **GOOD)
    content = bytearray(path.read_bytes())
    content[content.rindex(b"PK\1\2") + 8] |= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="array labels: is encrypted"):
        load_npz(path, "train")


@pytest.mark.parametrize("key", ["images", "labels", "classes"])
def test_pickled_objects_are_refused_without_being_loaded(path, key):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("the pickle was loaded",))

    write_members(path, **(GOOD | {"classes": ["a", "b", "c"], key: np.array([Trap()] * 6, dtype=object)}))
    with pytest.raises(UserError, match=rf"array {key}: holds Python objects \(pickle\), which are never loaded"):
        load_npz(path, "train")


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (b"", r"damaged, its \.npy header cannot be read; write the file again"),
        (b"\x93NUMPY\x01\x00\xff", r"damaged, its \.npy header cannot be read"),
        (b"\x93NUMPY\x09\x00" + npy_bytes(GOOD["images"])[8:], r"damaged"),
        (npy_bytes(GOOD["images"]).replace(b"'shape'", b"'shap('"), r"damaged, its \.npy header cannot be read"),
        (npy_bytes(GOOD["images"]).replace(b"|u1", b"|q9"), r"damaged, its \.npy header cannot be read"),
        (npy_claiming("|u1", (6, -8, -9), bytes(432)), "damaged, its header has an impossible size"),
        (npy_claiming("<U0", (10**12,)), "damaged, its header has an impossible size"),
        (npy_claiming("|u1", (0, 10**30)), "damaged"),
        (npy_claiming("|u1", (10**9, 64, 64)), r"claims an array of 3,815 GiB; at most 16 GiB is supported"),
        (npy_claiming("<f8", (10**400,)), "damaged"),
        (npy_claiming("|u1", (7, 8, 9), bytes(432)), "truncated or damaged, its header does not match its 432 bytes"),
        (npy_claiming("|u1", (5, 8, 9), bytes(432)), "truncated or damaged, its header does not match its 432 bytes"),
        (npy_bytes(GOOD["images"])[:-1], "truncated or damaged, its header does not match its 431 bytes"),
    ],
)
def test_damaged_header(path, member, message):
    write_members(path, images=member, labels=GOOD["labels"])
    with pytest.raises(UserError, match=rf"set\.npz: array images: {message}") as error:
        load_npz(path, "train")
    assert str(error.value).isprintable()


def test_header_that_a_zip_directory_confirms_is_still_limited(path):
    """Header and zip directory may agree on terabytes; nothing of that size may be allocated."""
    member = npy_claiming("|u1", (10**9, 64, 64))
    content = bytearray(zip_bytes({"labels.npy": npy_bytes(GOOD["labels"]), "images.npy": member}))
    at = content.rindex(b"PK\1\2") + 24
    content[at : at + 4] = struct.pack("<I", 2**32 - 2)
    path.write_bytes(content)
    with pytest.raises(UserError, match="claims an array of 3,815 GiB"):
        load_npz(path, "train")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [0, 1, 2]}, r"set\.npz: labels: expected one label for each of the 6 images, got shape \(3,\)"),
        ({"labels": [0, 1, 2, 0, 1, 4]}, "labels: labels are not contiguous, class 3 of 0..4 has no record"),
        ({"labels": [0, 1, 2, 0, 1, -1]}, "labels: label -1 is out of range"),
        ({"labels": [0, 1, 2, 0, 1, 99]}, "labels: label 99 with only 6 records"),
        ({"labels": [0, 1, 2, 0, 1, 0.5]}, "labels: labels must be whole numbers"),
        ({"labels": list("abcabc")}, "labels: labels must be integers 0..L-1, got dtype <U1"),
        ({"images": np.full((6, 8, 9), np.nan)}, r"set\.npz: images: some pixels are NaN or infinite"),
        ({"images": np.full((6, 8, 9), 1.5)}, r"float pixels must lie in \[0, 1\]"),
        ({"images": np.full((6, 8, 9), 256)}, r"integer pixels must be 0\.\.255"),
        ({"images": np.zeros((6, 72))}, r"images: expected shape \(N, H, W\)"),
        ({"images": np.zeros((6, 8, 9, 4))}, r"images: expected shape .* got \(6, 8, 9, 4\)"),
        ({"images": np.zeros((6, 7, 9))}, "images are 7x9; each side must have 8 to 64 pixels"),
        ({"images": np.zeros((6, 8, 9), complex)}, "dtype complex128 is not supported"),
        ({"images": np.zeros((6, 8, 9), "m8[s]")}, r"dtype timedelta64\[s\] is not supported"),
        ({"images": np.zeros((1, 8, 9)), "labels": [0]}, "at least two records are needed, got 1"),
        ({"images": np.zeros((0, 8, 9)), "labels": np.zeros(0)}, "expected a list with a label for each image"),
        ({"classes": ["a", "b"]}, "labels: label 2 is out of range for 2 classes"),
        ({"classes": list("abcd")}, "labels: labels are not contiguous, class 3 of 0..3 has no record"),
        ({"classes": [1, 2, 3]}, r"array classes: expected a list of strings, got dtype int64 of shape \(3,\)"),
        ({"classes": "abc"}, r"array classes: expected a list of strings, got dtype <U3 of shape \(\)"),
        ({"classes": ["a", "b", "b"]}, "array classes: class names must be different from each other"),
        ({"classes": ["a", "b", ""]}, "array classes: class names must be .* not empty"),
        ({"classes": ["a", "b", "c\n"]}, "array classes: class names must be .* printable"),
    ],
)
def test_arrays_that_do_not_fit(path, change, message):
    write(path, **(GOOD | change))
    with pytest.raises(UserError, match=message):
        load_npz(path, "train")


def test_class_names_beyond_unicode(path):
    members = GOOD | {"classes": npy_claiming("<U1", (3,), struct.pack("<3I", 97, 98, 2**32 - 1))}
    write_members(path, **members)
    with pytest.raises(UserError, match="array classes: holds characters that do not exist"):
        load_npz(path, "train")


def test_too_little_memory_is_one_line(path, monkeypatch):
    def fail(*args, **options):
        raise MemoryError

    write(path, **GOOD)
    monkeypatch.setattr(np.lib.format, "read_array", fail)
    with pytest.raises(UserError, match="array labels: too large for the memory of this machine"):
        load_npz(path, "train")


def test_builder_headers_are_what_numpy_writes():
    # Guards the tests above: an unreadable header would pass as "damaged" for the wrong reason.
    loaded = np.load(io.BytesIO(npy_claiming("|u1", (2, 3), bytes(6))))
    assert loaded.shape == (2, 3)
