"""Configuration: TRL's dataclasses with OLMo 3's defaults, filled from a YAML recipe and the command line.

Precedence: defaults < recipe (`--config`) < command line. A recipe's fields are read as options before the others.
"""

import argparse
import contextlib
import dataclasses
import errno
import fcntl
import functools
import json
import logging
import math
import netrc
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from huggingface_hub.constants import HF_HOME
from transformers import SchedulerType
from transformers.hf_argparser import HfArg
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.trainer_pt_utils import AcceleratorConfig
from trl import DatasetMixtureConfig, DPOConfig, ModelConfig, TrlParser, get_peft_config
from trl.scripts.utils import DatasetConfig

from sfm_dpo.common import distributed
from sfm_dpo.common.errors import UserError, collect_errors, nearest, user_input
from sfm_dpo.config import checks
from sfm_dpo.config.checks import LOSS_TYPES, check_known
from sfm_dpo.config.effects import REFUSED, UNUSED

log = logging.getLogger(__name__)


@dataclass
class TrainConfig(DPOConfig):
    """TRL's DPOConfig, with OLMo 3's DPO hyperparameters as defaults (Olmo 3 report, Table 48) and our few fields."""

    output_dir: str = HfArg(default="outputs/dpo", help="Folder of the run.")
    # The objective: open-instruct's `dpo_norm` with beta 5.
    loss_type: list[str] = HfArg(default_factory=lambda: ["sigmoid_norm"], help=f"Any of {', '.join(LOSS_TYPES)}.")
    beta: float = HfArg(default=5.0, help="Inverse temperature of the implicit reward.")
    learning_rate: float = HfArg(default=1e-6, help="Peak learning rate of AdamW.")
    lr_scheduler_type: SchedulerType = HfArg(default="linear", help="Learning rate schedule.")
    warmup_steps: float = HfArg(default=0.1, help="Warmup steps; below 1, a share of all steps.")
    num_train_epochs: float = HfArg(default=1.0, help="Number of passes over the training pairs.")
    save_total_limit: int | None = HfArg(default=2, help="Checkpoints to keep besides the guard's; at least 2.")
    logging_steps: float = HfArg(default=1, help="Steps between log entries.")
    eval_steps: float | None = HfArg(default=10, help="Steps between evaluations with eval_strategy steps.")
    report_to: list[str] = HfArg(default_factory=lambda: ["none"], help="wandb, trackio, tensorboard, ..., or none.")
    # Rank 0 tokenises while the others wait; the process group's default of 30 minutes is too short for that.
    ddp_timeout: int = HfArg(default=14400, help="Seconds that a collective may wait.")
    hang_timeout: int = HfArg(default=1800, help="Seconds without progress after which the run ends; 0: never.")
    global_batch_size: int = HfArg(default=128, help="Pairs per optimizer step, over all processes.")
    ref_model_name_or_path: str | None = HfArg(default=None, help="Reference model; default: the base model.")
    save_dtype: Literal["base", "trained"] = HfArg(default="base", help="Dtype of the finished model's weights.")
    # Data
    dataset_name: str | None = HfArg(default=None, help="Hub id, or a local .json/.jsonl/.parquet file or folder.")
    dataset_config: str | None = HfArg(default=None, help="Configuration of a Hub dataset or a folder; a subfolder.")
    dataset_train_split: str = HfArg(default="train", help="Split to train on.")
    max_samples: int | None = HfArg(default=None, help="Use a random sample of this many pairs, drawn with `seed`.")
    eval_fraction: float = HfArg(default=0.0, help="Share of the pairs held out, by prompt, drawn with `seed`.")
    eval_datasets: str | None = HfArg(default=None, help="More held-out sets: {math: m.jsonl, code: {path: org/set}}.")
    max_prompt_length: int | None = HfArg(default=None, help="Keep only the last tokens of a longer prompt.")
    overlong: Literal["truncate", "drop"] = HfArg(default="truncate", help="Pairs beyond max_length.")
    truncation_mode: Literal["keep_start"] = HfArg(default="keep_start", help="Truncation keeps the first tokens.")
    mask_tool_results: bool = HfArg(default=True, help="Do not train on the results of tool calls (docs/data.md).")
    template_date: str | None = HfArg(default=None, help="YYYY-MM-DD; what chat templates print as today's date.")
    max_dropped_fraction: float = HfArg(default=0.05, help="Stop if a larger share of the rows is unusable.")
    # Filters (docs/data.md)
    filter_script: str | None = HfArg(default=None, help="Python file; its keep(row) decides which rows to use.")
    drop_duplicates: Literal["no", "pairs", "prompts"] = HfArg(default="no", help="Drop repeats of a pair or prompt.")
    # Speed; what is decided where a field is unset is in calibration/
    per_device_train_batch_size: int | None = HfArg(default=None, help="Pairs in a micro-batch.")
    train_sampling_strategy: Literal["batch_rebalance", "random"] = HfArg(
        default="batch_rebalance", help="Order of the pairs, and which of them share a micro-batch."
    )
    padding_free: bool | None = HfArg(default=None, help="Pack sequences instead of padding them.")
    precompute_ref_log_probs: bool = HfArg(default=True, help="Compute reference log-probs once and cache them.")
    prefix_sharing: bool | None = HfArg(default=None, help="Compute a prompt once for both answers.")
    # auto: the fastest that calibration has compared, else FA2
    flash_attention: Literal["auto", "fa2", "fa3", "fa4"] = HfArg(default="auto", help="Kernel for packed attention.")
    memory_gib: float | None = HfArg(default=None, help="GiB that a process may use; default: 90% of what there is.")
    checkpointed_layers: int | None = HfArg(default=None, help="Layers to checkpoint, evenly spread.")
    profile_steps: list[int] | None = HfArg(default=None, help="First and last step to profile.")
    eval_command: str | None = HfArg(default=None, help="Command to evaluate each checkpoint (docs/evaluation.md).")
    # Hub (docs/hub.md)
    push_to_hub: bool = HfArg(default=False, help="Push the finished model, or each checkpoint (hub_strategy).")
    hub_private_repo: bool | None = HfArg(default=True, help="Create new repositories as private.")
    # Trainer's other strategies, checkpoint and all_checkpoints, would also push the optimizer: 80 GB for a 7B model
    hub_strategy: Literal["end", "every_save"] = HfArg(default="end", help="Push at the end, or every checkpoint.")
    hub_revision: str | None = HfArg(default=None, help="Branch to push to; {step} gives each checkpoint its own.")
    hub_timeout: int = HfArg(default=600, help="Seconds without an answer of the Hub after which a push has failed.")
    # Safety (docs/health.md)
    preflight: Literal["skip", "warn", "abort"] = HfArg(default="abort", help="Check before training; end on a no-go.")
    preflight_only: bool = HfArg(default=False, help="End after the preflight; the next start trains.")
    preflight_samples: int = HfArg(default=256, help="Pairs to compute without a reference cache.")
    guard: Literal["skip", "warn", "stop"] = HfArg(default="stop", help="Check while training; stop: end on collapse.")
    guard_generations: int = HfArg(default=0, help="Steps between test generations; needs eval_fraction.")
    allow_unnormalized_beta: bool = HfArg(default=False, help="Allow beta >= 1 with a loss on summed log-probs.")
    verify_checkpoints: bool = HfArg(default=True, help="Verify a checkpoint's checksums before resuming.")

    def __post_init__(self) -> None:
        unset = dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"))
        is_unset = all(vars(self)[name] is None for name in unset)
        super().__post_init__()
        if is_unset:  # which transformers takes for false
            self.__dict__.update(unset)
        if vars(self)["log_level"] == "info":  # Transformers would print each configuration; our log is always info
            self.log_level = "warning"

    def count_steps(self, pairs: int) -> int:
        """Optimizer steps on so many training pairs. Those of an epoch that fill no global batch are left out."""
        if self.max_steps > 0:
            return self.max_steps
        return math.ceil(pairs // self.global_batch_size * self.num_train_epochs)


DATACLASSES = (TrainConfig, ModelConfig, DatasetMixtureConfig)

_NULL = "tag:yaml.org,2002:null"


class Loader(yaml.SafeLoader):
    """PyYAML's, which takes 1e-6 for text."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
_construct = Loader("").construct_document  # a node's value, typed by YAML's rules
_OPTIONAL = {f.name for cls in DATACLASSES for f in dataclasses.fields(cls) if "None" in str(f.type)}
FOLDER = "hash-"  # begins the id of a model in a folder; that of a model on the Hub is its commit


@dataclass
class Config:
    """A run: `train` (TRL's DPOConfig and ours), `model` (TRL's ModelConfig), `data` (a mixture, or empty)."""

    train: TrainConfig
    model: ModelConfig
    data: DatasetMixtureConfig
    model_field: str = "model_name_or_path"  # the field that errors about the model name
    model_ids: dict[str, str] = dataclasses.field(default_factory=dict)  # by field, as `identify_model` found them

    @property
    def revision(self) -> str:
        """The model's commit on the Hub, once it is known; transformers ignores it where the model is a folder."""
        return self.model_ids.get(self.model_field, self.model.model_revision)

    @property
    def reference(self) -> "Config":
        """This configuration with the model of ref_model_name_or_path as the policy."""
        name = self.train.ref_model_name_or_path
        model = dataclasses.replace(self.model, model_name_or_path=name, model_revision="main")
        return dataclasses.replace(self, model=model, model_field="ref_model_name_or_path")

    @property
    def parts(self) -> list["Config"]:
        """This configuration and, if another reference is set, `reference`."""
        return [self, self.reference] if self.train.ref_model_name_or_path else [self]

    def as_dict(self) -> dict[str, Any]:
        """The resolved configuration as plain YAML types, without secrets; `--config` reads it back."""
        values = {
            f.name: getattr(part, f.name)
            for part in (self.train, self.model, self.data)
            for f in dataclasses.fields(part)
            if f.init
        }
        return json.loads(json.dumps(values, default=dataclasses.asdict))  # json writes these enums as strings


# The fields that --help and docs/reference.md list: ours, and those of TRL that a recipe is likely to set
FIELD_GROUPS = {
    "Model": """model_name_or_path model_revision ref_model_name_or_path trust_remote_code dtype attn_implementation
        model_init_kwargs use_peft lora_r lora_alpha lora_dropout lora_target_modules""",
    "Data": """dataset_name dataset_config dataset_train_split datasets max_samples eval_fraction eval_datasets
        max_length max_prompt_length truncation_mode max_dropped_fraction filter_script drop_duplicates
        overlong mask_tool_results template_date dataset_num_proc""",
    "Objective and optimizer": """loss_type loss_weights beta label_smoothing allow_unnormalized_beta learning_rate
        lr_scheduler_type lr_scheduler_kwargs warmup_steps num_train_epochs max_steps weight_decay max_grad_norm
        optim router_aux_loss_coef""",
    "Batch, memory and speed": """global_batch_size per_device_train_batch_size per_device_eval_batch_size memory_gib
        gradient_checkpointing checkpointed_layers padding_free prefix_sharing flash_attention
        precompute_ref_log_probs precompute_ref_batch_size train_sampling_strategy torch_compile bf16 use_cpu
        profile_steps""",
    "Preflight, guard and resume": """preflight preflight_only preflight_samples guard guard_generations hang_timeout
        ddp_timeout verify_checkpoints resume_from_checkpoint full_determinism seed""",
    "Output and evaluation": """output_dir run_name logging_steps logging_first_step report_to eval_strategy eval_steps
        eval_command save_strategy save_steps save_total_limit save_dtype""",
    "Hugging Face Hub": "push_to_hub hub_model_id hub_strategy hub_revision hub_private_repo hub_timeout",
}
# What is shown as the default of a field whose own default is None
_EFFECTIVE = {
    "per_device_train_batch_size": "chosen by memory",
    "gradient_checkpointing": "chosen by memory",
    "checkpointed_layers": "chosen by memory",
    "bf16": "True on a GPU",
    "padding_free": "True where possible",
    "prefix_sharing": "True where possible",
    "use_peft": "False",
}


class FieldParser(TrlParser):
    def __init__(self) -> None:
        super().__init__(DATACLASSES, allow_abbrev=False, prog="train_dpo.py")
        self.set_defaults(gradient_checkpointing=None)  # chosen by memory
        self.set_defaults(use_peft=None)  # a field of LoRA without it is refused
        self.fields = {action.dest: action for action in reversed(self._actions) if action.dest != "help"}
        self._negative_number_matcher = re.compile(r"-\.?\d")  # argparse takes -1e-6 for an option
        for name, action in self.fields.items():
            if getattr(action.type, "__name__", "") == "string_to_bool" and action.nargs is None:  # bool | None
                action.nargs = "?"
                action.const = True
            if name in _OPTIONAL or action.default is None or action.nargs == "+":
                action.type = accept_empty(action.type)
        self.fields["datasets"].nargs = None
        self.fields["datasets"].type = read_mixture
        self.add_argument("--config", help="YAML recipe; its keys are the fields below")

    def format_help(self) -> str:  # argparse would print a thousand lines
        lines = ["usage: train_dpo.py --config RECIPE [--field value ...]"]
        for group, names in FIELD_GROUPS.items():
            lines += ["", f"{group}:"]
            for name in names.split():
                default, meaning = self.describe(name)
                lines.append(f"  --{name} [{default}]\n      {meaning}")
        lines += ["", "All other fields of TRL's DPOConfig and ModelConfig are accepted, too."]
        return "\n".join(lines) + "\n"

    def describe(self, name: str) -> tuple[str, str]:
        """Default and meaning of a field: the first sentence of its help."""
        default = _EFFECTIVE.get(name, self.fields[name].default)
        if isinstance(default, list):
            default = " ".join(default)
        shown = "none" if default in (None, "") else str(getattr(default, "value", default))
        meaning = " ".join(str(self.fields[name].help).replace("%%", "%").split())
        return shown, meaning.partition(". ")[0].rstrip(".") + "."

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if value is not None:  # a field that was emptied, see `accept_empty`
            super()._check_value(action, value)

    def error(self, message: str):  # argparse would print several hundred lines of usage
        message = re.sub(r"^argument --(\w+)\S*: ", r"\1: ", message)
        name = message.partition(":")[0]
        if name in REFUSED:
            raise UserError(f"{name}: {REFUSED[name]}")
        default = self.fields[name].default if name in self.fields else None  # a recipe's --config is not among them
        example = 1 if default is None else default
        message = re.sub(r"(invalid (int|float) value: .*)", rf"\1; give a number, such as {example}", message)
        raise UserError(re.sub("Truthy value expected: (got .*?) but.*", r"\1; give true or false", message))


def accept_empty(to_type: Any) -> Callable[[str], Any]:
    """For `type=`: `to_type`, but an empty text becomes None, so that `--field=` empties a recipe's field; so does the
    word None, which is text to YAML."""

    @functools.wraps(to_type)
    def read(text: str) -> Any:
        return None if text in ("", "None") else to_type(text)

    return read


def parse_config(argv: list[str], world_size: int | None = None, training: bool = True) -> Config:
    """Reads `--config RECIPE` and the overrides after it. Raises UserError for wrong values and combinations.

    `training` is False for a command that only reads a recipe on a CPU node. `world_size` defaults to the launcher's.
    """
    parser = FieldParser()
    unread: list[str] = []
    namespace = parse_fields(parser, argv, unread)
    if namespace.beta < 1 and namespace.loss_type is parser.fields["loss_type"].default:
        text = "beta is below 1, but loss_type is not set, and its default here is sigmoid_norm; TRL's is sigmoid"
        log.warning(text)
    world_size = world_size or (distributed.world_size() if training else 1)
    if not training:
        vars(namespace).update(use_cpu=True, bf16=False, dtype=None)
    problems: list[str] = []
    if not namespace.use_cpu and (reason := distributed.explain_missing_gpus()):
        problems.append(f"{reason}. To train on the CPU anyway, set --use_cpu true")
    # accelerate's launcher drops a DeepSpeed config file's `use_cpu`, and without it accelerate finds no backend:
    # each CPU process would act as the only one.
    namespace.use_cpu = namespace.use_cpu or not torch.cuda.is_available()
    if training and namespace.use_cpu and namespace.flash_attention != "auto":
        log.info(f"flash_attention {namespace.flash_attention}: not used on a CPU, where SDPA computes attention")
    if training and namespace.use_cpu and namespace.bf16:
        log.warning("bf16 True: slower than fp32 on most CPUs; set bf16: false")
    if namespace.bf16 is None:
        namespace.bf16 = not namespace.use_cpu  # TRL's default is true everywhere
    namespace.dtype = namespace.dtype or "float32"
    problems += checks.check_fields(namespace, world_size, training)
    if namespace.eval_strategy == "no" and namespace.eval_steps not in (None, TrainConfig.eval_steps):
        problems.append(f"eval_steps {namespace.eval_steps:g}: has no effect; set eval_strategy: steps, or remove it")
    with collect_errors(problems):
        check_locks()
    if training:
        for name in checks.list_changed(namespace, UNUSED):
            log.warning(f"{name}: has no effect here, see docs/reference.md")
        with collect_errors(problems):
            namespace.report_to = resolve_report_to(namespace.report_to)
    # A field that was not read has no other problem; without its datasets, a recipe has no dataset_name either
    named = {*re.findall(r"\w+", " ".join(unread).replace("datasets", "datasets dataset_name"))}
    problems = [*unread, *(problem for problem in problems if re.split(r"[ :]", problem)[0] not in named)]
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        items = [f"\n- {problem.removeprefix(f'{namespace.config}: ')}" for problem in problems]
        raise UserError(f"{len(problems)} fields to correct in {namespace.config or 'the options'}:{''.join(items)}")
    if namespace.dataset_num_proc:  # more processes than cores only take memory
        namespace.dataset_num_proc = min(namespace.dataset_num_proc, len(os.sched_getaffinity(0)))
    namespace.use_peft = bool(namespace.use_peft)
    if training and distributed.world_size() > 1:  # the process group is made with the dataclasses
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        log.info(f"waiting for all {distributed.world_size()} ranks at {where}")
    with user_input("configuration"):
        get_peft_config(namespace)  # checks the LoRA fields
        train, model, data = parser.parse_dict(vars(namespace), allow_extra_keys=True)
    target = model.lora_target_modules
    if isinstance(target, str) and target.isidentifier():  # TRL's form of a single name, a pattern to PEFT
        model.lora_target_modules = [target]
    for name, value in vars(train).items():
        if name.endswith("_kwargs") and not isinstance(value, dict | None):
            raise UserError(f"{name} {value}: give a mapping, such as {{a: 1}}")
    if train.accelerator_config != AcceleratorConfig():  # which resolved_config.yaml holds
        raise UserError(f"accelerator_config {namespace.accelerator_config}: {REFUSED['accelerator_config']}")
    if training:
        check_optimizer(train)
    if training and train.max_steps > 0:
        checks.check_length_of_run(train)
    return Config(train, model, data)


def check_locks() -> None:
    """Raises UserError if HF_HOME has no file locks, which libraries take there, except where flock does not exist."""
    with contextlib.suppress(OSError):
        os.makedirs(HF_HOME, exist_ok=True)
        with tempfile.TemporaryFile(dir=HF_HOME) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    what = f"HF_HOME {HF_HOME}: no file can be locked there ({error.strerror})"
                    raise UserError(f"{what}; set HF_HOME (in .env) to a folder on another disk") from None


def check_optimizer(args: TrainConfig) -> None:
    """Builds the optimizer and the schedule for a single weight. Raises UserError if the libraries refuse that."""
    from transformers import get_scheduler

    layer = torch.nn.Linear(1, 1)
    remedy = "choose another, or install what it needs"
    with user_input(f"optim {args.optim.value}, optim_args {args.optim_args}", remedy):
        optimizer = torch.optim.SGD(layer.parameters(), lr=args.learning_rate)
        if not args.optim_target_modules:  # they choose among the model's layers
            build_optimizer(args, layer)
    steps = max(args.max_steps, 1000)
    kind = args.lr_scheduler_type
    with user_input(f"lr_scheduler_type {kind.value}, lr_scheduler_kwargs {args.lr_scheduler_kwargs}"):
        get_scheduler(kind, optimizer, args.get_warmup_steps(steps), steps, args.lr_scheduler_kwargs)


def build_optimizer(args: TrainConfig, layer: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer that the libraries make of a configuration, for the weights of `layer`."""
    from transformers import Trainer  # takes seconds

    optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args, layer)
    return optimizer_class(layer.parameters(), **options)


def parse_fields(parser: FieldParser, argv: list[str], problems: list[str]) -> argparse.Namespace:
    """The values of all fields, from the command line, else the recipe, else the defaults. Adds to `problems` what is
    unknown or of a wrong type, and takes it for not given."""
    split: list[str] = []
    for word in argv:  # a shell's quotes around `--field value` make one word of the two
        split += word.split(" ", 1) if re.match(r"--\w+ ", word) else [word]
    starts = [number for number, word in enumerate(split) if word.startswith("--")]
    given = [split[start:end] for start, end in pairwise([0, *starts, len(split)]) if start < end]
    options = [("command line", words) for words in given]
    chosen = [words for words in given if words[0].partition("=")[0] == "--config"]
    if chosen:
        recipe = parser.parse_known_args(chosen[-1])[0].config
        options[:0] = [(recipe, words) for words in read_recipe(recipe, parser, problems)]
    namespace = parser.parse_args([])
    for where, words in options:
        with collect_errors(problems):
            read_words(words, parser, where, namespace)
    if recipes := [problem for problem in problems if "did you mean --config" in problem]:
        raise UserError(recipes[0])  # the fields of the recipe would all be missing
    for name in ("model_name_or_path", "ref_model_name_or_path", "resume_from_checkpoint"):
        if path := vars(namespace)[name]:
            setattr(namespace, name, os.path.expanduser(path))
    for name, value in vars(namespace).items():
        if value == [None]:  # an emptied list
            setattr(namespace, name, None if name in _OPTIONAL else [])
    return namespace


def read_words(words: list[str], parser: FieldParser, where: str, namespace: argparse.Namespace) -> None:
    """Sets a field to the value in the words of an option; a list or mapping in YAML is read as in a recipe. Raises
    UserError for an option that is unknown or has a value of a wrong type."""
    option, _, value = words[0].partition("=")
    name = option.lstrip("-").replace("-", "_")
    text = value or " ".join(words[1:])
    action = parser.fields.get(name)
    if action and (re.fullmatch(r"\{.*: .*\}", text, re.DOTALL) or (text.startswith("[") and action.nargs == "+")):
        with user_input(f"{where}: {name}"):
            words = read_option(name, yaml.compose(text, Loader), parser)
    try:
        extra = parser.parse_known_args(words, namespace)[1]
    except UserError as error:
        raise UserError(f"{where}: {error}{checks.explain_migrated(f'{name}: {text}')}") from None
    if extra:
        stray = extra[0].partition("=")[0]
        near = checks.explain_unknown(stray.lstrip("-"), parser.fields, "--")
        if stray.endswith((".yaml", ".yml")):
            near = f"; did you mean --config {stray}?"
        raise UserError(f"unknown option {stray}{near}")


def read_recipe(path: str, parser: FieldParser, problems: list[str]) -> list[list[str]]:
    """The words of an option for each field of a recipe, with scalars as written: YAML reads `no` as false and 1e-6 as
    text. Adds to `problems` what is unknown or given twice."""
    file = Path(path)
    if file.is_dir():
        raise UserError(f"--config {path}: is a folder; give a recipe, a .yaml file")
    if not file.is_file():
        raise UserError(f"--config {path}: no such file{nearest(path, map(str, file.parent.glob('*.y*ml')))}")
    with user_input(f"{path} is not valid YAML"):
        root = yaml.compose(file.read_text(), Loader)
    if not isinstance(root, yaml.MappingNode):
        kind = "empty" if root is None else "a list" if isinstance(root, yaml.SequenceNode) else "a text"
        raise UserError(f"--config {path}: is {kind}; a recipe is a mapping, with lines such as 'beta: 5'")
    options: dict[str, list[str]] = {}
    for key, node in root.value:
        name = str(key.value)
        with collect_errors(problems), user_input(f"{path}: {name}"):
            if name in options:  # PyYAML would take the last one
                raise UserError(f"{path}: {name} is given twice; keep one")
            if name not in parser.fields:
                problems.append(f"{path}: unknown field {name!r}{checks.explain_unknown(name, parser.fields)}")
                name = checks.read_migration().get(name, "")  # for the checks of other fields
            if name in parser.fields:
                options.setdefault(name, read_option(name, node, parser))
    return [words for words in options.values() if words]


def read_option(name: str, node: yaml.Node, parser: FieldParser) -> list[str]:
    """A field in YAML as words of a command line; argparse converts and checks them."""
    action = parser.fields[name]
    if node.tag == _NULL and action.default is None:
        return []
    if node.tag == _NULL and name not in _OPTIONAL:
        raise UserError(f"{name} is empty; give it a value, or remove the line for the default")
    if action.nargs == "+" and isinstance(node, yaml.SequenceNode):
        items = [str(item.value) for item in node.value]
        return [f"--{name}", *items] if items else [f"--{name}="]
    text = "" if node.tag == _NULL else node.value
    if not isinstance(node, yaml.ScalarNode):
        text = json.dumps(_construct(node), default=str)
    return [f"--{name}={text}"]


def read_mixture(text: str) -> list[DatasetConfig]:
    """For `type=`: the value of `datasets`, in YAML."""
    with user_input("datasets", "give a list of mappings such as {path: org/set, split: train, fraction: 0.5}"):
        given = yaml.load(text or "[]", Loader)
        known = {field.name for field in dataclasses.fields(DatasetConfig)} - {"columns"}
        named = (name for entry in given if isinstance(entry, dict) for name in entry if entry[name] is not None)
        if unknown := sorted({*named} - known):
            remedies = dict.fromkeys(checks.explain_unknown(name, known) for name in unknown)
            raise ValueError(f"unknown keys {', '.join(unknown)}{''.join(remedies)}")
        entries = [DatasetConfig(**entry) for entry in given]
    fractions = [entry.fraction for entry in entries]
    good = [isinstance(share, int | float) and share > 0 for share in fractions]
    if set(fractions) - {None} and not all(good):
        raise UserError(f"datasets: fraction {fractions}: must be a number above 0 in all entries, or in none")
    return entries


def has_wandb_login() -> bool:
    """Whether `wandb login` has stored a key in ~/.netrc. wandb.login would fix the run's id, which is set later."""
    try:
        hosts = netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in host or host == "api.forge.coreweave.com" for host in hosts)


def resolve_report_to(report_to: list[str]) -> list[str]:
    """The trackers that can work here. A batch job must not wait at W&B's login prompt."""
    trackers = [tracker for tracker in report_to if tracker != "none"]
    for tracker in trackers:
        check_known("report_to", tracker, INTEGRATION_TO_CALLBACK)  # `all` is refused: it includes W&B's login prompt
        if tracker not in get_available_reporting_integrations():
            raise UserError(f"report_to {tracker}: not installed; pip install {tracker}, or remove it")
    key = os.environ.get("WANDB_API_KEY")
    is_offline = os.environ.get("WANDB_MODE") in ("offline", "disabled")
    if "wandb" in trackers and key and not is_offline:
        from wandb.sdk.lib.wbauth.validation import check_api_key  # takes seconds

        if problem := check_api_key(key):
            raise UserError(f"report_to wandb: WANDB_API_KEY: {problem} Copy it from wandb.ai/authorize")
    if "wandb" in trackers and not (key or is_offline or has_wandb_login()):
        trackers.remove("wandb")
        log.info("W&B off: neither WANDB_API_KEY nor WANDB_MODE=offline is set, and `wandb login` was not run")
    return trackers
