"""Checks before publishing: weights compared with the base model's, and everything that loading needs is there."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import ADAPTER_CONFIG_NAME

from sfm_dpo.common.errors import UserError
from sfm_dpo.report.model_card import WeightChange

# Groups in which changes are reported, and the names of their tensors; embed_out is GPT-NeoX's head
_GROUPS = {"embeddings": "embed_(tokens|in)", "layers": r"\.\d+\.", "final norm and head": ""}


class Unfit(UserError):
    """The model is not what it should be, or lacks something that its users need."""


def compare_weights(trained: Path, base: Path) -> list[WeightChange]:
    """Changes by group (embeddings, layers, head), one tensor in memory at a time.

    The base is rounded to the trained model's dtype first: a bf16 model of an fp32 base differs everywhere by rounding
    alone. Tensors that only one of them holds (a tied head) are left out.

    Raises:
        Unfit: no tensor has the same name and shape in both; a trained weight that is not a finite number.
    """
    new, old = open_tensors(trained), open_tensors(base)
    groups = {group: WeightChange(group) for group in _GROUPS}
    for name in new:
        after = read_finite(new, name)
        if name in old and (before := old[name](name)).shape == after.shape:
            group = next(group for group, pattern in _GROUPS.items() if re.search(pattern, name))
            groups[group].add(after.float() - before.to(after.dtype).float())
    changes = [change for change in groups.values() if change.parameters]
    if not changes:
        raise Unfit(f"none of its tensors is in the base model {base}: they cannot be compared")
    return changes


def compare_adapter(trained: Path) -> list[WeightChange]:
    """The same for a LoRA adapter: what is not zero in its B matrices, which start at zero."""
    tensors, change = open_tensors(trained), WeightChange("adapter, B matrices")
    for name in (name for name in tensors if "lora_B" in name):
        change.add(read_finite(tensors, name).float())
    return [change]


def check_loads(folder: Path) -> None:
    """Loads what is in `folder` as its users will, with the plain Auto classes.

    Raises:
        Unfit: names what is missing, or does not load.
    """
    adapter = folder / ADAPTER_CONFIG_NAME
    if adapter.is_file() and Path(base := json.loads(adapter.read_text())["base_model_name_or_path"]).exists():
        raise Unfit(f"adapter_config.json: its base model {base} is a folder here, so nobody else can load it")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise Unfit(f"the tokenizer does not load: {error}") from error
    if not tokenizer.chat_template:
        raise Unfit("the tokenizer has no chat template; put chat_template.jinja beside it")
    if not adapter.is_file() and not (folder / "generation_config.json").is_file():
        raise Unfit("generation_config.json is missing; take the base model's")
    if not adapter.is_file():
        _check_end(tokenizer, GenerationConfig.from_pretrained(folder).eos_token_id)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    except Exception as error:  # each library that takes part has its own
        raise Unfit(f"AutoModelForCausalLM cannot load it: {error}") from error
    wrong = [f"{kind.removesuffix('_keys')} {sorted(map(str, info[kind]))[0]}" for kind in info if info[kind]]
    if wrong:
        raise Unfit(f"AutoModelForCausalLM loads it only in part: {', '.join(wrong)}")
    size = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > size:
        raise Unfit(f"the tokenizer has {len(tokenizer)} tokens, the model embeds {size}")


def _check_end(tokenizer: PreTrainedTokenizerBase, eos: int | list[int] | None) -> None:
    """Raises Unfit if generation would not stop at the special token that ends an answer in the chat template."""
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANSWER"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("ANSWER")[2]
    ends = [id for id in tokenizer(text, add_special_tokens=False)["input_ids"] if id in tokenizer.all_special_ids]
    if ends and ends[0] not in (eos if isinstance(eos, list) else [eos]):
        token = tokenizer.convert_ids_to_tokens(ends[0])
        raise Unfit(
            f"generation_config.json: eos_token_id {eos} lacks {ends[0]} ({token}), which ends an answer; add it"
        )


def find_base(name: str, revision: str | None) -> Path:
    """Where the base model's safetensors are; fetched from the Hub, or its cache, if `name` is not a folder.

    Raises:
        Unfit: they cannot be had, so nothing can be compared.
    """
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=["*.safetensors", "*.safetensors.*"]))
    except Exception as error:
        raise Unfit(f"the base model {name} cannot be loaded to compare with: {error}") from error


def open_tensors(folder: Path) -> dict[str, Callable[[str], torch.Tensor]]:
    """Name of each tensor in the folder's safetensors -> the function that reads it. Raises Unfit if there is none."""
    readers = [safe_open(file, framework="pt") for file in sorted(folder.glob("*.safetensors"))]
    tensors = {name: reader.get_tensor for reader in readers for name in reader.keys()}  # noqa: SIM118 (no mapping)
    if not tensors:
        raise Unfit(f"{folder}: holds no safetensors to compare")
    return tensors


def read_finite(tensors: dict[str, Callable[[str], torch.Tensor]], name: str) -> torch.Tensor:
    """A tensor of `open_tensors`. Raises Unfit if a value is NaN or infinite."""
    tensor = tensors[name](name)
    if not torch.isfinite(tensor).all():
        raise Unfit(f"{name} holds values that are not finite numbers")
    return tensor
