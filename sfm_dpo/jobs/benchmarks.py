"""Benchmarks by lm-eval: base and trained model on the same tasks, prompts and few-shot examples, and the difference.

lm-eval is in requirements-eval.txt, so that training does not need it. Generation is greedy, whatever a task says.
"""

import importlib
import json
import math
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoTokenizer
from transformers.utils import ADAPTER_CONFIG_NAME

from sfm_dpo.common.errors import UserError, nearest
from sfm_dpo.common.files import now, write_json
from sfm_dpo.common.statistics import Z, mean_interval
from sfm_dpo.hub.publish import Source, find_source, stage_files
from sfm_dpo.jobs.preferences import evaluate_pairs
from sfm_dpo.report.evaluation import format_evaluation
from sfm_dpo.report.model_card import write_model_card
from sfm_dpo.report.page import write_report
from sfm_dpo.run.folder import read_mapping
from sfm_dpo.run.reader import EVALUATION

GREEDY = {"do_sample": False, "temperature": 0.0}
FEWEST_CHANGED = 6  # samples: below it no sign test gives p < 0.05, however clear the mean looks


@dataclass
class Settings:
    """How lm-eval runs, the same for both models."""

    tasks: list[str]  # names, or paths of YAML files
    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: int = 8
    chat_template: bool = True
    model_args: Sequence[tuple[str, str]] = ()
    vllm: Path | None = None  # a virtual environment with lm-eval and vLLM, which pins a torch of its own


def evaluate_run(path: Path, settings: Settings, pairs: str | None = None) -> str:
    """Evaluates a run or checkpoint, adds the results to its evaluation.json, and returns them as text.

    The report and the model card of a run are written again.

    Raises:
        UserError: nothing to evaluate; lm-eval is missing, or knows no such task; the data cannot be had; no chat
            template; an adapter, where that cannot be evaluated.
    """
    source = find_source(path, publish_anyway=True)
    settings.tasks = settings.tasks or ([] if pairs else source.config.get("eval_tasks") or [])
    if not (settings.tasks or pairs):
        raise UserError(f"{path}: nothing to evaluate; give --tasks or --pairs, or eval_tasks in the recipe")
    tasks = load_tasks(settings.tasks) if settings.tasks and settings.vllm is None else None
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix=".evaluate-", dir=source.run) as folder:
        stage_files(source.folder, Path(folder))  # shards put together, in a form that vLLM reads, too
        if settings.vllm and (Path(folder) / ADAPTER_CONFIG_NAME).is_file():
            raise UserError(f"{path}: is an adapter; merge it into its base model, or evaluate it without --vllm")
        if settings.tasks:
            found["benchmarks"] = evaluate_benchmarks(source, Path(folder), settings, tasks)
        if pairs:
            found["pairs"] = evaluate_pairs(source, Path(folder), pairs, settings.limit)
    keys = {"benchmarks": ("task", "metric", "filter"), "pairs": ("source",)}
    evaluation = read_mapping(source.folder / EVALUATION)
    for part, rows in found.items():
        rows = [*evaluation.get(part, []), *rows]  # a new row takes the place of its earlier one
        evaluation[part] = list({tuple(row[key] for key in keys[part]): row for row in rows}.values())
    write_json(source.folder / EVALUATION, evaluation)
    if source.step is None:
        write_report(source.run)
        write_model_card(source.run)
    return format_evaluation(found)


def evaluate_benchmarks(source: Source, folder: Path, settings: Settings, tasks: Any) -> list[dict[str, Any]]:
    """Rows of `compare_results` for the model in `folder` and its base model, each with how it was made."""
    if settings.chat_template and not AutoTokenizer.from_pretrained(folder).chat_template:
        raise UserError(f"{source.folder}: its tokenizer has no chat template; add --no_chat_template")
    base = {"pretrained": source.config["model_name_or_path"], "tokenizer": str(folder)}
    if revision := source.config.get("model_revision"):
        base["revision"] = revision
    adapter = (folder / ADAPTER_CONFIG_NAME).is_file()
    trained = base | {"peft": str(folder)} if adapter else {"pretrained": str(folder), "tokenizer": str(folder)}
    backend = "vllm" if settings.vllm else "hf"
    before, after = (run_lm_eval(model, settings, tasks, backend) for model in (base, trained))
    facts = {"limit": settings.limit, "chat_template": settings.chat_template, "time": now()}
    facts |= {"backend": backend, "lm_eval": after["lm_eval_version"]}
    return [row | facts for row in compare_results(before, after)]


def load_tasks(names: list[str]) -> Any:
    """lm-eval's TaskManager, once the tasks and their data are there. Raises UserError if not."""
    try:
        importlib.import_module("lm_eval")  # by its name alone: not of requirements.txt
        tasks = importlib.import_module("lm_eval.tasks")
    except ImportError as error:
        raise UserError(f"evaluate.py: lm-eval is missing ({error}); pip install -r requirements-eval.txt") from error
    local = all(Path(name).suffix == ".yaml" for name in names)
    manager = tasks.TaskManager(include_defaults=not local)  # to look through those takes ten seconds
    for name in names:
        try:
            manager.load([name])
        except KeyError as error:
            hint = nearest(name, manager.all_tasks) or "; name a task of `lm-eval ls tasks`, or a .yaml file"
            raise UserError(f"--tasks {name}: lm-eval knows no such task{hint}") from error
        except ImportError as error:  # lm-eval leaves some tasks' packages out
            raise UserError(f"--tasks {name}: {error}; pip install that package, or leave the task out") from error
        except Exception as error:  # of datasets, of the Hub's client, of YAML, of the task's own code
            remedy = "no network? run it once where there is one, with the same HF_HOME"
            raise UserError(f"--tasks {name}: cannot be loaded ({type(error).__name__}: {error}); {remedy}") from error
    return manager


