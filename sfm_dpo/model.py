"""Which model? Its configuration, before any weight is read, and how it is loaded."""

import os
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from sfm_dpo.config import Config, UserError


def load_model_config(config: Config) -> PretrainedConfig:
    """The model's config.json.

    Raises:
        UserError: neither a folder with a model nor one that the Hub gives, or a folder without weights.
    """
    name = config.model.model_name_or_path
    try:
        found = AutoConfig.from_pretrained(
            name, revision=config.model.model_revision, trust_remote_code=config.train.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"model_name_or_path {name}: neither a folder with a model nor one that the Hub gives: {error}"
        ) from error
    if os.path.isdir(name) and not any(file.endswith((".safetensors", ".bin")) for file in os.listdir(name)):
        raise UserError(f"model_name_or_path {name}: there are no weights (*.safetensors) in this folder")
    return found


def model_init_kwargs(config: Config) -> dict[str, Any]:
    """Arguments of from_pretrained, for policy and reference, as TRL's own script puts them together."""
    return {
        "revision": config.model.model_revision,
        "dtype": config.model.dtype,
        "attn_implementation": config.model.attn_implementation,
        **(config.train.model_init_kwargs or {}),
    }
