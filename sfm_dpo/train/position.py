"""Where a rank is in its run, for the watchdog and for the message of an out-of-memory error."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback


class Position(TrainerCallback):
    """What this rank computes, and how much it has done.

    Attributes:
        count: micro-batches (reference pass, training, evaluation), steps and saves so far.
        phase: loading, the reference's forward, training or evaluation.
        step: optimizer steps done.
        inputs: of the current micro-batch, TRL's tensors [2B, L].
        saving: a checkpoint that is being written.
    """

    def __init__(self) -> None:
        self.count = 0
        self.phase = "loading"
        self.step = 0
        self.inputs: dict[str, Any] = {}
        self.saving: Path | None = None

    def begin_micro_batch(self, phase: str, step: int, inputs: dict[str, Any]) -> None:
        self.phase = phase
        self.step = step
        self.inputs = inputs
        self.advance()

    def advance(self) -> None:
        self.count += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step
        self.advance()

    on_save = on_evaluate = on_train_begin = on_step_end
