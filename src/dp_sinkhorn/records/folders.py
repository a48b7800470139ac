"""Images in class folders: a directory or a zip archive with one sub-folder of images per class."""

from __future__ import annotations

import warnings
from pathlib import Path, PurePosixPath

import numpy as np

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.images import LabelledImages, check_shape, from_arrays
from dp_sinkhorn.records.decoding import EXTENSIONS, ImageFile, describe
from dp_sinkhorn.records.limits import check_array_bytes
from dp_sinkhorn.records.trees import FileTree, join, open_tree


def load_folder(path: Path, split: str) -> LabelledImages:
    """The images under `path`, a directory or a zip archive, labelled by the sub-folder they lie in.

    Classes are the sub-folders in the order of their names. A single folder around everything is looked through. If
    there are exactly the sub-folders `train` and `test`, each with the same class folders, `split` selects one of
    them; otherwise both splits are the whole folder.

    Raises:
        UserError: naming the folder or file that is wrong and how to mend it.
    """
    with open_tree(path) as tree:
        root = _split_root(tree, split)
        classes = _class_names(tree, root)
        files = [_image_files(tree, join(root, name)) for name in classes]
        images = _read_images(tree, [file for group in files for file in group])
        labels = np.repeat(np.arange(len(classes)), [len(group) for group in files])
        return from_arrays(images, labels, classes, where=tree.where(root))


def _split_root(tree: FileTree, split: str) -> str:
    """The folder that holds the class folders of `split`."""
    root = ""
    top = tree.entries(root)
    if len(top.folders) == 1 and not any(map(_is_image, top.files)):
        (only,) = top.folders
        if tree.entries(only).folders:
            root, top = only, tree.entries(only)
    if top.folders != {"train", "test"}:
        return root
    classes = {name: tree.entries(join(root, name)).folders for name in ("train", "test")}
    if not all(classes.values()):
        return root
    difference = sorted(classes["train"] ^ classes["test"])
    if difference:
        raise UserError(
            f"{tree.where(root)}: train and test must hold the same class folders; "
            f"{difference[0]!a} is in only one of them"
        )
    return join(root, split)


def _class_names(tree: FileTree, root: str) -> tuple[str, ...]:
    top = tree.entries(root)
    loose = sorted(filter(_is_image, top.files))
    if loose:
        raise UserError(
            f"{tree.where(join(root, loose[0]))}: image outside the class folders; put each image into a sub-folder "
            "named after its class"
        )
    if not top.folders:
        raise UserError(f"{tree.where(root)}: no class sub-folders found; expected one sub-folder of images per class")
    # Names are published with the release, as text.
    unprintable = sorted(name for name in top.folders if not name.isprintable())
    if unprintable:
        raise UserError(f"{tree.where(root)}: class folder {unprintable[0]!a} needs a printable name; rename it")
    return tuple(sorted(top.folders))


def _image_files(tree: FileTree, folder: str) -> list[str]:
    """The image files of one class, by name; a file or folder that is no image is refused, not left out silently."""
    found = tree.entries(folder)
    if found.folders:
        raise UserError(
            f"{tree.where(join(folder, min(found.folders)))}: folder inside a class folder; images must lie "
            "directly in the folder of their class"
        )
    others = sorted(name for name in found.files if not _is_image(name))
    if others:
        raise UserError(
            f"{tree.where(join(folder, others[0]))}: not a supported image file ({' '.join(sorted(EXTENSIONS))}); "
            "convert or remove it"
        )
    if not found.files:
        raise UserError(f"{tree.where(folder)}: class folder without images; add some or remove the folder")
    return [join(folder, name) for name in sorted(found.files)]


def _is_image(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in EXTENSIONS


def _read_images(tree: FileTree, files: list[str]) -> np.ndarray:
    """All images, stacked; they must agree in size and mode with the first."""
    first = files[0]
    with warnings.catch_warnings():
        # Pillow warns about metadata we do not use and about sizes that are checked here.
        warnings.simplefilter("ignore")
        shape = ImageFile(tree.read(first), tree.where(first)).shape
        check_shape(shape, tree.where(first))
        check_array_bytes((len(files), *shape), 1, tree.where(""))
        images = np.empty((len(files), *shape), np.uint8)
        for slot, file in zip(images, files, strict=True):
            image = ImageFile(tree.read(file), tree.where(file))
            if image.shape != shape:
                raise UserError(
                    f"{tree.where(file)}: {describe(image.shape)}, but {tree.where(first)} is {describe(shape)}; "
                    "bring all images to one size and mode"
                )
            slot[...] = image.pixels()
    return images
