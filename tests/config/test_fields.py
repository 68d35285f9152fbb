"""Configuration: precedence, YAML's traps, wrong input, and a dump that reads back."""

import dataclasses
import errno
import json
import os
import re
import shutil
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import urlsplit

import check_config
import pytest
import yaml
from transformers import TrainingArguments
from trl import DPOConfig
from wandb.sdk.lib.urls import DEFAULT_BASE_URL

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import PROJECT
from sfm_dpo.config.effects import INHERITED, NO_EFFECT, REFUSED, ROUNDING, TOKENS, UNUSED, WEIGHTS
from sfm_dpo.config.fields import DATACLASSES, parse_config, resolve_report_to
from tests.toolbox import as_options, edit

NEEDED = {"model_name_or_path": "org/model", "dataset_name": "pairs.jsonl", "use_cpu": True}


@pytest.fixture
def parse(tmp_path):
    """A function: (recipe's fields or text, command line after it) -> Config."""

    def run(recipe=None, *cli: str, world_size: int = 1):
        path = tmp_path / "recipe.yaml"
        if isinstance(recipe, str):
            path.write_text(yaml.safe_dump(NEEDED) + recipe, encoding="utf-8")
        else:
            path.write_text(yaml.safe_dump({k: v for k, v in (NEEDED | (recipe or {})).items() if v != "absent"}))
        return parse_config(["--config", str(path), *cli], world_size=world_size)

    return run


def refused(parse, recipe=None, *cli: str, **kwargs) -> str:
    """The message of the UserError, which must be one line."""
    with pytest.raises(UserError) as caught:
        parse(recipe, *cli, **kwargs)
    message = str(caught.value)
    assert message.count("\n") == (int(message.split()[0]) if "fields to correct" in message else 0)
    assert caught.value.exit_code == 2
    return message


def test_command_line_beats_recipe_beats_defaults(parse):
    assert parse().train.seed == 42
    assert parse({"seed": 7}).train.seed == 7
    assert parse(None, "--seed 8").train.seed == 8, "quotes of a shell"
    assert parse({"seed": 7}, "--seed", "9").train.seed == 9
    assert parse({"seed": 7}, "--seed=9").train.seed == 9
    assert parse({"seed": 7}, "--config=recipes/demo.yaml").train.seed == 42  # the last one counts, as in a batch job
    # a field emptied in the recipe, a flag, a list
    assert parse({"max_length": None}).train.max_length is None
    assert parse({"max_length": None}, "--max_length", "64").train.max_length == 64
    assert parse({"use_peft": True}, "--use_peft", "false").model.use_peft is False
    assert parse({"gradient_checkpointing": True}, "--gradient_checkpointing=").train.gradient_checkpointing is None
    assert parse({"gradient_checkpointing": True}, "--no_gradient_checkpointing").train.gradient_checkpointing is False
    weighted = parse({"loss_type": "sigmoid_norm"}, "--loss_type", "sigmoid_norm", "sft", "--loss_weights", "1", "0.2")
    assert (weighted.train.loss_type, weighted.train.loss_weights) == (["sigmoid_norm", "sft"], [1.0, 0.2])


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("learning_rate", "1e-6", 1e-6),  # YAML 1.1 reads this as text
        ("eval_strategy", "no", "no"),  # YAML reads no as false
        ("output_dir", "on", "on"),
        ("gradient_checkpointing", "yes", True),
        ("model_init_kwargs", "{a: [1, two], b: {c: false}}", {"a": [1, "two"], "b": {"c": False}}),
        ("ref_model_name_or_path", "None", None),
        ("ref_model_name_or_path", "~/model", str(Path.home() / "model")),
    ],
)
def test_yaml_values_arrive_as_meant(parse, field, text, value):
    assert getattr(parse(f"{field}: {text}\n").train, field) == value


