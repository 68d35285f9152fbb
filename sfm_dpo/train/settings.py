"""Settings of a run that follow from its data, its model and its machine; the configuration never changes."""

from dataclasses import asdict, dataclass, field
from typing import Any

from datasets import Dataset
from transformers import PretrainedConfig

from sfm_dpo.common.distributed import broadcast
from sfm_dpo.config import Config
from sfm_dpo.memory.planner import asked_layers, asked_pairs
from sfm_dpo.model.attention import choose_flash
from sfm_dpo.model.packing import decide_packing
from sfm_dpo.train.fit_memory import fit_memory


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


def decide_settings(
    config: Config,
    tokens: Dataset,
    model_config: PretrainedConfig,
    before: dict[str, Any] | None = None,
    eval_on_start: bool = False,
) -> Settings:
    """The settings of a start; all ranks must call it and get the same. `before`: those of the run that is resumed, or
    empty. Raises UserError if something that is set is not possible, or if no setting fits into memory."""
    args = config.train
    before = before or {}
    packed, prefix_sharing = decide_packing(config, model_config)
    micro_batch = asked_pairs(args)
    checkpointed = asked_layers(args, model_config.get_text_config().num_hidden_layers)
    memory: dict[str, Any] = {}
    if micro_batch is None or checkpointed is None:
        candidate, limit = fit_memory(config, tokens, model_config, packed, prefix_sharing, before)
        memory = asdict(candidate) | {"limit": limit}
        micro_batch = candidate.per_device
        checkpointed = candidate.checkpointed_layers
    settings = Settings(
        micro_batch=micro_batch,
        accumulation_steps=args.global_batch_size // (micro_batch * args.world_size),
        checkpointed_layers=checkpointed,
        flash_attention=choose_flash(args.flash_attention, before.get("flash_attention")),
        packed=packed,
        prefix_sharing=prefix_sharing,
        eval_on_start=eval_on_start,
        memory=memory,
    )
    return broadcast(settings)
