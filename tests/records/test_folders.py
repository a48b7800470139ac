import os
import struct
import zipfile
import zlib

import numpy as np
import pytest

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.records import limits
from dp_sinkhorn.records.folders import load_folder
from tests.records.builders import encode, png, tree, write_folder, zip_bytes

# Every test of the layout runs on a directory and on a zip archive.
both_kinds = pytest.mark.parametrize("name", ["set", "set.zip"])


def load(path, files, split="train"):
    return load_folder(write_folder(path, files), split)


@both_kinds
def test_classes_are_sub_folders_in_order_of_their_names(tmp_path, name):
    files = {"dog/x.png": png(value=3), "cat/b.PNG": png(value=2), "cat/a.png": png(value=1), "Ant/1.png": png(value=9)}
    data = load(tmp_path / name, files)
    assert data.classes == ("Ant", "cat", "dog")
    assert data.labels.tolist() == [0, 1, 1, 2]
    assert data.images[:, 0, 0, 0].tolist() == [9, 1, 2, 3]
    assert data.shape == (1, 8, 9)


@both_kinds
def test_colour_images_have_channels_first(tmp_path, name):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 9, 3), dtype=np.uint8)
    data = load(tmp_path / name, {"a/1.png": encode(pixels), "b/1.png": png(rgb=True)})
    np.testing.assert_array_equal(data.images[0].numpy(), pixels.transpose(2, 0, 1))


@both_kinds
def test_hidden_files_and_the_litter_of_systems_are_ignored(tmp_path, name):
    litter = {
        ".DS_Store": b"x",
        "__MACOSX/a/._1.png": b"x",
        "a/.hidden.png": b"x",
        "a/Thumbs.db": b"x",
        "a/.thumbnails/1.png": b"x",
        ".git/a/1.png": b"x",
        "README.txt": b"about these images",
    }
    assert load(tmp_path / name, tree(a=2, b=1) | litter).classes == ("a", "b")


@both_kinds
def test_one_common_top_folder_is_looked_through(tmp_path, name):
    files = {f"top/{file}": content for file, content in tree(a=1, b=2).items()}
    assert load(tmp_path / name, files).classes == ("a", "b")


@both_kinds
def test_a_single_class_is_not_taken_for_a_top_folder(tmp_path, name):
    assert load(tmp_path / name, tree(only=2)).classes == ("only",)


@both_kinds
@pytest.mark.parametrize("top", ["", "top/"])
def test_train_and_test_folders_are_the_splits(tmp_path, name, top):
    files = {f"{top}train/{file}": content for file, content in tree(a=2, b=3).items()}
    files |= {f"{top}test/{file}": content for file, content in tree(a=1, b=1).items()}
    path = write_folder(tmp_path / name, files)
    assert load_folder(path, "train").labels.tolist() == [0, 0, 1, 1, 1]
    assert load_folder(path, "test").labels.tolist() == [0, 1]
    assert load_folder(path, "test").classes == ("a", "b")


@both_kinds
def test_only_the_split_asked_for_is_read(tmp_path, name):
    files = {f"train/{file}": b"not an image" for file in tree(a=2, b=3)}
    files |= {f"test/{file}": content for file, content in tree(a=1, b=1).items()}
    assert len(load(tmp_path / name, files, "test")) == 2


@both_kinds
def test_without_split_folders_both_splits_are_everything(tmp_path, name):
    path = write_folder(tmp_path / name, tree(a=2, b=3))
    assert len(load_folder(path, "train")) == len(load_folder(path, "test")) == 5


@both_kinds
def test_classes_may_be_called_train_and_test(tmp_path, name):
    assert load(tmp_path / name, tree(train=1, test=2)).classes == ("test", "train")


@both_kinds
def test_a_further_folder_beside_train_and_test_makes_them_classes(tmp_path, name):
    files = {"train/a/1.png": png(), "test/a/1.png": png(), "valid/a/1.png": png()}
    with pytest.raises(UserError, match=r"test/a: folder inside a class folder"):
        load(tmp_path / name, files)


