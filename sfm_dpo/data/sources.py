"""Rows of preference data as they are stored: from a dataset on the Hub, or from local JSON and Parquet files."""

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import numpy as np
from datasets import Dataset, load_dataset
from datasets.config import HF_CACHE_HOME
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

from sfm_dpo.common.errors import UserError
from sfm_dpo.data import json_rows

LOCAL_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


@contextmanager
def explain_cache_errors(folder: Path | None = None, end: type[UserError] = UserError) -> Iterator[None]:
    """Around what writes into HF_HOME: by default to the cache of `datasets`.

    What is new there is the group's as well, where the folder is (g+ws): a umask of 077 would shut out the others.

    Raises:
        end: the disk is full, or the quota used up; or the folder, or a file in it, is not ours to write.
    """
    folder = folder or Path(datasets.config.HF_DATASETS_CACHE).expanduser()
    mode = _nearest(folder).stat().st_mode
    umask = os.umask(0o077)
    os.umask(umask & ~0o070 if mode & stat.S_ISGID and mode & stat.S_IWGRP else umask)
    try:
        yield
    except Exception as error:
        cause: BaseException = error  # datasets wraps what its writer raised, and _load_local once more
        while cause.__cause__ is not None:
            cause = cause.__cause__
        number = getattr(cause, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT) or "Not enough disk space" in str(error):  # datasets' own look
            remedy = "free some, or set HF_HOME (in .env) to a folder on another disk"
            raise end(f"HF_HOME: no space is left in {folder}; {remedy}") from error
        path = Path(getattr(cause, "filename", None) or folder)
        ours = path.is_relative_to(Path(HF_CACHE_HOME).expanduser()) or path.is_relative_to(folder)
        if number in (errno.EACCES, errno.EPERM, errno.EROFS) and (ours or folder.is_relative_to(path)):
            path = _nearest(path)
            owner, mode = f"uid {path.stat().st_uid}", path.stat().st_mode & 0o7777
            with suppress(KeyError):  # a user whom this machine does not know
                owner = path.owner()
            raise end(
                f"HF_HOME: {path} cannot be written (owner {owner}, mode {mode:o}); set HF_HOME (in .env) to a folder "
                f"of your own, or ask {owner} to share it: chmod -R g+rwX and docs/slurm.md"
            ) from error
        raise
    finally:
        os.umask(umask)


def _nearest(path: Path) -> Path:
    """The path, or the first folder above it that is there, as far as we may see."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if os.path.exists(p))


@explain_cache_errors()
def load_rows(
    path: str, name: str | None = None, split: str = "train", data_dir: str | None = None, data_files: Any = None
) -> Dataset:
    """All rows and columns of a split, from a Hub id, or a local .json/.jsonl/.parquet file or folder of such files.

    Args:
        name, data_dir, data_files: as in `datasets.load_dataset`, for Hub ids alone.

    Raises:
        UserError: not found, not readable, damaged, or empty.
    """
    local = Path(path).expanduser()
    if os.path.exists(local):  # not Path.exists, which raises in a folder that may not be entered
        for option, value in {"name": name, "data_dir": data_dir, "data_files": data_files}.items():
            if value:
                raise UserError(f"dataset_name {path}: {option} {value} is for the Hub; remove it")
        rows = _load_local(local, split)
    elif local.suffix in LOCAL_FORMATS or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise UserError(f"dataset_name {path}: no such file or folder")
    else:
        rows = _load_hub(path, name, split=split, data_dir=data_dir, data_files=data_files)
    return rows


def column_names(rows: Dataset) -> list[str]:
    """The columns; of JSON rows (json_rows.py) those of the first 100."""
    if json_rows.COLUMN not in rows.column_names:
        return rows.column_names
    return list(dict.fromkeys(name for row in rows[:100][json_rows.COLUMN] for name in json.loads(row)))


def drop_rows(rows: Dataset, reasons: np.ndarray) -> tuple[Dataset, list[dict[str, Any]]]:
    """The rows (with columns row and source) whose [N] `reasons` are empty, and `row`, `source` and `reason` of the
    others."""
    others = np.flatnonzero(reasons != "")
    if not len(others):
        return rows, []
    columns = rows.select_columns(["row", "source"]).select(others)[:] | {"reason": reasons[others].tolist()}
    dropped = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return rows.select(np.flatnonzero(reasons == "")), dropped


def _load(*args: Any, **options: Any) -> Dataset:
    """datasets' `load_dataset`, whose JSON files are read by json_rows.py."""
    # Upstream: datasets 5.2, utils/json.py, json_encode_field: leaves text that could be JSON as it is where it writes
    # all other values of a field as JSON, so that it is read as a value. Canary: test_canary_datasets_json
    with mock.patch.dict(_PACKAGED_DATASETS_MODULES, json=(json_rows.__name__, json_rows.VERSION)):
        try:
            return load_dataset(*args, **options)
        except DatasetGenerationError as error:
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from None
            raise


def _load_local(path: Path, split: str) -> Dataset:
    _check_readable(path)
    files = [path]
    if path.is_dir():
        visible = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
        files = sorted(p for p in visible if p.suffix in LOCAL_FORMATS and p.is_file())
    formats = {LOCAL_FORMATS.get(p.suffix) for p in files}
    if len(formats) != 1 or None in formats:
        found = ", ".join(sorted({p.suffix for p in files})) or "none"
        raise UserError(f"dataset_name {path}: needs .json, .jsonl or .parquet files of one format; found {found}")
    for file in files:
        _check_readable(file)
        with file.open("rb") as stream:
            start = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        if not start:
            raise UserError(f"dataset_name {file}: the file is empty")
    try:
        if path.is_dir():  # its files may be of several splits, told by their names, as in a copy of a Hub dataset
            return _load(str(path), split=split)
        return _load(formats.pop(), data_files=[str(path)], split=split)
    except Exception as error:  # of pyarrow, of the builder, of the card of a copied dataset
        if isinstance(error, UserError):
            raise
        if "corresponds to no data" in str(error):  # a plain ValueError
            raise UserError(f"dataset_name {path}: holds no rows") from error
        raise UserError(f"dataset_name {path}: cannot be read: {error.__cause__ or error}") from error


def _check_readable(path: Path) -> None:
    if not os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK):
        raise UserError(f"dataset_name {path}: cannot be read; check its permissions")


def _load_hub(path: str, name: str | None, **options: Any) -> Dataset:
    try:
        return _load(path, name, **options)
    except DatasetNotFoundError as error:
        raise UserError(
            f"dataset_name {path}: neither a local file nor found on the Hub (a gated or private one needs HF_TOKEN)"
        ) from error
    except OSError as error:  # also the Hub client's errors
        raise UserError(
            f"dataset_name {path}: the Hub cannot be reached and no copy is in the cache; run scripts/prefetch.py "
            "where there is a network, or give a local file"
        ) from error
    except ValueError as error:  # unknown split or configuration; the message lists the known ones
        raise UserError(f"dataset_name {path}: {error}") from error
