"""What was asked? TRL's dataclasses with OLMo 3's defaults, one YAML recipe, command-line overrides.

Precedence: defaults < recipe (`--config`) < command line. Recipe and command line take the same path
through argparse, so a wrong type is found in either.
"""

import ast
import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from trl import DatasetMixtureConfig, DPOConfig, ModelConfig, TrlParser, get_peft_config

from sfm_dpo.common.errors import UserError
from sfm_dpo.config_checks import CHECKS, LOSS_TYPES, nearest, resolve_report_to, validate, validate_mappings


@dataclass
class TrainConfig(DPOConfig):
    """TRL's DPOConfig, with OLMo 3's DPO hyperparameters as defaults (Olmo 3 report, Table 48) and our few fields."""

    output_dir: str = field(default="outputs/dpo", metadata={"help": "The run's folder."})

    # The objective: open-instruct's `dpo_norm` with beta 5.
    loss_type: list[str] = field(
        default_factory=lambda: ["sigmoid_norm"], metadata={"help": "TRL loss types: " + ", ".join(LOSS_TYPES)}
    )
    beta: float = field(default=5.0, metadata={"help": "Inverse temperature of the implicit reward."})
    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate of AdamW."})
    lr_scheduler_type: str = field(default="linear", metadata={"help": "Learning rate schedule."})
    warmup_steps: float = field(default=0.1, metadata={"help": "Warmup: a share of all steps if below 1."})
    num_train_epochs: float = field(default=1.0, metadata={"help": "Passes over the training pairs."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints kept; at least 2."})
    report_to: list[str] = field(
        default_factory=lambda: ["none"], metadata={"help": "Trackers: wandb, trackio, tensorboard, ..., or none."}
    )
    # Rank 0 tokenises while the others wait; the process group's default of 30 minutes is too short for that.
    ddp_timeout: int = field(default=14400, metadata={"help": "Seconds a collective may wait."})

    # Batch
    global_batch_size: int = field(
        default=128,
        metadata={"help": "Pairs per optimizer step over all processes; gradient accumulation follows from it."},
    )

    # Data
    dataset_name: str | None = field(
        default=None, metadata={"help": "Hub id, or a local .json/.jsonl/.parquet file or folder."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration name of a Hub dataset."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    max_samples: int | None = field(
        default=None, metadata={"help": "Use this many pairs, drawn with `seed` from the usable ones."}
    )
    eval_fraction: float = field(
        default=0.0, metadata={"help": "Share of the pairs held out for evaluation, drawn with `seed`."}
    )
    max_prompt_length: int | None = field(
        default=None, metadata={"help": "A longer prompt keeps its last tokens. TRL has dropped this field."}
    )
    max_dropped_fraction: float = field(
        default=0.05, metadata={"help": "Stop if a larger share of the rows cannot be used."}
    )

    # Speed
    profile_steps: list[int] | None = field(
        default=None, metadata={"help": "First and last step to profile, for instance 10 12 (docs/speed.md)."}
    )

    # Hub (docs/hub.md)
    hub_private_repo: bool | None = field(
        default=True, metadata={"help": "A repository that is made by the push is private."}
    )
    hub_strategy: str = field(
        default="end", metadata={"help": "What is pushed: end, the finished model; every_save, checkpoints as well."}
    )
    hub_push_every: int = field(default=1, metadata={"help": "With hub_strategy every_save: saves from push to push."})
    hub_revision: str | None = field(
        default=None,
        metadata={"help": "Branch to push to; with {step} in it each checkpoint gets its own, and main the end."},
    )

    # Safety (docs/health.md)
    preflight: str = field(default="abort", metadata={"help": "Before training: skip, warn, or abort on a no-go."})
    preflight_samples: int = field(
        default=256, metadata={"help": "Pairs the preflight computes; with a reference cache it looks at all."}
    )
    guard: str = field(default="stop", metadata={"help": "While training: skip, warn, or stop a collapsed run."})
    guard_generations: int = field(
        default=0, metadata={"help": "Steps between generated answers for the guard; 0: none. Needs eval_fraction."}
    )
    allow_unnormalized_beta: bool = field(
        default=False, metadata={"help": "Allow beta >= 1 with a loss on summed log-probs."}
    )
    ignore_resume_mismatch: bool = field(
        default=False, metadata={"help": "Go on from a checkpoint that other data or another world size wrote."}
    )


PROJECT = Path(__file__).resolve().parents[1]
DATACLASSES = (TrainConfig, ModelConfig, DatasetMixtureConfig)
_OPTIONAL = {f.name for cls in DATACLASSES for f in dataclasses.fields(cls) if "None" in str(f.type)}


@dataclass
class Config:
    """A whole run: `train` (TRL's DPOConfig and ours), `model` (TRL's ModelConfig), `data` (a mixture, or empty)."""

    train: TrainConfig
    model: ModelConfig
    data: DatasetMixtureConfig
    notes: list[str] = field(default_factory=list)  # decisions worth a line in the log
    asked_per_device: int = 0  # per_device_train_batch_size as given, also where `training` is False

    def as_dict(self) -> dict[str, Any]:
        """The resolved configuration as plain YAML types, without secrets; `--config` reads it back."""
        plain: dict[str, Any] = {}
        for part in (self.train, self.model, self.data):
            for f in dataclasses.fields(part):
                if f.init and "token" not in f.name.split("_"):  # hub_token, push_to_hub_token
                    plain[f.name] = _plain(getattr(part, f.name))
        return plain


class _Parser(TrlParser):
    def error(self, message: str):  # argparse would print several hundred lines of usage
        raise UserError(f"{message} (see --help)")


def parse_config(argv: list[str], world_size: int | None = None, training: bool = True) -> Config:
    """Reads `--config RECIPE` and the overrides after it, and validates them. Loads no model and no data.

    Args:
        argv: command line without the program's name.
        world_size: number of processes; by default what the launcher says in WORLD_SIZE.
        training: False for a command that looks at a recipe where its GPUs are not, on a login or CPU node.

    Raises:
        UserError: unknown field, wrong type or value, or a combination that cannot be meant.
    """
    world_size = world_size or int(os.environ.get("WORLD_SIZE", "1"))
    parser = _Parser(DATACLASSES, allow_abbrev=False, prog="train_dpo.py")
    parser.add_argument("--config", help="YAML recipe; its keys are the fields below")
    known = {action.dest for action in parser._actions} - {"help", "config"}
    recipe, cli = _split_config(argv)
    values = _read_recipe(recipe) if recipe else {}
    _set_env(values.pop("env", None) or {}, recipe)
    for key in values:
        if key not in known:
            raise UserError(f"{recipe}: unknown field {key!r}{nearest(key, known)}")
    for arg in cli:
        name = arg[2:].split("=")[0].replace("-", "_")
        if arg.startswith("--") and name in ("hub_token", "push_to_hub_token"):
            raise UserError("hub_token: everybody on the machine can read a command line; put HF_TOKEN into .env")
        if arg.startswith("--") and not {name, name.removeprefix("no_")} & (known | {"help"}):
            raise UserError(f"unknown option {arg.split('=')[0]}{nearest(name, known, '--')}")
    if "datasets" in values:  # a list of mappings has no spelling on the command line
        parser.set_defaults(datasets=_check_mixture(values.pop("datasets"), recipe))

    argv = [arg for key, value in values.items() for arg in _as_args(key, value, parser, recipe)] + cli
    namespace, extra = parser.parse_known_args(argv)
    if extra:
        raise UserError(f"argument {extra[0]!r} belongs to no option")
    asked_per_device = namespace.per_device_train_batch_size
    if not training:
        world_size = 1
        namespace.per_device_train_batch_size = namespace.global_batch_size
        namespace.use_cpu, namespace.bf16, namespace.fp16, namespace.dtype = True, False, False, None
        namespace.deepspeed = None
    validate(namespace, world_size, training)
    steps = namespace.global_batch_size // (namespace.per_device_train_batch_size * world_size)
    if namespace.gradient_accumulation_steps not in (1, steps):
        raise UserError(
            f"gradient_accumulation_steps {namespace.gradient_accumulation_steps}: global_batch_size "
            f"{namespace.global_batch_size} on {world_size} process(es) makes it {steps}; remove the field"
        )
    namespace.gradient_accumulation_steps = steps
    if namespace.hub_token:  # Trainer pickles its arguments into training_args.bin, in every checkpoint
        os.environ["HF_TOKEN"], namespace.hub_token = namespace.hub_token, None
    namespace.report_to, tracking = resolve_report_to(namespace.report_to)
    try:
        get_peft_config(namespace)  # looks at the LoRA fields
        train, model, data = (cls(**_pick(cls, namespace)) for cls in DATACLASSES)
        config = Config(train, model, data, [tracking], asked_per_device)
        if config.train.trust_remote_code:
            config.notes.append(f"trust_remote_code: code that comes with {config.model.model_name_or_path} is run")
    except json.JSONDecodeError as error:  # transformers reads the fields that are mappings, and does not say which
        raise UserError(f"a field that takes a JSON mapping holds {error.doc!r}: {error.msg}") from error
    except (ValueError, TypeError, AttributeError, ImportError, OSError) as error:
        raise UserError(str(error)) from error
    validate_mappings(config.train)
    return config


def _split_config(argv: list[str]) -> tuple[str | None, list[str]]:
    """Takes `--config R` and `--config=R` out of argv; the last one wins, as with every option."""
    recipe, rest, args = None, [], iter(argv)
    for arg in args:
        if arg == "--config":
            recipe = next(args, "")
        elif arg.startswith("--config="):
            recipe = arg.split("=", 1)[1]
        else:
            rest.append(arg)
    if recipe is not None and (not recipe or recipe.startswith("--")):
        raise UserError("--config needs the path of a recipe, for instance recipes/think.yaml")
    return recipe, rest


def _read_recipe(path: str) -> dict[str, Any]:
    if not Path(path).is_file():
        near = ", ".join(sorted(map(str, Path("recipes").glob("*.yaml"))))
        there = f"; run this from the project's folder, {PROJECT}" if (PROJECT / path).is_file() else ""
        raise UserError(f"--config {path}: no such file" + (f"; recipes here: {near}" if near else there))
    try:
        text = Path(path).read_text()
        values, root = yaml.safe_load(text), yaml.compose(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no fields; a recipe is a YAML mapping such as 'beta: 5'")
    keys = [key.value for key, _ in root.value]
    if repeated := [key for key in keys if keys.count(key) > 1]:  # PyYAML takes the last without a word
        raise UserError(f"{path}: {repeated[0]} is there {keys.count(repeated[0])} times; keep one")
    return values


def _set_env(env: Any, recipe: str | None) -> None:
    """A recipe's `env` section, as in TRL."""
    if not isinstance(env, dict):
        raise UserError(f"{recipe}: env is {env!r}; it takes a mapping such as 'env: {{WANDB_PROJECT: x}}'")
    for name, value in env.items():
        if str(name).startswith("HF_"):  # huggingface_hub and datasets read theirs when they are imported
            raise UserError(f"{recipe}: env: {name} would come too late; set it in the environment or in .env")
        os.environ[str(name)] = str(value)


def _as_args(key: str, value: Any, parser: _Parser, recipe: str | None) -> list[str]:
    """A recipe's field in command-line spelling, so that argparse checks its type."""
    action = next(action for action in parser._actions if action.dest == key)
    if value is None or value == []:  # neither has a spelling on the command line
        optional = action.default is None or key in _OPTIONAL
        if not (optional if value is None else action.nargs in ("+", "*")):
            raise UserError(f"{recipe}: {key} is empty; give it a value, or remove the line for the default")
        parser.set_defaults(**{key: value})
        return []
    if isinstance(value, dict):
        return [f"--{key}={json.dumps(value)}"]
    if isinstance(value, list):
        if action.nargs not in ("+", "*"):
            raise UserError(f"{recipe}: {key} is a list, {value}; it takes one value")
        return [f"--{key}", *map(str, value)]
    if isinstance(value, bool) and "bool" not in getattr(action.type, "__name__", ""):
        if value is False and key.endswith("_strategy"):  # YAML reads `no` as false
            return [f"--{key}=no"]
        if key in CHECKS:  # `off` and `no`
            raise UserError(f"{recipe}: {key} {value}: must be one of {', '.join(CHECKS[key])}")
        raise UserError(f"{recipe}: {key} is {value} (YAML reads on, off, yes and no as booleans); put it in quotes")
    return [f"--{key}={value}"]  # with = also a value that begins with a dash


def _check_mixture(datasets: Any, recipe: str | None) -> list[dict]:
    if not isinstance(datasets, list) or not all(isinstance(d, dict) and d.get("path") for d in datasets):
        raise UserError(f"{recipe}: datasets must be a list of mappings, each with a path")
    fields = {f.name for f in dataclasses.fields(DatasetMixtureConfig(datasets=[{"path": "x"}]).datasets[0])}
    for entry in datasets:
        for key in entry:
            if key not in fields:
                raise UserError(f"{recipe}: unknown field {key!r} in datasets{nearest(key, fields)}")
    for entry in datasets:
        for key in ("path", "name", "split"):
            if entry.get(key) is not None and not isinstance(entry[key], str):
                raise UserError(f"{recipe}: datasets: {key} is {entry[key]!r}, which is no text; put it in quotes")
    fractions = [entry.get("fraction") for entry in datasets]
    numbers = [f for f in fractions if isinstance(f, int | float) and not isinstance(f, bool) and f > 0]
    if any(f is not None for f in fractions) and len(numbers) < len(fractions):
        raise UserError(f"{recipe}: datasets: fraction {fractions} must be above 0 in all entries or in none")
    return datasets


def _pick(cls, namespace) -> dict[str, Any]:
    return {f.name: getattr(namespace, f.name) for f in dataclasses.fields(cls) if f.init}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "to_dict"):  # AcceleratorConfig
        return _plain(value.to_dict())
    if hasattr(value, "value"):  # transformers' enums
        return value.value
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return ast.literal_eval(repr(value)) if isinstance(value, bytes) else str(value)
