"""A saved model: the final model of a run, or one of its checkpoints. Finds it, checks it, and links its files."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import ADAPTER_CONFIG_NAME

from sfm_dpo.common.errors import UserError, user_input
from sfm_dpo.common.files import write_json
from sfm_dpo.config.fields import FOLDER
from sfm_dpo.run.checkpoint import COMPLETE, newest_checkpoint, step_of, why_damaged, why_incomplete
from sfm_dpo.run.folder import DATA, RESOLVED_CONFIG, STATUS, State, read_file, read_sound_file, read_status
from sfm_dpo.run.model_files import list_files

SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/([^/]+)/?")  # a model's folder in the Hub's cache


@dataclass(frozen=True)
class SavedModel:
    """A model in `folder`, of the run in `run`; `step` is that of a checkpoint, None for the final model."""

    folder: Path
    run: Path
    step: int | None
    config: dict[str, Any]  # resolved_config.yaml

    @property
    def name(self) -> str:
        run = self.run.resolve().name
        return run if self.step is None else f"{run}/checkpoint-{self.step}"

    @property
    def base(self) -> str:
        """Folder or Hub id of the model that the run started from."""
        return self.config["model_name_or_path"]

    @property
    def base_revision(self) -> str | None:
        """Commit of the base model on the Hub; ignored where it is a folder."""
        models = read_file(self.run / DATA).get("models", {})
        return models.get("model_name_or_path", self.config.get("model_revision"))

    @property
    def is_adapter(self) -> bool:
        return (self.folder / ADAPTER_CONFIG_NAME).is_file()

    def stage(self, target: Path) -> None:
        """Links weights, configurations and tokenizer into the folder `target`; an adapter names its base on the Hub.
        Raises UserError if its base is only a local folder."""
        for path in list_files(self.folder):
            link = target / path.relative_to(self.folder)
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(path.resolve())
        if not self.is_adapter:
            return
        adapter = json.loads((self.folder / ADAPTER_CONFIG_NAME).read_text())
        base, revision = check_on_hub(self.base, self.base_revision)
        (target / ADAPTER_CONFIG_NAME).unlink()
        write_json(target / ADAPTER_CONFIG_NAME, adapter | {"base_model_name_or_path": base, "revision": revision})


def find_on_hub(base: str, revision: str | None) -> tuple[str, str | None] | None:
    """Hub id and commit of a base model, also of a copy in the Hub's cache; None if it is another folder."""
    if copy := SNAPSHOT.fullmatch(base):
        return copy[1].replace("--", "/"), copy[2]
    was_folder = (revision or "").startswith(FOLDER)
    return None if was_folder or Path(base).is_absolute() or Path(base).exists() else (base, revision)


def check_on_hub(base: str, revision: str | None) -> tuple[str, str | None]:
    """`find_on_hub` for the base model of an adapter to be pushed. Raises UserError if it is only a local folder."""
    if found := find_on_hub(base, revision):
        return found
    what = f"model_name_or_path {base}: is a folder of this machine, which a pushed LoRA adapter must not name"
    raise UserError(f"{what}; merge the adapter (scripts/merge.py), or train from a model on the Hub")


def find_model(path: Path) -> SavedModel:
    """The model in a run's folder or in one of its checkpoints. Raises UserError if it is absent or incomplete."""
    run = find_run(path)
    if run is None:
        raise UserError(f"{path}: not a run's folder or checkpoint (no {RESOLVED_CONFIG}); give one of these")
    config = read_sound_file(run / RESOLVED_CONFIG, "restore it, or choose another folder")
    if run == path:
        state = State.of(read_status(run))
        if not state.has_model:
            raise UserError(f"{path}: the run is not finished (state {state}); choose one of its checkpoints, if any")
        is_marked = (path / COMPLETE).is_file()  # unless the model was saved by hand
        if is_marked and (reason := why_incomplete(path, "*.safetensors")):  # people edit the other files
            newest = newest_checkpoint(path)
            files = f"{path / STATUS} and {path / COMPLETE}"
            remedy = f"remove {files} and run its command again, which saves the model again from {newest}"
            raise UserError(f"{path}: {reason}; {remedy if newest else 'train it again'}")
        return SavedModel(path, run, None, config)
    path = path if step_of(path) else path.resolve()  # as find_run
    if reason := why_incomplete(path) or why_damaged(path, "*.safetensors"):
        raise UserError(f"{path}: {reason}; choose another checkpoint")
    return SavedModel(path, run, step_of(path), config)


def find_run(path: Path) -> Path | None:
    """The run whose folder or checkpoint this is, or None."""
    if (path / RESOLVED_CONFIG).is_file():
        return path
    path = path if step_of(path) else path.resolve()  # `.`, or a link to a checkpoint
    parent = path.absolute().parent
    return parent if step_of(path) and (parent / RESOLVED_CONFIG).is_file() else None


def check_health(model: SavedModel, remedy: str) -> None:
    """Raises UserError with the `remedy` if the guard had stopped the run by the time a checkpoint was saved."""
    status = read_status(model.run)
    if State.of(status) is not State.COLLAPSED:
        return
    healthy = status.get("checkpoint")
    if not healthy or (model.step or 0) > step_of(Path(healthy)):
        raise UserError(f"{model.folder}: the guard stopped this run; choose {healthy or 'another run'}{remedy}")


def check_loads(folder: Path) -> None:
    """Loads the model in `folder` as its users will. Raises UserError if weights or the chat template are missing,
    or a weight is not finite."""
    with user_input(f"{folder}: cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    if not tokenizer.chat_template:
        raise UserError(f"{folder}: the tokenizer has no chat template; put chat_template.jinja beside it")
    if wrong := {kind: keys for kind, keys in info.items() if keys}:
        raise UserError(f"{folder}: AutoModelForCausalLM does not load all weights: {wrong}")
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise UserError(f"{folder}: {name} holds NaN or infinite values; use an earlier checkpoint")
