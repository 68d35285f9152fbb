"""Filters that leave out usable pairs on request: rows by value or script, repeats, near repeats, lengths.

Each filter is a field of TrainConfig, off by default, after which the functions' keyword arguments are named; what it
leaves out is counted by reason. Which pairs are left does not depend on the number of processes: each pair is measured
alone, and of pairs that repeat each other the first stays. docs/filters.md shows what each finds and misses.
"""

import functools
import json
import re
import runpy
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from datasets import Dataset
from datasets.fingerprint import Hasher
from datasketch import MinHash, MinHashLSH

from sfm_dpo.common.errors import UserError
from sfm_dpo.data.sources import list_dropped, room_in_cache

# Part of the cache's keys. Raise it when measure_texts or judge_texts gives something else.
FILTERS_VERSION = 3

FILTER_REASONS = {
    "value": "value of a column is not in keep_values",
    "script": "filter_script does not keep it",
    "contaminated": "listed in drop_contaminated",
    "responses_alike": "responses more alike than max_response_similarity",
    "duplicate": "repeats an earlier one (drop_duplicates)",
    "near_duplicate": "nearly repeats an earlier one (duplicate_threshold)",
    "prompt_limit": "prompt has max_pairs_per_prompt earlier pairs",
    "response_short": "a response has fewer than min_response_tokens",
    "response_long": "a response has more than max_response_tokens",
    "length_ratio": "responses differ in length by more than max_length_ratio",
}

SHINGLE = 5  # words; usual for near duplicates of web text
NUM_PERM = 128  # MinHash values: the similarity is known within 0.04 (standard error at 0.8: 0.035)
SKETCH = 256  # smallest shingles that stand for a text: a long one costs no more than a page
PARTS = ("prompt", "chosen", "rejected")
# A word, or a single character of the scripts that put no space between words
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")
_SPACES = "".join(chr(i) if chr(i).isalnum() else " " for i in range(128))
_PERMUTATIONS = MinHash(num_perm=NUM_PERM).permutations


# ---- rows as they are stored


def row_rules(keep_values: str | None, filter_script: str | None) -> dict[str, Any]:
    """What `judge_row` needs, and `key`, which changes with it; empty where neither field is set.

    Raises:
        UserError: keep_values is no mapping of columns to lists, or the script has no function keep(row).
    """
    if not keep_values and not filter_script:
        return {}
    try:
        values = json.loads(keep_values or "{}")
        values = {column: [v] if not isinstance(v, list) else v for column, v in values.items()}
    except (ValueError, AttributeError) as error:
        raise UserError(
            f"keep_values {keep_values}: must be a mapping of columns to the values that are kept, such as "
            "{language: [English, German]}"
        ) from error
    source = ""
    if filter_script:
        load_keep(filter_script)
        source = Path(filter_script).read_text()
    return {"values": values, "script": filter_script, "key": Hasher.hash((values, source))}


@functools.cache
def load_keep(script: str) -> Callable[[dict], Any]:
    """The function keep(row) of a Python file.

    Raises:
        UserError: no such file, it fails, or has no such function.
    """
    try:
        return runpy.run_path(script)["keep"]
    except Exception as error:
        reason = "it has no function keep(row)" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise UserError(f"filter_script {script}: {reason}; write a file with def keep(row): return True") from error


def judge_row(row: dict[str, Any], values: dict[str, list], script: str | None, **_: Any) -> str:
    """The reason (a key of FILTER_REASONS) why a row is left out, or "".

    Raises:
        UserError: the script's function fails.
    """
    if any(row.get(column) not in allowed for column, allowed in values.items()):
        return "value"
    try:
        return "" if not script or load_keep(script)(row) else "script"
    except Exception as error:
        raise UserError(
            f"filter_script {script}: keep(row) raised {type(error).__name__}: {error}, for the row "
            f"{json.dumps(row, default=str)[:300]}"
        ) from error


# ---- texts of the pairs


def read_text(side: str | list[dict]) -> str:
    """The text of a prompt or response, messages joined; without system messages, which many prompts share."""
    if isinstance(side, str):
        return side
    return "\n".join(message["content"] for message in side if message["role"] != "system")


