"""The start of a run: rank 0 reads the folder once, decides what the start does, and tells all ranks."""

import dataclasses
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfm_dpo.common.distributed import is_main_process, on_main_process, world_size
from sfm_dpo.common.errors import ResumeRefused, UserError
from sfm_dpo.config_effects import MAY_CHANGE
from sfm_dpo.run.checkpoint import COMPLETE, STOP, checkpoints, clear_old_stop, read_best, why_damaged, why_incomplete
from sfm_dpo.run.files import CARD, DATA, EVALUATIONS, REPORT, RESOLVED_CONFIG, STATUS, read_file
from sfm_dpo.run.folder import ERROR, EVALUATED, LOG, PUSHED, REPORTED, State, list_weights, read_status

if TYPE_CHECKING:  # scripts read this module without the seconds that TRL takes to import
    from sfm_dpo.config import Config, TrainConfig

log = logging.getLogger(__name__)

_OTHER_MODEL = "the model has changed since it was written ({was}, now {now})"
_DIFFERENCES = {  # the facts in COMPLETE that a resumed run must match
    "model_name_or_path": f"model_name_or_path: {_OTHER_MODEL}",
    "ref_model_name_or_path": f"ref_model_name_or_path: {_OTHER_MODEL}",
    "world_size": "was written by {was} process(es), but this run has {now}",
    "train_tokens": "the data have changed since it was written",
    "order_version": "was written by a version of this project with another order of pairs ({was}, now {now})",
    "micro_batch": "was written with {was} pairs per device, this run has {now}: another balancing loss",
    "launch": "was written with launch {was}, but this run uses {now}, which cannot load its optimizer",
}


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run resumes from, with what its files say; empty for a run from the beginning."""

    checkpoint: Path | None = None
    known: dict[str, Any] = field(default_factory=dict)  # its complete.json
    config: dict[str, Any] = field(default_factory=dict)  # resolved_config.yaml of the run that wrote it
    data: dict[str, Any] = field(default_factory=dict)  # data.json of that run
    best: Path | None = None  # the best checkpoint when it was written

    def check(self, facts: dict[str, Any], ignore: bool) -> None:
        """Raises ResumeRefused if the run that wrote the checkpoint differs from this one in one of the `facts`;
        `ignore` (ignore_resume_mismatch) has no effect where the optimizer cannot be loaded."""
        if self.checkpoint is None:
            return
        is_zero = str(self.known.get("launch")).startswith("ZeRO")  # DeepSpeed cannot redistribute it
        for name, now in facts.items():
            was = self.known.get(name)
            may_ignore = name != "launch" and not (name == "world_size" and is_zero)
            if was == now or (ignore and may_ignore):
                continue
            difference = _DIFFERENCES[name].format(was=was, now=now)
            difference = difference.replace("whole weights", "DDP or one process")
            override = ", or set ignore_resume_mismatch: true" if may_ignore else ""
            remedy = f"restore that setting, or use another output_dir{override}"
            raise ResumeRefused(f"{self.checkpoint}: {difference}; {remedy}")


@dataclass(frozen=True)
class Folder:
    """What is in a run's folder, read once."""

    run: Path
    names: set[str] = field(default_factory=set)  # of files and folders that are not hidden
    status: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)  # resolved_config.yaml
    has_trained: bool = False
    weights: dict[str, int] = field(default_factory=dict)  # size in bytes by name
    origin: Origin = Origin()
    unusable: str | None = None  # why resume_from_checkpoint cannot be used


@dataclass(frozen=True)
class Start:
    """What a start does: it trains from `origin`, or only does the `open` steps of its end, or nothing."""

    trains: bool
    open: tuple[str, ...] = ()
    origin: Origin = Origin()


def begin(config: "Config") -> Start:
    """What this start does, once the checkpoint that it resumes from is verified. All ranks must call it and get the
    same. Raises UserError if the folder belongs to another run. A damaged checkpoint loses its marker, so it never
    counts as complete again."""
    args = config.train
    clear_old_stop(args.output_dir)
    skipped: dict[Path, str] = {}
    while True:
        start = on_main_process(lambda: decide(config, read_folder(args, skipped), world_size()))
        checkpoint = start.origin.checkpoint
        is_verified = bool(start.trains and checkpoint and args.verify_checkpoints)
        damage = why_damaged(checkpoint) if is_verified and checkpoint else None
        if damage is None:
            break
        if args.resume_from_checkpoint:
            raise _refuse_checkpoint(args, damage)
        if is_main_process():
            skipped[checkpoint] = damage
            (checkpoint / COMPLETE).unlink(missing_ok=True)
    if start.trains:
        for path, reason in skipped.items():
            log.info(f"{path} {reason}; skipped")
    if is_verified:
        log.info(f"{checkpoint}: checksums verified")
    return start


