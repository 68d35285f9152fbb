"""Reads what runs have written: a folder's files and logged metrics, and the state of all runs as a table."""

import contextlib
import json
import math
import re
import time
from collections.abc import Collection, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from sfm_dpo.common.errors import UserError, user_input
from sfm_dpo.common.files import format_clock, format_table
from sfm_dpo.common.secrets import mask_values
from sfm_dpo.common.slurm import is_running, squeue_states
from sfm_dpo.common.statistics import ALLOWED, wilson
from sfm_dpo.config.effects import MAY_CHANGE
from sfm_dpo.run.checkpoint import checkpoints
from sfm_dpo.run.facts import Calibration
from sfm_dpo.run.folder import (
    DATA,
    ENVIRONMENT,
    EVALUATED,
    EVALUATIONS,
    HEALTH,
    LOG,
    REPORT,
    RESOLVED_CONFIG,
    RUN_FILES,
    STATUS,
    TRAINER_STATE,
    State,
    read_file,
    read_status,
)
from sfm_dpo.run.lock import LOCK, read_owner

# Verdicts of `judge_learning`, and what to look at
LEARNED = ("learned", "")
UNCLEAR = ("no evidence of learning", "; look at learning_rate, steps and how many pairs are held out")
WORSE = ("worse than the base model", "; check that chosen and rejected are not swapped, and lower learning_rate")
STALE_SECONDS = 1800  # longer than a step, an evaluation or a save takes
LOCKED = "locked"  # shown of a folder that a job has taken and written nothing to
LOADING = "loading"  # shown of a run that resumes: its status.json is still that of the start before
COLUMNS = "run state job step eta pairs/s loss margin eval_loss eval_acc verdict health last GPU-h".split()
_FORMS = {"pairs/s": ".2f", "loss": ".4f", "margin": "+.3f", "eval_loss": ".4f", "eval_acc": ".3f", "GPU-h": ".1f"}


def read_run(run: Path) -> dict[str, Any]:
    """The content of a run's files, empty if absent or damaged: `config`, and by stem the others of RUN_FILES; `log`
    (log_history of the newest trainer_state.json, then later entries of LOG), `steps`, `seconds` of training since the
    last start or None, and `gpu_hours`. Raises UserError without files."""
    facts = {Path(name).stem: mask_values(read_file(run / name)) for name in RUN_FILES}  # reports are shared
    facts["config"] = facts.pop(Path(RESOLVED_CONFIG).stem)
    facts["status"] = mask_values(read_status(run))
    states = [read_file(folder / TRAINER_STATE) for folder in (run, *checkpoints(run))]
    state = max(states, key=lambda s: s.get("global_step", -1))  # a killed run has only its checkpoints' files
    if not any(facts.values()) and not state:
        raise UserError(f"{run}: not a run's folder: no {RESOLVED_CONFIG} or {STATUS} in it; give a run's output_dir")
    log = _list_entries(state.get("log_history", []))
    log += [entry for entry in _read_log(run / LOG) if entry["step"] > state.get("global_step", -1)]
    kept = facts["evaluation"].get("checkpoints", {})  # by evaluate.py; JSON has made text of the steps
    if evaluations := {int(step): scores for step, scores in kept.items()} | read_evaluations(run):
        facts["evaluation"]["checkpoints"] = evaluations
    runtimes = [entry["train_runtime"] for entry in log if "train_runtime" in entry]
    return facts | {
        "log": log,
        "steps": max(state.get("global_step", 0), facts["status"].get("step") or 0),
        "seconds": runtimes[-1] if runtimes else None,
        "gpu_hours": count_gpu_hours(facts["environment"], facts["status"]),
    }


def eval_prefix(entry: dict[str, Any]) -> str:
    """The prefix of an evaluation entry's metrics: `eval_`, `eval_NAME_` for a named set, or empty if it is none."""
    losses = [name for name in entry if name.startswith("eval_") and name.endswith("loss")]
    return min(losses, key=len, default="").removesuffix("loss")


