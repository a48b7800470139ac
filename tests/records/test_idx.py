import gzip
import os

import numpy as np
import pytest
import torch

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.records.idx import PUBLISHED_SETS, load_published
from tests.records.builders import grey_images, idx_bytes, write_idx

IMAGES_GZ, LABELS_GZ = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
LABELS = np.arange(20) % 10


@pytest.fixture(autouse=True)
def no_data_variable(monkeypatch):
    monkeypatch.delenv("DP_SINKHORN_DATA", raising=False)


def load(folder, name="mnist", split="train"):
    return load_published(PUBLISHED_SETS[name], split, folder)


@pytest.mark.parametrize("zipped", [True, False])
def test_images_and_labels_are_read_as_written(tmp_path, zipped):
    write_idx(tmp_path, "train", grey_images(20, 8, 9), LABELS, zipped=zipped)
    data = load(tmp_path)
    assert data.shape == (1, 8, 9)
    assert torch.equal(data.images[:, 0], torch.from_numpy(grey_images(20, 8, 9)))
    assert data.labels.tolist() == LABELS.tolist()
    assert data.classes == tuple("0123456789")


def test_fashion_mnist_has_its_published_class_names(tmp_path):
    write_idx(tmp_path, "train", grey_images(20), LABELS)
    classes = load(tmp_path, "fashion-mnist").classes
    assert len(classes) == 10
    assert (classes[0], classes[6], classes[9]) == ("T-shirt/top", "Shirt", "Ankle boot")


def test_only_the_files_of_the_split_are_needed(tmp_path):
    write_idx(tmp_path, "t10k", grey_images(10), np.arange(10))
    assert len(load(tmp_path, split="test")) == 10
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz"):
        load(tmp_path, split="train")


@pytest.mark.parametrize("folder", ["fashion_mnist", "fashion-mnist"])
def test_a_sub_folder_of_the_set_is_preferred_to_the_folder_itself(tmp_path, folder):
    write_idx(tmp_path, "train", grey_images(30), np.arange(30) % 10)
    write_idx(tmp_path / folder, "train", grey_images(20), LABELS)
    assert len(load(tmp_path, "fashion-mnist")) == 20
    assert len(load(tmp_path, "mnist")) == 30


def test_a_folder_named_after_another_set_is_not_taken_for_this_one(tmp_path):
    write_idx(tmp_path / "mnist", "train", grey_images(20), LABELS)
    assert len(load(tmp_path / "mnist", "mnist")) == 20
    with pytest.raises(UserError, match=r"fashion-mnist: .* not found"):
        load(tmp_path / "mnist", "fashion-mnist")


def test_the_variable_is_used_after_the_argument(tmp_path, monkeypatch):
    write_idx(tmp_path / "variable" / "mnist", "train", grey_images(20), LABELS)
    monkeypatch.setenv("DP_SINKHORN_DATA", str(tmp_path / "variable"))
    assert len(load(None)) == 20
    assert len(load(tmp_path / "elsewhere")) == 20
    write_idx(tmp_path / "argument", "train", grey_images(30), np.arange(30) % 10)
    assert len(load(tmp_path / "argument")) == 30


def test_not_found_says_what_where_and_how_to_set_the_place(tmp_path, monkeypatch):
    monkeypatch.setenv("DP_SINKHORN_DATA", str(tmp_path / "b"))
    with pytest.raises(UserError) as error:
        load(tmp_path / "a")
    message = str(error.value)
    assert message.startswith(f"mnist: {IMAGES_GZ} and {LABELS_GZ} not found in ")
    for folder in ("a", "a/mnist", "b", "b/mnist"):
        assert str(tmp_path / folder) in message
    assert message.endswith("set the folder with --data-dir or DP_SINKHORN_DATA")


def test_not_found_names_only_what_is_missing(tmp_path):
    write_idx(tmp_path, "train", grey_images(20), LABELS)
    (tmp_path / LABELS_GZ).unlink()
    with pytest.raises(UserError, match=rf"^mnist: {LABELS_GZ} not found in "):
        load(tmp_path)


