"""Run by test_collectives.py under a launcher: train_dpo.main, and the collectives of each step of rank 0, without
those that DeepSpeed starts itself, by the line that calls them."""

import json
import os
import sys
import traceback
from collections import Counter
from pathlib import Path

from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train_dpo
from sfm_dpo.train.callbacks import Progress

COUNTS: Counter = Counter()


class Collectives(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_stack()]
            if not any("deepspeed" in path.parts for path, _ in frames):
                ours = [(path, line) for path, line in frames if {"sfm_dpo", "trl", "transformers"} & set(path.parts)]
                path, line = ours[-1]
                COUNTS[f"{func.overloadpacket.__name__} {path.parent.name}/{path.name}:{line}"] += 1
        return func(*args, **(kwargs or {}))


def count_step(argv: list[str], counts: Counter, mode: TorchDispatchMode) -> tuple[int, Counter]:
    """Exit code of train_dpo.main, and what `mode` has added to `counts` in the last step but one."""
    seen: dict[int, Counter] = {}  # at the first micro-batch of each step: all so far
    begin = Progress.begin_micro_batch

    def begin_micro_batch(self, step, inputs):
        if self.phase == "training":
            seen.setdefault(step, counts.copy())
        begin(self, step, inputs)

    Progress.begin_micro_batch = begin_micro_batch
    with mode:
        code = train_dpo.main(argv)
    return code, seen[max(seen)] - seen[max(seen) - 1] if seen else Counter()


if __name__ == "__main__":
    _, collectives = count_step(sys.argv[1:], COUNTS, Collectives())
    if os.environ["RANK"] == "0":
        print(json.dumps(collectives))
