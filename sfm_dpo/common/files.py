"""Atomic file writes, and times and tables as text."""

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

import xxhash

PROJECT = Path(__file__).resolve().parents[2]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error of reading or writing names the file, as one of opening it does."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_atomically(path: Path, content: str | bytes, durable: bool = True) -> None:
    """Writes the file so that a reader sees the old or the new content, never part of it; if `durable`,
    even after a power cut, which takes long on a shared file system."""
    partial = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.partial")  # others may write it, too
    try:
        with naming(path), partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                sync(file)
        partial.replace(path)
    except BaseException:  # for instance a full disk
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def sync(file: IO) -> None:
    """Flushes an open file to disk: without this a renamed file may be empty after a power cut."""
    file.flush()
    os.fsync(file.fileno())


def follow_umask(path: Path) -> None:
    """Gives a file the permissions that `open` gives a new one."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def write_json(path: Path, value: Any, durable: bool = True) -> None:
    write_atomically(path, json.dumps(value, indent=2) + "\n", durable)


def write_lines(path: Path, rows: Iterable[Any]) -> None:
    """Writes the rows as JSON lines."""
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def hash_file(path: Path) -> str:
    with naming(path), path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def now() -> str:
    """The current UTC time in ISO format, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def format_clock(seconds: float) -> str:
    """A duration as h:mm:ss."""
    return str(timedelta(seconds=round(seconds)))


def format_table(
    rows: Iterable[Sequence[object]], headings: Sequence[str] = (), align: str = "l", indent: int = 2
) -> str:
    """The rows as lines of text. `align`: l or r for each column; the last letter applies to all further columns."""
    table = [[str(cell) for cell in row] for row in rows]
    if headings:
        table.insert(0, list(headings))
    columns = []
    for i, column in enumerate(zip_longest(*table, fillvalue="")):
        width = max(map(len, column))
        is_right = align[min(i, len(align) - 1)] == "r"
        columns.append([cell.rjust(width) if is_right else cell.ljust(width) for cell in column])
    return "\n".join((" " * indent + "  ".join(cells)).rstrip() for cells in zip(*columns, strict=True))
