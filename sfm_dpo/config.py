"""Configuration: TRL's dataclasses with OLMo 3's defaults, filled from a YAML recipe and the command line.

Precedence: defaults < recipe (`--config`) < command line. Recipe and command line take the same path
through argparse, so a wrong type is found in either.
"""

import dataclasses
import importlib.util
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import yaml
from transformers import SchedulerType
from transformers.hf_argparser import HfArg
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from trl import DatasetMixtureConfig, DPOConfig, ModelConfig, TrlParser, get_peft_config
from trl.scripts.utils import DatasetConfig

from sfm_dpo.common import distributed
from sfm_dpo.common.errors import UserError, nearest
from sfm_dpo.common.files import PROJECT
from sfm_dpo.common.gpus import explain_missing_gpus
from sfm_dpo.config_checks import LOSS_TYPES, check_fields, check_known, check_machine, check_mappings


@dataclass
class TrainConfig(DPOConfig):
    """TRL's DPOConfig, with OLMo 3's DPO hyperparameters as defaults (Olmo 3 report, Table 48) and our few fields."""

    output_dir: str = HfArg(default="outputs/dpo", help="The run's folder.")

    # The objective: open-instruct's `dpo_norm` with beta 5.
    loss_type: list[str] = HfArg(default_factory=lambda: ["sigmoid_norm"], help=f"Of TRL: {', '.join(LOSS_TYPES)}.")
    beta: float = HfArg(default=5.0, help="Inverse temperature of the implicit reward.")
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = HfArg(
        default="reverse_kl", help="Divergence between policy and reference (f-DPO)."
    )
    learning_rate: float = HfArg(default=1e-6, help="Peak learning rate of AdamW.")
    lr_scheduler_type: SchedulerType = HfArg(default="linear", help="Learning rate schedule.")
    warmup_steps: float = HfArg(default=0.1, help="Warmup: a share of all steps if below 1.")
    num_train_epochs: float = HfArg(default=1.0, help="Passes over the training pairs.")
    save_total_limit: int | None = HfArg(default=2, help="Checkpoints kept; at least 2.")
    report_to: list[str] = HfArg(default_factory=lambda: ["none"], help="wandb, trackio, tensorboard, ..., or none.")
    # Rank 0 tokenises while the others wait; the process group's default of 30 minutes is too short for that.
    ddp_timeout: int = HfArg(default=14400, help="Seconds a collective may wait.")
    hang_timeout: int = HfArg(default=1800, help="Seconds without progress of any rank that end the run; 0: never.")
    global_batch_size: int = HfArg(
        default=128, help="Pairs per optimizer step over all processes; gradient accumulation follows from it."
    )

    # Data
    dataset_name: str | None = HfArg(default=None, help="Hub id, or a local .json/.jsonl/.parquet file or folder.")
    dataset_config: str | None = HfArg(default=None, help="Configuration name of a Hub dataset.")
    dataset_train_split: str = HfArg(default="train", help="Split to train on.")
    max_samples: int | None = HfArg(default=None, help="Use this many of the usable pairs, drawn with `seed`.")
    eval_fraction: float = HfArg(default=0.0, help="Share of the pairs held out for evaluation, drawn with `seed`.")
    eval_datasets: str | None = HfArg(
        default=None, help="More held-out sets: {math: math.jsonl, code: {path: org/set, split: test}}."
    )
    max_prompt_length: int | None = HfArg(
        default=None, help="A longer prompt keeps its last tokens (TRL dropped this)."
    )
    truncation_mode: Literal["keep_start"] = HfArg(default="keep_start", help="A longer pair keeps its first tokens.")
    max_dropped_fraction: float = HfArg(default=0.05, help="Stop if a larger share of the rows cannot be used.")

    # Filters (docs/filters.md)
    filter_script: str | None = HfArg(default=None, help="Python file with keep(row): whether a stored row is kept.")
    drop_duplicates: Literal["no", "pairs", "prompts"] = HfArg(
        default="no", help="Leave out pairs that repeat an earlier one, or that have its prompt."
    )
    max_pairs_per_prompt: int | None = HfArg(default=None, help="Pairs of one prompt to keep, the first ones.")
    min_response_tokens: int | None = HfArg(default=None, help="Of both responses, end of turn included.")
    max_response_tokens: int | None = HfArg(default=None, help="Of both responses, before max_length cuts them.")
    max_length_ratio: float | None = HfArg(default=None, help="Longer response over shorter one, in tokens.")
    drop_contaminated: str | None = HfArg(
        default=None, help="JSON of analyze_dataset.py --against: leave out the pairs that it lists."
    )

    # Speed
    prefix_sharing: bool | None = HfArg(
        default=None,
        help="Compute a pair's prompt once for both answers; by default where padding_free is true and the model can.",
    )
    flash_attention: Literal["auto", "fa2", "fa3", "fa4"] = HfArg(
        default="auto",
        help="Kernel of packed attention on a GPU; auto: check_gpu.sh's fastest, else FA2.",
    )
    fit_memory: bool = HfArg(
        default=False, help="Choose pairs per device and checkpointed layers by memory, where they are not given."
    )
    memory_gib: float | None = HfArg(
        default=None, help="With fit_memory: GiB of a process; default: 0.9 of the GPU, or of a CPU node's share."
    )
    profile_steps: list[int] | None = HfArg(
        default=None, help="First and last step to profile: 10 12 (docs/speed.md)."
    )

    eval_tasks: list[str] | None = HfArg(
        default=None, help="lm-eval's tasks: the batch script submits their evaluation (docs/evaluation.md)."
    )

    # Hub (docs/hub.md)
    hub_private_repo: bool | None = HfArg(default=True, help="A repository that the push creates is private.")
    # Trainer's other two, checkpoint and all_checkpoints, would publish the optimizer: 80 GB of a 7B model each time
    hub_strategy: Literal["end", "every_save"] = HfArg(
        default="end", help="What is pushed: end, the finished model; every_save, checkpoints as well."
    )
    hub_push_every: int = HfArg(default=1, help="With hub_strategy every_save: saves from push to push.")
    hub_revision: str | None = HfArg(
        default=None, help="Branch to push to; with {step} in it each checkpoint gets its own, and main the end."
    )

    # Safety (docs/health.md)
    preflight: Literal["skip", "warn", "abort"] = HfArg(default="abort", help="Before training; abort: on a no-go.")
    preflight_only: bool = HfArg(default=False, help="End after reference pass and preflight; the next start trains.")
    preflight_samples: int = HfArg(default=256, help="Pairs of the preflight; with a reference cache it takes all.")
    guard: Literal["skip", "warn", "stop"] = HfArg(default="stop", help="While training; stop: a collapsed run.")
    guard_generations: int = HfArg(
        default=0, help="Steps between generated answers for the guard; 0: none. Needs eval_fraction."
    )
    allow_unnormalized_beta: bool = HfArg(default=False, help="Allow beta >= 1 with a loss on summed log-probs.")
    verify_checkpoints: bool = HfArg(default=True, help="Before going on: compare a checkpoint with its checksums.")
    ignore_resume_mismatch: bool = HfArg(
        default=False, help="Go on from a checkpoint of other data, or (not ZeRO) of another world size."
    )


