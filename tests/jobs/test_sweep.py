"""Sweeps: the runs of a grid, what is submitted, and the table, on copies of a real run whose metrics are set."""

import json
import os
import re
import shlex
import shutil
import statistics
from datetime import date
from pathlib import Path

import pytest
import status
import sweep
import yaml

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import write_json
from sfm_dpo.common.process import this_process
from sfm_dpo.config import parse_config
from sfm_dpo.jobs.sweep import MEMBERS, format_sweep, list_members, plan_sweep, read_grid
from sfm_dpo.run.folder import write_status
from sfm_dpo.run.lock import LOCK

RATES = {"learning_rate": ["1e-6", 1.0e-5]}


@pytest.fixture
def grid(finished_run, tmp_path):
    """A function: keys of a grid file -> the file; its recipe is that of `finished_run`."""
    shutil.copy(finished_run / "resolved_config.yaml", tmp_path / "recipe.yaml")

    def write(**keys) -> Path:
        content = {"recipe": str(tmp_path / "recipe.yaml"), "output_dir": str(tmp_path / "sweep"), "fields": RATES}
        content = {key: value for key, value in (content | keys).items() if value is not None}
        (tmp_path / "grid.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        return tmp_path / "grid.yaml"

    return write


@pytest.fixture
def train(finished_run):
    """A function: (grid file, values by run) -> each run with a value: `finished_run` with this last eval_loss."""

    def copy(path: Path, values: list[float | None]) -> None:
        for folder, value in zip(list_members(read_grid(path)), values, strict=False):
            if value is None:
                continue
            shutil.copytree(finished_run, folder, ignore=shutil.ignore_patterns("*.safetensors", "checkpoint-*"))
            state = json.loads((folder / "trainer_state.json").read_text())
            state["log_history"].append({"step": 6, "eval_loss": value})
            (folder / "trainer_state.json").write_text(json.dumps(state))

    return copy


def test_runs_are_the_product_and_are_named_by_their_values(grid, tmp_path):
    fields = RATES | {"loss_type": ["sigmoid_norm", ["sigmoid_norm", "sft"]], "padding_free": [True]}
    fields |= {"run_name": [date(2026, 1, 31)], "max_samples": [None]}
    members = list_members(read_grid(grid(fields=fields)))
    assert [folder.name for folder in members] == [
        f"learning_rate={rate},loss_type={loss},padding_free=true,run_name=2026-01-31,max_samples="
        for rate in ("1e-6", "1e-05")
        for loss in ("sigmoid-norm", "sigmoid-norm-sft")
    ]
    line = plan_sweep(read_grid(tmp_path / "grid.yaml"))[0][1]
    assert " --learning_rate 1e-6 --loss_type sigmoid_norm sft --padding_free true " in line
    assert parse_config(["--config", *shlex.split(line)], training=False).train.max_samples is None


def test_runs_that_may_start_again_are_submitted_and_another_sweep_is_refused(
    grid, train, capsys, monkeypatch, tmp_path
):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    path = grid(fields={"seed": [*range(10)]}, at_once=2, sbatch="--time=1:00:00")
    lines, numbers = plan_sweep(read_grid(path))
    assert numbers == [*range(10)]
    train(path, [0.5])
    runs = [*list_members(read_grid(path))]
    states = "push_failed collapsed refused running running hung stopped failed".split()
    for run, state in zip(runs[1:], states, strict=False):
        run.mkdir()
        write_status(run, state)
    owner = json.dumps(this_process())
    (runs[4] / LOCK).write_text(f"pid={os.getpid()}\nowner={owner}\n")  # the other running one was killed
    (path.parent / "sweep" / MEMBERS).write_text("\n".join(lines) + "\n")
    assert plan_sweep(read_grid(path)) == (lines, [5, 6, 7, 8, 9])
    assert sweep.main([str(path), "--dry_run"]) == 0
    told, first, array = capsys.readouterr().out.splitlines()[:3]
    assert told.startswith("# 5 of the 10 runs are to be submitted")
    assert "--array=5 --time=1:00:00 scripts/dpo_train.sh" in first and first.endswith("--preflight_only true")
    assert "--array=5,6,7,8,9%2 --time=1:00:00 scripts/dpo_train.sh" in array
    assert sweep.main([str(grid(fields={"learning_rate": ["1e-5"]})), "--dry_run"]) == 2
    write_json(path.parent / "sweep/submitted.json", {runs[5].name: "17_5"})
    (tmp_path / "squeue").symlink_to("/bin/false")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="Slurm does not say"):
        plan_sweep(read_grid(grid(fields={"seed": [*range(10)]})))


def test_seeds_share_a_row_and_are_compared_pairwise(grid, train):
    path = grid(fields=RATES | {"data_seed": [0, 1, 2]})
    train(path, [0.60, 0.62, 0.61, 0.50, 0.53])  # the last seed of the second rate has not been trained
    table = format_sweep(read_grid(path)).splitlines()
    assert table[0].split()[:2] == ["learning_rate", "eval_loss"]
    spread = statistics.stdev([0.50, 0.53])
    assert re.match(rf"1e-05 +0\.5150 ± {spread:.4f} .* 2 done, 1 not started$", table[1])
    spread = statistics.stdev([0.60 - 0.50, 0.62 - 0.53])
    assert f"0.6100 ± 0.0100  0.0950 ± {spread:.4f}" in table[2]


