"""Weight averaging: the mean of checkpoints or seeds of one base model, tensor by tensor (model soups, 2203.05482)."""

import json
import shutil
from pathlib import Path

import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils import ADAPTER_CONFIG_NAME

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import write_json
from sfm_dpo.hub.publish import Source, find_source, stage_files
from sfm_dpo.model.saving import open_tensors, read_finite
from sfm_dpo.report.model_card import write_model_card
from sfm_dpo.run.folder import DATA, ENVIRONMENT, RESOLVED_CONFIG, State, environment, write_status
from sfm_dpo.run.reader import PARENTS


def average_models(paths: list[Path], output: Path, weights: list[float] | None = None) -> None:
    """Writes the mean of models by `weights` (default: equal), taken in fp64, into `output`, a new run's folder.
    Raises UserError if the models' tensors differ in name or shape."""
    weights = weights or [1.0] * len(paths)
    if len(weights) != len(paths):
        raise UserError(f"--weights: {len(weights)} for {len(paths)} models; give one for each")
    if output.exists():
        raise UserError(f"--output_dir {output}: exists already; choose another")
    shares = [weight / sum(weights) for weight in weights]
    sources = [find_source(path) for path in paths]
    first = sources[0]
    staged = output.with_name(f".{output.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)  # left by a start that was killed
    mean = staged / "mean"
    try:
        folders = [Path(staged, str(number)) for number in range(len(sources))]
        for source, folder in zip(sources, folders, strict=True):
            folder.mkdir(parents=True)
            stage_files(source.folder, folder)
            check_alike(first, folders[0], source, folder)
        shutil.copytree(folders[0], mean, ignore=shutil.ignore_patterns("*.safetensors"))
        models = [open_tensors(folder) for folder in folders]  # they may be sharded differently
        for path in folders[0].glob("*.safetensors"):
            averaged: dict[str, torch.Tensor] = {}
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    tensors = [read_finite(model, name) for model in models]
                    parts = [share * tensor.double() for share, tensor in zip(shares, tensors, strict=True)]
                    averaged[name] = torch.stack(parts).sum(0).to(tensors[0].dtype)
                save_file(averaged, mean / path.name, file.metadata())
        config = first.config | {"output_dir": str(output), "hub_model_id": None}
        (mean / RESOLVED_CONFIG).write_text(yaml.safe_dump(config, sort_keys=False))
        shutil.copy(first.run / DATA, mean)
        write_json(mean / ENVIRONMENT, environment())
        parents = [{"model": source.name, "weight": share} for source, share in zip(sources, shares, strict=True)]
        write_json(mean / PARENTS, parents)
        write_status(mean, State.DONE, 0, f"mean of the weights of {len(paths)} models")
        write_model_card(mean)
        mean.rename(output)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def check_alike(first: Source, first_folder: Path, other: Source, folder: Path) -> None:
    if (folder / ADAPTER_CONFIG_NAME).is_file():
        raise UserError(f"{other.folder}: is an adapter; merge each adapter into its base model first")
    a = json.loads((first_folder / "config.json").read_text()) | {"base": first.config["model_name_or_path"]}
    b = json.loads((folder / "config.json").read_text()) | {"base": other.config["model_name_or_path"]}
    differing = [name for name in a | b if a.get(name) != b.get(name) and name != "transformers_version"]
    if differing:
        names = ", ".join(differing)
        raise UserError(f"{other.folder}: {names} differ from {first.folder}'s; average models of one base model")
