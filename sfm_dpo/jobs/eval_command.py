"""Runs eval_command for each complete checkpoint and for the final model, beside the training (docs/evaluation.md)."""

import logging
import math
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState

from sfm_dpo.common.distributed import is_main_process
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import write_json
from sfm_dpo.common.process import is_alive
from sfm_dpo.common.slurm import squeue_states
from sfm_dpo.config import TrainConfig
from sfm_dpo.run.checkpoint import EVALUATING, checkpoints, mark_in_use, rotate, step_of, why_incomplete
from sfm_dpo.run.checkpoint_commands import CheckpointCommands
from sfm_dpo.run.files import EVALUATION, read_file
from sfm_dpo.run.folder import read_status
from sfm_dpo.run.reader import EVALUATIONS, format_scores, read_evaluations, read_run, read_scores

log = logging.getLogger(__name__)

AT_ONCE = 2  # commands that run at the same time; jobs that they have submitted do not count
QUEUE_SECONDS = 60  # between two looks at Slurm's queue


class Evaluations(TrainerCallback):
    """Starts each evaluation once, on rank 0, and logs its result at the next log or save.

    The processes are detached, so they outlive a run that stops or is killed, unless Slurm ends them with its job. The
    next start waits for those that are still running, and repeats those that ended without a result.
    """

    def __init__(self, args: TrainConfig):
        self.args = args
        self.run = Path(args.output_dir).absolute()
        self.is_active = bool(args.eval_command) and is_main_process()
        self._commands = CheckpointCommands(EVALUATING)
        self._seen: set[int] = set()  # steps
        self._open: dict[int, Path] = {}  # the models without a result yet, by step
        self._queue: dict[str, str] | None = None  # of squeue_states
        self._asked = -math.inf  # when

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.is_active:
            # The last checkpoint is the final model
            self._add_checkpoints(except_step=None if self.args.load_best_model_at_end else state.max_steps)
            self._poll()

    on_train_begin = on_save = on_log

    def finish(self) -> None:
        """Evaluates the final model of a run that is done, waits for all but jobs, and writes evaluation.json."""
        last = None if self.args.load_best_model_at_end else read_status(self.run)["step"]
        self._add_checkpoints(except_step=last)
        if last is not None:
            self._open[last] = self.run
        self._asked = -math.inf
        self._poll()
        while not all(map(self._is_job, self._open)):
            time.sleep(0.5)
            self._poll()
        if jobs := [self._find_job(step) for step in self._open]:
            then = f"once they end, run python scripts/evaluate.py {self.args.output_dir}"
            log.info(f"evaluation jobs {', '.join(jobs)} are still running; {then}")
        rotate(self.run, self.args.save_total_limit)
        write_json(self.run / EVALUATION, read_run(self.run)["evaluation"])

    def _add_checkpoints(self, except_step: int | None) -> None:
        for checkpoint in checkpoints(self.run):
            step = step_of(checkpoint)
            if step not in (except_step, *self._seen) and why_incomplete(checkpoint) is None:
                self._seen.add(step)
                self._open[step] = checkpoint

    def _poll(self) -> None:
        """Logs the results that have arrived, and starts commands while fewer than AT_ONCE run."""
        ended = self._commands.collect_ended()
        for step, model in list(self._open.items()):
            if model in ended:
                self._log_result(step, ended[model])
            elif self._is_running(step) or self._is_job(step):
                continue
            elif step in read_evaluations(self.run):  # of an earlier start
                self._log_result(step)
            elif self._count_running() < AT_ONCE:
                self._start(step, model)
            else:
                mark_in_use(model, EVALUATING, os.getpid())  # while it waits

    def _count_running(self) -> int:
        return sum(self._is_running(step) and not self._is_job(step) for step in self._open)

    def _start(self, step: int, model: Path) -> None:
        out = self.run / EVALUATIONS / f"step-{step}.json"
        values = {"checkpoint": str(model), "step": step, "out": str(out)}
        words = [word.format(**values) for word in shlex.split(str(self.args.eval_command))]
        out.parent.mkdir(exist_ok=True)
        env = {"SBATCH_WAIT": "1"}  # an sbatch ends with its job
        with out.with_suffix(".log").open("w") as file:
            try:
                self._commands.start(model, words, env, start_new_session=True, stdout=file, stderr=subprocess.STDOUT)
            except OSError as error:
                file.write(f"{error}\n")
                self._log_result(step)

    def _log_result(self, step: int, code: int | None = None) -> None:
        """Logs the result of an evaluation that has ended, or a warning; its checkpoint may then be rotated away."""
        model = self._open.pop(step)
        out = self.run / EVALUATIONS / f"step-{step}.json"
        try:
            scores = read_scores(out)
            log.info(format_scores(step, scores))
            wandb = sys.modules.get("wandb")
            if wandb and wandb.run:
                values = {f"evaluation/{name}": score["value"] for name, score in scores.items()}
                wandb.log(values | {"train/global_step": step})
        except UserError as error:
            where = f"exit code {code}, {out.with_suffix('.log')}"
            log.warning(f"evaluation of step {step} failed ({where}): {self.args.eval_command}: {error}")
        (model / EVALUATING).unlink(missing_ok=True)

    def _is_running(self, step: int) -> bool:
        """Whether a command evaluates the model here, started by this or an earlier process of the run."""
        owner = read_file(self._open[step] / EVALUATING)
        return bool(is_alive(owner)) and owner["pid"] != os.getpid()

    def _is_job(self, step: int) -> bool:
        """Whether the evaluation is a job that Slurm knows, or Slurm does not answer."""
        job = self._find_job(step)
        if not job or self._open[step] in self._commands.running:  # an sbatch that waits for its job
            return bool(job)
        if time.monotonic() - self._asked > QUEUE_SECONDS:
            self._queue = squeue_states(map(self._find_job, self._open))
            self._asked = time.monotonic()
        return self._queue is None or job in self._queue

    def _find_job(self, step: int) -> str:
        """The job id that sbatch printed last, or an empty text."""
        path = self.run / EVALUATIONS / f"step-{step}.log"
        printed = path.read_text(errors="replace") if path.exists() else ""
        return (re.findall(r"^Submitted batch job (\d+)", printed, re.MULTILINE) or [""])[-1]
