"""Releases: what they hold, how they are sampled, and what happens with damaged or hostile ones."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from dp_sinkhorn import load_release
from dp_sinkhorn.errors import UserError
from dp_sinkhorn.records import load_source
from dp_sinkhorn.release.format import up
from dp_sinkhorn.release.pictures import folder_names, grid, write_folder
from dp_sinkhorn.release.write import write_release
from dp_sinkhorn.training import train
from tests.toy import records, small_settings, stripes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("release") / "run"
    train(records(), small_settings(epsilon=3.0, steps=5), out)
    return out / "release"


@pytest.fixture
def damaged(folder, tmp_path):
    """A copy of the release for a test to damage."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def test_sampling(folder) -> None:
    release = load_release(folder)
    images, labels = release.sample(7)
    assert images.shape == (7, 8, 8)
    assert images.dtype == np.uint8
    assert labels.dtype == np.int64
    assert labels.tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert release.sample(3, labels=1)[1].tolist() == [1, 1, 1]
    assert release.sample(labels=[1, 0, 0])[1].tolist() == [1, 0, 0]
    assert release.sample(labels=np.array([1, 1]))[1].tolist() == [1, 1]
    assert release.sample(0)[0].shape == (0, 8, 8)
    assert (release.sample(50, seed=4)[0] == release.sample(50, seed=4)[0]).all()
    assert (release.sample(50, seed=4)[0] != release.sample(50, seed=5)[0]).any()
    assert (release.sample(50)[0] != release.sample(50)[0]).any(), "without a seed every draw is new"
    assert release.classes == ["top", "left"]


def test_long_draws_are_the_same_in_one_piece_or_many(folder) -> None:
    release = load_release(folder)
    assert len(release.sample(2500)[0]) == 2500


def test_a_release_labels_its_images_by_its_probe(folder, tmp_path) -> None:
    train(records(count=600), small_settings(epsilon=100.0, steps=100, batch_size=100), tmp_path / "run")
    release = load_release(tmp_path / "run")
    assert release.info.labels == "probe"
    images, labels = release.sample(40, seed=0)
    assert labels.tolist() == [0, 1] * 20
    assert (release.labeller.label(torch.from_numpy(images).unsqueeze(1)).numpy() == labels).all()
    assert (release.labeller.label(stripes().images).numpy() == stripes().labels.numpy()).all()
    assert "the class that a classifier sees in it" in (folder / "CARD.md").read_text()


def test_a_release_without_a_probe_labels_its_images_as_asked_for(tmp_path) -> None:
    train(records(), small_settings(epsilon=3.0, steps=2, probe_share=0), tmp_path / "run")
    release = load_release(tmp_path / "run")
    assert (release.info.labels, release.labeller) == ("generator", None)
    assert release.sample(3, labels=1)[1].tolist() == [1, 1, 1]
    assert "the class that the generator was asked for" in (tmp_path / "run/release/CARD.md").read_text()


def test_a_probe_of_another_shape_or_none_is_refused(damaged) -> None:
    tensors = load_file(damaged / "generator.safetensors")
    centre = tensors.pop("labeller.centre")
    for broken in (
        tensors,
        {**tensors, "labeller.centre": centre[1:]},
        {**tensors, "labeller.centre": centre * np.nan},
    ):
        save_file(broken, damaged / "generator.safetensors")
        with pytest.raises(UserError, match=r"its tensors are not those of|NaN or infinite"):
            load_release(damaged)


def test_colour_images_come_channels_last(tmp_path) -> None:
    release = train(records(channels=3), small_settings(epsilon=3.0, steps=2), tmp_path / "run")
    assert release.sample(4)[0].shape == (4, 8, 8, 3)
    assert Image.open(tmp_path / "run" / "release" / "samples.png").mode == "RGB"


def test_what_was_saved_is_what_is_loaded(folder, tmp_path) -> None:
    release = train(records(), small_settings(epsilon=3.0, steps=3), tmp_path / "run")
    images = release.sample(20, seed=1)[0]
    assert (load_release(tmp_path / "run" / "release").sample(20, seed=1)[0] == images).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": None}, "count: give the number of images"),
        ({"count": -1}, "count: give the number of images to draw, 0 or more, got -1"),
        ({"count": 2, "labels": 7}, r"class 7 is out of range; this release has classes 0..1"),
        ({"labels": [0, -1]}, "class -1 is out of range"),
        ({"labels": [0.5]}, "classes are whole numbers"),
        ({"count": 3, "labels": [0, 1]}, "expected one class for each of 3 images"),
    ],
)
def test_bad_draws_are_explained(folder, arguments, message) -> None:
    with pytest.raises(UserError, match=message):
        load_release(folder).sample(**arguments)


