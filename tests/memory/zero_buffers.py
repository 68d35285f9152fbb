"""Trains a command line twice under ZeRO-2, with the buckets of the DeepSpeed file and with those that the run needs.

Each run's folder gets buffers.json: bytes of the buckets, and the peak of what reducing them takes beside them: copies
and the rank's sums of gradients.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from sfm_dpo.memory.activations import LiveBytes
from sfm_dpo.train import trainer
from tests.e2e.many_runs import train_all

average = DeepSpeedZeroOptimizer.average_tensor


def main(folder: Path, argv: list[str]) -> None:
    for name in ("full", "fitted"):
        found = {"buckets": 0, "reduction": 0}

        def record(self, *args, found=found):
            buckets = [buffer for bucket in self.ipg_buckets.values() for buffer in bucket.buffer]
            with LiveBytes() as live:
                average(self, *args)
            found["buckets"] = sum(buffer.nbytes for buffer in buckets)
            found["reduction"] = max(found["reduction"], live.peak - buckets[0].nbytes)  # a view of it is counted

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeepSpeedZeroOptimizer, "average_tensor", record)
            if name == "full":
                patch.setattr(trainer, "fit_buckets", lambda zero, model: zero)
            train_all([[*argv, "--output_dir", str(folder / name)]], patch)
        (folder / name / "buffers.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
