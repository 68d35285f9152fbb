"""Contamination: pairs that share long n-grams of words with evaluation sets.

It follows the usual convention (GPT-3, Tulu 3): 13 words in lower case and without punctuation; an n-gram that occurs
in more than COMMON_ROWS rows of a set is a stock phrase and does not count. It finds no paraphrases, no translations,
and no rows of a set with fewer than n words.
"""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets

from sfm_dpo.common.errors import UserError
from sfm_dpo.data.json_rows import COLUMN
from sfm_dpo.data.pairs import PARTS
from sfm_dpo.data.preferences import read_text
from sfm_dpo.data.sources import load_rows

NGRAM = 13
COMMON_ROWS = 10
# A word, or a single character of the scripts that put no space between words
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")


def read_evaluation_texts(name: str) -> list[str]:
    """All text of each row of an evaluation set: a local file or folder, or DATASET[/configuration] on the Hub. If the
    set has a test split, only that is read."""
    path = name
    config = None
    if name.count("/") == 2 and not Path(name).exists():
        path, _, config = name.rpartition("/")
    try:
        splits = load_rows(path, config, split=None)
    except UserError as error:
        reason = str(error).removeprefix(f"dataset_name {path}: ")
        raise UserError(f"--against {name}: {reason}") from error
    rows = splits["test"] if "test" in splits else concatenate_datasets(list(splits.values()))
    values = map(json.loads, rows[COLUMN]) if COLUMN in rows.column_names else rows
    return ["\n".join(_list_texts(row)) for row in values]


def _list_texts(value: Any) -> list[str]:
    """All text in nested lists and mappings."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [text for item in value for text in _list_texts(item)] if isinstance(value, list) else []


def _list_ngrams(text: str, n: int) -> set[str]:
    words = _WORD.findall(text.lower())
    return {" ".join(words[i : i + n]) for i in range(len(words) - n + 1)}


def _index_ngrams(texts: list[str], n: int) -> dict[str, int]:
    """The n-grams of an evaluation set that are not stock phrases, each with the first row that contains it."""
    rows: dict[str, list[int]] = defaultdict(list)
    for row, text in enumerate(texts):
        for gram in _list_ngrams(text, n):
            rows[gram].append(row)
    return {gram: found[0] for gram, found in rows.items() if len(found) <= COMMON_ROWS}


def _find_shared_ngram(pair: dict[str, Any], index: dict[str, int], n: int) -> dict[str, str]:
    grams = set().union(*(_list_ngrams(read_text(pair[part]), n) for part in PARTS))
    return {"ngram": min(grams & index.keys(), default="")}


def report_contamination(pairs: Dataset, names: list[str], n: int, num_proc: int | None = None) -> dict[str, Any]:
    """Counts and examples for each evaluation set (`names`: see `read_evaluation_texts`), and the keys of all `pairs`
    (preferences.py) that share an n-gram with any set."""
    sets = []
    matched: set[int] = set()
    numbers = pairs["row"]  # in `sources`, from 1
    sources = pairs["source"]
    for name in names:
        texts = read_evaluation_texts(name)
        index = _index_ngrams(texts, n)
        known = {"index": index, "n": n}
        found = pairs.select_columns(list(PARTS)).map(
            _find_shared_ngram, fn_kwargs=known, remove_columns=list(PARTS), num_proc=num_proc, keep_in_memory=True
        )["ngram"]
        ngram_of = {row: gram for row, gram in enumerate(found) if gram}
        matched.update(ngram_of)
        examples = [
            {"row": numbers[row], "source": sources[row], "set_row": index[gram] + 1, "text": gram}
            for row, gram in ngram_of.items()
        ]
        set_rows = len({example["set_row"] for example in examples})
        counts = {"set": name, "rows": len(texts), "pairs": len(examples), "set_rows": set_rows}
        sets.append(counts | {"examples": examples[:5]})
    keys = pairs["pair_key"]
    return {
        "ngram": n,
        "sets": sets,
        "pairs": [{"row": numbers[row], "source": sources[row], "key": keys[row]} for row in sorted(matched)],
    }
