"""Lengths of tokenised pairs, and what truncation leaves of them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from datasets import Dataset

from sfm_dpo.data.preferences import PARTS


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
