"""One step: TRL's DPOTrainer with tokenised pairs in, and rewards on the scale of the loss out."""

from typing import Any

import torch
from datasets import Dataset
from trl import DPOTrainer

from sfm_dpo.config import LENGTH_NORMALIZED_LOSSES
from sfm_dpo.hub import write_model_card


class SFMDPOTrainer(DPOTrainer):
    """TRL's DPOTrainer on the columns prompt_ids, chosen_ids and rejected_ids (see tokenization.py)."""

    def _prepare_dataset(self, dataset: Dataset, *args: Any, **kwargs: Any) -> Dataset:
        return dataset  # TRL 1.16 would tokenise again: it does not notice that the ids are there

    def _compute_loss(self, model, inputs: dict[str, torch.Tensor], return_outputs: bool):
        """TRL's loss. The reference's log-probs are put into the batch first, so that metrics can use them too."""
        given = self.precompute_ref_logps
        if not given:
            chosen, rejected = self.compute_ref_log_probs(self.ref_model or self.model, inputs)
            inputs = inputs | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        log_probs = []

        def recording(**kwargs):
            outputs = model(**kwargs)
            if kwargs.get("fused_lm_head"):
                log_probs.append(outputs.log_probs.detach())
            return outputs

        self.precompute_ref_logps = True
        try:
            result = super()._compute_loss(recording, inputs, return_outputs)
        finally:
            self.precompute_ref_logps = given
        if self.ld_alpha is None:  # with ld_alpha the log-probs are weighted sums; TRL's metrics stand
            self._record_rewards(log_probs[0], inputs)
        return result

    def _record_rewards(self, log_probs: torch.Tensor, inputs: dict[str, torch.Tensor]) -> None:
        """Replaces TRL's rewards/*, which are sums over tokens also where the loss uses means (TRL 1.16).

        Args:
            log_probs: [2B, L - 1], the policy's log-prob of each response token, 0 elsewhere.
            inputs: TRL's batch with `completion_mask` [2B, L] and the reference's sums [B] each.
        """
        logps = log_probs.sum(dim=1)
        reference = torch.cat([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]]).to(logps.device)
        lengths = inputs["completion_mask"].sum(dim=1).clamp(min=1)
        scale = lengths if self.loss_types[0] in LENGTH_NORMALIZED_LOSSES else torch.ones_like(lengths)
        chosen, rejected = (self.beta * (logps - reference) / scale).chunk(2)
        prefer_chosen, prefer_rejected = (logps / scale).chunk(2)
        metrics = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/average": (chosen + rejected) / 2,
            "rewards/accuracies": _share_above(chosen, rejected),
            "logps/accuracies": _share_above(prefer_chosen, prefer_rejected),
        }
        gathered = self.accelerator.gather(torch.stack(list(metrics.values()), dim=1).float()).mean(dim=0).tolist()
        recorded = self._metrics["train" if self.model.training else "eval"]
        for name, value in zip(metrics, gathered, strict=True):
            if name in ("rewards/average", "logps/accuracies"):
                recorded[name].append(value)
            else:
                recorded[name][-1] = value  # TRL has just appended its own

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Ours instead of TRL's, which knows neither the loss nor the data. TRL calls it with every checkpoint."""
        if self.is_world_process_zero():
            write_model_card(self.args.output_dir, self.state.log_history)


def _share_above(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """1 where a > b, 0 where a < b; a tie counts one half, so that policy = reference scores chance, not 0."""
    return (a > b).float() + 0.5 * (a == b).float()
