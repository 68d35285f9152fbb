"""Settings of a run that follow from its data, its model and its machine; the configuration never changes."""

from dataclasses import dataclass, field, replace
from typing import Any

from datasets import Dataset
from transformers import PretrainedConfig

from sfm_dpo.common.distributed import broadcast
from sfm_dpo.config import Config
from sfm_dpo.memory.planner import checkpointed_layers
from sfm_dpo.model.attention import choose_flash
from sfm_dpo.train.fit_memory import fit_memory


@dataclass(frozen=True)
class Settings:
    """Recorded in data.json as `settings`."""

    micro_batch: int  # pairs per device
    accumulation_steps: int
    every_n_layers: int  # every n-th layer is checkpointed; 0: none
    flash_attention: str  # fa2, fa3 or fa4
    eval_on_start: bool = False
    fit_memory: dict[str, Any] = field(default_factory=dict)  # the chosen setting (model/memory.py), if it was fitted

    @classmethod
    def of(cls, config: Config, fitted: dict[str, Any] | None = None, earlier_flash: str | None = None) -> "Settings":
        """The settings that the configuration asks for on this machine, or that fit_memory chose."""
        args = config.train
        chosen = fitted or {}
        micro_batch: Any = chosen.get("per_device", args.per_device_train_batch_size)
        return cls(
            micro_batch=micro_batch,
            accumulation_steps=args.global_batch_size // (micro_batch * args.world_size),
            every_n_layers=chosen.get("every_n_layers", checkpointed_layers(args)),
            flash_attention=choose_flash(args.flash_attention, earlier_flash),
            fit_memory=chosen,
        )


def decide_settings(
    config: Config, tokens: Dataset, model_config: PretrainedConfig, before: dict[str, Any], eval_on_start: bool
) -> Settings:
    """The settings of a start; all ranks must call it and get the same. `before`: those of the run that is resumed, or
    empty. Raises UserError if fit_memory finds no setting that fits."""
    fitted = None
    if config.train.fit_memory:
        fitted = fit_memory(config, tokens, model_config, before.get("fit_memory", {}))
    settings = Settings.of(config, fitted, before.get("flash_attention"))
    return broadcast(replace(settings, eval_on_start=eval_on_start))
