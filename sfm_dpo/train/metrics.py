"""Rewards, margins and accuracies on the scale of the loss; exact means of held-out metrics; the check of step 0.

TRL 1.16 logs `rewards/*` as sums over tokens also where the loss uses means; these take their place.
"""

from typing import Any

import torch

from sfm_dpo.common.distributed import gather
from sfm_dpo.common.errors import UserError
from sfm_dpo.config_checks import LENGTH_NORMALIZED_LOSSES


def loss_scale(completion_mask: torch.Tensor, loss_type: str) -> torch.Tensor:
    """[2B] what the loss divides a sequence's log-ratio by: its response tokens (of the mask [2B, L]), or 1."""
    lengths = completion_mask.sum(dim=1).clamp(min=1)
    return lengths if loss_type in LENGTH_NORMALIZED_LOSSES else torch.ones_like(lengths)


def reward_metrics(
    logps: torch.Tensor, ref_logps: torch.Tensor, scale: torch.Tensor, beta: float
) -> dict[str, torch.Tensor]:
    """Metrics of each pair, [B] each, from [2B] sums over the responses (nats), chosen first, and `loss_scale`."""
    chosen, rejected = (beta * (logps - ref_logps) / scale).chunk(2)
    logps_chosen, logps_rejected = logps.chunk(2)
    scaled_chosen, scaled_rejected = (logps / scale).chunk(2)
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/average": (chosen + rejected) / 2,
        "rewards/accuracies": share_above(chosen, rejected),
        "logps/chosen": logps_chosen,
        "logps/rejected": logps_rejected,
        "logps/accuracies": share_above(scaled_chosen, scaled_rejected),
    }


def share_above(a: torch.Tensor, b: torch.Tensor, tie: float = 1e-4) -> torch.Tensor:
    """1 where a > b, 0 where a < b; a tie counts one half, so that policy = reference scores chance, not 0.

    Rounding makes a tie inexact: a cached reference was computed in batches of another shape.
    """
    return torch.where((a - b).abs() <= tie, 0.5, (a > b).float())


# Standard deviation of a token's log-prob (nats) between two forwards of other shapes: rounding of hidden states and
# of logits of some 10, relative 2**-9 in bf16, 2**-12 in fp16, 2**-24 in fp32
LOGP_NOISE = {"bf16": 0.015, "fp16": 0.002, "no": 1e-5}


def step_0_tolerance(completion_mask: torch.Tensor, scale: torch.Tensor, beta: float, precision: str) -> torch.Tensor:
    """[B] how far |margin| / 2 may be from 0 at policy = reference: four standard deviations of rounding. The masks
    [2B, L] and `loss_scale` [2B] are those of the responses; `precision` is accelerate's mixed_precision."""
    chosen, rejected = (completion_mask.sum(dim=1) / scale**2).chunk(2)
    return 2 * beta * LOGP_NOISE[precision] * (chosen + rejected).sqrt() + 1e-6


def check_step_0(trainer, model, inputs: dict[str, torch.Tensor], margins, ref_logps, scale: torch.Tensor) -> None:
    """At policy = reference the loss is ln 2. If it is not, training would optimise something else: raises UserError,
    which says what a second computation of the micro-batch `inputs` by `model` showed. [B] and [2B] as above."""
    accelerator = trainer.accelerator
    if trainer.state.global_step:
        return
    tolerance = step_0_tolerance(inputs["completion_mask"], scale, trainer.beta, accelerator.mixed_precision)

    def is_off(margin: torch.Tensor, tolerance: torch.Tensor) -> bool:
        """On any rank, and the same answer on all: what follows may be a forward that all have to call."""
        excess = margin.abs().mean() / 2 / tolerance.mean()
        return accelerator.gather(excess).max().item() > 1

    def differ(a: torch.Tensor, b: torch.Tensor) -> bool:
        return is_off(trainer.beta * (a - b) / scale, tolerance.repeat(2) / 2)

    if not is_off(margins, tolerance):
        return
    once = torch.cat(trainer.compute_ref_log_probs(model, inputs))
    again = torch.cat(trainer.compute_ref_log_probs(model, inputs))
    if differ(once, again):
        cause = "two forwards of this batch differ: is dropout on? disable_dropout: true turns it off"
    elif not differ(once, ref_logps):
        cause = "the training forward differs from an evaluation of the same weights: dropout, or another kernel"
    elif trainer.reference_facts:
        key = trainer.reference_facts["train"]["key"]
        cause = (
            f"the reference log-probs in the cache {key} are not those of the model that is trained; "
            "precompute_ref_log_probs: false trains without them"
        )
    else:
        cause = "policy and reference are different models"
    error = accelerator.gather(margins.abs().mean() / 2).max().item()
    allowed = accelerator.gather(tolerance.mean()).max().item()
    raise UserError(f"step 0: the loss is off ln 2 by {error:.3g}, more than {allowed:.3g} of rounding: {cause}")


class MetricSums:
    """Sums of held-out metrics and what they count, so that their means depend neither on batches nor on ranks.
    This rank counts `pairs`; further ones repeat an earlier one."""

    def __init__(self, pairs: int):
        self.pairs_left = pairs
        self.sums: dict[str, float] = {}
        self.counts: dict[str, float] = {}

    def add(self, loss: torch.Tensor, rewards: dict[str, torch.Tensor], outputs: Any, completion_mask) -> None:
        """A batch: its mean loss, the rewards [B] each, and the per-token fields [2B, L - 1] of TRL's fused head."""
        counted = self.pairs_left > 0
        pairs = len(completion_mask) // 2 if counted else 0
        self.pairs_left -= pairs
        mask = completion_mask[:, 1:].bool()
        chosen, rejected = mask.chunk(2)
        chosen_logits, rejected_logits = outputs.mean_logits.chunk(2)
        self._add("loss", loss * pairs, pairs, counted)
        for name, values in rewards.items():
            self._add(name, values.sum(), pairs, counted)
        self._add("entropy", outputs.entropy[mask].sum(), mask.sum(), counted)
        self._add("logits/chosen", chosen_logits[chosen].sum(), chosen.sum(), counted)
        self._add("logits/rejected", rejected_logits[rejected].sum(), rejected.sum(), counted)
        self._add("mean_token_accuracy", outputs.is_top1.chunk(2)[0][chosen].sum(), chosen.sum(), counted)

    def _add(self, name: str, total: Any, count: Any, counted: bool) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + float(total) * counted
        self.counts[name] = self.counts.get(name, 0.0) + float(count) * counted

    def means(self) -> dict[str, float]:
        """Over all ranks, which must all call it."""
        parts = gather((self.sums, self.counts))
        means = {}
        for name in self.sums:
            total = sum(sums[name] for sums, _ in parts)
            means[name] = total / max(sum(counts[name] for _, counts in parts), 1)
        return means
