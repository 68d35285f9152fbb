"""Is it going well? Applies the rules of signals.py while training, and stops a run that is past saving."""

import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback

from sfm_dpo.common.distributed import is_main_process
from sfm_dpo.common.errors import GuardStopped, UserError
from sfm_dpo.common.files import write_atomically
from sfm_dpo.config_checks import LENGTH_NORMALIZED_LOSSES
from sfm_dpo.health.generation import Answer, continue_prompts, repeated_4grams
from sfm_dpo.health.guard_rules import FAST, SIGMOID_LOSSES, Finding, Log, Run, judge, observed
from sfm_dpo.health.preflight import response_lengths
from sfm_dpo.model.sharding import local_values
from sfm_dpo.run.checkpoint import KEEP, checkpoints, keep_before, step_of

HEALTH, SAMPLES = "health.json", "samples.json"
AUTHOR = "guard"  # of its KEEP files
PROMPTS, NEW_TOKENS = 4, 64  # of one round of generations


class Guard(TrainerCallback):
    """Applies the rules at every log entry; rank 0 decides and all ranks follow. Writes health.json.

    Args:
        trainer: SFMDPOTrainer; it must know the guard as a callback (`trainer.add_callback`).
        mode: "stop", or "warn" to name findings and go on.
        prompts: token ids of held-out prompts for generations, which happen where `every` is above 0.
        every: optimizer steps between generations.
    """

    def __init__(self, trainer: Any, mode: str, prompts: Iterable[list[int]] = (), every: int = 0):
        self.trainer, self.mode, self.every = trainer, mode, every
        self.prompts = list(prompts)[:PROMPTS]
        self.findings: list[Finding] = []
        self.stopped: Finding | None = None
        self.last_healthy: str | None = None
        self.answers: list[list[Answer]] = []
        self.seconds = {"rules": 0.0, "answers": 0.0}  # what the guard itself cost

    def on_train_begin(self, args, state, control, **kwargs):
        normalized = args.loss_type[0] in LENGTH_NORMALIZED_LOSSES
        names = ["prompt_length", "chosen_length", "rejected_length"]
        columns = self.trainer.train_dataset.select_columns(names).with_format("numpy")[:]
        lengths = response_lengths(columns, args.max_length)[:, 0]
        self.run = Run(
            sigmoid=len(args.loss_type) == 1 and args.loss_type[0] in SIGMOID_LOSSES,
            beta=args.beta,
            chosen_tokens=1.0 if normalized else float(lengths.mean()),
            max_steps=state.max_steps,
            warmup_steps=args.get_warmup_steps(state.max_steps),
        )
        self.weights = _sample_of_weights(self.trainer.model)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" not in (logs or {}) or self.stopped:
            return
        start = time.monotonic()
        if self.every and (state.global_step % self.every == 0 or not self.answers):
            state.log_history[-1].update(self._generate(args))  # into trainer_state.json
        self.seconds["answers"] += time.monotonic() - start
        start = time.monotonic()
        log = [entry for entry in state.log_history if "loss" in entry]
        known = {finding.signal for finding in self.findings}
        # The metrics were gathered from all ranks and should be equal on them. A hang is the price of "should".
        new = [[f for f in judge(log, self.run) if f.signal not in known]]
        broadcast_object_list(new)
        for finding in new[0]:
            self.findings.append(finding)
            if finding.stops and self.last_healthy is None and is_main_process():
                self.last_healthy = self._keep_last_healthy(args, log, finding)
            self._say(finding)
            if finding.stops and self.mode == "stop" and not self.stopped:
                self.stopped = finding
        if self.stopped:
            control.should_training_stop, control.should_save, control.should_evaluate = True, False, False
        self.seconds["rules"] += time.monotonic() - start
        if new[0]:
            self._write(args, log)
        return control

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.stopped:  # save_strategy: epoch
            control.should_save, control.should_evaluate = False, False
        return control

    def on_save(self, args, state, control, **kwargs):
        """Keeps from rotation what may turn out to be the last healthy checkpoint.

        A collapse is seen up to FAST steps after it began, so that is the newest checkpoint of FAST steps ago, and
        the one that will be it next. Checkpoints further apart than FAST stay long enough without help.
        """
        limit = args.save_total_limit
        if not is_main_process() or self.last_healthy or limit is None:
            return
        kept = keep_before(args.output_dir, state.global_step - FAST + 1, AUTHOR)
        after = [c for c in checkpoints(args.output_dir) if step_of(c) > (step_of(kept) if kept else 0)]
        after = [c for c in after if not (c / KEEP).exists() or (c / KEEP).read_text() == AUTHOR]
        if len(after) > 1 and not any((c / KEEP).exists() for c in after):
            (after[0] / KEEP).write_text(AUTHOR)

    def on_train_end(self, args, state, control, **kwargs):
        self._write(args, [entry for entry in state.log_history if "loss" in entry])

    def raise_if_stopped(self) -> None:
        """Raises GuardStopped where the guard stopped the run."""
        if self.stopped:
            f = self.stopped
            healthy = (
                f"last healthy checkpoint: {self.last_healthy}"
                if self.last_healthy
                else ("no checkpoint was saved before it: the base model is the last healthy one")
            )
            raise GuardStopped(
                f"guard: {f.signal} at step {f.step}, begun at step {f.began}: {f.seen}; {healthy}; {f.remedy}, in "
                "another run; guard: warn goes on regardless",
                step=f.step,
                checkpoint=self.last_healthy,
            )

    def _keep_last_healthy(self, args, log: Log, finding: Finding) -> str | None:
        """An entry at step s tells of the weights after s - 1 updates, and checkpoint-s holds s updates."""
        before = [entry["step"] for entry in log if entry["step"] < finding.began]
        kept = keep_before(args.output_dir, before[-1] if before else 0, AUTHOR)
        return str(kept) if kept else None

    def _say(self, finding: Finding) -> None:
        if is_main_process():
            word = "stop" if finding.stops and self.mode == "stop" else "warning"
            moved = f"; {self._moved():.1%} of the sampled weights changed" if finding.signal == "standstill" else ""
            where = f"; last healthy checkpoint: {self.last_healthy or 'none'}" if finding.stops else ""
            print(
                f"guard: {word}: {finding.signal} at step {finding.step}, begun at step {finding.began}: "
                f"{finding.seen}{moved}{where}; {finding.remedy}",
                flush=True,
            )

    def _moved(self) -> float:
        """Share of the sampled weights that are not what they were at the start."""
        now = _sample_of_weights(self.trainer.model)
        return (now != self.weights).float().mean().item() if len(now) else math.nan

    def _generate(self, args) -> dict[str, float]:
        """Greedy answers to the prompts, by rank 0, which holds whole weights under ZeRO-2 as all ranks do."""
        if not is_main_process():
            return {}
        trainer = self.trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.eval()
        answers = continue_prompts(model, trainer.processing_class, self.prompts, NEW_TOKENS)
        model.train()
        self.answers.append(answers)
        prompts = trainer.processing_class.batch_decode(self.prompts, skip_special_tokens=True)
        first = self.answers[0]
        samples = [
            {"prompt": p, "before": b.text, "after": a.text, "before_tokens": b.tokens, "after_tokens": a.tokens}
            for p, b, a in zip(prompts, first, answers, strict=True)
        ]
        write_atomically(Path(args.output_dir) / SAMPLES, json.dumps(samples, indent=2) + "\n")
        return {
            "guard/repeated_4grams": repeated_4grams([a.text for a in answers]),
            "guard/empty_answers": fmean(not a.text for a in answers),
            "guard/answer_tokens": fmean(a.tokens for a in answers),
        }

    def _write(self, args, log: Log) -> None:
        if not is_main_process():
            return
        stops = [f for f in self.findings if f.stops]
        health = {
            "verdict": "collapsed" if stops else "warned" if self.findings else "healthy",
            "reasons": [f"{f.signal} at step {f.step}, begun at step {f.began}: {f.seen}" for f in self.findings],
            "guard": args.guard,
            "stopped": self.stopped is not None,
            "last_healthy": self.last_healthy,
            "steps": log[-1]["step"] if log else 0,
            "findings": [f._asdict() for f in self.findings],
            "observed": observed(log),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }
        write_atomically(Path(args.output_dir) / HEALTH, json.dumps(health, indent=2) + "\n")


def add_guard(trainer: Any) -> Guard | None:
    """Adds the guard that the trainer's arguments ask for, or none.

    Raises:
        UserError: generations are asked for where no rank holds whole weights.
    """
    args = trainer.args
    if args.guard == "skip":
        return None
    sharded = trainer.is_fsdp_enabled or trainer.is_zero3
    if args.guard_generations and sharded:
        raise UserError(
            f"guard_generations {args.guard_generations}: needs whole weights on each rank; use ZeRO-2, or 0"
        )
    prompts = list(trainer.eval_dataset[:PROMPTS]["prompt_ids"]) if args.guard_generations else []
    guard = Guard(trainer, args.guard, prompts, args.guard_generations)
    trainer.add_callback(guard)
    return guard


def _sample_of_weights(model: torch.nn.Module) -> torch.Tensor:
    """Up to 1,024 elements of each trainable tensor (of what this rank has of it), in one row on the CPU."""
    parts = [local_values(p).flatten()[:1024].float().cpu() for p in model.parameters() if p.requires_grad]
    return torch.cat(parts) if parts else torch.empty(0)
