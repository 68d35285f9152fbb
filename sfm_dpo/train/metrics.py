"""Rewards on the scale of the loss, the check of step 0, exact means of logged metrics, and throughput.

TRL 1.16 logs `rewards/*` as sums over tokens even if the loss uses means; these metrics replace them.
"""

import resource
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather as gather_tensors
from datasets import Dataset
from transformers import TrainerCallback

from sfm_dpo.common.distributed import is_on_gpu
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import write_lines
from sfm_dpo.common.statistics import ALLOWED
from sfm_dpo.config.checks import LENGTH_NORMALIZED_LOSSES, main_loss
from sfm_dpo.model.flops import ForwardFlops, peak_flops
from sfm_dpo.model.packing import find_shared
from sfm_dpo.run.facts import ForwardPath

if TYPE_CHECKING:
    from sfm_dpo.train.trainer import SFMDPOTrainer

OF_PAIRS = ("logps/chosen", "logps/rejected", "rewards/margins")  # metrics that are written for each held-out pair
ROUNDING = 8 * torch.finfo(torch.float32).eps  # of a sum of log-probs, relative, between two computations of it


def loss_scale(completion_mask: torch.Tensor, loss_type: str) -> torch.Tensor:
    """[2B]: the divisor of each sequence's log-ratio in the loss: its response tokens (mask [2B, L]), or 1."""
    lengths = completion_mask.sum(dim=1).clamp(min=1)
    return lengths if loss_type in LENGTH_NORMALIZED_LOSSES else torch.ones_like(lengths)


def count_chosen(completion_mask: torch.Tensor) -> torch.Tensor:
    """Mean number of trained tokens that a chosen response has in a micro-batch, mask [2B, L]; [] fp32."""
    return completion_mask.chunk(2)[0][:, 1:].sum(dim=1).float().mean()


def reward_metrics(
    logps: torch.Tensor, ref_logps: torch.Tensor, scale: torch.Tensor, beta: float
) -> dict[str, torch.Tensor]:
    """Metrics of each pair, [B] each, from [2B] sums over the responses (nats), chosen first, and `loss_scale`."""
    chosen, rejected = (beta * (logps - ref_logps) / scale).chunk(2)
    rounding = beta * ROUNDING * (logps.abs() / scale).view(2, -1).sum(dim=0)
    logps_chosen, logps_rejected = logps.chunk(2)
    scaled_chosen, scaled_rejected = (logps / scale).chunk(2)
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/average": (chosen + rejected) / 2,
        "rewards/accuracies": share_above(chosen, rejected, rounding),
        "logps/chosen": logps_chosen,
        "logps/rejected": logps_rejected,
        "logps/accuracies": share_above(scaled_chosen, scaled_rejected),
    }


def share_above(a: torch.Tensor, b: torch.Tensor, tie: torch.Tensor | float = 0.0) -> torch.Tensor:
    """1 where a > b, 0 where a < b, and 0.5 where they differ by at most `tie`: policy = reference scores chance."""
    return torch.where((a - b).abs() <= tie, 0.5, (a > b).float())


def step_0_tolerance(completion_mask: torch.Tensor, scale: torch.Tensor, beta: float, noise: float) -> torch.Tensor:
    """[B]: what rounding explains of |margin| / 2 at policy = reference, as four standard deviations; `check_step_0`
    allows ALLOWED times that. The masks [2B, L] and `loss_scale` [2B] are those of the responses; `noise`: of a
    log-prob, in nats (calibration/)."""
    chosen, rejected = (completion_mask.sum(dim=1) / scale**2).chunk(2)
    return 2 * beta * noise * (chosen + rejected).sqrt() + 1e-6


def check_loss(trainer: "SFMDPOTrainer", loss: torch.Tensor) -> None:
    """Raises UserError if the first loss is not finite on any rank."""
    if trainer.accelerator.gather(loss.detach().isfinite()).all().item():
        return
    args = trainer.config.train
    names = ("loss_type", "loss_weights", "beta", "label_smoothing", "router_aux_loss_coef")
    given = ", ".join(f"{name} {vars(args)[name]}" for name in names if vars(args)[name] is not None)
    raise UserError(f"step 0: the loss is not finite with {given}; change one of these fields")


