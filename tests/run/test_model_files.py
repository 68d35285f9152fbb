"""What a run saves is read alike by Transformers 4 and 5, and has its base's tokenizer and dtype."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import train_dpo
from sfm_dpo.common.files import PROJECT
from sfm_dpo.run.model_files import find_folder, list_rope_keys
from tests.run import transformers4
from tests.toolbox import edit, on_cpu, pairs, write_jsonl

TRANSFORMERS_4 = PROJECT / ".venv-transformers4"
ONE_STEP = {"max_steps": 1, "warmup_steps": 0, "per_device_train_batch_size": 4}


def run_4(*words) -> str:
    """What transformers4.py prints under Transformers 4."""
    env = os.environ | {"PYTHONPATH": str(TRANSFORMERS_4), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, transformers4.__file__, *map(str, words)]
    return subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.grid
@pytest.mark.usefixtures("environment", "no_report")
def test_transformers_4_and_5_read_a_result_as_its_base(tmp_path):
    """Base and result have the same weights: the learning rate is too small to change one."""
    if not TRANSFORMERS_4.is_dir():
        pytest.skip("needs Transformers 4: make transformers4")
    run_4("make", tmp_path / "base")
    rows = write_jsonl(tmp_path / "p.jsonl", pairs(4))
    for kind in transformers4.BASES:
        fields = ONE_STEP | {"learning_rate": 1e-30, "save_strategy": "no"}
        assert train_dpo.main(on_cpu(tmp_path / "base" / kind, rows, tmp_path / "run" / kind, **fields)) == 0
    folders = [str(tmp_path / place / kind) for kind in transformers4.BASES for place in ("base", "run")]
    by_4 = json.loads(run_4("read", *folders))
    by_5 = {folder: transformers4.read(folder) for folder in folders}
    for found in (by_4, by_5):
        for base, result in zip(folders[::2], folders[1::2], strict=True):
            assert found[result] == found[base]
            assert found[base]["dtype"] == "torch.bfloat16"
