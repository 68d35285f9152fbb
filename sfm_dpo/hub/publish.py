"""Publishes a saved model: describes and uploads it once it has been checked, and records the push."""

import logging
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sfm_dpo.config import TrainConfig
from sfm_dpo.hub import upload
from sfm_dpo.report.model_card import write_model_card
from sfm_dpo.run.checkpoint import PUSHING, mark_pushed
from sfm_dpo.run.folder import PUSHED, State, read_status, write_end
from sfm_dpo.run.saved_model import SavedModel, check_loads, find_model

log = logging.getLogger(__name__)


def choose_branch(model: SavedModel, revision: str | None) -> str:
    """`revision` with {step} replaced by a checkpoint's step, or main."""
    if not revision or ("{step}" in revision and model.step is None):
        return "main"
    return revision.replace("{step}", str(model.step))


def check_push(args: TrainConfig, resuming: bool) -> None:
    """Before training, on rank 0: checks that a push would be accepted now. Raises UserError if not; a run that is
    `resuming` only warns if the Hub refuses or is down."""
    remedy = "train with push_to_hub: false and push later with scripts/push_to_hub.py"
    repo = choose_repo(vars(args), Path(args.output_dir))
    try:
        upload.check_access(repo, args.hub_private_repo, args.hub_revision, remedy)
    except upload.HubError as error:
        if not resuming:
            raise
        log.warning(f"{error}; training continues, and the push will be tried at its end")


def choose_repo(config: Mapping[str, Any], run: Path) -> str:
    """hub_model_id, or the folder's name, in which other characters than a repository's become hyphens."""
    return config.get("hub_model_id") or re.sub(r"[^A-Za-z0-9_.]+", "-", run.resolve().name).strip("-.")


def push_finished(args: TrainConfig) -> bool:
    """Pushes a finished run. A failure is logged and recorded, with the command that pushes later."""
    run = Path(args.output_dir)
    repo = choose_repo(vars(args), run)
    try:
        push(find_model(run), repo, args.hub_revision, args.hub_private_repo)
    except Exception as error:  # whatever it is, the model is trained and saved
        later = upload.format_push_command(run, repo, args.hub_revision, args.hub_private_repo)
        message = f"push failed: {error}; the model is saved in {run}; push later with: {later}"
        write_end(run, read_status(run)["open"], message)
        log.error(message)
        return False
    return True


def push(model: SavedModel, repo: str, revision: str | None, private: bool | None) -> None:
    """Describes and uploads a model that loads; status.json records it for a finished run. Raises UserError if the
    model does not load, and upload.HubError."""
    repo = upload.check_access(repo, private, revision, "push later")
    branch = choose_branch(model, revision)
    if model.step is not None:  # the run may still be training, and would rotate the checkpoint
        mark_pushed(model.folder, os.getpid())
    check_loads(model.folder)
    with tempfile.TemporaryDirectory(prefix=".hub-", dir=model.run) as folder:
        staged = Path(folder)
        model.link_files(staged)
        write_model_card(model.run, folder=staged, repo=repo, revision=branch, step=model.step)
        address = upload.upload_folder(staged, repo, branch, f"DPO, {model.name}")
    (model.folder / PUSHING).unlink(missing_ok=True)
    log.info(f"pushed {model.name} to {address}")
    status = read_status(model.run)
    if model.step is None and State.of(status).has_model:  # keeps the guard's verdict
        still = [step for step in status.get("open") or [] if step != PUSHED]
        write_end(model.run, still, pushed=address)
