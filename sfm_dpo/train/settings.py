"""Settings of a run that follow from its data, its model and its machine; the configuration never changes."""

from dataclasses import dataclass, field, replace
from typing import Any

from datasets import Dataset
from transformers import PretrainedConfig

from sfm_dpo.common.distributed import broadcast
from sfm_dpo.config import Config
from sfm_dpo.memory.planner import count_checkpointed
from sfm_dpo.model.attention import choose_flash
from sfm_dpo.train.fit_memory import fit_memory


@dataclass(frozen=True)
class Settings:
    """Recorded in data.json as `settings`."""

    micro_batch: int  # pairs per device
    accumulation_steps: int
    checkpointed_layers: int
    flash_attention: str  # fa2, fa3 or fa4
    eval_on_start: bool = False
    fit_memory: dict[str, Any] = field(default_factory=dict)  # memory/planner.py's Setting, if it was fitted

    @classmethod
    def of(cls, config: Config, model: PretrainedConfig, fitted: dict[str, Any], flash: str | None) -> "Settings":
        """The settings that the configuration asks for on this machine, or that fit_memory chose; `flash`: that of
        the resumed run. Raises UserError for more checkpointed layers than there are."""
        args = config.train
        layers = model.get_text_config().num_hidden_layers
        micro_batch: Any = fitted.get("per_device", args.per_device_train_batch_size)
        return cls(
            micro_batch=micro_batch,
            accumulation_steps=args.global_batch_size // (micro_batch * args.world_size),
            checkpointed_layers=fitted.get("checkpointed_layers", count_checkpointed(args, layers)),
            flash_attention=choose_flash(args.flash_attention, flash),
            fit_memory=fitted,
        )


def decide_settings(
    config: Config, tokens: Dataset, model_config: PretrainedConfig, before: dict[str, Any], eval_on_start: bool
) -> Settings:
    """The settings of a start; all ranks must call it and get the same. `before`: those of the run that is resumed, or
    empty. Raises UserError if fit_memory finds no setting that fits."""
    fitted: dict[str, Any] = {}
    if config.train.fit_memory:
        fitted = fit_memory(config, tokens, model_config, before.get("fit_memory", {}))
    settings = Settings.of(config, model_config, fitted, before.get("flash_attention"))
    return broadcast(replace(settings, eval_on_start=eval_on_start))
