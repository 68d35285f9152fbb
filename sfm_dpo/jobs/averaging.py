"""Weight averaging: the mean of checkpoints or seeds of one base model, tensor by tensor (model soups, 2203.05482)."""

import json
import shutil
from pathlib import Path

import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save_file

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import write_json
from sfm_dpo.report.model_card import write_model_card
from sfm_dpo.run.files import PARENTS
from sfm_dpo.run.folder import DATA, ENVIRONMENT, RESOLVED_CONFIG, State, environment, write_status
from sfm_dpo.run.saved_model import SavedModel, check_health, find_model, open_tensors, read_finite


def average_models(paths: list[Path], output: Path) -> None:
    """Writes the mean of models, taken in fp64, into `output`, a new run's folder. A model that is given twice counts
    twice. Raises UserError if the models' tensors differ in name or shape."""
    if output.exists():
        raise UserError(f"--output_dir {output}: exists already; choose another")
    models = [find_model(path) for path in paths]
    first = models[0]
    for model in models:
        check_health(model, remedy="")
        check_alike(first, model)
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a start that was killed
    partial.mkdir(parents=True)
    try:
        readers = [open_tensors(model.folder) for model in models]  # they may be sharded differently
        for path in first.files():
            if path.suffix != ".safetensors":
                shutil.copy(path, partial)
                continue
            averaged: dict[str, torch.Tensor] = {}
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    tensors = [read_finite(reader, name) for reader in readers]
                    averaged[name] = torch.stack(tensors).double().mean(0).to(tensors[0].dtype)
                save_file(averaged, partial / path.name, file.metadata())
        config = first.config | {"output_dir": str(output), "hub_model_id": None}
        (partial / RESOLVED_CONFIG).write_text(yaml.safe_dump(config, sort_keys=False))
        shutil.copy(first.run / DATA, partial)
        write_json(partial / ENVIRONMENT, environment())
        write_json(partial / PARENTS, [{"model": model.name, "weight": 1 / len(models)} for model in models])
        write_status(partial, State.DONE, 0, f"mean of the weights of {len(paths)} models")
        write_model_card(partial)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_alike(first: SavedModel, other: SavedModel) -> None:
    if other.is_adapter:
        raise UserError(f"{other.folder}: is an adapter; merge each adapter into its base model first")
    a = json.loads((first.folder / "config.json").read_text()) | {"base": first.base}
    b = json.loads((other.folder / "config.json").read_text()) | {"base": other.base}
    differing = [name for name in a | b if a.get(name) != b.get(name) and name != "transformers_version"]
    if differing:
        names = ", ".join(differing)
        raise UserError(f"{other.folder}: {names} differ from {first.folder}'s; average models of one base model")
