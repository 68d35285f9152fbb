"""Loading a model: its configuration first, then its weights."""

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from huggingface_hub import hf_hub_download, snapshot_download
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import local_torch_dtype
from transformers.utils import ADAPTER_CONFIG_NAME, find_adapter_config_file
from transformers.utils.logging import info_once
from trl import get_peft_config

from sfm_dpo.common.distributed import is_on_gpu, on_main_process
from sfm_dpo.common.errors import UserError, explain_path, user_input
from sfm_dpo.common.files import hash_file
from sfm_dpo.config.fields import FOLDER, Config
from sfm_dpo.model.attention import disable_cudnn_attention

log = logging.getLogger(__name__)

# Weights only as safetensors, and the other files that AutoModel and AutoTokenizer read
HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model*", "*.tiktoken"]
CONTENT = (".safetensors", ".gguf", ".py")  # of files that decide what a model in a folder computes


def load_model_config(config: Config) -> PretrainedConfig:
    """The model's config.json, or that of the model on which a LoRA adapter builds. Raises UserError if it cannot be
    loaded, asks for what is not possible here, or has no experts to balance."""
    name = config.model.model_name_or_path
    what = f"{config.model_field} {name}"
    if Path(name).is_file():
        raise UserError(f"{what}: is a file; give the folder that holds the model")
    with user_input(f"{what}: neither a folder with a model nor a model on the Hub", explain_path(name)):
        base, revision = find_base(name, config.revision)
        declared, _ = PretrainedConfig.get_config_dict(base, revision=revision)
        is_known = declared.get("model_type") in CONFIG_MAPPING
        if "auto_map" in declared and (config.train.trust_remote_code or not is_known):
            remedy = "remove trust_remote_code" if is_known else "choose a model of a type that Transformers has"
            raise UserError(f"{what}: config.json names its own code (auto_map), which is not supported; {remedy}")
        model_config = AutoConfig.from_pretrained(base, revision=revision)
        text = model_config.get_text_config()
    if "/" in str(model_config._attn_implementation):
        kernel = f"config.json asks for the kernel {model_config._attn_implementation}, code from the Hub"
        raise UserError(f"{what}: {kernel}; remove it there")
    for part in (model_config, text):
        if declared := getattr(part, "quantization_config", None):
            method = declared.get("quant_method") or ", ".join(declared)
            raise UserError(f"{what}: its weights are quantised ({method}); take the model's bf16 checkpoint")
    text_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config), None)
    if text_class and text is not model_config and issubclass(text_class.config_class, type(text)):  # as Qwen 3.5
        kind = f"model_type '{model_config.model_type}' is more than a language model"
        raise UserError(f"{what}: {kind}: {text_class.__name__} would lose its other tensors; take a text model")
    with user_input(f"{what}: generation_config.json", "correct or remove it"):
        try:
            generation = GenerationConfig.from_pretrained(base, revision=revision)
        except OSError:  # it has none
            generation = GenerationConfig.from_model_config(model_config)
        check_generation(generation)
    coefficient = config.train.router_aux_loss_coef
    is_policy = config.model_field == "model_name_or_path"  # its reference may be dense
    if coefficient and is_policy and not hasattr(text, "output_router_logits"):
        raise UserError(f"router_aux_loss_coef {coefficient:g}: {name} is not a mixture of experts; remove it")
    return model_config


def balancing_coefficient(given: float | None, model_config: PretrainedConfig) -> float:
    """By which TRL adds the loss that balances the experts of a mixture; it depends on the pairs of a micro-batch.
    `given`: router_aux_loss_coef."""
    text = model_config.get_text_config()
    coefficient = getattr(text, "router_aux_loss_coef", 0.0) if given is None else given
    return coefficient if hasattr(text, "output_router_logits") else 0.0


def find_adapter(name: str, revision: str | None) -> Path | None:
    """The folder of a LoRA adapter, such as a run or its checkpoint, or a copy of one on the Hub, in its cache; None
    for a model."""
    try:
        file = find_adapter_config_file(name, revision=revision)
    except OSError:  # neither a folder nor on the Hub, which what loads the model says
        return None
    if not file or Path(name).is_dir():
        return file and Path(file).parent
    return Path(snapshot_download(name, revision=revision, allow_patterns=HUB_FILES, ignore_patterns="*/*"))


def read_adapter(name: str, revision: str | None = None) -> dict[str, Any] | None:
    """adapter_config.json of a LoRA adapter in a folder or on the Hub; None for a model."""
    folder = find_adapter(name, revision)
    if not folder:
        return None
    adapter = json.loads((folder / ADAPTER_CONFIG_NAME).read_text())
    if adapter["base_model_name_or_path"] == name:
        raise UserError(f"{name}: holds a model and an adapter to it; keep one of them there")
    return adapter


