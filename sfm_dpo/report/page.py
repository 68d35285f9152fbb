"""The report of a run: report.html, figures/*.png and the closing lines, from the files in its folder alone.

    python -m sfm_dpo.report.page outputs/dpo

Works for a run in any state, also before its first step.
"""

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

import sfm_dpo
from sfm_dpo.common.cli import Arguments, command
from sfm_dpo.common.files import format_clock, format_table, write_atomically
from sfm_dpo.config import DATACLASSES
from sfm_dpo.data.preferences import DROP_REASONS
from sfm_dpo.report.evaluation import evaluation_tables, format_metric
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
_HELD_OUT = {  # rows of the table of held-out metrics
    "rewards/accuracies": "reward accuracy: share of pairs whose chosen answer gained more than the rejected one",
    "logps/accuracies": "share of pairs whose chosen answer is the more probable one",
    "rewards/margins": "reward margin",
    "loss": "loss",
}


def render_page(template: str, **values: Any) -> str:
    """A template of templates/ with its values, HTML-escaped where it is HTML."""
    folder = FileSystemLoader(Path(__file__).with_name("templates"))
    escape = select_autoescape(["html.jinja"])
    environment = Environment(loader=folder, autoescape=escape, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template(template).render(values)


def write_report(run: Path) -> Path:
    """Writes report.html, self-contained, and figures/*.png into the folder of a run; returns the page's path."""
    facts = read_run(run)
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
        curves=draw_curves(facts["log"], run / FIGURES),
        restarts=list_restarts(facts),
        drop_reasons=DROP_REASONS,
        changed=changed_fields(facts["config"]),
        format_yaml=format_yaml,
        command=format_command(facts["environment"].get("command", [])),
    )
    write_atomically(run / REPORT, page)
    return run / REPORT


def format_summary(run: Path) -> str:
    """The closing lines for the terminal: how it ended, held-out accuracy, loss, where everything is."""
    facts = read_run(run)
    status = facts["status"]
    rows = [("run", f"{status.get('state', 'unknown')}, {facts['steps']:,} steps{_format_time(facts)}")]
    if status.get("message"):
        rows.append(("message", status["message"]))
    for title, table in list_held_out(facts):
        rows.append(("held out", f"{title}, 95% interval in brackets"))
        rows += [(f"  {row['metric']}", f"{row['before']} -> {row['after']}") for row in table]
    first, last = first_and_last(facts["log"], "loss")
    if first is not None:
        rows.append(("loss", f"training {first:.3f} -> {last:.3f}"))
    if any(run.glob("*.safetensors")):
        rows.append(("model", str(run)))
    elif facts["checkpoints"]:
        rows.append(("checkpoint", str(run / facts["checkpoints"][-1])))
    if (run / REPORT).is_file():
        rows.append(("report", str(run / REPORT)))
    return format_table(rows)


def describe_run(facts: dict[str, Any]) -> list[str]:
    """The run in full sentences."""
    status = facts["status"]
    config = facts["config"]
    data = facts["data"]
    state = status.get("state")
    lines = [STATES[state][1] if state in STATES else f"status.json gives no known state ({state})."]
    if status.get("message"):
        lines.append(f"Message: {status['message']}")
    if config:
        lines.append(
            f"{config['model_name_or_path']}, trained with DPO ({' + '.join(config['loss_type'])}, beta "
            f"{config['beta']}, learning rate {config['learning_rate']}) on {data.get('train', 0):,} preference pairs "
            f"of {' and '.join(data.get('sources', []))}: {facts['steps']:,} optimizer steps{_format_time(facts)}."
        )
    first, last = first_and_last(facts["log"], "loss")
    if first is not None:
        lines.append(f"Training loss {first:.3f} at the start, {last:.3f} at the end (mean of the last tenth).")
    if not list_held_out(facts):
        lines.append("No held-out pairs were evaluated: training metrics alone cannot tell learning from memorising.")
    return lines


def _format_time(facts: dict[str, Any]) -> str:
    return f" in {format_clock(facts['seconds'])} since the last start" if facts["seconds"] else ""


def list_held_out(facts: dict[str, Any]) -> list[tuple[str, list[dict[str, str]]]]:
    """(what was held out, its rows) of eval_fraction and of each set of eval_datasets, where it was evaluated."""
    tables = []
    for name, pairs in ({"": facts["data"].get("eval", 0)} | facts["data"].get("eval_sets", {})).items():
        rows = _held_out_rows(facts, f"eval_{name}_" if name else "eval_", pairs)
        if rows:
            tables.append((f"{pairs:,} pairs of {name}" if name else f"{pairs:,} held-out pairs", rows))
    return tables


def _held_out_rows(facts: dict[str, Any], prefix: str, pairs: int) -> list[dict[str, str]]:
    """First and last held-out value of each metric of `_HELD_OUT` as text, shares with their 95% interval."""
    rows = []
    for metric, text in _HELD_OUT.items():
        found = [entry for entry in list_evaluations(facts, prefix) if prefix + metric in entry]
        if found and pairs:
            first = found[0]
            before = format_metric(metric, to_float(first[prefix + metric]), pairs)
            if metric == "rewards/accuracies" and first["step"] == 0:  # policy = reference: no answer has gained
                before = "0.50, all ties"
            after = format_metric(metric, to_float(found[-1][prefix + metric]), pairs)
            rows.append({"metric": metric, "text": text, "before": before, "after": after})
    return rows


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
