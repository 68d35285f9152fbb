"""What many tests need: toy pairs, a command line of train_dpo.py, a run's log, its error line, a small disk."""

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

# TRL's defaults, for tests whose subject is something else
PLAIN = {
    "padding_free": "false",
    "precompute_ref_log_probs": "false",
    "train_sampling_strategy": "random",
    "gradient_checkpointing": "true",
}

UNREADABLE = "/proc/self/mem"  # reading its first byte is an input/output error


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


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **extra) -> dict:
    return {"role": "assistant", "content": text, **extra}


def with_tool(call: str, result: str, answer: str, role: str = "tool") -> list[dict]:
    """A response that calls a tool before it answers."""
    return [assistant(call), {"role": role, "content": result}, assistant(answer)]


def as_options(values: dict) -> list[str]:
    """{"max_steps": 2} -> ["--max_steps", "2"]; None leaves a field out."""
    options: list = []
    for name, value in values.items():
        if value is not None:
            options += [f"--{name}", *(value if isinstance(value, list) else [value])]
    return [str(part) for part in options]


def on_cpu(model: Path, data: Path, output_dir: Path, **fields) -> list[str]:
    """The options of a small run of train_dpo.py on the CPU; random weights find every answer impossible."""
    places = {"model_name_or_path": model, "dataset_name": data, "output_dir": output_dir}
    small = {"global_batch_size": 4, "per_device_train_batch_size": 2, "max_length": 96, "logging_steps": 1}
    quiet = {"use_cpu": "true", "dataset_num_proc": 1, "preflight": "skip", "guard": "skip"}
    return as_options(places | PLAIN | small | quiet | fields)


def config_of(data: Path, model: Path, *options):
    """The configuration of a command that reads a data set and a model on a CPU node."""
    from sfm_dpo.config.fields import parse_config

    argv = ["--dataset_name", data, "--model_name_or_path", model, *options]
    return parse_config([str(word) for word in argv], training=False)


def read_pairs(data: Path, *options):
    """The pairs of a run on a data set, as load_pairs gives them."""
    from sfm_dpo.data.preferences import load_pairs

    config = config_of(data, Path("m"), *options)
    read = load_pairs(config)
    read.check_dropped(config.train.max_dropped_fraction)
    return read


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_task(file: Path, rows: Path, **fields) -> str:
    """Writes a task of lm-eval, by default multiple choice, whose rows have a question and choices, the first one of
    which is right; returns its path."""
    task = {"task": file.stem, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}}}
    task |= {"test_split": "test", "doc_to_text": "{{question}}", "output_type": "multiple_choice"}
    task |= {"doc_to_choice": "choices", "doc_to_target": 0}
    metric = {"metric": fields.pop("metric", "acc"), "higher_is_better": True}
    file.write_text(yaml.safe_dump(task | {"metric_list": [metric]} | fields))
    return str(file)


def edit(path: Path, **fields) -> None:
    """Changes fields of a JSON or YAML file."""
    is_yaml = path.suffix == ".yaml"
    content = yaml.safe_load(path.read_text()) if is_yaml else json.loads(path.read_text())
    path.write_text((yaml.safe_dump if is_yaml else json.dumps)(content | fields))


def logged(run: Path, metric: str = "loss") -> list[dict]:
    """The entries of a run's log with this metric, `without_times`."""
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    return [without_times(entry) for entry in history if metric in entry]


def without_times(entry: dict) -> dict:
    """A log entry without figures about time, memory and the machine."""
    timed = re.compile(r"perf/|.*_(runtime|per_second)$")
    return {name: value for name, value in entry.items() if not timed.match(name)}


def error_line(printed: str) -> str:
    """The only line that begins with error:, of output without a traceback."""
    assert "Traceback" not in printed, printed[-4000:]
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, printed[-4000:]
    return errors[0]


def in_grid(*case):
    """A case of a parametrised test that only the grid runs."""
    return pytest.param(*case, marks=pytest.mark.grid)


def sampled(cases: Sequence, step: int) -> Sequence:
    """Every `step`-th case of a matrix that would take CI too long; GRID=all runs each."""
    return cases if os.environ.get("GRID") == "all" else cases[::step]


def wait_for(condition: Callable[[], bool], timeout: float, every: float = 0.2) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {timeout} s"
        time.sleep(every)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of so many bytes ("12m"); skips the test where none can be mounted."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
