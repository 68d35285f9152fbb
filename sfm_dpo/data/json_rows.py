"""A `datasets` builder for JSON files that keeps each row as it is in the file, in one column of JSON text.

The library's own builder infers one type per field from all rows, which may change text among values of other types.
"""

import json
from collections.abc import Iterator

import pyarrow as pa
from datasets import DatasetInfo, Features, Value
from datasets.builder import Key
from datasets.packaged_modules.json.json import Json

from sfm_dpo.common.errors import UserError

VERSION = "sfm-json-rows-1"  # part of the cache's key: raise it with any change of this module that changes a row
COLUMN = "json_row"


class JsonRows(Json):
    def _info(self) -> DatasetInfo:
        return DatasetInfo(features=Features({COLUMN: Value("string")}))

    def _generate_tables(self, base_files, files_iterables, original_files) -> Iterator[tuple[Key, pa.Table]]:
        for shard, files in enumerate(files_iterables):
            chunks = (chunk for file in files for chunk in read_rows(file, original_files[shard]))
            for number, chunk in enumerate(chunks):
                yield Key(shard, number), pa.table({COLUMN: chunk})


def read_rows(file: str, name: str) -> Iterator[list[str]]:
    """The rows of a file (one object per line, or a list of objects) as JSON text, in lists of about 10 MiB.

    Raises UserError with the file's `name` and the line that is not UTF-8, not JSON, or not an object."""
    rows: list[str] = []
    size = 0
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
                    raise ValueError("not a JSON object; write each row as {...}")
            except (ValueError, RecursionError) as error:
                where = "" if is_list else f"line {number}: "
                raise UserError(f"dataset_name {name}: {where}{error}") from error
            rows += map(json.dumps, objects) if is_list else [text]
            size += len(line)
            if size > 10 * 2**20:
                yield rows
                rows = []
                size = 0
    if rows:
        yield rows
