"""Real runs of train_dpo.py as processes: started, watched, stopped, killed, compared."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from sfm_dpo.common.distributed import launch_file
from sfm_dpo.run.checkpoint import STOP
from sfm_dpo.run.folder import read_status
from sfm_dpo.train import reference_cache
from tests.e2e.many_runs import train_all
from tests.tiny_models import tiny_model, tiny_tokenizer
from tests.toolbox import as_options, logged, write_jsonl

ROOT = Path(__file__).resolve().parents[2]
STEPS = 8
# All speed flags; 64 pairs in 8 steps make one epoch
FIELDS = {
    "max_length": 96,
    "max_prompt_length": 48,
    "global_batch_size": 8,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_steps": 2,
    "save_total_limit": 8,
    "dataset_num_proc": 1,
    "gradient_checkpointing": "true",
    "padding_free": "true",
    "precompute_ref_log_probs": "true",
    "train_sampling_strategy": "batch_rebalance",
    "seed": 7,
    "preflight": "warn",  # random weights find every answer impossible
    "guard": "warn",
}
# What a launcher, Slurm or a tracker leaves in the environment
FOREIGN = ("SLURM", "ACCELERATE_", "WANDB", "TORCHELASTIC", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")


@dataclass
class Run:
    folder: Path
    log_file: Path
    log_start: int
    process: subprocess.Popen | None  # None: it ran in this process

    @property
    def log(self) -> str:
        """What this start has printed; earlier starts of the same run are before it in the file."""
        return self.log_file.read_bytes()[self.log_start :].decode(errors="replace")

    def wait(self, timeout: float = 1800) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout} s:\n{self.log[-4000:]}") from None

    def finish(self) -> "Run":
        """Waits for a run that must end well."""
        code = self.wait()
        assert self.status.get("state") == "done", self.log[-4000:]
        assert code == 0, self.log[-4000:]
        return self

    def until(self, condition: Callable[[], bool], timeout: float = 1800, every: float = 0.002) -> bool:
        """Waits; False if the run ended first."""
        deadline = time.monotonic() + timeout
        while not condition():
            if self.process.poll() is not None:
                return condition()
            assert time.monotonic() < deadline, f"waited in vain:\n{self.log[-4000:]}"
            time.sleep(every)
        return True

    def until_step(self, step: int) -> bool:
        return self.until(lambda: f"step {step}/" in self.log)

    def stop_at(self, step: int) -> int:
        """Asks for a stop once the run has done this step; returns the step that it stopped at."""
        assert self.until_step(step), self.log[-4000:]
        (self.folder / STOP).touch()
        code = self.wait()
        assert code == (0 if "accelerate" in str(self.process.args) else 75), self.log[-4000:]
        assert (self.status["state"], self.status["exit_code"]) == ("stopped", 75), self.log[-4000:]
        return self.status["step"]

    def ranks(self, count: int) -> list[psutil.Process]:
        """Waits until all processes that run train_dpo.py are there, without the launcher; returns them."""
        me = psutil.Process(self.process.pid)

        def find() -> list[psutil.Process]:
            found = []
            for child in me.children():
                with contextlib.suppress(psutil.NoSuchProcess):  # a probe of the launcher that has just ended
                    if "train_dpo.py" in " ".join(child.cmdline()):
                        found.append(child)
            return found

        assert count == 1 or self.until(lambda: len(find()) == count, every=0.1), self.log[-4000:]
        return [me] if count == 1 else find()

    def kill(self) -> None:
        """Ends all of it, at once."""
        me = psutil.Process(self.process.pid)
        for process in [*me.children(recursive=True), me]:
            process.kill()
        self.process.wait(300)

    @property
    def status(self) -> dict:
        return read_status(self.folder) or {}

    def weights(self) -> bytes:
        return (self.folder / "model.safetensors").read_bytes()


@dataclass
class Place:
    """A folder with pairs in which runs are started; each run is a folder in it."""

    folder: Path
    model: Path
    hf_home: Path
    defaults: dict = field(default_factory=dict)

    def values(self, run: str, **fields) -> dict:
        """All fields of a run in the folder of this name."""
        values = FIELDS | {"model_name_or_path": self.model, "dataset_name": self.folder / "pairs.jsonl"}
        return values | {"output_dir": self.folder / run} | self.defaults | fields

    def start(self, run: str, processes: int = 1, launch="cpu", script=ROOT / "train_dpo.py", **fields) -> Run:
        """Starts train_dpo.py, or a script of this name that does more; `env` and `popen` are the process's, all else
        fields. More than one process: under accelerate's launcher, by default ZeRO-2 on CPU."""
        env = clean_environment(self.hf_home) | fields.pop("env", {})
        popen = {"cwd": ROOT, "stderr": subprocess.STDOUT} | fields.pop("popen", {})
        values = self.values(run, **fields)
        command = [*launcher(processes, launch), str(script), *as_options(values)]
        with (self.folder / f"{run}.log").open("ab") as log:
            start = log.tell()
            process = subprocess.Popen(command, env=env, stdout=log, **popen)
        return Run(Path(values["output_dir"]), Path(log.name), start, process)

    def start_together(self, calls: list[list], processes: int, launch="cpu", by="tests.e2e.many_runs:train_all"):
        """Calls a function, by default with command lines, one after another in one set of processes; all runs must
        end well."""
        file = self.folder / f"{launch}-{processes}.json"
        file.write_text(json.dumps(calls))
        command = [*launcher(processes, launch), str(ROOT / "tests/e2e/many_runs.py"), by, str(file)]
        env = clean_environment(self.hf_home)
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]

    def run_many(self, launch: str, runs: dict[str, dict]) -> dict[str, Path]:
        """Trains runs (name: fields). `launch`: single, in this process; "cpu 2", in two processes of cpu.yaml."""
        name, _, processes = launch.partition(" ")
        argvs = [as_options(self.values(run, **fields)) for run, fields in runs.items()]
        if processes:
            self.start_together([argvs], int(processes), name)
        else:
            with patch.dict(os.environ), pytest.MonkeyPatch.context() as changes:
                changes.setattr(reference_cache, "HF_CACHE_HOME", str(self.hf_home))
                train_all(*argvs)
        return {run: self.folder / run for run in runs}


