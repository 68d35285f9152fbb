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

import sfm_dpo
from sfm_dpo.common.cli import Arguments, command
from sfm_dpo.common.files import format_clock, write_atomically
from sfm_dpo.common.statistics import wilson
from sfm_dpo.common.tables import format_table
from sfm_dpo.config import DATACLASSES
from sfm_dpo.data.preferences import DROP_REASONS
from sfm_dpo.report.evaluation import evaluation_tables
from sfm_dpo.report.plots import draw_curves
from sfm_dpo.run.reader import first_and_last, list_evaluations, list_restarts, read_run, to_float

REPORT, FIGURES = "report.html", "figures"
STATES = {  # state of status.json: (class in the page, in plain words)
    "done": ("good", "The run is done."),
    "running": ("open", "The run is training, or was killed: status.json still says running."),
    "stopped": ("open", "The run was stopped on request; the same command resumes from its newest checkpoint."),
    "refused": ("bad", "The preflight refused to train."),
    "collapsed": ("bad", "The guard stopped the run."),
    "hung": ("bad", "The run made no progress for hang_timeout and was ended."),
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
    facts = read_run(run)
    alarms = [(finding["began"], finding["signal"]) for finding in facts["health"].get("findings", [])]
    state = facts["status"].get("state", "unknown")
    page = render_page(
        "report.html.jinja",
        **facts,
        name=run.resolve().name,
        state=state,
        state_class=STATES.get(state, ("open",))[0],
        sentences=describe_run(facts),
        held_out=list_held_out(facts),
        evaluation_tables=evaluation_tables(facts["evaluation"]),
        curves=draw_curves(facts["log"], facts["config"], list_restarts(facts), run / FIGURES, alarms),
        restarts=list_restarts(facts),
        drop_reasons=DROP_REASONS,
        changed=changed_fields(facts["config"]),
        format_yaml=format_yaml,
        command=format_command(facts["environment"].get("command", [])),
    )
    write_atomically(run / REPORT, page)
    return run / REPORT


def format_summary(run: Path) -> str:
    """The closing lines for the terminal: how it ended, held-out accuracy, loss, where everything is.

    Raises:
        UserError: `run` is no run's folder.
    """
    facts = read_run(run)
    status = facts["status"]
    took = f" in {format_clock(facts['seconds'])}" if facts["seconds"] else ""
    rows = {
        "run": f"{status.get('state', 'unknown')}, {facts['steps']:,} steps{took}",
        "message": status.get("message"),
    }
    held_out: dict[str, str] = {}
    for title, table in reversed(list_held_out(facts)):
        held_out = {row["metric"]: f"{row['before']} -> {row['after']}" for row in table}
        if accuracy := held_out.get("rewards/accuracies"):
            rows["held out"] = f"reward accuracy {accuracy}; {title}, 95% interval in brackets"
    first, last = first_and_last(facts["log"], "loss")
    if first is not None:
        rows["loss"] = f"training {first:.3f} -> {last:.3f}"
        rows["loss"] += f", held out {held_out['loss']}" if "loss" in held_out else ""
    if any(run.glob("*.safetensors")):
        rows["model"] = str(run)
    elif facts["checkpoints"]:
        rows["checkpoint"] = str(run / facts["checkpoints"][-1])
    if (run / REPORT).is_file():
        rows["report"] = str(run / REPORT)
    return format_table((name, value) for name, value in rows.items() if value)


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
        took = f", {format_clock(facts['seconds'])}" if facts["seconds"] else ""
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
        if steps := [entry["step"] for entry in log if not math.isfinite(to_float(entry.get(name, 0.0)))]:
            entries = f"{len(steps)} log entries, first at step {steps[0]}"
            lines.append(f"Warning: {name} was not a finite number in {entries}.")
    return lines


def _describe_held_out(facts: dict[str, Any], train_loss: float | None) -> list[str]:
    if not (facts["data"].get("eval") or facts["data"].get("eval_sets")):
        return ["Nothing was held out: training figures alone cannot tell learning from memorising."]
    evals, pairs, lines = list_evaluations(facts), facts["data"].get("eval", 0), []
    if not evals or evals[-1]["step"] == 0:
        return []
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


def list_held_out(facts: dict[str, Any]) -> list[tuple[str, list[dict[str, str]]]]:
    """(what was held out, its rows) of eval_fraction and of each set of eval_datasets, where it was evaluated."""
    sets = {"": facts["data"].get("eval", 0)} | facts["data"].get("eval_sets", {})
    tables = {
        f"{n:,} pairs of {name}" if name else f"{n:,} held-out pairs": _held_out_rows(facts, name, n)
        for name, n in sets.items()
    }
    return [(title, rows) for title, rows in tables.items() if rows]


def _held_out_rows(facts: dict[str, Any], name: str, pairs: int) -> list[dict[str, str]]:
    """First and last held-out value of each metric of `_HELD_OUT` as text, shares with their 95% interval."""
    prefix = f"eval_{name}_" if name else "eval_"
    evaluations = list_evaluations(facts, prefix)
    rows = []
    for metric, text in _HELD_OUT.items():
        found = [entry for entry in evaluations if prefix + metric in entry]
        if found:
            before = _format_held_out(metric, found[0][prefix + metric], pairs)
            if metric == "rewards/accuracies" and found[0]["step"] == 0:  # policy = reference: no answer has gained
                before = "0.50, all ties"
            after = _format_held_out(metric, found[-1][prefix + metric], pairs)
            rows.append({"metric": metric, "text": text, "before": before, "after": after})
    return rows


def _format_held_out(metric: str, value: Any, pairs: int) -> str:
    share = to_float(value)
    if metric.endswith("accuracies") and pairs:
        return "{:.2f} ({:.2f} to {:.2f})".format(share, *wilson(share, pairs))
    return f"{share:z.3f}"


def format_yaml(values: dict[str, Any]) -> str:
    """Nested values as text to read."""
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def changed_fields(config: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(field, value, default) of the fields that differ from the defaults."""
    defaults = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for cls in DATACLASSES
        for field in dataclasses.fields(cls)
    }
    changed = [key for key, value in config.items() if value != defaults.get(key) and key not in _DERIVED]
    return [(key, config[key], defaults.get(key)) for key in changed]


def format_command(command: list[str]) -> str:
    """The command line as one types it, an option a line."""
    words = [shlex.quote(str(word)) for word in command]
    return "".join(f" \\\n  {word}" if word.startswith("--") else f" {word}" for word in words).strip()


@command
def main(argv: list[str]) -> None:
    parser = Arguments(prog="python -m sfm_dpo.report.page", description="Writes RUN/report.html.")
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder, for instance outputs/dpo")
    run = parser.parse_args(argv).run
    write_report(run)
    print(format_summary(run))


if __name__ == "__main__":
    sfm_dpo.setup()
    sys.exit(main(sys.argv[1:]))