def check_step_0(
    trainer: "SFMDPOTrainer",
    model: Any,
    inputs: dict[str, torch.Tensor],
    logps: torch.Tensor,
    ref_logps: torch.Tensor,
) -> None:
    """Checks that the loss is ln 2 at policy = reference; otherwise training would optimise something else. Raises
    UserError with the cause, found by computing the micro-batch `inputs` again with `model`."""
    accelerator = trainer.accelerator
    scale = loss_scale(inputs["completion_mask"], main_loss(trainer.loss_types))
    margins = reward_metrics(logps, ref_logps, scale, trainer.beta)["rewards/margins"]
    tolerance = step_0_tolerance(inputs["completion_mask"], scale, trainer.beta, trainer.noise)

    def is_off(margin: torch.Tensor, tolerance: torch.Tensor) -> bool:
        """Whether any rank is off; the same on all ranks, which may next have to call a forward together."""
        excess = margin.abs().mean() / 2 / tolerance.mean()
        return accelerator.gather(excess).max().item() > ALLOWED

    def differ(a: torch.Tensor, b: torch.Tensor) -> bool:
        return is_off(trainer.beta * (a - b) / scale, tolerance.repeat(2) / 2)

    if not is_off(margins, tolerance):
        return
    once = torch.cat(trainer.compute_ref_log_probs(model, inputs))
    again = torch.cat(trainer.compute_ref_log_probs(model, inputs))
    if differ(once, again) or not differ(once, ref_logps):
        cause = (
            "forwards of the same weights differ, by dropout or another kernel; set disable_dropout: true, the rates "
            "of dropout to 0.0 in model_init_kwargs, or torch_compile: false"
        )
    elif trainer.facts.reference:
        key = trainer.facts.reference["train"]["key"]
        cause = (
            f"the reference log-probs in the cache {key} are not those of the trained model; "
            "remove that folder, or set precompute_ref_log_probs: false"
        )
    else:
        cause = "policy and reference are different models; set ref_model_name_or_path if that is intended"
    error = accelerator.gather(margins.abs().mean() / 2).max().item()
    allowed = accelerator.gather(tolerance.mean()).max().item()
    most = f"rounding explains at most {ALLOWED * allowed:.2g} ({ALLOWED} x {allowed:.2g})"
    raise UserError(f"step 0: the loss differs from ln 2 by {error:.3g}; {most}: {cause}")


class MetricSums:
    """Sums and counts of logged metrics, whose means depend neither on micro-batches nor on ranks. They stay on the
    device until `reduce`. With `pairs`, only this rank's first so many pairs count; any more are repeats."""

    def __init__(self, pairs: int | None = None):
        self.pairs_left = pairs
        self.sums: dict[str, tuple[Any, Any]] = {}  # by metric: total and count

    def add(self, batch_means: dict[str, Any], pair_metrics: dict[str, torch.Tensor], outputs: Any, mask) -> None:
        """Adds a batch: means over its pairs, metrics of each pair [B], and the per-token fields [2B, L - 1] of TRL's
        fused head. `mask` [2B, L]: the tokens that are trained."""
        pairs = len(mask) // 2
        if self.pairs_left is not None:
            pairs = min(pairs, self.pairs_left)
            self.pairs_left -= pairs
        counts = bool(pairs)
        for name, mean in batch_means.items():
            self._add(name, mean * pairs, pairs)
        for name, values in pair_metrics.items():
            self._add(name, values.sum() * counts, pairs)
        predicted = mask[:, 1:].bool()
        chosen, rejected = predicted.chunk(2)
        chosen_logits, rejected_logits = outputs.mean_logits.chunk(2)
        of_tokens = {
            "entropy": (outputs.entropy, predicted),
            "logits/chosen": (chosen_logits, chosen),
            "logits/rejected": (rejected_logits, rejected),
            "mean_token_accuracy": (outputs.is_top1.chunk(2)[0].float(), chosen),
        }
        for name, (values, tokens) in of_tokens.items():
            self._add(name, torch.where(tokens, values, 0.0).sum() * counts, tokens.sum() * counts)

    def _add(self, name: str, total: torch.Tensor, count: Any) -> None:
        before, counted = self.sums.get(name, (0.0, 0))
        self.sums[name] = (before + total.detach().double(), counted + count)

    def reduce(self, work: Mapping[str, float] = {}, peaks: Mapping[str, float] = {}) -> dict[str, float]:
        """Over all ranks, the means of the metrics, the sums of `work` and the largest of the `peaks`; all ranks must
        call it. The host waits for the device once."""
        sums = self.sums | {name: (number, 0) for name, number in {**work, **peaks}.items()}
        zero = torch.zeros_like(next(iter(self.sums.values()))[0])  # [], fp64, on the device
        pairs = [torch.stack([zero + total, zero + count]) for total, count in sums.values()]
        ranks = gather_tensors(torch.stack(pairs)[None]).tolist()
        means = {}
        for number, name in enumerate(sums):
            count = sum(rank[number][1] for rank in ranks)
            over_ranks = max if name in peaks else sum
            means[name] = over_ranks(rank[number][0] for rank in ranks) / max(count, 1)
        return means


