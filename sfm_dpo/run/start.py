"""The start of a run: rank 0 reads the folder once, decides what the start does, and tells all ranks."""

import logging
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfm_dpo.common.distributed import LAUNCHES, is_main_process, on_main_process, world_size
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import naming
from sfm_dpo.config.effects import INHERITED, MAY_CHANGE
from sfm_dpo.run.checkpoint import COMPLETE, STOP, checkpoints, clear_old_stop, why_damaged, why_incomplete
from sfm_dpo.run.facts import RunFacts
from sfm_dpo.run.folder import (
    CARD,
    ENVIRONMENT,
    ERROR,
    EVALUATED,
    EVALUATIONS,
    LOG,
    PUSHED,
    REPORT,
    REPORTED,
    RESOLVED_CONFIG,
    STATUS,
    State,
    read_file,
    read_status,
)

if TYPE_CHECKING:  # scripts read this module without the seconds that TRL takes to import
    from sfm_dpo.config.fields import Config, TrainConfig

log = logging.getLogger(__name__)

_EARLY = {STATUS, ERROR, STOP, ENVIRONMENT, "heartbeats", "stacks"}  # files of a start that has not read its data yet

_DIFFERENCES = {  # the facts that a resumed run must share with the run that wrote its checkpoint
    "world_size": "was written by {was} process(es), but this run has {now}",
    "launch": "was written with launch {was}, but this run uses {now}, which cannot load its optimizer",
    "train_tokens": "the data have changed since it was written",
}
_SAME_OPTIMIZER = {LAUNCHES["zero2"], LAUNCHES["offload"]}  # launches whose checkpoints are the same files


@dataclass(frozen=True)
class Before:
    """The checkpoint that a run resumes from, and the run that wrote it; empty for a run from the beginning."""

    checkpoint: Path | None = None
    facts: RunFacts = field(default_factory=RunFacts)
    config: dict[str, Any] = field(default_factory=dict)  # resolved_config.yaml

    def check(self, now: RunFacts) -> None:
        """Raises UserError if the checkpoint does not belong to a run with these facts; what one of the two does not
        know is not compared."""
        if self.checkpoint is None:
            return
        if difference := find_difference(self.facts, now):
            remedy = "restore that setting, or use another output_dir"
            raise UserError(f"{self.checkpoint}: {difference}; {remedy}")
        if {self.facts.launch, now.launch} == _SAME_OPTIMIZER:
            log.info(f"{self.checkpoint} was written with launch {self.facts.launch}; continued with {now.launch}")


NEW = Before()


def find_difference(was: RunFacts, now: RunFacts) -> str | None:
    """What of a run does not allow it to continue another one; None if nothing."""
    for name, difference in _DIFFERENCES.items():
        one, other = getattr(was, name), getattr(now, name)
        if one and other and one != other and {one, other} != _SAME_OPTIMIZER:
            return difference.format(was=one, now=other).replace("whole weights", "DDP or one process")
    if any(one != other for one, other in zip(was.order, now.order, strict=False)):  # of the epochs that both have
        return "has other pairs in its steps, by another seed, global batch or length, or by a version of this project"
    for name, identity in now.models.items():
        if (one := was.models.get(name, identity)) != identity:
            return f"{name}: the model has changed since it was written ({one}, now {identity})"
    return None


@dataclass(frozen=True)
class Start:
    """What a start does: it trains from `before`, or only does the `steps` of its end that are open, or nothing."""

    trains: bool
    steps: list[str] = field(default_factory=list)
    before: Before = NEW


def choose_start(config: "Config") -> Start:
    """What this start does, once the checkpoint that it resumes from is verified. All ranks must call it and get the
    same. Raises UserError as `read_start`. A damaged checkpoint loses its marker, so it never counts as complete
    again."""
    args = config.train
    clear_old_stop(args.output_dir)
    damaged: dict[Path, str] = {}
    while True:
        start = on_main_process(lambda: read_start(config, world_size(), damaged))
        checkpoint = start.before.checkpoint
        if checkpoint is None or not args.verify_checkpoints:
            return start
        reason = why_damaged(checkpoint)
        if reason is None:
            log.info(f"{checkpoint}: checksums verified")
            return start
        damaged[checkpoint] = reason
        if is_main_process() and checkpoint != Path(args.resume_from_checkpoint or ""):  # that may be another run's
            log.info(f"{checkpoint} {reason}; skipped")
            (checkpoint / COMPLETE).unlink(missing_ok=True)


