"""Loading a model: its configuration and files are checked before any weight is read."""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accelerate import DistributedType, PartialState
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from sfm_dpo.common.errors import UserError
from sfm_dpo.config import Config

# What is looked at before a library reads it, in a model's folder.
MODEL_FILES = ("config.json", "generation_config.json", "*.safetensors.index.json", "*.safetensors")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
PREFETCH = "run scripts/prefetch.py where there is a network"


def load_model_config(config: Config, needs_weights: bool = True) -> PretrainedConfig:
    """The model's config.json.

    Raises:
        UserError: neither a folder with a model nor one that the Hub gives; or, with `needs_weights`, weights that a
            folder, or the cache where HF_HUB_OFFLINE is set, lacks: from_pretrained would notice minutes later.
    """
    name, revision = config.model.model_name_or_path, config.model.model_revision
    is_folder = os.path.isdir(name)
    check_files(name, MODEL_FILES if needs_weights else ["config.json"])
    if is_folder and revision not in (None, "main"):
        raise UserError(
            f"model_revision {revision}: is for the Hub, and model_name_or_path {name} is a folder; remove it"
        )
    try:
        model_config = AutoConfig.from_pretrained(
            name, revision=revision, trust_remote_code=config.train.trust_remote_code
        )
    except (OSError, ValueError, StrictDataclassError) as error:
        why = str(error).split("\n\n")[0]
        if "couldn't connect" in why:
            why += f"; or {PREFETCH}"
        raise UserError(
            f"model_name_or_path {name}: neither a folder with a model nor one that the Hub gives: {why}"
        ) from error
    if needs_weights and is_folder:
        check_weights(name, Path(name), "copy them there; .bin files, which can run code, must be converted")
    elif needs_weights and HF_HUB_OFFLINE:
        cached = str(try_to_load_from_cache(name, "config.json", revision=revision))
        check_weights(name, Path(cached).parent, PREFETCH)
    return model_config


def check_files(name: str, patterns: Iterable[str]) -> None:
    """Raises UserError if `name` is a folder in which a file of these is damaged; of a safetensors the header is read.

    The libraries would say so in a traceback, or after minutes, and of some files nothing at all.
    """
    for path in [path for pattern in patterns for path in sorted(Path(name).glob(pattern))]:
        try:
            if path.suffix == ".safetensors":
                safe_open(path, framework="pt").__exit__(None, None, None)
            elif not isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
                raise ValueError("it holds no JSON mapping")
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(
                f"model_name_or_path {name}: {path.name} is damaged: {error}; copy it anew, or git lfs pull"
            ) from error


def check_weights(name: str, folder: Path, remedy: str) -> None:
    """Raises UserError where a model's folder lacks weights, by its index where it has one."""
    present = {path.name for path in folder.glob("*.safetensors") if path.exists()}  # a cache's link may lead nowhere
    missing = [] if present else ["weights (*.safetensors)"]
    for index in folder.glob("*.safetensors.index.json"):
        weight_map = json.loads(index.read_text()).get("weight_map", {"": f"a weight_map in {index.name}"})
        missing = sorted(set(weight_map.values()) - present)
    if missing:
        raise UserError(f"model_name_or_path {name}: {folder} lacks {', '.join(missing[:3])}; {remedy}")


def load_model(name: str, init_kwargs: dict[str, Any]) -> PreTrainedModel:
    """The causal language model in a folder or on the Hub, in fp32 where no dtype is given.

    Raises:
        UserError: weights that are not in its files (transformers 5.23 draws them at random and only prints a table);
            an `init_kwargs` that the model does not know.
    """
    kwargs = {"dtype": "float32"} | init_kwargs
    if PartialState().distributed_type == DistributedType.NO and PartialState().device.type == "cuda":
        kwargs.setdefault("device_map", "auto")  # as TRL: read straight into the GPU
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
        )
    except TypeError as error:  # of the model's class, to which from_pretrained hands on what it does not know
        key = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if key is None or key[1] not in init_kwargs:
            raise
        raise UserError(f"model_init_kwargs {key[1]}: is unknown to this model; remove it") from error
    absent = [f"{key} is missing" for key in sorted(report["missing_keys"])]
    absent += [f"{key[0]} is of another shape" for key in sorted(report["mismatched_keys"])]
    if absent:
        raise UserError(
            f"model_name_or_path {name}: its weights do not make up the model of config.json: {absent[0]}, "
            f"{len(absent) - 1} more; take config.json and weights from the same place"
        )
    return model


def model_init_kwargs(config: Config) -> dict[str, Any]:
    """Arguments of from_pretrained, for policy and reference, as TRL's own script puts them together."""
    return {
        "revision": config.model.model_revision,
        "dtype": config.model.dtype,
        "attn_implementation": config.model.attn_implementation,
        **(config.train.model_init_kwargs or {}),
    }


def hash_config(config: PretrainedConfig) -> str:
    """Hash of what a model's configuration says about its computation: without paths, versions and the KV cache."""
    fields = config.to_dict()
    for name in ("_name_or_path", "name_or_path", "transformers_version", "use_cache", "dtype"):
        fields.pop(name, None)
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:16]
