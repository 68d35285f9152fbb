"""The report of a run: report.html, figures/*.png and the closing lines, from the files in its folder alone.

    python -m sfm_dpo.report.page outputs/dpo

Works for a run that is done, going on, stopped or failed, also before its first step, and for an old run's folder.
"""

import dataclasses
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from sfm_dpo.common.cli import Arguments
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import write_atomically
from sfm_dpo.common.statistics import wilson
from sfm_dpo.common.tables import format_table
from sfm_dpo.config import DATACLASSES
from sfm_dpo.data.preferences import DROP_REASONS
from sfm_dpo.health.generation import repeated_4grams
from sfm_dpo.report.plots import draw_curves
from sfm_dpo.run.reader import first_and_last, list_evaluations, list_restarts, read_run, to_float

REPORT, FIGURES = "report.html", "figures"
STATES = {  # state of status.json: (class in the page, in plain words)
    "done": ("good", "The run is done."),
    "running": ("open", "The run is going on, or was killed: status.json still says running."),
    "stopped": ("open", "The run was stopped on request; the same command goes on from its newest checkpoint."),
    "refused": ("bad", "The preflight refused to train."),
    "collapsed": ("bad", "The guard stopped the run."),
    "failed": ("bad", "The run failed."),
    "push_failed": ("open", "The model is trained and saved, but was not pushed to the Hub."),
}
# Set by parse_config and TRL from other fields and the machine: their default is never what a run shows.
_DERIVED = set(
    """accelerator_config activation_checkpointing bf16 debug disable_tqdm do_eval gradient_accumulation_steps
    pad_to_multiple_of report_to""".split()
)
_HELD_OUT = {  # rows of the table of held-out figures; a share gets a confidence interval
    "rewards/accuracies": "reward accuracy: share of pairs whose chosen answer gained more than the rejected one",
    "logps/accuracies": "share of pairs whose chosen answer is the more probable one",
    "rewards/margins": "reward margin",
    "loss": "loss",
}


