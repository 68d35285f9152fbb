"""Real runs of train_dpo.py as processes: started, watched, stopped, killed, compared."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from sfm_dpo.run.folder import read_status

ROOT = Path(__file__).resolve().parents[2]
STEPS = 8
# All speed flags; 64 pairs in 8 steps make one epoch, a checkpoint every second step.
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
    "padding_free": "true",
    "precompute_ref_log_probs": "true",
    "train_sampling_strategy": "batch_rebalance",
    "seed": 7,
    "preflight": "warn",  # random weights find every answer impossible
    "guard": "warn",
}


def pairs(count: int = 64) -> list[dict]:
    """Pairs of many lengths, so that balancing has something to do."""
    return [
        {
            "prompt": f"What is {i} and {i * i}?",
            "chosen": f"{i + i * i}." + " Indeed." * (i % 5),
            "rejected": "Well, that depends on many things, " * (1 + i % 3) + f"and on {i}.",
        }
        for i in range(count)
    ]


@dataclass
class Place:
    """A folder with a model and pairs in which runs are started; each run is a folder in it."""

    folder: Path
    model: Path
    hf_home: Path
    defaults: dict = field(default_factory=dict)

    def values(self, run: str, **fields) -> dict:
        """All fields of a run in the folder of this name."""
        values = FIELDS | {"model_name_or_path": self.model, "dataset_name": self.folder / "pairs.jsonl"}
        return values | {"output_dir": self.folder / run} | self.defaults | fields

    def start_together(self, argvs: list[list[str]], processes: int, launch: str = "cpu") -> None:
        """Runs of these command lines, one after another in one set of processes; all must end well."""
        file = self.folder / f"{launch}-{processes}.json"
        file.write_text(json.dumps(argvs))
        command = [*launcher(processes, launch), ROOT / "tests/e2e/many_runs.py", file]
        done = subprocess.run(
            [str(part) for part in command],
            cwd=ROOT,
            env=clean_environment(self.hf_home),
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]

    def start(
        self,
        run: str,
        processes: int = 1,
        env: dict | None = None,
        cwd: Path = ROOT,
        launch: str = "cpu",
        script: Path = ROOT / "train_dpo.py",
        **fields,
    ) -> "Run":
        """Starts train_dpo.py, or a script of this name that does more. More than one process: under accelerate's
        launcher, by default ZeRO-2 on CPU."""
        values = self.values(run, **fields)
        command = [*launcher(processes, launch), script, *as_options(values)]
        log = (self.folder / f"{run}.log").open("ab")
        clean = clean_environment(self.hf_home) | (env or {})
        with log:
            start = log.tell()
            process = subprocess.Popen(
                [str(part) for part in command], cwd=cwd, env=clean, stdout=log, stderr=subprocess.STDOUT
            )
        return Run(Path(values["output_dir"]), Path(log.name), start, process)


def launcher(processes: int, launch: str) -> list:
    """What stands before a script: Python; for more than one process also accelerate with configs/accelerate."""
    if processes == 1:
        return [sys.executable]
    config = ["--config_file", ROOT / f"configs/accelerate/{launch}.yaml", "--num_processes", processes]
    return [sys.executable, "-m", "accelerate.commands.launch", *config, "--main_process_port", free_port()]


def as_options(values: dict) -> list[str]:
    options: list = []
    for name, value in values.items():
        if value is not None:
            options += [f"--{name}", *(value if isinstance(value, list) else [value])]
    return [str(part) for part in options]


@dataclass
class Run:
    folder: Path
    log_file: Path
    log_start: int
    process: subprocess.Popen

    @property
    def log(self) -> str:
        """What this start has printed; earlier starts of the same run are before it in the file."""
        return self.log_file.read_bytes()[self.log_start :].decode(errors="replace")

    def wait(self, timeout: float = 300) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout} s:\n{self.log[-4000:]}") from None

    def finish(self, timeout: float = 300) -> "Run":
        """Waits for a run that must end well."""
        code = self.wait(timeout)
        assert self.status["state"] == "done", self.log[-4000:]
        # Seen once in some 30 starts of two processes: one that had finished aborted while the interpreter left
        assert code == 0 or "terminate called without an active exception" in self.log, self.log[-4000:]
        return self

    def until(self, condition: Callable[[], bool], timeout: float = 180, every: float = 0.002) -> bool:
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

    def ranks(self) -> list[psutil.Process]:
        """The processes that run train_dpo.py, without the launcher."""
        try:
            me = psutil.Process(self.process.pid)
            children = [child for child in me.children() if "train_dpo.py" in " ".join(child.cmdline())]
        except psutil.NoSuchProcess:
            return []
        return children if "accelerate" in " ".join(me.cmdline()) else [me]

    def all_ranks(self, count: int) -> list[psutil.Process]:
        """Waits until all of them are there."""
        found: list[psutil.Process] = []

        def complete() -> bool:
            found[:] = self.ranks()
            return len(found) == count

        assert self.until(complete, every=0.1), self.log[-4000:]
        return found

    def kill(self) -> None:
        """Ends all of it, at once."""
        try:
            family = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
        except psutil.NoSuchProcess:
            family = []
        for process in family:
            process.kill()
        self.process.wait(30)

    @property
    def status(self) -> dict:
        return read_status(self.folder) or {}

    def losses(self) -> list[dict]:
        """Logged steps without the figures that are about time, memory and the machine."""
        history = json.loads((self.folder / "trainer_state.json").read_text())["log_history"]
        return [{k: v for k, v in e.items() if not k.startswith("perf/")} for e in history if "loss" in e]

    def weights(self) -> bytes:
        return (self.folder / "model.safetensors").read_bytes()


def assert_same_run(run: Run, expected: Run) -> None:
    """Bitwise: every logged metric of every step, and the final weights."""
    assert [e["step"] for e in run.losses()] == [e["step"] for e in expected.losses()]
    for mine, theirs in zip(run.losses(), expected.losses(), strict=True):
        assert mine == theirs
    assert run.weights() == expected.weights()


def copy_run(run: Run, name: str) -> Path:
    target = run.folder.with_name(name)
    shutil.copytree(run.folder, target)
    return target


def clean_environment(hf_home: Path) -> dict[str, str]:
    """This process's environment for a run, without what a launcher, Slurm or a tracker left in it."""
    foreign = ("SLURM", "ACCELERATE_", "WANDB", "TORCHELASTIC", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    clean |= {"HF_HOME": str(hf_home), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    return clean | {"DS_ACCELERATOR": "cpu"}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def run_many(place: Place, launch: str, runs: dict[str, dict]) -> dict[str, Path]:
    """Trains runs (name: fields) one after the other in one start, and returns their folders.

    `launch`: single, or a name of configs/accelerate with its number of processes: "cpu 2".
    """
    name, _, processes = launch.partition(" ")
    argvs = [as_options(place.values(run, **fields)) for run, fields in runs.items()]
    place.start_together(argvs, int(processes or 1), name)
    return {name: place.folder / name for name in runs}
