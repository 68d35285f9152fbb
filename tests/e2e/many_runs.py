"""Runs of train_dpo.py in one set of processes: starts take longer than training.

    many_runs.py MODULE:FUNCTION FILE

calls the function with each of the argument lists in the JSON file. After `train_all` each run's folder also has
dtypes.json: of the policy's parameters and buffers, the optimizer's master weights and moments, the reference
log-probs and what a linear layer computes, at the last step; and how long ZeRO may wait.
"""

import gc
import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import Trainer

import train_dpo
from sfm_dpo import training_run

compute_loss = train_dpo.SFMDPOTrainer._compute_loss


def recording(self, model, inputs, return_outputs):
    """The trainer's loss; writes dtypes.json."""
    if self.model.training and self.is_world_process_zero():
        tensors = {"parameters": self.model.parameters(), "reference": [inputs.get("ref_chosen_logps")]}
        dtypes = {kind: sorted({str(t.dtype) for t in some if t is not None}) for kind, some in tensors.items()}
        dtypes["buffers"] = {name: str(buffer.dtype) for name, buffer in self.model.named_buffers()}
        optimizer = self.optimizer and getattr(self.optimizer, "optimizer", self.optimizer)
        masters = [p for group in getattr(optimizer, "param_groups", []) for p in group["params"]]
        moments = [v for state in getattr(optimizer, "state", {}).values() for v in state.values()]
        for kind, some in (("masters", masters), ("moments", moments)):
            dtypes[kind] = sorted({str(t.dtype) for t in some if isinstance(t, torch.Tensor) and t.dim()})
        if self.zero_stage:
            group = self.model_wrapped.optimizer.dp_process_group
            dtypes["seconds"] = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        path = Path(self.args.output_dir) / "dtypes.json"

        def note_dtype(module, inputs, output):
            path.write_text(json.dumps(dtypes | {"computed": str(output.dtype)}))
            hook.remove()

        linear = next(module for module in self.model.modules() if isinstance(module, torch.nn.Linear))
        hook = linear.register_forward_hook(note_dtype)
    return compute_loss(self, model, inputs, return_outputs)


def train_all(*argvs: list[str]) -> None:
    """The runs of these command lines, which must end well, without reports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_dpo.SFMDPOTrainer, "_compute_loss", recording)
        patch.setattr(Trainer, "end", lambda self: None)  # it destroys the process group, which the next run needs
        patch.setattr(training_run, "write_report", lambda run: None)  # its pictures take longer than training does
        for argv in argvs:
            assert train_dpo.main(argv) == 0
            AcceleratorState._reset_state()  # it holds the DeepSpeed configuration of this run
            gc.collect()


if __name__ == "__main__":
    torch.set_num_threads(1)
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    for arguments in json.loads(Path(sys.argv[2]).read_text()):
        function(*arguments)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
