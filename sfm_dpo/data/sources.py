"""Rows of preference data as they are stored: on the Hub, in JSON and Parquet files, in folders of `save_to_disk`."""

import glob
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pyarrow as pa
from datasets import Dataset, DownloadManager, Features, SplitGenerator, Value, load_dataset, load_from_disk
from datasets.builder import Key
from datasets.data_files import FILES_TO_IGNORE, DataFilesDict, get_data_patterns
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
from datasets.packaged_modules.json.json import Json
from huggingface_hub.utils import chunk_iterable
from trl.scripts.utils import DatasetConfig

from sfm_dpo.common.errors import DISK_REMEDIES, RunEnd, UserError, user_input

JSON_VERSION = "sfm-json-rows-1"  # names the cache: raise it with any change of this module that changes a row
JSON_COLUMN = "json_row"  # a row of a JSON file, as text
LOCAL_FORMATS = {".json": "json", ".jsonl": "json", ".gz": "json", ".parquet": "parquet"}


@contextmanager
def explain_cache_errors(folder: Path | None = None, end: type[RunEnd] = UserError) -> Iterator[None]:
    """For code that writes into HF_HOME, by default into the cache of `datasets`: a full disk or a folder without
    write permission raises `end`."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error  # datasets wraps what its writer, or read_rows, raised
        while cause and not isinstance(cause, RunEnd) and getattr(cause, "errno", None) not in DISK_REMEDIES:
            cause = cause.__cause__
        if isinstance(cause, RunEnd):
            raise cause from cause.__cause__
        if not isinstance(cause, OSError):
            raise
        path = cause.filename or folder or datasets.config.HF_DATASETS_CACHE
        remedy = f"{DISK_REMEDIES[cause.errno or 0]}, or set HF_HOME (in .env) to another folder"
        raise end(f"HF_HOME: {path}: {cause.strerror}; {remedy}") from error


def load_rows(entry: DatasetConfig) -> Dataset:
    """All rows and columns of a split, from a local .json/.jsonl/.parquet file, a folder of such files or of
    `save_to_disk`, or a Hub id; an entry's `name` may be a subfolder. Raises UserError for what cannot be read."""
    path = entry.path
    local = Path(path).expanduser()
    if os.path.exists(local):  # Path.exists would raise in a folder without permission
        if given := entry.data_dir or entry.data_files:
            raise UserError(f"dataset_name {path}: a local file or folder has no {given}; remove it")
        with user_input(f"dataset_name {path}: cannot be read", "check dataset_config, and that this split has rows"):
            return _load_local(local, entry.split, entry.name)
    if local.suffix in LOCAL_FORMATS or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise UserError(f"dataset_name {path}: no such file or folder; check the path")
    offline = "if this machine has no network, run scripts/prefetch.py on one that has"
    remedy = f"{offline}; a gated or private dataset needs HF_TOKEN"
    with user_input(f"dataset_name {path}: not a local file, and not loaded from the Hub", remedy):
        return _load_any(path, entry.name, split=entry.split, data_dir=entry.data_dir, data_files=entry.data_files)