def find_base(name: str, revision: str | None) -> tuple[str, str | None]:
    """The model, with its revision, on which the LoRA adapter `name` builds; `name` itself if it is no adapter."""
    while adapter := read_adapter(name, revision):
        name = adapter["base_model_name_or_path"]
        revision = adapter.get("revision")
    return name, revision


def check_generation(generation: GenerationConfig) -> None:
    """Makes the model save its generation_config.json again once the tokens in it have changed, which Transformers
    otherwise refuses for sampling fields without `do_sample`. Raises ValueError for what else it refuses."""
    try:
        generation.validate(strict=True)
    except ValueError:
        if generation.temperature != 0:  # greedy
            generation.do_sample = True
        generation.validate(strict=True)


def load_model(name: str, init_kwargs: dict[str, Any], field: str = "model_name_or_path") -> PreTrainedModel:
    """The causal language model in a folder or on the Hub, in fp32 unless a dtype is given; a LoRA adapter is merged
    into its base. Raises UserError for unknown `init_kwargs`, and for missing weights, which transformers 5.24 would
    initialise at random."""
    disable_cudnn_attention()
    if adapter := read_adapter(name, init_kwargs.get("revision")):
        return merge_adapter(name, adapter, init_kwargs, field)
    kwargs = {"dtype": "float32", "use_safetensors": True} | init_kwargs  # .bin files can run code
    kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    if PartialState().distributed_type == DistributedType.NO and is_on_gpu():
        kwargs.setdefault("device_map", "auto")  # as TRL does: read the weights straight into the GPU
    suspect = "remove attn_implementation, or " if init_kwargs.get("attn_implementation") else ""
    with user_input(f"{field} {name}: cannot be loaded", f"{suspect}check its files and model_init_kwargs"):
        try:
            model, report = AutoModelForCausalLM.from_pretrained(name, **kwargs)
        except OSError as error:
            if "model.safetensors" not in str(error):
                raise
            pickle = "pytorch_model.bin is a pickle, which can run code; convert one that you trust by save_pretrained"
            raise UserError(f"{field} {name}: has no model.safetensors; {pickle}") from error
        if model.generation_config:
            check_generation(model.generation_config)
        correct_config(model, f"{field} {name}")
    if (extra := sorted(report["unexpected_keys"])) and model.device.type != "meta":
        log.warning(f"{field} {name}: {type(model).__name__} has no {extra[0]} (and {len(extra) - 1} more): not saved")
    absent = [f"{key} is missing" for key in sorted(report["missing_keys"])]
    absent += [f"{key[0]} has another shape" for key in sorted(report["mismatched_keys"])]
    if absent:
        raise UserError(
            f"{field} {name}: its weights do not match config.json: {absent[0]} "
            f"(and {len(absent) - 1} more); take config.json and weights from the same place"
        )
    return model


def correct_config(model: PreTrainedModel, what: str) -> None:
    """Makes config.json, as it will be saved, agree with the weights that were loaded."""
    text = model.config.get_text_config()
    head = model.get_output_embeddings()
    if text.tie_word_embeddings and head and head.weight is not model.get_input_embeddings().weight:
        log.warning(f"{what}: config.json ties the LM head to the embedding, but they differ; saved as not tied")
        model.config.tie_word_embeddings = text.tie_word_embeddings = False
    # Upstream: trl 1.16, trainer/utils.py, add_fused_lm_head: reads num_experts, which granitemoe's and other
    # configurations lack. Canary: test_canary_num_experts
    if not hasattr(text, "num_experts") and hasattr(text, "num_local_experts"):
        type(text).attribute_map = type(text).attribute_map | {"num_experts": "num_local_experts"}


def disable_noise(model: PreTrainedModel) -> None:
    """Sets the rates of dropout, and of jitter of a mixture's router, to 0: policy and reference must agree."""
    # Upstream: trl 1.16, trainer/utils.py, disable_dropout_in_model: leaves a rate that is an attribute of another
    # module, as in OPT. Canary: test_canary_disable_dropout
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and re.search("drop|jitter", name):
                setattr(module, name, 0.0)