def render_page(template: str, **values: Any) -> str:
    """A template of templates/ with its values, HTML-escaped where it is HTML.

    Raises:
        jinja2.UndefinedError: the template uses a name that `values` lacks.
    """
    folder = FileSystemLoader(Path(__file__).with_name("templates"))
    escape = select_autoescape(["html.jinja"])
    environment = Environment(loader=folder, autoescape=escape, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template(template).render(values)


def write_report(run: Path) -> Path:
    """Writes report.html and figures/*.png into the folder of a run and returns the page's path.

    The page is self-contained (curves as inline SVG, no script, nothing loaded) and fits light, dark, narrow, wide.

    Raises:
        UserError: `run` is no run's folder.
    """
    run = Path(run)
    facts = read_run(run)
    findings = [
        f for f in facts["health"].get("findings", []) if isinstance(f, dict) and {"began", "signal"} <= set(f)
    ]
    alarms = [(finding["began"], finding["signal"]) for finding in findings]
    state = facts["status"].get("state", "unknown")
    page = render_page(
        "report.html.jinja",
        **facts,
        name=run.resolve().name,
        state=state,
        state_class=STATES.get(state, ("open",))[0],
        sentences=describe_run(facts),
        held_out=held_out_rows(facts),
        curves=draw_curves(facts["log"], facts["config"], list_restarts(facts), run / FIGURES, alarms),
        restarts=list_restarts(facts),
        answers=compare_answers(facts["samples"]),
        drop_reasons=DROP_REASONS,
        changed=changed_fields(facts["config"]),
        config_text=yaml.safe_dump(facts["config"], sort_keys=False, allow_unicode=True),
        command=format_command(facts["environment"].get("command", [])),
    )
    write_atomically(run / REPORT, page)
    return run / REPORT


def format_summary(run: Path) -> str:
    """The closing lines for the terminal: how it ended, held-out accuracy, loss, where everything is.

    Raises:
        UserError: `run` is no run's folder.
    """
    run = Path(run)
    facts = read_run(run)
    status = facts["status"]
    took = f" in {format_duration(facts['seconds'])}" if facts["seconds"] else ""
    rows = [("run", f"{status.get('state', 'unknown')}, {facts['steps']:,} steps{took}")]
    if status.get("message"):
        rows.append(("message", status["message"]))
    held_out = {row["metric"]: row for row in held_out_rows(facts)}
    if accuracy := held_out.get("rewards/accuracies"):
        pairs = f"{facts['data'].get('eval', 0):,} pairs, 95% interval in brackets"
        rows.append(("held out", f"reward accuracy {accuracy['before']} -> {accuracy['after']}; {pairs}"))
    first, last = first_and_last(facts["log"], "loss")
    losses = [f"training {first:.3f} -> {last:.3f}"] if first is not None else []
    if "loss" in held_out:
        losses.append(f"held out {held_out['loss']['before']} -> {held_out['loss']['after']}")
    if losses:
        rows.append(("loss", ", ".join(losses)))
    if answers := compare_answers(facts["samples"]):
        name, before, after = answers["drift"][0]
        rows.append(("answers", f"{name} {before} -> {after}"))
    if any(run.glob("*.safetensors")):
        rows.append(("model", str(run)))
    elif facts["checkpoints"]:
        rows.append(("checkpoint", str(run / facts["checkpoints"][-1])))
    if (run / REPORT).is_file():
        rows.append(("report", str(run / REPORT)))
    return format_table(rows)


def describe_run(facts: dict[str, Any]) -> list[str]:
    """The run in full sentences; each judgement states the figure that it rests on."""
    status, config, data, log = facts["status"], facts["config"], facts["data"], facts["log"]
    state = status.get("state")
    lines = [STATES[state][1] if state in STATES else f"status.json gives no known state ({state})."]
    if status.get("message"):
        lines.append(f"Message: {status['message']}")
    if config:
        source = config.get("dataset_name")
        if data:
            source = f"{data.get('train', 0):,} preference pairs of {' and '.join(data.get('sources', []))}"
        took = f", {format_duration(facts['seconds'])}" if facts["seconds"] else ""
        took += " since the last start" if took and list_restarts(facts) else ""
        lines.append(
            f"{config.get('model_name_or_path')}, trained with DPO ({' + '.join(config.get('loss_type') or ['?'])}, "
            f"beta {config.get('beta')}, learning rate {config.get('learning_rate')}) on {source}: "
            f"{facts['steps']:,} optimizer steps{took}."
        )
    if not log:
        lines.append("No training step was logged.")
    elif log[-1]["step"] < facts["steps"]:
        lines.append(f"The saved log ends at step {log[-1]['step']:,}; the run had reached {facts['steps']:,}.")
    first, last = first_and_last(log, "loss")
    if first is not None:
        lines.append(f"Training loss {first:.3f} at the start, {last:.3f} at the end (mean of the last tenth).")
    lines += _describe_held_out(facts, last)
    for name in ("loss", "grad_norm"):
        steps = [entry["step"] for entry in log if not math.isfinite(to_float(entry.get(name, 0.0)))]
        if steps:
            where = f"{len(steps)} log entries, first at step {steps[0]}"
            lines.append(f"Warning: {name} was not a finite number in {where}.")
    return lines


def _describe_held_out(facts: dict[str, Any], train_loss: float | None) -> list[str]:
    evals, pairs = list_evaluations(facts["log"]), facts["data"].get("eval", 0)
    if not pairs:
        return ["Nothing was held out: training figures alone cannot tell learning from memorising."]
    if not evals or evals[-1]["step"] == 0:
        return []
    lines = []
    share = evals[-1].get("eval_rewards/accuracies", math.nan)
    if math.isfinite(share):
        low, high = wilson(share, pairs)
        chance = "better than" if low > 0.5 else "worse than" if high < 0.5 else "not distinguishable from"
        interval = f"95% interval {low:.0%} to {high:.0%}"
        lines.append(f"Of {pairs:,} held-out pairs it gets {share:.0%} right ({interval}): {chance} chance, 50%.")
    before, after = evals[0].get("eval_loss", math.nan), evals[-1].get("eval_loss", math.nan)
    if train_loss is not None and after > before + 0.01 and train_loss < before - 0.05:  # beyond the noise of both
        lines.append(
            f"Held-out loss rose from {before:.3f} to {after:.3f} while training loss fell to {train_loss:.3f}: it "
            "memorised its pairs. Fewer epochs, a lower learning rate or more pairs help."
        )
    return lines


def held_out_rows(facts: dict[str, Any]) -> list[dict[str, str]]:
    """First and last held-out value of each metric of `_HELD_OUT` as text, shares with their 95% interval."""
    evals, pairs = list_evaluations(facts["log"]), facts["data"].get("eval", 0)
    rows = []
    for metric, text in _HELD_OUT.items():
        values = [(entry["step"], entry[key]) for entry in evals if (key := f"eval_{metric}") in entry]
        if values:
            before, after = (_format_value(metric, to_float(value), pairs) for _, value in (values[0], values[-1]))
            if metric == "rewards/accuracies" and values[0][0] == 0:  # policy = reference: no answer has gained
                before = "0.50, all ties"
            rows.append({"metric": metric, "text": text, "before": before, "after": after})
    return rows


def _format_value(metric: str, value: float, pairs: int) -> str:
    if not metric.endswith("accuracies") or not math.isfinite(value) or not pairs:
        return f"{value:.3f}"
    low, high = wilson(value, pairs)
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


def compare_answers(samples: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Answers side by side, and how length and repetition drifted; None where nothing was generated."""
    samples = [s for s in samples if isinstance(s, dict) and {"prompt", "before", "after"} <= s.keys()]
    if not samples:
        return None
    columns = []  # before and after: mean length or None, repetition, empty answers
    for side in ("before", "after"):
        lengths = [s[f"{side}_tokens"] for s in samples if f"{side}_tokens" in s]
        texts = [s[side] for s in samples]
        empty = sum(not text.strip() for text in texts)
        mean = f"{sum(lengths) / len(lengths):.0f}" if lengths else None
        columns.append((mean, f"{repeated_4grams(texts):.1%}", str(empty)))
    names = ("answer length, mean tokens", "repeated 4-grams of words", "empty answers")
    return {"samples": samples, "drift": [row for row in zip(names, *columns, strict=True) if None not in row]}


def changed_fields(config: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(field, value, default) of the fields that differ from the defaults."""
    defaults: dict[str, Any] = {}
    for field in (field for cls in DATACLASSES for field in dataclasses.fields(cls)):
        factory = field.default_factory
        defaults[field.name] = field.default if factory is dataclasses.MISSING else factory()
    changed = [key for key, value in config.items() if value != defaults.get(key) and key not in _DERIVED]
    return [(key, config[key], defaults.get(key)) for key in changed]


def format_command(command: list[str]) -> str:
    """The command line as one types it, an option a line."""
    words = [shlex.quote(str(word)) for word in command]
    return "".join(f" \\\n  {word}" if word.startswith("--") else f" {word}" for word in words).strip()


def format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def main(argv: list[str]) -> int:
    parser = Arguments(prog="python -m sfm_dpo.report.page", description="Writes RUN/report.html.")
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder, for instance outputs/dpo")
    run = parser.parse_args(argv).run
    try:
        write_report(run)
        print(format_summary(run))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