def make_place(folder: Path, rows: list[dict], models: dict[str, dict], defaults: dict) -> Place:
    """A folder with pairs and tiny models (architecture: fields of its config), the first of which is trained, without
    checkpoints and checks."""
    folder.mkdir(exist_ok=True)
    write_jsonl(folder / "pairs.jsonl", rows)
    for architecture, config in models.items():
        tiny_model(architecture, **config).save_pretrained(folder / architecture)
        tiny_tokenizer().save_pretrained(folder / architecture)
    quick = {"save_strategy": "no", "preflight": "skip", "guard": "skip"}
    return Place(folder, folder / next(iter(models)), folder / "hf", quick | defaults)


def launcher(processes: int, launch: str) -> list[str]:
    """The words before a script: Python; for more than one process also the launcher with configs/accelerate."""
    if processes == 1:
        return [sys.executable]
    config = ["--config_file", str(ROOT / launch_file(launch)), "--num_processes", str(processes)]
    return [sys.executable, str(ROOT / "tests/e2e/forked.py"), *config, "--main_process_port", str(free_port())]


def assert_same_run(run: Run, expected: Run) -> None:
    """Bitwise: every logged metric of every step, and the final weights."""
    for mine, theirs in zip(logged(run.folder), logged(expected.folder), strict=True):
        assert mine == theirs
    assert run.weights() == expected.weights()


def clean_environment(hf_home: Path) -> dict[str, str]:
    """This process's environment for a run, without what a launcher, Slurm or a tracker left in it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    clean |= {"HF_HOME": str(hf_home), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    return clean | {"DS_ACCELERATOR": "cpu"}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
