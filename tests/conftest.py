"""Shared by all tests: no hub, no tracker, caches in a temporary folder of their own, tiny models as folders."""

import gc
import json
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

# Before anything imports huggingface_hub or datasets, which read these once.
_CACHE = tempfile.mkdtemp(prefix="sfm-tests-")
os.environ |= {"HF_HOME": _CACHE, "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
os.environ.setdefault("OMP_NUM_THREADS", "1")
_QUICK = str(Path(__file__).parent / "quick_start")
if _QUICK not in os.environ.get("PYTHONPATH", ""):  # the workers of xdist have it already
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_QUICK, os.environ.get("PYTHONPATH")]))
gc.set_threshold(700, 10, 10)  # as Python has it: here models come and go for minutes
for _name in ("HF_TOKEN", "HF_DATASETS_CACHE", "HF_HUB_CACHE", "WANDB_API_KEY", "WANDB_MODE"):
    os.environ.pop(_name, None)

import sfm_dpo

sfm_dpo.setup()

from tests.toolbox import PLAIN, as_options

_HERE = {None, "", "127.0.0.1", "::1", "localhost", socket.gethostname(), socket.getfqdn()}
_resolve = socket.getaddrinfo


def _loopback_only(host, *args, **kwargs):
    """What asks for a machine elsewhere fails with its name; libraries would try again for minutes."""
    assert host in _HERE, f"a test asks for {host}"
    return _resolve(host, *args, **kwargs)


socket.getaddrinfo = _loopback_only


def pytest_collection_finish():
    """Each run collects garbage five times, which is half of its time where it looks through all that is imported."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    shutil.rmtree(_CACHE, ignore_errors=True)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A function: architecture of tests/tiny_models.py -> folder with such a model and its tokenizer, made once."""
    from tests.tiny_models import tiny_model, tiny_tokenizer

    root = tmp_path_factory.mktemp("models")

    def make(architecture: str) -> Path:
        folder = root / architecture
        if not folder.exists():
            tiny_model(architecture).save_pretrained(folder)
            tiny_tokenizer().save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def environment():
    """What a command puts into its environment (the launcher, the device) ends with it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def no_report(monkeypatch):
    """Runs of train_dpo.py in this process write none: its pictures take longer than training a tiny model does."""
    monkeypatch.setattr("sfm_dpo.training_run.write_report", lambda run: None)


@pytest.fixture
def without_curves(monkeypatch):
    """Drawing takes seconds, and has tests of its own."""
    monkeypatch.setattr("sfm_dpo.report.page.draw_curves", lambda *args, **kwargs: [])


@pytest.fixture(scope="session")
def finished_run(tiny_folder, tmp_path_factory) -> Path:
    """A real run of 6 steps on 24 pairs: 4 held-out pairs, one dropped row, checkpoint-4 and checkpoint-6."""
    import train_dpo

    root = tmp_path_factory.mktemp("finished")
    rows = [{"prompt": f"{i} + {i}?", "chosen": f"It is {2 * i}.", "rejected": f"I forgot {i}."} for i in range(28)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0] | {"chosen": ""}]))
    words = f"""--model_name_or_path {tiny_folder("gpt_neox")} --dataset_name {root}/pairs.jsonl --use_cpu
        --output_dir {root}/run --global_batch_size 8 --max_length 64 --num_train_epochs 2 --learning_rate 1e-3
        --logging_steps 1 --eval_fraction 0.15 --eval_strategy steps --eval_steps 3 --save_steps 4 --report_to none
        --preflight warn --guard warn --per_device_train_batch_size 8"""  # random weights find every answer impossible
    assert train_dpo.main([*words.split(), *as_options(PLAIN)]) == 0
    return root / "run"


@pytest.fixture
def run(finished_run, tmp_path) -> Path:
    """A copy of `finished_run`, so that a test may spoil it."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub on loopback that this process's huggingface_hub takes for the real one; its token is in HF_TOKEN."""
    from huggingface_hub import constants, hf_api

    from tests.hub_server import TOKEN, HubServer

    with HubServer() as server:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(hf_api.api, "endpoint", server.url)  # of the functions, who read ENDPOINT at their import
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # made at its first use, with the ENDPOINT of then
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        children = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        for name, value in children.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # between attempts, ours and huggingface_hub's
        yield server


@pytest.fixture
def dead() -> dict:
    """A part of a lock: a process of this host that has ended."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    return {"host": socket.gethostname(), "pid": ended.pid, "started": 5.0}


@pytest.fixture
def process_group(monkeypatch):
    """A launcher's environment for FSDP2 on CPU, and a process group of this process alone."""
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState, PartialState

    launcher = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    for name, value in (launcher | {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_CPU": "true"}).items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for state in (PartialState, AcceleratorState, GradientState):
        monkeypatch.setattr(state, "_shared_state", {})
    yield
    dist.destroy_process_group()
    gc.collect()  # a group in a cycle of references would be deleted later: in a forked process that hangs


@pytest.fixture
def write_rows(tmp_path):
    """A function: (name, rows) -> path of a .jsonl, .json or .parquet file in tmp_path that holds them."""

    def write(name: str, rows: list[dict]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            from datasets import Dataset

            Dataset.from_list(rows).to_parquet(path)
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows), encoding="utf-8")
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


def pytest_collection_modifyitems(items):
    for item in items:
        if item.name.startswith("test_canary"):
            item.add_marker("canary")
