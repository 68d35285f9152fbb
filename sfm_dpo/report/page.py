"""The report of a run: report.html, figures/*.png and the closing lines, made only from the files in its folder.

It works for a run in any state, even before its first step.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from sfm_dpo.common.files import format_clock, format_table, write_atomically
from sfm_dpo.common.statistics import wilson
from sfm_dpo.config.fields import FieldParser
from sfm_dpo.data.pairs import DROP_REASONS
from sfm_dpo.report.plots import draw_curves
from sfm_dpo.run.checkpoint import newest_checkpoint
from sfm_dpo.run.facts import RunFacts
from sfm_dpo.run.folder import REPORT, State
from sfm_dpo.run.reader import LEARNED, describe_calibration, judge_learning, list_held_out, read_run, to_float

FIGURES = "figures"
STATES = {  # CSS class and sentence in the page
    State.DONE: ("good", "The run is done."),
    State.RUNNING: ("open", "The run is training, or was killed: status.json still says running."),
    State.STOPPED: ("open", "The run was stopped on request; the same command resumes from its newest checkpoint."),
    State.REFUSED: ("bad", "The preflight refused to train."),
    State.COLLAPSED: ("bad", "The guard stopped the run."),
    State.HUNG: ("bad", "The run made no progress for hang_timeout and was ended."),
    State.FAILED: ("bad", "The run failed."),
    State.PUSH_FAILED: ("open", "The model is trained and saved, but was not pushed to the Hub."),
    State.UNKNOWN: ("open", "The state in status.json is unknown."),
}
# parse_config and TRL set these from other fields and the machine, so they always differ from their defaults.
_DERIVED = """accelerator_config activation_checkpointing debug disable_tqdm do_eval gradient_accumulation_steps
    pad_to_multiple_of report_to""".split()
PAIR_METRICS = {  # metrics of held-out pairs, and their names in tables
    "rewards/accuracies": "reward accuracy",
    "rewards/margins": "reward margin",
    "logps/accuracies": "chosen is likelier",
    "loss": "loss",
}


def render_page(template: str, facts: dict[str, Any], **values: Any) -> str:
    """Renders a file of templates/ with `facts` (of read_run) and `values`; HTML templates escape them."""
    facts = facts | {"held_out": tabulate_held_out(facts), "evaluation_tables": evaluation_tables(facts["evaluation"])}
    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    escape = select_autoescape(["html.jinja"])
    environment = Environment(loader=loader, autoescape=escape, undefined=StrictUndefined, trim_blocks=True)
    environment.globals |= {"last_user_turn": last_user_turn, "drop_reasons": DROP_REASONS}
    return environment.get_template(template).render(facts | values)


def write_report(run: Path) -> Path:
    """Writes report.html, self-contained, and figures/*.png into the folder of a run; returns the page's path."""
    facts = read_run(run)
    state = State.of(facts["status"])
    is_doubtful = state is State.DONE and any(verdict != LEARNED[0] for verdict, _ in judge_learning(facts))
    page = render_page(
        "report.html.jinja",
        facts,
        name=run.resolve().name,
        state=state,
        state_class="open" if is_doubtful else STATES[state][0],
        sentences=list_sentences(facts),
        calibration=describe_calibration(RunFacts.of(facts["data"]).calibration),
        curves=draw_curves(facts, run / FIGURES),
        changed=changed_fields(facts["config"]),
        format_yaml=format_yaml,
        command=shlex.join(facts["environment"].get("command", [])),
    )
    write_atomically(run / REPORT, page)
    return run / REPORT


def format_summary(run: Path) -> str:
    """The closing lines for the terminal: how the run ended, held-out accuracy, loss, and where the files are."""
    facts = read_run(run)
    status = facts["status"]
    rows = [("run", f"{status.get('state', 'unknown')}, {_format_steps(facts)}")]
    if status.get("message"):
        rows.append(("message", status["message"]))
    rows += [("verdict", sentence) for _, sentence in judge_learning(facts)]
    for title, table in tabulate_held_out(facts):
        rows.append(("held out", f"{title}, 95% interval in brackets"))
        for metric, *values in (row.values() for row in table):
            rows.append((f"  {metric}", " -> ".join(values)))
    if State.of(status).has_model:
        rows.append(("model", str(run)))
    elif newest := newest_checkpoint(run):
        rows.append(("checkpoint", str(newest)))
    if (run / REPORT).is_file():
        rows.append(("report", str(run / REPORT)))
    return format_table(rows)


def list_sentences(facts: dict[str, Any]) -> list[str]:
    config = facts["config"]
    data = facts["data"]
    lines = [STATES[State.of(facts["status"])][1]]
    if facts["status"].get("message"):
        lines.append(f"Message: {facts['status']['message']}")
    if config:
        lines.append(
            f"{config['model_name_or_path']}, trained with DPO ({' + '.join(config['loss_type'])}, beta "
            f"{config['beta']}, learning rate {config['learning_rate']}) on {data.get('train', 0):,} preference pairs "
            f"of {' and '.join(data.get('sources', []))}: {_format_steps(facts)}."
        )
    if job := facts["status"].get("task") or facts["status"].get("job"):
        lines.append(f"Slurm job {job}, log in {facts['status'].get('log') or 'logs'}.")
    return lines + [sentence for _, sentence in judge_learning(facts)]


def last_user_turn(prompt: str) -> str:
    """The last turn of a prompt that a chat template has rendered: ChatML, OLMo's or Llama 3's; else all of it."""
    turn = re.split(r"(?m)^\W*user\W*$", prompt)[-1]
    return re.sub(r"(?m)^\W*assistant\W*(<think>)?\s*\Z", "", turn).strip()


def _format_steps(facts: dict[str, Any]) -> str:
    seconds = facts["seconds"]
    starts = facts["environment"].get("starts", [])
    before = starts[-1]["step"] if starts else 0
    since = f", {facts['steps'] - before:,} of them since the last start" if before else ""
    duration = f"{since} in {format_clock(seconds)}" if seconds else ""
    hours = "" if facts["gpu_hours"] is None else f", {facts['gpu_hours']:,.1f} GPU-hours over {len(starts)} start(s)"
    return f"{facts['steps']:,} optimizer steps{duration}{hours}"


def tabulate_held_out(facts: dict[str, Any]) -> list[tuple[str, list[dict[str, str]]]]:
    """(title, rows) of `list_held_out`: each metric's name and, as text, its values before and after, by step."""
    other_reference = facts["config"].get("ref_model_name_or_path")
    tables = []
    for title, pairs, evaluations in list_held_out(facts):
        rows = []
        for metric, name in PAIR_METRICS.items():
            row = {"metric": name}
            for side, values in evaluations.items():
                row[f"{side}, step {values['step']}"] = format_metric(metric, to_float(values.get(metric)), pairs)
            if metric == "rewards/accuracies" and "before" in evaluations and not other_reference:
                row["before, step 0"] = "0.50, all ties"  # policy = reference: no answer has gained
            rows.append(row)
        tables.append((title, rows))
    return tables


def evaluation_tables(evaluation: dict[str, Any]) -> list[tuple[tuple[str, ...], list[list[str]]]]:
    """(headings, rows) from evaluation.json: base and trained model; then each checkpoint by eval_command."""
    benchmarks = [_format_benchmark(row) for row in evaluation.get("benchmarks", [])]
    headings = ("task", "metric", "samples", "base", "trained", "difference (95%)")
    tables = [(headings, benchmarks)]
    by_step = evaluation.get("checkpoints", {})
    metrics = list(dict.fromkeys(name for scores in by_step.values() for name in scores))
    rows = [[str(step), *(_format_score(scores.get(name)) for name in metrics)] for step, scores in by_step.items()]
    tables.append((("step", *metrics), rows))
    return [(headings, rows) for headings, rows in tables if rows]


def _format_benchmark(row: dict[str, Any]) -> list[str]:
    """The cells of a benchmark's row; the standard error follows ±."""
    metric = row["metric"] if row["filter"] == "none" else f"{row['metric']}, {row['filter']}"
    difference = f"{row['difference']:+.3f}"
    if row["low"] is not None:
        difference += f" ({row['low']:+.3f} to {row['high']:+.3f})"
    sides = [_format_score(row["base"]), _format_score(row["trained"])]
    return [row["task"], metric, str(row["samples"]), *sides, difference]


def _format_score(score: dict[str, Any] | None) -> str:
    if score is None:
        return "-"
    return f"{score['value']:.3f}" + ("" if score["stderr"] is None else f" ± {score['stderr']:.3f}")


def format_metric(name: str, value: float, pairs: int) -> str:
    """A metric of `pairs` pairs as text; shares of pairs get a 95% interval."""
    if name.endswith("accuracies"):
        low, high = wilson(value, pairs)
        return f"{value:.2f} ({low:.2f} to {high:.2f})"
    return f"{value:z.3f}"


def format_yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def changed_fields(config: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(field, value, default) for each field that differs from its default."""
    parser = FieldParser()
    parser.set_defaults(bf16=not config.get("use_cpu"), use_peft=False)  # as parse_config does
    default = parser.get_default
    changed = [key for key, value in config.items() if value != default(key) and key not in _DERIVED]
    return [(key, config[key], default(key)) for key in changed]
