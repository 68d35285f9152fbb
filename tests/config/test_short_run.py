"""A recipe with everything that a short run cannot use passes the configuration of each command that makes one."""

import pytest
import yaml

from sfm_dpo.cluster.gpu_check import GpuCheck
from sfm_dpo.common.errors import UserError
from sfm_dpo.config.effects import short_run
from sfm_dpo.config.fields import Config, parse_config

RECIPE = {
    "datasets": [{"path": "a.jsonl"}, {"path": "b.jsonl"}],
    "max_length": 4096,
    "max_prompt_length": 2048,
    "overlong": "drop",
    "max_samples": 1000,
    "eval_fraction": 0.1,
    "eval_datasets": {"math": "math.jsonl"},
    "eval_strategy": "steps",
    "eval_steps": 5,
    "save_steps": 5,
    "guard_generations": 10,
    "filter_script": "keep.py",
    "drop_duplicates": "prompts",
    "eval_command": "no_such_command {checkpoint} {out}",
    "profile_steps": [3, 4],
    "report_to": ["wandb", "tensorboard"],
    "warmup_steps": 1000,
    "checkpointed_layers": 24,
    "push_to_hub": True,
    "resume_from_checkpoint": "no/such/checkpoint-5",
    "padding_free": True,
    "prefix_sharing": True,
    "torch_compile": True,
    "torch_compile_backend": "aot_eager",
    "use_cpu": True,
    "dtype": "float32",
    "ref_model_name_or_path": "org/other",
    "use_peft": False,
}


@pytest.fixture
def argv(tiny_folder, tmp_path) -> list[str]:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE | {"model_name_or_path": str(tiny_folder("llama"))}))
    return ["--config", str(recipe)]


def assert_short(config: Config) -> None:
    train = config.train
    assert train.warmup_steps == 0
    assert train.report_to == [] and not train.push_to_hub and train.resume_from_checkpoint is None
    assert train.eval_fraction == 0 and train.eval_datasets is None and train.eval_strategy == "no"
    assert train.guard_generations == 0
    assert train.eval_command is None and train.profile_steps is None and train.deepspeed is None


def test_the_data_and_their_filters_are_the_recipes(argv):
    assert parse_config(short_run(argv, eval_fraction=None), training=False).train.eval_fraction == 0.1  # as plan.py
    kept = parse_config(short_run(argv))
    assert_short(kept)
    assert len(kept.data.datasets) == 2 and kept.train.filter_script == "keep.py" and kept.train.max_samples == 1000


def test_gpu_check(argv, tmp_path):
    check = GpuCheck(tmp_path / "check", argv, 1, on_gpu=False)
    for fields in ({}, {"save_strategy": "steps", "save_steps": 3}):
        config = parse_config(check.options("run", **fields), world_size=1)
        assert_short(config)
        assert config.train.overlong == "truncate" and config.train.checkpointed_layers is None
        assert config.train.loss_type == ["sigmoid_norm"] and config.train.beta == 5
    full = parse_config(check.options("run", full_model=True, max_samples=8), world_size=1)
    assert_short(full)
    assert len(full.data.datasets) == 2 and full.train.max_samples == 8 and full.train.checkpointed_layers == 24


def test_a_recipe_that_cannot_be_read_leaves_the_last_check(tmp_path):
    check = GpuCheck(tmp_path / "check", ["--model_name_or_path", "none", "--no_such_field", "1"], 1, on_gpu=False)
    (check.folder / "full").mkdir(parents=True)
    with pytest.raises(UserError, match="no_such_field"):
        check.run()
    assert (check.folder / "full").exists()
