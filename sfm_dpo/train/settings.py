"""Settings of a run that follow from its data, its model and its machine; the configuration never changes."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from datasets import Dataset
from transformers import PretrainedConfig

from sfm_dpo.common.distributed import broadcast
from sfm_dpo.config.fields import Config
from sfm_dpo.memory.planner import Candidate, asked_layers, asked_pairs
from sfm_dpo.model.packing import decide_packing
from sfm_dpo.train.fit_memory import MemoryPlan, plan_memory


@dataclass(frozen=True)
class Settings:
    """Recorded in data.json as `settings`."""

    micro_batch: int  # pairs per device
    accumulation_steps: int
    checkpointed_layers: int
    flash_attention: str  # fa2, fa3 or fa4
    packed: bool = True
    prefix_sharing: bool = True
    eval_on_start: bool = False
    memory: dict[str, Any] = field(default_factory=dict)  # memory/planner.py's Candidate, if memory has decided

    def replace_candidate(self, candidate: Candidate) -> "Settings":
        pairs = self.micro_batch * self.accumulation_steps
        return replace(
            self,
            micro_batch=candidate.per_device,
            accumulation_steps=pairs // candidate.per_device,
            checkpointed_layers=candidate.checkpointed_layers,
            memory=asdict(candidate),
        )


def decide_settings(
    config: Config,
    tokens: Dataset,
    model_config: PretrainedConfig,
    before: dict[str, Any] | None = None,
    eval_on_start: bool = False,
) -> tuple[Settings, MemoryPlan | None]:
    """The settings of a start, and the memory that they were chosen by; all ranks must call it and get the same.
    `before`: those of the run that is resumed, or empty. Raises UserError if something that is set is not possible."""
    args = config.train
    before = before or {}
    packed, prefix_sharing = decide_packing(config, model_config)
    micro_batch = asked_pairs(args)
    checkpointed = asked_layers(args, model_config.get_text_config().num_hidden_layers)
    plan = None
    if micro_batch is None or checkpointed is None or not args.use_cpu:
        plan = plan_memory(config, tokens, model_config, packed, prefix_sharing)
        earlier = (before["micro_batch"], before["checkpointed_layers"]) if before else None
        candidate = plan.choose(plan.states, earlier=earlier)
        micro_batch = candidate.per_device
        checkpointed = candidate.checkpointed_layers
    flash = args.flash_attention
    if flash == "auto":  # FA2 until calibration has compared others
        flash = before.get("flash_attention", "fa2")
    settings = Settings(
        micro_batch=micro_batch,
        accumulation_steps=args.global_batch_size // (micro_batch * args.world_size),
        checkpointed_layers=checkpointed,
        flash_attention=flash,
        packed=packed,
        prefix_sharing=prefix_sharing,
        eval_on_start=eval_on_start,
        memory=asdict(candidate) if plan else {},
    )
    return broadcast(settings), plan
