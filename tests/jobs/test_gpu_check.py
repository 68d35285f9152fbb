"""The GPU check: its order and its table. All of it on two CPU processes: tests/slurm/test_submit.py."""

import json

from sfm_dpo.jobs import gpu_check
from sfm_dpo.jobs.gpu_check import Place, check_launcher, run_checks


def test_a_check_that_crashes_is_a_fail_and_one_without_its_input_is_skipped(
    tiny_folder, tmp_path, monkeypatch, capsys
):
    recipe = ["--model_name_or_path", str(tiny_folder("olmo3")), "--dataset_name", "none.jsonl"]
    place = Place(tmp_path / "check-gpu", recipe, 2, on_gpu=False)

    def crash(place):
        place.call("crash", "bash", "-c", "echo working; echo 'error: no such thing' >&2; exit 3")

    def measure(place):
        assert [row["result"] for row in json.loads((place.folder / "checks.json").read_text())] == ["FAIL"]
        return None, "12 tokens/s"

    checks = {"one": crash, "two": measure, "ZeRO-2": lambda place: check_launcher(place, "zero2")}
    monkeypatch.setattr(gpu_check, "CHECKS", checks)
    rows = run_checks(place)
    assert [row["result"] for row in rows] == ["FAIL", "measured", "skipped"]
    assert rows[0]["found"].startswith("RuntimeError: exit code 3: error: no such thing (")
    assert "12 tokens/s" in capsys.readouterr().out
