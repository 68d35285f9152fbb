"""Pushes to the Hub: access is checked before training, and the upload survives a bad connection.

What is pushed is staged first: model, tokenizer and card. huggingface_hub's `upload_folder` retries each request for
half a minute, commits everything at once and never sends data twice. This module restarts it after a longer outage.
"""

import logging
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi, get_session, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import validate_repo_id
from transformers import TrainerCallback, TrainerControl, TrainerState

from sfm_dpo.common.distributed import CPU_ONLY, environment_outside_launcher, is_main_process
from sfm_dpo.common.errors import NOT_PUSHED, UserError, user_input
from sfm_dpo.common.files import PROJECT
from sfm_dpo.common.secrets import mask
from sfm_dpo.config.fields import Config, TrainConfig
from sfm_dpo.model.loading import find_base
from sfm_dpo.report.model_card import write_model_card
from sfm_dpo.report.page import write_report
from sfm_dpo.run.checkpoint import PUSHING
from sfm_dpo.run.folder import CARD, PUSHED, REPORT, State, read_status, write_end
from sfm_dpo.run.lock import Lease, describe_owner, is_held, read_owner
from sfm_dpo.run.model_files import MODEL_FILES, TOKENIZER_FILES, find_folder, finish_model
from sfm_dpo.run.saved_model import SavedModel, check_loads, check_on_hub, find_on_hub

log = logging.getLogger(__name__)

TRANSIENT = {408, 409, 412, 425, 429, 500, 502, 503, 504}
STALE = ["*.safetensors", "figures/*", *MODEL_FILES, *TOKENIZER_FILES]  # removed if a new push does not contain them


class HubError(UserError):
    """The Hub refuses a request or cannot be reached."""


def check_access(model_id: str, private: bool | None, revision: str | None, remedy: str) -> str:
    """Checks that a push would be accepted now and returns the repository's full name; errors end with the `remedy`.

    The repository (private, unless `private` is False) and the branch `revision` are created if they are missing: no
    other check proves that this is possible.
    """
    if not get_token():
        raise UserError(f"push_to_hub: no token; put HF_TOKEN into .env, run `hf auth login`, or {remedy}")
    api = HfApi()

    def prepare_repository() -> str:
        repo = api.create_repo(model_id, private=private is not False, exist_ok=True).repo_id
        api.auth_check(repo, write=True)
        if private is not False and not api.model_info(repo).private:
            raise UserError(f"hub_model_id {repo}: is public; if this is intended, set hub_private_repo: false")
        if revision and "{step}" not in revision:
            api.create_branch(repo, branch=revision, exist_ok=True)
        return repo

    try:
        return _call_hub(prepare_repository, waits=(2, 5))
    except HubError as error:
        raise HubError(f"push_to_hub to {model_id}: {error}; fix this, or {remedy}") from error


def upload_folder(folder: Path, repo: str, revision: str, message: str) -> str:
    """Uploads `folder` to branch `revision` of `repo` and returns the commit's URL. Raises HubError."""
    api = HfApi()

    def commit_folder() -> str:
        if revision != "main":
            api.create_branch(repo, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo, folder_path=folder, revision=revision, commit_message=message, delete_patterns=STALE
        )
        return f"{api.endpoint}/{repo}/commit/{commit.oid}"

    return _call_hub(commit_folder, waits=(10, 60, 300))


def _call_hub(request: Callable[[], Any], waits: Sequence[float]) -> Any:
    """Returns what `request` returns, and repeats it after each of the `waits` (seconds) if its error is transient.
    Raises HubError, with one line for any error of huggingface_hub."""
    try:
        return request()
    except UserError:
        raise
    except Exception as error:  # whatever it is, the model is saved
        # Masked before it is cut off: part of a secret would not be recognised
        reason = mask(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
        # hf_xet and the LFS client raise RuntimeError
        is_transient = isinstance(error, httpx2.TransportError | ConnectionError | RuntimeError)
        if isinstance(error, HfHubHTTPError):
            is_transient = error.response.status_code in TRANSIENT
        if not waits or not is_transient:
            raise HubError(reason) from error
    log.info(f"push: {reason}; trying again in {waits[0]} s")
    time.sleep(waits[0])
    return _call_hub(request, waits[1:])


def check_paths(staged: Path, published: Path | None) -> None:
    """Raises UserError if the card or a configuration contains a quoted absolute path that is not in the file of the
    same name in `published`, the base model's."""
    for file in [*staged.glob("*config.json"), staged / CARD]:
        known = published / file.name if published else None
        public = known.read_text() if known and known.is_file() else ""
        for path in re.findall(r'(?<=")/[\w.-]+/[\w./-]+(?=")', file.read_text()):
            if path not in public:
                raise UserError(f"{file.name}: contains a path of this machine, {path}; remove it, and push again")


def check_push(config: Config, resuming: bool) -> None:
    """Before training, on rank 0: checks that a push would be accepted now. Raises UserError if not; a run that is
    `resuming` only warns if the Hub refuses or is down."""
    args = config.train
    if config.model.use_peft:
        check_on_hub(config.model.model_name_or_path, None)
    remedy = "train with push_to_hub: false and push later with scripts/push_to_hub.py"
    repo = choose_repo(vars(args), Path(args.output_dir))
    get_session().timeout = args.hub_timeout  # else none
    try:
        check_access(repo, args.hub_private_repo, args.hub_revision, remedy)
    except HubError as error:
        if not resuming:
            raise
        log.warning(f"{error}; training continues, and the push will be tried at its end")


def choose_repo(config: Mapping[str, Any], run: Path) -> str:
    """hub_model_id, or the folder's name, in which other characters than a repository's become hyphens. Raises
    UserError for a name that no repository can have."""
    repo = config.get("hub_model_id") or re.sub(r"[^A-Za-z0-9_.]+", "-", run.resolve().name).strip("-.")
    with user_input(f"hub_model_id {repo}", "give a name such as my-org/my-model"):
        validate_repo_id(repo)
    return repo


def start_push(path: Path, args: TrainConfig) -> tuple[subprocess.Popen, list[str]]:
    """A process that pushes a run's model or checkpoint, and the words of its command from the project's folder."""
    words = ["scripts/push_to_hub.py", str(path), "--hub_model_id", choose_repo(vars(args), Path(args.output_dir))]
    if args.hub_revision:
        words += ["--hub_revision", args.hub_revision]
    private = str(args.hub_private_repo is not False).lower()  # always: an earlier start's file may say otherwise
    words += ["--hub_private_repo", private, "--hub_timeout", str(args.hub_timeout)]
    env = environment_outside_launcher() | CPU_ONLY | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROJECT / words[0]), *words[1:]]
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL), words


