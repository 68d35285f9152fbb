"""Contamination: pairs that share long n-grams of words with evaluation sets.

The usual convention (GPT-3, Tulu 3): 13 words in lower case and without punctuation; an n-gram that more than
COMMON_ROWS rows of a set share is a stock phrase and does not count. Paraphrases, translations, and rows of a set with
fewer words than n are not found.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets, load_dataset
from datasets.fingerprint import Hasher

from sfm_dpo.common.errors import UserError
from sfm_dpo.data.faults import read_sides
from sfm_dpo.data.filters import PARTS, hash_ngrams, hash_words, read_texts
from sfm_dpo.data.sources import LOCAL_FORMATS, room_in_cache

# Part of the cache's key. Raise it when _match_batch finds something else.
CONTAMINATION_VERSION = 2

NGRAM = 13
COMMON_ROWS = 10
_NAME = re.compile(r"(.+?)(?:@(\w+))?(?::([^:/]+))?")  # of an evaluation set: path, split, column


def read_evaluation_texts(name: str) -> list[str]:
    """The rows of an evaluation set as text.

    Args:
        name: FILE or DATASET[/configuration], with [@split] (default: test, where there is one, otherwise all) and
            [:column] (default: all text).

    Raises:
        UserError: not found, not readable, no such split or column, or no text.
    """
    path, split, column = (name, None, None) if Path(name).exists() else _NAME.fullmatch(name).groups()  # type: ignore[union-attr]
    suffix, config = Path(path).suffix, None
    if path.count("/") > 1 and suffix not in LOCAL_FORMATS and not Path(path).exists():
        path, _, config = path.rpartition("/")
    try:
        local = suffix in LOCAL_FORMATS
        sets = load_dataset(LOCAL_FORMATS[suffix], data_files=path) if local else load_dataset(path, config)
    except Exception as error:  # of the Hub, of pyarrow, of the builder
        reason = " ".join(str(error.__cause__ or error).split())
        raise UserError(f"--against {name}: cannot be read: {reason[:300]}") from error
    if split and split not in sets:
        raise UserError(f"--against {name}: no split {split}; it has {', '.join(sets)}")
    split = split or ("test" if "test" in sets else None)
    rows = sets[split] if split else concatenate_datasets(list(sets.values()))
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


def index_ngrams(texts: list[str], n: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorted hashes of the n-grams of an evaluation set that are no stock phrase, and the first row with each."""
    grams, rows = hash_ngrams([hash_words(text) for text in texts], n)
    order = np.lexsort((rows, grams))
    grams, rows = grams[order], rows[order]
    fresh = (np.diff(grams, prepend=~grams[:1]) != 0) | (np.diff(rows, prepend=-1) != 0)  # once a row
    unique, first, counts = np.unique(grams[fresh], return_index=True, return_counts=True)
    return unique[counts <= COMMON_ROWS], rows[fresh][first][counts <= COMMON_ROWS]


@room_in_cache()
def match_pairs(
    pairs: Dataset, indexes: list[np.ndarray], n: int, num_proc: int | None = None
) -> dict[str, np.ndarray]:
    """For each pair (preferences.py) and set: `shared` [N, sets] n-grams in common, and of the first one its `gram`,
    the position in the set's index, and `part`, 0 to 2 for prompt, chosen, rejected."""
    return pairs.map(
        _match_batch,
        batched=True,
        batch_size=200,
        fn_kwargs={"indexes": indexes, "n": n},
        remove_columns=pairs.column_names,
        num_proc=num_proc,
        new_fingerprint=Hasher.hash((pairs._fingerprint, indexes, n, CONTAMINATION_VERSION)),
        desc="Matching",
    ).with_format("numpy")[:]


def _match_batch(batch: dict[str, list], indexes: list[np.ndarray], n: int) -> dict[str, np.ndarray]:
    size = len(batch["prompt"])
    grams, owners = hash_ngrams([hash_words(text) for text in read_texts(batch)], n)
    shared, gram, part = (np.zeros((size, len(indexes)), int) for _ in range(3))
    for i, index in enumerate(indexes):
        at = np.searchsorted(index, grams)
        hits = np.append(index, np.uint64(0))[at] == grams
        texts, at = np.divmod(np.unique(owners[hits] * (len(index) + 1) + at[hits]), len(index) + 1)  # once a text
        pairs, first = np.unique(texts % size, return_index=True)
        shared[:, i] = np.bincount(texts % size, minlength=size)
        gram[pairs, i], part[pairs, i] = at[first], texts[first] // size
    return {"shared": shared, "gram": gram, "part": part}


def report_contamination(
    pairs: Dataset, keys: np.ndarray, names: list[str], n: int, num_proc: int | None = None, examples: int = 5
) -> dict[str, Any]:
    """Shares and worst examples of each evaluation set, and all pairs that share an n-gram with any of them.

    Args:
        keys: [N] pair keys (filters.measure_texts), by which `drop_contaminated` knows the pairs.
        names: of evaluation sets, as in `read_evaluation_texts`.

    Raises:
        UserError: as `read_evaluation_texts`.
    """
    texts = [read_evaluation_texts(name) for name in names]
    indexes = [index_ngrams(rows, n) for rows in texts]
    found = match_pairs(pairs, [index for index, _ in indexes], n, num_proc)
    sets = []
    for i, (name, rows, (_, owners)) in enumerate(zip(names, texts, indexes, strict=True)):
        shared = found["shared"][:, i]
        hit = np.flatnonzero(shared)
        worst = []
        for row in hit[np.argsort(-shared[hit], kind="stable")][:examples].tolist():
            part, owner = int(found["part"][row, i]), int(owners[found["gram"][row, i]])
            sides = read_sides(pairs[row])
            worst.append(
                {"row": row, "side": PARTS[part], "shared": int(shared[row]), "text": sides[part][:600]}
                | {"set_row": owner, "set_text": rows[owner][:600]}
            )
        sets.append(
            {"set": name, "rows": len(rows), "short": sum(len(hash_words(text)) < n for text in rows)}
            | {"pairs": len(hit), "set_rows": len(np.unique(owners[found["gram"][hit, i]])), "examples": worst}
        )
    listed = [
        {"row": row, "key": f"{int(keys[row]) % 2**64:016x}"}
        for row in np.flatnonzero(found["shared"].any(axis=1)).tolist()
    ]
    return {"ngram": n, "sets": sets, "pairs": listed}
