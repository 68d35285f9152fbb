"""Golden losses: what fixed-seed runs log, against the values recorded in golden.json.

`RECORD=1 python -m pytest tests/e2e/test_golden.py` records them anew, which only a change of the objective, the order
of the pairs or the initial weights justifies. Machines differ in the last bits, hence the tolerance.
"""

import json
import os
from pathlib import Path

import pytest

from tests.e2e.runs import Place, pairs, run_many
from tests.tiny_models import tiny_model, tiny_tokenizer

GOLDEN = Path(__file__).with_name("golden.json")
METRICS = ("loss", "rewards/margins", "grad_norm")
ONE = "llama, packed, cached, 1"
PATHS = {
    "padded": {"padding_free": "false", "precompute_ref_log_probs": "false", "train_sampling_strategy": "random"},
    "packed": {"precompute_ref_log_probs": "false"},
    "packed, cached": {},
    "compiled": {"torch_compile": "true", "torch_compile_backend": "aot_eager"},  # else packed, cached
    "shared": {"prefix_sharing": "true"},
    "shared, compiled": {"prefix_sharing": "true", "torch_compile": "true", "torch_compile_backend": "aot_eager"},
}
FIELDS = {
    "prefix_sharing": "false",
    "save_strategy": "no",
    "preflight": "skip",
    "guard": "skip",
    "max_steps": 8,
    "learning_rate": 5e-5,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    folder = tmp_path_factory.mktemp("golden")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs()))
    for architecture in ARCHITECTURES:
        tiny_model(architecture).save_pretrained(folder / architecture)
        tiny_tokenizer().save_pretrained(folder / architecture)
    return Place(folder, folder, folder / "hf", defaults=FIELDS)


ARCHITECTURES = ["gpt_neox", "olmo3", "llama"]


@pytest.mark.parametrize(
    ("processes", "architectures"),
    [
        pytest.param(1, ARCHITECTURES, id="one process"),
        pytest.param(2, ARCHITECTURES[:1], id="ZeRO-2"),
        pytest.param(2, ARCHITECTURES[1:], id="ZeRO-2, others", marks=pytest.mark.grid),
    ],
)
def test_losses_are_the_recorded_ones(place, processes, architectures):
    paths = ["padded", "packed", "packed, cached"]
    logged = train_all(place, processes, [(a, path) for a in architectures for path in paths])
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("RECORD"):
        lines = [f"{json.dumps(name)}: {json.dumps(steps)}" for name, steps in (golden | logged).items()]
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        pytest.skip("recorded")
    for name, steps in logged.items():
        assert len(steps) == 8
        for mine, expected in zip(steps, golden[name], strict=True):
            assert mine == pytest.approx(expected, rel=1e-5, abs=1e-5), name


def test_shared_prompts_give_the_recorded_losses(place):
    golden = json.loads(GOLDEN.read_text())
    for steps in train_all(place, 1, [("llama", "shared")]).values():
        for mine, expected in zip(steps, golden[ONE], strict=True):
            assert mine == pytest.approx(expected, rel=5e-5, abs=5e-5)


@pytest.mark.grid
def test_one_two_and_four_ranks_agree_compiled_or_not_cached_or_not(place):
    """The order depends on the global batch alone: what differs is the order of summation."""
    golden = json.loads(GOLDEN.read_text())
    golden |= train_all(place, 4, [("llama", path) for path in ("packed, cached", "compiled", "shared, compiled")])
    live = "llama, packed, 1"  # the reference in memory instead of its log-probs in the cache
    for name in (
        live,
        "llama, packed, cached, 2",
        "llama, packed, cached, 4",
        "llama, compiled, 4",
        "llama, shared, compiled, 4",
    ):
        for mine, expected in zip(golden[name], golden[ONE], strict=True):
            assert mine == pytest.approx(expected, rel=1e-4, abs=1e-5), name


def train_all(place: Place, processes: int, runs: list[tuple[str, str]]) -> dict[str, list[list[float]]]:
    """METRICS of each step of runs (architecture, path), all in one start."""
    fields = {
        f"{architecture}, {path}, {processes}": {"model_name_or_path": place.folder / architecture} | PATHS[path]
        for architecture, path in runs
    }
    folders = run_many(place, f"cpu {processes}" if processes > 1 else "single", fields)
    return {name: read_metrics(folder) for name, folder in folders.items()}


def read_metrics(run: Path) -> list[list[float]]:
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    return [[entry[name] for name in METRICS] for entry in history if "loss" in entry]
