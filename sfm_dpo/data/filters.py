"""Filters that drop usable pairs on request: rows by script, repeats, contaminated pairs (docs/data.md)."""

import functools
import json
import re
import runpy
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets
from datasets.fingerprint import Hasher

from sfm_dpo.common.errors import UserError, user_input
from sfm_dpo.data.json_rows import COLUMN
from sfm_dpo.data.pairs import drop_rows, read_text
from sfm_dpo.data.sources import explain_cache_errors, is_local, load_rows

# Part of the cache's key. Raise it when a change to this module changes which pairs are contaminated.
CONTAMINATED_VERSION = 1
NGRAM = 13  # words in lower case and without punctuation, as in GPT-3 and Tulu 3
COMMON_ROWS = 10  # an n-gram in more rows of an evaluation set is a stock phrase
# A word, or a single character of the scripts that put no space between words
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")


@functools.cache
def load_keep(script: str) -> Callable[[dict], Any]:
    with user_input(f"filter_script {script}", "write a file with def keep(row): return True"):
        return runpy.run_path(script)["keep"]


def keeps(script: str, row: dict[str, Any]) -> bool:
    keep = load_keep(script)
    with user_input(f"filter_script {script}", f"correct keep(row) for the row {json.dumps(row, default=str)[:300]}"):
        return bool(keep(row))


@explain_cache_errors()
def filter_pairs(
    pairs: Dataset, drop_duplicates: str, drop_contaminated: list[str] | None, num_proc: int | None
) -> tuple[Dataset, list[dict[str, Any]]]:
    """The pairs (preferences.py) without those whose prompt shares NGRAM words in a row with an evaluation set of
    `drop_contaminated`, and without repeats, except the first of each; and the dropped pairs, as in
    Pairs.dropped_rows. Raises UserError for a set that cannot be read."""
    keys = pairs.select_columns(["prompt_key", "pair_key"]).to_pandas()
    reasons = np.full(len(pairs), "", dtype=object)
    if drop_contaminated and len(pairs):
        sets = [load_evaluation_set(name)._fingerprint for name in drop_contaminated]
        shared = pairs.select_columns("prompt").map(
            _share_ngram,
            fn_kwargs={"names": drop_contaminated},
            remove_columns="prompt",
            num_proc=num_proc,
            new_fingerprint=Hasher.hash((pairs._fingerprint, sets, CONTAMINATED_VERSION, NGRAM, COMMON_ROWS)),
            desc="Comparing prompts",
        )
        reasons[np.array(shared["contaminated"][:])] = "contaminated"
    if drop_duplicates != "no":
        left = keys[reasons == ""]
        repeats = left.duplicated("prompt_key" if drop_duplicates == "prompts" else "pair_key")
        reasons[left.index[repeats]] = "duplicate"
    return drop_rows(pairs, reasons)


def _share_ngram(pair: dict[str, Any], names: list[str]) -> dict[str, bool]:
    ngrams = _list_ngrams(read_text(pair["prompt"]))
    return {"contaminated": any(not ngrams.isdisjoint(index_ngrams(name)) for name in names)}


@functools.cache  # of each process
def index_ngrams(name: str) -> set[str]:
    """The n-grams of an evaluation set, except stock phrases."""
    rows = load_evaluation_set(name)
    values = map(json.loads, rows[COLUMN]) if COLUMN in rows.column_names else rows
    counts = Counter(ngram for row in values for ngram in _list_ngrams("\n".join(_list_texts(row))))
    return {ngram for ngram, count in counts.items() if count <= COMMON_ROWS}


def load_evaluation_set(name: str) -> Dataset:
    """A local file or folder, or DATASET[/configuration] on the Hub: its test split or, without one, all of it."""
    path = name
    config = None
    if name.count("/") == 2 and not is_local(name):
        path, _, config = name.rpartition("/")
    try:
        splits = load_rows(path, config, split=None)
    except UserError as error:
        raise UserError(f"drop_contaminated: {error}") from error
    return splits["test"] if "test" in splits else concatenate_datasets(list(splits.values()))


def _list_texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [text for item in value for text in _list_texts(item)] if isinstance(value, list) else []


def _list_ngrams(text: str) -> set[str]:
    words = _WORD.findall(text.lower())
    return {" ".join(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)}
