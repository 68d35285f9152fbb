"""bf16 as users run it, on CPU processes: step 0 is ln 2, and every tensor has the dtype it should have."""

import json
import math

import pytest

from tests.e2e.runs import Place, assert_same_run, make_place
from tests.toolbox import logged

FIELDS = {
    "use_cpu": "true",
    "bf16": "true",
    "max_length": 1100,
    "max_prompt_length": None,
    "global_batch_size": 4,
    "max_steps": 2,
    "eval_fraction": 0.25,
    "learning_rate": 1e-6,
}
LOSSES = {"sigmoid_norm": 5, "sigmoid": 0.1}
PATHS = {
    "shared, cached": {},
    "packed, cached": {"prefix_sharing": "false"},
    "padded, live": {"padding_free": "false", "precompute_ref_log_probs": "false"},
}
EVERY = [(architecture, loss, path) for architecture in ("gpt_neox", "olmo3") for loss in LOSSES for path in PATHS]
FEW = [("gpt_neox", "sigmoid", "shared, cached")]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    """Responses of a thousand tokens: sums of log-probs are some 5,000 nats, in steps of 32 in bf16."""
    rows = [
        {"prompt": f"What is {i}?", "chosen": "indeed " * (140 + i), "rejected": "by no means " * (80 + i % 3)}
        for i in range(12)
    ]
    long = {"max_position_embeddings": 2048}
    return make_place(tmp_path_factory.mktemp("bf16"), rows, {"olmo3": long, "gpt_neox": long}, FIELDS)


LAUNCHES = ("single", "cpu 2", "cpu_zero3 2", "cpu_fsdp2 2")
GRID = [pytest.param(launch, EVERY, marks=pytest.mark.grid) for launch in LAUNCHES]


@pytest.mark.parametrize(
    ("launch", "combinations"),
    [("cpu 2", FEW), *GRID],
)
def test_step_0_is_ln_2_and_dtypes_are_right(place, launch, combinations):
    runs = {
        f"{launch} {len(combinations)} {architecture} {loss} {path}": {
            "model_name_or_path": place.folder / architecture,
            "loss_type": loss,
            "beta": LOSSES[loss],
            **PATHS[path],
        }
        for architecture, loss, path in combinations
    }
    deepspeed = launch in ("cpu 2", "cpu_zero3 2")
    for name, folder in place.run_many(launch, runs).items():
        assert logged(folder, "eval_loss")[0]["eval_loss"] == pytest.approx(math.log(2), abs=1e-3), name
        dtypes = json.loads((folder / "dtypes.json").read_text())
        assert dtypes["parameters"] == ["torch.bfloat16" if deepspeed else "torch.float32"], name
        assert dtypes["reference"] == (["torch.float32"] if "cached" in name else []), name  # live: computed later
        assert {kind for kind in dtypes["masters"] + dtypes["moments"]} == {"torch.float32"}, name
        rotary = [kind for key, kind in dtypes["buffers"].items() if "inv_freq" in key]
        assert set(rotary) == {"torch.float32"}, name


@pytest.mark.grid
def test_a_stop_and_the_same_command_is_the_uninterrupted_run(place):
    fields = {"max_length": 96, "max_steps": 6, "save_strategy": "steps", "save_steps": 2, "eval_fraction": 0}
    uninterrupted = place.start("uninterrupted", 2, **fields).finish()
    place.start("stopped", 2, **fields).stop_at(2)
    assert_same_run(place.start("stopped", 2, **fields).finish(), uninterrupted)
