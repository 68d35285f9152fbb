"""Publishes a saved model: describes and uploads it once it has been checked, and records the push."""

import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import format_table
from sfm_dpo.config import TrainConfig
from sfm_dpo.hub import upload
from sfm_dpo.report.model_card import write_model_card
from sfm_dpo.run.checkpoint import PUSHING, mark_pushed
from sfm_dpo.run.folder import PUSHED, State, read_status, write_end
from sfm_dpo.run.saved_model import SavedModel, check_loads, describe_change, find_model, merge_adapter

log = logging.getLogger(__name__)


@contextmanager
def stage(
    model: SavedModel, repo: str, revision: str | None, publish_anyway: bool = False, merged: bool = False
) -> Iterator[Path]:
    """A temporary folder with what is uploaded: the model's files, once they have been checked, and the model card.
    Raises UserError if the model should not be published."""
    if model.step is not None:  # the run may still be training, and would rotate the checkpoint
        mark_pushed(model.folder, os.getpid())
    change = _check_fitness(model, publish_anyway)
    with tempfile.TemporaryDirectory(prefix=".hub-", dir=model.run) as folder:
        staged = Path(folder)
        if merged:
            merge_adapter(model, staged)
        else:
            model.link_files(staged)
        branch = choose_branch(model, revision)
        write_model_card(model.run, folder=staged, repo=repo, revision=branch, step=model.step, change=change)
        yield staged
    (model.folder / PUSHING).unlink(missing_ok=True)


def choose_branch(model: SavedModel, revision: str | None) -> str:
    """`revision` with {step} replaced by a checkpoint's step, or main."""
    if not revision or ("{step}" in revision and model.step is None):
        return "main"
    return revision.replace("{step}", str(model.step))


def _check_fitness(model: SavedModel, publish_anyway: bool) -> str:
    """What training changed, in words. Raises UserError for a problem, or only warns with `publish_anyway`."""
    change = ""
    try:
        change = describe_change(model)
        log.info(change)
        check_loads(model.folder)
    except Exception as error:  # each library raises its own class
        reason = " ".join(str(error).split())[:300]
        if not publish_anyway:
            raise UserError(f"{model.folder}: {reason}; to push it regardless: --publish_anyway") from error
        log.warning(f"{reason}; published because of --publish_anyway")
    return change


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


def push(model: SavedModel, repo: str, revision: str | None, private: bool | None, **options: bool) -> None:
    """Pushes a model, which status.json records for a finished run. `options`: of `stage`. Raises UserError and
    upload.HubError."""
    repo = upload.check_access(repo, private, revision, "push later")
    with stage(model, repo, revision, **options) as staged:
        address = upload.upload_folder(staged, repo, choose_branch(model, revision), f"DPO, {model.name}")
    log.info(f"pushed {model.name} to {address}")
    status = read_status(model.run)
    if model.step is None and State.of(status).has_model:  # keeps the guard's verdict
        still = [step for step in status.get("open") or [] if step != PUSHED]
        write_end(model.run, still, pushed=address)


def list_upload(model: SavedModel, repo: str, revision: str | None, **options: bool) -> str:
    """What `push` would upload, as a table, after the same checks of the model; nothing is sent. Raises UserError."""
    with stage(model, repo, revision, **options) as staged:
        files = sorted(path for path in staged.rglob("*") if path.is_file())
        rows = [(path.relative_to(staged), f"{path.stat().st_size / 1e6:,.3f} MB") for path in files]
    head = f"would upload to {repo}, branch {choose_branch(model, revision)}:"
    return f"{head}\n{format_table(rows, align='lr')}"
