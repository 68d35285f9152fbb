"""Run by test_calibration.py, also under a launcher."""

import json
from pathlib import Path

import pytest
import torch

import train_dpo
from sfm_dpo.calibration import choose_path
from sfm_dpo.common.distributed import rank
from sfm_dpo.model import attention
from sfm_dpo.run.facts import Calibration, ForwardPath, MicroBatch
from sfm_dpo.train.base_model import BaseModel
from sfm_dpo.train.trainer import SFMDPOTrainer
from tests.e2e.many_runs import train_all

take_path = SFMDPOTrainer._take_path
trl_loss = SFMDPOTrainer.trl_loss


def train(kind: str, argv: list[str]) -> None:
    """A run with calibration; `without` it; `kernel`: attention by another kernel than FA2 fails on rank 1, and the
    run must end in code 2; `less`: rank 1 has not enough memory for the first setting; `path`: packed rows fail on
    rank 1; `first`: with calibration, and the setting that the run in the folder of this name has found."""
    with pytest.MonkeyPatch.context() as patch:
        if kind == "without":

            def as_asked(base, tokens, asked, before):
                path = ForwardPath(asked.can_pack, asked.can_share, "fa2")
                return path, MicroBatch(asked.pairs, asked.layers), Calibration()

            patch.setattr(train_dpo, "calibrate", as_asked)
        if kind == "less":
            tried = []

            def lose_with_less(self, *args):
                loss = trl_loss(self, *args)
                tried.append(loss.item())
                if rank() == 1 and len(tried) == 1:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                return loss

            patch.setattr(SFMDPOTrainer, "trl_loss", lose_with_less)
        if kind == "path" and rank() == 1:

            def fail(*args):
                raise RuntimeError("its compilation failed")

            patch.setattr(attention, "_sdpa_by_sequence", fail)
        if kind == "kernel":
            used = []

            def remember_path(self, path):
                used.append(path.kernel if path else "")
                take_path(self, path)

            def attend(query, key, value, cu_seqlens, cu_keys, scaling, window, max_length):
                if used[-1] == "fa4" and rank() == 1:
                    raise RuntimeError("no kernel image is available")
                return attention._sdpa_by_sequence(query, key, value, cu_seqlens, cu_keys, scaling, window)

            patch.setattr(SFMDPOTrainer, "_take_path", remember_path)
            patch.setattr(BaseModel, "attention_kernel", lambda self, model=None: "FA4")
            patch.setattr(choose_path, "usable_kernels", lambda choice: ["fa4"])
            patch.setattr(attention, "_takes_varlen", lambda *args: True)
            patch.setattr(attention, "_varlen", attend)
            assert train_dpo.main(argv) == 2
            return
        if kind == "first":
            run = Path(argv[argv.index("--output_dir") + 1]).with_name(kind)
            found = json.loads((run / "data.json").read_text())["micro_batch"]
            argv += ["--per_device_train_batch_size", str(found["pairs"]), "--gradient_checkpointing", "true"]
            argv += ["--checkpointed_layers", str(found["checkpointed_layers"])]
        train_all(argv)