DATACLASSES = (TrainConfig, ModelConfig, DatasetMixtureConfig)

# Fields of earlier versions, and what to do instead
_USE_MAKE_PAIRS = "make pairs of scored answers with scripts/make_pairs.py"
REMOVED = {
    "duplicate_threshold": "remove near duplicates before training, for instance with text-dedup (docs/filters.md)",
    "keep_values": "write a filter_script, such as def keep(row): return row['language'] == 'English'",
    "max_response_similarity": "compare the responses in a filter_script",
    "pair_by": _USE_MAKE_PAIRS,
    "score_field": _USE_MAKE_PAIRS,
    "score_margin": _USE_MAKE_PAIRS,
    "score_pairs": _USE_MAKE_PAIRS,
}

_OPTIONAL = {f.name for cls in DATACLASSES for f in dataclasses.fields(cls) if "None" in str(f.type)}


@dataclass
class Config:
    """A whole run: `train` (TRL's DPOConfig and ours), `model` (TRL's ModelConfig), `data` (a mixture, or empty)."""

    train: TrainConfig
    model: ModelConfig
    data: DatasetMixtureConfig
    notes: list[str] = field(default_factory=list)  # decisions worth a line in the log
    micro_batch: int = 0  # the recipe's per_device_train_batch_size, also where `training` is False
    fitted: list[str] = field(default_factory=list)  # fields that fit_memory chooses

    def as_dict(self) -> dict[str, Any]:
        """The resolved configuration as plain YAML types, without secrets; `--config` reads it back."""
        values = {
            f.name: getattr(part, f.name)
            for part in (self.train, self.model, self.data)
            for f in dataclasses.fields(part)
            if f.init
            and "token" not in f.name.split("_")  # hub_token, push_to_hub_token
            and f.name not in self.fitted
        }
        return json.loads(json.dumps(values, default=dataclasses.asdict))  # enums are strings to it