@pytest.mark.parametrize(
    ("field", "words", "value"),
    [
        ("loss_type", ["[sigmoid_norm, sft]"], ["sigmoid_norm", "sft"]),
        ("eval_datasets", ["{a: b.jsonl}"], '{"a": "b.jsonl"}'),
        ("lr_scheduler_kwargs", ["{num_cycles: 1e-6}"], {"num_cycles": 1e-6}),
        ("hub_revision", ["{step}"], "{step}"),
        ("max_steps", ["-1"], -1),
        ("padding_free", [], True),
    ],
)
def test_a_command_line_reads_the_yaml_of_a_recipe(parse, field, words, value):
    assert getattr(parse({"lr_scheduler_type": "cosine"}, f"--{field}", *words).train, field) == value
    with pytest.raises(UserError, match="weight_decay -1e-06: must be at least 0"):
        parse(None, "--weight_decay", "-1e-6")


@pytest.mark.parametrize(
    ("cli", "parts"),
    [
        ("--learning_rat 1", ["--learning_rat", "did you mean --learning_rate"]),  # no abbreviations
        ("--warmup_ratio 0.1", ["unknown option --warmup_ratio; here: warmup_steps (the same number: below 1"]),
        ("--gpus-per-node=8", ["Slurm's options come before the script: sbatch [options] scripts/dpo_train.sh"]),
        (
            "--seed -1 --lr 1 --lrs 1 --beta five",
            ["4 fields to correct", "yaml:\n- unknown option --lr; ", "\n- unknown option --lrs"],
        ),
        ("--seed -1 --beta five", ["\n- command line: beta: invalid float value: 'five'", "\n- seed -1: must be at"]),
        ("--loss_type simpo", ["loss_type simpo: unknown; here: none ("]),
        ("--loss_type [dpo]", ["loss_type dpo: unknown; here: loss_type: sigmoid (with `beta: 0.1`)"]),
        ("--bf16 auto", ["line: bf16: got auto; give true or false; here: none (the default: true on a GPU)"]),
        ("--loss_type [a", ["command line: loss_type: ParserError: "]),
        ("--eval_strategy sometimes", ["eval_strategy", "'sometimes'", "'epoch'"]),
        ("recipe.yaml", ["unknown option recipe.yaml; did you mean --config recipe.yaml?"]),
        ("--beta", ["beta", "expected one argument"]),
        ("--config --seed 1", ["config: expected one argument"]),
        ("--config nowhere.yaml", ["nowhere.yaml", "no such file"]),
        ("--config recipes/thnik.yaml", ["no such file; did you mean recipes/think.yaml?"]),
        ("--config recipes", ["recipes: is a folder; give a recipe, a .yaml file"]),
        ("-learning_rate 1e-6", ["unknown option -learning_rate; did you mean --learning_rate?"]),
        ("--seed 1 learning_rate=1e-6", ["unknown option learning_rate; did you mean --learning_rate?"]),
    ],
)
def test_wrong_command_line(parse, cli, parts):
    message = refused(parse, None, *cli.split())
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(("text", "kind"), [("- a", "a list"), ("a", "a text"), ("# beta: 5", "empty")])
def test_a_recipe_that_is_no_mapping(tmp_path, text, kind):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    with pytest.raises(UserError, match=f"^--config {recipe}: is {kind}; a recipe is a mapping"):
        parse_config(["--config", str(recipe)])
    with pytest.raises(UserError, match=rf"^unknown option {recipe}; did you mean --config {recipe}\?$"):
        parse_config([str(recipe)])


OUT_OF_RANGE = """
max_length=0 max_length=1 max_samples=0 global_batch_size=0 per_device_train_batch_size=-2 dataset_num_proc=0
per_device_eval_batch_size=0 save_steps=0.0 eval_steps=-3.0 seed=-1 seed=4294967296 eval_fraction=1.0
eval_fraction=-0.5 max_dropped_fraction=2.0 adam_beta2=2.0 lora_dropout=2.0 max_grad_norm=-1.0 beta=0.0 beta=nan
beta=inf learning_rate=-1.0 num_train_epochs=0.0 save_total_limit=1 auto_find_batch_size=True streaming=True
test_split_size=0.1 eval_strategy=steps deepspeed=ds_config.json max_steps=0 max_steps=-2 warmup_steps=nan
warmup_steps=-1.0 lora_r=32 use_dora=True checkpointed_layers=-1 dataloader_num_workers=-1
"""


