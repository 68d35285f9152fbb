"""Lengths of pairs in tokens: whole, truncated, as training computes them, and without the results of tools."""

from dataclasses import dataclass

import numpy as np
from datasets import Dataset

from sfm_dpo.data.pairs import PARTS


@dataclass(frozen=True)
class Lengths:
    """Tokens of N pairs, each field [N] int64."""

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray
    common: np.ndarray | int = 0  # with which both responses begin; not known of truncated and of drawn pairs

    @classmethod
    def of(cls, tokens: Dataset) -> "Lengths":
        names = [*(f"{part}_length" for part in PARTS), "common_length"]
        columns = tokens.select_columns(names).with_format("numpy")[:]
        return cls(*(columns[name].astype(np.int64) for name in names))

    @property
    def total(self) -> np.ndarray:
        """[N] tokens of the longer sequence."""
        return self.sequences.max(axis=1)

    @property
    def sequences(self) -> np.ndarray:
        """[N, 2] tokens of prompt + chosen and prompt + rejected."""
        return np.stack([self.prompt + self.chosen, self.prompt + self.rejected], axis=1)

    def computed(self, prefix_sharing: bool) -> np.ndarray:
        """[N] tokens of both sequences; with prefix sharing, the prompt except its last token counts once."""
        return self.sequences.sum(axis=1) - prefix_sharing * np.maximum(self.prompt - 1, 0)

    @property
    def responses(self) -> np.ndarray:
        """[N, 2] tokens of chosen and rejected, which are trained."""
        return np.stack([self.chosen, self.rejected], axis=1)

    def __len__(self) -> int:
        return len(self.prompt)

    def truncate(self, max_length: int | None, max_prompt_length: int | None = None) -> "Lengths":
        """The last `max_prompt_length` tokens of each prompt, then the first `max_length` of each sequence."""
        prompt = self.prompt if max_prompt_length is None else np.minimum(self.prompt, max_prompt_length)
        if max_length is None:
            return Lengths(prompt, self.chosen, self.rejected)
        prompt = np.minimum(prompt, max_length)
        left = max_length - prompt
        return Lengths(prompt, np.minimum(self.chosen, left), np.minimum(self.rejected, left))

    def find_unused(
        self, trained: np.ndarray, max_length: int | None, max_prompt_length: int | None, overlong: str
    ) -> np.ndarray:
        """[N] the reason (a key of DROP_REASONS) why training leaves a pair out, or "". `trained`: [N, 2] tokens of
        chosen and rejected that are left to train (count_trained)."""
        reasons = np.full(len(self), "", dtype=object)
        truncated = self.truncate(None, max_prompt_length)
        room = (max_length or np.inf) - truncated.prompt
        reasons[room <= self.common] = "equal_after_cut"
        reasons[trained.min(axis=1) == 0] = "prompt_too_long"
        if overlong == "drop":
            reasons[truncated.total > (max_length or np.inf)] = "too_long"
        return reasons

    def select(self, rows: np.ndarray) -> "Lengths":
        """The pairs selected by a mask [N] or by indices."""
        return Lengths(self.prompt[rows], self.chosen[rows], self.rejected[rows])


def count_trained(tokens: Dataset, max_length: int | None, max_prompt_length: int | None = None) -> np.ndarray:
    """[N, 2] tokens of chosen and rejected after truncation, without those of tool results."""
    lengths = Lengths.of(tokens).truncate(max_length, max_prompt_length)
    counts = lengths.responses
    if "masked" in tokens.column_names:
        spans = tokens.select_columns("masked").with_format("arrow")[:].column("masked").combine_chunks()
        rows = np.repeat(np.arange(len(tokens)), spans.value_lengths().to_numpy())
        side, first, end = spans.flatten(recursive=True).to_numpy().reshape(-1, 3).T
        room = (max_length or np.iinfo(np.int32).max) - lengths.prompt[rows]
        np.subtract.at(counts, (rows, side), np.minimum(end, room) - np.minimum(first, room))
    return counts
