"""Files outside the program: written whole or not at all, and the user's source files by a name that is the same everywhere."""

from __future__ import annotations

import contextlib
import errno
import functools
import linecache
import os
import re
import stat
import sys
import tempfile
from pathlib import Path

INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages: libraries, not the user's own program."""
MAX_SOURCE_BYTES = 4_000_000
"""Larger files are not read for their lines."""


def is_library(file: str) -> bool:
    """Whether a source file, by its path or its `portable` name, belongs to an installed package."""
    return any(f"/{folder}/" in f"/{file}" for folder in INSTALLED)


def read_limited(path: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of a file, at most `most` and one more.

    Raises:
        OSError: there is none, or it is no file with an end: a folder, a pipe, a device.
    """
    if "\0" in os.fspath(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))  # a pipe waits for no writer
    try:
        if stat.S_ISDIR(mode := os.fstat(handle).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "a pipe or a device, not a file", os.fspath(path))
        with os.fdopen(handle, "rb", closefd=False) as f:
            return f.read(most + 1)
    finally:
        os.close(handle)


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file so that a crash leaves either the old or the new one."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def cell(file: str) -> str:
    """The name "In [2]" for the file that IPython compiles the cell of that number from, "" for any other."""
    shell = IPython.get_ipython() if (IPython := sys.modules.get("IPython")) else None
    kind, name = shell.compile.format_code_name(file) or ("", "") if shell and file else ("", "")
    return name.replace("In[", "In [") if kind == "Cell" else ""


def base_name(file: str) -> str:
    """The last part of a source file's path; "In [2]" for a notebook's cell."""
    return cell(file) or file.replace("\\", "/").rsplit("/", 1)[-1]


def short_place(source: str) -> str:
    """'dir/train.py:41' as 'train.py:41', and a cell's file as 'In [2]:41'."""
    file, colon, line = source.rpartition(":")
    return f"{base_name(file)}:{line}" if colon else base_name(source)


def portable(file: str) -> str:
    """The name of a source file as import knows it, without where it is installed or checked out; "In [2]" for a notebook's cell."""
    return cell(file) or _portable(file)


@functools.lru_cache(maxsize=4096)
def _portable(file: str) -> str:
    """The portable name of a file that is no cell.

    "/home/ada/venv/lib/python3.11/site-packages/flax/nnx/nn/linear.py" is "site-packages/flax/nnx/nn/linear.py"; a file of one's
    own package starts at the outermost folder with an `__init__.py`; a script or "<string>" is its own name.
    """
    parts = re.split(r"[/\\]", file)
    inside = max((n + 1 for n, part in enumerate(parts) if part in INSTALLED), default=0)
    if inside:
        return "/".join((INSTALLED[0], *parts[inside:]))
    keep = 1
    while keep < len(parts) and os.path.isfile(os.path.join(os.sep.join(parts[:-keep]) or os.sep, "__init__.py")):
        keep += 1
    return "/".join(parts[-keep:])


def source_line(file: str, number: int) -> str:
    """A line of a Python source file or of a notebook's cell of this process, or "" where there is none."""
    path = Path(file)
    with contextlib.suppress(OSError, ValueError):
        linecache.checkcache(file)
        if file in linecache.cache or (
            path.suffix == ".py" and path.is_absolute() and path.is_file() and path.stat().st_size <= MAX_SOURCE_BYTES
        ):
            return linecache.getline(file, number).rstrip().expandtabs(4)
    return ""
