"""In which order? The pairs of each optimizer step, as a fingerprint by epoch in the run's data.json.

The order is a pure function of seed, epoch and dataset: every sampler here draws it from a generator of its own,
seeded with seed + epoch, whatever else has drawn random numbers before, and whichever epoch a run resumes in.
"""

import copy
import hashlib
import math
from typing import Any

import numpy as np
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_pt_utils import BatchRebalanceSampler

from sfm_dpo.run.folder import add_data_facts


def epoch_order(dataloader: DataLoader, epoch: int, pairs_per_step: int) -> list[list[int]]:
    """Rows of the dataset in each optimizer step of an epoch, over all ranks, as the dataloader's sampler gives them.

    Within a step they are sorted: which rank and micro-batch a pair falls into changes no gradient, and depends on
    the number of processes.
    """
    sampler: Any = getattr(dataloader.batch_sampler, "batch_sampler", dataloader.batch_sampler)
    if isinstance(sampler, BatchRebalanceSampler):
        sampler = copy.copy(sampler)
        sampler.dp_size = sampler.grad_accum = 1  # the global batch in one piece
        sampler.rank = 0
        sampler.set_epoch(epoch)
        return [sorted(batch) for batch in sampler]
    sampler = copy.copy(sampler.sampler)
    if hasattr(sampler, "set_epoch"):  # a sequential sampler has no need of it
        sampler.set_epoch(epoch)
    rows = [int(row) for row in sampler]
    return [sorted(rows[i : i + pairs_per_step]) for i in range(0, len(rows), pairs_per_step)]


def fingerprint(order: list[list[int]]) -> str:
    """24 hex digits of the sha256 over the rows of all steps."""
    digest = hashlib.sha256()
    for rows in order:
        digest.update(np.array([len(rows), *rows], dtype=np.int64).tobytes())
    return digest.hexdigest()[:24]


class RecordData(TrainerCallback):
    """Writes what the trainer knows of its data into data.json: the tokens, their order, the reference's cache.

    Args:
        facts: `train_tokens` (hash of all token ids) and `reference` (by split, see reference.describe_cache).
    """

    def __init__(self, facts: dict[str, Any]):
        self.facts = facts

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, train_dataloader=None, **kwargs
    ):
        if not state.is_world_process_zero:
            return
        epochs = range(math.ceil(state.num_train_epochs))
        order = [fingerprint(epoch_order(train_dataloader, epoch, args.global_batch_size)) for epoch in epochs]
        add_data_facts(args.output_dir, self.facts | {"order": order})