@pytest.mark.parametrize("option", OUT_OF_RANGE.split())
def test_values_that_no_run_can_have(parse, option):
    assert option.replace("=", " ") + ": " in refused(parse, None, f"--{option}")


SORTED = {"loss_type": "aot", "beta": 0.1, "global_batch_size": 2, "per_device_train_batch_size": 2}


@pytest.mark.parametrize(
    ("recipe", "parts"),
    [
        ("learning_rat: 1.0e-6", ["learning_rat", "did you mean learning_rate"]),
        ("learning_rate: [1, 2]", ["learning_rate", "'[1, 2]'"]),
        ("learning_rate:", ["learning_rate", "empty"]),
        ("env: {WANDB_PROJECT: x}", ["unknown field 'env'; here: none (set variables in `.env`)"]),
        ("a: [b", ["not valid YAML"]),
        ("output_dir: {{ run }}", ["output_dir: ConstructorError: "]),
        ("model_init_kwargs: {a: 2026-13-01}", ["model_init_kwargs: ValueError: month must be in 1..12"]),
        ("output_dir: $SCRATCH/run", ["output_dir $SCRATCH/run: variables are replaced by a shell only"]),
        ({"model_init_kwargs": {"dtype": "bfloat16"}}, ["model_init_kwargs: cannot set a token, dtype or revision"]),
        ("beta: 5\nbeta: 0.1", ["beta is given twice; keep one"]),
        ({"max_length": 100, "max_prompt_length": 100}, ["max_prompt_length 100: ", "; set max_prompt_length: 50"]),
        ({"truncation_mode": "keep_end"}, ["truncation_mode", "keep_end", "keep_start"]),
        ({"model_name_or_path": "absent"}, ["model_name_or_path"]),
        ({"dataset_name": "absent"}, ["dataset_name"]),
        ({"loss_type": ["sigmoid_norm", "sft"], "loss_weights": [1.0]}, ["loss_weights"]),
        (SORTED | {"per_device_train_batch_size": 1}, ["loss_type ['aot']: sorts the pairs of a micro-batch"]),
        (SORTED | {"eval_fraction": 0.1}, ["loss_type ['aot']: sorts the pairs of an evaluation batch"]),
        ({"loss_type": []}, ["loss_type []: nothing would be trained"]),
        ({"f_divergence_type": "js"}, ["f_divergence_type js: unknown", "js_divergence"]),
        ({"loss_weights": [0]}, ["loss_weights [0.0]: give weights of at least 0, one of them above 0"]),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, ["lr_scheduler_type cosine_with_min_lr, lr_scheduler_kwargs"]),
        ({"lr_scheduler_kwargs": {"a": 1}}, ["lr_scheduler_kwargs {'a': 1}: TypeError", "'a'"]),
        ({"optim": "adamw_bnb_8bit"}, ["optim adamw_", "optim_args None: ", "bitsandbytes", "choose another"]),
        ({"load_in_4bit": True, "beta": 0}, ["2 fields", "load_in_4bit True: quantised weights", "beta 0.0: must be"]),
        ({"report_to": "wanbd"}, ["report_to wanbd", "wandb"]),
        ({"gradient_accumulation_steps": 3}, ["gradient_accumulation_steps 3", "(TRL's default: 8)"]),
        ({"global_batch_size": 10, "per_device_train_batch_size": 4}, ["10", "4 x 1 process(es); choose 12"]),
        ({"datasets": [{"path": "a"}]}, ["dataset_name", "datasets"]),
        ({"hub_strategy": "checkpoint"}, ["hub_strategy", "checkpoint", "every_save"]),
        ({"profile_steps": [5, 3]}, ["profile_steps [5, 3]: must be the first and the last step"]),
        ({"prefix_sharing": True, "padding_free": False}, ["prefix_sharing True: needs packed"]),
        ({"checkpointed_layers": 2, "gradient_checkpointing": False}, ["checkpointed_layers 2: ", "remove one"]),
        ({"gradient_checkpointing_kwargs": {"every_n_layers": 2}}, ["every_n_layers", "; set checkpointed_layers"]),
        ({"eval_command": "true {checkpoint}"}, ["eval_command true {checkpoint}: lacks {checkpoint} or {out}; for"]),
        ({"eval_command": "true {checkpoint} {stp} {out}"}, ["cannot be read (KeyError('stp')); for instance: sb"]),
        ({"eval_command": "true '{checkpoint} {out}"}, ["eval_command true", "No closing quotation"]),
        ({"eval_command": "nothing.sh {checkpoint} {out}"}, ["command nothing.sh not found"]),
        ({"eval_command": "true {checkpoint} {out}", "save_strategy": "no"}, ["save_strategy no: eval_command needs"]),
        ({"guard_generations": 5}, ["guard_generations 5: needs prompts"]),
        ({"logging_strategy": "no"}, ["logging_strategy", "the guard reads the log"]),
        ({"eval_datasets": "a.jsonl"}, ["eval_datasets a.jsonl: must be a mapping of names to sets, such as {math:"]),
        ({"eval_datasets": {"a": {"path": None}}}, ["eval_datasets {", "must be a mapping", "a: {'path': None}"]),
        ({"eval_datasets": {"eval": "x"}}, ["eval_datasets", "is called eval or train", "eval: x"]),
        ({"eval_steps": 5}, ["eval_steps 5: has no effect; set eval_strategy: steps"]),
        ({"save_strategy": "best"}, ["save_strategy best", "set save_strategy: steps"]),
        ({"use_peft": True, "lora_task_type": "NOPE"}, ["'NOPE'", "CAUSAL_LM"]),
        ({"dtype": "bfloat16"}, ["dtype bfloat16", "fp32 master weights"]),
    ],
)
def test_wrong_recipe(parse, recipe, parts):
    message = refused(parse, recipe)
    assert all(part in message for part in parts), message


