"""Run by test_zero_buffers.py under a launcher."""

import json
from pathlib import Path

import pytest
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from sfm_dpo.memory.activations import LiveBytes
from sfm_dpo.train import trainer
from tests.e2e.many_runs import train_all

average = DeepSpeedZeroOptimizer.average_tensor


def train(folder: str, argv: list[str]) -> None:
    """Trains a command line under ZeRO-2 in `folder`: with the buckets that the run needs, or, if it is called `full`,
    with those of the DeepSpeed file. buffers.json there has the bytes of the buckets, and the peak of what reducing
    them takes beside them: copies and the rank's sums of gradients."""
    found = {"buckets": 0, "reduction": 0}

    def record(self, *args):
        buckets = [buffer for bucket in self.ipg_buckets.values() for buffer in bucket.buffer]
        with LiveBytes() as live:
            average(self, *args)
        found["buckets"] = sum(buffer.nbytes for buffer in buckets)
        found["reduction"] = max(found["reduction"], live.peak - buckets[0].nbytes)  # a view of it is counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepSpeedZeroOptimizer, "average_tensor", record)
        if Path(folder).name == "full":
            patch.setattr(trainer, "fit_buckets", lambda zero, model: zero)
        train_all([*argv, "--output_dir", folder])
    Path(folder, "buffers.json").write_text(json.dumps(found))
