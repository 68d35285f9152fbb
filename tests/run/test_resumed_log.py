"""What a run that was killed and resumed has logged is what an undisturbed one has, also where it logs seldom."""

import json
import shutil

import pytest

import train_dpo
from sfm_dpo.run.reader import read_run
from tests.e2e.runs import FIELDS
from tests.toolbox import as_options, logged, pairs


@pytest.mark.slow
def test_a_killed_run_logs_the_same_figures(tmp_path, tiny_folder, write_rows, no_report):
    fields = FIELDS | {
        "model_name_or_path": tiny_folder("llama"),
        "dataset_name": write_rows("pairs.jsonl", pairs(40)),
    }
    fields |= {"use_cpu": "true", "logging_steps": 5, "save_steps": 2, "save_total_limit": 3}
    logs = []
    for name in ("whole", "killed"):
        if name == "killed":  # in step 5, after checkpoint-4
            shutil.copytree(tmp_path / "whole", tmp_path / name)
            for file in (tmp_path / name).iterdir():
                if file.is_file() and file.name not in ("resolved_config.yaml", "environment.json", "log.jsonl"):
                    file.unlink()
            shutil.rmtree(tmp_path / name / "checkpoint-5")
            assert [entry["step"] for entry in read_run(tmp_path / name)["log"]] == [2, 4, 5, 5]  # the last: a summary
            (tmp_path / name / "status.json").write_text('{"state": "running", "step": 4, "job": null, "pid": null}')
        assert train_dpo.main(as_options(fields | {"output_dir": tmp_path / name})) == 0
        logs.append(logged(tmp_path / name))
        history = json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
        assert [json.loads(line) for line in (tmp_path / name / "log.jsonl").open()] == history
    assert [entry["step"] for entry in logs[0]] == [2, 4, 5]
    assert logs[0] == logs[1]
    assert logs[0][-1]["num_tokens"] > logs[0][0]["num_tokens"] > 0
