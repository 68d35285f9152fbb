"""Publishes the model of a run or checkpoint: finds, cleans, checks, describes and pushes it."""

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import ADAPTER_CONFIG_NAME

from sfm_dpo.common.distributed import is_main_process
from sfm_dpo.common.errors import UserError
from sfm_dpo.config import TrainConfig
from sfm_dpo.hub import upload
from sfm_dpo.model.saving import fix_saved_files, open_tensors, read_finite
from sfm_dpo.report.model_card import write_model_card
from sfm_dpo.run.checkpoint import PUSHING, mark_in_use, step_of, why_damaged, why_incomplete
from sfm_dpo.run.folder import RESOLVED_CONFIG, State, read_resolved_config, read_status, write_status

log = logging.getLogger(__name__)

# Published besides weights, card and figures; other files that libraries write into the folder are not
_FILES = """config.json generation_config.json adapter_config.json chat_template.jinja tokenizer.json
    tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt tokenizer.model""".split()
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")


@dataclass
class Source:
    """A model to publish: its folder, its run's folder, and the step of a checkpoint (None: the final model)."""

    folder: Path
    run: Path
    step: int | None
    config: dict[str, Any]  # resolved_config.yaml

    @property
    def name(self) -> str:
        return self.run.resolve().name if self.step is None else f"{self.run.resolve().name}/checkpoint-{self.step}"


def find_source(path: Path, publish_anyway: bool = False) -> Source:
    """The model in a run's folder or in one of its checkpoints. Raises UserError if there is none, if it is
    incomplete, or, unless `publish_anyway`, if the guard had stopped the run by then."""
    is_run = (path / RESOLVED_CONFIG).is_file()
    run = path if is_run else path.absolute().parent
    if not (run / RESOLVED_CONFIG).is_file():
        raise UserError(f"{path}: not a run's folder or checkpoint (no {RESOLVED_CONFIG}); give one of these")
    status = read_status(run) or {}
    state = State.of(status)
    if state is State.COLLAPSED and not publish_anyway:
        healthy = status.get("checkpoint")
        if is_run or not healthy or step_of(path) > step_of(Path(healthy)):
            other = healthy or "another run"
            raise UserError(f"{path}: the guard stopped this run; push {other}, or add --publish_anyway")
    if is_run:
        if not (state.has_model or state is State.COLLAPSED):
            raise UserError(f"{path}: the run is not finished (state {state}); push one of its checkpoints")
        return Source(path, run, None, read_resolved_config(run))
    weights = "*.safetensors" if any(path.glob("*.safetensors")) else "*"  # shards hold them otherwise
    if reason := why_incomplete(path) or why_damaged(path, weights, alone=True):
        raise UserError(f"{path}: {reason}; push another checkpoint")
    return Source(path, run, step_of(path), read_resolved_config(run))


def publish(source: Source, repo: str, revision: str | None, publish_anyway: bool = False) -> str:
    """Checks, describes and uploads a model; returns the URL of its commit. Raises UserError if it should not be
    published, and upload.HubError. The branch is `revision` (with {step} replaced by a checkpoint's step), or main."""
    branch = revision or "main"
    if "{step}" in branch:
        branch = "main" if source.step is None else branch.replace("{step}", str(source.step))
    mark = source.folder / PUSHING
    with tempfile.TemporaryDirectory(prefix=".hub-", dir=source.run) as folder:
        if source.step is not None:  # the run may still be training, and would rotate the checkpoint
            mark_in_use(source.folder, PUSHING, os.getpid())
        staged = Path(folder)
        stage_files(source.folder, staged)
        change = _check_fitness(source, staged, publish_anyway)
        write_model_card(source.run, folder=staged, repo=repo, revision=branch, step=source.step, change=change)
        address = upload.upload_folder(staged, repo, branch, f"DPO, {source.name}")
    mark.unlink(missing_ok=True)
    log.info(f"pushed {source.name} to {address}")
    return address


def stage_files(source: Path, target: Path) -> None:
    """Puts into `target` what is published: links to the weights, and small files without traces of this machine."""
    weights = [path for pattern in _WEIGHTS for path in source.glob(pattern)]
    for path in weights:
        (target / path.name).symlink_to(path.resolve())
    if not weights:
        consolidate_shards(source, target)
    for name in _FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    fix_saved_files(target)  # an earlier version of the project may have saved them


def consolidate_shards(checkpoint: Path, target: Path) -> None:
    """Writes the full model of a sharded checkpoint (ZeRO-3, FSDP) into `target`, by the libraries' own functions.
    These use the names of modules; save_pretrained converts them to the names that from_pretrained expects."""
    if (checkpoint / "pytorch_model_fsdp_0").is_dir():
        from accelerate.utils import merge_fsdp_weights
        from safetensors.torch import load_file

        merge_fsdp_weights(checkpoint / "pytorch_model_fsdp_0", target / "merged")
        state = load_file(target / "merged" / "model.safetensors")
        shutil.rmtree(target / "merged")
    elif not (checkpoint / "latest").is_file():
        raise UserError(f"{checkpoint}: holds no weights; choose another checkpoint")
    else:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        state = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    config = AutoConfig.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    tied = set(model.all_tied_weights_keys) if config.get_text_config().tie_word_embeddings else set()
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - tied:
        wrong = [*unexpected, *missing][:3]
        raise UserError(f"{checkpoint}: its shards do not match its config.json: {wrong}; push another checkpoint")
    model.save_pretrained(target)


