"""Run by test_simulated_cuda.py: train_dpo.main on the simulated GPU. Prints its exit code, and what it counted."""

import json
import sys
from collections import Counter

from tests.gpu import simulated_cuda  # first: before torch

simulated_cuda.install()

import sfm_dpo.jobs.training_run
import train_dpo
from sfm_dpo.train.callbacks import Progress


def main(argv: list[str]) -> None:
    sfm_dpo.jobs.training_run.write_report = lambda run: None  # its pictures take longer than training
    syncs = simulated_cuda.Syncs()
    seen: list[Counter] = []  # at each micro-batch of training: all waits so far
    begin = Progress.begin_micro_batch

    def begin_micro_batch(self, phase, step, inputs):
        if phase == "training":
            seen.append(syncs.counts.copy())
        begin(self, phase, step, inputs)

    Progress.begin_micro_batch = begin_micro_batch
    with syncs:
        code = train_dpo.main(argv)
    waits = seen[-1] - seen[-2]  # of a micro-batch inside a step
    print(json.dumps({"code": code, "flash_calls": len(simulated_cuda.CALLS), "waits": waits}))


if __name__ == "__main__":
    main(sys.argv[1:])
