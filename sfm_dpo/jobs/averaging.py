"""Weight averaging: the mean of checkpoints or seeds of one base model, tensor by tensor (model soups, 2203.05482)."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoTokenizer
from transformers.utils import ADAPTER_CONFIG_NAME

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import write_json
from sfm_dpo.data.tokenization import tokenizer_key
from sfm_dpo.hub.publish import Source, find_source, stage_files
from sfm_dpo.model.weights import open_tensors, read_finite
from sfm_dpo.report.model_card import write_model_card
from sfm_dpo.run.environment import environment
from sfm_dpo.run.folder import DATA, ENVIRONMENT, RESOLVED_CONFIG, write_status
from sfm_dpo.run.reader import PARENTS


def average_models(paths: list[Path], output: Path, weights: list[float] | None = None) -> None:
    """Writes the mean of the models in `paths` into `output`, which is then a finished run's folder.

    A tensor's mean is taken in fp64 and saved in the model's dtype; files and what is in them are those of the first
    model, and one of them is in memory at a time.

    `weights` are divided by their sum; equal by default.

    Raises:
        UserError: fewer than two models; other base models, configurations or tokenizers; adapters; another number of
            weights; an `output` that is not empty.
    """
    if len(paths) < 2:
        raise UserError(f"{', '.join(map(str, paths))}: an average needs at least two runs or checkpoints")
    if weights and len(weights) != len(paths):
        raise UserError(f"--weights: {len(weights)} for {len(paths)} models; give one for each")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output_dir {output}: exists and is not empty; choose another")
    weights = weights or [1.0] * len(paths)
    shares = [weight / sum(weights) for weight in weights]
    sources = [find_source(path) for path in paths]
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".average-", dir=output) as staged:
        folders = [Path(staged, str(number)) for number in range(len(sources))]
        for source, folder in zip(sources, folders, strict=True):
            folder.mkdir()
            stage_files(source.folder, folder)
        check_alike(sources, folders)
        shutil.copytree(folders[0], output, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
        for path in folders[0].glob("*.safetensors"):
            _average_file(path, folders, shares, output / path.name)
    parents = [{"model": source.name, "weight": share} for source, share in zip(sources, shares, strict=True)]
    _describe(sources[0], parents, output)


def check_alike(sources: list[Source], folders: list[Path]) -> None:
    """Raises UserError unless the models, whose files are in `folders`, can be averaged."""
    first = read_facts(sources[0], folders[0])
    for source, folder in zip(sources[1:], folders[1:], strict=True):
        facts = read_facts(source, folder)
        differing = [name for name in {**first, **facts} if first.get(name) != facts.get(name)]
        if differing:
            name = differing[0]
            raise UserError(
                f"{source.folder}: {name} is {facts.get(name)}, and {first.get(name)} in {sources[0].folder}; average "
                "models of one base model and tokenizer"
            )


def read_facts(source: Source, folder: Path) -> dict[str, Any]:
    """What models must have in common: base model, config.json, tokenizer."""
    if (folder / ADAPTER_CONFIG_NAME).is_file():
        raise UserError(f"{source.folder}: is an adapter; merge each into its base model first")
    facts = json.loads((folder / "config.json").read_text()) | {"transformers_version": None}
    for name in ("model_name_or_path", "model_revision"):
        facts[name] = source.config.get(name)
    return facts | {"tokenizer": tokenizer_key(AutoTokenizer.from_pretrained(folder))}


def _average_file(path: Path, folders: list[Path], shares: list[float], target: Path) -> None:
    models = [open_tensors(folder) for folder in folders]  # which may be sharded in other ways
    mean = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            first = read_finite(models[0], name)
            total = first.double() * shares[0]
            for share, tensors in zip(shares[1:], models[1:], strict=True):
                total.add_(read_finite(tensors, name).double(), alpha=share)
            mean[name] = total.to(first.dtype) if first.is_floating_point() else first
        save_file(mean, target, file.metadata())


def _describe(first: Source, parents: list[dict[str, Any]], output: Path) -> None:
    """What makes a finished run's folder of `output`: the facts of the first parent's run, and all parents."""
    config = first.config | {"output_dir": str(output), "hub_model_id": None}
    (output / RESOLVED_CONFIG).write_text(yaml.safe_dump(config, sort_keys=False))
    shutil.copy(first.run / DATA, output)
    write_json(output / ENVIRONMENT, environment())
    write_json(output / PARENTS, parents)
    write_status(output, "done", 0, f"mean of the weights of {len(parents)} models")
    write_model_card(output)