def _check_fitness(source: Source, staged: Path, publish_anyway: bool) -> str:
    """What training changed, in words. Raises UserError for a problem, or only warns with `publish_anyway`."""
    change = ""
    try:
        base = None
        if not (staged / ADAPTER_CONFIG_NAME).is_file():
            base = find_base(source.config["model_name_or_path"], source.config.get("model_revision"))
        change = describe_change(staged, base)
        log.info(change)
        check_loads(staged)
    except Exception as error:  # each library raises its own class
        reason = " ".join(str(error).replace(str(staged), str(source.folder)).split())[:300]
        if not publish_anyway:
            raise UserError(f"{source.folder}: {reason}; to push it regardless: --publish_anyway") from error
        log.warning(f"{reason}; published because of --publish_anyway")
    return change


def describe_change(trained: Path, base: Path | None) -> str:
    """What training changed in the base model, in words. `base` is its folder; None for a LoRA adapter, whose B
    matrices start at zero. Raises UserError if nothing changed, or a trained weight is not finite."""
    new = open_tensors(trained)
    old = open_tensors(base) if base else {}
    parameters = 0
    changed = 0
    largest = 0.0
    for name in new:
        after = read_finite(new, name)
        if name in old:
            # Rounded to the model's dtype: a bf16 model differs from its fp32 base everywhere by rounding
            difference = after.float() - old[name](name).to(after.dtype).float()
        elif "lora_B" in name:
            difference = after.float()
        else:  # a tied head
            continue
        parameters += difference.numel()
        changed += int(difference.count_nonzero())
        largest = max(largest, difference.abs().max().item())
    if not changed:
        raise UserError("the weights are bitwise those of the base model: nothing was learned")
    return f"{changed / parameters:.2%} of the parameters changed, by at most {largest:.3g}"


def find_base(name: str, revision: str | None) -> Path:
    """The folder of the base model's safetensors: `name`, or the Hub's snapshot if `name` is not a folder."""
    if Path(name).is_dir():
        return Path(name)
    return Path(snapshot_download(name, revision=revision, allow_patterns=["*.safetensors", "*.safetensors.*"]))


def check_loads(folder: Path) -> None:
    """Loads the model in `folder` as its users will. Raises UserError if weights or the chat template are missing."""
    if not AutoTokenizer.from_pretrained(folder, local_files_only=True).chat_template:
        raise UserError("the tokenizer has no chat template; put chat_template.jinja beside it")
    _, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    wrong = {kind: keys for kind, keys in info.items() if keys}
    if wrong:
        raise UserError(f"AutoModelForCausalLM does not load all weights: {wrong}")


def check_push(args: TrainConfig, resuming: bool) -> None:
    """Before training, on rank 0: checks that a push would be accepted now, and completes `args.hub_model_id`. Raises
    UserError if not; a run that is `resuming` only warns if the Hub refuses or is down."""
    args.hub_model_id = choose_repo(vars(args), Path(args.output_dir))
    remedy = "train with push_to_hub: false and push later with scripts/push_to_hub.py"
    try:
        args.hub_model_id = upload.check_access(args.hub_model_id, args.hub_private_repo, args.hub_revision, remedy)
    except upload.HubError as error:
        if not resuming:
            raise
        log.warning(f"{error}; training continues, and the push will be tried at its end")


def choose_repo(config: Mapping[str, Any], run: Path) -> str:
    return config.get("hub_model_id") or run.resolve().name


def push_finished(args: TrainConfig) -> int:
    """Pushes a finished run on rank 0, unless it has been pushed; returns the exit code, 0 or 5."""
    run = Path(args.output_dir)
    if not is_main_process() or (read_status(run) or {}).get("pushed"):
        return 0
    source = Source(run, run, None, read_resolved_config(run))
    return push_run(source, choose_repo(vars(args), run), args.hub_revision, args.hub_private_repo)


def push_run(
    source: Source, repo: str, revision: str | None, private: bool | None, publish_anyway: bool = False
) -> int:
    """Pushes a finished run and writes the outcome into status.json; returns the exit code, 0 or 5.

    A push that fails or is killed leaves the state push_failed, with the command that repeats it.
    """
    run = source.run
    later = f"push later with: {upload.format_push_command(run, repo, revision, private)}"
    _record_push(run, State.PUSH_FAILED, 5, f"the push was interrupted; {later}")
    try:
        repo = upload.check_access(repo, private, revision, "push later")
        address = publish(source, repo, revision, publish_anyway)
    except Exception as error:  # whatever it is, the model is trained and saved
        message = f"push failed: {error}; the model is saved in {run}; {later}"
        _record_push(run, State.PUSH_FAILED, 5, message)
        log.error(message)
        return 5
    _record_push(run, State.DONE, 0, pushed=address)
    return 0


def _record_push(run: Path, state: State, code: int, message: str = "", **extra: Any) -> None:
    status = read_status(run) or {}
    if State.of(status).has_model:  # keeps the guard's verdict
        write_status(run, state, code, message, step=status.get("step"), **extra)
