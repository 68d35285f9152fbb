"""Benchmarks by lm-eval: base and trained model on the same tasks, prompts and few-shot examples, and the difference.

lm-eval is in requirements-eval.txt, so that training does not need it. Generation is greedy, whatever a task says.
"""

import importlib
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers.utils import ADAPTER_CONFIG_NAME

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import now, write_json
from sfm_dpo.common.statistics import mean_interval
from sfm_dpo.hub.publish import Source, find_source, stage_files
from sfm_dpo.jobs.preferences import evaluate_pairs
from sfm_dpo.report.model_card import write_model_card
from sfm_dpo.report.page import format_evaluation, write_report
from sfm_dpo.run.folder import read_mapping
from sfm_dpo.run.reader import EVALUATION

GREEDY = {"do_sample": False, "temperature": 0.0}
FEWEST_CHANGED = 6  # samples: with fewer no sign test gives p < 0.05, however clear the mean looks
ROW_NAME = {"benchmarks": "task", "pairs": "source"}


@dataclass
class Settings:
    """How lm-eval runs, the same for both models."""

    tasks: list[str]  # names, or paths of YAML files
    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: int = 8
    chat_template: bool = True
    model_args: str = ""  # as lm-eval takes them: KEY=VALUE,KEY=VALUE


def evaluate_run(path: Path, settings: Settings, pairs: str | None = None) -> str:
    """Evaluates a run or checkpoint, adds the results to its evaluation.json, and returns them as text.

    The report and the model card of a run are written again.

    Raises:
        UserError: nothing to evaluate; lm-eval is missing, or cannot load a task; the data cannot be had.
    """
    source = find_source(path, publish_anyway=True)
    if not pairs:
        settings.tasks = settings.tasks or source.config.get("eval_tasks") or []
        if not settings.tasks:
            raise UserError(f"{path}: nothing to evaluate; give --tasks or --pairs, or eval_tasks in the recipe")
    tasks = load_tasks(settings.tasks) if settings.tasks else None
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix=".evaluate-", dir=source.run) as folder:
        model = Path(folder)
        stage_files(source.folder, model)  # shards put together
        if settings.tasks:
            found["benchmarks"] = evaluate_benchmarks(source, model, settings, tasks)
        if pairs:
            found["pairs"] = [evaluate_pairs(source, model, pairs, settings.limit)]
    evaluation = read_mapping(source.folder / EVALUATION)
    for part, rows in found.items():  # a new row replaces those of the same task or set
        new = {row[ROW_NAME[part]] for row in rows}
        kept = [row for row in evaluation.get(part, []) if row[ROW_NAME[part]] not in new]
        evaluation[part] = kept + rows
    write_json(source.folder / EVALUATION, evaluation)
    if source.step is None:
        write_report(source.run)
        write_model_card(source.run)
    return format_evaluation(found)


def evaluate_benchmarks(source: Source, folder: Path, settings: Settings, tasks: Any) -> list[dict[str, Any]]:
    """Rows of `compare_results` for the model in `folder` and its base model, each with how it was made."""
    base = {"pretrained": source.config["model_name_or_path"], "tokenizer": str(folder)}
    if revision := source.config.get("model_revision"):
        base["revision"] = revision
    if (folder / ADAPTER_CONFIG_NAME).is_file():
        trained = base | {"peft": str(folder)}
    else:
        trained = {"pretrained": str(folder), "tokenizer": str(folder)}
    before = run_lm_eval(base, settings, tasks)
    after = run_lm_eval(trained, settings, tasks)
    facts = {"limit": settings.limit, "chat_template": settings.chat_template, "time": now()}
    facts["lm_eval"] = after["lm_eval_version"]
    return [row | facts for row in compare_results(before, after)]


