"""The path and the kernel: a pair is computed in several ways, and one that differs by more than noise is not used.

Gradients are dropped as they arrive, so no weight changes.
"""

import logging
import math
import re
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from datasets import Dataset
from torch.nn.functional import avg_pool1d

from sfm_dpo.common.distributed import gather_values
from sfm_dpo.common.errors import RunEnd, UserError
from sfm_dpo.common.statistics import ALLOWED, LOGP_ROUNDING, TYPICAL_LOGIT
from sfm_dpo.data.lengths import Lengths, count_trained
from sfm_dpo.data.sampler import PairSampler
from sfm_dpo.memory.asked import Asked
from sfm_dpo.model.attention import boundary_arguments, packed_attention_forward, usable_kernels
from sfm_dpo.model.flops import attention_flops
from sfm_dpo.model.loading import blocks
from sfm_dpo.model.packing import find_delta_nets, has_delta_net_kernels
from sfm_dpo.run.facts import Calibration, ForwardPath
from sfm_dpo.run.start import Before
from sfm_dpo.train.base_model import BaseModel
from sfm_dpo.train.callbacks import is_out_of_memory

log = logging.getLogger(__name__)

T = TypeVar("T")
GRADIENT = 8  # relative rounding of a gradient over that of a log-prob: 2**-6.2 and 2**-17.8 were measured
WINDOW = 16  # tokens: a leaked key changes only an answer's first log-probs
SAMPLE = 16_384  # gradient elements of each tensor
SMALL = 0.01  # kinds of tensor with a smaller share of the gradient's norm are not compared
FASTER = 0.95  # of FA2's time: another kernel is chosen only if it takes less
SAMPLES = 3  # of a duration
ENOUGH = 4.0  # seconds
Rows = tuple[tuple[int, ...], tuple[int, ...]]
REPORT = "it may be a false alarm: report this line with the model's name and environment.json"


class DifferenceError(UserError):
    """A path or kernel differs from the padded path by more than noise."""


class KernelError(Exception):
    """Why a path or an attention kernel fails; raised on all ranks if it fails on one."""


def keeps_path(asked: Asked, before: Before, broken: Collection[str] = ()) -> bool:
    """Whether a run keeps the path of the run that it resumes from."""
    path = before.facts.path
    return path is not None and asked.allows(path) and path.kernel not in broken


def choose_path(
    base: BaseModel, tokens: Dataset, asked: Asked, before: Before, broken: Collection[str] = ()
) -> tuple[ForwardPath, Calibration]:
    """The path that is asked for or, unasked, the fastest that agrees with the padded one, without kernels that are
    `broken`; and what was found. All ranks must call it. Raises UserError for a path or kernel that is asked for and
    differs by more than noise."""
    if keeps_path(asked, before, broken):
        assert before.facts.path
        return before.facts.path, before.facts.calibration
    comparison = Comparison(base, tokens, asked)
    noise = comparison.check_base()
    path = ForwardPath(False, False, "fa2")
    try:
        if asked.can_pack:
            packed = ForwardPath(True, False, "fa2")
            comparison.check("packed", packed)
            path = packed
        if asked.can_share:
            shared = ForwardPath(True, True, "fa2")
            comparison.check("shared", shared)
            path = shared
    except Exception as error:  # also of the model's code, which may not take the arguments of packed attention
        if is_out_of_memory(error) or (isinstance(error, RunEnd) and not isinstance(error, DifferenceError)):
            raise
        _refuse_or_log(path, asked, error)
    kernels = comparison.list_kernels(path, asked, broken)
    kernel, milliseconds = choose_kernel(base, tokens, path, asked, kernels)
    return replace(path, kernel=kernel), Calibration(noise, comparison.ratios, milliseconds)


def _refuse_or_log(path: ForwardPath, asked: Asked, error: Exception) -> None:
    """Says that what comes after `path` is off. Raises UserError if it is asked for."""
    is_named = isinstance(error, DifferenceError | KernelError)
    reason = str(error) if is_named else f"{type(error).__name__}: {str(error)[:300]}"
    fields = {"padding_free": asked.padding_free, "prefix_sharing": asked.prefix_sharing}
    if path.packed:
        del fields["padding_free"]
    for name, is_asked in fields.items():
        if is_asked:
            raise UserError(f"{name} True: {reason}; set {name}: false")
    log.info(f"{next(iter(fields))} is off: {reason}")