def test_a_token_is_not_shown(parse):
    for fields in ({"hub_token": "secret"}, {"model_init_kwargs": {"token": "secret"}}):
        assert "HF_TOKEN in" in (message := refused(parse, fields)) and "secret" not in message


def test_what_a_launcher_cannot_do_is_refused_with_the_configuration(parse, monkeypatch):
    answers = {"eval_fraction": 0.1, "guard_generations": 5}
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(PROJECT / "configs/accelerate/ds_zero3.json"))
    assert "guard_generations 5: needs the full weights on each rank" in refused(parse, answers)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(PROJECT / "ds_config.json"))
    assert parse(answers).train.guard_generations == 5
    assert "output_dir runs[1]: DeepSpeed finds no checkpoint in" in refused(parse, {"output_dir": "runs[1]"})
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert "guard_generations 5: needs the full weights on each rank" in refused(parse, answers)
    assert "use_peft True: FSDP2 would put the whole policy" in refused(parse, {"use_peft": True})
    assert "dtype bfloat16: under FSDP2 without bf16" in refused(parse, {"dtype": "bfloat16", "bf16": False})
    message = refused(parse, {"ref_model_name_or_path": "org/other"})
    assert message.startswith("preflight abort: under FSDP2 it would score the reference; run scripts/preflight.py")


@pytest.mark.parametrize("loss", ["sigmoid", "hinge", "apo_zero", ["sigmoid_norm", "sigmoid"]])
def test_olmos_beta_with_a_loss_on_sums_is_refused_and_says_why(parse, loss):
    message = refused(parse, {"loss_type": loss, "beta": 5})
    assert "beta 5" in message and "sums log-probs over tokens" in message and "allow_unnormalized_beta" in message
    assert parse({"loss_type": loss, "beta": 5, "allow_unnormalized_beta": True}).train.beta == 5
    assert parse({"loss_type": loss, "beta": 0.1}).train.beta == 0.1
    assert parse({"loss_type": ["sigmoid_norm", "sft"], "beta": 5}).train.beta == 5


