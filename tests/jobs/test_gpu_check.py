"""The GPU check: its order, its table, its verdicts. All of it on two CPU processes: tests/slurm/test_submit.py."""

import json
from pathlib import Path
from typing import Any

import pytest

from sfm_dpo.common.files import write_json
from sfm_dpo.jobs import gpu_check
from sfm_dpo.jobs.gpu_check import (
    Place,
    Skipped,
    check_kernels,
    check_launcher,
    check_memory,
    check_paths,
    check_resume,
    check_rounding,
    run_checks,
)


def test_a_check_that_crashes_is_a_fail_and_one_without_its_input_is_skipped(
    tiny_folder, tmp_path, monkeypatch, capsys
):
    """After each check the files hold what is known so far."""
    recipe = ["--model_name_or_path", str(tiny_folder("olmo3")), "--dataset_name", "none.jsonl"]
    place = Place(tmp_path / "check-gpu", recipe, 2, on_gpu=False)

    def crash(place):
        place.calibration |= {"gpu": "B200", "flash": "FA4"}
        place.call("crash", "bash", "-c", "echo working; echo 'error: no such thing' >&2; exit 3")

    def measure(place):
        assert [row["result"] for row in json.loads((place.folder / "checks.json").read_text())] == ["FAIL"]
        calibration = json.loads((place.folder / "calibration.json").read_text())
        assert (calibration["gpu"], calibration["flash"], calibration["processes"]) == ("B200", "FA4", 2)
        assert "mfu" not in calibration
        return None, "12 tokens/s"

    monkeypatch.setattr(gpu_check, "CHECKS", {"one": crash, "two": measure, "resume": check_resume})
    rows = run_checks(place)
    assert [row["result"] for row in rows] == ["FAIL", "measured", "skipped"]
    assert rows[0]["found"].startswith("RuntimeError: exit code 3: error: no such thing (")
    assert "12 tokens/s" in capsys.readouterr().out


class Trained(Place):
    """Instead of training: the losses of each run are given, the gradient norm is 10; of each kernel its times."""

    losses: dict[str, float]
    times: dict[str, list[float]]

    def call(self, name: str, *command: str) -> None:
        if (kernel := name.split("-")[1]) not in self.times:
            raise RuntimeError(f"{kernel} cannot be activated")
        write_json(Path(command[-1]), self.times[kernel])

    def train(self, run: str, launch: str, **fields: Any) -> list[dict[str, Any]]:
        (self.folder / run).mkdir()
        steps = [
            {"loss": 0.6931, "grad_norm": 10.0},
            {"loss": self.losses[run], "grad_norm": 10.0},
            {"eval_loss": 1.0},
        ]
        write_json(self.folder / run / "trainer_state.json", {"log_history": steps})
        return self.steps(run)


@pytest.fixture
def trained(tmp_path) -> Trained:
    place = Trained(tmp_path, [], 4, on_gpu=True)
    place.losses = {"single": 0.69, "single-shape": 0.68, "zero2": 0.72, "fsdp2": 0.735, "zero3": float("nan")}
    return place


def test_launchers_agree_with_one_process_within_the_rounding_of_this_model(trained):
    assert check_rounding(trained)[1].startswith("another batch shape: loss within 1.0e-02, gradient norm within 0.0%")
    assert trained.tolerance == pytest.approx([0.04, 2**-6])
    passed = [check_launcher(trained, launch)[0] for launch in ("zero2", "fsdp2", "zero3")]
    assert passed == [True, False, False]


def test_where_rounding_is_not_a_number_nothing_agrees(trained):
    trained.losses["single-shape"] = float("nan")
    check_rounding(trained)
    assert check_launcher(trained, "zero2")[0] is False


def test_the_kernel_is_the_fastest_of_those_that_train_as_fa2_does(trained):
    check_rounding(trained)
    trained.losses |= {"single-FA2": 0.69, "single-FA3": 0.70, "single-FA4": 0.80}
    trained.times = {"FA2": [3.0, 9.0], "FA3": [2.0, 6.0], "FA4": [1.0, 3.0]}
    passed, text = check_kernels(trained)
    assert passed is False and "FA4 (NOT USED) forward 1.00 ms, backward 3.00 ms, loss within 1.1e-01" in text
    assert trained.calibration["flash"] == "FA3"


@pytest.mark.parametrize("installed", [False, True])
def test_a_kernel_that_is_not_installed_is_named_and_one_that_does_not_work_fails(trained, installed, monkeypatch):
    monkeypatch.setattr(gpu_check, "is_installed", lambda kernel: installed)
    check_rounding(trained)
    trained.losses |= {"single-FA2": 0.69}
    trained.times = {"FA2": [3.0, 9.0]}
    passed, text = check_kernels(trained)
    assert passed is (False if installed else None) and text.endswith(
        "; FA3: FA3 cannot be activated; FA4: FA4 cannot be activated"
    )
    assert trained.calibration["flash"] == "FA2"


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_resumed_run_may_differ_by_rounding_on_a_gpu_and_not_on_a_cpu(trained, on_gpu):
    trained.on_gpu = on_gpu
    check_rounding(trained)
    trained.losses["resumed"] = 0.71
    trained.train("zero2", "zero2")
    (trained.folder / "zero2" / f"checkpoint-{trained.max_steps // 2}").mkdir()
    passed, text = check_resume(trained)
    assert passed is on_gpu and text.endswith("deterministic" if on_gpu else "must be bitwise")


@pytest.mark.parametrize(("measured", "passed"), [(8.0, False), (9.0, True), (11.0, True), (12.0, False)])
def test_measured_memory_is_near_the_plan_on_both_sides(trained, measured, passed, monkeypatch):
    steps = [{"perf/peak_memory_gib": measured, "perf/reserved_memory_gib": 12.0, "perf/tokens_per_second": 5.0}] * 2
    monkeypatch.setattr(trained, "train", lambda *args, **fields: steps)
    (trained.folder / "memory").mkdir()
    write_json(trained.folder / "memory/data.json", {"settings": {"memory": {"bytes": 10 * 2**30}}})
    (trained.folder / "memory.log").write_text("chosen by memory: 4 pair(s) per device, of 70 GiB")
    assert check_memory(trained)[0] is passed


def test_parity_in_fp32_that_does_not_fit_is_skipped(trained, monkeypatch):
    def run_out(*args):
        raise RuntimeError("exit code 1: torch.OutOfMemoryError: CUDA out of memory")

    monkeypatch.setattr(trained, "call", run_out)
    with pytest.raises(Skipped, match="do not fit: exit code 1"):
        check_paths(trained)
