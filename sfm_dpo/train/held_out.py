"""Held-out evaluation whose metrics depend neither on the batch size nor on the number of ranks."""

import math
from typing import Any

from datasets import Dataset
from torch.utils.data import DataLoader
from trl import DPOTrainer

from sfm_dpo.config_checks import HELD_OUT
from sfm_dpo.data.lengths import count_trained
from sfm_dpo.train.metrics import MetricSums


class ExactEvaluation(DPOTrainer):
    """Each metric of a held-out set is the mean over all its pairs or tokens."""

    eval_sums: MetricSums  # of the current evaluation
    chosen_tokens: float  # trained tokens of a chosen response, mean over the pairs that a loss is taken of

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> DataLoader:
        """Rank r computes rows r, r + ranks, ...; a rank without a last row repeats one, which does not count."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        size = self.args.per_device_eval_batch_size
        ranks = self.accelerator.num_processes
        rows = self._eval_rows(dataset)
        # TRL gathers from all ranks, so they need batches of equal size; the remaining pairs form batches of one
        full = len(dataset) // (size * ranks) * size
        batches = [rows[start : start + size] for start in range(0, full, size)]
        batches += [[row] for row in rows[full:]]
        if len(rows) < math.ceil(len(dataset) / ranks):
            batches.append([0])
        loading = {"num_workers": self.args.dataloader_num_workers, "pin_memory": self.args.dataloader_pin_memory}
        return DataLoader(dataset, batch_sampler=batches, collate_fn=self.data_collator, **loading)

    def _eval_rows(self, dataset: Dataset) -> list[int]:
        return list(range(self.accelerator.process_index, len(dataset), self.accelerator.num_processes))

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Transformers' `evaluate`; in a mapping of sets, the one named HELD_OUT keeps the prefix `eval_`."""
        prefix = "eval" if metric_key_prefix == f"eval_{HELD_OUT}" else metric_key_prefix
        return super().evaluate(eval_dataset, ignore_keys, prefix)

    # Upstream: transformers 5.24, trainer.py, Trainer.evaluation_loop: also counts pairs that only pad the last
    # batch of several ranks; TRL averages its metrics over batches, and logs several held-out sets under one name.
    # Canary: test_canary_eval_metrics
    def evaluation_loop(self, dataloader: DataLoader, *args, metric_key_prefix: str = "eval", **kwargs) -> Any:
        dataset: Any = dataloader.dataset
        self.eval_sums = MetricSums(len(self._eval_rows(dataset)))
        self.chosen_tokens = count_trained(dataset, self.args.max_length)[:, 0].mean()
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        for name, value in self.eval_sums.reduce().items():
            output.metrics[f"{metric_key_prefix}_{name}"] = value
        return output
