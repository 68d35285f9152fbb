"""Golden losses: what fixed-seed runs log, against the values recorded in golden.json.

`RECORD=1 python -m pytest tests/e2e/test_golden.py` records them anew, which only a change of the objective, the order
of the pairs or the initial weights justifies. Machines differ in the last bits, hence the tolerance.
"""

import json
import os
from pathlib import Path

import pytest

from tests.e2e.runs import Place, make_place
from tests.toolbox import logged, pairs

GOLDEN = Path(__file__).with_name("golden.json")
METRICS = ("loss", "rewards/margins", "grad_norm")
ARCHITECTURES = ["gpt_neox", "olmo3", "llama"]
ONE = "llama, packed, cached, 1"
COMPILED = {"torch_compile": "true", "torch_compile_backend": "aot_eager"}
PATHS = {
    "padded": {"padding_free": "false", "precompute_ref_log_probs": "false", "train_sampling_strategy": "random"},
    "packed": {"precompute_ref_log_probs": "false"},
    "packed, cached": {},
    "compiled": COMPILED,  # else packed, cached
    "shared": {"prefix_sharing": "true"},
    "shared, compiled": {"prefix_sharing": "true"} | COMPILED,
}
FIELDS = {
    "prefix_sharing": "false",
    "max_steps": 8,
    "learning_rate": 5e-5,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return make_place(tmp_path_factory.mktemp("golden"), pairs(), {name: {} for name in ARCHITECTURES}, FIELDS)


def train_all(place: Place, processes: int, runs: list[tuple[str, str]]) -> dict[str, list[list[float]]]:
    """METRICS of each step of runs (architecture, path), all in one start."""
    fields = {
        f"{architecture}, {path}, {processes}": {"model_name_or_path": place.folder / architecture} | PATHS[path]
        for architecture, path in runs
    }
    folders = place.run_many(f"cpu {processes}" if processes > 1 else "single", fields)
    return {
        name: [[entry[metric] for metric in METRICS] for entry in logged(folder)] for name, folder in folders.items()
    }


def assert_equal(steps: list[list[float]], expected: list[list[float]], **tolerance: float) -> None:
    assert len(steps) == 8
    for mine, theirs in zip(steps, expected, strict=True):
        assert mine == pytest.approx(theirs, **tolerance)


@pytest.mark.parametrize(
    ("processes", "architectures"),
    [
        pytest.param(1, ARCHITECTURES, id="one process"),
        pytest.param(2, ARCHITECTURES[:1], id="ZeRO-2"),
        pytest.param(2, ARCHITECTURES[1:], id="ZeRO-2, others", marks=pytest.mark.grid),
    ],
)
def test_losses_are_the_recorded_ones(place, processes, architectures):
    """Also with shared prompts, in one process, where rounding differs more."""
    shared = [("llama", "shared")] if processes == 1 else []
    paths = ["padded", "packed", "packed, cached"]
    trained = train_all(place, processes, [(a, path) for a in architectures for path in paths] + shared)
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
    found = train_all(place, 4, [("llama", path) for path in ("packed, cached", "compiled", "shared, compiled")])
    # with the reference in memory instead of its log-probs in the cache, and on two ranks
    found |= {name: golden[name] for name in ("llama, packed, 1", "llama, packed, cached, 2")}
    for steps in found.values():
        assert_equal(steps, golden[ONE], rel=1e-4, abs=1e-5)