AXOLOTL = """{base_model: m, model_type: LlamaForCausalLM, tokenizer_type: AutoTokenizer, strict: false, rl: dpo,
    chat_template: llama3, datasets: [{path: p.jsonl, type: chat_template.default, field_messages: c}], sequence_len:
    4096, val_set_size: 0.05, sample_packing: true, adapter: lora, lora_r: 32, lora_target_linear: true, wandb_entity:
    null, micro_batch_size: 2, gradient_accumulation_steps: 4, num_epochs: 1, optimizer: adamw_torch_fused,
    lr_scheduler: cosine, learning_rate: 2.0e-4, bf16: auto, tf32: false, train_on_inputs: false, group_by_length:
    false, dataset_prepared_path: d, flash_attention: true, warmup_ratio: 0.1, evals_per_epoch: 4, saves_per_epoch: 1,
    special_tokens: null}"""
LLAMA_FACTORY = """{model_name_or_path: m, trust_remote_code: true, stage: dpo, do_train: true, finetuning_type: lora,
    lora_rank: 8, lora_target: all, pref_beta: 0.1, pref_loss: sigmoid, dataset: p.jsonl, template: llama3,
    cutoff_len: 64, overwrite_cache: true, preprocessing_num_workers: 1, output_dir: o, logging_steps: 10, save_steps:
    500, plot_loss: true, overwrite_output_dir: true, save_only_model: false, per_device_train_batch_size: 1,
    gradient_accumulation_steps: 8, learning_rate: 5.0e-6, lr_scheduler_type: cosine, warmup_ratio: 0.1, bf16: true,
    ddp_timeout: 180000000, val_size: 0.1}"""
TRL = """{model_name_or_path: m, dataset_name: p.jsonl, loss_type: sigmoid, beta: 0.1, max_length: 1024, bf16: true,
    gradient_accumulation_steps: 4, per_device_train_batch_size: 2, warmup_ratio: 0.1, torch_dtype: bfloat16,
    logging_steps: 25, gradient_checkpointing: true, gradient_checkpointing_kwargs: {use_reentrant: false},
    eval_strategy: "no", seed: 1}"""


@pytest.mark.parametrize(
    ("text", "count", "corrected"),
    [
        (AXOLOTL, 28, {"use_peft": True, "lora_target_modules": "all-linear", "eval_fraction": 0.05, "beta": 0.1}),
        (LLAMA_FACTORY, 16, {"use_peft": True, "loss_type": "sigmoid", "beta": 0.1, "eval_fraction": 0.1}),
        (TRL, 3, {"model_name_or_path": "m", "loss_type": "sigmoid", "beta": 0.1}),
    ],
)
def test_a_file_of_another_trainer_reads_after_one_correction(tmp_path, text, count, corrected):
    """Each line of the error names a field, and what to write; without these fields, and with theirs, it reads."""
    given = yaml.safe_load(text)
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        parse_config(["--config", str(path), "--use_cpu"], world_size=2)
    lines = str(caught.value).split("\n- ")[1:]
    assert "TRL's default" not in str(caught.value), "the pairs per device stand in the file"
    named = {name for name in given for line in lines if re.search(rf"\b{name}\b", line.split(":")[0])}
    assert len(lines) == count and all(re.search("here: |remove|give a list", line) for line in lines), lines
    path.write_text(yaml.safe_dump({k: v for k, v in given.items() if k not in named} | NEEDED | corrected))
    parse_config(["--config", str(path), "--global_batch_size", "16"], world_size=2)


def test_trls_beta_with_the_default_loss_is_a_warning(parse, capsys):
    parse({"loss_type": "sigmoid_norm", "beta": 0.1})
    assert "beta is below 1" not in capsys.readouterr().err
    parse({"beta": 0.1})
    assert "warning: beta is below 1, but loss_type is not set" in capsys.readouterr().err