@both_kinds
@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no class sub-folders found; expected one sub-folder of images per class"),
        ({"notes.txt": b""}, "no class sub-folders found"),
        (
            {"1.png": png(), "2.png": png()},
            r"1\.png: image outside the class folders; put each image into a sub-folder",
        ),
        (tree(a=1, b=1) | {"z.JPG": png()}, r"z\.JPG: image outside the class folders"),
        (tree(a=1, b=1) | {"c/": b""}, r"c: class folder without images; add some or remove the folder"),
        (tree(a=1, b=1) | {"c/.hidden.png": b""}, r"c: class folder without images"),
        (tree(a=1, b=1) | {"b/deep/1.png": png()}, r"b/deep: folder inside a class folder; images must lie directly"),
        (tree(a=1, b=1) | {"b/1.dcm": b""}, r"b/1\.dcm: not a supported image file \(\.bmp \.gif .*convert or remove"),
        (tree(a=1), "images: at least two records are needed, got 1"),
        (tree(a=1) | {"line\nbreak/1.png": png()}, r"class folder 'line\\nbreak' needs a printable name"),
        ({"train/a/1.png": png(), "test/b/1.png": png()}, "train and test must hold the same class folders; 'a' is in"),
        ({"a/1.png": png(7, 9), "a/2.png": png(7, 9)}, r"a/1\.png: images are 7x9; each side must have 8 to 64"),
        ({"a/1.png": png(9, 65), "a/2.png": png(9, 65)}, r"a/1\.png: images are 9x65; each side must have 8 to 64"),
        (
            tree(a=2) | {"b/9.png": png(8, 8)},
            r"b/9\.png: 8x8 grey, but .*a/0\.png is 8x9 grey; bring all images to one",
        ),
        (tree(a=2) | {"b/9.png": png(80, 80)}, r"b/9\.png: 80x80 grey, but .*a/0\.png is 8x9 grey"),
        (tree(a=2) | {"b/9.png": png(rgb=True)}, r"b/9\.png: 8x9 RGB, but .*a/0\.png is 8x9 grey"),
        (tree(a=2) | {"b/9.png": b"no image"}, r"b/9\.png: cannot be read as an image \(damaged, truncated or not an"),
        (tree(a=2) | {"b/9.png": b""}, r"b/9\.png: cannot be read as an image"),
        (tree(a=2) | {"b/9.png": png()[:-20]}, r"b/9\.png: cannot be read as an image"),
        (
            tree(a=2) | {"b/9.jpg": encode(np.zeros((8, 9), np.uint8), "JPEG")[:300]},
            r"b/9\.jpg: cannot be read as an im",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path, name, files, message):
    path = tmp_path / name
    if not files and not path.suffix:
        path.mkdir()
    with pytest.raises(UserError, match=message) as error:
        load(path, files)
    assert str(error.value).startswith((str(path), repr(str(path))[:-1]))
    assert str(error.value).isprintable()


@both_kinds
def test_a_file_far_too_large_for_a_small_image_is_not_read(tmp_path, name, monkeypatch):
    monkeypatch.setattr(limits, "MAX_IMAGE_FILE_BYTES", 2 * 2**20)
    files = tree(a=2) | {"b/9.png": bytes(3 * 2**20)}
    with pytest.raises(UserError, match=r"b/9\.png: 3 MiB is too large for a small image \(at most 2 MiB\); resize"):
        load(tmp_path / name, files)


@both_kinds
def test_more_images_than_memory_can_be_expected_to_hold(tmp_path, name, monkeypatch):
    monkeypatch.setattr(limits, "MAX_ARRAY_BYTES", 5 * 72)
    assert len(load(tmp_path / name, tree(a=2, b=3))) == 5
    with pytest.raises(UserError, match=rf"{name}: claims an array of"):
        load(tmp_path / name, tree(a=3, b=3))


@both_kinds
def test_gigantic_dimensions_in_a_header_are_refused_before_decoding(tmp_path, name):
    for side, message in ((2**31 - 1, "claims far too many pixels"), (12_000, "images are 12000x12000; each side")):
        content = png()
        header = struct.pack(">II", side, side) + content[24:29]
        content = content[:16] + header + struct.pack(">I", zlib.crc32(b"IHDR" + header)) + content[33:]
        with pytest.raises(UserError, match=message):
            load(tmp_path / name, {"a/1.png": content, "a/2.png": content})


def test_links_are_followed_and_broken_ones_named(tmp_path):
    write_folder(tmp_path / "real", tree(a=2))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "real" / "a")
    assert load_folder(tmp_path / "set", "train").classes == ("linked",)
    (tmp_path / "real" / "a" / "5.png").symlink_to(tmp_path / "gone.png")
    with pytest.raises(UserError, match=r"linked/5\.png: is not a regular file"):
        load_folder(tmp_path / "set", "train")


def test_a_named_pipe_is_not_waited_for(tmp_path):
    write_folder(tmp_path, tree(a=2))
    os.mkfifo(tmp_path / "a" / "0.jpg")
    with pytest.raises(UserError, match=r"a/0\.jpg: is not a regular file; remove it"):
        load_folder(tmp_path, "train")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("forbidden", ["a/0.png", "a"])
