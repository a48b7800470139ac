"""Opening zip archives (image zips, .npz files) so that every way they can be broken is one clear line."""

from __future__ import annotations

import lzma
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import ZipFile, ZipInfo

from dp_sinkhorn.errors import UserError

# What zipfile and its decompressors raise on damaged or hostile archives. RuntimeError covers NotImplementedError
# (an unknown compression method), ValueError covers UnicodeDecodeError (a broken member name).
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    OverflowError,
    RuntimeError,
    ValueError,
)


def unreadable(where: str, error: OSError) -> UserError:
    """The operating system's reason (no permission, a failing disk) as one line."""
    return UserError(f"{where}: cannot be read ({error.strerror or 'damaged data'})")


@contextmanager
def open_archive(path: Path) -> Iterator[ZipFile]:
    """The zip archive at `path`, opened for reading."""
    try:
        archive = ZipFile(path)
    except _DAMAGE:
        raise UserError(f"{path}: not a zip archive, or a damaged one; make or fetch it again") from None
    except OSError as error:
        raise unreadable(str(path), error) from None
    with archive:
        yield archive


@contextmanager
def reading_member(member: ZipInfo, where: str) -> Iterator[None]:
    """Turn whatever the body's reading of `member` raises into a `UserError` about `where`."""
    if member.flag_bits & 0x1:
        raise UserError(f"{where}: is encrypted; make the archive again without a password")
    try:
        yield
    except UserError:
        raise
    except _DAMAGE:
        raise UserError(f"{where}: damaged, or packed in an unsupported way; make or fetch the archive again") from None
    except OSError as error:
        raise unreadable(where, error) from None
