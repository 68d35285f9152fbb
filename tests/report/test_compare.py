"""Comparison of runs: the table, the verdict, what differs, users' mistakes."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from scripts import compare_runs as command
from sfm_dpo.report.compare import compare_runs, read_log
from tests.toolbox import error_line

STEPS = range(1, 11)


def write_state(folder: Path, series: dict[str, list[float]], steps=STEPS) -> Path:
    """A trainer_state.json as any HF Trainer writes it, with its closing summary."""
    log = [{"step": s, "epoch": s / 10, **{k: v[i] for k, v in series.items()}} for i, s in enumerate(steps)]
    log.append({"step": max(steps), "train_runtime": 1.0, "train_loss": 0.5, "total_flos": 1e9})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": max(steps), "log_history": log}))
    return folder


def write_run(folder: Path, series: dict, config=None, data=None, environment=None, steps=STEPS) -> Path:
    write_state(folder, series, steps)
    (folder / "resolved_config.yaml").write_text(yaml.safe_dump({"beta": 5.0, "bf16": False} | (config or {})))
    data = {"train_tokens": "t", "order": ["o"], "reference": {}} | (data or {})
    (folder / "data.json").write_text(json.dumps(data))
    (folder / "environment.json").write_text(json.dumps({"versions": {"torch": "2.13.0"}} | (environment or {})))
    return folder


def compare(*runs: Path, **options) -> dict:
    return compare_runs(*map(read_log, runs), **options)


def healthy(**changed: list[float]) -> dict[str, list[float]]:
    falling = np.linspace(0, 1, len(STEPS))
    series = {
        "loss": (0.6931 - 0.1 * falling).tolist(),
        "rewards/margins": (0.3 * falling).tolist(),
        "logps/chosen": (-300 - 5 * falling).tolist(),
        "logps/rejected": (-400 - 9 * falling).tolist(),
        "grad_norm": (20 + falling).tolist(),
    }
    return series | changed


def test_the_studys_three_rows(tmp_path, capsys):
    """Of two DPO code bases: the same three rows, in the same format, from runs that differ as its runs did."""
    study = {"loss": (1.91e-1, 2.71e-1), "logps/chosen": (-2.42, 7.62e-3), "logps/rejected": (-2.88, 6.99e-3)}
    base = {name: [absolute / relative] * len(STEPS) for name, (absolute, relative) in study.items()}
    gap = {name: (base[name] - absolute * np.linspace(0, 1, 10)).tolist() for name, (absolute, _) in study.items()}
    a = write_state(tmp_path / "a", base)
    b = write_state(tmp_path / "b", gap)
    table = tmp_path / "study.json"
    assert command.main([str(a), str(b), "--json", str(table)]) == 1
    lines = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert ["loss", "1.91e-01", "2.71e-01"] in lines and ["logps/chosen", "2.42e+00", "7.62e-03"] in lines
    assert json.loads(table.read_text())["verdict"] == {"verdict": "diverging", "step": 2, "metric": "loss"}


def test_identical_but_for_fields_without_effect(tmp_path, capsys):
    a = write_run(tmp_path / "a", healthy(), {"output_dir": "a", "logging_steps": 1})
    b = write_run(tmp_path / "b", healthy(), {"output_dir": "b", "logging_steps": 5})
    assert command.main([str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert "configuration" not in out and out.endswith("verdict: identical\n")


@pytest.mark.parametrize("bf16, expected", [(False, "diverging"), (True, "within noise")])
def test_noise_depends_on_the_precision(tmp_path, bf16, expected):
    a = write_run(tmp_path / "a", healthy(), {"bf16": bf16})
    losses = healthy()["loss"]
    b = write_run(tmp_path / "b", healthy(loss=losses[:4] + [loss + 0.01 for loss in losses[4:]]), {"bf16": bf16})
    verdict = compare(a, b)["verdict"]
    assert (verdict["verdict"], verdict["step"]) == (expected, None if bf16 else 5)
    assert compare(a, b, tolerance=0.5)["verdict"]["verdict"] == "within noise"


def test_metrics_near_zero_and_accuracies_do_not_decide(tmp_path):
    a = write_run(tmp_path / "a", healthy() | {"rewards/accuracies": [0.5] * 10, "eval_logits/chosen": [1e-6] * 10})
    noisy = healthy() | {"rewards/margins": [1e-7, *healthy()["rewards/margins"][1:]]}
    noisy |= {"eval_logits/chosen": [-1e-6] * 10}
    b = write_run(tmp_path / "b", noisy | {"rewards/accuracies": [0.5] * 9 + [0.625]})
    assert compare(a, b)["verdict"]["verdict"] == "within noise"


def test_means_over_other_steps_are_not_compared(tmp_path):
    values = [float(i) for i in STEPS]
    fine = write_state(tmp_path / "fine", {"loss": values, "grad_norm": values, "eval_loss": values})
    means = [3.0, 8.0]
    at_the_step = [5.0, 10.0]
    coarse = {"loss": means, "grad_norm": at_the_step, "eval_loss": at_the_step}
    coarse_run = write_state(tmp_path / "coarse", coarse, steps=(5, 10))
    result = compare(fine, coarse_run)
    assert result["verdict"]["verdict"] == "identical" and result["series"].keys() == {"grad_norm", "eval_loss"}
    stopped = {"loss": [3.0, 6.5, 9.0], "grad_norm": [5.0, 7.0, 10.0]}
    cut = write_state(tmp_path / "cut", stopped, steps=(5, 7, 10))  # resumed from a stop at step 7
    result = compare(coarse_run, cut)
    assert result["verdict"]["verdict"] == "identical" and result["series"]["loss"]["steps"] == [5]


def test_our_run_another_trainers_and_a_checkpoint_are_one_form(tmp_path):
    series = healthy()
    ours = write_run(tmp_path / "run", series)
    state = write_state(tmp_path / "hf", series)
    killed = tmp_path / "killed"  # wrote checkpoints only; the newest counts, and 9 is older than 10
    write_state(killed / "checkpoint-9", {k: v[:9] for k, v in series.items()}, steps=range(1, 10))
    write_state(killed / "checkpoint-10", series)
    for other in (state, killed, killed / "checkpoint-10"):
        result = compare(ours, other)
        assert not any(result["differences"].values()), "of facts that both have"
        assert result["verdict"]["verdict"] == "identical" and result["common_steps"] == [1, 10, 10], other


def test_a_killed_run_has_what_it_logged_since_its_checkpoint(tmp_path):
    series = healthy()
    whole = write_run(tmp_path / "whole", series)
    killed = write_run(tmp_path / "killed", {})
    state = json.loads((whole / "trainer_state.json").read_text())
    (killed / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in state["log_history"][:3]))
    with (killed / "log.jsonl").open("ab") as file:
        file.write(b'5\n[1]\n{"loss": 1}\n\xff\n{"step": 4, "lo')
    for newest in (0, 2):  # no checkpoint, and that of step 2
        old = {"global_step": newest, "log_history": state["log_history"][:newest]}
        (killed / "trainer_state.json").write_text(json.dumps(old))
        result = compare(whole, killed)
        assert (result["verdict"]["verdict"], result["common_steps"]) == ("identical", [1, 3, 3])


def test_a_run_diverges_where_a_value_is_not_finite(tmp_path):
    broken = healthy(loss=healthy()["loss"][:3] + [float("nan")] * 7)
    verdict = compare(write_run(tmp_path / "a", healthy()), write_run(tmp_path / "b", broken))["verdict"]
    assert verdict == {"verdict": "diverging", "step": 4, "metric": "loss"}


def test_differing_fields_environment_data_and_cache_are_named(tmp_path, capsys):
    cache = {"key": "k", "packed": "False"}
    none = {"ours": 1, "eval_datasets": "a", "resume_from_checkpoint": None}
    a = write_run(tmp_path / "a", healthy(), {"learning_rate": 1e-6} | none, {"reference": {"train": cache}})
    data = {"reference": {"train": cache | {"packed": "True"}}, "train_tokens": "u"}
    fields = {"learning_rate": 1e-5, "theirs": 2} | {"eval_datasets": "b", "resume_from_checkpoint": "c"}
    b = write_run(tmp_path / "b", healthy(loss=[0.5] * 10), fields, data, {"versions": {"torch": "2.12"}})
    assert command.main([str(a), str(b)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert {
        "configuration: learning_rate  A 1e-06  B 1e-05",
        "configuration: eval_datasets  A a  B b",
        "configuration: resume_from_checkpoint  A None  B c",
        "environment: versions.torch  A 2.13.0  B 2.12",
        "data: train_tokens  A t  B u",
        "reference cache: packed  A False  B True",
    } < set(lines)
    assert lines[-1] == "verdict: diverging from step 1: loss"


@pytest.mark.parametrize(
    "message, series",
    [("0 logged step(s) in common", {"reward": [1.0] * 10}), ("no step was logged", {})],
)
def test_mistakes_are_one_line_and_exit_2(tmp_path, capsys, message, series):
    steps = range(1, 1 + max(map(len, series.values()), default=1))
    runs = [write_run(tmp_path / "a", healthy()), write_state(tmp_path / "b", series, steps)]
    assert command.main([str(run) for run in runs]) == 2
    assert message in error_line(capsys.readouterr().err)