def read_folder(args: "TrainConfig", skipped: dict[Path, str]) -> Folder:
    """Reads the folder of a run; `skipped` gets the incomplete checkpoints before the one to resume from."""
    run = Path(args.output_dir)
    found = checkpoints(run)
    checkpoint = None
    unusable = None
    if asked := args.resume_from_checkpoint:
        checkpoint = Path(asked)
        unusable = why_incomplete(checkpoint)
    else:
        for candidate in reversed(found):
            reason = why_incomplete(candidate)
            if reason is None:
                checkpoint = candidate
                break
            skipped.setdefault(candidate, reason)
    origin = Origin()
    if checkpoint:
        of_writer = (read_file(checkpoint.parent / name) for name in (RESOLVED_CONFIG, DATA))
        origin = Origin(checkpoint, read_file(checkpoint / COMPLETE), *of_writer, read_best(checkpoint))
    logged = (run / LOG).read_text(errors="replace") if (run / LOG).is_file() else ""
    weights = list_weights(run)
    return Folder(
        run=run,
        names={path.name for path in run.iterdir() if not path.name.startswith(".")},
        status=read_status(run),
        config=read_file(run / RESOLVED_CONFIG),
        has_trained=bool(found or weights or re.search('"step": [1-9]', logged)),
        weights=weights,
        origin=origin,
        unusable=unusable,
    )


def decide(config: "Config", folder: Folder, processes: int) -> Start:
    """What a start with this configuration and number of processes does. Raises UserError if the folder belongs to
    another run, ResumeRefused if the checkpoint is another number of processes'."""
    args = config.train
    run = folder.run
    state = State.of(folder.status)
    is_new = state.resumes and not folder.has_trained  # empty, or an earlier start ended before its first step
    if RESOLVED_CONFIG not in folder.names and (folder.names - {STATUS, ERROR, STOP} or not is_new):
        raise UserError(
            f"output_dir {run}: holds files that do not belong to a run ({', '.join(sorted(folder.names)[:3])}); "
            "choose another output_dir"
        )
    if not is_new:
        _check_config(config, folder)
    if state is State.COLLAPSED and args.guard == "stop":
        healthy = folder.status.get("checkpoint")
        start = f"from {healthy} (--resume_from_checkpoint {healthy}) " if healthy else ""
        raise UserError(
            f"output_dir {run}: the guard stopped this run; start a new run {start}with a lower learning_rate "
            "in another output_dir, or resume this one with --guard warn"
        )
    damaged = (folder.status.get("files") or {}).items() - folder.weights.items()
    if state.has_model and not damaged:
        return Start(False, list_open(args, folder))
    if state.has_model:
        log.info(f"{run}: {min(damaged)[0]} is missing or damaged; the run resumes from its newest checkpoint")
    if folder.unusable:
        raise _refuse_checkpoint(args, folder.unusable)
    folder.origin.check({"world_size": processes}, args.ignore_resume_mismatch)
    return Start(True, origin=folder.origin)


def _check_config(config: "Config", folder: Folder) -> None:
    """Raises UserError if the folder's run has another configuration."""
    if not folder.config:
        path = folder.run / RESOLVED_CONFIG
        raise UserError(f"{path}: missing or damaged; restore it, or choose another output_dir")
    # A field that an earlier version did not have counts as its default, which is its old behaviour
    fields = [f for part in (config.train, config.model, config.data) for f in dataclasses.fields(part)]
    before = {f.name: f.default for f in fields} | folder.config
    for key, value in config.as_dict().items():
        if key not in MAY_CHANGE and before.get(key) != value:
            raise UserError(
                f"output_dir {folder.run}: holds another run ({key} is {before.get(key)} there, {value} here); choose "
                "another output_dir, or remove the folder"
            )


def _refuse_checkpoint(args: "TrainConfig", reason: str) -> UserError:
    asked = args.resume_from_checkpoint
    return UserError(f"resume_from_checkpoint {asked}: {reason}; choose another, or remove the field")


def list_steps(args: "TrainConfig") -> list[str]:
    """The steps of an end that follow the saved model, in their order: the report describes the push."""
    wanted = {PUSHED: args.push_to_hub, REPORTED: True, EVALUATED: bool(args.eval_command)}
    return [step for step, is_wanted in wanted.items() if is_wanted]


def list_open(args: "TrainConfig", folder: Folder) -> tuple[str, ...]:
    """The steps that a finished run has not done, also if it is asked for them only now."""
    is_done = {
        PUSHED: bool(folder.status.get("pushed")),
        REPORTED: {REPORT, CARD} <= folder.names,
        EVALUATED: EVALUATIONS in folder.names,
    }
    recorded = folder.status.get("open") or []
    return tuple(step for step in list_steps(args) if step in recorded or not is_done[step])
