import os
import sys

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.records import sources
from dp_sinkhorn.records.sources import load_source
from tests.records.builders import grey_images, tree, write_folder, write_idx


def test_digits_scale_the_published_levels_and_keep_every_sixth_record_for_test():
    published = load_digits()
    train, test = load_source("digits"), load_source("digits", split="test")
    assert (len(train), len(test)) == (1498, 299)
    assert train.shape == (1, 8, 8)
    assert train.classes == tuple("0123456789")
    assert train.images.max() == 255
    assert test.labels.tolist() == published.target[5::6].tolist()
    np.testing.assert_allclose(test.images[:, 0].numpy(), published.images[5::6] * 255 / 16, atol=0.5)
    np.testing.assert_allclose(train.images[:6, 0].numpy(), published.images[[0, 1, 2, 3, 4, 6]] * 255 / 16, atol=0.5)


def test_scikit_learn_is_not_imported_for_other_sources(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)  # an import would now fail
    assert len(load_source(write_folder(tmp_path / "set", tree(a=1, b=1)))) == 2


@pytest.mark.parametrize("name", ["set", "set.zip", "SET.ZIP"])
@pytest.mark.parametrize("as_text", [True, False])
def test_folder_and_zip_are_recognised(tmp_path, name, as_text):
    path = write_folder(tmp_path / name.lower(), tree(cat=1, dog=2)).rename(tmp_path / name)
    data = load_source(str(path) if as_text else path)
    assert data.classes == ("cat", "dog")
    assert data.labels.tolist() == [0, 1, 1]


def test_npz_is_recognised(tmp_path):
    np.savez(tmp_path / "set.npz", images=grey_images(4), labels=[0, 1, 0, 1])
    assert torch.equal(load_source(tmp_path / "set.npz").images[:, 0], torch.from_numpy(grey_images(4)))


def test_a_path_object_or_a_dotted_path_is_never_taken_for_a_name(tmp_path, monkeypatch):
    write_folder(tmp_path / "mnist", tree(a=1, b=1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DP_SINKHORN_DATA", raising=False)
    assert load_source("./mnist").classes == ("a", "b")
    assert load_source(tmp_path / "mnist").classes == ("a", "b")
    with pytest.raises(UserError, match="--data-dir"):
        load_source("mnist")


def test_published_sets_are_passed_the_split_and_the_folder(tmp_path):
    write_idx(tmp_path, "train", grey_images(20), np.arange(20) % 10)
    write_idx(tmp_path, "t10k", grey_images(10), np.arange(10))
    for name in ("mnist", "fashion-mnist"):
        assert len(load_source(name, data_dir=tmp_path)) == 20
        assert len(load_source(name, split="test", data_dir=tmp_path)) == 10


@pytest.mark.parametrize("source", ["mnits", "", "no/such/folder", "nul\0character"])
def test_unknown_source_lists_the_known_names(source):
    with pytest.raises(
        UserError, match=r"no such folder or file.*digits, mnist, fashion-mnist, a folder or \.zip"
    ) as e:
        load_source(source)
    assert str(e.value).isprintable()


def test_a_file_taken_for_a_folder_is_unknown(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="no such folder or file"):
        load_source(tmp_path / "file" / "inside")


def test_a_named_pipe_is_refused_rather_than_waited_for(tmp_path):
    os.mkfifo(tmp_path / "set.npz")
    with pytest.raises(UserError, match=r"set\.npz: no such folder or file"):
        load_source(tmp_path / "set.npz")


@pytest.mark.parametrize("name", ["set.tar", "set.npy", "picture.png", "set"])
def test_unsupported_kind_of_file(tmp_path, name):
    (tmp_path / name).write_bytes(b"anything")
    with pytest.raises(UserError, match=rf"{name}: unsupported kind of file; expected a folder of images"):
        load_source(tmp_path / name)


def test_a_path_that_the_system_refuses(tmp_path):
    with pytest.raises(UserError, match=r"cannot be read \(File name too long\)"):
        load_source(str(tmp_path / ("x" * 5000)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["set.npz", "set.zip", "set"])
def test_no_permission(tmp_path, name):
    path = tmp_path / name
    if path.suffix:
        path.write_bytes(b"")
    else:
        path.mkdir()
    path.chmod(0)
    with pytest.raises(UserError, match=rf"{name}: cannot be read \(Permission denied\)"):
        load_source(path)
    path.chmod(0o700)


def test_failing_disk_is_one_line(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(5, "Input/output error")

    (tmp_path / "set.zip").write_bytes(b"")
    monkeypatch.setattr("dp_sinkhorn.records.archives.ZipFile", fail)
    with pytest.raises(UserError, match=r"set\.zip: cannot be read \(Input/output error\)"):
        load_source(tmp_path / "set.zip")


def test_names_are_what_the_error_lists():
    assert sources.NAMES == ("digits", "mnist", "fashion-mnist")
