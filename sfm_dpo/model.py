"""Which model? Its configuration, before any weight is read, and how it is loaded."""

import json
import os
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_OFFLINE
from transformers import AutoConfig, PretrainedConfig

from sfm_dpo.config import Config, UserError


def load_model_config(config: Config) -> PretrainedConfig:
    """The model's config.json.

    Raises:
        UserError: neither a folder with a model nor one that the Hub gives; or, in a folder and where HF_HUB_OFFLINE
            is set in the cache, weights that are not there. from_pretrained would find that out minutes later.
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
    folder, remedy = (Path(name), "copy them there") if os.path.isdir(name) else (None, "")
    if folder is None and HF_HUB_OFFLINE:
        folder = Path(try_to_load_from_cache(name, "config.json", revision=config.model.model_revision)).parent
        remedy = "run scripts/prefetch.py where there is a network"
    if folder is not None and not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin")):
        raise UserError(
            f"model_name_or_path {name}: holds its weights as .bin, which can run code when it is read; convert it: "
            "load it where you trust it, and save_pretrained into another folder writes safetensors"
        )
    if folder is not None and (missing := missing_weights(folder)):
        raise UserError(f"model_name_or_path {name}: {folder} lacks {', '.join(missing[:3])}; {remedy}")
    return found


def missing_weights(folder: Path) -> list[str]:
    """Weight files that a model's folder should hold and does not, by its index where it has one."""
    files = {path.name for path in folder.iterdir() if path.exists()}  # a link in the cache may lead nowhere
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if indexes:
        return sorted(set(json.loads(indexes[-1].read_text())["weight_map"].values()) - files)
    return [] if any(name.endswith(".safetensors") for name in files) else ["weights (*.safetensors)"]


def model_init_kwargs(config: Config) -> dict[str, Any]:
    """Arguments of from_pretrained, for policy and reference, as TRL's own script puts them together."""
    return {
        "revision": config.model.model_revision,
        "dtype": config.model.dtype,
        "attn_implementation": config.model.attn_implementation,
        **(config.train.model_init_kwargs or {}),
    }