def merge_adapter(name: str, adapter: dict[str, Any], init_kwargs: dict[str, Any], field: str) -> PreTrainedModel:
    """The base model of the adapter `name` with the adapter merged into it, in fp32: in 16 bit the sum would be
    rounded twice. Raises UserError under ZeRO-3, which shards the base while it is loaded."""
    base = adapter["base_model_name_or_path"]
    if is_deepspeed_zero3_enabled():
        raise UserError(f"{field} {name}: is a LoRA adapter; under ZeRO-3 merge it first (scripts/merge.py)")
    model = load_model(base, init_kwargs | {"revision": adapter.get("revision"), "dtype": "float32"}, field)
    frozen = {key for key, parameter in model.named_parameters() if not parameter.requires_grad}
    with user_input(f"{field} {name}: its adapter cannot be merged into {base}", "merge it yourself"):
        model = PeftModel.from_pretrained(model, find_adapter(name, init_kwargs.get("revision"))).merge_and_unload()
    dtype = str(init_kwargs.get("dtype", "float32")).removeprefix("torch.")
    model.config.dtype = getattr(torch, dtype, torch.float32)
    for key, parameter in model.named_parameters():  # not the buffers: RoPE's frequencies are fp32
        parameter.data = parameter.data.to(model.config.dtype)
        parameter.requires_grad_(key not in frozen)  # PEFT froze all
    model.name_or_path = model.config.name_or_path = name  # the base of the next adapter
    log.info(f"{field} {name}: a LoRA adapter, merged into its base model {base}")
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


def count_positions(config: Config, model_config: PretrainedConfig) -> int | None:
    """Tokens that a sequence may have, by model_init_kwargs or else by config.json; None if neither says."""
    declared = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return (config.train.model_init_kwargs or {}).get("max_position_embeddings", declared)


def lora_config(config: Config, model_config: PretrainedConfig) -> LoraConfig | None:
    """The LoRA adapter of a configuration, None without LoRA. If it names no target on a type of model for which PEFT
    has none, such as OLMo 3, these are all linear layers."""
    lora = get_peft_config(config.model)
    kind = model_config.model_type
    has_targets = lora is None or lora.target_modules or lora.target_parameters
    if not has_targets and kind not in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING:
        lora.target_modules = "all-linear"
        info_once(log, f"lora_target_modules: PEFT knows none for {kind}; all linear layers are trained (all-linear)")
    return lora


def meta_adapter(config: Config, model_config: PretrainedConfig) -> PeftModel | None:
    """The model with its LoRA adapter, on the meta device; None without LoRA. Raises UserError if it has no such
    modules."""
    lora = lora_config(config, model_config)
    if lora is None:
        return None
    remedy = "name modules of the model, or set lora_target_modules: all-linear"
    with torch.device("meta"), user_input(f"lora_target_modules {lora.target_modules}", remedy):
        adapter = get_peft_model(meta_model(model_config), lora)
        ends = (adapter.get_input_embeddings(), adapter.get_output_embeddings())
        if model_config.get_text_config().tie_word_embeddings and any(hasattr(end, "lora_A") for end in ends):
            raise ValueError("the LM head is the embedding (tie_word_embeddings): an adapter to it cannot be merged")
    return adapter


def identify_models(config: Config, known: dict[str, Any], before: dict[str, Any]) -> Config:
    """The configuration with `model_ids`. `known`: facts of the checkpoint that a run resumes from, whose commits are
    kept though a branch on the Hub has moved since, if its configuration `before` names the same models. All ranks
    must call it."""
    ids = {}
    for part in config.parts:
        field = part.model_field
        identity = known.get(field, FOLDER)
        is_kept = before.get(field) == part.model.model_name_or_path and not identity.startswith(FOLDER)
        ids[field] = identity if is_kept else identify_model(part)
    return dataclasses.replace(config, model_ids=ids)


def identify_model(config: Config) -> str:
    """What decides the model's log-probs: its commit on the Hub, or a hash of weights and configuration in its folder.
    All ranks must call it. Raises UserError if its configuration cannot be loaded."""
    name = config.model.model_name_or_path
    known = config.model_ids.get(config.model_field)
    return known or on_main_process(lambda: _identify(name, config.revision, load_model_config(config)))


def _identify(name: str, revision: str | None, model_config: PretrainedConfig) -> str:
    if not Path(name).is_dir():  # in the cache it is in snapshots/<commit>
        folder = find_adapter(name, revision) or Path(hf_hub_download(name, "config.json", revision=revision)).parent
        return folder.name
    adapter = read_adapter(name)
    if not adapter:
        return _hash_folder(Path(name), model_config)
    base = _identify(adapter.pop("base_model_name_or_path"), adapter.pop("revision", None), model_config)
    return FOLDER + _digest([base, _hash_folder(Path(name), model_config), adapter])


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
