"""Calibration: before anything is spent, a start measures its noise, paths, kernels, memory and speed.

It measures on the model, the pairs and the device of the run, before the reference pass. Gradients are dropped as they
arrive, so no weight changes. fit.py decides by what is measured here.
"""

import ctypes
import functools
import logging
import math
import re
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import AutocastKwargs, release_memory
from torch.nn.functional import avg_pool1d

from sfm_dpo.common.distributed import gather
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.process import resident_bytes
from sfm_dpo.common.statistics import LOGP_ROUNDING, TYPICAL_LOGIT
from sfm_dpo.data.lengths import Lengths, count_trained
from sfm_dpo.memory.planner import Candidate
from sfm_dpo.model.attention import activate_flash, usable_kernels
from sfm_dpo.model.flops import attention_flops, peak_flops
from sfm_dpo.model.loading import blocks, checkpoint_layers
from sfm_dpo.model.packing import find_delta_nets, has_delta_net_kernels
from sfm_dpo.train.callbacks import is_out_of_memory
from sfm_dpo.train.frozen_model import frozen_model
from sfm_dpo.train.metrics import peak_memory_gib

log = logging.getLogger(__name__)

GRADIENT = 8  # relative rounding of a gradient over that of a log-prob: 2**-6.2 and 2**-17.8 were measured
ALLOWED = 4  # a path may differ from the padded one by this many times the noise
WINDOW = 16  # tokens: a leaked key changes only an answer's first log-probs
SAMPLE = 16_384  # gradient elements of each tensor
SMALL = 0.01  # kinds of tensor with a smaller share of the gradient's norm are not compared
FASTER = 0.95  # of FA2's time: another kernel is chosen only if it takes less
SAMPLES = 3  # of a duration
ENOUGH = 4.0  # seconds
Rows = tuple[tuple[int, ...], tuple[int, ...]]
REPORT = "it may be a false alarm: report this line with the model's name and environment.json"


@dataclass
class Computed:
    """What one path gives for a pair; without a backward it has no gradients."""

    logps: list[torch.Tensor] = field(default_factory=list)  # nats, of the trained tokens of both responses
    norms: list[torch.Tensor] = field(default_factory=list)  # of the gradient of each trained parameter
    gradients: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)  # by kind and name: a sample of each

    def norm(self) -> float:
        return torch.linalg.vector_norm(torch.stack(self.norms)).item()


