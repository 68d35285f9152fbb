"""Golden losses: what fixed-seed runs log, against the values recorded in golden.json; and bf16 as users run it.

`RECORD=1 python -m pytest tests/e2e/test_golden.py` records them anew, which only a change of the objective, the order
of the pairs or the initial weights justifies. Machines differ in the last bits, hence the tolerance.
"""

import json
import math
import os
import re
from pathlib import Path

import pytest

from tests.e2e.runs import Place, Run, assert_same_run, make_place
from tests.toolbox import in_grid, logged, pairs, sampled, with_tool

GOLDEN = Path(__file__).with_name("golden.json")
METRICS = ("loss", "rewards/margins", "grad_norm")
ARCHITECTURES = ["gpt_neox", "olmo3", "llama"]
ONE = "llama, packed, cached, 1"
COMPILED = {"torch_compile": "true", "torch_compile_backend": "aot_eager"}
LONG = "long/pairs.jsonl"
CACHED_OR_NOT = ["padded", "packed", "packed, cached"]
PATHS = {
    "padded": {"padding_free": "false", "precompute_ref_log_probs": "false", "train_sampling_strategy": "random"},
    "packed": {"precompute_ref_log_probs": "false"},
    "packed, cached": {},
    "compiled": COMPILED,  # else packed, cached
    "shared": {"prefix_sharing": "true"},
    "shared, compiled": {"prefix_sharing": "true"} | COMPILED,
}
FIELDS = {"prefix_sharing": "false", "max_steps": 8, "learning_rate": 5e-5}
BF16 = {
    "use_cpu": "true",
    "bf16": "true",
    "max_length": 600,
    "max_prompt_length": None,
    "global_batch_size": 4,
    "max_steps": 2,
    "eval_fraction": 0.25,
    "learning_rate": 1e-6,
}
LOSSES = {"sigmoid_norm": 5, "sigmoid": 0.1}
BF16_PATHS = {
    "shared, cached": {"prefix_sharing": "true"},
    "packed, cached": {},
    "padded, live": {"padding_free": "false", "precompute_ref_log_probs": "false"},
}
FEW = [("gpt_neox", "sigmoid", "shared, cached")]
BF16_GRID = [  # each path and each launch; the reference's dtype shows in sums of log-probs, which sigmoid takes
    ("single", [("olmo3", "sigmoid_norm", "packed, cached")]),
    ("cpu 2", [("olmo3", "sigmoid", "padded, live")]),
    ("cpu_zero3 2", [*FEW, ("gpt_neox", "sigmoid_norm", "padded, live")]),
    ("cpu_fsdp2 2", [*FEW, ("olmo3", "sigmoid", "padded, live")]),
    ("cpu_offload 2", [*FEW, ("olmo3", "sigmoid", "padded, live")]),
]
ONE_OF_EACH = dict(zip(ARCHITECTURES, CACHED_OR_NOT, strict=True))
ALONE = [(name, path) for name in ARCHITECTURES for path in CACHED_OR_NOT]
RUNS = {  # of golden.json: processes, (architecture, path)
    "one process": (1, [*ONE_OF_EACH.items(), ("llama", "shared")]),
    "one process, others": (1, [case for case in ALONE if case not in ONE_OF_EACH.items()]),
    "ZeRO-2": (2, [("gpt_neox", path) for path in CACHED_OR_NOT]),
    "ZeRO-2, others": (2, [(name, "packed, cached") for name in ARCHITECTURES[1:]]),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    """Also with responses of some 300 tokens: sums of log-probs are above 1,000 nats, in steps of 8 in bf16. Every
    other one of these calls a tool."""
    place = make_place(tmp_path_factory.mktemp("golden"), pairs(), {name: {} for name in ARCHITECTURES}, FIELDS)
    rows = [
        {"prompt": f"What is {i}?", "chosen": "indeed " * (40 + i), "rejected": "by no means " * (25 + i % 3)}
        for i in range(12)
    ]
    for row in rows[::2]:
        row["chosen"] = with_tool("add(2)", "two " * 20, row["chosen"])
    long = {"max_position_embeddings": 1024}
    make_place(place.folder / "long", rows, {"olmo3": long, "gpt_neox": long}, {})
    return place


def golden_runs(place: Place, processes: int, runs: list[tuple[str, str]]) -> dict[str, dict]:
    """Fields of runs (architecture, path) by their names in golden.json."""
    return {
        f"{architecture}, {path}, {processes}": {"model_name_or_path": place.folder / architecture} | PATHS[path]
        for architecture, path in runs
    }


def bf16_runs(place: Place, launch: str, combinations: list[tuple[str, str, str]]) -> dict[str, dict]:
    runs = {}
    for architecture, loss, path in combinations:
        data = {"model_name_or_path": place.folder / "long" / architecture, "dataset_name": place.folder / LONG}
        objective = {"loss_type": loss, "beta": LOSSES[loss]}
        runs[f"bf16 {launch} {architecture} {loss} {path}"] = BF16 | data | objective | BF16_PATHS[path]
    return runs


def read_metrics(folders: dict[str, Path]) -> dict[str, list[list[float]]]:
    """METRICS of each step of each run."""
    return {
        name: [[entry[metric] for metric in METRICS] for entry in logged(folder)] for name, folder in folders.items()
    }


@pytest.fixture(scope="module")
def zero2(place) -> dict[str, Path]:
    """Runs on two processes, in one start: starting takes longer than training."""
    golden = golden_runs(place, *RUNS["ZeRO-2"])
    return place.run_many("cpu 2", golden | bf16_runs(place, "cpu 2", FEW))


def assert_equal(steps: list[list[float]], expected: list[list[float]], **tolerance: float) -> None:
    assert len(steps) == 8
    for mine, theirs in zip(steps, expected, strict=True):
        assert mine == pytest.approx(theirs, **tolerance)


@pytest.mark.parametrize("name", ["one process", "ZeRO-2", in_grid("one process, others"), in_grid("ZeRO-2, others")])
def test_losses_are_the_recorded_ones(place, name, request):
    """Also with shared prompts, in one process, where rounding differs more."""
    processes, runs = RUNS[name]
    if name == "ZeRO-2":
        folders = request.getfixturevalue("zero2")
    else:
        folders = place.run_many("single" if processes == 1 else "cpu 2", golden_runs(place, processes, runs))
    trained = read_metrics({run: folder for run, folder in folders.items() if not run.startswith("bf16")})
    by_sharing = {name: trained.pop(name) for name in list(trained) if "shared" in name}
    golden = json.loads(GOLDEN.read_text())
    if os.environ.get("RECORD"):
        lines = [f"{json.dumps(name)}: {json.dumps(steps)}" for name, steps in (golden | trained).items()]
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        pytest.skip("recorded")
    for name, steps in trained.items():
        assert_equal(steps, golden[name], rel=1e-5, abs=1e-5)
    for steps in by_sharing.values():
        assert_equal(steps, golden[ONE], rel=5e-5, abs=5e-5)


@pytest.mark.grid
def test_one_two_and_four_ranks_agree_compiled_or_not_cached_or_not(place):
    """The order depends on the global batch alone: what differs is the order of summation."""
    golden = json.loads(GOLDEN.read_text())
    runs = golden_runs(place, 4, [("llama", path) for path in ("compiled", "shared, compiled")])
    found = read_metrics(place.run_many("cpu 4", runs))
    # with the reference in memory instead of its log-probs in the cache, and on two ranks
    found |= {name: golden[name] for name in ("llama, packed, 1", "llama, packed, cached, 2")}
    for steps in found.values():
        assert_equal(steps, golden[ONE], rel=1e-4, abs=1e-5)


@pytest.mark.grid
@pytest.mark.parametrize("launch", ["cpu 2", "cpu_zero3 2"])
def test_checkpointed_layers_change_no_bit(place, launch):
    lora = {"use_peft": "true", "lora_target_modules": "all-linear"}
    models = {"full": {"model_name_or_path": place.folder / "olmo3"}}
    models["lora"] = models["full"] | lora
    runs = {}
    for model, fields in models.items():
        runs |= {f"{launch}, {model}, {k} of 3": fields | {"checkpointed_layers": k} for k in (0, 2, 3)}
    found = read_metrics(place.run_many(launch, runs))
    for model in models:
        none, two, three = (found[f"{launch}, {model}, {k} of 3"] for k in (0, 2, 3))
        assert none == two == three and len(none) == 8


@pytest.mark.parametrize(("launch", "combinations"), [("cpu 2", FEW), *(in_grid(*case) for case in BF16_GRID)])
def test_bf16_at_step_0_is_ln_2_and_dtypes_are_right(place, launch, combinations, request):
    if combinations is FEW:
        folders = {name: f for name, f in request.getfixturevalue("zero2").items() if name.startswith("bf16")}
    else:
        folders = place.run_many(launch, bf16_runs(place, launch, combinations))
    assert folders
    for name, folder in folders.items():
        assert logged(folder, "eval_loss")[0]["eval_loss"] == pytest.approx(math.log(2), abs=1e-3), name
        dtypes = json.loads((folder / "dtypes.json").read_text())
        is_deepspeed = launch != "single" and "fsdp" not in launch
        assert dtypes["parameters"] == ["torch.bfloat16" if is_deepspeed else "torch.float32"], name
        assert dtypes["reference"] == (["torch.float32"] if "cached" in name else []), name  # live: computed later
        assert {kind for kind in dtypes["masters"] + dtypes["moments"]} == {"torch.float32"}, name
        assert dtypes["computed"] == "torch.bfloat16", name
        assert dtypes.get("seconds") == (14400 if is_deepspeed else None)  # ddp_timeout
        rotary = [kind for key, kind in dtypes["buffers"].items() if "inv_freq" in key]
        assert set(rotary) == {"torch.float32"}, name


START = """import os, sys
sys.path.insert(0, os.getcwd())
import train_dpo
"""
LOADING = f"""{START}from sfm_dpo.train import trainer

class Trainer(train_dpo.SFMDPOTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        sys.stdout.write(f"loaded in {{self.model.dtype}}\\n")  # print would mix with the other rank's

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        if self.state.global_step == 1:  # in the second step
            loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss

if "LOAD_FP32" in os.environ:
    trainer.launched_with = lambda: "none"
sys.exit(train_dpo.main(sys.argv[1:], Trainer))
"""


@pytest.mark.grid
def test_weights_loaded_in_bf16_are_what_deepspeed_makes_of_fp32_and_a_skipped_update_is_seen(place, tmp_path):
    (tmp_path / "train_dpo.py").write_text(LOADING)
    fields = BF16 | {"max_length": 96, "max_steps": 5, "eval_fraction": 0, "learning_rate": 1e-4, "guard": "warn"}
    fields |= {"model_name_or_path": place.folder / "long/olmo3", "dataset_name": place.folder / LONG}
    runs = {}
    for dtype, env in {"bfloat16": {}, "float32": {"LOAD_FP32": "1"}}.items():
        run = place.start(dtype, 2, script=tmp_path / "train_dpo.py", env=env, **fields).finish()
        assert f"loaded in torch.{dtype}" in run.log, run.log[-3000:]
        runs[dtype] = run
    run = runs["bfloat16"]
    assert_same_run(run, runs["float32"])
    assert json.loads((run.folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert [entry.get("skipped_updates") for entry in logged(run.folder)] == [None, 1, 1, 1, 1]
    assert "guard: warning: skipped_update at step 2, began at step 2: DeepSpeed has skipped 1 update(s)" in run.log


MAPPED = f"""{START}
class Trainer(train_dpo.SFMDPOTrainer):
    def _prepare_for_training(self, *args):
        result = super()._prepare_for_training(*args)
        files = [line.split()[-1] for line in open("/proc/self/maps") if "optim_states" in line]
        sys.stdout.write(f"mapped {{len(set(files))}} of {{len(self.optimizer.optimizer.optimizer.state)}}\\n")
        return result

sys.exit(train_dpo.main(sys.argv[1:], Trainer))
"""


@pytest.fixture(scope="module")
def uninterrupted(place) -> tuple[Run, dict]:
    """In bf16 under ZeRO-2, and its fields; gradients are clipped."""
    fields = BF16 | {"max_length": 96, "max_steps": 6, "save_strategy": "steps", "save_steps": 2, "eval_fraction": 0}
    fields |= {"model_name_or_path": place.folder / "long/olmo3", "dataset_name": place.folder / LONG}
    fields |= {"learning_rate": 1e-4, "max_grad_norm": 0.5, "warmup_steps": 0}
    run = place.start("uninterrupted", 2, **fields).finish()
    assert len({entry["loss"] for entry in logged(run.folder)}) == 6 and logged(run.folder)[0]["grad_norm"] > 0.5
    return run, fields


HOSTS = [("cpu", "cpu"), ("cpu", "cpu_offload"), ("cpu_offload", "cpu_offload"), ("cpu_offload", "cpu")]


@pytest.mark.grid
@pytest.mark.parametrize("launches", sampled(HOSTS, 2))
def test_a_bf16_run_resumes_bitwise_with_its_optimizer_on_the_host_or_not(place, uninterrupted, tmp_path, launches):
    expected, fields = uninterrupted
    name = "stopped " + " ".join(launches)
    place.start(name, 2, launches[0], **fields).stop_at(2)
    (tmp_path / "train_dpo.py").write_text(MAPPED)
    again = place.start(name, 2, launches[1], script=tmp_path / "train_dpo.py", **fields).finish()
    assert_same_run(again, expected)
    assert re.search(f"mapped {1 if launches[1] == 'cpu_offload' else 0} of [1-9]", again.log), again.log
