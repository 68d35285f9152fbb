"""Rewards, margins and accuracies of a batch, on the scale of its loss.

TRL 1.16 logs `rewards/*` as sums over tokens also where the loss uses means; these take their place.
"""

import torch

from sfm_dpo.config_checks import LENGTH_NORMALIZED_LOSSES


def loss_scale(completion_mask: torch.Tensor, loss_type: str) -> torch.Tensor:
    """[2B] what the loss divides a sequence's log-ratio by: its response tokens, or 1.

    Args:
        completion_mask: [2B, L], 1 at the tokens of the response.
    """
    lengths = completion_mask.sum(dim=1).clamp(min=1)
    return lengths if loss_type in LENGTH_NORMALIZED_LOSSES else torch.ones_like(lengths)


def reward_metrics(
    logps: torch.Tensor, ref_logps: torch.Tensor, scale: torch.Tensor, beta: float
) -> dict[str, torch.Tensor]:
    """Metrics of each pair, [B] each.

    Args:
        logps, ref_logps: [2B] sums over the response (nats), chosen first.
        scale: [2B], see `loss_scale`.
    """
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
    """[B] how far |margin| / 2 may be from 0 at policy = reference: four standard deviations of rounding.

    Args:
        completion_mask: [2B, L], 1 at the tokens of the response; its sums are the lengths.
        scale: [2B], see `loss_scale`.
        precision: accelerate's mixed_precision, a key of LOGP_NOISE.
    """
    chosen, rejected = (completion_mask.sum(dim=1) / scale**2).chunk(2)
    return 2 * beta * LOGP_NOISE[precision] * (chosen + rejected).sqrt() + 1e-6