class FieldParser(TrlParser):
    """The command line of train_dpo.py: `--config`, and every field of the three dataclasses."""

    def __init__(self) -> None:
        super().__init__(DATACLASSES, allow_abbrev=False, prog="train_dpo.py")
        self.set_defaults(per_device_train_batch_size=None, gradient_checkpointing=None)  # see resolve_fitted
        self.fields = {action.dest: action for action in reversed(self._actions) if action.dest != "help"}
        self.add_argument("--config", nargs="?", const="", help="YAML recipe; its keys are the fields below")

    def error(self, message: str):  # argparse would print several hundred lines of usage
        raise UserError(f"{message} (see --help)")


def parse_config(argv: list[str], world_size: int | None = None, training: bool = True) -> Config:
    """Reads `--config RECIPE` and the overrides beside it, and checks them. Loads no model and no data.

    Args:
        argv: command line without the program's name.
        world_size: number of processes; by default what the launcher says in WORLD_SIZE.
        training: False for a command that looks at a recipe where its GPUs are not, on a login or CPU node.

    Raises:
        UserError: unknown field, wrong type or value, or a combination that cannot be meant.
    """
    if any(arg.replace("-", "_").startswith(("__hub_token", "__push_to_hub_token")) for arg in argv):
        raise UserError("hub_token: everybody on the machine can read a command line; put HF_TOKEN into .env")
    parser = FieldParser()
    recipe = parser.parse_known_args(argv)[0].config
    recipe_argv = [] if recipe is None else read_recipe(recipe, parser)
    namespace, extra = parser.parse_known_args(recipe_argv + argv)
    for arg in extra:
        if arg.startswith("--"):
            name = arg.split("=")[0]
            raise UserError(f"unknown option {name}{explain_unknown(name[2:], parser.fields, '--')}")
    if extra:
        raise UserError(f"argument {extra[0]!r} belongs to no option")

    world_size = world_size or distributed.world_size()
    fitted = resolve_fitted(namespace)
    micro_batch = namespace.per_device_train_batch_size
    if not training:
        world_size, namespace.per_device_train_batch_size = 1, namespace.global_batch_size
        namespace.use_cpu, namespace.bf16, namespace.fp16, namespace.dtype = True, False, False, None
        namespace.deepspeed = None
    resolve_precision(namespace)
    check_fields(namespace, world_size)
    if training:
        check_machine(namespace)
    namespace.gradient_accumulation_steps = namespace.global_batch_size // (
        namespace.per_device_train_batch_size * world_size
    )
    if namespace.hub_token:  # Trainer pickles its arguments into training_args.bin, in every checkpoint
        os.environ["HF_TOKEN"], namespace.hub_token = namespace.hub_token, None
    namespace.report_to, tracking = resolve_report_to(namespace.report_to)
    try:
        get_peft_config(namespace)  # looks at the LoRA fields
        train, model, data = (
            cls(**{f.name: getattr(namespace, f.name) for f in dataclasses.fields(cls) if f.init})
            for cls in DATACLASSES
        )
    except json.JSONDecodeError as error:  # transformers reads the fields that are mappings, and does not say which
        raise UserError(f"a field that takes a JSON mapping holds {error.doc!r}: {error.msg}") from error
    except (ValueError, TypeError, AttributeError, ImportError, OSError) as error:
        raise UserError(str(error)) from error
    check_mappings(train)
    names = model.lora_target_modules
    if isinstance(names, str) and names.isidentifier():  # TRL's form of a single name, a pattern to PEFT
        model.lora_target_modules = [names]
    config = Config(train, model, data, [tracking], micro_batch, fitted)
    if train.trust_remote_code:
        config.notes.append(f"trust_remote_code: code that comes with {model.model_name_or_path} is run")
    return config


