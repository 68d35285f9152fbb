"""Commands that run beside the training, each for a checkpoint, in processes that callbacks poll."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sfm_dpo.common.distributed import environment_outside_launcher
from sfm_dpo.run.checkpoint import mark_in_use


class CheckpointCommands:
    """Starts commands, each for a checkpoint, which `mark` (PUSHING or EVALUATING) keeps from rotation meanwhile."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.running: dict[Path, subprocess.Popen] = {}  # by checkpoint

    def start(self, checkpoint: Path, words: Sequence[str], env: dict[str, str], **options: Any) -> None:
        """Starts a command outside of the launcher, with `env` added to its variables; `options` are Popen's."""
        env = environment_outside_launcher() | env
        process = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, **options)
        self.running[checkpoint] = process
        mark_in_use(checkpoint, self.mark, process.pid)

    def collect_ended(self) -> dict[Path, int]:
        """The exit codes of the commands that have ended since the last call, by checkpoint."""
        codes = {checkpoint: process.poll() for checkpoint, process in self.running.items()}
        ended = {checkpoint: code for checkpoint, code in codes.items() if code is not None}
        for checkpoint in ended:
            del self.running[checkpoint]
        return ended