def list_held_out(facts: dict[str, Any]) -> list[tuple[str, int, dict[str, dict[str, Any]]]]:
    """(title, pairs, evaluations) of eval_fraction and each set of eval_datasets: metrics without prefix `before` and
    `after` training, those that exist."""
    sets = {"": facts["data"].get("eval", 0)} | facts["data"].get("eval_sets", {})
    found = []
    for name, pairs in sets.items():
        prefix = f"eval_{name}_" if name else "eval_"
        evaluations = {}
        for entry in facts["log"]:
            if f"{prefix}loss" in entry:
                side = "after" if entry["step"] else "before"
                evaluations[side] = {metric.removeprefix(prefix): value for metric, value in entry.items()}
        if pairs and evaluations:
            found.append((f"{pairs:,} pairs of {name}" if name else f"{pairs:,} held-out pairs", pairs, evaluations))
    return found


def judge_learning(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """(verdict, sentence) for each held-out set of a finished run: whether training has changed the reward accuracy,
    by the 95% interval of the change. Metrics of the training pairs prove nothing.

    The reward accuracy of the base model is 0.5, because it is the reference. No verdict is given with another one.
    """
    if facts["config"].get("ref_model_name_or_path") or not State.of(facts["status"]).has_model:
        return []
    verdicts = []
    for title, pairs, evaluations in list_held_out(facts):
        if "after" in evaluations:
            after = to_float(evaluations["after"].get("rewards/accuracies"))
            change, low, high = (share - 0.5 for share in (after, *wilson(after, pairs)))
            verdict, advice = UNCLEAR
            if low > 0 or high < 0:
                verdict, advice = LEARNED if low > 0 else WORSE
            figures = f"{change:+.3f} (95% interval {low:+.3f} to {high:+.3f})"
            what = f"the reward accuracy on {title} has changed by {figures}"
            verdicts.append((verdict, f"{verdict.capitalize()}: {what}{advice}."))
    if not any(map(eval_prefix, facts["log"])):
        verdicts.append(("not judged", "Not judged: no pairs were held out (eval_fraction)."))
    return verdicts


def describe_calibration(found: Calibration) -> list[tuple[str, str]]:
    """What a start has measured, by name, as text."""
    if not found.noise:
        return []
    rows = [("noise of a log-prob", f"{found.noise:.2g} nats")]
    for path, ratio in found.ratios.items():
        rows.append((f"{path} agrees", f"within {ratio:.2g} of the noise, {ALLOWED} allowed"))
    if found.measured_bytes and found.planned_bytes:
        sizes = f"{found.measured_bytes / 2**30:.2f} and {found.planned_bytes / 2**30:.2f} GiB"
        rows.append(("memory measured and planned", sizes))
    for kernel, milliseconds in found.kernels.items():
        rows.append((f"micro-batch by {kernel}, all layers checkpointed", f"{milliseconds:.0f} ms"))
    if found.hours is not None and found.reference_hours is not None:
        rows.append(("average micro-batch", f"{found.milliseconds:.0f} ms"))
        rate = f"{found.tokens_per_second:,.0f} tokens/s a device, without communication"
        rate += f", {found.mfu:.1%} MFU" if found.mfu else ""
        rows.append(("speed", rate))
        rows.append(("reference pass", f"about {format_clock(3600 * found.reference_hours)}"))
        rows.append(("training", f"about {format_clock(3600 * found.hours)}, without evaluations and saves"))
    return [*rows, ("calibration", format_clock(found.seconds))]


def count_gpu_hours(environment: dict[str, Any], status: dict[str, Any]) -> float | None:
    """Hours from the beginning to the last sign of life of each start, times its GPUs; None without a GPU."""
    starts = environment.get("starts", [])
    if not (starts and environment.get("gpus") and status.get("trained")):
        return None
    hours = 0.0
    ends = [start.get("end") for start in starts[:-1]] + [status["trained"]]
    with contextlib.suppress(ValueError, TypeError):  # no times
        for start, end in zip(starts, ends, strict=True):
            life = datetime.fromisoformat(end or start["time"]) - datetime.fromisoformat(start["time"])
            hours += life.total_seconds() / 3600 * start["world_size"]
        return hours
    return None


def to_float(value: Any) -> float:
    """A logged value as a float; NaN if it is not a number."""
    return float(value) if isinstance(value, int | float) else math.nan


def _read_log(path: Path) -> list[dict[str, Any]]:
    entries = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):  # a line cut off by a kill
            entries.append(json.loads(line))
    return _list_entries(entries)