def test_no_folder_given_at_all():
    with pytest.raises(
        UserError, match="no folder to look for its files in; set the folder with --data-dir or DP_SINK"
    ):
        load(None)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (b"", "not an IDX file"),
        (b"\0\0", "not an IDX file"),
        (b"<html> not found </html>", r"not an IDX file \(bad magic number\)"),
        (idx_bytes(grey_images(20), magic=1), "not an IDX file"),
        (idx_bytes(grey_images(20), element_type=0x0D), r"IDX element type 0x0d, expected unsigned bytes \(0x08\)"),
        (idx_bytes(LABELS), "IDX data has 1 dimensions, expected 3; are images and labels swapped"),
        (idx_bytes(grey_images(20))[:11], "the IDX header is cut short"),
        (idx_bytes(grey_images(20))[:-1], "the IDX header promises 1440 values, the file holds only 1439"),
        (idx_bytes(grey_images(20)) + b"x", "the IDX header promises 1440 values, the file holds more"),
        (
            idx_bytes(grey_images(20), shape=(20, 8, 10)),
            "the IDX header promises 1600 values, the file holds only 1440",
        ),
        (idx_bytes(grey_images(19)), f"has 19 images, but .*{LABELS_GZ} has 20 labels"),
        (idx_bytes(grey_images(20, 7, 9)), "images are 7x9; each side must have 8 to 64 pixels"),
        (idx_bytes(grey_images(20), shape=(2**32 - 1, 64, 64)), r"claims an array of 16,384 GiB; at most 16 GiB"),
        (idx_bytes(grey_images(20), shape=(2**32 - 1,) * 3), "claims an array of .* GiB; at most 16 GiB"),
    ],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_damaged_image_file(tmp_path, images, message, zipped):
    write_idx(tmp_path, "train", images, LABELS, zipped=zipped)
    with pytest.raises(UserError, match=f"train-images-idx3-ubyte(.gz)?: {message.replace('.gz', '(.gz)?')}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (idx_bytes(LABELS, element_type=9), f"{LABELS_GZ}: IDX element type 0x09"),
        (idx_bytes(grey_images(20)), f"{LABELS_GZ}: IDX data has 3 dimensions, expected 1"),
        (idx_bytes(LABELS)[:-3], f"{LABELS_GZ}: the IDX header promises 20 values, the file holds only 17"),
        (idx_bytes(LABELS) + b"123", f"{LABELS_GZ}: the IDX header promises 20 values, the file holds more"),
        (idx_bytes(np.arange(20)), r"\(train split\): labels: label 19 is out of range for 10 classes"),
        (idx_bytes(LABELS % 9), r"\(train split\): labels: labels are not contiguous, class 9 of 0..9 has no record"),
    ],
)
def test_damaged_label_file(tmp_path, labels, message):
    write_idx(tmp_path, "train", grey_images(20), labels)
    with pytest.raises(UserError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("name", [IMAGES_GZ, LABELS_GZ])
@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: packed[: len(packed) // 2],
        lambda packed: packed[:-1],
        lambda packed: packed[:-8] + bytes(4) + packed[-4:],  # the checksum
        lambda packed: packed[:10] + b"\xff" * 20 + packed[30:],
        gzip.decompress,  # unpacked, but still named .gz
        lambda packed: packed + b"tail",
    ],
)
def test_truncated_or_corrupt_gzip(tmp_path, name, damage):
    write_idx(tmp_path, "train", grey_images(20), LABELS)
    (tmp_path / name).write_bytes(damage((tmp_path / name).read_bytes()))
    with pytest.raises(UserError, match=f"{name}: truncated or corrupt gzip file; fetch it again"):
        load(tmp_path)


def test_an_empty_gzip_file_is_no_idx_file(tmp_path):
    write_idx(tmp_path, "train", grey_images(20), LABELS)
    (tmp_path / IMAGES_GZ).write_bytes(b"")
    with pytest.raises(UserError, match="not an IDX file"):
        load(tmp_path)


def test_too_little_memory_is_one_line(tmp_path, monkeypatch):
    def fail(*args):
        raise MemoryError

    write_idx(tmp_path, "train", grey_images(20), LABELS)
    monkeypatch.setattr("dp_sinkhorn.records.idx.np.empty", fail)
    with pytest.raises(UserError, match="20 values are too many for the memory of this machine"):
        load(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path):
    write_idx(tmp_path, "train", grey_images(20), LABELS)
    (tmp_path / IMAGES_GZ).chmod(0)
    with pytest.raises(UserError, match=rf"{IMAGES_GZ}: cannot be read \(Permission denied\)"):
        load(tmp_path)
