"""Checks before publishing: the weights differ from the base model's, and everything that loading needs is there."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import ADAPTER_CONFIG_NAME

from sfm_dpo.common.errors import UserError
from sfm_dpo.model.weights import open_tensors, read_finite


def describe_change(trained: Path, base: Path | None) -> str:
    """What training changed against the base model, in words.

    Args:
        base: folder of the base model; None for a LoRA adapter, whose B matrices start at zero.

    Raises:
        UserError: nothing changed, or nothing can be compared; a trained weight that is not a finite number.
    """
    parameters = 0
    changed = 0
    largest = 0.0
    for difference in _subtract_adapter_start(trained) if base is None else _subtract_base(trained, base):
        parameters += difference.numel()
        changed += int(difference.count_nonzero())
        largest = max(largest, difference.abs().max().item())
    if not parameters:
        raise UserError(f"none of its tensors is in the base model {base}: they cannot be compared")
    if not changed:
        raise UserError("the weights are those of the base model, bit by bit: nothing was learned")
    return f"{changed / parameters:.2%} of the parameters changed, by at most {largest:.3g}"


def _subtract_base(trained: Path, base: Path) -> Iterator[torch.Tensor]:
    """Trained - base of each tensor that both have, one in memory at a time.

    The base is rounded to the trained model's dtype first: a bf16 model of an fp32 base differs everywhere by rounding
    alone.
    """
    new = open_tensors(trained)
    old = open_tensors(base)
    for name in new:
        after = read_finite(new, name)
        if name not in old:  # a tied head
            continue
        before = old[name](name)
        if before.shape == after.shape:
            yield after.float() - before.to(after.dtype).float()


def _subtract_adapter_start(trained: Path) -> Iterator[torch.Tensor]:
    tensors = open_tensors(trained)
    for name in tensors:
        if "lora_B" in name:
            yield read_finite(tensors, name).float()


def find_base(name: str, revision: str | None) -> Path:
    """The folder of the base model's safetensors; from the Hub, or its cache, if `name` is not a folder.

    Raises:
        UserError: the base model cannot be loaded.
    """
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=["*.safetensors", "*.safetensors.*"]))
    except Exception as error:
        raise UserError(f"the base model {name} cannot be loaded to compare with: {error}") from error


def check_loads(folder: Path) -> None:
    """Loads the model in `folder` as its users will, with the plain Auto classes.

    Raises:
        UserError: names what is missing, or does not load.
    """
    adapter = folder / ADAPTER_CONFIG_NAME
    if adapter.is_file() and Path(base := json.loads(adapter.read_text())["base_model_name_or_path"]).exists():
        raise UserError(f"adapter_config.json: its base model {base} is a local folder, so nobody else can load it")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"the tokenizer does not load: {error}") from error
    if not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template; put chat_template.jinja beside it")
    if not adapter.is_file():
        _check_generation(folder, tokenizer)
    try:
        _, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    except Exception as error:  # each library that takes part has its own
        raise UserError(f"AutoModelForCausalLM cannot load it: {error}") from error
    wrong = [f"{kind.removesuffix('_keys')} {sorted(map(str, keys))[0]}" for kind, keys in info.items() if keys]
    if wrong:
        raise UserError(f"AutoModelForCausalLM loads it only in part: {', '.join(wrong)}")


def _check_generation(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError if generation would not stop at the special token that ends an answer in the chat template."""
    if not (folder / "generation_config.json").is_file():
        raise UserError("generation_config.json is missing; take the base model's")
    eos = GenerationConfig.from_pretrained(folder).eos_token_id
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANSWER"}]
    rest = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("ANSWER")[2]
    special = [id for id in tokenizer(rest, add_special_tokens=False)["input_ids"] if id in tokenizer.all_special_ids]
    if special and special[0] not in (eos if isinstance(eos, list) else [eos]):
        token = tokenizer.convert_ids_to_tokens(special[0])
        raise UserError(
            f"generation_config.json: eos_token_id {eos} lacks {special[0]} ({token}), which ends an answer; add it"
        )
