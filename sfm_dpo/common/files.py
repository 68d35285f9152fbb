"""TODO."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # scripts/status.py reads this module without the seconds that TRL takes to import
    pass

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # scripts/status.py reads this module without the seconds that TRL takes to import
    pass


def now() -> str:
    """The time with its zone, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the old text or the new one, never half of it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)
