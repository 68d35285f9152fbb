"""Filters that leave out usable pairs on request: rows by script, repeats, contaminated pairs, lengths.

Each filter is a field of TrainConfig, off by default; what it leaves out is counted by reason. Of pairs that repeat
each other the first stays. docs/filters.md describes them.
"""

import functools
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from sfm_dpo.common.errors import UserError
from sfm_dpo.config import TrainConfig
from sfm_dpo.data.sources import drop_rows

FILTER_REASONS = {
    "script": "filter_script does not keep it",
    "contaminated": "listed in drop_contaminated",
    "duplicate": "repeats an earlier one (drop_duplicates)",
    "prompt_limit": "prompt has max_pairs_per_prompt earlier pairs",
    "response_short": "a response has fewer than min_response_tokens",
    "response_long": "a response has more than max_response_tokens",
    "length_ratio": "responses differ in length by more than max_length_ratio",
}


# ---- rows as they are stored


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


def drop_reason(row: dict[str, Any], script: str) -> str:
    """The reason (a key of FILTER_REASONS) why a row is left out, or "".

    Raises:
        UserError: the script's function fails.
    """
    try:
        return "" if load_keep(script)(row) else "script"
    except Exception as error:
        raise UserError(
            f"filter_script {script}: keep(row) raised {type(error).__name__}: {error}, for the row "
            f"{json.dumps(row, default=str)[:300]}"
        ) from error


# ---- pairs


def filter_pairs(pairs: Dataset, args: TrainConfig) -> tuple[Dataset, list[dict[str, Any]]]:
    """The pairs (preferences.py) without contaminated ones and repeats, and these as in Pairs.dropped_rows.

    Raises:
        UserError: drop_contaminated lists pairs that are not among these, or cannot be read.
    """
    keys = pairs.select_columns(["prompt_key", "pair_key"]).to_pandas()
    reasons = np.full(len(pairs), "", dtype=object)
    if args.drop_contaminated:
        listed = read_contaminated(args.drop_contaminated)
        if missing := len(set(listed).difference(keys["pair_key"])):
            raise UserError(
                f"drop_contaminated {args.drop_contaminated}: {missing:,} of its {len(listed):,} pairs are not in the "
                "data, so it was written for other data; write it again: analyze_dataset.py --against ... --json FILE"
            )
        reasons[keys["pair_key"].isin(listed)] = "contaminated"
    if args.drop_duplicates != "no":
        left = keys[reasons == ""]
        repeats = left.duplicated("prompt_key" if args.drop_duplicates == "prompts" else "pair_key")
        reasons[left.index[repeats]] = "duplicate"
    if args.max_pairs_per_prompt is not None:
        left = keys[reasons == ""]
        earlier = left.groupby("prompt_key").cumcount()
        reasons[left.index[earlier >= args.max_pairs_per_prompt]] = "prompt_limit"
    return drop_rows(pairs, reasons)


def read_contaminated(path: str) -> list[str]:
    """Keys of the pairs in the JSON that analyze_dataset.py --against writes.

    Raises:
        UserError: not such a file, or made from a sample of the pairs.
    """
    remedy = "give the JSON of analyze_dataset.py --against ... --json FILE"
    try:
        content = json.loads(Path(path).read_text())
        if content["sampled"]:
            raise UserError(f"drop_contaminated {path}: was made from a sample; write it again without --max_samples")
        return [pair["key"] for pair in content["contamination"]["pairs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"drop_contaminated {path}: {type(error).__name__} {error}; {remedy}") from error


def filter_lengths(tokens: Dataset, args: TrainConfig) -> tuple[Dataset, list[dict[str, Any]]]:
    """The tokenised pairs (tokenization.py) within the limits of response tokens, end of turn included, and the others
    as in Pairs.dropped_rows."""
    columns = tokens.select_columns(["chosen_length", "rejected_length"]).with_format("numpy")[:]
    shorter = np.minimum(columns["chosen_length"], columns["rejected_length"])
    longer = np.maximum(columns["chosen_length"], columns["rejected_length"])
    reasons = np.full(len(tokens), "", dtype=object)
    if args.max_length_ratio is not None:
        reasons[longer > args.max_length_ratio * shorter] = "length_ratio"
    if args.max_response_tokens is not None:
        reasons[longer > args.max_response_tokens] = "response_long"
    if args.min_response_tokens is not None:
        reasons[shorter < args.min_response_tokens] = "response_short"
    return drop_rows(tokens, reasons)
