"""Write a release: the generator, its guarantee, a picture and a card, and nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from safetensors.torch import save_file

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.release.format import CARD_FILE, INFO_FILE, LABELLER, SAMPLES_FILE, WEIGHTS_FILE, up
from dp_sinkhorn.release.load import Release
from dp_sinkhorn.release.pictures import GRID_COLUMNS, grid

# The picture is the same whoever draws it.
_PICTURE_SEED = 0

RELEASE_FILES = frozenset({CARD_FILE, INFO_FILE, SAMPLES_FILE, WEIGHTS_FILE})


def write_release(release: Release, folder: Path) -> None:
    """Write all files beside the target, then move them into place: a reader finds a whole release or none.

    Raises:
        UserError: the folder holds something else than a release, which writing would delete.
    """
    check_target(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.draft-{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        state = dict(release.generator.state_dict())
        if release.labeller is not None:
            state |= {LABELLER + name: tensor for name, tensor in release.labeller.state_dict().items()}
        save_file({name: tensor.cpu().contiguous() for name, tensor in state.items()}, draft / WEIGHTS_FILE)
        (draft / INFO_FILE).write_text(release.info.model_dump_json(indent=2) + "\n", encoding="utf-8")
        classes = len(release.classes)
        images, labels = release.sample(GRID_COLUMNS * classes, seed=_PICTURE_SEED)
        grid(images, labels, classes).save(draft / SAMPLES_FILE)
        (draft / CARD_FILE).write_text(card(release), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        draft.replace(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def check_target(folder: Path) -> None:
    """Refuse a place where a release would overwrite what is not one."""
    if folder.is_dir():
        others = {entry.name for entry in folder.iterdir()} - RELEASE_FILES
        if others:
            raise UserError(f"{folder}: holds {sorted(others)[0]}, which is no part of a release; name a new folder")
    elif folder.exists():
        raise UserError(f"{folder}: is a file, and a release is a folder; name a new folder")


def card(release: Release) -> str:
    """CARD.md: what this is, what is guaranteed, and what is not."""
    info, privacy = release.info, release.privacy
    channels, height, width = info.image_shape
    kind = "grey" if channels == 1 else "RGB"
    classes = (
        "the list of classes is a parameter of the run too"
        if privacy.classes_declared
        else "the classes were read off the labels: which labels occur among the records is published as it is, "
        "outside the guarantee"
    )
    guarantee = (
        f"""- epsilon = {up(privacy.epsilon)}, delta = {privacy.delta!r}, for adding or removing one record
- mechanism `{privacy.mechanism}`, {privacy.steps} steps, sampling rate {privacy.sampling_rate:.6g}, noise multiplier \
{privacy.noise_multiplier:g}
- accountant: {privacy.accountant}; private randomness: {privacy.randomness}
- number of records, published as a parameter of the run: {privacy.records}
- {classes}"""
        if privacy.private and privacy.epsilon is not None
        else f"- mechanism `{privacy.mechanism}`, {privacy.steps} steps; private randomness: {privacy.randomness}"
    )
    limits = (
        """The guarantee bounds what this folder tells about any one record, whatever else an attacker knows and \
whatever is done with the folder. It does not hide facts that hold for the records as a whole, it covers one \
record a person and not all the records of a person who has several, it adds up with other publications from \
the same records, and it says nothing of how good the images are."""
        if privacy.private
        else "Treat this folder as you treat the records themselves."
    )
    labelling, weights = (
        (
            "An image is of the class that a classifier sees in it, which was trained in the same releases as the "
            "generator and is part of this folder: it is more often right than the class the generator was asked for.",
            "the generator and the classifier",
        )
        if info.labels == "probe"
        else ("An image is of the class that the generator was asked for.", "the generator")
    )
    return f"""# Synthetic images: {len(info.classes)} classes, {height}x{width} {kind}

{privacy.statement}

## The guarantee

{guarantee}

## What it does not promise

{limits}

## How to use it

    pip install dp-sinkhorn
    dp-sinkhorn sample PATH_TO_THIS_FOLDER --out samples.npz --per-class 100

or, in Python:

    from dp_sinkhorn import load_release
    images, labels = load_release("PATH_TO_THIS_FOLDER").sample(1000)

{labelling}

Files: `{WEIGHTS_FILE}` ({weights}), `{INFO_FILE}` (architecture and guarantee), `{SAMPLES_FILE}` (the first \
{GRID_COLUMNS} images of each class, drawn with seed {_PICTURE_SEED}), and this card. Written by dp-sinkhorn \
{info.package_version}.
"""
