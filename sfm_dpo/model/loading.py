"""Loading a model: its configuration first, then its weights."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from huggingface_hub import hf_hub_download
from peft import PeftModel, get_peft_model
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import local_torch_dtype
from transformers.utils import ADAPTER_CONFIG_NAME
from trl import get_peft_config

from sfm_dpo.common.distributed import on_main_process
from sfm_dpo.common.errors import UserError, user_input
from sfm_dpo.common.files import hash_file
from sfm_dpo.config.fields import Config
from sfm_dpo.model.attention import disable_cudnn_attention

CONTENT = (".safetensors", ".gguf", ".py")  # of files that decide what a model in a folder computes
FOLDER = "hash-"  # an id that is no commit on the Hub begins with it


def load_model_config(config: Config) -> PretrainedConfig:
    """The model's config.json. Raises UserError if it cannot be loaded, or has no experts to balance."""
    name = config.model.model_name_or_path
    if Path(name).is_file():
        raise UserError(f"{config.model_field} {name}: is a file; give the folder that holds the model")
    if (Path(name) / ADAPTER_CONFIG_NAME).is_file():
        raise UserError(f"{config.model_field} {name}: holds a LoRA adapter; merge it first (docs/hub.md)")
    options = {"revision": config.revision, "trust_remote_code": config.train.trust_remote_code}
    with user_input(f"{config.model_field} {name}: neither a folder with a model nor a model on the Hub"):
        model_config = AutoConfig.from_pretrained(name, **options)
    if "/" in str(model_config._attn_implementation):
        kernel = f"config.json asks for the kernel {model_config._attn_implementation}, code from the Hub"
        raise UserError(f"{config.model_field} {name}: {kernel}; remove it there")
    coefficient = config.train.router_aux_loss_coef
    is_policy = config.model_field == "model_name_or_path"  # its reference may be dense
    if coefficient and is_policy and not hasattr(model_config.get_text_config(), "output_router_logits"):
        raise UserError(f"router_aux_loss_coef {coefficient:g}: {name} is not a mixture of experts; remove it")
    return model_config


def has_balancing_loss(config: Config, model_config: PretrainedConfig) -> bool:
    """Whether TRL adds the loss that balances the experts of a mixture; it depends on the pairs of a micro-batch."""
    text = model_config.get_text_config()
    given = config.train.router_aux_loss_coef
    coefficient = getattr(text, "router_aux_loss_coef", 0.0) if given is None else given
    return hasattr(text, "output_router_logits") and coefficient != 0.0


def load_model(name: str, init_kwargs: dict[str, Any], field: str = "model_name_or_path") -> PreTrainedModel:
    """The causal language model in a folder or on the Hub, in fp32 unless a dtype is given. Raises UserError for
    unknown `init_kwargs`, and for missing weights, which transformers 5.24 would initialise at random."""
    disable_cudnn_attention()
    kwargs = {"dtype": "float32", "use_safetensors": True} | init_kwargs  # .bin files can run code
    kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    if PartialState().distributed_type == DistributedType.NO and PartialState().device.type == "cuda":
        kwargs.setdefault("device_map", "auto")  # as TRL does: read the weights straight into the GPU
    with user_input(f"{field} {name}: cannot be loaded", "check its files and model_init_kwargs"):
        model, report = AutoModelForCausalLM.from_pretrained(name, **kwargs)
    absent = [f"{key} is missing" for key in sorted(report["missing_keys"])]
    absent += [f"{key[0]} has another shape" for key in sorted(report["mismatched_keys"])]
    if absent:
        raise UserError(
            f"{field} {name}: its weights do not match config.json: {absent[0]} "
            f"(and {len(absent) - 1} more); take config.json and weights from the same place"
        )
    return model


def build_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model as its class builds it, without its weights. `from_config` would shard it under ZeRO-3, which needs
    all ranks. Raises UserError if it is not a causal language model."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"model_name_or_path: {config.model_type} is not a causal language model; choose one")
    with no_init_weights(), local_torch_dtype(dtype):
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    model.tie_weights()  # else a part of the initialisation
    return model


