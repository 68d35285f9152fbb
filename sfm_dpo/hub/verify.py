"""Is it fit to be seen? Weights compared with the base model's, and everything a user of the model needs is there."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import ADAPTER_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from sfm_dpo.common.errors import UserError

QUARTERS = 4  # layers are reported in so many groups


class Unfit(UserError):
    """What is to be published is not what it says, or lacks something."""


@dataclass
class Change:
    """What training changed in a group of layers; `changed` of `parameters`, `largest` absolute difference."""

    group: str
    parameters: int = 0
    changed: int = 0
    largest: float = 0.0

    @property
    def share(self) -> float:
        return self.changed / self.parameters if self.parameters else 0.0


def compare_weights(trained: Path, base: Path) -> list[Change]:
    """Changes by group (embeddings, four groups of layers, head), one tensor in memory at a time.

    The base is rounded to the trained model's dtype first: a bf16 model of an fp32 base differs everywhere by rounding
    alone. Tensors that only one of them holds (a tied head) are left out.

    Raises:
        Unfit: no tensor has the same name and shape in both; a trained weight that is no finite number.
    """
    mine, theirs = _tensors(trained), _tensors(base)
    layers = 1 + max((layer for name in mine if (layer := _layer(name)) is not None), default=0)
    groups: dict[str, Change] = {}
    for name in sorted(mine, key=lambda name: (not _embeds(name), layers if _layer(name) is None else _layer(name))):
        new = mine[name](name)
        if not torch.isfinite(new).all():
            raise Unfit(f"{trained}: {name} holds values that are no finite numbers")
        if name not in theirs or (old := theirs[name](name)).shape != new.shape:
            continue
        change = groups.setdefault(_group(name, layers), Change(_group(name, layers)))
        difference = (new.float() - old.to(new.dtype).float()).abs()
        change.parameters += difference.numel()
        change.changed += int(difference.count_nonzero())
        change.largest = max(change.largest, difference.max().item())
    if not groups:
        raise Unfit(f"{trained}: none of its tensors is in the base model {base}: they cannot be compared")
    return list(groups.values())


def adapter_changes(trained: Path) -> list[Change]:
    """The same for a LoRA adapter: what is not zero in its B matrices, which start at zero."""
    tensors = _tensors(trained)
    change = Change("adapter, B matrices")
    for name in (name for name in tensors if "lora_B" in name):
        values = tensors[name](name).float().abs()
        change.parameters += values.numel()
        change.changed += int(values.count_nonzero())
        change.largest = max(change.largest, values.max().item())
    return [change]


def check_changed(changes: list[Change]) -> None:
    """Raises Unfit if these are the base model's weights."""
    if not any(change.changed for change in changes):
        raise Unfit("the weights are those of the base model, bit by bit: nothing was learned")


def check_complete(folder: Path) -> None:
    """Loads what is in `folder` as its users will, with the plain Auto classes.

    Raises:
        Unfit: names what is missing, or does not load.
    """
    adapter = folder / ADAPTER_CONFIG_NAME
    if adapter.is_file() and Path(base := json.loads(adapter.read_text())["base_model_name_or_path"]).exists():
        raise Unfit(
            f"adapter_config.json: its base model {base} is a folder here, so nobody else can load the adapter"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise Unfit(f"the tokenizer does not load: {error}") from error
    if not tokenizer.chat_template:
        raise Unfit("the tokenizer has no chat template; put chat_template.jinja beside it")
    if not adapter.is_file() and not (folder / "generation_config.json").is_file():
        raise Unfit("generation_config.json is missing; take the base model's")
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


def base_folder(name: str, revision: str | None) -> Path:
    """Where the base model's safetensors are; fetched from the Hub, or its cache, if `name` is no folder.

    Raises:
        Unfit: they cannot be had, so nothing can be proved.
    """
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=["*.safetensors", "*.safetensors.*"]))
    except Exception as error:
        raise Unfit(f"the base model {name} is not at hand to compare with: {error}") from error


def _tensors(folder: Path) -> dict[str, Callable[[str], torch.Tensor]]:
    """Name of each tensor in the folder's safetensors -> the function that reads it."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    tensors: dict[str, Callable[[str], torch.Tensor]] = {}
    for file in files:
        opened = safe_open(folder / file, framework="pt")
        tensors |= {name: opened.get_tensor for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
    if not tensors:
        raise Unfit(f"{folder}: holds no safetensors to compare")
    return tensors


def _layer(name: str) -> int | None:
    found = re.search(r"\.(\d+)\.", name)
    return int(found.group(1)) if found else None


def _embeds(name: str) -> bool:
    return "embed_tokens" in name or "embed_in" in name


def _group(name: str, layers: int) -> str:
    if (layer := _layer(name)) is None:
        return "embeddings" if _embeds(name) else "final norm and head"
    size = -(-layers // QUARTERS)
    first = layer // size * size
    last = min(first + size, layers) - 1
    return f"layers {first}-{last}" if last > first else f"layer {first}"