def test_one_process_and_several_gpus(parse, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "use_cpu False: one process sees 4 GPUs" in refused(parse, {"use_cpu": False})


@pytest.mark.parametrize(("processes", "size"), [(3, 132), (6, 144), (48, 192)])
def test_the_next_global_batch_is_offered_that_four_pairs_a_gpu_divide(parse, processes, size):
    assert refused(parse, world_size=processes).endswith(f"; choose {size}")
    parse({"global_batch_size": size}, world_size=processes)


def test_no_more_processes_read_the_data_than_there_are_cores(parse):
    cores = len(os.sched_getaffinity(0))
    assert parse({"dataset_num_proc": cores + 14}).train.dataset_num_proc == cores
    assert parse({"dataset_num_proc": 1}).train.dataset_num_proc == 1


def test_precision_without_a_gpu(parse, capsys):
    config = parse()
    assert (config.train.bf16, config.model.dtype) == (False, "float32")
    assert not capsys.readouterr().err
    assert parse({"bf16": True}).train.bf16 and "bf16 True: slower than fp32" in capsys.readouterr().err
    assert parse({"dtype": "bfloat16", "use_peft": True}).model.dtype == "bfloat16"


def test_wandb_is_off_without_a_key_and_said_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    off = "W&B off: neither WANDB_API_KEY nor WANDB_MODE=offline is set, and `wandb login` was not run"
    assert resolve_report_to(["wandb"]) == [] and off in capsys.readouterr().out
    assert resolve_report_to(["none"]) == []
    monkeypatch.setenv("WANDB_MODE", "offline")
    both = ["wandb", "tensorboard"]
    assert resolve_report_to(both) == both
    monkeypatch.setenv("WANDB_MODE", "online")
    assert resolve_report_to(["wandb"]) == []
    for host in (urlsplit(DEFAULT_BASE_URL).hostname, "api.wandb.ai", "wandb.lab.org"):  # where `wandb login` writes
        (tmp_path / "netrc").write_text(f"machine {host} login user password k")
        assert resolve_report_to(["wandb"]) == ["wandb"]
    (tmp_path / "netrc").write_text("machine huggingface.co login user password k")
    assert resolve_report_to(["wandb"]) == []
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert resolve_report_to(["wandb"]) == ["wandb"]
    monkeypatch.setenv("WANDB_API_KEY", "k" * 39)
    with pytest.raises(UserError, match=r"report_to wandb: WANDB_API_KEY: API key must have 40\+ characters"):
        resolve_report_to(["wandb"])


def test_a_cache_without_file_locks_is_one_line(parse, monkeypatch):
    for number, words in ((errno.ENOLCK, "No locks available"), (524, "Unknown error 524"), (errno.ENOSYS, "")):
        monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(number, os.strerror(number))))
        if words:
            assert f"no file can be locked there ({words}); set HF_HOME" in refused(parse)
    parse()  # libraries do without locks where there is no flock


@pytest.mark.parametrize(
    ("datasets", "part"),
    [
        (["a.jsonl"], "must be a mapping, not str; give a list of mappings such as {path:"),
        ([{"name": "a"}], "missing 1 required positional argument: 'path'; give a list"),
        ([{"path": "a", "fractoin": 1}], "unknown keys fractoin; did you mean fraction?; give a list"),
        (
            [{"path": "a", "columns": ["q"]}],
            "unknown keys columns; here: none (a pair's columns are read, and no others",
        ),
        ([{"path": "a", "fraction": 0.5}, {"path": "b"}], "fraction [0.5, None]: must be a number above 0 in all"),
        ([{"path": "a", "fraction": 0.8}, {"path": "b", "fraction": -0.2}], "fraction [0.8, -0.2]: must be a number"),
        ([], "dataset_name None: give a Hub id"),
    ],
)
def test_wrong_mixture(parse, datasets, part):
    assert part in refused(parse, {"dataset_name": "absent", "datasets": datasets})


