"""Files, written atomically; sizes and times as text."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
CALIBRATION = PROJECT / "outputs/check-gpu/calibration.json"  # written by check_gpu.sh


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the old text or the new one, never half of it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON, atomically."""
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def format_size(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / 2**30:.1f} GiB"


def now() -> str:
    """The time with its zone, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def format_clock(seconds: float) -> str:
    """A duration as h:mm:ss."""
    return str(timedelta(seconds=round(seconds)))
