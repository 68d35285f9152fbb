"""evaluate.py: real lm-eval on tiny models against values computed here; the interval; where results go."""

import json
import math
import shutil
import sys
from pathlib import Path

import evaluate
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_dpo
from sfm_dpo.evaluation.lm_eval import compare_results
from sfm_dpo.run.folder import RESOLVED_CONFIG, read_file
from tests.oracle import response_logps
from tests.toolbox import edit, write_jsonl, write_task


def make_result(values: np.ndarray, mean: float) -> dict:
    samples = [{"doc_id": i, "filter": "none", "acc": value} for i, value in enumerate(values.tolist())]
    return {
        "results": {"t": {"alias": "t", "sample_len": len(values), "acc,none": mean, "acc_stderr,none": 0.1}},
        "samples": {"t": samples},
        "n-shot": {"t": 0},
    }


def test_a_group_has_the_samples_of_its_tasks():
    result = make_result(np.zeros(7), 0.0)
    result["results"]["group"] = result["results"]["t"] | {"sample_len": 14}  # as lm-eval does; it has no samples
    assert [(row["task"], row["samples"]) for row in compare_results(result, result)] == [("t", 7), ("group", 14)]


def test_the_interval_is_that_of_the_differences():
    generator = np.random.default_rng(0)
    before = generator.normal(size=200)
    after = before + generator.normal(0.05, 0.1, size=200)  # a small gain, far below the spread of the samples
    mean = (after - before).mean()
    half = 1.959964 * (after - before).std(ddof=1) / math.sqrt(200)
    (row,) = compare_results(make_result(before, before.mean()), make_result(after, after.mean()))
    expected = {"samples": 200, "difference": mean, "low": mean - half, "high": mean + half}
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert row["base"] == {"value": pytest.approx(before.mean()), "stderr": 0.1}
    (row,) = compare_results(make_result(before, 0.1), make_result(after, 0.9))  # a metric that is no mean, such as F1
    assert (row["difference"], row["low"], row["high"]) == (pytest.approx(0.8), None, None)