@contextmanager
def take_gradients(model: torch.nn.Module, computed: Computed | None = None) -> Iterator[None]:
    """Takes each gradient of a backward as it arrives, so that `grad` stays None; `computed` keeps them."""

    def take(name: str, parameter: torch.nn.Parameter) -> None:
        gradient = parameter.grad.flatten()  # type: ignore[union-attr]
        parameter.grad = None
        if computed:
            computed.norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float32))
            # A kind is the same tensor of all layers. Norms and biases, small and noisy, are one kind
            kind = re.sub(r"\.\d+\.", ".", name) if parameter.dim() > 1 else "norms and biases"
            sample = gradient[:: gradient.numel() // SAMPLE | 1]  # odd: of all columns
            computed.gradients[kind, name] = sample.float().cpu()

    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    handles = [p.register_post_accumulate_grad_hook(partial(take, name)) for name, p in trained.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad()  # of a backward that ran out of memory


@contextmanager
def base_policy(trainer: Any) -> Iterator[Any]:
    """The policy, which must still be the base model, on its device; the random state is restored afterwards."""
    device = trainer.accelerator.device
    devices = [device] if device.type == "cuda" else []
    with frozen_model(trainer, "policy") as policy, torch.random.fork_rng(devices):
        yield policy.model


def load_batch(trainer: Any, rows: Sequence[int]) -> dict[str, torch.Tensor]:
    batch = trainer.load_batch(trainer.train_dataset, rows)
    trainer.progress.phase = "calibration"
    return batch


def select_pairs(trainer: Any) -> list[Rows]:
    """Batches of rows, in twos: the first row of a batch is compared, and if it differs that of the other one, too.
    They are two pairs of median length (on a CPU, where a token is slow, the shortest) and, on a GPU, two that are
    longer than the model's largest attention window, each alone, where there are any."""
    lengths = Lengths.of(trainer.train_dataset).truncate(trainer.args.max_length)
    is_trained = count_trained(trainer.train_dataset, trainer.args.max_length).min(axis=1) > 0
    order = np.argsort(np.where(is_trained, lengths.total, np.iinfo(np.int64).max), kind="stable")
    on_gpu = trainer.accelerator.device.type == "cuda"
    middle = int(is_trained.sum()) // 2 if on_gpu else 0
    first, second = int(order[middle]), int(order[min(middle + 1, len(order) - 1)])
    batches: list[Rows] = [((first, second), (second, first))]
    layers = attention_flops(trainer.bare_model().config.get_text_config())
    window = max((size for size, _ in layers if size), default=0)
    beyond = [int(row) for row in order[: is_trained.sum()] if lengths.total[row] >= window + WINDOW]
    if on_gpu and window and beyond and first not in beyond:
        batches.append(((beyond[0],), (beyond[min(1, len(beyond) - 1)],)))
    return batches


@contextmanager
def computing(trainer: Any, model: Any, backward: bool, stance: str = "force_eager") -> Iterator[Computed]:
    """For a forward that fills `logps`; then follows the backward of the loss at step 0, where policy and reference
    agree, up to a factor."""
    result = Computed()
    layers = trainer.settings.checkpointed_layers
    if trainer.accelerator.device.type == "cuda":  # these pairs may need more memory than the run's micro-batch
        layers = len(blocks(model))
    checkpoints = checkpointed(trainer, layers)
    with torch.compiler.set_stance(stance), take_gradients(model, result), checkpoints, precision(trainer):
        with torch.set_grad_enabled(backward):
            yield result
        if backward:
            chosen, rejected = (logps.sum() / max(len(logps), 1) for logps in result.logps)
            (rejected - chosen).backward()
    result.logps = [logps.detach().float().cpu() for logps in result.logps]


def compute_pair(trainer: Any, model: Any, backward: bool, path: str, rows: Sequence[int], place: int = 0) -> Computed:
    """The pair at `place` of the pairs `rows`, computed in one batch with the others."""
    batch = load_batch(trainer, rows)
    mask = batch.pop("completion_mask")
    labels = batch["input_ids"].masked_fill(mask == 0, -100)
    options: dict[str, Any] = {"path": path} if trainer.packed else {}
    with computing(trainer, model, backward, "force_eager" if path == "padded" else "default") as result:
        log_probs = model(**batch, labels=labels, fused_lm_head=True, use_cache=False, **options).log_probs
        result.logps = [log_probs[row][mask[row, 1:].bool()] for row in (place, place + len(rows))]
    return result


def compute_plainly(trainer: Any, model: Any, row: int, backward: bool) -> tuple[Computed, float]:
    """The pair by the model's own forward and head, a sequence at a time without a mask, and the root mean square of
    each token's largest logit."""
    batch = load_batch(trainer, [row])
    largest = []
    columns = (batch["input_ids"], batch["attention_mask"].bool(), batch["completion_mask"])
    with computing(trainer, model, backward) as result:
        for padded_ids, is_token, padded_completion in zip(*columns, strict=True):
            ids = padded_ids[is_token]
            trained = padded_completion[is_token][1:].bool()
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
            result.logps.append(torch.log_softmax(logits, dim=-1).gather(1, ids[1:, None])[:, 0][trained])
            largest.append(logits.detach().abs().amax(dim=-1).square())
    return result, torch.cat(largest).mean().sqrt().item()


def precision(trainer: Any) -> Any:
    """Autocast, as in training; FSDP2 and DeepSpeed compute in the precision of their weights."""
    return trainer.accelerator.autocast(AutocastKwargs(enabled=not trainer.is_fsdp_enabled))


@contextmanager
def checkpointed(trainer: Any, layers: int) -> Iterator[None]:
    """Checkpoints so many layers, as training does; dropout stays off."""
    model = trainer.bare_model()
    if not layers:  # also of a model that has no checkpointing
        yield
        return
    options = {k: v for k, v in trainer.args.activation_checkpointing_kwargs.items() if k != "every_n_layers"}
    offload = options.pop("offload", False)
    model.activation_checkpointing_enable(options or None, offload=offload)
    checkpoint_layers(model, layers)
    for layer in blocks(model):
        layer.training = True  # not the modules in it
    try:
        yield
    finally:
        model.eval()
        model.activation_checkpointing_disable()


def compare(a: Computed, b: Computed) -> dict[str, float]:
    """What differs between two computations of a pair, the most of all ranks: log-probs in nats, by their largest mean
    over WINDOW tokens; relative, the gradient's norm and the gradients of each kind of tensor."""
    gaps = [(x - y).abs() for x, y in zip(a.logps, b.logps, strict=True) if len(x)]
    windows = [avg_pool1d(gap[None], min(WINDOW, len(gap)), stride=1).max().item() for gap in gaps]
    found = {"log-probs": max(windows, default=0.0)}
    if b.norms and a.norm():
        found["gradient's norm"] = abs(b.norm() / a.norm() - 1)
        sizes: dict[str, float] = defaultdict(float)  # squared, by kind
        differences: dict[str, float] = defaultdict(float)
        for kind, name in a.gradients | b.gradients:
            mine, other = (of.gradients.get((kind, name), torch.zeros(1)) for of in (a, b))  # an expert without tokens
            sizes[kind] += mine.square().sum().item()
            differences[kind] += (other - mine).square().sum().item()
        compared = [kind for kind in sizes if sizes[kind] > SMALL**2 * sum(sizes.values())]
        found |= {f"gradient of {kind}": math.sqrt(differences[kind] / sizes[kind]) for kind in compared}
    every = gather({what: size if math.isfinite(size) else math.inf for what, size in found.items()})
    return {what: max(of_rank.get(what, 0.0) for of_rank in every) for what in set().union(*every)}


class Baseline:
    """The first pair of `rows` by the padded path, alone, and its noise: how far other right computations of the pair
    differ from that, the largest of several, as a single one may agree by chance."""

    def __init__(self, trainer: Any, model: Any, backward: bool, rows: tuple[int, ...]):
        compute = partial(compute_pair, trainer, model, backward, "padded")
        rounding = LOGP_ROUNDING[trainer.accelerator.mixed_precision]
        logit = TYPICAL_LOGIT
        if trainer.zero_stage != 3:  # DeepSpeed would expect the head's module in each later forward, too
            self.plain, logit = compute_plainly(trainer, model, rows[0], backward)
        self.alone = compute(rows[:1])
        self.least = GRADIENT * rounding  # where two shapes agree, as they may on a CPU
        self.noise = {"log-probs": rounding * max(gather(logit))}
        if len(rows) > 1:
            self.add_noise(compute(rows))
            self.add_noise(compute(rows[::-1], place=1))
        if trainer.zero_stage != 3:
            self.add_noise(self.plain, ALLOWED)  # by another kernel, as without a mask

    def add_noise(self, right: Computed, most: float = math.inf) -> None:
        """`most`: by how many times the noise may grow."""
        for what, size in compare(self.alone, right).items():
            before = self.noise.get(what, self.least)
            self.noise[what] = max(before, min(size, most * before))

    def count_times(self, other: Computed) -> dict[str, tuple[float, float]]:
        """By what differs: how many times the noise, and how far."""
        differences = compare(self.alone, other)
        return {what: (size / self.noise.get(what, self.least), size) for what, size in differences.items()}


def compare_paths(
    trainer: Any, model: Any, backward: bool, batches: list[Rows]
) -> tuple[float, dict[str, float], list[str]]:
    """The noise of log-probs, the ratio of differences to noise of each path and kernel, and the kernels that may be
    used, FA2 first. Raises PathError or, for the kernel that is asked for, UserError for more than noise."""
    activate_flash("fa2")
    baseline = functools.cache(partial(Baseline, trainer, model, backward))
    compute = partial(compute_pair, trainer, model, backward)
    ratios: dict[str, float] = {}

    def find_difference(name: str, compute: Callable[[tuple[int, ...]], Computed]) -> str | None:
        """How the path differs by more than noise, in both of two pairs."""
        for rows, others in batches:
            times = baseline(rows).count_times(compute(rows))
            if max(times.values())[0] > ALLOWED:
                again = baseline(others).count_times(compute(others))
                times = {what: min(found, again.get(what, found)) for what, found in times.items()}
            worst = max(times, key=lambda what: times[what])
            ratio, size = times[worst]
            if ratio > ALLOWED:
                return f"{name} differs from padded in {worst} by {size:.2g}, {ratio:.0f} times noise"
            ratios[name] = max(ratio, ratios.get(name, 0.0))
        return None

    noise = baseline(batches[0][0]).noise
    for what, size in noise.items():
        if not math.isfinite(size):
            remedy = "check its weights, or use bf16"
            if find_delta_nets(model) and has_delta_net_kernels():
                remedy = "the kernels return NaN on some GPUs, such as B200: pip uninstall flash-linear-attention"
            raise UserError(f"calibration: the base model's {what} are not finite; {remedy}")
    has_plain = trainer.zero_stage != 3
    if has_plain and (difference := find_difference("TRL's fused head", lambda rows: baseline(rows).plain)):
        raise UserError(f"calibration: {difference}; it cannot train this model; {REPORT}")
    paths = ["padded", "packed", "shared"][: 1 + trainer.packed + trainer.prefix_sharing]
    for path in paths[1:]:
        if difference := find_difference(path, partial(compute, path)):
            raise PathError(f"calibration: {difference}; {REPORT}", path=path)
    asked = trainer.config.train.flash_attention
    usable = ["fa2"]
    takes_flash = trainer.packed and not trainer.attention_kernel().startswith("SDPA")
    for kernel in usable_kernels(asked) if takes_flash else ():
        try:
            difference = find_difference(kernel, partial(run_by_kernel, kernel, compute, paths[-1]))
        except KernelError as error:
            difference = str(error)
        if difference and asked != "auto":
            raise UserError(f"flash_attention {asked}: {difference}; set flash_attention: fa2")
        if difference:
            log.warning(f"calibration: {difference}; it is not used")
        else:
            usable.append(kernel)
    return noise["log-probs"], ratios, usable


class PathError(UserError):
    """A path of the model, packed or shared in `status["path"]`, differs from the padded one."""


class KernelError(Exception):
    """Why an attention kernel fails; raised on all ranks if it fails on one."""


def run_by_kernel(kernel: str, action: Callable[..., Any], *args: Any) -> Any:
    """What `action`, which may not wait for other ranks, returns with another kernel than FA2. All ranks must call it.
    Raises KernelError."""
    result = failure = None
    try:
        activate_flash(kernel)
        result = action(*args)
    except Exception as error:  # of an import, a compilation or a launch
        traceback.clear_frames(error.__traceback__)  # which hold memory
        failure = str(error).partition("\n")[0] or type(error).__name__
    finally:
        activate_flash("fa2")
    if failures := [text for text in gather(failure) if text]:
        raise KernelError(f"{kernel} fails: {failures[0]}")
    return result


def measure_memory(
    trainer: Any, model: Any, candidate: Candidate, absent: int, resident: float
) -> tuple[float, float]:
    """Bytes of a process at the peak of the largest micro-batch, with the states of training, and of its activations;
    the most of all ranks; both inf if a rank has run out of memory. `absent`: bytes that training will allocate
    besides; `resident`: bytes before anything had run."""
    device = trainer.accelerator.device
    rows = trainer.train_sampler.largest_micro_batch(candidate.per_device)
    release_memory()
    try:
        # A CPU's pages would be taken only when they are written
        reserved: Any = torch.empty(absent if device.type == "cuda" else 0, dtype=torch.uint8, device=device)
        reset_peak_memory()
        run_micro_batch(trainer, model, rows, candidate.checkpointed_layers)
        peak = peak_memory_gib() * 2**30
        found = (peak + absent - reserved.nbytes, peak - reserved.nbytes - resident)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
        found = (math.inf, math.inf)
    reserved = None
    sizes, activations = zip(*gather(found), strict=True)
    return max(sizes), max(1.0, *activations)


def reset_peak_memory() -> float:
    """Begins a new peak; returns the bytes that are allocated on the GPU or, without one, resident."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with suppress(AttributeError):  # glibc keeps what is freed, so it would count as used; others have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):  # then the peak since the start counts
        Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak resident set (proc(5))
    return resident_bytes()


def run_micro_batch(trainer: Any, model: Any, rows: Sequence[int], checkpointed_layers: int) -> None:
    """Forward and backward of TRL's loss, as in training; gradients are dropped."""
    batch = load_batch(trainer, rows)
    reference = batch["input_ids"].new_zeros(len(rows), dtype=torch.float32)
    batch |= {"ref_chosen_logps": reference, "ref_rejected_logps": reference}
    with take_gradients(model), checkpointed(trainer, checkpointed_layers):
        model.training = True  # for TRL
        with precision(trainer):
            loss = trainer.trl_loss(model, batch, False)
        loss.backward()


def choose_kernel(trainer: Any, model: Any, kernels: list[str]) -> tuple[str, dict[str, float]]:
    """The kernel that is asked for, or the fastest of `kernels`, by more than chance; and, of those,
    the milliseconds of an average micro-batch with all layers checkpointed, because memory is measured later."""
    asked = trainer.config.train.flash_attention
    if asked != "auto":
        return asked, {}
    if len(kernels) == 1:
        return "fa2", {}
    rows = select_average(trainer, trainer.settings.micro_batch)
    milliseconds = {}
    run = partial(run_micro_batch, trainer, model, rows, len(blocks(model)))
    for kernel in kernels:
        try:
            if kernel != "fa2":
                run_by_kernel(kernel, run)
        except KernelError as error:
            log.warning(f"calibration: {error}; it is not used")
            continue
        activate_flash(kernel)
        milliseconds[kernel] = 1000 * measure_seconds(trainer, run)
    fastest = min(milliseconds, key=lambda kernel: milliseconds[kernel])
    if milliseconds[fastest] > FASTER * milliseconds["fa2"]:
        fastest = "fa2"
    return fastest, milliseconds


def select_average(trainer: Any, size: int) -> list[int]:
    """The rows of the micro-batch of `size` pairs whose cost is nearest to the mean."""
    sampler = trainer.train_sampler
    micro_batches = sampler.micro_batches(sampler.steps(0), size).reshape(-1, size)
    costs = sampler.layout.cost[micro_batches].sum(axis=1)
    return micro_batches[np.abs(costs - costs.mean()).argmin()].tolist()


def measure_speed(trainer: Any, model: Any) -> dict[str, Any]:
    """For `Calibration`: what an average micro-batch takes with the trainer's settings, and the hours that follow."""
    args = trainer.config.train
    settings = trainer.settings
    sampler = trainer.train_sampler
    rows = select_average(trainer, settings.micro_batch)
    run = partial(run_micro_batch, trainer, model, rows, settings.checkpointed_layers)
    seconds = measure_seconds(trainer, run)
    forward = measure_seconds(trainer, partial(trainer.compute_ref_log_probs, model, load_batch(trainer, rows)))
    milliseconds = 1000 * seconds
    reference_hours = len(sampler) / settings.micro_batch / trainer.accelerator.num_processes * forward / 3600
    if not args.precompute_ref_log_probs:  # the reference is a part of each step, also of its FLOPs
        seconds += forward
        reference_hours = 0.0
    counts = trainer.data_collator([trainer.train_dataset[int(row)] for row in rows])["counts"]
    peak = peak_flops(torch.cuda.get_device_name()) if trainer.accelerator.device.type == "cuda" else None
    steps = args.max_steps if args.max_steps > 0 else len(sampler) / args.global_batch_size * args.num_train_epochs
    return {
        "milliseconds": milliseconds,
        "tokens_per_second": counts["tokens"] / seconds,
        "mfu": counts["flops"] / seconds / peak if peak else None,
        "hours": steps * settings.accumulation_steps * seconds / 3600,
        "reference_hours": reference_hours,
    }


def measure_seconds(trainer: Any, action: Callable[[], Any]) -> float:
    """Seconds until the devices of all ranks have done the work of `action`: the median of SAMPLES, after one that
    does not count because it may compile kernels; fewer samples if they take longer than ENOUGH seconds."""
    synchronize = torch.cuda.synchronize if trainer.accelerator.device.type == "cuda" else int
    action()
    samples: list[float] = []
    while len(samples) < SAMPLES and sum(samples) < ENOUGH:
        synchronize()
        begin = time.monotonic()
        action()
        synchronize()
        samples.append(max(gather(time.monotonic() - begin)))
    return float(np.median(samples))
