"""What callbacks know, log and write is the same whether or not a run was stopped or killed after every step."""

import json
import shutil
from difflib import SequenceMatcher
from pathlib import Path

import pytest
from transformers import TrainerCallback

import train_dpo
from sfm_dpo.run.checkpoint import KEEP, STOP, checkpoints
from sfm_dpo.run.folder import HEALTH, LOG, SAMPLES, STATUS, TRAINER_STATE, read_file
from sfm_dpo.train import reference_cache
from tests.toolbox import as_options, in_grid, without_times

COLLAPSES = {"learning_rate": 0.05, "save_steps": 1, "eval_steps": 1, "eval_strategy": "steps", "eval_fraction": 0.1}
COLLAPSES |= {"guard_generations": 3, "guard": "warn"}
BY_EPOCH = {"save_strategy": "epoch", "eval_strategy": "steps", "eval_steps": 3, "eval_fraction": 0.1}
ROWS = [  # how a run ends after every step, and its fields
    ("kill", COLLAPSES | {"save_steps": 2, "eval_steps": 2, "logging_steps": 3}),
    in_grid("stop", COLLAPSES),
    in_grid("kill", BY_EPOCH | {"logging_steps": 2, "global_batch_size": 16, "num_train_epochs": 2}),
]


class Killed(Exception):
    pass


class Observer(TrainerCallback):
    """By step, what a tracker received and what callbacks had written when the next step began. Ends the run after
    each step once."""

    def __init__(self, how: str):
        self.how = how
        self.received: dict = {}
        self.written: dict = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "train_runtime" not in logs:
            self.received[state.global_step, "loss" in logs] = without_times(logs)

    def on_step_begin(self, args, state, control, **kwargs):
        is_new = state.global_step not in self.written
        self.written[state.global_step] = observe(Path(args.output_dir))
        if self.how == "kill" and is_new:
            raise Killed

    def on_step_end(self, args, state, control, **kwargs):
        if self.how == "stop":
            (Path(args.output_dir) / STOP).touch()


def observe(run: Path) -> dict:
    status = read_file(run / STATUS)
    return {
        "health": read_file(run / HEALTH),
        "status": [status.get(name) for name in ("step", "max_steps", "loss", "margin")],
        "checkpoints": {path.name: (path / KEEP).exists() for path in checkpoints(run)},
    }


def train(argv: list[str], run: Path, how: str = "") -> tuple[int, dict]:
    """Starts the run until it is done: the number of starts, and all that its callbacks had and left."""
    observer = Observer(how)
    codes = [1]
    while codes[-1] != 0:
        assert codes[-1] in (1, 75)
        try:
            codes.append(train_dpo.main(argv, callbacks=[observer]))
        except Killed:
            codes.append(1)
    lines = [json.loads(line) for line in (run / LOG).read_text().splitlines()]
    assert lines == read_file(run / TRAINER_STATE)["log_history"]
    assert any("train_loss" in entry for entry in lines) == (len(codes) == 2), "it is a mean since the last start"
    log = [without_times(entry) for entry in lines if "train_runtime" not in entry]
    end = observe(run) | {"samples": read_file(run / SAMPLES)}
    return len(codes), {"end": end, "log": log, "received": observer.received, "written": observer.written}


@pytest.mark.parametrize(("how", "fields"), ROWS)
@pytest.mark.usefixtures("environment", "no_report")
def test_a_run_that_ends_after_every_step_is_the_undisturbed_run(place, monkeypatch, tmp_path, how, fields):
    monkeypatch.setattr(reference_cache, "HF_CACHE_HOME", str(place.hf_home))
    run = tmp_path / "run"
    argv = as_options(place.values("run", output_dir=run, save_total_limit=2) | fields)
    expected = train(argv, run)[1]
    shutil.rmtree(run)
    starts, found = train(argv, run, how)
    assert starts > 6 and found.keys() == expected.keys()
    for part, content in expected.items():
        assert found[part] == content, part
    if fields is COLLAPSES:
        ratios = [SequenceMatcher(None, row["before"], row["after"]).ratio() for row in expected["end"]["samples"]]
        assert ratios == sorted(ratios) and ratios[0] < ratios[-1]
        health = expected["end"]["health"]
        assert (health["verdict"], health["last_healthy"]) == ("collapsed", str(run / "checkpoint-1"))
