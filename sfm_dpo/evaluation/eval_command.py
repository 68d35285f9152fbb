"""Starts eval_command for each complete checkpoint and the final model, beside the training (docs/evaluation.md)."""

import contextlib
import logging
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState

from sfm_dpo.common.distributed import environment_outside_launcher, is_main_process
from sfm_dpo.config.fields import TrainConfig
from sfm_dpo.run.checkpoint import checkpoints, rotate_run, step_of, why_incomplete
from sfm_dpo.run.folder import EVALUATIONS, read_status
from sfm_dpo.run.reader import format_scores, list_awaited, read_evaluations

log = logging.getLogger(__name__)

SUBMIT_SECONDS = 20  # in which an sbatch has submitted its job


class EvalCommand(TrainerCallback):
    """Starts each evaluation once, on rank 0, detached from the run, and logs the results that it finds later.

    An evaluation has been started if its log, `evaluations/step-N.log`, exists.
    """

    def __init__(self, args: TrainConfig):
        self.args = args
        self.run = Path(args.output_dir).absolute()
        self.is_active = bool(args.eval_command) and is_main_process()
        self._logged: set[int] = set()  # steps
        self._newest: subprocess.Popen | None = None

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not self.is_active:
            return
        self._start_checkpoints(final_step=state.max_steps)
        self._log_results()

    on_save = on_log

    def on_train_end(self, args: Any = None, state: TrainerState | None = None, *_: Any, **kwargs: Any) -> None:
        """Lets the newest command submit its job before Slurm ends this one; after the last step `wait` waits."""
        if self._newest and not (state and state.global_step >= state.max_steps):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._newest.wait(SUBMIT_SECONDS)

    def wait(self) -> bool:
        """Starts the evaluation of the final model of a run that is done, and names those without a result so far.
        Returns whether each has one."""
        final_step = read_status(self.run)["step"]
        self._start_checkpoints(final_step)
        self._start(final_step, self.run)
        self.on_train_end()
        self._log_results()
        missing = list_awaited(self.run, self._logged)
        if missing:
            then = f"once they have ended, run python scripts/evaluate.py {shlex.quote(self.args.output_dir)}"
            log.info(f"evaluations without a result yet: {', '.join(missing)}; {then}")
        rotate_run(self.args)
        return not missing

    def _start_checkpoints(self, final_step: int) -> None:
        for checkpoint in checkpoints(self.run):
            step = step_of(checkpoint)
            if step != final_step and why_incomplete(checkpoint) is None:
                self._start(step, checkpoint)

    def _start(self, step: int, model: Path) -> None:
        """Starts the command, unless it has been started; its output goes to its log."""
        out = self.run / EVALUATIONS / f"step-{step}.json"
        output = out.with_suffix(".log")
        if output.exists():
            return
        out.parent.mkdir(exist_ok=True)
        values = {"checkpoint": str(model), "step": step, "out": str(out)}
        words = [word.format(**values) for word in shlex.split(str(self.args.eval_command))]
        with output.open("w") as file:
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
            options |= {"env": environment_outside_launcher(), "start_new_session": True}
            self._newest = subprocess.Popen(["env", *words], **options)  # env reports a missing command

    def _log_results(self) -> None:
        wandb = sys.modules.get("wandb")
        for step, scores in read_evaluations(self.run, known=self._logged).items():
            self._logged.add(step)
            log.info(format_scores(step, scores))
            if wandb and wandb.run:
                values = {f"evaluation/{name}": score["value"] for name, score in scores.items()}
                wandb.log(values | {"train/global_step": step})
