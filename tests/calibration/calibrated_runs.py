"""Run by test_calibration.py, also under a launcher."""

import json
from pathlib import Path

import pytest
import torch

import train_dpo
from sfm_dpo.common.distributed import rank
from sfm_dpo.run.facts import Calibration, ForwardPath, MicroBatch
from sfm_dpo.train.base_model import BaseModel
from tests.e2e.many_runs import train_all

run_micro_batch = BaseModel.run_micro_batch


def train(kind: str, argv: list[str]) -> None:
    """A run with calibration; `without` it; `less`: rank 1 has not enough memory for the first setting; `first`: with
    calibration, and the setting that the run in the folder of this name has found."""
    with pytest.MonkeyPatch.context() as patch:
        if kind == "without":

            def as_asked(base, tokens, asked, before):
                path = ForwardPath(asked.can_pack, asked.can_share, "fa2")
                return path, MicroBatch(asked.pairs, asked.layers), Calibration()

            patch.setattr(train_dpo, "calibrate", as_asked)
        if kind == "less":
            tried = []

            def run_with_less(base, tokens, rows, checkpointed_layers):
                run_micro_batch(base, tokens, rows, checkpointed_layers)
                tried.append(checkpointed_layers)
                if rank() == 1 and len(tried) == 1:
                    raise torch.OutOfMemoryError("CUDA out of memory.")

            patch.setattr(BaseModel, "run_micro_batch", run_with_less)
        if kind == "first":
            run = Path(argv[argv.index("--output_dir") + 1]).with_name(kind)
            found = json.loads((run / "data.json").read_text())["micro_batch"]
            argv += ["--per_device_train_batch_size", str(found["pairs"]), "--gradient_checkpointing", "true"]
            argv += ["--checkpointed_layers", str(found["checkpointed_layers"])]
        train_all(argv)
