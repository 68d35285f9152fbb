"""Calibration: before anything is spent, a start measures its noise, paths, kernels, memory and speed.

It measures on the model, the pairs and the device of the run, before the reference pass. Gradients are dropped as they
arrive, so no weight changes. What it finds is recorded in data.json as `calibration`; a resumed run reads that.
"""

import logging
import math
import re
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from accelerate.utils import release_memory
from torch.nn.functional import avg_pool1d

from sfm_dpo.common.distributed import gather
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.statistics import LOGP_ROUNDING
from sfm_dpo.data.lengths import Lengths, count_trained
from sfm_dpo.memory.planner import Candidate
from sfm_dpo.model.attention import activate_flash, usable_kernels
from sfm_dpo.model.flops import peak_flops
from sfm_dpo.model.layers import checkpoint_layers
from sfm_dpo.train.fit_memory import MemoryPlan, is_out_of_memory
from sfm_dpo.train.frozen_model import frozen_model
from sfm_dpo.train.metrics import peak_memory_gib
from sfm_dpo.train.settings import Settings
from sfm_dpo.train.upstream import UpstreamFixes

log = logging.getLogger(__name__)

GRADIENT = 8  # relative rounding of a gradient over that of a log-prob: 2**-6.2 and 2**-17.8 were measured
ALLOWED = 4  # a path may differ from the padded one by this many times the noise
WINDOW = 16  # tokens: a leaked key changes only an answer's first log-probs
SAMPLE = 16_384  # gradient elements of each tensor
SMALL = 0.01  # kinds of tensor with a smaller share of the gradient's norm are not compared
FASTER = 0.95  # of FA2's time: another kernel is chosen only if it takes less
ROUNDS = 3  # settings that are tried
REMEDIES = {"packed": "padding_free: false", "shared": "prefix_sharing: false"}

Differences = dict[str, float]  # of "log-probs" in nats; of the gradient's "norm" and of kinds of tensor, relative


@dataclass(frozen=True)
class Calibration:
    # Nats: how far a log-prob differs between batch shapes, the largest mean over WINDOW tokens
    noise: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)  # by path and kernel: largest difference over noise
    planned_bytes: int | None = None  # of the largest micro-batch and the states of training, on each device
    measured_bytes: int | None = None
    milliseconds: dict[str, float] = field(default_factory=dict)  # of an average micro-batch, by kernel
    hours: float | None = None  # of training, without communication, evaluation and saves
    reference_hours: float | None = None
    tokens_per_second: float | None = None  # of a device
    mfu: float | None = None
    seconds: float = 0.0  # that calibration took

    def __str__(self) -> str:
        text = f"noise {self.noise:.2g} nats"
        text += "".join(f", {path} differs by {ratio:.2g} times that" for path, ratio in self.ratios.items())
        if self.measured_bytes and self.planned_bytes:
            text += f"; {self.measured_bytes / 2**30:.2f} GiB measured, {self.planned_bytes / 2**30:.2f} planned"
        if len(self.milliseconds) > 1:
            text += "; " + ", ".join(f"{kernel} {ms:.0f} ms" for kernel, ms in self.milliseconds.items())
        if self.hours is not None:
            text += f"; about {self.hours:.2g} h: {self.tokens_per_second:,.0f} tokens/s a device in a micro-batch, "
            text += f"without communication; reference pass {self.reference_hours:.2g} h"
        return f"{text}; took {self.seconds:.0f} s"


@dataclass
class Computed:
    """What one path gives for a pair: log-probs (nats) of the trained tokens of both responses, and gradients."""

    logps: list[torch.Tensor]
    norm: float = 0.0  # of the gradients of all trained parameters
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # a sample, by the kind of tensor