def test_the_card_and_the_picture(folder) -> None:
    card = (folder / "CARD.md").read_text()
    privacy = json.loads((folder / "release.json").read_text())["privacy"]
    assert privacy["statement"] in card
    assert f"epsilon = {up(privacy['epsilon'])}" in card
    assert "What it does not promise" in card
    assert Image.open(folder / "samples.png").size == (12 * 50, 2 * 50)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda info: info.update(format_version=99), "format_version 99 is not 1"),
        (lambda info: info.update(image_shape=[1, 10**6, 10**6]), r"release.json: image_shape.*damaged"),
        (lambda info: info.update(latent=10**9), r"release.json: latent"),
        (lambda info: info["arguments"].update(width=10**9), r"release.json: arguments.width"),
        (lambda info: info.update(arguments={"width": 3}), "its tensors are not those of the 'dcgan'"),
        (lambda info: info.update(architecture="os.system"), "unknown generator 'os.system'"),
        (lambda info: info.update(unknown=1), "release.json: unknown"),
        (lambda info: info.pop("privacy"), "release.json: privacy"),
    ],
)
def test_a_damaged_description_is_refused(damaged, change, message) -> None:
    info = json.loads((damaged / "release.json").read_text())
    change(info)
    (damaged / "release.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match=message):
        load_release(damaged)


def test_damaged_weights_are_refused(damaged) -> None:
    weights = damaged / "generator.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if tensors[name].is_floating_point())
    save_file({**tensors, name: torch.full_like(tensors[name], float("nan"))}, weights)
    with pytest.raises(UserError, match="some weights are NaN or infinite"):
        load_release(damaged)
    save_file({**tensors, "more": torch.zeros(1)}, weights)
    with pytest.raises(UserError, match="its tensors are not those"):
        load_release(damaged)
    weights.write_bytes(weights.read_bytes()[:50])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        load_release(damaged)
    weights.unlink()
    with pytest.raises(UserError, match="not a readable safetensors file"):
        load_release(damaged)


def test_something_else_is_not_a_release(tmp_path) -> None:
    with pytest.raises(UserError, match=r"not a release, it has no release.json"):
        load_release(tmp_path)
    (tmp_path / "release.json").write_text("{")
    with pytest.raises(UserError, match=r"release.json: file: Invalid JSON"):
        load_release(tmp_path)


def test_epsilon_is_never_rounded_down() -> None:
    assert up(0.224538) == "0.2246"
    assert up(9.99965) == "10"
    assert up(845.295) == "845.3"
    assert up(2.0) == "2"
    for epsilon in np.random.default_rng(0).uniform(0, 20, 1000):
        assert epsilon <= float(up(epsilon)) <= epsilon * 1.001


def test_class_names_become_safe_folder_names() -> None:
    assert folder_names(["cat", "dog"]) == ["cat", "dog"]
    assert folder_names(["T-shirt/top", "Bag"]) == ["0-T-shirt_top", "1-Bag"]
    assert folder_names(["..", "../x"]) == ["0-class", "1-_x"]
    assert len(set(folder_names(["a/b", "a_b"]))) == 2


def test_a_folder_of_samples_is_a_source(folder, tmp_path) -> None:
    images, labels = load_release(folder).sample(10, seed=0)
    write_folder(images, labels, ["top", "left"], tmp_path / "out")
    read = load_source(tmp_path / "out")
    assert read.images.shape == (10, 1, 8, 8)
    assert torch.bincount(read.labels).tolist() == [5, 5]
    assert (read.images[read.labels == 0].squeeze(1).numpy() == images[labels == 0]).all()


def test_a_grid_shows_the_first_of_each_class_in_order() -> None:
    images = np.arange(20, dtype=np.uint8).repeat(64).reshape(20, 8, 8)
    picture = np.asarray(grid(images, np.arange(20) % 2, 2))
    assert picture.shape == (2 * 50, 12 * 50)
    assert picture[25, 25::50].tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 255, 255]
    assert picture[75, 25::50].tolist() == [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 255, 255]
    assert (picture[:5] == 255).all(), "tiles stand apart"


def test_opening_a_release_needs_no_training_code_and_no_accountant(folder) -> None:
    script = f"""
import sys, time
import torch
start = time.perf_counter()
from dp_sinkhorn import load_release
load_release({str(folder)!r}).sample(10)
seconds = time.perf_counter() - start
forbidden = [name for name in sys.modules if name.startswith((
    "dp_accounting", "sklearn", "dp_sinkhorn.training", "dp_sinkhorn.mechanisms", "dp_sinkhorn.records",
    "dp_sinkhorn.accounting", "scipy"))]
assert not forbidden, forbidden
print(seconds)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 2.0


def test_writing_a_release_deletes_nothing_else(tmp_path) -> None:
    release = train(records(), small_settings(epsilon=3.0, steps=2))
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"holds thesis.tex, which is no part of a release; name a new folder"):
        write_release(release, folder)
    assert (folder / "thesis.tex").read_text() == "years of work"
    with pytest.raises(UserError, match="is a file, and a release is a folder"):
        write_release(release, folder / "thesis.tex")
    (tmp_path / "run" / "release").mkdir(parents=True)
    (tmp_path / "run" / "release" / "notes.txt").touch()
    with pytest.raises(UserError, match=r"holds notes.txt"):
        train(records(), small_settings(epsilon=3.0, steps=2), tmp_path / "run")
    assert not (tmp_path / "run" / "private").exists(), "nothing may be spent before"
    write_release(release, tmp_path / "new")
    write_release(release, tmp_path / "new")