@pytest.mark.parametrize("metric", ["eval_loss", "eval_rewards/accuracies"])
def test_a_setting_whose_second_seed_failed_is_ranked_by_the_first(grid, train, metric):
    path = grid(fields=RATES | {"data_seed": [0, 1]}, rank_by=metric)
    train(path, [0.50, 0.70, 0.52])
    for folder, value in zip(list_members(read_grid(path)), (0.52, 0.30, 0.50), strict=False):
        state = json.loads((folder / "trainer_state.json").read_text())
        state["log_history"][-1]["eval_rewards/accuracies"] = value
        (folder / "trainer_state.json").write_text(json.dumps(state))
    assert format_sweep(read_grid(path)).splitlines()[1].startswith("1e-6")


def test_settings_that_share_no_seed_are_ranked_by_the_others_with_theirs(grid, train):
    path = grid(fields={"learning_rate": ["1e-4", "1e-5", "1e-6"], "data_seed": [0, 1]})
    train(path, [0.55, None, 0.50, 0.70, None, 0.80])
    assert [line.split()[0] for line in format_sweep(read_grid(path)).splitlines()[1:]] == ["1e-5", "1e-4", "1e-6"]


def test_rank_by_a_benchmark_or_a_preference_set(grid, train, capsys):
    path = grid(fields={"learning_rate": ["1e-6", "1e-5", "1e-4", "1e-3"]}, rank_by="sums/acc")
    train(path, [0.5, 0.5, 0.5])
    for folder, value in zip(list_members(read_grid(path)), (0.2, 0.6, 0.9), strict=False):
        benchmark = {"task": "sums", "metric": "acc", "filter": "none", "trained": {"value": value, "stderr": 0.01}}
        benchmark |= {"base": {"value": 0.5, "stderr": 0.01}, "difference": value - 0.5, "samples": 100}
        other = benchmark | {"filter": "flexible", "trained": {"value": -value, "stderr": 0.01}}
        pairs = {"source": "hard", "pairs": 7, "rewards/accuracies": 1 - value}
        (folder / "evaluation.json").write_text(json.dumps({"benchmarks": [benchmark, other], "pairs": [pairs]}))
    shutil.copy(path, path.parent / "sweep")
    status.main([str(path.parent / "sweep")])  # the table of the grid as it was submitted
    table = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split()[0] for line in table] == ["1e-4", "1e-5", "1e-6", "1e-3"]
    assert table[3].endswith("1 not started")
    for metric in ("hard/rewards/accuracies", "sums/acc,flexible"):
        path = grid(fields={"learning_rate": ["1e-4", "1e-6"]}, rank_by=metric)
        assert format_sweep(read_grid(path)).splitlines()[1].startswith("1e-6")


def test_a_metric_that_is_no_number_ranks_last_and_the_best_checkpoint_counts(grid, train):
    path = grid(fields={"learning_rate": ["1e-6", "1e-5", "1e-4"]}, rank_by="eval_loss")
    train(path, [float("nan"), 0.5, 0.4])
    kept = next(iter(list_members(read_grid(path))))
    lines = format_sweep(read_grid(path)).splitlines()[1:]
    assert [line.split()[:2] for line in lines] == [["1e-4", "0.4000"], ["1e-5", "0.5000"], ["1e-6", "-"]]
    config = yaml.safe_load((kept / "resolved_config.yaml").read_text()) | {"load_best_model_at_end": True}
    (kept / "resolved_config.yaml").write_text(yaml.safe_dump(config))
    state = json.loads((kept / "trainer_state.json").read_text())
    state["log_history"] += [{"step": 2, "eval_loss": 0.1}, {"step": 6, "eval_loss": 0.9}]
    (kept / "trainer_state.json").write_text(json.dumps(state))
    best = {"step": 2, "metric": "eval_loss", "value": 0.1}
    status = json.loads((kept / "status.json").read_text()) | {"best": best}
    (kept / "status.json").write_text(json.dumps(status))
    assert format_sweep(read_grid(path)).splitlines()[1].split()[:2] == ["1e-6", "0.1000"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"fields": {"lerning_rate": [1]}}, "unknown option --lerning_rate; did you mean --learning_rate?"),
        ({"fields": {"learning_rate": 1e-6}}, "give each swept field a list of values"),
        ({"fields": {"learning_rate": ["1e-6", "1e-6"]}}, "two runs would share"),
        ({"fields": {"run_name": ["a\nb"]}}, "fields: a value of run_name contains a line break; remove it"),
        ({"recipe": 5}, "recipe is 5; give a text"),
        ({"sbatch": 5}, "sbatch is 5; give a text"),
        ({"at_once": "many"}, "at_once is 'many'; give a number of runs"),
        ({"sbatch": "--comment='a"}, "not a grid: ValueError: No closing quotation"),
        ({"rankby": "x"}, "unexpected keyword argument 'rankby'"),
    ],
    ids=str,
)
def test_wrong_grid_is_one_line(grid, keys, message, capsys):
    assert sweep.main([str(grid(**keys)), "--dry_run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