def test_no_permission(tmp_path, forbidden):
    write_folder(tmp_path, tree(a=2))
    (tmp_path / forbidden).chmod(0)
    with pytest.raises(UserError, match=rf"{forbidden}: cannot be read \(Permission denied\)"):
        load_folder(tmp_path, "train")
    (tmp_path / forbidden).chmod(0o700)


def test_file_that_vanishes_while_reading(tmp_path, monkeypatch):
    write_folder(tmp_path, tree(a=2))

    def fail(path):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("pathlib.Path.read_bytes", fail)
    with pytest.raises(UserError, match=r"a/0\.png: cannot be read \(Stale file handle\)"):
        load_folder(tmp_path, "train")


class TestZip:
    def refuse(self, tmp_path, content, message):
        (tmp_path / "set.zip").write_bytes(content)
        with pytest.raises(UserError, match=message):
            load_folder(tmp_path / "set.zip", "train")

    @pytest.mark.parametrize("content", [b"", b"PK", b"not a zip", zip_bytes(tree(a=2))[:-30]])
    def test_not_a_zip(self, tmp_path, content):
        self.refuse(tmp_path, content, r"set\.zip: not a zip archive, or a damaged one; make or fetch it again")

    def test_damaged_member(self, tmp_path):
        content = zip_bytes(tree(a=1, b=1), zipfile.ZIP_STORED)
        at = content.index(b"IDAT") + 5
        content = content[:at] + b"\xff\xff" + content[at + 2 :]
        self.refuse(tmp_path, content, r"set\.zip: member a/0\.png: damaged, or packed in an unsupported way")

    @pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    def test_damaged_compression(self, tmp_path, method):
        content = bytearray(zip_bytes(tree(a=1, b=1), method))
        with zipfile.ZipFile(_written(tmp_path / "sound.zip", content)) as archive:
            member = archive.getinfo("a/0.png")
        start = member.header_offset + 30 + len(member.filename)
        content[start : start + member.compress_size] = b"\xff" * member.compress_size
        self.refuse(tmp_path, bytes(content), r"member a/0\.png: (damaged|cannot be read \(damaged data\))")

    def test_unknown_compression(self, tmp_path):
        content = bytearray(zip_bytes(tree(a=1, b=1)))
        for signature, offset in ((b"PK\3\4", 8), (b"PK\1\2", 10)):
            at = content.index(signature) + offset
            content[at : at + 2] = struct.pack("<H", 97)
        self.refuse(tmp_path, bytes(content), r"member a/0\.png: damaged, or packed in an unsupported way")

    def test_encrypted_member(self, tmp_path):
        content = bytearray(zip_bytes(tree(a=1, b=1)))
        for signature, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
            content[content.index(signature) + offset] |= 1
        self.refuse(
            tmp_path, bytes(content), r"member a/0\.png: is encrypted; make the archive again without a password"
        )

    def test_member_that_claims_a_gigantic_size(self, tmp_path):
        content = bytearray(zip_bytes(tree(a=1, b=1)))
        at = content.index(b"PK\1\2") + 24
        content[at : at + 4] = struct.pack("<I", 2**32 - 2)
        self.refuse(tmp_path, bytes(content), r"member a/0\.png: 4,096 MiB is too large for a small image")

    @pytest.mark.filterwarnings("ignore:Duplicate name")
    def test_member_that_appears_twice(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
            for name in ("a/1.png", "b/1.png", "./a/1.png"):
                archive.writestr(name, png())
        with pytest.raises(UserError, match=r"member a/1\.png: appears twice in the archive"):
            load_folder(tmp_path / "set.zip", "train")

    def test_member_name_with_control_characters_stays_on_one_line(self, tmp_path):
        self.refuse(
            tmp_path, zip_bytes(tree(a=1) | {"a/x\n\x1b[2J.png": b""}), r"member a/x\\n\\x1b\[2J\.png': cannot be"
        )

    def test_nameless_member_is_ignored(self, tmp_path):
        content = zip_bytes({"q.txt": b"x", "/": b"", "./": b""} | tree(a=1, b=1))
        (tmp_path / "set.zip").write_bytes(content.replace(b"q.txt", b"\0.txt"))  # a name ends at a null character
        assert len(load_folder(tmp_path / "set.zip", "train")) == 2

    def test_names_that_climb_out_are_only_names(self, tmp_path):
        # ".." is a hidden name like any other that starts with a dot; nothing is ever unpacked to disk.
        files = tree(a=1, b=1) | {"../evil/1.png": b"", "/a/2.png": png()}
        (tmp_path / "set.zip").write_bytes(zip_bytes(files))
        assert load_folder(tmp_path / "set.zip", "train").labels.tolist() == [0, 0, 1]


def _written(path, content):
    path.write_bytes(content)
    return path
