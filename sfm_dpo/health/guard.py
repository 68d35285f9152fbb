"""The guard: applies the rules of guard_rules.py during training, and stops a run that has collapsed."""

import logging
from collections.abc import Callable
from difflib import SequenceMatcher
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
from sfm_dpo.health.guard_rules import SIGMOID_LOSSES, START, Finding, GuardContext, judge_log
from sfm_dpo.model.loading import balancing_coefficient
from sfm_dpo.run.checkpoint import keep_before, newest_checkpoint
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
        self.run = ""  # absolute output_dir of the run that `began` and `findings` are of
        self.began = 0  # the step after which it began
        self.findings: list[Finding] = []
        self.stopped: Finding | None = None
        self.last_healthy: str | None = None  # path of a checkpoint; on rank 0
        self.first_texts: list[str] = []  # answers of the first round

    def state(self) -> dict[str, Any]:
        """What a resumed run restores (ResumeCallback)."""
        known = {"run": self.run, "began": self.began, "findings": self.findings, "first_texts": self.first_texts}
        return {"args": {}, "attributes": known}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        run = str(Path(args.output_dir).absolute())
        if self.run != run:  # a new run, or one that starts from another run's checkpoint
            self.run = run
            self.began = state.global_step
            self.findings = []
        self.findings = [Finding(*values) for values in self.findings]  # lists, from a checkpoint
        is_sigmoid = len(args.loss_type) == 1 and args.loss_type[0] in SIGMOID_LOSSES
        warmup = max(args.get_warmup_steps(state.max_steps), self.began)
        other = bool(args.ref_model_name_or_path)
        self.context = GuardContext(is_sigmoid, args.beta, self.chosen_tokens, state.max_steps, warmup, other)
        self.balancing = balancing_coefficient(args.router_aux_loss_coef, model.config)  # of what is no DPO loss
        self.on_save(args, state, control)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" not in (logs or {}) or self.stopped:
            return
        known = {finding.signal for finding in self.findings if finding.mode == args.guard}
        # A checkpoint of another run also holds that run's entries
        entries = [entry for entry in state.log_history if "loss" in entry and entry["step"] > self.began]
        entries = [entry | {"loss": entry["loss"] - self.balancing * entry.get("aux_loss", 0.0)} for entry in entries]
        start = [] if self.began or self.context.other_reference else [START]
        found = judge_log([*start, *entries], self.context)
        # Metrics are gathered from all ranks, but ranks with different findings would wait for each other forever
        new = broadcast([finding._replace(mode=args.guard) for finding in found if finding.signal not in known])
        self.findings += new
        for finding in new:
            is_stop = finding.stops and args.guard == "stop"
            log.info(f"guard: {'stop' if is_stop else 'warning'}: {finding.describe()}; {finding.remedy}")
            if is_stop:
                self.stopped = self.stopped or finding
        if new:
            self.on_save(args, state, control)
        if self.stopped:
            control.should_training_stop = True
        return self.on_epoch_end(args, state, control)

    def on_step_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        """Answers the prompts on rank 0, which has all weights under ZeRO-2, and writes samples.json, the answer that
        has changed most first."""
        is_due = self.prompts and (state.global_step % args.guard_generations == 0 or not self.first_texts)
        if not is_due or not is_main_process():
            return
        model.eval()
        answers = continue_prompts(model, processing_class, self.prompts, NEW_TOKENS)
        model.train()
        self.first_texts = self.first_texts or answers
        prompts = processing_class.batch_decode(self.prompts, skip_special_tokens=True)
        rows = zip(prompts, self.first_texts, answers, strict=True)
        samples = [dict(zip(("prompt", "before", "after"), row, strict=True), limit=NEW_TOKENS) for row in rows]
        samples.sort(key=lambda sample: SequenceMatcher(None, sample["before"], sample["after"]).ratio())
        write_json(Path(args.output_dir) / SAMPLES, samples)
        self.skip_time()

    def on_epoch_end(self, args, state, control, **kwargs):
        """Saves nothing once the run is stopped."""
        if self.stopped:
            control.should_save = False
            control.should_evaluate = False
        return control

    def raise_if_stopped(self) -> None:
        if self.stopped:
            raise GuardStopped(
                f"guard: {self.stopped.describe()}",
                f"{self.stopped.remedy}; or train on with --guard warn",
                step=self.stopped.step,
                checkpoint=self.last_healthy,
            )

    def on_save(self, args, state, control, **kwargs):
        """Writes health.json, with the newest checkpoint from before a collapse as the last healthy one."""
        if not is_main_process():
            return
        verdict = "warned" if self.findings else "healthy"
        checkpoint = newest_checkpoint(args.output_dir)
        stops = [finding for finding in self.findings if finding.stops]
        if stops:
            verdict = "standstill"
        if collapses := [finding.began for finding in stops if finding.signal != "standstill"]:
            verdict = "collapsed"
            # An entry at step s describes the weights after s - 1 updates; checkpoint-s holds them after s updates
            steps = [entry["step"] for entry in state.log_history if "loss" in entry]
            checkpoint = keep_before(args.output_dir, max(step for step in (0, *steps) if step < min(collapses)))
        self.last_healthy = str(checkpoint) if checkpoint else None
        health = {"verdict": verdict, "stopped": self.stopped is not None, "last_healthy": self.last_healthy}
        health["reasons"] = [finding.describe() for finding in self.findings]
        health["findings"] = [finding._asdict() for finding in self.findings]
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