@pytest.mark.parametrize(
    "fields",
    [
        {"report_to": ["wandb", "tensorboard"], "eval_fraction": 0.1, "eval_strategy": "epoch", "save_strategy": "no"},
        {"loss_type": ["sigmoid_norm", "sft"], "loss_weights": [1.0, 0.5], "max_length": None, "warmup_steps": 100},
        {"use_peft": True, "lora_target_modules": "q_proj", "model_init_kwargs": {"a": {"b": [1, None]}}},
        {"use_peft": False, "lora_target_modules": "all-linear", "accelerator_config": {"split_batches": False}},
        {"dataset_name": "absent", "datasets": [{"path": "a", "fraction": 1}, {"path": "b", "fraction": 2}]},
        {"gradient_checkpointing": False, "max_steps": 3, "save_steps": 0.25, "run_name": "ü: 'x' #y", "seed": 0},
    ],
)
def test_what_a_run_writes_down_reads_back_equal(parse, tmp_path, monkeypatch, fields):
    monkeypatch.setenv("WANDB_MODE", "offline")
    dump = parse(fields).as_dict()
    assert json.loads(json.dumps(dump)) == dump  # plain types only
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(dump, sort_keys=False))
    assert parse_config(["--config", str(tmp_path / "resolved.yaml")]).as_dict() == dump


def test_a_tracker_that_is_not_installed_is_one_line():
    for tracker in ("mlflow", "comet_ml", "dvclive"):
        with pytest.raises(UserError, match=f"report_to {tracker}: not installed; pip install {tracker}, or remove"):
            resolve_report_to([tracker])


def test_every_field_of_trl_is_in_its_table():
    page = (PROJECT / "docs/reference.md").read_text().split("## Fields of TRL and Transformers")[1]
    ours = {f.name for f in dataclasses.fields(DPOConfig)} - {f.name for f in dataclasses.fields(TrainingArguments)}
    assert not {name for name in ours | UNUSED | set(REFUSED) if f"`{name}`" not in page}


def test_each_field_is_in_one_set_of_the_table():
    fields = sorted(field.name for cls in DATACLASSES for field in dataclasses.fields(cls))
    sets = (REFUSED, NO_EFFECT, ROUNDING, INHERITED, TOKENS, WEIGHTS)
    assert fields == sorted(name for names in sets for name in names)


def test_a_field_without_effect_says_so(parse, capsys):
    parse({"dataloader_drop_last": True, "dataloader_num_workers": 1})
    assert capsys.readouterr().err == "warning: dataloader_drop_last: has no effect here, see docs/reference.md\n"


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, ""),
        ({"mixed_precision": "fp16"}, "ACCELERATE_MIXED_PRECISION"),
        ({"mixed_precision": "bf16"}, "ACCELERATE_MIXED_PRECISION"),
        ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "ACCELERATE_DYNAMO_BACKEND"),
        ({"parallelism_config": {"parallelism_config_cp_size": 2}}, "ACCELERATE_USE_PARALLELISM_CONFIG"),
        ({"fsdp_config": {"fsdp_cpu_ram_efficient_loading": True}}, "FSDP_CPU_RAM_EFFICIENT_LOADING FSDP_VERSION"),
    ],
)
def test_what_a_launch_configuration_overrules(tmp_path, capsys, environment, fields, variables):
    """As accelerate's launcher puts it into the environment, which check_config.py reads before a node starts."""
    shutil.copy(PROJECT / "configs/accelerate/cpu_fsdp2.yaml", launch := tmp_path / "launch.yaml")
    edit(launch, **fields)
    options = as_options(NEEDED | {"output_dir": tmp_path / "run"})
    assert check_config.main([str(launch), "2", *options]) == (2 if variables else 0)
    assert set(re.findall(r"\b((?:ACCELERATE|FSDP)_\w+) ", capsys.readouterr().err)) == {*variables.split()}
