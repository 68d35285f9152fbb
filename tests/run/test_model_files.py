"""What a run saves is read alike by Transformers 4 and 5, and has its base's tokenizer and dtype."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import train_dpo
from sfm_dpo.common.files import PROJECT
from sfm_dpo.run.model_files import TOKENIZER_FILES, find_folder, list_files, list_rope_keys
from tests.hub_server import Repo
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


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    files = [path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.usefixtures("environment", "no_report")
def test_a_run_keeps_the_tokenizer_files_and_the_pad_token_of_its_base(tiny_folder, tmp_path):
    """In checkpoint and result. Transformers 5 would leave most of them out and add chat_template.jinja."""
    base = shutil.copytree(tiny_folder("llama"), tmp_path / "base")
    template = (base / "chat_template.jinja").read_text()
    (base / "chat_template.jinja").unlink()
    added = json.loads((base / "tokenizer.json").read_text())["added_tokens"]
    special = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"], "chat_template": template}
    tokens = {str(token.pop("id")): token for token in added}
    config = special | {"added_tokens_decoder": tokens, "tokenizer_class": "PreTrainedTokenizerFast"}
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    (base / "additional_chat_templates").mkdir()
    for name in ("additional_chat_templates/tools.jinja", "merges.txt", "vocab.tiktoken", "special_tokens_map.json"):
        (base / name).write_text("{}")
    (base / "preprocessor_config.json").write_text("{}")
    edit(base / "config.json", pad_token_id=None)
    rows = write_jsonl(tmp_path / "p.jsonl", pairs(4))
    assert train_dpo.main(on_cpu(base, rows, tmp_path / "run", **ONE_STEP)) == 0
    assert len(list_files(base, TOKENIZER_FILES)) == 7
    for folder in (tmp_path / "run", tmp_path / "run/checkpoint-1"):
        assert tokenizer_files(folder) == tokenizer_files(base)
        assert json.loads((folder / "config.json").read_text())["pad_token_id"] is None


@pytest.mark.usefixtures("environment", "no_report")
def test_a_model_on_the_hub_gives_the_tokenizer_files_that_training_does_not_read(hub, tiny_folder, tmp_path):
    files = {path.name: path.read_bytes() for path in tiny_folder("llama").iterdir()} | {"merges.txt": b"a b"}
    hub.repos["lab/base"] = Repo(False, {"1" * 40: files}, {"main": "1" * 40})
    rows = write_jsonl(tmp_path / "p.jsonl", pairs(4))
    assert train_dpo.main(on_cpu("lab/base", rows, tmp_path / "run", **ONE_STEP)) == 0
    names = {"chat_template.jinja", "merges.txt", "tokenizer.json", "tokenizer_config.json"}
    assert tokenizer_files(tmp_path / "run") == {name: files[name] for name in names}
    assert find_folder("lab/other", None) is find_folder(str(tmp_path / "gone"), None) is None


DEFAULT = {"rope_type": "default", "rope_theta": 5.0}
LINEAR = {"rope_type": "linear", "rope_theta": 7.0, "factor": 8.0}
LONG = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
BY_LAYER = {"full_attention": LINEAR, "sliding_attention": DEFAULT}
NEOX_4 = {"rotary_emb_base": 5.0, "rotary_pct": 0.5, "rope_scaling": None}
LINEAR_4 = {"rope_theta": 7.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}


@pytest.mark.parametrize(
    ("kind", "rope", "written"),
    [
        ("llama", LINEAR, LINEAR_4),
        ("gpt_neox", DEFAULT | {"partial_rotary_factor": 0.5}, NEOX_4),
        ("phi3", LONG | DEFAULT | {"rope_type": "longrope", "original": 9}, {"rope_theta": 5.0, "rope_scaling": LONG}),
        ("gemma3_text", BY_LAYER, LINEAR_4 | {"rope_local_base_freq": 5.0}),
        ("new", {"full_attention": DEFAULT, "sliding_attention": LINEAR}, {}),  # no field of Transformers 4 says this
        ("beam", {"full_attention": None, "sliding_attention": DEFAULT}, {}),  # some layers have no RoPE
        ("gpt2", None, {}),
    ],
)
def test_rope_is_written_as_transformers_4_writes_it(kind, rope, written):
    config = {"model_type": kind, "rope_parameters": rope, "original": 9}  # Phi 3's original_max_position_embeddings
    assert list_rope_keys(config) == written
