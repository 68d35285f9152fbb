"""Contamination: pairs that share long n-grams of words with evaluation sets.

The usual convention (GPT-3, Tulu 3): 13 words in lower case and without punctuation; an n-gram that more than
COMMON_ROWS rows of a set share is a stock phrase and does not count. Paraphrases, translations, and rows of a set with
fewer words than n are not found.
"""

import functools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from datasets import Dataset, concatenate_datasets, load_dataset
from datasets.fingerprint import Hasher

from sfm_dpo.common.errors import UserError
from sfm_dpo.data.preferences import PARTS, read_text
from sfm_dpo.data.sources import LOCAL_FORMATS, explain_cache_errors

# Part of the cache's key. Raise it when _match_batch finds something else.
CONTAMINATION_VERSION = 3

NGRAM = 13
COMMON_ROWS = 10
_NAME = re.compile(r"(.+?)(?:@(\w+))?(?::([^:/]+))?")  # of an evaluation set: path, split, column
# A word, or a single character of the scripts that put no space between words
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")


def read_evaluation_texts(name: str) -> list[str]:
    """The rows of an evaluation set as text.

    Args:
        name: FILE or DATASET[/configuration], with [@split] (default: test, where there is one, otherwise all) and
            [:column] (default: all text).

    Raises:
        UserError: not found, not readable, no such split or column, or no text.
    """
    path, split, column, config = name, None, None, None
    if not Path(name).exists():
        path, split, column = _NAME.fullmatch(name).groups()  # type: ignore[union-attr]
    suffix = Path(path).suffix
    if path.count("/") > 1 and suffix not in LOCAL_FORMATS and not Path(path).exists():
        path, _, config = path.rpartition("/")
    try:
        if suffix in LOCAL_FORMATS:
            rows = load_dataset(LOCAL_FORMATS[suffix], data_files=path, split=split)
        else:
            rows = load_dataset(path, config, split=split)
    except Exception as error:  # of the Hub, of pyarrow, of the builder
        reason = " ".join(str(error.__cause__ or error).split())
        raise UserError(f"--against {name}: cannot be read: {reason[:300]}") from error
    if isinstance(rows, dict):
        rows = rows["test"] if "test" in rows else concatenate_datasets(list(rows.values()))
    if column and column not in rows.column_names:
        raise UserError(f"--against {name}: no column {column}; it has {', '.join(rows.column_names)}")
    texts = ["\n".join(_list_texts(row[column] if column else row)) for row in rows]
    if not any(texts):
        raise UserError(f"--against {name}: holds no text; name a column of {', '.join(rows.column_names)}")
    return texts


def _list_texts(value: Any) -> list[str]:
    """All text in nested lists and mappings."""
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in items for text in _list_texts(item)]


@functools.lru_cache(maxsize=2**20)
def _hash_word(word: str) -> int:
    return xxhash.xxh3_64_intdigest(word.encode("utf-8", "replace"))


def hash_ngrams(text: str, n: int) -> set[int]:
    """Hashes of the n-grams of words of a text, in lower case and without punctuation."""
    words = np.fromiter(map(_hash_word, _WORD.findall(text.lower())), np.uint64)
    size = max(len(words) - n + 1, 0)
    hashes = np.zeros(size, np.uint64)
    for i in range(n):  # a polynomial modulo 2**64
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + words[i : i + size]
    return set(hashes.tolist())


def index_ngrams(texts: list[str], n: int) -> dict[int, int]:
    """The n-grams of an evaluation set that are no stock phrase, and the first row that has each."""
    first: dict[int, int] = {}
    rows: Counter[int] = Counter()
    for row, text in enumerate(texts):
        grams = hash_ngrams(text, n)
        rows.update(grams)
        for gram in grams:
            first.setdefault(gram, row)
    return {gram: row for gram, row in first.items() if rows[gram] <= COMMON_ROWS}


@explain_cache_errors()
def match_pairs(pairs: Dataset, index: dict[int, int], n: int, num_proc: int | None = None) -> dict[str, np.ndarray]:
    """[N] of pairs (preferences.py): `shared` n-grams in common, and a `set_row` that has one of them, or -1."""
    return pairs.map(
        _match_batch,
        batched=True,
        batch_size=200,
        fn_kwargs={"index": index, "n": n},
        remove_columns=pairs.column_names,
        num_proc=num_proc,
        new_fingerprint=Hasher.hash((pairs._fingerprint, index, n, CONTAMINATION_VERSION)),
        desc="Matching",
    ).with_format("numpy")[:]


def _match_batch(batch: dict[str, list], index: dict[int, int], n: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {"shared": [], "set_row": []}
    for sides in zip(*(batch[name] for name in PARTS), strict=True):
        grams: set[int] = set()
        for side in sides:
            grams |= hash_ngrams(read_text(side), n)
        common = grams & index.keys()
        found["shared"].append(len(common))
        found["set_row"].append(min((index[gram] for gram in common), default=-1))
    return found


def report_contamination(
    pairs: Dataset, names: list[str], n: int, num_proc: int | None = None, examples: int = 5
) -> dict[str, Any]:
    """Counts and worst examples of each evaluation set, and the keys of all pairs that share an n-gram with any.

    Args:
        names: of evaluation sets, as in `read_evaluation_texts`.

    Raises:
        UserError: as `read_evaluation_texts`.
    """
    sets = []
    matched: set[int] = set()
    for name in names:
        texts = read_evaluation_texts(name)
        found = match_pairs(pairs, index_ngrams(texts, n), n, num_proc)
        shared, set_rows = found["shared"], found["set_row"]
        rows = np.flatnonzero(shared)
        matched.update(rows.tolist())
        worst = rows[np.argsort(-shared[rows], kind="stable")][:examples].tolist()
        counts = {"rows": len(texts), "short": sum(not hash_ngrams(text, n) for text in texts), "pairs": len(rows)}
        sets.append(
            {"set": name, **counts, "set_rows": len(np.unique(set_rows[rows]))}
            | {"examples": [_show_match(pairs, row, int(set_rows[row]), texts, n) for row in worst]}
        )
    keys = pairs["pair_key"]
    return {"ngram": n, "sets": sets, "pairs": [{"row": row, "key": keys[row]} for row in sorted(matched)]}


def _show_match(pairs: Dataset, row: int, set_row: int, texts: list[str], n: int) -> dict[str, Any]:
    """The beginnings of the side of a pair, and of the row of an evaluation set, that share an n-gram."""
    grams = hash_ngrams(texts[set_row], n)
    sides = {side: read_text(pairs[row][side]) for side in PARTS}
    side = next(side for side, text in sides.items() if grams & hash_ngrams(text, n))
    return {"row": row, "side": side, "text": sides[side][:600], "set_row": set_row, "set_text": texts[set_row][:600]}