def write_margins(file: Path, pairs: Dataset, ranks: list[list[list[float]]]) -> None:
    """Writes source, row and OF_PAIRS of each pair as a JSON line; rank r has computed pairs r, r + ranks, ..."""
    lines = pairs.select_columns(["source", "row"]).to_list()
    for number, line in enumerate(lines):
        line |= zip(OF_PAIRS, ranks[number % len(ranks)][number // len(ranks)], strict=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_lines(file, lines)


@dataclass
class CountingCollator:
    """TRL's collator, with `counts` (computed on the CPU) in the batch, and a mask that leaves out tool results."""

    collate: Callable[[list[dict]], dict[str, Any]]
    forward_flops: ForwardFlops
    reference_in_step: bool
    path: ForwardPath | None = None  # None: padded

    def __call__(self, rows: list[dict]) -> dict[str, Any]:
        batch = self.collate(rows)
        completion = batch["completion_mask"]  # determines labels, sums and lengths
        for number, row in enumerate(rows):
            for side, first, end in row.get("masked", ()):
                completion[number + side * len(rows), len(row["prompt_ids"]) :][first:end] = 0
        return batch | {"counts": self.count(batch["input_ids"], batch["attention_mask"], completion)}

    def count(self, ids: torch.Tensor, mask: torch.Tensor, completion: torch.Tensor) -> dict[str, float]:
        """Counts of a micro-batch; all [2B, L], chosen rows first: the masks are of tokens and of trained tokens."""
        lengths = mask.sum(dim=1)
        shared = torch.zeros_like(lengths)
        if self.path and self.path.prefix_sharing:
            shared = find_shared(ids, mask, completion == 1).sum(dim=1)
        responses = int(completion.sum())
        computed = int((lengths - shared).sum())
        flops = self.forward_flops(lengths, responses, training=True, shared=shared)
        if self.reference_in_step:
            flops += self.forward_flops(lengths, responses, shared=shared)
        return {
            "pairs": len(mask) // 2,
            "tokens": int(lengths.sum()),
            "computed": computed,  # a shared prompt counts once
            "grid": computed if self.path and self.path.packed else mask.numel(),  # including padding
            "flops": flops,
        }


class Meter(TrainerCallback):
    """Sums the work of this rank between two logs, and the seconds of its steps without evaluation and saving."""

    def __init__(self) -> None:
        self.counts: defaultdict[str, float] = defaultdict(float)  # of CountingCollator
        self.seconds = 0.0
        self._mark = time.monotonic()

    def add(self, counts: dict[str, float]) -> None:
        for name, count in counts.items():
            self.counts[name] += count

    def on_step_end(self, *args, **kwargs) -> None:
        now = time.monotonic()
        self.seconds += now - self._mark
        self._mark = now

    def skip_time(self, *args: Any, **kwargs: Any) -> None:
        """Does not count the seconds since the last step."""
        self._mark = time.monotonic()

    on_train_begin = on_evaluate = on_save = skip_time

    def metrics(self, totals: dict[str, float], world_size: int) -> dict[str, float]:
        """The metrics perf/* from the counts summed over ranks; resets the meter."""
        seconds = max(self.seconds, 1e-9)
        self.seconds = 0.0
        self.counts.clear()
        metrics = {
            "perf/tokens_per_second": totals["tokens"] / seconds,
            "perf/pairs_per_second": totals["pairs"] / seconds,
            "perf/padding_fraction": 1 - totals["computed"] / max(totals["grid"], 1),
            "perf/shared_fraction": 1 - totals["computed"] / max(totals["tokens"], 1),
        }
        if is_on_gpu():
            torch.cuda.reset_peak_memory_stats()
            if peak := peak_flops(torch.cuda.get_device_name()):
                metrics["perf/mfu"] = totals["flops"] / seconds / (peak * world_size)
        return metrics


def peak_memory_gib() -> float:
    """Peak memory of this process: allocated on the GPU since the last log or, without a GPU, resident since start."""
    if is_on_gpu():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