def read_texts(batch: dict[str, list]) -> list[str]:
    """The texts of all prompts, then of all chosen and all rejected responses."""
    return [read_text(side) for name in PARTS for side in batch[name]]


@functools.lru_cache(maxsize=2**20)
def _hash_word(word: str) -> int:
    return xxhash.xxh3_64_intdigest(word.encode("utf-8", "replace"))


def hash_words(text: str) -> np.ndarray:
    """uint64 hashes of the words of a text, in lower case and without punctuation; without words, of the text."""
    lower = text.lower()  # of ASCII the second way does the same three times as fast
    words = _WORD.findall(lower) if not lower.isascii() else lower.translate(_SPACES).split()
    return np.fromiter(map(_hash_word, words or [text]), np.uint64)


def _combine(columns: Iterable[np.ndarray]) -> np.ndarray:
    """uint64 hashes of rows of integers: a polynomial modulo 2**64."""
    return functools.reduce(lambda hashes, column: hashes * np.uint64(0x9E3779B97F4A7C15) + column, columns)


def hash_ngrams(texts: list[np.ndarray], n: int, whole: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """uint64 hashes of the n-grams of texts, each given as its hashed words, and of each n-gram its text's number.

    Args:
        whole: a text of fewer than n words counts as one n-gram; it has none otherwise.
    """
    if whole:
        texts = [np.append(text, np.zeros(n - len(text), np.uint64)) if len(text) < n else text for text in texts]
    words = np.concatenate(texts)
    owners = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    size = max(len(words) - n + 1, 0)
    inside = owners[:size] == owners[n - 1 :]
    return _combine(words[i : i + size] for i in range(n))[inside], owners[:size][inside]


def _sort_unique(values: np.ndarray) -> np.ndarray:
    """np.unique of uint64, which for these sizes is several times as fast as its hash table."""
    values = np.sort(values)
    return values[np.diff(values, prepend=~values[:1]) != 0]


@room_in_cache()
def measure_texts(pairs: Dataset, num_proc: int | None = None) -> Dataset:
    """Of each pair (preferences.py), as numpy columns: keys equal for equal prompts and pairs, `similarity` of the
    responses (shared word pairs, as a share of both responses' on average: Dice), MinHash of prompt and responses."""
    return pairs.map(
        _measure_batch,
        batched=True,
        batch_size=200,
        remove_columns=pairs.column_names,
        num_proc=num_proc,
        new_fingerprint=Hasher.hash((pairs._fingerprint, "texts", FILTERS_VERSION)),
        desc="Comparing",
    ).with_format("numpy")


def _measure_batch(batch: dict[str, list]) -> dict[str, np.ndarray]:
    words = [hash_words(text) for text in read_texts(batch)]
    n = len(words) // 3
    minhashes = _sketch(words, n)
    return {
        "prompt_key": _hash_rows(batch["prompt"], batch["template"]),
        "pair_key": _hash_rows(*(batch[name] for name in (*PARTS, "template"))),
        "similarity": _compare(words[n : 2 * n], words[2 * n :]),
        "prompt_minhash": minhashes[:n],
        "responses_minhash": minhashes[n:],
    }


def _hash_rows(*columns: list) -> np.ndarray:
    rows = (json.dumps(row).encode() for row in zip(*columns, strict=True))
    return np.fromiter(map(xxhash.xxh3_64_intdigest, rows), np.uint64).view(np.int64)


def _compare(chosen: list[np.ndarray], rejected: list[np.ndarray]) -> np.ndarray:
    """[N] Dice similarity of the word pairs of responses, given as hashed words."""
    sides = []
    for texts in (chosen, rejected):
        grams, owners = hash_ngrams(texts, 2, whole=True)
        sides.append(_sort_unique(owners.astype(np.uint64) << np.uint64(48) | grams >> np.uint64(16)))
    both = np.sort(np.concatenate(sides))
    owners = (both >> np.uint64(48)).astype(int)
    return 2 * np.bincount(owners[1:][both[1:] == both[:-1]], minlength=len(chosen)) / np.bincount(owners)


def _sketch(words: list[np.ndarray], n: int) -> np.ndarray:
    """[2n, NUM_PERM] MinHash of n prompts and n pairs of responses, given as hashed words of all prompts, all chosen
    and all rejected."""
    grams, owners = hash_ngrams(words, SHINGLE, whole=True)
    rejected = owners >= 2 * n
    grams[rejected] *= np.uint64(3)  # chosen and rejected are not the same the other way round
    groups = (owners - n * rejected).astype(np.uint64) << np.uint64(32)
    shingles = _sort_unique(groups | grams >> np.uint64(32))
    starts = np.searchsorted(shingles, np.arange(1, 2 * n, dtype=np.uint64) << np.uint64(32))
    a, b = _PERMUTATIONS
    return np.stack(
        [(smallest[:SKETCH, None] * a + b).min(axis=0) for smallest in np.split(shingles.astype(np.uint32), starts)]
    )


def judge_texts(
    columns: dict[str, np.ndarray],
    *,
    drop_duplicates: str = "no",
    duplicate_threshold: float = 1.0,
    max_pairs_per_prompt: int | None = None,
    max_response_similarity: float | None = None,
    contaminated: np.ndarray | None = None,
) -> np.ndarray:
    """[N] reasons (keys of FILTER_REASONS, or "") of pairs in their order, from the columns of `measure_texts`.

    Args:
        contaminated: pair keys that are left out.
    """
    reasons = np.full(len(columns["pair_key"]), "", dtype="<U16")
    if contaminated is not None:
        reasons[np.isin(columns["pair_key"], contaminated)] = "contaminated"
    if max_response_similarity is not None:
        reasons[(reasons == "") & (columns["similarity"] > max_response_similarity)] = "responses_alike"
    if drop_duplicates != "no":
        left = np.flatnonzero(reasons == "")
        keys = columns["prompt_key" if drop_duplicates == "prompts" else "pair_key"][left]
        reasons[np.delete(left, np.unique(keys, return_index=True)[1])] = "duplicate"
        if duplicate_threshold < 1:
            names = ["responses_minhash"] * (drop_duplicates == "pairs") + ["prompt_minhash"]  # many share a prompt
            left = np.flatnonzero(reasons == "")
            near = find_near_duplicates([columns[name][left] for name in names], duplicate_threshold)
            reasons[left[near]] = "near_duplicate"
    if max_pairs_per_prompt is not None:
        seen: Counter = Counter()
        for i in np.flatnonzero(reasons == ""):
            seen[key := int(columns["prompt_key"][i])] += 1
            if seen[key] > max_pairs_per_prompt:
                reasons[i] = "prompt_limit"
    return reasons


def find_near_duplicates(sketches: list[np.ndarray], threshold: float) -> np.ndarray:
    """[N] bool: whether an earlier row that stays has a Jaccard similarity of at least `threshold` in every one of
    `sketches`, each [N, NUM_PERM] MinHash values. Candidates come from locality-sensitive hashing of the first."""
    index = MinHashLSH(threshold, NUM_PERM, weights=(0.1, 0.9))  # rather look at more than miss one
    candidates = np.zeros(len(sketches[0]), dtype=bool)  # the others share no band with any row
    for start, end in index.hashranges:
        bands = _combine(sketches[0].T[start:end].astype(np.uint64))
        order = np.argsort(bands)
        same = np.flatnonzero(bands[order[1:]] == bands[order[:-1]])
        candidates[order[same]] = candidates[order[same + 1]] = True
    near = np.zeros(len(candidates), dtype=bool)
    for i in np.flatnonzero(candidates).tolist():
        minhash = MinHash(hashvalues=sketches[0][i], permutations=_PERMUTATIONS, scheme="affine32")
        if earlier := index.query(minhash):
            alike = [(sketch[earlier] == sketch[i]).mean(axis=1) >= threshold for sketch in sketches]
            near[i] = np.logical_and.reduce(alike).any()
        if not near[i]:
            index.insert(i, minhash, check_duplication=False)
    return near


# ---- lengths in tokens


def judge_lengths(
    chosen: np.ndarray,
    rejected: np.ndarray,
    *,
    min_response_tokens: int | None = None,
    max_response_tokens: int | None = None,
    max_length_ratio: float | None = None,
) -> np.ndarray:
    """[N] reasons (keys of FILTER_REASONS, or "") of pairs with responses of so many tokens, end of turn included."""
    shorter, longer = np.minimum(chosen, rejected), np.maximum(chosen, rejected)
    reasons = np.full(len(shorter), "", dtype="<U16")
    reasons[longer > (max_length_ratio or np.inf) * shorter] = "length_ratio"
    reasons[longer > (max_response_tokens or np.inf)] = "response_long"
    reasons[shorter < (min_response_tokens or 0)] = "response_short"
    return reasons


# ---- what a recipe asks for


def filter_pairs(pairs: Dataset, args: Any, dropped_rows: list[Dataset] | None = None) -> tuple[Dataset, Counter]:
    """What the filters of texts leave of `pairs` (preferences.py), and the count of the others by reason.

    Args:
        args: a TrainConfig.
        dropped_rows: what is left out is appended to it, as in preferences.Pairs.

    Raises:
        UserError: drop_contaminated lists pairs that are not among these, or cannot be read.
    """
    rules = {name: getattr(args, name) for name in ("drop_duplicates", "duplicate_threshold", "max_pairs_per_prompt")}
    rules |= {"max_response_similarity": args.max_response_similarity}
    listed = read_contaminated(args.drop_contaminated) if args.drop_contaminated else None
    names = ("max_pairs_per_prompt", "max_response_similarity", "drop_contaminated")
    if args.drop_duplicates == "no" and not any(getattr(args, name) is not None for name in names):
        return pairs, Counter()
    measures = measure_texts(pairs, args.dataset_num_proc)
    if listed is not None and (missing := len(np.setdiff1d(listed, measures["pair_key"][:]))):
        raise UserError(
            f"drop_contaminated {args.drop_contaminated}: {missing:,} of its {len(listed):,} pairs are not in the "
            "data, so it was written for other data; write it again: analyze_dataset.py --against ... --json FILE"
        )
    judged = measures.map(  # cached: the other ranks read it
        lambda columns: {"reason": judge_texts(columns, contaminated=listed, **rules).tolist()},
        batched=True,
        batch_size=len(pairs),
        remove_columns=measures.column_names,
        new_fingerprint=Hasher.hash((measures._fingerprint, rules, listed)),
        desc="Filtering",
    )
    return _select(pairs, np.array(judged["reason"][:]), dropped_rows)


def filter_lengths(tokens: Dataset, args: Any, dropped_rows: list[Dataset] | None = None) -> tuple[Dataset, Counter]:
    """What the filters of lengths leave of tokenised pairs (tokenization.py), and the count of the others."""
    columns = tokens.select_columns(["chosen_length", "rejected_length"]).with_format("numpy")[:]
    rules = {name: getattr(args, name) for name in ("min_response_tokens", "max_response_tokens", "max_length_ratio")}
    return _select(tokens, judge_lengths(columns["chosen_length"], columns["rejected_length"], **rules), dropped_rows)


def _select(rows: Dataset, reasons: np.ndarray, dropped_rows: list[Dataset] | None) -> tuple[Dataset, Counter]:
    dropped = Counter(reasons[reasons != ""].tolist())
    if dropped and dropped_rows is not None:
        dropped_rows.append(list_dropped(rows, reasons))
    return (rows.select(np.flatnonzero(reasons == "")) if dropped else rows), dropped


def read_contaminated(path: str) -> np.ndarray:
    """Keys of the pairs in the JSON that analyze_dataset.py --against writes.

    Raises:
        UserError: not such a file, or made from a sample of the pairs.
    """
    remedy = "give the JSON of analyze_dataset.py --against ... --json FILE"
    try:
        content = json.loads(Path(path).read_text())
        if content["sampled"]:
            raise UserError(f"drop_contaminated {path}: was made from a sample; write it again without --max_samples")
        return np.array([int(pair["key"], 16) for pair in content["contamination"]["pairs"]], np.uint64).view(np.int64)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"drop_contaminated {path}: {type(error).__name__} {error}; {remedy}") from error