# What the Python of another environment runs: arguments and results are JSON
_EVALUATE = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.utils import handle_non_serializable
with open(sys.argv[2], "w") as file:
    json.dump(simple_evaluate(**json.loads(sys.argv[1])), file, default=handle_non_serializable)
"""


def run_lm_eval(model_args: dict[str, str], settings: Settings, tasks: Any = None, model: str = "hf") -> dict:
    """lm-eval's results with `samples`, here with `tasks` of load_tasks, or in the environment `settings.vllm`.

    Raises:
        UserError: it fails there.
    """
    device, dtype = ("cuda", "auto") if torch.cuda.is_available() or model == "vllm" else ("cpu", "float32")
    extra = {key: yaml.safe_load(value) for key, value in settings.model_args}  # 4 as a number, as vLLM wants it
    arguments = {
        "model": model,
        "model_args": {"dtype": dtype} | model_args | extra,
        "tasks": settings.tasks,
        "num_fewshot": settings.num_fewshot,
        "batch_size": settings.batch_size,
        "device": device,
        "limit": settings.limit,
        "apply_chat_template": settings.chat_template,
        "gen_kwargs": dict(GREEDY),
        "bootstrap_iters": 1000,
    }
    if settings.vllm is None:
        return importlib.import_module("lm_eval").simple_evaluate(**arguments, task_manager=tasks)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [str(settings.vllm / "bin/python"), "-c", _EVALUATE, json.dumps(arguments), str(result)]
        try:
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        except OSError as error:
            raise UserError(f"--vllm {settings.vllm}: no Python there ({error}); name an environment") from error
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise UserError(f"--vllm {settings.vllm}: lm-eval fails there: {reason}")
        return json.loads(result.read_text())


def compare_results(base: dict, trained: dict) -> list[dict[str, Any]]:
    """A row for each task and metric of two results of lm-eval.

    Keys: task, metric, filter, samples, num_fewshot; base and trained: value, stderr (None where unknown); difference
    (trained - base) with its 95% interval low, high (None where unknown, or too few samples changed); paired: whether
    that rests on the difference in each sample, where the metric is their mean, or on two standard errors; verdict.
    """
    rows = []
    for task, after in trained["results"].items():
        for key, value in after.items():
            metric, _, name = key.partition(",")
            if not name or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            values = [result["results"][task] for result in (base, trained)]
            means = [float(scores[key]) for scores in values]
            errors = [scores.get(f"{metric}_stderr,{name}") for scores in values]
            errors = [float(e) if isinstance(e, int | float) else math.nan for e in errors]
            pairs = _pair_samples(base, trained, task, metric, name)
            differences = [after - before for before, after in pairs]
            paired = len(pairs) > 1 and all(
                math.isclose(math.fsum(side) / len(pairs), mean, rel_tol=1e-6, abs_tol=1e-9)
                for side, mean in zip(zip(*pairs, strict=True), means, strict=True)
            )
            difference, half = means[1] - means[0], Z * math.hypot(*errors)
            interval = mean_interval(differences)[1:] if paired else (difference - half, difference + half)
            samples = trained["n-samples"].get(task, {}).get("effective", len(pairs))
            enough = not paired or sum(map(bool, differences)) >= FEWEST_CHANGED
            higher = trained["higher_is_better"].get(task, {}).get(metric)
            known = enough and all(map(math.isfinite, interval))
            rows.append(
                {"task": task, "metric": metric, "filter": name, "samples": samples}
                | {"num_fewshot": trained["n-shot"].get(task)}
                | {
                    side: {"value": mean, "stderr": error if math.isfinite(error) else None}
                    for side, mean, error in zip(("base", "trained"), means, errors, strict=True)
                }
                | dict(zip(("low", "high"), interval if known else (None, None), strict=True))
                | {"difference": difference, "paired": paired}
                | {"verdict": judge(interval if known else (-math.inf, math.inf), higher, samples)}
            )
    return rows


def judge(interval: tuple[float, float], higher_is_better: bool | None, samples: int) -> str:
    """better, worse (higher, lower where the direction is unknown), or that the samples show no difference."""
    low, high = interval
    if not (low > 0 or high < 0):
        return f"no difference that {samples} samples can show"
    words = ("better", "worse") if higher_is_better is not None else ("higher", "lower")
    return words[(low > 0) != (higher_is_better is not False)]


def _pair_samples(base: dict, trained: dict, task: str, metric: str, name: str) -> list[tuple[float, float]]:
    """(base, trained) of each sample that both answered; empty where its value is no number."""

    def read(result: dict) -> dict[Any, float]:
        samples = (result.get("samples") or {}).get(task, [])
        return {
            sample["doc_id"]: float(sample[metric])
            for sample in samples
            if sample.get("filter") == name and isinstance(sample.get(metric), int | float)
        }

    before, after = read(base), read(trained)
    return [(before[sample], after[sample]) for sample in before if sample in after]