def load_tasks(names: list[str]) -> Any:
    """lm-eval's TaskManager, once the tasks and their data are there. Raises UserError if not."""
    try:
        tasks = importlib.import_module("lm_eval.tasks")  # by its name alone: not of requirements.txt
    except ImportError as error:
        raise UserError(f"evaluate.py: lm-eval is missing ({error}); pip install -r requirements-eval.txt") from error
    local = all(Path(name).suffix == ".yaml" for name in names)
    manager = tasks.TaskManager(include_defaults=not local)  # to look through those takes ten seconds
    for name in names:
        try:
            manager.load([name])
        except Exception as error:  # of datasets, of the Hub's client, of YAML, of the task's own code and packages
            remedy = "`lm_eval ls tasks` lists the known ones; without a network it must be in HF_HOME"
            raise UserError(f"--tasks {name}: cannot be loaded ({type(error).__name__}: {error}); {remedy}") from error
    return manager


def run_lm_eval(model_args: dict[str, str], settings: Settings, tasks: Any) -> dict:
    """lm-eval's results with `samples`; `tasks` are of load_tasks."""
    lm_eval = importlib.import_module("lm_eval")
    on_gpu = torch.cuda.is_available()
    more = lm_eval.utils.simple_parse_args_string(settings.model_args)
    return lm_eval.simple_evaluate(
        model="hf",
        model_args={"dtype": "auto" if on_gpu else "float32"} | model_args | more,
        tasks=settings.tasks,
        task_manager=tasks,
        num_fewshot=settings.num_fewshot,
        batch_size=settings.batch_size,
        device="cuda" if on_gpu else "cpu",
        limit=settings.limit,
        apply_chat_template=settings.chat_template,
        gen_kwargs=dict(GREEDY),
        bootstrap_iters=1000,
    )


def compare_results(base: dict, trained: dict) -> list[dict[str, Any]]:
    """A row for each task and metric of two results of lm-eval.

    Keys: task, metric, filter, samples, num_fewshot; base and trained: value, stderr (None where unknown); difference
    with its 95% interval low, high, from the difference in each sample (None where it is not their mean, or too few
    changed); verdict.
    """
    rows = []
    for task, scores in trained["results"].items():
        for key in scores:
            metric, _, name = key.partition(",")
            if not name or metric.endswith("_stderr") or not isinstance(scores[key], int | float):
                continue
            before = _read_score(base["results"][task], metric, name)
            after = _read_score(scores, metric, name)
            difference = after["value"] - before["value"]
            of_base = _read_samples(base, task, metric, name)
            of_trained = _read_samples(trained, task, metric, name)
            differences = [value - of_base[sample] for sample, value in of_trained.items()]
            samples = trained["n-samples"].get(task, {}).get("effective", len(differences))
            low, high, verdict = None, None, f"no difference that {samples} samples can show"
            is_mean = differences and math.isclose(fmean(differences), difference, rel_tol=1e-6, abs_tol=1e-9)
            if is_mean and sum(map(bool, differences)) >= FEWEST_CHANGED:
                _, low, high = mean_interval(differences)
                higher_is_better = trained["higher_is_better"].get(task, {}).get(metric) is not False
                if low > 0 or high < 0:
                    verdict = "better" if (low > 0) == higher_is_better else "worse"
            row = {"task": task, "metric": metric, "filter": name, "samples": samples, "verdict": verdict}
            row |= {"base": before, "trained": after, "difference": difference, "low": low, "high": high}
            rows.append(row | {"num_fewshot": trained["n-shot"].get(task)})
    return rows


def _read_score(scores: dict, metric: str, name: str) -> dict[str, Any]:
    error = scores.get(f"{metric}_stderr,{name}")  # "N/A" where there is none
    known = isinstance(error, int | float) and math.isfinite(error)
    return {"value": float(scores[f"{metric},{name}"]), "stderr": error if known else None}


def _read_samples(result: dict, task: str, metric: str, name: str) -> dict[Any, float]:
    """The value of each sample; none where it is no number."""
    values = {}
    for sample in result["samples"].get(task, []):
        if sample["filter"] == name and isinstance(sample.get(metric), int | float):
            values[sample["doc_id"]] = float(sample[metric])
    return values
