"""Where do the rows come from? A Hub dataset, or a local file or folder, as they are."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub.errors import HfHubHTTPError

from sfm_dpo.common.errors import UserError

LOCAL_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def cache_is_full(error: BaseException) -> UserError | None:
    """What to say if this is the error of a full disk: datasets checks in one place, the OS elsewhere."""
    if not re.search(
        "No space left|Not enough disk space|quota exceeded", f"{error} {error.__cause__}", re.IGNORECASE
    ):
        return None
    folder = datasets.config.HF_DATASETS_CACHE
    remedy = "free some, or set HF_HOME (in .env) to a folder on another disk"
    return UserError(f"HF_HOME: no space is left in {folder} for the tokens of the pairs; {remedy}")


@contextmanager
def room_in_cache() -> Iterator[None]:
    """Around what writes into the cache: a full disk is one line."""
    try:
        yield
    except OSError as error:
        if full := cache_is_full(error):
            raise full from error
        raise


def load_rows(
    path: str, name: str | None = None, split: str = "train", data_dir: str | None = None, data_files: Any = None
) -> Dataset:
    """Rows as they are: from a Hub id, or a local .json/.jsonl/.parquet file or folder of such files."""
    local = Path(path).expanduser()
    if os.path.exists(local):  # not Path.exists, which raises in a folder that may not be entered
        for option, value in {"name": name, "data_dir": data_dir, "data_files": data_files}.items():
            if value:
                raise UserError(
                    f"dataset_name {path}: {option} {value} is for the Hub; give the file or folder itself"
                )
        rows = _load_local(local, split)
    elif local.suffix in LOCAL_FORMATS or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise UserError(f"dataset_name {path}: no such file or folder")
    else:
        rows = _load_hub(path, name, split, data_dir, data_files)
    missing = {"chosen", "rejected"} - set(rows.column_names)
    if missing:
        raise UserError(
            f"dataset_name {path}: no column {' or '.join(sorted(missing))}; it has {', '.join(rows.column_names)}"
        )
    return rows


def _load_local(path: Path, split: str) -> Dataset:
    files = [path]
    if path.is_dir():
        if not os.access(path, os.R_OK | os.X_OK):
            raise UserError(f"dataset_name {path}: cannot be read; check its permissions")
        visible = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
        files = sorted(p for p in visible if p.suffix in LOCAL_FORMATS and p.is_file())
    formats = {LOCAL_FORMATS.get(p.suffix) for p in files}
    if len(formats) != 1 or None in formats:
        found = "none" if not files else f"files of {len(formats)} formats" if len(formats) > 1 else path.suffix
        raise UserError(f"dataset_name {path}: needs .json, .jsonl or .parquet files of one format; found {found}")
    for file in files:
        if not os.access(file, os.R_OK):
            raise UserError(f"dataset_name {file}: cannot be read; check its permissions")
        if file.stat().st_size == 0 or (file.stat().st_size < 64 and not file.read_bytes().strip()):
            raise UserError(f"dataset_name {file}: the file is empty")
        if LOCAL_FORMATS[file.suffix] == "json":
            with file.open(encoding="utf-8-sig", errors="replace") as text:
                if not text.read(4096).lstrip().startswith(("{", "[")):  # pyarrow 26 dies of a lone null
                    raise UserError(f"dataset_name {file}: line 1 is not a JSON object, or the file not UTF-8")
    try:
        if path.is_dir():  # its files may be of several splits, told by their names, as in a copy of a Hub dataset
            return load_dataset(str(path), split=split)
        return load_dataset(formats.pop(), data_files=[str(path)], split=split)
    except Exception as error:  # datasets wraps whatever the reader raised
        for file in files:
            _point_at_bad_line(file)
        if full := cache_is_full(error):
            raise full from error
        if "corresponds to no data" in str(error):
            raise UserError(f"dataset_name {path}: holds no rows") from error
        raise UserError(f"dataset_name {path}: cannot be read: {error.__cause__ or error}") from error


def _point_at_bad_line(file: Path) -> None:
    """pyarrow counts rows within a block; a user needs the line of the file."""
    if LOCAL_FORMATS[file.suffix] != "json":
        return
    with file.open(encoding="utf-8", errors="replace") as text:
        if text.read(4096).lstrip().startswith("["):  # one array, not a row a line
            try:
                json.loads(file.read_text(encoding="utf-8", errors="replace"))
            except json.JSONDecodeError as error:
                raise UserError(f"dataset_name {file}: line {error.lineno} is not valid JSON: {error.msg}") from error
            return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"dataset_name {file}: line {number} is not valid JSON: {error.msg}") from error
            if not isinstance(row, dict):
                raise UserError(f"dataset_name {file}: line {number} is not a JSON object")
            if re.search("[\ud800-\udfff]", json.dumps(row, ensure_ascii=False)):
                raise UserError(
                    f"dataset_name {file}: line {number} holds half of a surrogate pair (\\ud800 to \\udfff)"
                )


def _load_hub(path: str, name: str | None, split: str, data_dir: str | None, data_files: Any) -> Dataset:
    try:
        return load_dataset(path, name, split=split, data_dir=data_dir, data_files=data_files)
    except DatasetNotFoundError as error:
        raise UserError(
            f"dataset_name {path}: neither a local file nor found on the Hub (a gated or private one needs HF_TOKEN)"
        ) from error
    except (ConnectionError, HfHubHTTPError, OSError) as error:
        raise cache_is_full(error) or UserError(
            f"dataset_name {path}: the Hub cannot be reached and no copy is in the cache; run scripts/prefetch.py "
            "where there is a network, or give a local file"
        ) from error
    except ValueError as error:  # unknown split or configuration; the message lists the known ones
        raise UserError(f"dataset_name {path}: {error}") from error
