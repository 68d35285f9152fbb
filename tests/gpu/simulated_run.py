"""Run by test_simulated_cuda.py: train_dpo.main on the simulated GPU. Prints its exit code, and what it counted."""

import json
import sys
from collections import Counter

from tests.gpu import simulated_cuda  # first: before torch

simulated_cuda.install()

import trl.trainer.utils

import sfm_dpo.jobs.training_run
import train_dpo
from sfm_dpo.train.callbacks import Progress


def main(argv: list[str]) -> None:
    trl.trainer.utils._use_triton = lambda device: True  # the LM head selects the trained tokens, as on a GPU
    sfm_dpo.jobs.training_run.write_report = lambda run: None  # its pictures take longer than training
    syncs = simulated_cuda.Syncs()
    seen: dict[int, Counter] = {}  # at the first micro-batch of each step: all waits so far
    begin = Progress.begin_micro_batch

    def begin_micro_batch(self, phase, step, inputs):
        if phase == "training":
            seen.setdefault(step, syncs.counts.copy())
        begin(self, phase, step, inputs)

    Progress.begin_micro_batch = begin_micro_batch
    with syncs:
        code = train_dpo.main(argv)
    waits = seen[max(seen)] - seen[max(seen) - 1] if seen else {}
    print(json.dumps({"code": code, "flash_calls": len(simulated_cuda.CALLS), "waits": waits}))


if __name__ == "__main__":
    main(sys.argv[1:])