def meta_model(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return build_model(config, torch.bfloat16)


def meta_adapter(config: Config, model_config: PretrainedConfig) -> PeftModel | None:
    """The model with its LoRA adapter, on the meta device; None without LoRA. Raises UserError if it has no such
    modules."""
    lora = get_peft_config(config.model)
    if lora is None:
        return None
    with torch.device("meta"), user_input(f"lora_target_modules {lora.target_modules}", "name modules of the model"):
        return get_peft_model(meta_model(model_config), lora)


def model_init_kwargs(config: Config) -> dict[str, Any]:
    """Arguments of from_pretrained for policy and reference, as in TRL's own script."""
    return {
        "revision": config.revision,
        "dtype": config.model.dtype,
        "attn_implementation": config.model.attn_implementation,
        **(config.train.model_init_kwargs or {}),
    }


def identify_models(config: Config, known: dict[str, Any], before: dict[str, Any]) -> Config:
    """The configuration with `model_ids`. `known`: facts of the checkpoint that a run resumes from, whose commits are
    kept though a branch on the Hub has moved since, if its configuration `before` names the same models. All ranks
    must call it."""
    names = {part.model_field: part.model.model_name_or_path for part in config.parts}
    commits = {
        field: known[field]
        for field, name in names.items()
        if before.get(field) == name and not known.get(field, FOLDER).startswith(FOLDER)
    }
    pinned = dataclasses.replace(config, model_ids=commits)
    ids = {part.model_field: identify_model(part) for part in pinned.parts}
    return dataclasses.replace(config, model_ids=ids)


def identify_model(config: Config) -> str:
    """What decides the model's log-probs: its commit on the Hub, or a hash of weights and configuration in its folder.
    All ranks must call it. Raises UserError if its configuration cannot be loaded."""

    def identify() -> str:
        name = config.model.model_name_or_path
        model_config = load_model_config(config)
        if Path(name).is_dir():
            return _hash_folder(Path(name), model_config)
        return Path(hf_hub_download(name, "config.json", revision=config.revision)).parent.name  # snapshots/<commit>

    return config.model_ids.get(config.model_field) or on_main_process(identify)


def _hash_folder(folder: Path, config: PretrainedConfig) -> str:
    files = sorted(path.resolve() for path in folder.glob("*") if path.suffix in CONTENT)
    return FOLDER + _digest([_digest([hash_file(path) for path in files]), hash_config(config)])


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def hash_config(config: PretrainedConfig) -> str:
    """Hash of the fields of a model's configuration that affect its computation: no paths, versions or KV cache."""
    session = ("_name_or_path", "name_or_path", "transformers_version", "use_cache", "dtype")
    return _digest({name: value for name, value in config.to_dict().items() if name not in session})


ATTENTION = {"full_attention", "sliding_attention"}  # in `layer_types` of a model's configuration


def blocks(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpoint_layers(model: PreTrainedModel, count: int) -> None:
    """Leaves gradient checkpointing, which is on, to `count` blocks, evenly spread. The last block is among them only
    if all are: the backward frees its activations before it computes those of a checkpointed block again."""
    layers = blocks(model)
    chosen = {number * len(layers) // count for number in range(count)}
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index in chosen


def compile_layers(model: PreTrainedModel, backend: str | Callable, mode: str | None) -> None:
    """Compiles each decoder layer in place, so names in the state dict do not change. `generate` runs uncompiled.

    accelerate 1.15's `compile_regions` compiles a copy of the model, whose forward, bound by TRL, still runs the
    original's layers; its variants for DeepSpeed and FSDP2 also compile `generate`, and none compiles before training.
    """
    for layer in blocks(model):
        layer.compile(dynamic=True, backend=backend, mode=mode, recompile_limit=32)
    # Upstream: transformers 5.24, cache_utils.py, Cache.update: takes the layer's index, so torch.compile
    # makes a graph for each index. Canary: test_canary_graph_for_every_layer
    model.generate = torch.compiler.set_stance("force_eager")(model.generate)