def explain_unknown(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of an error message: what replaces a removed field, or the known name that resembles `name`."""
    field_name = name.replace("-", "_")
    if field_name in REMOVED:
        return f", which was removed: {REMOVED[field_name]}"
    return nearest(field_name, known, prefix)


# ---- the recipe


class _TextLoader(yaml.SafeLoader):
    """Leaves scalars as they are written, except null: YAML reads `no` as false and 1e-6 as text."""

    yaml_implicit_resolvers: ClassVar = {
        first: [resolver for resolver in resolvers if resolver[0].endswith((":null", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def read_recipe(path: str, parser: FieldParser) -> list[str]:
    """A recipe's fields as command-line arguments, so that argparse checks their types.

    What has no spelling there (null, an empty list, a mixture) becomes the parser's default; `env` sets variables.

    Raises:
        UserError: no such file, not a YAML mapping, or an unknown or repeated field.
    """
    if not path:
        raise UserError("--config needs the path of a recipe, for instance recipes/think.yaml")
    if not Path(path).is_file():
        recipes = ", ".join(sorted(map(str, Path("recipes").glob("*.yaml"))))
        folder = f"; run this from the project's folder, {PROJECT}" if (PROJECT / path).is_file() else ""
        raise UserError(f"--config {path}: no such file" + (f"; recipes here: {recipes}" if recipes else folder))
    try:
        text = Path(path).read_text()
        typed, values, root = yaml.safe_load(text), yaml.load(text, _TextLoader), yaml.compose(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no fields; a recipe is a YAML mapping such as 'beta: 5'")
    keys = [key.value for key, _ in root.value]
    if repeated := [key for key in keys if keys.count(key) > 1]:  # PyYAML takes the last without a word
        raise UserError(f"{path}: {repeated[0]} is there {keys.count(repeated[0])} times; keep one")
    set_environment(values.pop("env", None) or {}, path)
    argv: list[str] = []
    for key, value in values.items():
        if key not in parser.fields:
            raise UserError(f"{path}: unknown field {key!r}{explain_unknown(str(key), parser.fields)}")
        action = parser.fields[key]
        if key == "datasets":
            parser.set_defaults(datasets=check_mixture(typed[key], path))
        elif value is None or value == []:
            if not (action.nargs == "+" if value == [] else action.default is None or key in _OPTIONAL):
                raise UserError(f"{path}: {key} is empty; give it a value, or remove the line for the default")
            parser.set_defaults(**{key: value})
        elif isinstance(value, list):
            if action.nargs != "+":
                raise UserError(f"{path}: {key} is a list, {value}; it takes one value")
            argv += [f"--{key}", *map(str, value)]
        elif isinstance(value, dict):
            argv.append(f"--{key}={json.dumps(typed[key])}")
        else:
            if "bool" in str(action.type) or "no" in (action.choices or ()):  # as YAML reads them
                value = {"on": "yes", "off": "no"}.get(value.lower(), value)
            argv.append(f"--{key}={value}")  # with = also a value that begins with a dash
    return argv


def set_environment(env: Any, recipe: str) -> None:
    """Applies a recipe's `env` section, as TRL does."""
    if not isinstance(env, dict):
        raise UserError(f"{recipe}: env is {env!r}; it takes a mapping such as 'env: {{WANDB_PROJECT: x}}'")
    for name, value in env.items():
        if name.startswith("HF_"):  # huggingface_hub and datasets read theirs when they are imported
            raise UserError(f"{recipe}: env: {name} would come too late; set it in the environment or in .env")
        os.environ[name] = str(value)


def check_mixture(datasets: Any, recipe: str) -> list[dict]:
    """A recipe's `datasets`: TRL's DatasetConfig as mappings, each with a path."""
    if not isinstance(datasets, list) or not all(isinstance(d, dict) and d.get("path") for d in datasets):
        raise UserError(f"{recipe}: datasets must be a list of mappings, each with a path")
    for entry in datasets:
        for key, value in entry.items():
            check_known(f"{recipe}: datasets:", key, {f.name for f in dataclasses.fields(DatasetConfig)})
            if key in ("path", "name", "split") and not isinstance(value, str | None):
                raise UserError(f"{recipe}: datasets: {key} is {value!r}, which is no text; put it in quotes")
    fractions = [entry.get("fraction") for entry in datasets]
    if any(f is not None for f in fractions) and not all(type(f) in (int, float) and f > 0 for f in fractions):
        raise UserError(f"{recipe}: datasets: fraction {fractions} must be above 0 in all entries or in none")
    return datasets


# ---- values that follow from the machine


def resolve_precision(namespace: Any) -> None:
    """Sets use_cpu, bf16 and dtype where they are not given: bf16 on a GPU, fp32 without one.

    Under DeepSpeed, which makes fp32 master weights of a bf16 model, loading in bf16 halves the host memory.

    Raises:
        UserError: bf16 where no GPU is visible, unless use_cpu says that the CPU is meant; a GPU that torch should see
            and does not.
    """
    if not namespace.use_cpu and (reason := explain_missing_gpus()):
        raise UserError(f"{reason}. To train on the CPU all the same: --use_cpu true")
    if namespace.bf16 and not namespace.use_cpu and not torch.cuda.is_available():
        raise UserError(
            "bf16 true: no GPU is visible; on CPU say --bf16 false, or --use_cpu true as well (some 20 times slower)"
        )
    # accelerate's launcher drops `use_cpu` of a DeepSpeed config file, and without it accelerate finds no backend:
    # each CPU process would believe that it is alone.
    namespace.use_cpu = namespace.use_cpu or not torch.cuda.is_available()
    if namespace.bf16 is None:
        namespace.bf16 = not namespace.use_cpu and not namespace.fp16  # TRL's default is true everywhere
    if namespace.dtype is None:
        sharded = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
        namespace.dtype = "bfloat16" if namespace.bf16 and sharded else "float32"


def resolve_fitted(namespace: Any) -> list[str]:
    """Fills in pairs per device and gradient checkpointing where they are not given, and returns the fields of these
    that fit_memory is to choose; until then they hold what needs the least memory."""
    fitted, checkpointing = [], ["gradient_checkpointing", "activation_checkpointing"]
    if namespace.per_device_train_batch_size is None:
        fitted += ["per_device_train_batch_size", "gradient_accumulation_steps"]
        namespace.per_device_train_batch_size = 1 if namespace.fit_memory else TrainConfig.per_device_train_batch_size
    if all(getattr(namespace, name) is None for name in checkpointing):
        fitted += [name + suffix for name in checkpointing for suffix in ("", "_kwargs")]
        namespace.gradient_checkpointing = True
    return fitted if namespace.fit_memory else []


def resolve_report_to(report_to: list[str]) -> tuple[list[str], str]:
    """Trackers that can work here, and a line that says so. W&B needs a key or WANDB_MODE=offline.

    A batch job must neither crash nor wait at a login prompt for want of a key.
    """
    trackers = [tracker for tracker in report_to if tracker != "none"]
    for tracker in trackers:
        check_known("report_to", tracker, INTEGRATION_TO_CALLBACK)  # no `all`: it brings W&B and its login prompt
        packages = ("tensorboard", "tensorboardX") if tracker == "tensorboard" else (tracker,)
        if tracker in ("wandb", "trackio", "tensorboard") and not any(map(importlib.util.find_spec, packages)):
            raise UserError(f"report_to {tracker}: is not installed; pip install {tracker}, or remove it")
    usable = os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") in ("offline", "disabled")
    if "wandb" in trackers and not usable:
        trackers.remove("wandb")
        return trackers, "W&B off: neither WANDB_API_KEY nor WANDB_MODE=offline is set"
    return trackers, f"tracking: {', '.join(trackers) or 'none'}"
