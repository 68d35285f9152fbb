#!/usr/bin/env python
"""What does full_determinism cost a step? CPU seconds of forward and backward, steps with and without taking turns.

    python bench/determinism.py --model_name_or_path M --dataset_name D [--max_length 96] [--field value ...]

Padding-free, one thread's process time, so that other work on the machine counts little. On a GPU two runs tell
(perf/tokens_per_second with and without --full_determinism true): there the flag also makes launches blocking, which
is set before the first kernel.
"""

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import sfm_dpo

sfm_dpo.setup()

import numpy as np
import torch

from sfm_dpo.compare.parity import ParityTrainer, load_batch, parse_variant

PAIRS, STEPS = 8, 24


def main(argv: list[str]) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = ParityTrainer(load_batch([*argv, "--use_cpu"], PAIRS, folder), parse_variant("packed"))
        inputs = next(trainer.micro_batches())
        reference = trainer.compute_ref_log_probs(trainer.model, inputs)
        inputs |= dict(zip(("ref_chosen_logps", "ref_rejected_logps"), reference, strict=True))
        seconds: list[list[float]] = [[], []]
        for step in range(STEPS):
            torch.use_deterministic_algorithms(bool(step % 2))
            start = time.process_time()
            trainer.compute_loss(trainer.model.train(), inputs).backward()
            trainer.model.zero_grad()
            seconds[step % 2].append(time.process_time() - start)
    without, with_it = (np.array(times[2:]) for times in seconds)
    for name, times in (("without", without), ("with", with_it)):
        low, high = np.percentile(times, [10, 90])
        print(f"{name:<8} {np.median(times):.3f} s a step (10% to 90%: {low:.3f} to {high:.3f})")
    print(f"full_determinism: {np.median(with_it) / np.median(without):.2f} times the CPU seconds")


if __name__ == "__main__":
    main(sys.argv[1:])
