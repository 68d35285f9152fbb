"""How long is each pair? Read once from the tokenised pairs, by all processes, and cached."""

import inspect
import sys
from dataclasses import dataclass

import numpy as np
import xxhash
from datasets import Dataset
from datasets.fingerprint import Hasher

from sfm_dpo.data.sources import room_in_cache


@dataclass(frozen=True)
class Lengths:
    """Tokens of N pairs, each field [N] int64; `shared` counts the tokens with which both responses begin."""

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray
    shared: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return self.prompt + np.maximum(self.chosen, self.rejected)

    def __len__(self) -> int:
        return len(self.prompt)


def truncate(lengths: Lengths, max_length: int, max_prompt_length: int | None) -> tuple[np.ndarray, Lengths]:
    """What training keeps: bool [N], False for a pair dropped because its prompt fills max_length, and the tokens left
    of the others. A prompt keeps its last max_prompt_length tokens, a sequence its first max_length."""
    prompt = lengths.prompt if max_prompt_length is None else np.minimum(lengths.prompt, max_prompt_length)
    keep = prompt < max_length
    prompt, room = prompt[keep], max_length - prompt[keep]
    chosen, rejected = np.minimum(lengths.chosen[keep], room), np.minimum(lengths.rejected[keep], room)
    return keep, Lengths(prompt, chosen, rejected, np.minimum(lengths.shared[keep], room))


@room_in_cache()
def measure(tokens: Dataset, num_proc: int | None = None) -> tuple[Lengths, np.ndarray, np.ndarray]:
    """Lengths of tokenised pairs (tokenization.py), and keys [N] int64 equal for equal prompts and equal pairs."""
    columns = (
        tokens.with_format("numpy")
        .map(
            _measure_batch,
            batched=True,
            batch_size=100,
            remove_columns=[name for name in tokens.column_names if name.endswith("_ids")],
            num_proc=num_proc,
            new_fingerprint=_key(tokens),
            desc="Measuring",
        )
        .with_format("numpy")[:]
    )
    names = ("prompt_length", "chosen_length", "rejected_length", "shared")
    prompt, chosen, rejected, shared = (columns[name].astype(np.int64) for name in names)
    return Lengths(prompt, chosen, rejected, shared), columns["prompt_key"], columns["pair_key"]


def _measure_batch(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    shared, prompt_keys, pair_keys = [], [], []

    def key_of(hashed: xxhash.xxh3_64) -> int:
        return int.from_bytes(hashed.digest(), "little", signed=True)

    for prompt, chosen, rejected in zip(batch["prompt_ids"], batch["chosen_ids"], batch["rejected_ids"], strict=True):
        n = min(len(chosen), len(rejected))
        differ = np.flatnonzero(chosen[:n] != rejected[:n])
        shared.append(differ[0] if differ.size else n)
        hashed = xxhash.xxh3_64(np.ascontiguousarray(prompt, dtype=np.int32).tobytes())
        prompt_keys.append(key_of(hashed))
        for side in (chosen, rejected):
            hashed.update(len(side).to_bytes(8, "little") + np.ascontiguousarray(side, dtype=np.int32).tobytes())
        pair_keys.append(key_of(hashed))
    return {
        "shared": np.array(shared, dtype=np.int64),
        "prompt_key": np.array(prompt_keys, dtype=np.int64),
        "pair_key": np.array(pair_keys, dtype=np.int64),
    }


@room_in_cache()
def turns(pairs: Dataset, num_proc: int | None = None) -> np.ndarray:
    """[N] user messages in the prompt of each pair (data.py); plain text is one."""
    counted = pairs.select_columns(["prompt"]).map(
        _turns_batch,
        batched=True,
        remove_columns=["prompt"],
        num_proc=num_proc,
        new_fingerprint=_key(pairs),
        desc="Counting turns",
    )
    return counted.with_format("numpy")["turns"][:]


def _turns_batch(batch: dict[str, list]) -> dict[str, list[int]]:
    return {
        "turns": [
            1 if isinstance(prompt, str) else sum(message["role"] == "user" for message in prompt)
            for prompt in batch["prompt"]
        ]
    }


def _key(dataset: Dataset) -> str:
    """datasets knows an imported function by its name: its cache would outlive a change of this module."""
    return Hasher.hash((dataset._fingerprint, inspect.getsource(sys.modules[__name__])))
