"""Run by test_calibration.py, also under a launcher: runs of train_dpo.py in one set of processes. The JSON file holds
for each run its kind and its command line.

Kinds: with calibration; without it; `less`: rank 1 has not enough memory for the first setting; `first`: with
calibration, and the setting that the run in the folder of this name has found.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
import torch

import train_dpo
from sfm_dpo.common.distributed import rank
from sfm_dpo.fit import calibration
from tests.e2e.many_runs import train_all

run_micro_batch = calibration.run_micro_batch


def train(kind: str, argv: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if kind == "without":
            patch.setattr(train_dpo, "fit", lambda trainer, before: trainer.facts)
        if kind == "less":
            tried = []

            def run_with_less(trainer, model, rows, checkpointed_layers):
                run_micro_batch(trainer, model, rows, checkpointed_layers)
                tried.append(checkpointed_layers)
                if rank() == 1 and len(tried) == 1:
                    raise torch.OutOfMemoryError("CUDA out of memory.")

            patch.setattr(calibration, "run_micro_batch", run_with_less)
        if kind == "first":
            run = Path(argv[argv.index("--output_dir") + 1]).with_name(kind)
            settings = json.loads((run / "data.json").read_text())["settings"]
            argv += ["--per_device_train_batch_size", str(settings["micro_batch"]), "--gradient_checkpointing", "true"]
            argv += ["--checkpointed_layers", str(settings["checkpointed_layers"])]
        train_all([argv], patch)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for run in json.loads(Path(sys.argv[1]).read_text()):
        train(*run)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