@dataclass
class Computed:
    """What one path gives for a pair; without a backward it has no gradients."""

    logps: list[torch.Tensor] = field(default_factory=list)  # nats, of the trained tokens of both responses
    norms: list[torch.Tensor] = field(default_factory=list)  # of the gradient of each trained parameter
    gradients: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)  # by kind and name: a sample of each

    def norm(self) -> float:
        return torch.linalg.vector_norm(torch.stack(self.norms)).item()

    def keep(self, dimensions: dict[str, int], name: str, gradient: torch.Tensor) -> None:
        """Keeps the norm and a sample of a flat gradient. `dimensions`: of each tensor, by its name."""
        self.norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float32))
        # A kind is the same tensor of all layers. Norms and biases, small and noisy, are one kind
        kind = re.sub(r"\.\d+\.", ".", name) if dimensions[name] > 1 else "norms and biases"
        sample = gradient[:: gradient.numel() // SAMPLE | 1]  # odd: of all columns
        self.gradients[kind, name] = sample.float().cpu()


def select_pairs(base: BaseModel, tokens: Dataset) -> list[Rows]:
    """Batches of rows, in twos: the first row of a batch is compared, and if it differs that of the other one, too.
    They are two pairs of median length (on a CPU, where a token is slow, the shortest) and, on a GPU, two that are
    longer than the model's largest attention window, each alone, where there are any."""
    max_length = base.config.train.max_length
    lengths = Lengths.of(tokens).truncate(max_length)
    is_trained = count_trained(tokens, max_length).min(axis=1) > 0
    order = np.argsort(np.where(is_trained, lengths.total, np.iinfo(np.int64).max), kind="stable")
    on_gpu = base.device.type == "cuda"
    middle = int(is_trained.sum()) // 2 if on_gpu else 0
    first, second = int(order[middle]), int(order[min(middle + 1, len(order) - 1)])
    batches: list[Rows] = [((first, second), (second, first))]
    layers = attention_flops(base.unwrapped().config.get_text_config())
    window = max((size for size, _ in layers if size), default=0)
    beyond = [int(row) for row in order[: is_trained.sum()] if lengths.total[row] >= window + WINDOW]
    if on_gpu and window and beyond and first not in beyond:
        batches.append(((beyond[0],), (beyond[min(1, len(beyond) - 1)],)))
    return batches


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
    every = gather_values({what: size if math.isfinite(size) else math.inf for what, size in found.items()})
    return {what: max(of_rank.get(what, 0.0) for of_rank in every) for what in set().union(*every)}


@dataclass
class Baseline:
    """A pair by the padded path, alone, and its noise: how far other right computations of the pair differ from that,
    the largest of several, as a single one may agree by chance."""

    alone: Computed
    plain: Computed | None  # by the model's own head
    noise: dict[str, float]  # by what differs
    least: float  # where two shapes agree, as they may on a CPU

    def add_noise(self, right: Computed, most: float = math.inf) -> None:
        """`most`: by how many times the noise may grow."""
        for what, size in compare(self.alone, right).items():
            before = self.noise.get(what, self.least)
            self.noise[what] = max(before, min(size, most * before))

    def count_times(self, other: Computed) -> dict[str, tuple[float, float]]:
        """By what differs: how many times the noise, and how far."""
        differences = compare(self.alone, other)
        return {what: (size / self.noise.get(what, self.least), size) for what, size in differences.items()}


class Comparison:
    """Computes pairs in several ways, with gradients where the weights are whole, and compares them."""

    def __init__(self, base: BaseModel, tokens: Dataset, asked: Asked):
        self.base = base
        self.tokens = tokens
        self.batches = select_pairs(base, tokens)
        self.ratios: dict[str, float] = {}  # by path and kernel: the largest difference over noise
        self.baselines: dict[tuple[int, ...], Baseline] = {}  # by rows of a batch
        self.layers = len(blocks(base.policy))  # to checkpoint
        if base.device.type == "cpu" and asked.layers is not None:  # a GPU has less memory than a pair may need
            self.layers = asked.layers

    @contextmanager
    def computing(self, path: ForwardPath | None, stance: str = "force_eager") -> Iterator[Computed]:
        """For a forward that fills `logps`; then follows the backward of the loss at step 0, where policy and
        reference agree, up to a factor."""
        base = self.base
        result = Computed()
        keep = partial(result.keep, {name: parameter.dim() for name, parameter in base.policy.named_parameters()})
        with (
            torch.compiler.set_stance(stance),
            base.computing(path),
            base.taking_gradients(keep),
            base.checkpointing(self.layers),
            base.autocast(),
        ):
            with torch.set_grad_enabled(not base.is_sharded):
                yield result
            if not base.is_sharded:
                chosen, rejected = (logps.sum() / max(len(logps), 1) for logps in result.logps)
                (rejected - chosen).backward()
        result.logps = [logps.detach().float().cpu() for logps in result.logps]

    def compute(self, path: ForwardPath | None, rows: Sequence[int], place: int = 0) -> Computed:
        """The pair at `place` of the pairs `rows`, computed in one batch with the others."""
        with self.computing(path, "default" if path else "force_eager") as result:
            batch = self.base.load_batch(self.tokens, rows)
            mask = batch.pop("completion_mask")
            labels = batch["input_ids"].masked_fill(mask == 0, -100)
            log_probs = self.base.policy(**batch, labels=labels, fused_lm_head=True, use_cache=False).log_probs
            result.logps = [log_probs[row][mask[row, 1:].bool()] for row in (place, place + len(rows))]
        return result

    def compute_plainly(self, row: int) -> tuple[Computed, float]:
        """The pair by the model's own forward and head, a sequence at a time without a mask, and the root mean square
        of each token's largest logit."""
        batch = self.base.load_batch(self.tokens, [row])
        largest = []
        columns = (batch["input_ids"], batch["attention_mask"].bool(), batch["completion_mask"])
        with self.computing(None) as result:
            for padded_ids, is_token, padded_completion in zip(*columns, strict=True):
                ids = padded_ids[is_token]
                trained = padded_completion[is_token][1:].bool()
                logits = self.base.policy(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
                result.logps.append(torch.log_softmax(logits, dim=-1).gather(1, ids[1:, None])[:, 0][trained])
                largest.append(logits.detach().abs().amax(dim=-1).square())
        return result, torch.cat(largest).mean().sqrt().item()

    def baseline(self, rows: tuple[int, ...]) -> Baseline:
        """That of the first of `rows`."""
        if rows in self.baselines:
            return self.baselines[rows]
        rounding = LOGP_ROUNDING[self.base.precision]
        plain = None
        logit = TYPICAL_LOGIT
        if self.base.zero_stage != 3:  # DeepSpeed would expect the head's module in each later forward, too
            plain, logit = self.compute_plainly(rows[0])
        noise = {"log-probs": rounding * max(gather_values(logit))}
        found = Baseline(self.compute(None, rows[:1]), plain, noise, GRADIENT * rounding)
        if len(rows) > 1:
            found.add_noise(self.compute(None, rows))
            found.add_noise(self.compute(None, rows[::-1], place=1))
        if plain:
            found.add_noise(plain, ALLOWED)  # by another kernel, as without a mask
        self.baselines[rows] = found
        return found

    def check_base(self) -> float:
        """The noise of log-probs, in nats. Raises UserError if the base model's figures are not finite, or TRL's fused
        head differs from the model's own."""
        noise = self.baseline(self.batches[0][0]).noise
        for what, size in noise.items():
            if not math.isfinite(size):
                remedy = "check its weights, or use bf16"
                if find_delta_nets(self.base.policy) and has_delta_net_kernels():
                    remedy = "the kernels return NaN on some GPUs, such as B200: pip uninstall flash-linear-attention"
                raise UserError(f"calibration: the base model's {what} are not finite; {remedy}")
        if difference := self.find_difference("TRL's fused head", lambda rows: self.baseline(rows).plain):
            raise UserError(f"calibration: {difference}; it cannot train this model; {REPORT}")
        return noise["log-probs"]

    def check(self, name: str, path: ForwardPath) -> None:
        """Raises DifferenceError and KernelError."""
        if difference := self.find_difference(name, self.trying(name, path)):
            raise DifferenceError(f"calibration: {difference}; {REPORT}")

    def trying(self, name: str, path: ForwardPath) -> Callable[..., Computed]:
        """`compute` by a path or kernel called `name`, for all ranks together; it may raise KernelError."""
        compute = partial(self.compute, path)
        return compute if self.base.is_sharded else partial(try_kernel, name, compute)  # sharded: a forward waits

    def find_difference(self, name: str, compute: Callable[[tuple[int, ...]], Computed | None]) -> str | None:
        """How what is called `name` differs by more than noise, in both of two pairs; None if it does not, or is
        absent."""
        for rows, others in self.batches:
            computed = compute(rows)
            if computed is None:
                return None
            times = self.baseline(rows).count_times(computed)
            if max(times.values())[0] > ALLOWED:
                again = self.baseline(others).count_times(compute(others) or computed)
                times = {what: min(found, again.get(what, found)) for what, found in times.items()}
            worst = max(times, key=lambda what: times[what])
            ratio, size = times[worst]
            if ratio > ALLOWED:
                return f"{name} differs from padded in {worst} by {size:.2g}, {ratio:.0f} times noise"
            self.ratios[name] = max(ratio, self.ratios.get(name, 0.0))
        return None

    def list_kernels(self, path: ForwardPath, asked: Asked, broken: Collection[str]) -> list[str]:
        """The kernels that may compute `path`, FA2 first. Raises UserError for the one that is asked for, if it fails
        or differs."""
        usable = ["fa2"]
        if self.base.is_sharded and not asked.kernel:  # FA2 is kept, because speed is not measured
            return usable
        with self.base.computing(path):
            takes_flash = path.packed and not self.base.attention_kernel().startswith("SDPA")
        for kernel in usable_kernels(asked.kernel or "auto") if takes_flash else ():
            if kernel in broken:
                continue
            try:
                if self.base.is_sharded:
                    try_kernel(kernel, partial(self.run_attention, kernel))
                difference = self.find_difference(kernel, self.trying(kernel, replace(path, kernel=kernel)))
            except KernelError as error:
                difference = str(error)
            if difference and asked.kernel:
                raise UserError(f"flash_attention {kernel}: {difference}; set flash_attention: fa2")
            if difference:
                log.warning(f"calibration: {difference}; it is not used")
            else:
                usable.append(kernel)
        return usable

    def run_attention(self, kernel: str) -> None:
        """Forward and backward of attention alone; waits for no other rank."""
        states = torch.randn(1, 1, WINDOW, 64, device=self.base.device, dtype=torch.bfloat16, requires_grad=True)
        bounds = boundary_arguments(torch.tensor([0, WINDOW], dtype=torch.int32, device=self.base.device), WINDOW)
        with self.base.computing(ForwardPath(True, False, kernel)):
            packed_attention_forward(torch.nn.Identity(), states, states, states, None, **bounds)[0].sum().backward()


def try_kernel(name: str, action: Callable[..., T], *args: Any) -> T:
    """What `action`, which may not wait for other ranks, returns with the path or kernel `name`. All ranks must call
    it. Raises KernelError."""
    results: list[T] = []
    failure = None
    try:
        results.append(action(*args))
    except Exception as error:  # of an import, a compilation or a launch
        traceback.clear_frames(error.__traceback__)  # which hold memory
        failure = str(error).partition("\n")[0] or type(error).__name__
    if failures := [text for text in gather_values(failure) if text]:
        raise KernelError(f"{name} fails: {failures[0]}")
    return results[0]


def choose_kernel(
    base: BaseModel, tokens: Dataset, path: ForwardPath, asked: Asked, kernels: list[str]
) -> tuple[str, dict[str, float]]:
    """The kernel that is asked for, or the fastest of `kernels`, by more than chance; and, of those, the milliseconds
    of an average micro-batch with all layers checkpointed, because memory is measured later."""
    if asked.kernel:
        return asked.kernel, {}
    if len(kernels) == 1 or base.config.train.preflight_only:
        return "fa2", {}
    pairs = asked.pairs or 1
    rows = select_average(base.make_sampler(tokens, path.packed, path.prefix_sharing, pairs))
    milliseconds = {}
    run = partial(base.run_micro_batch, tokens, rows, len(blocks(base.policy)))
    for kernel in kernels:
        with base.computing(replace(path, kernel=kernel)):
            try:
                if kernel != "fa2":
                    try_kernel(kernel, run)
            except KernelError as error:
                log.warning(f"calibration: {error}; it is not used")
                continue
            milliseconds[kernel] = 1000 * measure_seconds(base, run)
    fastest = min(milliseconds, key=lambda kernel: milliseconds[kernel])
    if milliseconds[fastest] > FASTER * milliseconds["fa2"]:
        fastest = "fa2"
    return fastest, milliseconds


def select_average(sampler: PairSampler) -> list[int]:
    """The rows of the micro-batch whose cost is nearest to the mean."""
    micro_batches = sampler.micro_batches(sampler.steps(0)).reshape(-1, sampler.micro_batch)
    costs = sampler.layout.cost[micro_batches].sum(axis=1)
    return micro_batches[np.abs(costs - costs.mean()).argmin()].tolist()


def measure_seconds(base: BaseModel, action: Callable[[], Any]) -> float:
    """Seconds until the devices of all ranks have done the work of `action`: the median of SAMPLES, after one that
    does not count because it may compile kernels; fewer samples if they take longer than ENOUGH seconds."""
    synchronize = torch.cuda.synchronize if base.device.type == "cuda" else int
    action()
    samples: list[float] = []
    while len(samples) < SAMPLES and sum(samples) < ENOUGH:
        synchronize()
        begin = time.monotonic()
        action()
        synchronize()
        samples.append(max(gather_values(time.monotonic() - begin)))
    return float(np.median(samples))