def push_finished(args: TrainConfig) -> bool:
    """Pushes a finished run. A failure is logged and recorded, with the command that pushes later."""
    run = Path(args.output_dir)
    process, words = start_push(run, args)
    code = process.wait()
    if code not in (0, NOT_PUSHED, UserError.exit_code):  # it could neither say why nor clean up
        (run / PUSHING).unlink(missing_ok=True)
        reason = "it took too long (hub_timeout)" if code == -signal.SIGALRM else f"its process ended with code {code}"
        log.error(record_failure(run, reason, words))
    return code == 0


def record_failure(run: Path, reason: str, words: Sequence[str]) -> str:
    """Returns why a push failed, and the command (`words` of Python), if there is one, that pushes later; also writes
    it into status.json of a finished run whose push is open."""
    message = f"push failed: {reason}"
    if words:
        message += f"; push later with: python {shlex.join(words)}"
    status = read_status(run)
    if PUSHED in (status.get("open") or []):
        write_end(run, status["open"], message)
    return message


def push(model: SavedModel, repo: str, revision: str | None, private: bool | None) -> None:
    """Describes and uploads a model that loads; status.json records it for a finished run. Raises UserError if the
    model does not load or is being pushed, and HubError."""
    repo = check_access(repo, private, revision, "push again later")
    branch = (revision or "main").replace("{step}", str(model.step))
    if revision and "{step}" in revision and model.step is None:  # the final model
        branch = "main"
    staged = model.run / f".hub-{model.step or 'final'}"  # narrowed weights need the room
    mark = model.folder / PUSHING
    lease = Lease(mark)
    if is_held(mark) or not (lease.take() or lease.take_over(read_owner(mark))):
        owner = describe_owner(read_owner(mark))
        raise UserError(f"{model.folder}: is being pushed by {owner}; wait until that push has ended")
    try:
        check_loads(model.folder)
        shutil.rmtree(staged, ignore_errors=True)  # left by a push that was killed
        staged.mkdir()
        model.stage(staged)
        base = find_folder(*find_base(model.base, model.base_revision))
        finish_model(staged, None, base, narrow=model.config.get("save_dtype") != "trained")
        write_model_card(model.run, folder=staged, repo=repo, revision=branch, step=model.step)
        check_paths(staged, base if find_on_hub(model.base, model.base_revision) else None)
        address = upload_folder(staged, repo, branch, f"DPO, {model.name}")
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        lease.release()
    log.info(f"pushed {model.name} to {address}")
    status = read_status(model.run)
    if model.step is None and State.of(status).has_model:  # keeps the guard's verdict
        still = [step for step in status.get("open") or [] if step != PUSHED]
        write_end(model.run, still, pushed=address)
        if (model.run / REPORT).is_file():
            write_report(model.run)  # it said that the run was not pushed


class PushCheckpoints(TrainerCallback):
    """Pushes each checkpoint of a run whose hub_strategy is every_save, in a process of its own.

    Trainer's own push (transformers 5.24) uploads every file in output_dir, checks nothing, and runs in threads that
    the interpreter waits for at exit: at a time limit, until Slurm kills it. As there, a checkpoint is skipped while
    an earlier push is running, and a push that fails does not affect training. A run that stops early terminates its
    push, a finished one that to the branch of the final model; otherwise `wait` waits for it.
    """

    def __init__(self, args: TrainConfig) -> None:
        self.is_active = args.push_to_hub and args.hub_strategy != "end" and is_main_process()
        self._push: subprocess.Popen | None = None
        self._words: list[str] = []  # of its command

    def on_save(self, args: TrainConfig, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        is_last = state.global_step >= state.max_steps or control.should_training_stop
        if is_last or not self.is_active:
            return
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self._push and self._push.poll() is None:
            log.info(f"{checkpoint} is not pushed: the push of an earlier checkpoint is still running")
            return
        self._push, self._words = start_push(checkpoint, args)

    def on_train_end(self, args: TrainConfig, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        is_finished = state.global_step >= state.max_steps
        if is_finished and "{step}" in (args.hub_revision or ""):
            return
        if self._push and self._push.poll() is None:
            self._push.terminate()
            log.info(f"the push of a checkpoint was terminated; push it later with: python {shlex.join(self._words)}")
        self.wait()

    def wait(self) -> None:
        """Waits for the push, which would end with this job."""
        if self._push:
            self._push.wait()
