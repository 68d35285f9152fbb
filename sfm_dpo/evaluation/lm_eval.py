"""Evaluation of a trained model and its base by benchmarks of lm-eval."""

import importlib
import logging
import math
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from sfm_dpo.common.errors import UserError, user_input
from sfm_dpo.common.files import format_table, now, write_json
from sfm_dpo.common.statistics import mean_interval
from sfm_dpo.model.attention import disable_cudnn_attention
from sfm_dpo.model.loading import find_adapter, find_base, read_adapter
from sfm_dpo.report.model_card import write_model_card
from sfm_dpo.report.page import evaluation_tables, write_report
from sfm_dpo.run.folder import EVALUATION, EVALUATIONS
from sfm_dpo.run.reader import read_run, read_scores, to_float
from sfm_dpo.run.saved_model import SavedModel, find_model

log = logging.getLogger(__name__)


def evaluate_run(path: Path, tasks: list[str], out: Path | None, **options: Any) -> str:
    """Adds the results to evaluation.json and, with those of eval_command, to the report and model card. The trained
    model's benchmarks are also written to `out`; a checkpoint's go only there, without the base model, whose results
    would be the same each time.

    `tasks`: names, or paths of YAML files; `options`: of lm_eval.simple_evaluate. Returns the results as text.
    """
    model = find_model(path)
    results = [] if tasks else [read_scores(file) for file in (path / EVALUATIONS).glob("step-*.json")]
    if not tasks and (out or not results):
        raise UserError(f"{path}: nothing to evaluate; give --tasks")
    if not (out and model.step) and not os.access(model.folder, os.W_OK):
        raise UserError(f"{model.folder}: cannot be written, so the results would be lost; evaluate a copy of it")
    rows: list[dict[str, Any]] = []
    if tasks:
        if options["apply_chat_template"] and not AutoTokenizer.from_pretrained(model.folder).chat_template:
            raise UserError(f"{model.folder}: its tokenizer has no chat template; add --no_chat_template")
        options |= {"tasks": tasks, "task_manager": load_tasks(tasks)}
        rows = evaluate_benchmarks(model, options, with_base=not (out and model.step))
    if out:
        names = [f"{row['task']}/{row['metric']},{row['filter']}".removesuffix(",none") for row in rows]
        scores = [row["trained"] for row in rows]
        write_json(out, dict(zip(names, scores, strict=True)))
        if model.step:
            return out.read_text()
    evaluation = read_run(model.folder)["evaluation"]
    new = {row["task"] for row in rows}  # their earlier rows are replaced
    evaluation["benchmarks"] = [row for row in evaluation.get("benchmarks", []) if row["task"] not in new] + rows
    write_json(model.folder / EVALUATION, evaluation)
    if model.step is None:
        write_report(model.run)
        write_model_card(model.run)
    tables = evaluation_tables({"benchmarks": rows} if rows else evaluation)
    return "\n\n".join(format_table(table, headings, "llrrrl") for headings, table in tables)


def load_tasks(names: list[str]) -> Any:
    """lm-eval's TaskManager, after the tasks and their data have been loaded. Raises UserError if that fails."""
    try:
        tasks = importlib.import_module("lm_eval.tasks")  # imported by name: not in requirements.txt
    except ImportError as error:
        raise UserError(f"evaluate.py: lm-eval is missing ({error}); pip install -r requirements-eval.txt") from error
    is_local = all(name.endswith(".yaml") for name in names)
    manager = tasks.TaskManager(include_defaults=not is_local)  # scanning the defaults takes ten seconds
    for name in names:
        remedy = "`lm_eval ls tasks` lists all tasks; without a network, the task's data must be in HF_HOME"
        with user_input(f"--tasks {name}: cannot be loaded", remedy):
            manager.load([name])
    return manager


def evaluate_benchmarks(model: SavedModel, options: dict[str, Any], with_base: bool) -> list[dict[str, Any]]:
    """Rows of `compare_results` for the model and its base model (or itself), with the settings used."""
    folder = str(model.folder)
    adapter_field = "lora_local_path" if options["backend"] == "vllm" else "peft"
    name, revision = find_base(model.base, model.base_revision)
    base = {"pretrained": name, "tokenizer": folder}
    if revision:
        base["revision"] = revision
    if adapter := read_adapter(model.base, model.base_revision):
        if model.is_adapter or adapter["base_model_name_or_path"] != name:
            what = f"{folder}: is built on two LoRA adapters, of which lm-eval loads one"
            raise UserError(f"{what}; merge both (scripts/merge.py), and run lm_eval on the merged model")
        base[adapter_field] = str(find_adapter(model.base, model.base_revision))
    trained = {"pretrained": folder, "tokenizer": folder}
    if model.is_adapter:
        trained = base | {adapter_field: folder}
    after = run_lm_eval(trained, **options)
    before = run_lm_eval(base, **options) if with_base else after
    facts = {"limit": options["limit"], "chat_template": options["apply_chat_template"], "time": now()}
    return [row | facts | {"lm_eval": after["lm_eval_version"]} for row in compare_results(before, after)]


def run_lm_eval(model: dict[str, str], model_args: str, backend: str, **options: Any) -> dict:
    """lm-eval's results with `samples`. `model`, `model_args` (KEY=VALUE,...): arguments of its model `backend`."""
    lm_eval = importlib.import_module("lm_eval")
    disable_cudnn_attention()
    on_gpu = torch.cuda.is_available()
    given = lm_eval.utils.simple_parse_args_string(model_args)
    return lm_eval.simple_evaluate(
        model=backend,
        model_args={"dtype": "auto" if on_gpu else "float32"} | model | given,
        device="cuda" if on_gpu else "cpu",
        gen_kwargs={"do_sample": False, "temperature": 0.0},  # greedy, whatever a task says
        bootstrap_iters=1000,
        **options,
    )


def compare_results(base: dict, trained: dict) -> list[dict[str, Any]]:
    """A row for each task and metric; `low` to `high`: 95% interval of the difference, None if it is not a mean."""
    rows = []
    for task, scores in trained["results"].items():
        for key in scores:
            metric, _, name = key.partition(",")
            if not name or metric.endswith("_stderr") or not isinstance(scores[key], int | float):
                continue
            before = _read_score(base["results"][task], metric, name)
            after = _read_score(scores, metric, name)
            of_base = _read_samples(base, task, metric, name)
            of_trained = _read_samples(trained, task, metric, name)
            differences = [value - of_base[sample] for sample, value in of_trained.items()]
            row = {"task": task, "metric": metric, "filter": name, "samples": scores["sample_len"]}
            row |= {"base": before, "trained": after, "difference": after["value"] - before["value"]}
            row |= {"low": None, "high": None, "num_fewshot": trained["n-shot"].get(task)}
            mean, low, high = mean_interval(differences)
            if len(differences) > 1 and math.isclose(mean, row["difference"], rel_tol=1e-6, abs_tol=1e-9):
                row |= {"low": low, "high": high}
            rows.append(row)
    return rows


def _read_score(scores: dict, metric: str, name: str) -> dict[str, Any]:
    error = to_float(scores.get(f"{metric}_stderr,{name}"))  # "N/A" if lm-eval has none
    return {"value": float(scores[f"{metric},{name}"]), "stderr": error if math.isfinite(error) else None}


def _read_samples(result: dict, task: str, metric: str, name: str) -> dict[Any, float]:
    samples = [sample for sample in result["samples"].get(task, []) if sample["filter"] == name]
    return {s["doc_id"]: float(s[metric]) for s in samples if isinstance(s.get(metric), int | float)}
