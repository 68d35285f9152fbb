"""The files of a saved model, in the form that Transformers 4 and 5 read."""

import errno
import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from sfm_dpo.common.files import follow_umask, write_json

log = logging.getLogger(__name__)

# With the processor's, which a multimodal model's tokenizer comes with
TOKENIZER_FILES = """tokenizer.json tokenizer_config.json tokenizer.model* special_tokens_map.json added_tokens.json
    vocab* merges.txt spiece.model sentencepiece* *.tiktoken tekken.json chat_template* additional_chat_templates/*
    preprocessor_config.json processor_config.json video_preprocessor_config.json""".split()
WEIGHTS = "model*.safetensors"
# Libraries write other files into the folder, which are not part of the model
MODEL_FILES = f"""{WEIGHTS} adapter_model.safetensors {SAFE_WEIGHTS_INDEX_NAME} {CONFIG_NAME} generation_config.json
    adapter_config.json""".split()


def list_files(folder: Path, patterns: Iterable[str] = (*MODEL_FILES, *TOKENIZER_FILES)) -> list[Path]:
    """The files of the model in a folder: weights, configurations and tokenizer."""
    found = dict.fromkeys(path for pattern in patterns for path in folder.glob(pattern))  # two may match one file
    return [path for path in found if path.is_file()]


def find_folder(name: str, revision: str | None, local_files_only: bool = False) -> Path | None:
    """A model's folder, or its snapshot in the Hub's cache, with configuration and tokenizer at least; None, with a
    warning, if there is none."""
    if Path(name).is_dir():
        return Path(name)
    files = [CONFIG_NAME, *TOKENIZER_FILES]
    options: dict[str, Any] = {"revision": revision, "allow_patterns": files, "local_files_only": local_files_only}
    try:
        return Path(snapshot_download(name, **options))
    except (OSError, ValueError):  # also for what is not a Hub id
        log.warning(f"{name}: neither a folder nor a model on the Hub any more; dtype and tokenizer stay as saved")
        return None


def finish_model(folder: Path, tokenizer: Path | None, base: Path | None, narrow: bool) -> None:
    """Completes the model or adapter that Transformers has saved in `folder`.

    Args:
        tokenizer: folder whose tokenizer files replace those in `folder`, byte for byte; without it, those in `folder`
            get the form that Transformers 4 reads.
        base: folder of the model that was trained, if it is known.
        narrow: whether weights that are wider than the base's get its dtype.
    """
    if tokenizer and list_files(tokenizer, TOKENIZER_FILES):
        copy_tokenizer(tokenizer, folder)
    else:
        translate_tokenizer(folder / "tokenizer_config.json")
    if (folder / CONFIG_NAME).is_file():  # an adapter has none
        config = json.loads((base / CONFIG_NAME).read_text()) if base else None
        if base and config and narrow:
            narrow_weights(folder, base, config.get("dtype") or config.get("torch_dtype"))
        complete_config(folder, config)
    for weights in folder.glob("*.safetensors"):
        if not weights.is_symlink():  # into a run, for a push
            follow_umask(weights)  # safetensors makes files that only their owner can read


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Replaces the tokenizer files in `folder`: one that `source` lacks could take precedence over the others."""
    for path in list_files(folder, TOKENIZER_FILES):
        path.unlink()
    for path in list_files(source, TOKENIZER_FILES):
        target = folder / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def translate_tokenizer(file: Path) -> None:
    """Writes a tokenizer_config.json of Transformers 5 in the form of Transformers 4, which both read alike."""
    config = json.loads(file.read_text()) if file.is_file() else {}
    if not config.pop("backend", None):
        return
    if extra := config.pop("extra_special_tokens", None):
        config["extra_special_tokens" if isinstance(extra, dict) else "additional_special_tokens"] = extra
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(file, config)


def complete_config(folder: Path, base: dict[str, Any] | None) -> None:
    """Adds RoPE's parameters and the number of experts under the names that Transformers 4 and others read, and the
    dtype of the weights, to config.json; takes the pad token from the `base` model's, if that is known."""
    config = json.loads((folder / CONFIG_NAME).read_text())
    dtypes = Counter(read_dtypes(folder).values())
    dtype = str(dtypes.most_common(1)[0][0]).removeprefix("torch.")
    parts = {"": config} | {name: part for name, part in config.items() if isinstance(part, dict) and "dtype" in part}
    for name, part in parts.items():  # others are text_config, vision_config, ...
        part.update(list_rope_keys(part) | part | {"dtype": dtype, "torch_dtype": dtype})
        if part.get("model_type") == "qwen3_moe":  # the only name that Transformers 4 reads
            part["num_experts"] = part["num_local_experts"]
        # TRL sets the tokenizer's: where that is EOS, EOS's embedding would no longer be trained
        if base and "pad_token_id" in part:
            part["pad_token_id"] = base.get(name, base).get("pad_token_id")
    write_json(folder / CONFIG_NAME, config)


def list_rope_keys(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of Transformers 4 that mean what `rope_parameters` of Transformers 5 says; none if they cannot."""
    by_layer = config.get("rope_parameters") or {}
    rope = by_layer.get("full_attention", by_layer)
    sliding = by_layer.get("sliding_attention", rope)
    if not all(part and "rope_theta" in part for part in (rope, sliding)):  # None: these layers have no RoPE
        return {}
    if sliding is not rope and sliding.get("rope_type", "default") != "default":
        return {}
    names = {name: name for name in ("rope_theta", "partial_rotary_factor")}
    if config["model_type"].startswith("gpt_neox"):
        names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    scaling = {name: value for name, value in rope.items() if name not in names and name not in config}
    if "type" in scaling:  # the older name; some classes refuse a field more
        del scaling["rope_type"]
    keys = {names[name]: rope[name] for name in names if name in rope}
    keys["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    if sliding["rope_theta"] != rope["rope_theta"]:
        keys["rope_local_base_freq"] = sliding["rope_theta"]
    return keys


def read_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Dtypes of the weights in a folder, by name."""
    tensors = [item for file in folder.glob(WEIGHTS) for item in load_weights(file).items()]
    return {name: tensor.dtype for name, tensor in tensors}


def load_weights(file: Path) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file, mapped: nothing is read. Raises OSError."""
    try:
        return load_file(file)
    except FileNotFoundError as error:  # what safetensors makes of every error in opening it
        raise OSError(errno.EIO, "cannot be opened", str(file)) from error


def narrow_weights(folder: Path, base: Path, dtype: str | None) -> None:
    """Gives weights that are wider than the base's weights of the same names, or else than `dtype`, that dtype."""
    wanted = read_dtypes(base)
    default = getattr(torch, dtype or "float64")
    size = 0
    for file in folder.glob(WEIGHTS):
        tensors = load_weights(file)
        is_narrowed = False
        for name, tensor in tensors.items():
            target = wanted.get(name, default)
            if tensor.is_floating_point() and tensor.itemsize > target.itemsize:
                tensors[name] = tensor.to(target)
                is_narrowed = True
        if is_narrowed:
            partial = file.with_name(f".{file.name}.partial")
            save_file(tensors, partial, {"format": "pt"})
            partial.replace(file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    if (index := folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        content = json.loads(index.read_text())
        content["metadata"]["total_size"] = size
        write_json(index, content)
