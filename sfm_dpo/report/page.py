"""What happened? report.html, figures/*.png and the closing lines of a run, from the files in its folder alone.

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
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from sfm_dpo.common.cli import Arguments
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import write_atomically
from sfm_dpo.common.statistics import wilson
from sfm_dpo.config import DATACLASSES
from sfm_dpo.data.preferences import DROP_REASONS
from sfm_dpo.health.generation import repeated_4grams
from sfm_dpo.report.plots import draw_curves
from sfm_dpo.run.reader import first_and_last, list_evaluations, list_restarts, read_run, to_float

REPORT, FIGURES = "report.html", "figures"
STATES = {  # state of status.json: (class in the page, in plain words)
    "done": ("good", "The run is done."),
    "running": ("open", "The run is going on, or was killed without a last word: status.json says running."),
    "stopped": ("open", "The run was stopped on request; the same command goes on from its newest checkpoint."),
    "refused": ("bad", "The preflight refused to train."),
    "collapsed": ("bad", "The guard stopped the run."),
    "failed": ("bad", "The run failed."),
    "push_failed": ("open", "The model is trained and saved, but was not pushed to the Hub."),
}
# Set by parse_config and TRL from other fields and the machine: their default is never what a run shows.
_DERIVED = {
    "accelerator_config",
    "activation_checkpointing",
    "bf16",
    "debug",
    "disable_tqdm",
    "do_eval",
    "gradient_accumulation_steps",
    "pad_to_multiple_of",
    "report_to",
}
_HELD_OUT = {  # rows of the table of held-out figures; a share gets a confidence interval
    "rewards/accuracies": "reward accuracy: share of pairs whose chosen answer gained more than the rejected one",
    "logps/accuracies": "share of pairs whose chosen answer is the more probable one",
    "rewards/margins": "reward margin",
    "loss": "loss",
}


def render_page(template: str, **values: Any) -> str:
    """A page of templates/ as HTML; a name that `values` lacks is an error."""
    folder = FileSystemLoader(Path(__file__).with_name("templates"))
    pages = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return pages.get_template(template).render(values)


def write_report(run: Path) -> Path:
    """Writes report.html and figures/*.png into the folder of a run and returns the page's path.

    The page is self-contained (curves as inline SVG, no script, nothing loaded) and fits light, dark, narrow, wide.

    Raises:
        UserError: `run` is no run's folder.
    """
    run = Path(run)
    facts = read_run(run)
    found = facts["health"].get("findings", [])
    alarms = tuple((f["began"], f["signal"]) for f in found if isinstance(f, dict) and {"began", "signal"} <= f.keys())
    curves = draw_curves(facts["log"], facts["config"], list_restarts(facts), run / FIGURES, alarms)
    page = render_page(
        "report.html.jinja",
        **facts,
        name=run.resolve().name,
        state=facts["status"].get("state", "unknown"),
        state_class=STATES.get(facts["status"].get("state"), ("open",))[0],
        sentences=sentences(facts),
        held_out=held_out(facts),
        curves=curves,
        restarts=list_restarts(facts),
        answers=compare_answers(facts["samples"]),
        drop_reasons=DROP_REASONS,
        changed=changed_fields(facts["config"]),
        config_text=yaml.safe_dump(facts["config"], sort_keys=False, allow_unicode=True),
        command=shell_command(facts["environment"].get("command", [])),
    )
    write_atomically(run / REPORT, page)
    return run / REPORT


def summary(run: Path) -> str:
    """The closing lines for the terminal: how it ended, held-out accuracy, loss, where everything is."""
    run = Path(run)
    facts = read_run(run)
    status = facts["status"]
    took = f" in {duration(facts['seconds'])}" if facts["seconds"] else ""
    lines = [("run", f"{status.get('state', 'unknown')}, {facts['steps']:,} steps{took}")]
    if status.get("message"):
        lines.append(("message", status["message"]))
    rows = {row["metric"]: row for row in held_out(facts)}
    if accuracy := rows.get("rewards/accuracies"):
        pairs = f"{facts['data'].get('eval', 0):,} pairs, 95% interval in brackets"
        lines.append(("held out", f"reward accuracy {accuracy['before']} -> {accuracy['after']}; {pairs}"))
    losses = [f"training {first:.3f} -> {last:.3f}" for first, last in [first_and_last(facts["log"], "loss")] if first]
    if "loss" in rows:
        losses.append(f"held out {rows['loss']['before']} -> {rows['loss']['after']}")
    if losses:
        lines.append(("loss", ", ".join(losses)))
    if answers := compare_answers(facts["samples"]):
        name, before, after = answers["drift"][0]
        lines.append(("answers", f"{name} {before} -> {after}"))
    if any(run.glob("*.safetensors")):
        lines.append(("model", str(run)))
    elif facts["checkpoints"]:
        lines.append(("checkpoint", str(run / facts["checkpoints"][-1])))
    if (run / REPORT).is_file():
        lines.append(("report", str(run / REPORT)))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in lines)


def sentences(facts: dict[str, Any]) -> list[str]:
    """The summary in plain words. Every judgement states the figure it rests on."""
    status, config, data, log = facts["status"], facts["config"], facts["data"], facts["log"]
    state = status.get("state")
    said = [STATES[state][1] if state in STATES else f"status.json gives no known state ({state})."]
    if status.get("message"):
        said.append(f"Message: {status['message']}")
    if config:
        what = f"{config.get('model_name_or_path')}, trained with DPO ({' + '.join(config.get('loss_type') or ['?'])}"
        what += f", beta {config.get('beta')}, learning rate {config.get('learning_rate')}"
        if data:
            what += f") on {data.get('train', 0):,} preference pairs of {' and '.join(data.get('sources', []))}"
        else:
            what += f") on {config.get('dataset_name')}"
        took = f", {duration(facts['seconds'])}" if facts["seconds"] else ""
        took += " since the last start" if took and list_restarts(facts) else ""
        said.append(f"{what}: {facts['steps']:,} optimizer steps{took}.")
    if not log:
        said.append("No training step was logged.")
    elif log[-1]["step"] < facts["steps"]:
        said.append(
            f"The log that was saved ends at step {log[-1]['step']:,}; the run had reached {facts['steps']:,}."
        )
    first, last = first_and_last(log, "loss")
    if first is not None:
        said.append(f"Training loss {first:.3f} at the start, {last:.3f} at the end (mean of the last tenth).")
    said += _held_out_sentences(facts, last)
    for name in ("loss", "grad_norm"):
        steps = [entry["step"] for entry in log if not math.isfinite(to_float(entry.get(name, 0.0)))]
        if steps:
            said.append(
                f"Warning: {name} was not a finite number in {len(steps)} log entries, first at step {steps[0]}."
            )
    return said


def _held_out_sentences(facts: dict[str, Any], train_loss: float | None) -> list[str]:
    evals, pairs = list_evaluations(facts["log"]), facts["data"].get("eval", 0)
    if not evals or not pairs or evals[-1]["step"] == 0:
        nothing = "Nothing was held out: training figures alone cannot tell learning from memorising."
        return [] if pairs else [nothing]
    share = evals[-1].get("eval_rewards/accuracies", math.nan)
    low, high = wilson(share, pairs)
    said = []
    if math.isfinite(share):
        verdict = "not distinguishable from chance, 50%"
        if low > 0.5 or high < 0.5:
            verdict = "better than chance, 50%" if low > 0.5 else "worse than chance, 50%"
        said.append(
            f"Of {pairs:,} held-out pairs it gets {share:.0%} right (95% interval {low:.0%} to {high:.0%}): {verdict}."
        )
    before, after = evals[0].get("eval_loss", math.nan), evals[-1].get("eval_loss", math.nan)
    if train_loss is not None and after > before + 0.01 and train_loss < before - 0.05:  # beyond the noise of both
        said.append(
            f"Held-out loss rose from {before:.3f} to {after:.3f} while training loss fell to {train_loss:.3f}: it "
            "memorised its pairs. Fewer epochs, a lower learning rate or more pairs help."
        )
    return said


def held_out(facts: dict[str, Any]) -> list[dict[str, str]]:
    """First and last held-out value of each metric of `_HELD_OUT` as text, shares with their 95% interval."""
    evals, pairs = list_evaluations(facts["log"]), facts["data"].get("eval", 0)
    rows = []
    for metric, text in _HELD_OUT.items():
        key = f"eval_{metric}"
        values = [(entry["step"], to_float(entry[key])) for entry in evals if key in entry]
        if values:
            (step, before), (_, after) = values[0], values[-1]
            tied = metric == "rewards/accuracies" and step == 0  # policy = reference: no answer has gained
            rows.append(
                {
                    "metric": metric,
                    "text": text,
                    "before": "0.50, all ties" if tied else _figure(metric, before, pairs),
                    "after": _figure(metric, after, pairs),
                }
            )
    return rows


def _figure(metric: str, value: float, pairs: int) -> str:
    if not metric.endswith("accuracies") or not math.isfinite(value) or not pairs:
        return f"{value:.3f}"
    low, high = wilson(value, pairs)
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


def compare_answers(samples: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Answers side by side, and how length and repetition drifted; None where nothing was generated."""
    samples = [s for s in samples if isinstance(s, dict) and {"prompt", "before", "after"} <= s.keys()]
    if not samples:
        return None
    sides = ("before", "after")
    lengths = [[s[f"{side}_tokens"] for s in samples if f"{side}_tokens" in s] for side in sides]
    drift = []
    if all(lengths):
        drift.append(("answer length, mean tokens", *(f"{sum(n) / len(n):.0f}" for n in lengths)))
    drift.append(
        ("repeated 4-grams of words", *(f"{repeated_4grams([s[side] for s in samples]):.1%}" for side in sides))
    )
    drift.append(("empty answers", *(str(sum(not s[side].strip() for s in samples)) for side in sides)))
    return {"samples": samples, "drift": drift}


def changed_fields(config: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(field, value, default) of the fields that differ from the defaults."""
    defaults: dict[str, Any] = {}
    for cls in DATACLASSES:
        for f in dataclasses.fields(cls):
            defaults[f.name] = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
    changed = [key for key, value in config.items() if value != defaults.get(key) and key not in _DERIVED]
    return [(key, config[key], defaults.get(key)) for key in changed]


def shell_command(command: list[str]) -> str:
    """The command line as one types it, an option a line."""
    words = [shlex.quote(str(word)) for word in command]
    return "".join(f" \\\n  {word}" if word.startswith("--") else f" {word}" for word in words).strip()


def duration(seconds: float) -> str:
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
        print(summary(run))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
