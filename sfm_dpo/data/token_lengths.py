"""Lengths of tokenised pairs, what truncation leaves of them, and which kinds of conversations the pairs are."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from datasets import Dataset
from datasets.fingerprint import Hasher

from sfm_dpo.data.preferences import CALL_KEYS, PARTS, TOOL_ROLES
from sfm_dpo.data.sources import explain_cache_errors

# Part of the cache's key. Raise it when _describe_batch computes something else.
VERSION = 1


@dataclass(frozen=True)
class Lengths:
    """Tokens of N pairs, each field [N] int64; `shared` counts the tokens with which both responses begin."""

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray
    shared: np.ndarray

    @classmethod
    def of(cls, tokens: Dataset) -> "Lengths":
        """Those of tokenised pairs (tokenization.py)."""
        names = [name for name in tokens.column_names if name.endswith("_length")]
        return cls.from_columns(tokens.select_columns(names).with_format("numpy")[:])

    @classmethod
    def from_columns(cls, columns: Mapping[str, np.ndarray]) -> "Lengths":
        """From the columns prompt_length, chosen_length and rejected_length, and shared_length (0 where missing)."""
        prompt, chosen, rejected = (columns[f"{name}_length"].astype(np.int64) for name in PARTS)
        shared = columns.get("shared_length", np.zeros_like(prompt))
        return cls(prompt, chosen, rejected, shared.astype(np.int64))

    @property
    def total(self) -> np.ndarray:
        """[N] tokens of the prompt and the longer response."""
        return self.sequences.max(axis=1)

    @property
    def sequences(self) -> np.ndarray:
        """[N, 2] tokens of prompt + chosen and prompt + rejected."""
        return np.stack([self.prompt + self.chosen, self.prompt + self.rejected], axis=1)

    def computed(self, prefix_sharing: bool) -> np.ndarray:
        """[N] tokens of both sequences of a pair; with prefix sharing all of the prompt but its last token once."""
        return self.sequences.sum(axis=1) - prefix_sharing * np.maximum(self.prompt - 1, 0)

    @property
    def responses(self) -> np.ndarray:
        """[N, 2] tokens of chosen and rejected, those that are trained."""
        return np.stack([self.chosen, self.rejected], axis=1)

    def __len__(self) -> int:
        return len(self.prompt)

    def truncate(self, max_length: int | None, max_prompt_length: int | None = None) -> "Lengths":
        """What training keeps, still N pairs: the last `max_prompt_length` tokens of a prompt, then the first
        `max_length` of each sequence. A prompt that fills `max_length` leaves no response: `trainable` is False."""
        prompt = self.prompt if max_prompt_length is None else np.minimum(self.prompt, max_prompt_length)
        if max_length is None:
            return Lengths(prompt, self.chosen, self.rejected, self.shared)
        prompt = np.minimum(prompt, max_length)
        return Lengths(
            prompt, *(np.minimum(x, max_length - prompt) for x in (self.chosen, self.rejected, self.shared))
        )

    @property
    def trainable(self) -> np.ndarray:
        """[N] bool: whether a token of a response is left; training drops the other pairs."""
        return np.maximum(self.chosen, self.rejected) > 0

    def select(self, rows: np.ndarray) -> "Lengths":
        """The pairs of a mask [N] or of indices."""
        return Lengths(*(getattr(self, field.name)[rows] for field in fields(self)))


@explain_cache_errors()
def describe_turns(pairs: Dataset, num_proc: int | None = None) -> dict[str, np.ndarray]:
    """[N] bool of each pair (preferences.py): `multi_turn` (several user messages in the prompt), a `system` prompt,
    `tools` (a call, or its result), `multi_message` (a response of several messages)."""
    columns = pairs.map(
        _describe_batch,
        batched=True,
        remove_columns=pairs.column_names,
        num_proc=num_proc,
        new_fingerprint=Hasher.hash((pairs._fingerprint, "conversations", VERSION)),
        desc="Counting turns",
    )
    return columns.with_format("numpy")[:]


def _describe_batch(batch: dict[str, list]) -> dict[str, list[bool]]:
    columns: dict[str, list[bool]] = {"multi_turn": [], "system": [], "tools": [], "multi_message": []}
    for values in zip(*(batch[name] for name in PARTS), strict=True):
        prompt, *responses = sides = [[] if isinstance(side, str) else side for side in values]
        roles = {message["role"] for side in sides for message in side}
        called = any(message.get(key) for side in sides for message in side for key in CALL_KEYS)
        columns["multi_turn"].append(sum(message["role"] == "user" for message in prompt) > 1)
        columns["system"].append(not roles.isdisjoint(("system", "developer")))
        columns["tools"].append(called or not roles.isdisjoint(TOOL_ROLES))
        columns["multi_message"].append(max(map(len, responses)) > 1)
    return columns