def read_start(config: "Config", processes: int, damaged: Mapping[Path, str]) -> Start:
    """What a start of so many processes does, from the files in its folder. `damaged`: checkpoints, and why. Raises
    UserError if the folder belongs to another run, or the checkpoint that is asked for cannot be used."""
    args = config.train
    run = Path(args.output_dir)
    names = {path.name for path in run.iterdir() if not path.name.startswith(".")}
    with naming(run / LOG):
        logged = (run / LOG).read_text(errors="replace") if LOG in names else ""
    has_trained = bool(list(run.glob("*.safetensors")) or checkpoints(run) or re.search('"step": [1-9]', logged))
    start = judge_folder(config, names, read_status(run), read_file(run / RESOLVED_CONFIG), has_trained)
    if not start.trains:
        return start
    before = find_before(args, damaged)
    before.check(RunFacts(world_size=processes))
    compare_configurations(config, before)
    return replace(start, before=before)


def list_differences(config: "Config", before: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """By field that a resumed run may not change: its value in resolved_config.yaml (`before`), and now."""
    now = config.as_dict()
    return {key: (was, now[key]) for key, was in before.items() if key in now.keys() - MAY_CHANGE and was != now[key]}


def compare_configurations(config: "Config", before: Before) -> None:
    """Says what differs from the configuration under which the checkpoint was written, in whichever folder it is.
    Raises UserError if that changes the data, their order or the optimizer's states."""
    differences = list_differences(config, before.config)
    for key, (was, value) in differences.items():
        if key in INHERITED:
            model = shlex.quote(str(before.checkpoint))
            remedy = f"set {key}: {was}, or train from the model alone (--model_name_or_path {model})"
            raise UserError(f"{key} {value}: {before.checkpoint} was written with {was}; {remedy}")
    if differences:
        changes = [f"{key} {value} (was {was})" for key, (was, value) in differences.items()]
        log.info(f"{before.checkpoint} is continued with {', '.join(changes)}")


def find_before(args: "TrainConfig", damaged: Mapping[Path, str]) -> Before:
    """The newest complete checkpoint of this run, or, until it has one, the one asked for: a requeued job gives the
    same command. Raises UserError if the one asked for is not usable."""
    asked = args.resume_from_checkpoint
    own = checkpoints(args.output_dir)[::-1]
    for checkpoint in [*own, Path(asked)] if asked else own:
        reason = damaged.get(checkpoint) or why_incomplete(checkpoint)
        mark = read_file(checkpoint / COMPLETE)
        if "open" in mark:
            reason = "is the folder of a run, not one of its checkpoints"
        if reason is None:
            if asked and checkpoint.absolute() != Path(asked).absolute():
                what = f"resume_from_checkpoint {asked}: this run has its own, {checkpoint}, and continues from that"
                log.info(f"{what}; to go back, choose another output_dir")
            return Before(checkpoint, RunFacts.of(mark), read_file(checkpoint.parent / RESOLVED_CONFIG))
        if asked and checkpoint == Path(asked):
            raise UserError(f"resume_from_checkpoint {asked}: {reason}; choose another, or remove the field")
        if checkpoint not in damaged:
            log.info(f"{checkpoint} {reason}; skipped")
    return Before()


def judge_folder(
    config: "Config", names: set[str], status: dict[str, Any], before: dict[str, Any], has_trained: bool
) -> Start:
    """What follows from a folder with files of these `names`, from status.json, resolved_config.yaml (`before`), and
    whether a step was trained. Raises UserError for another run's folder."""
    args = config.train
    run = Path(args.output_dir)
    state = State.of(status)
    is_new = state.resumes and not has_trained  # empty, or an earlier start ended before its first step
    if RESOLVED_CONFIG not in names and (names - _EARLY or not is_new):
        raise UserError(
            f"output_dir {run}: holds files that do not belong to a run ({', '.join(sorted(names)[:3])}); "
            "choose another output_dir"
        )
    if not is_new and not before:
        raise UserError(f"{run}/{RESOLVED_CONFIG}: missing or damaged; restore it, or choose another output_dir")
    differences = {} if is_new else list_differences(config, before)
    for key, (was, value) in differences.items():
        raise UserError(
            f"output_dir {run}: holds another run ({key} is {was} there, {value} here); choose another output_dir, or "
            "remove the folder"
        )
    if state is State.COLLAPSED and args.guard == "stop":
        raise UserError(f"output_dir {run}: the guard stopped this run; {status['message']}")
    if not state.has_model:
        return Start(True)
    return Start(False, list_open(args, status, names))


def list_open(args: "TrainConfig", status: dict[str, Any], names: Collection[str]) -> list[str]:
    """The open steps of the end of a run whose model is saved, in their order: the report describes the others. Also
    those that are asked for only now. Of a run that has just been saved, without `status` and `names`: all."""
    wanted = {PUSHED: args.push_to_hub, EVALUATED: bool(args.eval_command), REPORTED: True}
    is_done = {PUSHED: status.get("pushed"), REPORTED: {REPORT, CARD} <= {*names}, EVALUATED: EVALUATIONS in names}
    recorded = status.get("open") or []
    return [step for step in wanted if wanted[step] and (step in recorded or not is_done[step])]