def _list_entries(items: list[Any]) -> list[dict[str, Any]]:
    """The log's entries, with their numbers only."""
    entries = [item for item in items if isinstance(item, dict) and isinstance(item.get("step"), int)]
    return [{name: v for name, v in entry.items() if isinstance(v, int | float)} for entry in entries]


def read_scores(path: Path) -> dict[str, dict[str, float | None]]:
    """By metric the value and stderr (or None) that eval_command has measured. Raises UserError for another file."""
    form = '{"metric": number} or {"metric": {"value": number, "stderr": number}}'
    with user_input(f"{path}: is not a result of eval_command", f"write {form}"):
        scores = {}
        for name, score in json.loads(path.read_text()).items():
            score = score if isinstance(score, dict) else {"value": score}
            error = to_float(score.get("stderr"))
            scores[name] = {"value": score.get("value"), "stderr": error if math.isfinite(error) else None}
        if not scores or not all(math.isfinite(to_float(score["value"])) for score in scores.values()):
            raise ValueError("a metric has no number")
    return scores


def read_evaluations(run: Path, known: Collection[int] = ()) -> dict[int, dict[str, Any]]:
    """`read_scores` by step, without the `known` steps and without files that are no result."""
    found = {}
    for path in (run / EVALUATIONS).glob("step-*.json"):
        with contextlib.suppress(UserError, ValueError):
            step = int(path.stem.removeprefix("step-"))
            if step not in known:
                found[step] = read_scores(path)
    return dict(sorted(found.items()))


def list_awaited(run: Path, evaluated: Collection[int]) -> list[str]:
    """The evaluations, `step-N`, that eval_command has started, without those of the `evaluated` steps."""
    started = {path.stem for path in (run / EVALUATIONS).glob("step-*.log")}
    return sorted(started - {f"step-{step}" for step in evaluated})


def format_scores(step: int, scores: dict[str, Any]) -> str:
    """The first four metrics of an evaluation in a line."""
    parts = [f"{name} {score['value']:.4g}" for name, score in [*scores.items()][:4]]
    return f"evaluation of step {step}: {', '.join(parts)}"


def find_runs(folders: Iterable[str | Path]) -> list[Path]:
    """The runs among the given folders and up to two levels below them, sorted by name."""
    runs: set[Path] = set()
    for folder in folders:
        for level in ("", "*/", "*/*/"):
            for name in (STATUS, LOCK):
                runs.update(file.parent for file in Path(folder).glob(level + name))
    return sorted(runs)


