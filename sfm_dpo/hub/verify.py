"""Checks before publishing: the weights differ from the base model's, and the model loads completely."""

from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer

from sfm_dpo.common.errors import UserError
from sfm_dpo.model.weights import open_tensors, read_finite


def describe_change(trained: Path, base: Path | None) -> str:
    """What training changed against the base model, in words. `base` is its folder; None for a LoRA adapter, whose B
    matrices start at zero. Raises UserError if nothing changed, or a trained weight is not a finite number.
    """
    parameters = 0
    changed = 0
    largest = 0.0
    for difference in _differences(trained, base):
        parameters += difference.numel()
        changed += int(difference.count_nonzero())
        largest = max(largest, difference.abs().max().item())
    if not changed:
        raise UserError("the weights are those of the base model, bit by bit: nothing was learned")
    return f"{changed / parameters:.2%} of the parameters changed, by at most {largest:.3g}"


def _differences(trained: Path, base: Path | None) -> Iterator[torch.Tensor]:
    """Trained - base of each tensor that both have, one in memory at a time. The base is rounded to the model's dtype
    first: a bf16 model of an fp32 base differs everywhere by rounding alone.
    """
    new = open_tensors(trained)
    old = open_tensors(base) if base else {}
    for name in new:
        after = read_finite(new, name)
        if name in old:  # a tied head may not be
            yield after.float() - old[name](name).to(after.dtype).float()
        elif "lora_B" in name:
            yield after.float()


def find_base(name: str, revision: str | None) -> Path:
    """The folder of the base model's safetensors; from the Hub, or its cache, if `name` is not a folder."""
    if Path(name).is_dir():
        return Path(name)
    return Path(snapshot_download(name, revision=revision, allow_patterns=["*.safetensors", "*.safetensors.*"]))


def check_loads(folder: Path) -> None:
    """Loads the model in `folder` as its users will. Raises UserError if it has no chat template or lacks weights."""
    if not AutoTokenizer.from_pretrained(folder, local_files_only=True).chat_template:
        raise UserError("the tokenizer has no chat template; put chat_template.jinja beside it")
    _, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    wrong = {kind: keys for kind, keys in info.items() if keys}
    if wrong:
        raise UserError(f"AutoModelForCausalLM loads it only in part: {wrong}")
