"""The files of a saved model: its tensors, and its small files in a form that Transformers 4 and vLLM also read.

Transformers 5.23 writes fields that older readers do not know (rope_parameters, dtype) or refuse (the tokenizer class
TokenizersBackend, a list in extra_special_tokens), and how the model was loaded. Trainer sets use_cache: false.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PretrainedConfig

from sfm_dpo.common.errors import UserError

# How and from where the files were loaded here: no reader needs these fields
_SESSION = ("_name_or_path", "name_or_path", "is_local", "local_files_only", "_commit_hash")
SAVED_FILES = ("config.json", "generation_config.json", "adapter_config.json", "tokenizer_config.json")
_NOT_TRAINED = ("use_cache", "transformers_version")


def read_base_config(name: str, revision: str | None, loaded: PretrainedConfig) -> dict[str, Any]:
    """config.json of a base model: its raw content, and as Transformers loaded it."""
    raw, _ = PretrainedConfig.get_config_dict(name, revision=revision)
    return {"file": raw, "loaded": json.loads(json.dumps(loaded.to_dict(), default=str))}


def fix_saved_files(folder: Path, base: dict[str, Any] | None = None) -> None:
    """Rewrites SAVED_FILES. With `base` (of `read_base_config`) config.json is the base's plus training's changes."""
    for name in SAVED_FILES:
        path = folder / name
        if not path.is_file():
            continue
        content = {key: value for key, value in json.loads(path.read_text()).items() if key not in _SESSION}
        if name == "config.json":
            content = _fix_config(content, base)
        elif name == "tokenizer_config.json":
            _fix_tokenizer(content, folder / "chat_template.jinja")
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _fix_config(config: dict[str, Any], base: dict[str, Any] | None) -> dict[str, Any]:
    if base:
        loaded = base["loaded"]
        changed = {k: v for k, v in config.items() if k not in _NOT_TRAINED and loaded.get(k, base) != v}
        version = config.get("transformers_version")
        config = {k: v for k, v in base["file"].items() if k not in _SESSION} | changed
        config |= {"rope_parameters": loaded["rope_parameters"]} if loaded.get("rope_parameters") else {}
        config |= {"transformers_version": version}
    if dtype := config.get("dtype") or config.get("torch_dtype"):
        config |= {"dtype": dtype, "torch_dtype": dtype}
    rope = dict(config.get("rope_parameters") or {})
    if config.get("model_type") == "olmo3":  # its sliding layers are never scaled, nor are they in Transformers 4
        rope = dict(rope.get("full_attention") or {})
    if "rope_theta" not in rope:  # absent, or given by layer, which has no older form
        return config
    theta = rope.pop("rope_theta")
    rotary = rope.pop("partial_rotary_factor", None)
    if config["model_type"] == "gpt_neox":
        config |= {"rotary_emb_base": theta, "rotary_pct": rotary}
    else:
        config |= {"rope_theta": theta} | ({} if rotary is None else {"partial_rotary_factor": rotary})
    return config | ({"rope_scaling": rope} if rope.get("rope_type", "default") != "default" else {})


def _fix_tokenizer(config: dict[str, Any], template: Path) -> None:
    config.pop("backend", None)
    if (template.parent / "tokenizer.json").is_file() and config.get("tokenizer_class", "").endswith("Backend"):
        config["tokenizer_class"] = "PreTrainedTokenizerFast"  # reads tokenizer.json unchanged, in both versions
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if template.is_file():  # Transformers 4.45 does not look for this file
        config["chat_template"] = template.read_text()


def open_tensors(folder: Path) -> dict[str, Callable[[str], torch.Tensor]]:
    """Maps the name of each tensor in the folder's safetensors to the function that reads it."""
    tensors: dict[str, Callable[[str], torch.Tensor]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        reader = safe_open(file, framework="pt")
        tensors |= dict.fromkeys(reader.keys(), reader.get_tensor)
    if not tensors:
        raise UserError(f"{folder}: holds no safetensors; give a folder with the weights of a model")
    return tensors


def read_finite(tensors: dict[str, Callable[[str], torch.Tensor]], name: str) -> torch.Tensor:
    """A tensor of `open_tensors`. Raises UserError if a value is NaN or infinite."""
    tensor = tensors[name](name)
    if not torch.isfinite(tensor).all():
        raise UserError(f"{name} holds NaN or infinite values; use an earlier checkpoint")
    return tensor
