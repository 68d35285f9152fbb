"""Several runs of train_dpo.py in one set of processes, for starting them takes longer than training.

accelerate launch ... tests/e2e/many_runs.py FILE     FILE: JSON, a list of command lines
"""

import gc
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from accelerate.state import AcceleratorState
from transformers import Trainer

import train_dpo

if __name__ == "__main__":
    torch.set_num_threads(1)
    Trainer.end = lambda self: None  # it destroys the process group, which the next run needs
    train_dpo.write_report = lambda run: None  # its pictures take longer than training does; tests/report/test_page.py
    for argv in json.loads(Path(sys.argv[1]).read_text()):
        if code := train_dpo.main(argv):
            sys.exit(code)
        AcceleratorState._reset_state()  # it holds the DeepSpeed configuration of this run
        gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
