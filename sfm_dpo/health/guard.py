"""The guard: applies the rules of guard_rules.py during training, and stops a run that has collapsed."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_callback import ExportableState

from sfm_dpo.common.distributed import broadcast, is_main_process
from sfm_dpo.common.errors import GuardStopped
from sfm_dpo.common.files import write_json
from sfm_dpo.config.checks import HELD_OUT, LENGTH_NORMALIZED_LOSSES, main_loss
from sfm_dpo.config.fields import TrainConfig
from sfm_dpo.data.lengths import count_trained
from sfm_dpo.data.pairs import Pairs
from sfm_dpo.health.guard_rules import SIGMOID_LOSSES, Finding, GuardContext, Log, judge_log
from sfm_dpo.run.checkpoint import keep_before
from sfm_dpo.run.folder import HEALTH, SAMPLES

log = logging.getLogger(__name__)

PROMPTS = 4  # in each round of generations
NEW_TOKENS = 64


class Guard(TrainerCallback, ExportableState):
    """Applies the rules at every log entry; rank 0 decides and all ranks follow. Writes health.json."""

    def __init__(self, chosen_tokens: float, prompts: list[list[int]], skip_time: Callable[[], None]):
        self.chosen_tokens = chosen_tokens  # the divisor of rewards that are sums; 1 for a loss on means
        self.prompts = prompts  # token ids; answered every `guard_generations` steps
        self.skip_time = skip_time  # called after that: its seconds are no step's
        self.findings: list[Finding] = []
        self.stopped: Finding | None = None
        self.last_healthy: str | None = None  # path of a checkpoint
        self.first_texts: list[str] = []  # answers of the first round

    def state(self) -> dict[str, Any]:
        """What a resumed run restores (ResumeCallback)."""
        known = {"findings": self.findings, "last_healthy": self.last_healthy, "first_texts": self.first_texts}
        return {"args": {}, "attributes": known}

    def on_train_begin(self, args, state, control, **kwargs):
        self.findings = [Finding(*values) for values in self.findings]  # lists, from a checkpoint
        loss_type = main_loss(args.loss_type)
        is_sigmoid = len(args.loss_type) == 1 and loss_type in SIGMOID_LOSSES
        warmup_steps = args.get_warmup_steps(state.max_steps)
        other_reference = bool(args.ref_model_name_or_path)
        self.context = GuardContext(
            is_sigmoid, args.beta, self.chosen_tokens, state.max_steps, warmup_steps, other_reference
        )
        self._write_health(args)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" not in (logs or {}) or self.stopped:
            return
        entries = [entry for entry in state.log_history if "loss" in entry]
        known = {finding.signal for finding in self.findings}
        # Metrics are gathered from all ranks, but ranks with different findings would wait for each other forever
        new = broadcast([finding for finding in judge_log(entries, self.context) if finding.signal not in known])
        for finding in new:
            self._report(args, entries, finding)
        if new:
            self._write_health(args)
        if self.stopped:
            control.should_training_stop = True
        return self.on_epoch_end(args, state, control)

    def on_step_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        is_due = self.prompts and (state.global_step % args.guard_generations == 0 or not self.first_texts)
        if is_due and is_main_process():
            self._generate(args, model, processing_class)

    def on_epoch_end(self, args, state, control, **kwargs):
        """Saves nothing once the run is stopped."""
        if self.stopped:
            control.should_save = False
            control.should_evaluate = False
        return control

    def _report(self, args, entries: Log, finding: Finding) -> None:
        self.findings.append(finding)
        level = "warning"
        if finding.stops:
            if is_main_process() and not self.last_healthy:
                # An entry at step s describes the weights after s - 1 updates; checkpoint-s holds them after s updates
                before = max((entry["step"] for entry in entries if entry["step"] < finding.began), default=0)
                checkpoint = keep_before(args.output_dir, before)
                self.last_healthy = str(checkpoint) if checkpoint else None
            if args.guard == "stop":
                level = "stop"
                self.stopped = self.stopped or finding
        log.info(f"guard: {level}: {finding.describe()}; {finding.remedy}")

    def raise_if_stopped(self) -> None:
        if self.stopped:
            raise GuardStopped(
                f"guard: {self.stopped.describe()}; last healthy checkpoint: {self.last_healthy or 'none'}; "
                f"{self.stopped.remedy}, in another output_dir; to train regardless: guard: warn",
                step=self.stopped.step,
                checkpoint=self.last_healthy,
            )

    def _generate(self, args, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Answers the prompts on rank 0, which has all weights under ZeRO-2, and writes samples.json."""
        model.eval()
        answers = continue_prompts(model, tokenizer, self.prompts, NEW_TOKENS)
        model.train()
        self.first_texts = self.first_texts or answers
        prompts = tokenizer.batch_decode(self.prompts, skip_special_tokens=True)
        rows = zip(prompts, self.first_texts, answers, strict=True)
        samples = [dict(zip(("prompt", "before", "after"), row, strict=True), limit=NEW_TOKENS) for row in rows]
        write_json(Path(args.output_dir) / SAMPLES, samples)
        self.skip_time()

    def _write_health(self, args) -> None:
        verdict = "warned" if self.findings else "healthy"
        if any(finding.stops for finding in self.findings):
            verdict = "collapsed"
        health = {"verdict": verdict, "stopped": self.stopped is not None, "last_healthy": self.last_healthy}
        health["reasons"] = [finding.describe() for finding in self.findings]
        health["findings"] = [finding._asdict() for finding in self.findings]
        if is_main_process():
            write_json(Path(args.output_dir) / HEALTH, health)


def make_guard(args: TrainConfig, pairs: Pairs, skip_time: Callable[[], None]) -> Guard | None:
    """The guard of a run on these tokenised pairs, unless `guard` is skip."""
    if args.guard == "skip":
        return None
    chosen_tokens = 1.0
    if main_loss(args.loss_type) not in LENGTH_NORMALIZED_LOSSES:
        chosen_tokens = float(count_trained(pairs.train, args.max_length)[:, 0].mean())
    prompts = list(pairs.splits[HELD_OUT][:PROMPTS]["prompt_ids"]) if args.guard_generations else []
    return Guard(chosen_tokens, prompts, skip_time)


def continue_prompts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], limit: int
) -> list[str]:
    """Greedy answers of up to `limit` tokens to prompts of token ids, in one batch. `model` must be in eval mode."""
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(model.device)
    with torch.inference_mode():
        rows = model.generate(**batch, max_new_tokens=limit, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    eos = tokenizer.eos_token_id
    answers = rows[:, batch["input_ids"].shape[1] :].tolist()
    answers = [ids[: ids.index(eos)] if eos in ids else ids for ids in answers]
    return [text.strip() for text in tokenizer.batch_decode(answers, skip_special_tokens=True)]
