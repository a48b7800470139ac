"""Folders of files, on disk or inside a zip archive, behind one interface.

A tree names its files and folders by path relative to its root, with `/` between the parts; the root is "".
Hidden entries and what operating systems leave behind (`__MACOSX`, `Thumbs.db`, `desktop.ini`) do not exist in it.
Folders are listed when asked for, so that a wrong path such as `/` is refused without a walk through the disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Protocol
from zipfile import ZipFile, ZipInfo

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.records.archives import open_archive, reading_member, unreadable
from dp_sinkhorn.records.limits import check_image_file_bytes

_LITTER = frozenset({"__macosx", "thumbs.db", "desktop.ini"})


@dataclass
class Entries:
    """The names directly inside one folder."""

    folders: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)


class FileTree(Protocol):
    """A folder of image files, wherever it is kept."""

    def entries(self, folder: str) -> Entries:
        """The names directly inside `folder`."""
        ...

    def read(self, file: str) -> bytes:
        """The content of `file`."""
        ...

    def where(self, name: str) -> str:
        """How to name a file or folder to the user."""
        ...


def join(folder: str, name: str) -> str:
    """The path of `name` inside `folder`."""
    return f"{folder}/{name}" if folder else name


@contextmanager
def open_tree(path: Path) -> Iterator[FileTree]:
    """The tree at `path`: a directory, or a zip archive."""
    if path.is_dir():
        yield _DirectoryTree(path)
    else:
        with open_archive(path) as archive:
            yield _ZipTree(path, archive)


def _is_ignored(name: str) -> bool:
    return name.startswith(".") or name.lower() in _LITTER


class _DirectoryTree:
    def __init__(self, root: Path) -> None:
        self._root = root

    def entries(self, folder: str) -> Entries:
        found = Entries()
        try:
            with os.scandir(self._root / folder) as listing:
                for entry in listing:
                    if not _is_ignored(entry.name):
                        (found.folders if entry.is_dir() else found.files).add(entry.name)
        except OSError as error:
            raise unreadable(self.where(folder), error) from None
        return found

    def read(self, file: str) -> bytes:
        path = self._root / file
        try:
            # A broken link has nothing to read, and reading a named pipe would wait for ever.
            if not path.is_file():
                raise UserError(f"{self.where(file)}: is not a regular file; remove it")
            check_image_file_bytes(path.stat().st_size, self.where(file))
            return path.read_bytes()
        except OSError as error:
            raise unreadable(self.where(file), error) from None

    def where(self, name: str) -> str:
        return _on_one_line(str(self._root / name))


class _ZipTree:
    def __init__(self, path: Path, archive: ZipFile) -> None:
        self._path = path
        self._archive = archive
        self._members: dict[str, ZipInfo] = {}
        self._folders: dict[str, Entries] = {"": Entries()}
        for member in archive.infolist():
            parts = [part for part in member.filename.split("/") if part not in ("", ".")]
            visible = list(takewhile(lambda name: not _is_ignored(name), parts))
            if len(visible) < len(parts) or member.filename.endswith("/"):
                self._add_folder(visible)
            elif parts:
                self._add_file(parts, member)

    def _add_folder(self, parts: list[str]) -> str:
        """Enter a folder and those around it, which an archive need not list; return its path."""
        folder = ""
        for name in parts:
            self._folders[folder].folders.add(name)
            folder = join(folder, name)
            self._folders.setdefault(folder, Entries())
        return folder

    def _add_file(self, parts: list[str], member: ZipInfo) -> None:
        folder = self._add_folder(parts[:-1])
        file = join(folder, parts[-1])
        if file in self._members:
            raise UserError(f"{self.where(file)}: appears twice in the archive; keep one of the two")
        self._members[file] = member
        self._folders[folder].files.add(parts[-1])

    def entries(self, folder: str) -> Entries:
        return self._folders[folder]

    def read(self, file: str) -> bytes:
        member = self._members[file]
        check_image_file_bytes(member.file_size, self.where(file))
        with reading_member(member, self.where(file)):
            return self._archive.read(member)

    def where(self, name: str) -> str:
        return _on_one_line(f"{self._path}: member {name}" if name else str(self._path))


def _on_one_line(name: str) -> str:
    """File names may hold line breaks and terminal control codes; a message may not."""
    return name if name.isprintable() else ascii(name)
