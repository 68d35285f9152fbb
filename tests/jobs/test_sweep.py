"""Sweeps: the members of a grid, what is submitted, and the table, on copies of a real run whose figures are set."""

import json
import re
import shutil
import statistics
from pathlib import Path

import pytest
import status
import sweep
import yaml

from sfm_dpo.common.errors import UserError
from sfm_dpo.jobs.sweep import MEMBERS, format_sweep, list_members, plan_sweep, read_grid, summarize_settings
from sfm_dpo.run.folder import read_status

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
    """A function: (grid file, values by member, metric) -> each member is `finished_run` with this last value."""

    def copy(path: Path, values: list[float], metric: str = "eval_loss", **health) -> None:
        for folder, value in zip(list_members(read_grid(path)), values, strict=False):
            shutil.copytree(finished_run, folder, ignore=shutil.ignore_patterns("*.safetensors", "checkpoint-*"))
            state = json.loads((folder / "trainer_state.json").read_text())
            [entry for entry in state["log_history"] if metric in entry][-1][metric] = value
            (folder / "trainer_state.json").write_text(json.dumps(state))

    return copy


def edit(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_members_are_the_product_and_are_named_by_their_values(grid, tmp_path):
    fields = RATES | {"loss_type": ["sigmoid_norm", ["sigmoid_norm", "sft"]], "padding_free": [True]}
    members = list_members(read_grid(grid(fields=fields)))
    assert [folder.name for folder in members] == [
        f"learning_rate={rate},loss_type={loss},padding_free=true"
        for rate in ("1e-06", "1e-05")
        for loss in ("sigmoid-norm", "sigmoid-norm-sft")
    ]
    line = plan_sweep(read_grid(tmp_path / "grid.yaml"))[0][1]
    assert line.startswith(
        f"{tmp_path}/recipe.yaml --learning_rate 1e-06 --loss_type sigmoid_norm sft --padding_free true "
    )


def test_only_what_is_not_done_is_submitted_and_a_line_never_moves(grid, train, capsys):
    path = grid(at_once=2, sbatch="--time=1:00:00")
    before, numbers = plan_sweep(read_grid(path))
    assert numbers == [0, 1]
    train(path, [0.5])
    (path.parent / "sweep" / MEMBERS).write_text("\n".join(before) + "\n")
    path = grid(fields={"learning_rate": ["1e-7", "1e-6", "1e-5"]}, at_once=2, sbatch="--time=1:00:00")
    lines, numbers = plan_sweep(read_grid(path))
    assert lines[:2] == before and "learning_rate=1e-07" in lines[2] and numbers == [1, 2]
    capsys.readouterr()
    assert sweep.main([str(path), "--dry_run", "--local"]) == 0
    assert capsys.readouterr().out.count("train_dpo.py --config") == 2
    with pytest.raises(UserError, match=r"holds another sweep .*learning_rate 1e-06.*choose another"):
        plan_sweep(read_grid(grid(fields={"learning_rate": ["1e-5"]})))


def test_seeds_are_folded_and_a_clear_winner_is_named(grid, train):
    path = grid(fields=RATES | {"data_seed": [0, 1, 2]})
    train(path, [0.60, 0.62, 0.61, 0.50, 0.53, 0.515])
    best, other = summarize_settings(read_grid(path))
    assert best["label"] == "learning_rate 1e-05" and len(best["metric"]) == 3
    assert best["mean"] == pytest.approx(0.515) and other["mean"] == pytest.approx(0.61)
    assert best["spread"] == pytest.approx(statistics.stdev([0.50, 0.53, 0.515]))
    text = format_sweep(read_grid(path))
    # the differences are -0.1, -0.09, -0.095: 4.303 * 0.005 / sqrt(3) = 0.0124 is less than 0.095
    assert "Take learning_rate 1e-05 (eval_loss 0.5150 ± 0.0150): it is better than every other" in text
    assert text.splitlines()[0].split()[:2] == ["learning_rate", "eval_loss"]
    assert re.search(r"^1e-05 +0\.5150 ± 0\.0150 .* 3 done$", text, re.M)
    assert (path.parent / "sweep" / "sweep.png").read_bytes()[:4] == b"\x89PNG"


def test_a_difference_that_seeds_also_make_is_noise(grid, train):
    path = grid(fields=RATES | {"seed": [0, 1]})
    train(path, [0.50, 0.60, 0.58, 0.50])
    # 0.54 against 0.55; the differences are 0.08 and -0.1, their mean -0.01 ± 12.706 * 0.1273 / sqrt(2)
    assert "Within noise: learning_rate 1e-05 (eval_loss 0.5400 ± 0.0566)" in format_sweep(read_grid(path))
    assert "from learning_rate 1e-06 by 0.01 ± 1.144 (95%)" in format_sweep(read_grid(path))


def test_with_one_seed_the_standard_error_decides_where_there_is_one(grid, train):
    path = grid(rank_by="eval_rewards/accuracies")
    train(path, [0.75, 0.5], "eval_rewards/accuracies")  # of 4 held-out pairs: Wilson (0.301, 0.954), (0.150, 0.850)
    text = format_sweep(read_grid(path))
    assert "Within noise: learning_rate 1e-06 (eval_rewards/accuracies 0.7500 ± 0.1668) is the best" in text
    assert "from learning_rate 1e-05 by 0.25 ± 0.4789 (95%)" in text
    log = path.parent / "sweep/learning_rate=1e-06/trainer_state.json"
    assert "one seed says nothing about noise against" in format_sweep(read_grid(grid()))
    log.write_text(re.sub(r'"eval_loss": [^,]+', '"eval_loss": NaN', log.read_text()))
    assert "learning_rate 1e-05 (eval_loss " in format_sweep(read_grid(path)).split("is the only setting")[0]


def test_rank_by_a_benchmark_without_what_collapsed_or_is_not_there(grid, train):
    path = grid(fields={"learning_rate": ["1e-6", "1e-5", "1e-4", "1e-3"]}, rank_by="sums/acc")
    train(path, [0.5, 0.5, 0.5])
    members = list(list_members(read_grid(path)))
    for folder, value in zip(members, (0.2, 0.6, 0.9), strict=False):
        row = {"task": "sums", "metric": "acc", "filter": "none", "trained": {"value": value, "stderr": 0.01}}
        (folder / "evaluation.json").write_text(json.dumps({"benchmarks": [row]}))
    edit(members[2] / "health.json", verdict="collapsed")
    text = format_sweep(read_grid(path))
    assert [line.split()[0] for line in text.splitlines()[1:5]] == ["0.0001", "1e-05", "1e-06", "0.001"]
    assert "Take learning_rate 1e-05 (sums/acc 0.6000 ± 0.0100)" in text and "1 not started" in text
    pairs = {"source": "hard", "equal_length": None}
    for folder, (value, low, high) in zip(members, ((0.7, 0.6, 0.8), (0.4, 0.3, 0.5)), strict=False):
        row = pairs | dict.fromkeys(("reward_accuracy", "margin", "base", "trained"), (value, low, high))
        (folder / "evaluation.json").write_text(json.dumps({"pairs": [row]}))
        entry = {"step": 6, "guard/answer_tokens": 40 * value}
        state = json.loads((folder / "trainer_state.json").read_text())
        edit(folder / "trainer_state.json", log_history=[*state["log_history"], entry])
    text = format_sweep(read_grid(grid(fields={"learning_rate": ["1e-6", "1e-5"]}, rank_by="hard/reward_accuracy")))
    assert "Take learning_rate 1e-06 (hard/reward_accuracy 0.7000 ± 0.0510)" in text  # 0.1 / 1.96
    assert re.search(r"^1e-06 .* 28 ", text, re.M) and re.search(r"^1e-05 .* 16 ", text, re.M)
    path = grid(fields={"learning_rate": ["1e-6", "1e-5", "1e-4", "1e-3"]})
    with pytest.raises(
        UserError, match=r"rank_by sums/f1: no member has it; choose one of .*eval_loss.*hard/reward.*sums/acc"
    ):
        format_sweep(read_grid(grid(fields={"learning_rate": ["1e-6", "1e-4"]}, rank_by="sums/f1")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"fields": {"lerning_rate": [1]}}, "unknown option --lerning_rate; did you mean --learning_rate?"),
        ({"fields": {"learning_rate": ["fast"]}}, "invalid float value: 'fast'"),
        ({"fields": {"learning_rate": []}}, "fields: learning_rate is []; give a list of one value or more"),
        ({"fields": {"learning_rate": 1e-6}}, "fields: learning_rate is 1e-06; give a list"),
        ({"fields": {"seed": [None]}}, "fields: seed is [None]; give a list"),
        ({"fields": {"output_dir": ["a"]}}, "fields: output_dir cannot be swept"),
        ({"fields": {"learning_rate": ["1e-6", "1.0e-06"]}}, "two members would be"),
        ({"fields": None}, "fields is None; give lists of values by field"),
        ({"recipe": "recipes/no.yaml"}, "--config recipes/no.yaml: no such file"),
        ({"recipe": None}, "recipe is None; give a text"),
        ({"output_dir": None}, "output_dir is None; give a text"),
        ({"output_dir": ""}, "output_dir is ''; give a text"),
        ({"at_once": -1}, "at_once is -1; give a whole number from 1 on"),
        ({"at_once": 0}, "at_once is 0; give a whole number from 1 on"),
        ({"rankby": "x"}, "rankby: is unknown; did you mean rank_by?"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_wrong_grid_is_one_line(grid, keys, message, capsys):
    assert sweep.main([str(grid(**keys)), "--dry_run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_another_run_in_a_members_folder_is_refused(grid, train, capsys):
    path = grid()
    train(path, [0.5])
    assert sweep.main([str(path)]) == 2
    assert "learning_rate=1e-06); choose another" in capsys.readouterr().err


@pytest.mark.grid
def test_without_slurm_members_train_one_after_the_other(grid, capfd, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    path = grid(fields=RATES | {"max_steps": [2]})
    assert sweep.main([str(path), "--local"]) == 0
    for folder in list_members(read_grid(path)):
        assert read_status(folder)["state"] == "done"
    capfd.readouterr()  # of the training
    assert sweep.main([str(path), "--table"]) == 0
    table = capfd.readouterr().out
    assert table.count("1 done") == 2
    status.main([str(path.parent / "sweep")])
    assert capfd.readouterr().out.endswith(f"\n\n{table}")