def describe_run(run: Path, queue: dict[str, str] | None, now: float) -> dict[str, Any]:
    """The state of a run at `now` (Unix time), given `queue` from `squeue_states`: COLUMNS (`eta` and `last` are in
    seconds), and what `format_runs` adds; unknown values are None."""
    status = read_status(run)
    job = status.get("task") or status.get("job")
    slurm = None
    if queue is not None and (names := list_jobs(run)):
        slurm = next((queue[name] for name in names if name in queue), "not queued")
    environment = read_file(run / ENVIRONMENT)
    changed = [path.stat().st_mtime for path in (run / STATUS, run / LOCK) if path.exists()]
    age = max(0.0, now - changed[0]) if changed else 0.0
    state = State.of(status)
    shown = str(state)
    runs = is_running(read_owner(run / LOCK), queue) is not False  # or may run
    if state is State.RUNNING:
        if not runs:
            shown = "died"
        elif age > STALE_SECONDS:
            shown = "stale"
    elif runs and not state.has_model:
        shown = LOADING if (run / STATUS).exists() else LOCKED
    if slurm == "PENDING" and not runs:
        shown += ", queued"
    facts: dict[str, Any] = {"status": status, "log": _read_log(run / LOG)}
    facts |= {"config": read_file(run / RESOLVED_CONFIG), "data": read_file(run / DATA)}
    verdicts = judge_learning(facts)
    held_out: dict[str, Any] = next((entry for entry in reversed(facts["log"]) if "eval_loss" in entry), {})
    evaluations = read_evaluations(run)
    still = [step for step in status.get("open") or [] if step != EVALUATED or list_awaited(run, evaluations)]
    logged = facts["log"][-1]["step"] if facts["log"] else 0
    report = None
    with contextlib.suppress(FileNotFoundError), (run / REPORT).open(errors="replace") as page:
        reported = re.search('<meta name="step" content="([0-9]+)">', page.read(500))
        if reported and not runs and int(reported[1]) < logged:
            report = f"{REPORT} is as of step {reported[1]}, the run ended at step {logged}"
    return {
        "run": str(run),
        "config": facts["config"],
        "state": shown,
        "message": status.get("message") or None,
        "open": still,
        "job": job,
        "slurm": slurm,
        "eta": status.get("eta_seconds") if shown == State.RUNNING else None,
        **{name: status.get(name) for name in ("step", "max_steps", "loss", "margin")},
        "pairs/s": status.get("pairs_per_second"),
        "eval_loss": held_out.get("eval_loss"),
        "eval_acc": held_out.get("eval_rewards/accuracies"),
        "verdict": verdicts[0][0] if verdicts else None,
        "health": read_file(run / HEALTH).get("verdict"),
        "last": round(age),
        "evaluation": format_scores(*list(evaluations.items())[-1]) if evaluations else None,
        "GPU-h": count_gpu_hours(environment, status),
        "log": status.get("log"),
        "report": report,
    }


def list_jobs(run: Path) -> list[str]:
    """The jobs of a run that Slurm may know: its last start's, and its lock's owner."""
    status = read_status(run)
    return list(filter(None, [status.get("task"), status.get("job"), read_owner(run / LOCK).get("job")]))


def describe_runs(folders: Iterable[str | Path]) -> list[dict[str, Any]]:
    runs = find_runs(folders)
    queue = squeue_states(job for run in runs for job in list_jobs(run))
    return [describe_run(run, queue, time.time()) for run in runs]


def format_runs(runs: list[dict[str, Any]]) -> str:
    """The runs as text, a line each with the fields of a sweep; then messages, evaluations, and where to look."""
    columns = [COLUMNS[0], *list_swept(runs), *COLUMNS[1:]]
    cells = [[_format_cell(run["config"] | run, name) for name in columns] for run in runs]
    lines = [format_table(cells, columns, indent=0)]
    notes = [f"{run['run']}: {run['message']}" for run in runs if run["message"] and run["state"] != State.DONE]
    notes += [f"{run['run']}: to be done by the same command: {', '.join(run['open'])}" for run in runs if run["open"]]
    notes += [f"{run['run']}: {run['evaluation']}" for run in runs if run["evaluation"]]
    notes += [f"{run['run']}: log in {run['log']}" for run in runs if run["log"]]
    notes += [f"{run['run']}: {run['report']}" for run in runs if run["report"]]
    if notes:
        lines += ["", *notes]
    return "\n".join(lines)


def list_swept(runs: list[dict[str, Any]]) -> list[str]:
    """The fields in which runs differ that make another run of them; none if there are more than four."""
    configs = [run["config"] for run in runs if run["config"]]
    names = dict.fromkeys(name for config in configs for name in config if name not in MAY_CHANGE)
    swept = [name for name in names if len({str(config.get(name)) for config in configs}) > 1]
    return swept if len(swept) <= 4 else []


def _format_cell(run: dict[str, Any], name: str) -> str:
    value = run.get(name)
    if value is None:
        return "-"
    if name == "step" and run["max_steps"]:
        return f"{value}/{run['max_steps']}"
    if name in ("eta", "last"):
        return format_clock(value)
    return format(value, _FORMS.get(name, ""))