@pytest.fixture
def tasks(tmp_path, monkeypatch) -> list[str]:
    """A multiple-choice and a generation task over one local file; the second asks for sampling, which is not done."""
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", str)  # lm-eval asks for it, and it starts pip
    rows = [{"question": f"{i} + {i}?", "choices": [str(2 * i), "I forgot it.", f"{i}!"]} for i in range(9)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    answer = {"output_type": "generate_until", "doc_to_target": "{{choices[0]}}", "doc_to_choice": None}
    answer["generation_kwargs"] = {"until": ["\n\n"], "max_gen_toks": 4, "do_sample": True, "temperature": 2.0}
    choice = write_task(tmp_path / "local_choice.yaml", path)
    return [choice, write_task(tmp_path / "local_answer.yaml", path, metric="exact_match", **answer)]


def score(folder: str | Path) -> list[float]:
    """1 where the first choice is the likeliest continuation of the rendered chat, by a plain forward."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    hits = []
    for i in range(9):
        chat = [{"role": "user", "content": f"{i} + {i}?"}]
        prompt = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)).input_ids
        sums = []
        for choice in (str(2 * i), "I forgot it.", f"{i}!"):
            sums.append(response_logps(model, prompt, tokenizer(choice).input_ids).sum().item())
        hits.append(float(np.argmax(sums) == 0))
    return hits


@pytest.mark.slow
def test_evaluation_of_a_run(run, tasks):
    assert evaluate.main([str(run), "--tasks", *tasks]) == 0
    evaluation = json.loads((run / "evaluation.json").read_text())
    choice, answer = evaluation["benchmarks"]
    base = score(read_file(run / RESOLVED_CONFIG)["model_name_or_path"])
    trained = score(run)
    assert (choice["base"]["value"], choice["trained"]["value"]) == (np.mean(base), np.mean(trained))
    assert choice["base"]["stderr"] == pytest.approx(np.std(base, ddof=1) / 3)
    assert choice["difference"] == pytest.approx(np.mean(trained) - np.mean(base))
    facts = [answer[name] for name in ("metric", "samples", "num_fewshot", "chat_template")]
    assert facts == ["exact_match", 9, 0, True]
    assert "local_choice" in (run / "report.html").read_text()
    assert "| local_choice | acc | 9 |" in (run / "README.md").read_text()

    assert evaluate.main([str(run / "checkpoint-4"), "--tasks", tasks[0], "--limit", "3", "--no_chat_template"]) == 0
    (row,) = json.loads((run / "checkpoint-4" / "evaluation.json").read_text())["benchmarks"]
    assert (row["samples"], row["limit"], row["chat_template"]) == (3, 3, False)
    assert json.loads((run / "evaluation.json").read_text()) == evaluation  # the run's own is as it was
    (run / "evaluations").mkdir()
    out = run / "evaluations/step-4.json"
    assert evaluate.main([str(run / "checkpoint-4"), "--tasks", tasks[0], "--out", str(out)]) == 0
    hits = score(run / "checkpoint-4")
    error = pytest.approx(np.std(hits, ddof=1) / 3)
    assert json.loads(out.read_text()) == {"local_choice/acc": {"value": np.mean(hits), "stderr": error}}
    assert evaluate.main([str(run)]) == 0  # collects it
    assert json.loads((run / "evaluation.json").read_text())["checkpoints"]["4"] == json.loads(out.read_text())
    assert "<th>local_choice/acc</th>" in (run / "report.html").read_text()


def test_lm_eval_or_the_chat_template_is_missing(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    assert evaluate.main([str(run), "--tasks", "x"]) == 2
    assert "lm-eval is missing" in (error := capsys.readouterr().err) and "requirements-eval.txt" in error
    (run / "chat_template.jinja").unlink()
    assert evaluate.main([str(run), "--tasks", "x"]) == 2
    assert "; add --no_chat_template\n" in capsys.readouterr().err


@pytest.mark.slow
def test_an_adapter_is_evaluated_as_what_it_makes_of_the_base_model(finished_run, tasks, tmp_path, no_report, capsys):
    recipe = ["--config", str(finished_run / "resolved_config.yaml"), "--max_steps", "2", "--learning_rate", "1e-2"]
    adapter = tmp_path / "adapter"
    merged = tmp_path / "merged"
    assert train_dpo.main([*recipe, "--use_peft", "true", "--output_dir", str(adapter)]) == 0
    base = AutoModelForCausalLM.from_pretrained(read_file(adapter / RESOLVED_CONFIG)["model_name_or_path"])
    shutil.copytree(adapter, merged, ignore=shutil.ignore_patterns("adapter_*", "checkpoint-*", "complete.json"))
    PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(merged)
    benchmarks = []
    for run in (adapter, merged):
        assert evaluate.main([str(run), "--tasks", tasks[0], "--limit", "4"]) == 0
        found = json.loads((run / "evaluation.json").read_text())
        benchmarks.append([found["benchmarks"][0][side] for side in ("base", "trained")])
    assert benchmarks[0] == benchmarks[1]

    second = tmp_path / "second"
    fields = ["--model_name_or_path", str(adapter), "--output_dir", str(second)]
    assert train_dpo.main([*recipe, *fields]) == 0
    assert evaluate.main([str(second), "--tasks", tasks[0], "--limit", "4"]) == 0
    found = json.loads((second / "evaluation.json").read_text())
    assert found["benchmarks"][0]["base"] == benchmarks[0][1], "of a run that started from the adapter"

    third = Path(shutil.copytree(adapter, tmp_path / "third"))
    edit(third / RESOLVED_CONFIG, model_name_or_path=str(adapter))
    assert evaluate.main([str(third), "--tasks", tasks[0]]) == 2
    assert "; merge both (scripts/merge.py), and run lm_eval on the merged model\n" in capsys.readouterr().err
