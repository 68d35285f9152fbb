"""train_dpo.main from loading to the saved model on a GPU made of CPU memory (simulated_cuda.py).

Every operator refuses CPU tensors beside CUDA tensors, and the flash kernels check their arguments, as on a GPU.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sfm_dpo.common.files import PROJECT
from tests.tiny_models import tiny_model, tiny_tokenizer
from tests.toolbox import in_grid, on_cpu, pairs, sampled

CAN_SIMULATE = shutil.which("g++") and torch.version.cuda is None  # the CUDA build has devices of its own
pytestmark = pytest.mark.skipif(not CAN_SIMULATE, reason="needs g++ and PyTorch's CPU build")
STEPS = 3
MICRO_BATCHES = 4  # of a step
WAITS = 4  # of the host for the device, in a step
TRL_WAITS = 5  # in a micro-batch: its LM head and two of its metrics select tokens by a mask
# Besides these: masks of padded attention, the head for the reference, and nets that run by sequence without fla
MORE_WAITS = {"padding_free": 2, "precompute_ref_log_probs": 2, "olmo_hybrid": 4}
BY_MEMORY = {"per_device_train_batch_size": None, "gradient_checkpointing": None}
GIVEN = {"padding_free": "true", "precompute_ref_log_probs": "true", "train_sampling_strategy": "batch_rebalance"}
GIVEN |= {"global_batch_size": 2 * MICRO_BATCHES, "max_steps": STEPS, "use_cpu": "false", "bf16": "true"}
GIVEN |= {"preflight": "warn", "save_strategy": "no"}
BEYOND = ({"sliding_window": 110}, {"max_length": 160})  # the median pair is shorter than the window
GRID = [("gpt_neox", {}), ("llama", BY_MEMORY), ("olmo2", {"prefix_sharing": "false"}), ("olmoe", {})]
GRID += [("olmo3", {"gradient_checkpointing": "false"}), ("olmo3", {"padding_free": "false"})]
GRID += [("olmo_hybrid", {}), ("gpt_neox", {"precompute_ref_log_probs": "false"})]


@pytest.fixture(scope="module")
def device(tmp_path_factory) -> Path:
    """The library, compiled."""
    library = tmp_path_factory.mktemp("device") / "device.so"
    torch_folder = Path(torch.__file__).parent
    command = ["g++", "-shared", "-fPIC", "-std=c++20", Path(__file__).with_name("device.cpp"), "-o", library]
    command += [f"-I{torch_folder}/include", f"-L{torch_folder}/lib", f"-Wl,-rpath,{torch_folder}/lib"]
    subprocess.run([*map(str, command), "-ltorch_cpu", "-lc10"], check=True)
    return library


@pytest.fixture
def run(device, write_rows, tmp_path):
    """A function: architecture, environment and fields -> what simulated_run.py prints, its log, the run's folder."""

    def train(architecture: str, environment: dict[str, str], shape: dict | None = None, **fields):
        folder = tmp_path / "model"
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2} if architecture == "olmo_hybrid" else {}
        tiny_model(architecture, **heads | (shape or {})).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        given = GIVEN | fields
        argv = on_cpu(folder, write_rows("pairs.jsonl", pairs(24)), tmp_path / "run", **given)
        env = os.environ | {"SIMULATED_CUDA": str(device), "HF_HOME": str(tmp_path)} | environment
        env.pop("CUDA_VISIBLE_DEVICES", None)
        command = [sys.executable, "-m", "tests.gpu.simulated_run", *argv]
        done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr, tmp_path / "run"

    return train


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "fields"), [("olmo3", {}), *(in_grid(*case) for case in sampled(GRID, 2))])
def test_a_run_on_a_gpu(architecture, fields, run):
    result, log, folder = run(architecture, {}, **fields)
    assert result["code"] == 0, log[-3000:]
    assert bool(result["flash_calls"]) == ((GIVEN | fields)["padding_free"] == "true")
    waits = sum(result["waits"].values())
    more = sum(number for name, number in MORE_WAITS.items() if name in (architecture, *fields))
    assert waits <= WAITS + (TRL_WAITS + more) * MICRO_BATCHES, result["waits"]
    assert list(folder.glob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "what", "shape", "fields"),
    [
        in_grid("right", None, *BEYOND),
        ("backward", "differs from padded in gradient of model.layers.self_attn.q_proj.weight", {}, {}),
        in_grid("long", "fails: FlashAttention: too many tokens", {}, {"per_device_train_batch_size": 8}),
        in_grid("window", "differs from padded in ", *BEYOND),
        in_grid("mask", "differs from padded in ", {}, {}),
        in_grid("leak", "differs from padded in ", {}, {}),
    ],
)
def test_a_kernel_that_is_wrong_is_named_and_not_used(fault, what, shape, fields, run):
    result, log, folder = run("olmo3" if shape else "llama", {"SIMULATED_FA4": fault}, shape, **fields)
    assert result["code"] == 0, log[-3000:]
    calibration = json.loads((folder / "data.json").read_text())["calibration"]
    assert set(calibration["kernels"]) == ({"fa2", "fa4"} if what is None else {"fa2"} if fault == "long" else set())
    assert (f"warning: calibration: fa4 {what}" in log) == (what is not None)


@pytest.mark.slow
@pytest.mark.grid
def test_a_kernel_that_differs_is_an_error_if_it_is_asked_for(run):
    result, log, _ = run("llama", {"SIMULATED_FA4": "mask"}, flash_attention="fa4")
    assert result["code"] == 2 and "error: flash_attention fa4: fa4 differs from padded in" in log


@pytest.mark.slow
def test_a_setting_that_runs_out_of_memory_is_replaced_by_a_smaller_one(run):
    little = {"memory_gib": 0.07, "precompute_ref_batch_size": 1}
    result, log, folder = run("llama", {"SIMULATED_LIMIT": str(45 << 20)}, **little, **BY_MEMORY)
    assert result["code"] == 0, log[-3000:]
    assert "8 pair(s) per device, 0 of 3 layers checkpointed: 0.06 GiB at the largest" in log
    assert "measured: more than there is of 0.07 GiB" in log
    data = json.loads((folder / "data.json").read_text())
    assert data["calibration"]["measured_bytes"] < 45 << 20
    assert data["micro_batch"]["pairs"] < 8 or data["micro_batch"]["checkpointed_layers"]
