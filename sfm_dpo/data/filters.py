"""Filters that drop usable pairs on request: rows by script, repeats, contaminated pairs (docs/data.md)."""

import functools
import json
import runpy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from sfm_dpo.common.errors import user_input
from sfm_dpo.data.pairs import drop_rows


@functools.cache
def load_keep(script: str) -> Callable[[dict], Any]:
    with user_input(f"filter_script {script}", "write a file with def keep(row): return True"):
        return runpy.run_path(script)["keep"]


def keeps(script: str, row: dict[str, Any]) -> bool:
    keep = load_keep(script)
    with user_input(f"filter_script {script}", f"correct keep(row) for the row {json.dumps(row, default=str)[:300]}"):
        return bool(keep(row))


def filter_pairs(
    pairs: Dataset, drop_duplicates: str, drop_contaminated: str | None
) -> tuple[Dataset, list[dict[str, Any]]]:
    """The pairs (preferences.py) without contaminated pairs and without repeats, except the first of each; and the
    dropped pairs, as in Pairs.dropped_rows."""
    keys = pairs.select_columns(["prompt_key", "pair_key"]).to_pandas()
    reasons = np.full(len(pairs), "", dtype=object)
    if drop_contaminated:
        listed = read_contaminated(drop_contaminated, keys["pair_key"])
        reasons[keys["pair_key"].isin(listed)] = "contaminated"
    if drop_duplicates != "no":
        left = keys[reasons == ""]
        repeats = left.duplicated("prompt_key" if drop_duplicates == "prompts" else "pair_key")
        reasons[left.index[repeats]] = "duplicate"
    return drop_rows(pairs, reasons)


def read_contaminated(path: str, keys: Iterable[str]) -> set[str]:
    """Those of `keys` that are in the JSON of analyze_dataset.py --against."""
    remedy = "give the JSON that analyze_dataset.py --against ... --json FILE writes for this data"
    with user_input(f"drop_contaminated {path}", remedy):
        content = json.loads(Path(path).read_text())
        if content["sampled"]:
            raise ValueError("it covers only a sample of the pairs")
        listed = {pair["key"] for pair in content["contamination"]["pairs"]}
        if missing := len(listed.difference(keys)):
            raise ValueError(f"{missing:,} of its {len(listed):,} pairs are not in the data")
        return listed