def column_names(rows: Dataset) -> list[str]:
    """The columns; for rows of JSON files, those of about 100 rows."""
    if JSON_COLUMN not in rows.column_names:
        return rows.column_names
    some = rows.select(range(0, len(rows), max(1, len(rows) // 100)))
    return list(dict.fromkeys(name for row in some[JSON_COLUMN] for name in json.loads(row)))


@explain_cache_errors()
def _load_any(*args: Any, **options: Any) -> Any:
    """`load_dataset` of `datasets`, with JsonRows as the reader of JSON files."""
    # Upstream: datasets 5.2, utils/json.py, json_encode_field: writes all values of a field as JSON except text that
    # is valid JSON, which is then read as a value. Canary: test_canary_datasets_json
    # `datasets` would store these rows, and find its own, under a key of the files alone
    cache = os.path.join(datasets.config.HF_DATASETS_CACHE, JSON_VERSION)
    with mock.patch.dict(_PACKAGED_DATASETS_MODULES, json=(__name__, JSON_VERSION)):
        try:
            return load_dataset(*args, cache_dir=cache, **options)
        except datasets.exceptions.DatasetGenerationError as error:  # it does not say what is wrong
            raise error.__cause__ or error from None


def _load_local(path: Path, split: str, name: str | None) -> Dataset:
    readme = path / "README.md"
    has_configs = readme.is_file() and "\nconfigs:" in readme.read_text()  # which choose the files themselves
    if name and not has_configs:
        if not (path / name).is_dir():
            raise UserError(f"dataset_config {name}: is neither in the README.md nor a folder of {path}; remove it")
        return _load_local(path / name, split, None)
    if any((path / file).is_file() for file in ("state.json", "dataset_dict.json")):
        with user_input(f"dataset_name {path}: cannot be read", f"check that it is complete and has a split {split}"):
            saved = load_from_disk(path)
            splits = saved if isinstance(saved, dict) else {"train": saved}
            return splits[split]
    if has_configs:
        return _load_any(str(path.resolve()), name, split=split)
    files = [path]
    if path.is_dir():
        visible = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
        data = (p for p in visible if p.suffix in LOCAL_FORMATS and p.name not in FILES_TO_IGNORE)
        files = sorted(p for p in data if p.is_file())
    formats = {LOCAL_FORMATS.get(p.suffix) for p in files}
    if len(formats) != 1 or None in formats:
        found = ", ".join(sorted({p.suffix for p in files})) or "none"
        raise UserError(f"dataset_name {path}: give .json, .jsonl or .parquet files of one format; found {found}")
    for file in files:
        if not os.access(file, os.R_OK):
            raise UserError(f"dataset_name {file}: cannot be read; check its permissions")
    if not any(file.stat().st_size for file in files):
        raise UserError(f"dataset_name {path}: is empty; give a file with rows")
    if path.is_dir():
        _check_splits(path, files)
        return _load_any(str(path.resolve()), split=split)
    name = glob.escape(str(path.absolute()))  # datasets would read [ ] ? * as a pattern
    return _load_any(formats.pop(), data_files=[name], split=split)


def _check_splits(folder: Path, files: list[Path]) -> None:
    """Raises UserError for a file that `datasets` would leave out: if the name of one file tells a split, files whose
    names tell none are in no split. Also for a split with files in several folders, which `datasets` would mix."""
    place = str(folder.resolve())
    splits = DataFilesDict.from_patterns(get_data_patterns(place), base_path=place)
    used = {Path(file).resolve() for names in splits.values() for file in names}
    if unused := [file for file in files if file.resolve() not in used]:
        found = f"is in none of the splits that the names of the files tell ({', '.join(map(str, splits))})"
        raise UserError(f"dataset_name {unused[0]}: {found}; rename the files, or give each on its own")
    for names in splits.values():
        folders = sorted({str(Path(file).parent.relative_to(place)) for file in names})
        if len(folders) > 1 and "." not in folders:
            found = f"its rows are in several folders ({', '.join(folders)})"
            raise UserError(f"dataset_name {folder}: {found}; set dataset_config to one, or list them in datasets")


class JsonRows(Json):
    def _split_generators(self, dl_manager: DownloadManager) -> list[SplitGenerator]:
        self.info.features = Features({JSON_COLUMN: Value("string")})  # whatever columns a README.md tells
        return super()._split_generators(dl_manager)

    def _generate_tables(self, base_files, files_iterables, original_files) -> Iterator[tuple[Key, pa.Table]]:
        for shard, files in enumerate(files_iterables):
            rows = (row for file in files for row in read_rows(file, original_files[shard]))
            for number, chunk in enumerate(chunk_iterable(rows, 100)):
                yield Key(shard, number), pa.table({JSON_COLUMN: list(chunk)})


def read_rows(file: str, name: str) -> Iterator[str]:
    """The rows of a file (one object per line, or a list of objects) as JSON text. Raises UserError with the file's
    `name` and the line that is not UTF-8, not JSON, or not an object."""
    with open(file, "rb") as stream:
        is_list = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
        stream.seek(0)
        for number, line in enumerate([stream.read()] if is_list else stream, 1):
            if not line.strip():
                continue
            try:
                text = line.decode("utf-8-sig").rstrip()
                value = json.loads(text)
                objects = value if is_list else [value]
                if b"\\ud" in line or b"\\uD" in line:
                    json.dumps(objects, ensure_ascii=False).encode()  # fails for half of a surrogate pair
                if not all(isinstance(row, dict) for row in objects):
                    raise ValueError("not a JSON object")
            except (ValueError, RecursionError) as error:
                where = "" if is_list else f"line {number}: "
                remedy = "write a list of {...}" if is_list else "write each row as {...} on a line of its own"
                raise UserError(f"dataset_name {name}: {where}{error}; {remedy}") from error
            yield from map(json.dumps, objects) if is_list else [text]
