"""Which model? Its configuration, before any weight is read, and how it is loaded."""

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import StrictDataclassError
from peft.utils.error import NoMatchingPeftModuleError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig

from sfm_dpo.common.errors import UserError
from sfm_dpo.config import Config

# What is looked at before a library reads it, in a model's folder.
MODEL_FILES = ("config.json", "generation_config.json", "*.safetensors.index.json", "*.safetensors")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def load_model_config(config: Config, needs_weights: bool = True) -> PretrainedConfig:
    """The model's config.json.

    Raises:
        UserError: neither a folder with a model nor one that the Hub gives; or, in a folder and where HF_HUB_OFFLINE
            is set in the cache, weights that are not there, which from_pretrained would find out minutes later (with
            `needs_weights` alone).
    """
    name, revision = config.model.model_name_or_path, config.model.model_revision
    check_files(name, MODEL_FILES if needs_weights else ["config.json"])
    if os.path.isdir(name) and revision not in (None, "main"):
        raise UserError(
            f"model_revision {revision}: is for the Hub, and model_name_or_path {name} is a folder; remove it"
        )
    try:
        found = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=config.train.trust_remote_code)
    except (OSError, ValueError, StrictDataclassError) as error:
        why = str(error).split("\n\n")[0]
        why += "; or run scripts/prefetch.py where there is a network" if "couldn't connect" in why else ""
        raise UserError(
            f"model_name_or_path {name}: neither a folder with a model nor one that the Hub gives: {why}"
        ) from error
    if not needs_weights:
        return found
    folder, remedy = (Path(name), "copy them there") if os.path.isdir(name) else (None, "")
    if folder is None and HF_HUB_OFFLINE:
        folder = Path(str(try_to_load_from_cache(name, "config.json", revision=revision))).parent
        remedy = "run scripts/prefetch.py where there is a network"
    if folder is not None and not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin")):
        raise UserError(
            f"model_name_or_path {name}: holds its weights as .bin, which can run code when it is read; convert it: "
            "load it where you trust it, and save_pretrained into another folder writes safetensors"
        )
    if folder is not None and (missing := missing_weights(folder)):
        raise UserError(f"model_name_or_path {name}: {folder} lacks {', '.join(missing[:3])}; {remedy}")
    return found


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
            lfs = path.stat().st_size < 200 and path.read_bytes().startswith(b"version https://git-lfs")
            why = "it is a pointer of Git LFS; fetch the file: git lfs pull" if lfs else f"{error}; copy it anew"
            raise UserError(f"model_name_or_path {name}: {path.name} is damaged: {why}") from error


@contextmanager
def loading(name: str, init_kwargs: dict[str, Any] | None = None) -> Iterator[None]:
    """Around what loads a model: UserError for weights not in its files, unknown `init_kwargs`, wrong LoRA targets.

    transformers 5.23 draws weights it does not find at random, and a table in the log is the only sign of it.
    """

    def refuse(record: logging.LogRecord) -> bool:
        if " LOAD REPORT" in (text := record.getMessage()):
            absent = re.findall(r"^(.+?) *\| *(?:\x1b\S*?m)?(MISSING|MISMATCH)", text, re.MULTILINE)
            if absent:
                raise UserError(
                    f"model_name_or_path {name}: its weights do not make up the model of config.json: {absent[0][0]} "
                    f"is {'missing' if absent[0][1] == 'MISSING' else 'of another shape'}, {len(absent) - 1} more; "
                    "take config.json and weights from the same place"
                )
        return True

    log = logging.getLogger("transformers.modeling_utils")
    log.addFilter(refuse)
    try:
        yield
    except NoMatchingPeftModuleError as error:
        raise UserError(f"lora_target_modules: {error}") from error
    except TypeError as error:  # of the model's class, to which from_pretrained hands on what it does not know
        key = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if key is None or key[1] not in (init_kwargs or {}):
            raise
        raise UserError(f"model_init_kwargs {key[1]}: is unknown to this model; remove it") from error
    finally:
        log.removeFilter(refuse)


def missing_weights(folder: Path) -> list[str]:
    """Weight files that a model's folder should hold and does not, by its index where it has one."""
    files = {path.name for path in folder.iterdir() if path.exists()}  # a link in the cache may lead nowhere
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if indexes:
        try:
            return sorted(set(json.loads(indexes[-1].read_text())["weight_map"].values()) - files)
        except (KeyError, AttributeError):
            return [f"a weight_map in {indexes[-1].name}"]
    return [] if any(name.endswith(".safetensors") for name in files) else ["weights (*.safetensors)"]


def model_init_kwargs(config: Config) -> dict[str, Any]:
    """Arguments of from_pretrained, for policy and reference, as TRL's own script puts them together."""
    return {
        "revision": config.model.model_revision,
        "dtype": config.model.dtype,
        "attn_implementation": config.model.attn_implementation,
        **(config.train.model_init_kwargs or {}),
    }