class Gradients:
    """Takes each gradient of a backward as it arrives: its norm and, if asked, a sample; `grad` stays None."""

    def __init__(self, model: torch.nn.Module, sample: bool):
        self.squares: list[torch.Tensor] = []
        self.sample: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.handles = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                kind = re.sub(r"\.\d+\.", ".", name) if sample else ""  # the same tensor of all layers
                hook = self._make_hook(kind)
                self.handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _make_hook(self, kind: str) -> Any:
        def take(parameter: torch.nn.Parameter) -> None:
            gradient = parameter.grad.flatten()
            parameter.grad = None
            if kind:
                self.squares.append(torch.linalg.vector_norm(gradient, dtype=torch.float32).square())
                self.sample[kind].append(gradient[:: max(1, gradient.numel() // SAMPLE)].float())

        return take

    def collect(self) -> tuple[float, dict[str, torch.Tensor]]:
        for handle in self.handles:
            handle.remove()
        norm = torch.stack(self.squares).sum().sqrt().item() if self.squares else 0.0
        return norm, {kind: torch.cat(parts).cpu() for kind, parts in self.sample.items()}


def calibrate(trainer: Any, plan: MemoryPlan | None) -> tuple[Calibration, Settings]:
    """Measures, and returns the settings that the run should have; a trainer with others must be built again. All
    ranks must call it before the reference pass, and get the same.

    `plan`: the settings that memory may choose from, or None if memory and speed are not measured. Raises UserError
    if a path or kernel differs from the padded one by more than the noise, and if no setting fits into memory.
    """
    begin = time.monotonic()
    # ZeRO-3 and FSDP2 shard the policy only when training begins
    has_backward = trainer.zero_stage != 3 and not trainer.is_fsdp_enabled
    settings = trainer.settings
    result = Calibration()
    with frozen_model(trainer, "policy") as policy, torch.random.fork_rng():
        model = policy.model
        kernels, ratios, noise = compare_paths(trainer, model, has_backward)
        result = replace(result, noise=noise, ratios=ratios)
        if plan and not has_backward:
            log.info(
                "calibration: memory and speed are planned, not measured: weights are sharded when training begins"
            )
        elif plan:
            candidate, measured = find_setting(trainer, model, plan)
            if not settings.is_of(candidate):
                settings = settings.replace_candidate(candidate)
            planned = plan.states + candidate.activations
            flash, speed = measure_speed(trainer, model, settings, kernels)
            settings = replace(settings, flash_attention=flash)
            result = replace(result, planned_bytes=planned, measured_bytes=measured, **speed)
    result = replace(result, seconds=time.monotonic() - begin)
    log.info(f"calibration: {result}")
    return result, settings


def select_pairs(trainer: Any) -> list[int]:
    """Two pairs of median length; on a CPU, where a token is slow, the shortest."""
    lengths = Lengths.of(trainer.train_dataset).truncate(trainer.args.max_length)
    is_trained = count_trained(trainer.train_dataset, trainer.args.max_length).min(axis=1) > 0
    order = np.argsort(np.where(is_trained, lengths.total, np.iinfo(np.int64).max), kind="stable")
    middle = int(is_trained.sum()) // 2 if trainer.accelerator.device.type == "cuda" else 0
    return [int(order[middle]), int(order[min(middle + 1, len(order) - 1)])]


def compute_pair(trainer: Any, model: Any, rows: Sequence[int], path: str, backward: bool) -> Computed:
    """The first of the pairs `rows`, computed in one batch with the others. The gradient is that of the loss at step
    0, where policy and reference agree: of mean log-prob (rejected) - mean log-prob (chosen), up to a factor."""
    batch = trainer.load_batch(trainer.train_dataset, rows)
    mask = batch.pop("completion_mask")
    labels = batch["input_ids"].masked_fill(mask == 0, -100)
    gradients = Gradients(model, sample=True) if backward else None
    options: dict[str, Any] = {"path": path} if trainer.packed else {}
    with torch.set_grad_enabled(backward), precision(trainer):
        log_probs = model(**batch, labels=labels, fused_lm_head=True, use_cache=False, **options).log_probs
    pair = [0, len(rows)]
    trained = mask[pair, 1:].bool()
    logps = log_probs[pair]
    if gradients:
        signs = torch.tensor([[-1.0], [1.0]], device=mask.device)
        (signs * trained / trained.sum(dim=1, keepdim=True) * logps).sum().backward()
    computed = Computed([row[of_row].detach().float().cpu() for row, of_row in zip(logps, trained, strict=True)])
    if gradients:
        computed.norm, computed.gradients = gradients.collect()
    return computed


@torch.no_grad()
def compute_plainly(trainer: Any, model: Any, row: int) -> tuple[Computed, float]:
    """The pair by the model's own forward and head, a sequence at a time, and the root mean square of each token's
    largest logit."""
    batch = trainer.load_batch(trainer.train_dataset, [row])
    logps = []
    largest = []
    columns = (batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
    for padded_ids, mask, padded_completion in zip(*columns, strict=True):
        ids = padded_ids[mask.bool()]
        trained = padded_completion[mask.bool()][1:].bool()
        with precision(trainer), torch.compiler.set_stance("force_eager"):
            output = model(input_ids=ids[None], attention_mask=torch.ones_like(ids[None]), use_cache=False)
        logits = output.logits[0, :-1].float()
        logps.append(torch.log_softmax(logits, dim=-1).gather(1, ids[1:, None])[:, 0][trained].cpu())
        largest.append(logits.abs().amax(dim=-1).square())
    return Computed(logps), torch.cat(largest).mean().sqrt().item()


def precision(trainer: Any) -> Any:
    """Autocast, as in training; FSDP2 and DeepSpeed compute in the precision of their weights."""
    return (
        torch.autocast(trainer.accelerator.device.type, enabled=False)
        if trainer.is_fsdp_enabled
        else (trainer.accelerator.autocast())
    )


def compare(a: Computed, b: Computed) -> Differences:
    """What differs between two computations of a pair: the log-probs by their largest mean over WINDOW tokens."""
    gaps = [(x - y).abs() for x, y in zip(a.logps, b.logps, strict=True)]
    windows = [avg_pool1d(gap[None], min(WINDOW, len(gap)), stride=1) for gap in gaps]
    differences = {"log-probs": max(window.max().item() for window in windows)}
    if a.norm and b.norm:
        differences["gradient's norm"] = abs(b.norm / a.norm - 1)
        sizes = {kind: sample.norm().item() for kind, sample in a.gradients.items()}
        total = math.hypot(*sizes.values())
        for kind, sample in a.gradients.items():
            if sizes[kind] > SMALL * total:
                differences[f"gradient of {kind}"] = (sample - b.gradients[kind]).norm().item() / sizes[kind]
    return {name: max(gather(difference)) for name, difference in differences.items()}  # the same on all ranks


def compare_paths(trainer: Any, model: Any, backward: bool) -> tuple[list[str], dict[str, float], float]:
    """The kernels that agree with FA2, the ratio of differences to noise of each path and kernel, and the noise."""
    rows = select_pairs(trainer)
    rounding = LOGP_ROUNDING[trainer.accelerator.mixed_precision]
    plain, logit = compute_plainly(trainer, model, rows[0])
    with torch.compiler.set_stance("force_eager"):
        alone = compute_pair(trainer, model, rows[:1], "padded", backward)
        beside = compute_pair(trainer, model, rows, "padded", backward)
    floors = {"log-probs": rounding * max(gather(logit))}  # on a CPU two shapes may agree bitwise
    noise = {name: max(value, floors.get(name, GRADIENT * rounding)) for name, value in compare(alone, beside).items()}
    ratios: dict[str, float] = {}

    def judge(name: str, other: Computed) -> str | None:
        """How the path differs; None if noise explains that."""
        times = {what: value / noise[what] for what, value in compare(alone, other).items()}
        worst = max(times, key=lambda what: times[what] if math.isfinite(times[what]) else math.inf)
        ratios[name] = times[worst]
        if times[worst] <= ALLOWED:  # NaN is not
            return None
        size = times[worst] * noise[worst]
        return f"{name} differs from the padded path in {worst} by {size:.2g}, {times[worst]:.0f} times the noise"

    plain_ratio = judge("plain logits", plain)
    if plain_ratio:
        raise UserError(f"calibration: TRL's fused LM head: {plain_ratio}; this model cannot be trained by it")
    for path in ["packed", "shared"][: trainer.packed + trainer.prefix_sharing]:
        if difference := judge(path, compute_pair(trainer, model, rows, path, backward)):
            raise UserError(f"calibration: {difference}; set {REMEDIES[path]}")
    asked = trainer.config.train.flash_attention
    kernels = ["fa2"]
    for kernel in usable_kernels(asked) if trainer.packed else ():
        path = "shared" if trainer.prefix_sharing else "packed"
        activate_flash(kernel)
        difference = judge(kernel, compute_pair(trainer, model, rows, path, backward))
        activate_flash("fa2")
        if difference and asked != "auto":
            raise UserError(f"flash_attention {asked}: {difference}; set flash_attention: fa2")
        if difference:
            log.warning(f"calibration: {difference}; it is not used")
        else:
            kernels.append(kernel)
    return kernels, ratios, noise["log-probs"]


def find_setting(trainer: Any, model: Any, plan: MemoryPlan) -> tuple[Candidate, int]:
    """The setting of least work that has been measured to fit, and its bytes. After each measurement the next one is
    chosen by the ratio of measured to planned activations. Raises UserError if none fits."""
    candidate = plan.choose(plan.states)
    tried: dict[tuple[int, int], tuple[Candidate, int]] = {}
    limit = min(gather(plan.limit))
    for _ in range(ROUNDS):
        size, activations = measure_memory(trainer, model, candidate, plan)
        states = size - activations
        if not math.isfinite(size):
            states = plan.states
            activations = 1.1 * max(limit - states, candidate.activations)
        tried[candidate.per_device, candidate.checkpointed_layers] = candidate, size
        log.info(f"calibration: {candidate}; {size / 2**30:.2f} GiB measured of {limit / 2**30:.2f}")
        candidate = plan.choose(int(states), activations / candidate.activations)
        if (candidate.per_device, candidate.checkpointed_layers) in tried:
            break
    fitting = [(tested, int(size)) for tested, size in tried.values() if size <= limit]
    if not fitting:
        plan.refuse(candidate)
    return min(fitting, key=lambda found: found[0].work)


def measure_memory(trainer: Any, model: Any, candidate: Candidate, plan: MemoryPlan) -> tuple[float, float]:
    """Bytes of a process at the peak of the largest micro-batch, with the states of training, and of its activations;
    the most of all ranks; both inf if a rank has run out of memory."""
    device = trainer.accelerator.device
    rows = trainer.train_sampler.largest_micro_batch(candidate.per_device)
    release_memory()
    on_gpu = device.type == "cuda"
    reserved = torch.empty(plan.absent if on_gpu else 0, dtype=torch.uint8, device=device)
    absent = 0 if on_gpu else plan.absent  # a CPU's pages would be taken only when they are written
    before = reset_peak_memory()
    try:
        run_micro_batch(trainer, model, rows, candidate.checkpointed_layers)
        peak = peak_memory_gib() * 2**30
        found = (peak + absent, peak - before)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
        found = (math.inf, math.inf)
    del reserved
    every = gather(found)
    return max(size for size, _ in every), max(activations for _, activations in every)


def reset_peak_memory() -> float:
    """Begins a new peak; returns the bytes that are allocated on the GPU or, without one, resident."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with suppress(OSError):  # then the peak since the start counts
        Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak resident set (proc(5))
    return psutil.Process().memory_info().rss


def run_micro_batch(trainer: Any, model: Any, rows: Sequence[int], checkpointed_layers: int) -> None:
    """Forward and backward of TRL's loss, as in training; gradients are dropped."""
    gradients = Gradients(model, sample=False)
    layers = trainer.bare_model()
    layers.activation_checkpointing_enable(trainer.args.activation_checkpointing_kwargs)
    checkpoint_layers(layers, checkpointed_layers)
    model.train()
    try:
        batch = trainer.load_batch(trainer.train_dataset, rows)
        trainer.progress.phase = "calibration"
        reference = batch["input_ids"].new_zeros(len(rows), dtype=torch.float32)
        batch |= {"ref_chosen_logps": reference, "ref_rejected_logps": reference}
        with precision(trainer):
            loss = UpstreamFixes._compute_loss(trainer, model, batch, False)
        loss.backward()
    finally:
        gradients.collect()
        model.eval()
        layers.activation_checkpointing_disable()


def measure_speed(trainer: Any, model: Any, settings: Settings, kernels: list[str]) -> tuple[str, dict[str, Any]]:
    """The fastest kernel, and for `Calibration` what an average micro-batch takes with it."""
    args = trainer.config.train
    sampler = trainer.train_sampler
    micro_batches = sampler.micro_batches(sampler.steps(0), settings.micro_batch).reshape(-1, settings.micro_batch)
    costs = sampler.layout.cost[micro_batches].sum(axis=1)
    rows = micro_batches[np.abs(costs - costs.mean()).argmin()]
    milliseconds = {}
    for kernel in kernels:
        if trainer.packed:
            activate_flash(kernel)
        times = []
        for _ in range(1 + (len(kernels) > 1)):  # a kernel that has not run may have to be compiled
            times.append(measure_seconds(trainer, run_micro_batch, trainer, model, rows, settings.checkpointed_layers))
        milliseconds[kernel] = 1000 * max(gather(times[-1]))
    fastest = min(milliseconds, key=lambda kernel: milliseconds[kernel])
    if milliseconds[fastest] > FASTER * milliseconds["fa2"] or args.flash_attention not in ("auto", fastest):
        fastest = "fa2" if args.flash_attention == "auto" else args.flash_attention
    if trainer.packed:
        activate_flash(fastest)
    seconds = milliseconds[fastest] / 1000
    batch = trainer.load_batch(trainer.train_dataset, rows)
    forward = measure_seconds(trainer, trainer.compute_ref_log_probs, model, batch)
    steps = args.max_steps if args.max_steps > 0 else len(sampler) / args.global_batch_size * args.num_train_epochs
    turns = len(sampler) / settings.micro_batch / trainer.accelerator.num_processes  # of the reference pass
    counts = trainer.data_collator([trainer.train_dataset[int(row)] for row in rows])["counts"]
    peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return fastest, {
        "milliseconds": milliseconds,
        "hours": steps * settings.accumulation_steps * seconds / 3600,
        "reference_hours": turns * forward / 3600,
        "tokens_per_second": counts["tokens"] / seconds,
        "mfu": counts["flops"] / seconds / peak if peak else None,
    }


def measure_seconds(trainer: Any, action: Callable[..., Any], *args: Any) -> float:
    """Seconds until the device has done the work of `action`."""
    begin = time.monotonic()
    action(*args)
    if trainer.accelerator.device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic() - begin
