"""The model card, README.md: results, training, loss, use and how to repeat it, from the files in a run's folder."""

import os
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from sfm_dpo.common.files import format_clock, write_atomically
from sfm_dpo.common.secrets import mask
from sfm_dpo.data.preferences import DROP_REASONS
from sfm_dpo.report.evaluation import evaluation_tables
from sfm_dpo.report.page import FIGURES, changed_fields, format_command, format_yaml, list_held_out, render_page
from sfm_dpo.report.plots import draw_curves
from sfm_dpo.run.folder import read_mapping
from sfm_dpo.run.reader import EVALUATION, list_evaluations, list_restarts, read_run

# With h the log-ratio of chosen (y⁺) over rejected (y⁻), a sum over tokens; /|y| makes means of the sums.
_PER_TOKEN = r"(log π(y⁺|x) - log π_ref(y⁺|x)) / |y⁺| - (log π(y⁻|x) - log π_ref(y⁻|x)) / |y⁻|"
_SUMMED = r"log π(y⁺|x) - log π_ref(y⁺|x) - log π(y⁻|x) + log π_ref(y⁻|x)"
LOSS_FORMULAS = {
    "sigmoid_norm": f"-log σ(β [ {_PER_TOKEN} ])",
    "sigmoid": f"-log σ(β [ {_SUMMED} ])",
    "hinge": f"max(0, 1 - β [ {_SUMMED} ])",
    "ipo": f"( [ {_PER_TOKEN} ] - 1/(2β) )²",
}
_CURVES = {"loss": "Loss", "accuracy": "Reward accuracy", "margin": "Reward margin", "logps": "Log-probabilities"}
# Fields about the machine and the project of this run, which say nothing to somebody who repeats it.
_LOCAL = set("output_dir run_name push_to_hub report_to dataset_num_proc dataloader_num_workers project".split())
_LOCAL_PREFIXES = ("hub_", "trackio_", "logging_")


def write_model_card(
    run: Path,
    *,
    folder: Path | None = None,
    repo: str | None = None,
    revision: str = "main",
    step: int | None = None,
    change: str = "",
) -> None:
    """Writes README.md, and beside it the figures that it shows.

    Args:
        run: the run's folder, from whose files everything is read.
        folder: where to write; by default the run's own, whose figures are then the report's.
        repo: name on the Hub; by default hub_model_id or the folder.
        step: of a checkpoint; metrics after it are left out.
        change: of the weights against the base model's, in words.

    Raises:
        UserError: `run` is no run's folder.
    """
    folder = folder or run
    facts = read_run(run)
    if step is not None:  # the run's own is about the finished model
        facts["log"] = [entry for entry in facts["log"] if entry["step"] <= step]
        facts["evaluation"] = read_mapping(run / f"checkpoint-{step}" / EVALUATION)
    config = facts["config"]
    env = facts["environment"]
    if folder != run:
        starts = [start for start in list_restarts(facts) if step is None or start < step]
        draw_curves(facts["log"], config, starts, folder / FIGURES, panels=_CURVES)
    figures = {f"{FIGURES}/{name}.png": title for name, title in _CURVES.items()}
    repo = repo or config["hub_model_id"] or config["output_dir"]
    is_local = {key for key in config if key in _LOCAL or key.startswith(_LOCAL_PREFIXES)}
    recipe = {key: hide_paths(value) for key, value, _ in changed_fields(config) if key not in is_local}
    text = render_page(
        "model_card.md.jinja",
        **facts,
        metadata=_build_metadata(facts, repo).to_yaml(),
        name=Path(repo).name if step is None else f"{Path(repo).name}, step {step}",
        step=step,
        base=_format_link(config["model_name_or_path"]),
        datasets=[_format_link(name, "datasets/") for name in facts["data"]["sources"]],
        held_out=list_held_out(facts),
        drop_reasons=DROP_REASONS,
        evaluation_tables=evaluation_tables(facts["evaluation"]),
        figures={file: title for file, title in figures.items() if (folder / file).is_file()},
        hardware=f"{env['world_size']} x {env['gpus'][0] if env['gpus'] else 'CPU process'}",
        time=format_clock(facts["seconds"]) if facts["seconds"] else None,
        formula=LOSS_FORMULAS.get(config["loss_type"][0], f"TRL's `{config['loss_type'][0]}`"),
        change=change,
        repo=repo,
        revision="" if revision == "main" else f', revision="{revision}"',
        recipe=format_yaml(recipe).strip(),
        command=format_command([hide_paths(word) for word in env["command"]]),
    )
    write_atomically(folder / "README.md", mask(text) + "\n")


def _build_metadata(facts: dict[str, Any], repo: str) -> ModelCardData:
    config = facts["config"]
    base = config["model_name_or_path"]
    sources = facts["data"]["sources"]
    names = " and ".join(Path(name).name for name in sources)
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=sources[0] if _is_repo(sources[0]) else Path(sources[0]).name,
            dataset_name=f"{facts['data']['eval']} held-out pairs of {names}",
            dataset_split=config["dataset_train_split"],
            metric_type="accuracy",
            metric_name="reward accuracy on held-out pairs",
            metric_value=round(evaluation["eval_rewards/accuracies"], 4),
        )
        for evaluation in list_evaluations(facts)[-1:]
        if "eval_rewards/accuracies" in evaluation
    ]
    results += [
        EvalResult(
            task_type="text-generation",
            dataset_type=row["task"],
            dataset_name=row["task"],
            metric_type=row["metric"],
            metric_name=f"{row['metric']}, {row['num_fewshot'] or 0}-shot, {row['samples']} samples",
            metric_value=round(row["trained"]["value"], 4),
        )
        for row in facts["evaluation"].get("benchmarks", [])
    ]
    return ModelCardData(
        model_name=Path(repo).name if results else None,
        eval_results=results or None,
        base_model=base if _is_repo(base) else None,
        datasets=[name for name in sources if _is_repo(name)] or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["trl", "dpo", "sfm-post-training"],
    )


def hide_paths(value: Any) -> Any:
    """`value` with `path/to/NAME` for each absolute path, which means nothing elsewhere and may name its user."""
    if isinstance(value, str):
        option, equals, word = value.partition("=") if value.startswith("--") else ("", "", value)
        return f"{option}{equals}path/to/{Path(word).name}" if os.path.isabs(word) and len(word) > 1 else value
    return [hide_paths(item) for item in value] if isinstance(value, list) else value


def _is_repo(name: str) -> bool:
    """Whether this is the name of a repository on the Hub, and of no file or folder here."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def _format_link(name: str, prefix: str = "") -> str:
    return f"[{name}](https://huggingface.co/{prefix}{name})" if _is_repo(name) else f"`{Path(name).name}`"
