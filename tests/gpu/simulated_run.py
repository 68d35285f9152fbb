"""Run by test_simulated_cuda.py: train_dpo.main on the simulated GPU. Prints its exit code, and what it counted."""

import json
import sys

from tests.gpu import simulated_cuda  # first: before torch

simulated_cuda.install()

import trl.trainer.utils

import sfm_dpo.training_run
from tests.gpu.counted_collectives import count_step


def main(argv: list[str]) -> None:
    trl.trainer.utils._use_triton = lambda device: True  # the LM head selects the trained tokens, as on a GPU
    sfm_dpo.training_run.write_report = lambda run: None  # its pictures take longer than training
    syncs = simulated_cuda.Syncs()
    code, waits = count_step(argv, syncs.counts, syncs)
    print(json.dumps({"code": code, "flash_calls": len(simulated_cuda.CALLS), "waits": waits}))


if __name__ == "__main__":
    main(sys.argv[1:])
