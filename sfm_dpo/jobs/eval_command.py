"""Runs eval_command for each complete checkpoint and for the final model, beside the training (docs/evaluation.md)."""

import logging
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from threading import Semaphore, Thread
from typing import Any

from transformers import TrainerCallback, TrainerState

from sfm_dpo.common.distributed import environment_outside_launcher, is_main_process
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import write_json
from sfm_dpo.common.process import is_alive
from sfm_dpo.common.slurm import squeue_states
from sfm_dpo.config import TrainConfig
from sfm_dpo.run.checkpoint import EVALUATING, checkpoints, mark_in_use, rotate, step_of, why_incomplete
from sfm_dpo.run.folder import read_mapping, read_status
from sfm_dpo.run.reader import EVALUATION, EVALUATIONS, format_scores, read_evaluations, read_run, read_scores

log = logging.getLogger(__name__)

AT_ONCE = 2  # commands that run at the same time; jobs that they have submitted do not count


class Evaluations(TrainerCallback):
    """Starts each evaluation once, on rank 0, and waits for it in a thread.

    The processes are detached, so they outlive a run that stops or is killed, unless Slurm ends them with its job. The
    next start waits for those that are still running, and repeats those that ended without a result.
    """

    def __init__(self, args: TrainConfig):
        self.args = args
        self.run = Path(args.output_dir).absolute()
        self.is_active = bool(args.eval_command) and is_main_process()
        self._threads: dict[int, Thread] = {}  # by step
        self._slots = Semaphore(AT_ONCE)

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.is_active:
            self._start_missing(state.max_steps)

    on_train_begin = on_save

    def finish(self) -> None:
        """Evaluates the final model of a run that is done, waits for all but jobs, and writes evaluation.json."""
        self._start_missing(read_status(self.run)["step"], self.run)
        while any(thread.is_alive() and not self._is_queued(step) for step, thread in self._threads.items()):
            time.sleep(0.5)
        if jobs := [self._find_job(step) for step, thread in self._threads.items() if thread.is_alive()]:
            then = f"once they end, run python scripts/evaluate.py {self.args.output_dir}"
            log.info(f"evaluation jobs {', '.join(jobs)} are still running; {then}")
        rotate(self.run, self.args.save_total_limit)
        write_json(self.run / EVALUATION, read_run(self.run)["evaluation"])

    def _start_missing(self, last_step: int, final_model: Path | None = None) -> None:
        models: dict[int, Path | None] = {step_of(c): c for c in checkpoints(self.run) if why_incomplete(c) is None}
        if not self.args.load_best_model_at_end:  # the last checkpoint is the final model
            models[last_step] = final_model
        for step, model in models.items():
            if model and step not in self._threads:
                earlier = read_mapping(model / EVALUATING)
                if not is_alive(earlier):
                    mark_in_use(model, EVALUATING, os.getpid())  # while it waits
                self._threads[step] = Thread(target=self._evaluate, args=(step, model, earlier), daemon=True)
                self._threads[step].start()

    def _evaluate(self, step: int, model: Path, earlier: dict[str, Any]) -> None:
        """Waits for an evaluation that an earlier start began, runs the command if there is no result, and logs it."""
        out = self.run / EVALUATIONS / f"step-{step}.json"
        while is_alive(earlier) or self._is_queued(step):
            time.sleep(2)
        code = None
        try:
            if step not in read_evaluations(self.run):
                code = self._run_command(step, model, out)
            scores = read_scores(out)
            log.info(format_scores(step, scores))
            wandb = sys.modules.get("wandb")
            if wandb and wandb.run:
                values = {f"evaluation/{name}": score["value"] for name, score in scores.items()}
                wandb.log(values | {"train/global_step": step})
        except (OSError, UserError) as error:
            where = f"exit code {code}, {out.with_suffix('.log')}"
            log.warning(f"evaluation of step {step} failed ({where}): {self.args.eval_command}: {error}")
        (model / EVALUATING).unlink(missing_ok=True)

    def _run_command(self, step: int, model: Path, out: Path) -> int:
        values = {"checkpoint": str(model), "step": step, "out": str(out)}
        words = [word.format(**values) for word in shlex.split(str(self.args.eval_command))]
        out.parent.mkdir(exist_ok=True)
        with self._slots, out.with_suffix(".log").open("a") as file:
            process = subprocess.Popen(
                words,
                env=environment_outside_launcher() | {"SBATCH_WAIT": "1"},  # an sbatch ends with its job
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            mark_in_use(model, EVALUATING, process.pid)
            while process.poll() is None and not self._is_queued(step):
                time.sleep(0.5)
        return process.wait()

    def _find_job(self, step: int) -> str:
        """The job id that sbatch printed last, or an empty text."""
        path = self.run / EVALUATIONS / f"step-{step}.log"
        printed = path.read_text(errors="replace") if path.exists() else ""
        return (re.findall(r"^Submitted batch job (\d+)", printed, re.MULTILINE) or [""])[-1]

    def _is_queued(self, step: int) -> bool:
        """Whether Slurm knows the job, or does not answer."""
        job = self._find_job(step)
        queue = squeue_states() if job else {}
        return queue is None or job in queue
