"""Access to the Hub, checked before training, and an upload that survives a bad connection.

The upload is huggingface_hub's `upload_folder`, which retries each request for half a minute, commits everything at
once (up to 20 files), never sends data twice, and makes no commit where nothing has changed. Here it is only started
again after a longer outage.
"""

import logging
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import httpx2
from huggingface_hub import HfApi, get_session, get_token, set_client_factory
from huggingface_hub.constants import is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.secrets import mask

log = logging.getLogger(__name__)

ACCESS_WAITS, UPLOAD_WAITS = (2, 5), (10, 60, 300)  # seconds between the attempts
ACCESS_SECONDS, UPLOAD_SECONDS = 30.0, 300.0  # longest silence of the server
TRANSIENT = {408, 409, 412, 425, 429, 500, 502, 503, 504}
REASONS = {  # by the status of the Hub's answer; for others the Hub's own text is shown
    401: "the Hub does not accept the token: put a valid one into .env as HF_TOKEN (huggingface.co/settings/tokens)",
    403: "the token may not write to {repo}: give it write access there, or choose another hub_model_id",
}
STALE = ["*.safetensors", "*.safetensors.index.json", "figures/*"]  # removed where a new push does not hold them
T = TypeVar("T")


class HubError(UserError):
    """The Hub refuses, or cannot be reached; `transient` where the same request may succeed later."""

    def __init__(self, message: str, transient: bool):
        super().__init__(message)
        self.transient = transient


def check_access(model_id: str, private: bool | None, revision: str | None, remedy: str) -> str:
    """Makes sure that a push could begin now, and returns the repository's full name. Takes a second.

    The repository (private, unless `private` is False) and the branch `revision` are created if they are missing: no
    other check proves that they can be. `remedy` is suggested where there is no token, no network, or no answer.

    Raises:
        HubError: the Hub refuses (no permission to write, a token that is not valid), or cannot be reached.
        UserError: no token; a name that the Hub does not allow; a public repository where a private one was asked
            for; HF_HUB_OFFLINE.
    """
    try:
        validate_repo_id(model_id)
    except HFValidationError as error:
        raise UserError(f"hub_model_id {model_id}: {error}") from error
    if is_offline_mode():
        raise UserError(f"push_to_hub: HF_HUB_OFFLINE is set; unset it, or {remedy}")
    if not get_token():
        raise UserError(f"push_to_hub: there is no token; put HF_TOKEN into .env, or {remedy}")
    set_timeout(ACCESS_SECONDS)
    api = HfApi()

    def prepare_repository() -> str:
        repo = api.create_repo(model_id, private=private is not False, exist_ok=True).repo_id
        api.auth_check(repo, write=True)
        if private is not False and not api.model_info(repo).private:
            raise UserError(f"hub_model_id {repo}: is public; if that is meant, set hub_private_repo: false")
        if revision and "{step}" not in revision:
            api.create_branch(repo, branch=revision, exist_ok=True)
        return repo

    try:
        return call_hub(prepare_repository, model_id, ACCESS_WAITS)
    except HubError as error:
        hint = f"; try again, or {remedy}" if error.transient else ""
        raise HubError(f"push_to_hub: {error}{hint}", error.transient) from error


def upload_folder(folder: Path, repo: str, revision: str, message: str) -> str:
    """Makes branch `revision` of `repo` hold the files of `folder`; returns the commit's address.

    Files that match STALE and are not in `folder` are removed there, all others are left.

    Raises:
        HubError: the Hub refuses, or could not be reached in any of the attempts.
    """
    set_timeout(UPLOAD_SECONDS)
    api = HfApi()

    def commit_folder() -> str:
        if revision != "main":
            api.create_branch(repo, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo, folder_path=folder, revision=revision, commit_message=message, delete_patterns=STALE
        )
        return f"{api.endpoint}/{repo}/commit/{commit.oid}"

    return call_hub(commit_folder, repo, UPLOAD_WAITS)


def format_push_command(path: Path, repo: str, revision: str | None, private: bool | None) -> str:
    """What to type to push later, from the project's folder."""
    words = ["python", "scripts/push_to_hub.py", str(path), "--hub_model_id", repo]
    if revision:
        words += ["--hub_revision", revision]
    if private is False:
        words += ["--hub_private_repo", "false"]
    return shlex.join(words)


def call_hub(request: Callable[[], T], repo: str, waits: Sequence[float]) -> T:
    """Returns what `request` returns; it is repeated after each of the `waits` (seconds) while its error is transient.

    Raises:
        HubError: with one line for whatever huggingface_hub raised.
    """
    try:
        return request()
    except UserError:
        raise
    except Exception as error:  # hf_xet and the LFS client raise RuntimeError; the model is safe whatever it is
        reason, transient = explain_error(error, repo)
        if not (waits and transient):
            raise HubError(reason, transient) from error
    log.info(f"push to {repo}: {reason}; trying again in {waits[0]:g} s")
    time.sleep(waits[0])
    return call_hub(request, repo, waits[1:])


def explain_error(error: BaseException, repo: str) -> tuple[str, bool]:
    """One line for whatever a call of huggingface_hub raised, and whether trying again may help."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, HfHubHTTPError):
            status = cause.response.status_code
            reason = REASONS.get(status, f"the Hub refuses: {_shorten(cause)}").replace("{repo}", repo)
            return f"{reason} (HTTP {status})", status in TRANSIENT
        if isinstance(cause, httpx2.TransportError):
            return f"the Hub cannot be reached: {_shorten(cause)}", True
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {_shorten(error)}", isinstance(error, ConnectionError | RuntimeError)


def _shorten(error: BaseException) -> str:
    # Masked before it is cut: half a secret would not be found
    return mask(" ".join(str(error).split()))[:300] or type(error).__name__


def set_timeout(seconds: float) -> None:
    """From now on a request of huggingface_hub fails after `seconds` without an answer.

    huggingface_hub 2.4.0, utils/_http.py, `default_client_factory` makes its client with `timeout=None`: a server that
    accepts a request and never answers is waited for without end. Only public functions are used here; this goes when
    test_canary_huggingface_hub_waits_without_end fails.
    """
    hooks = get_session().event_hooks  # the library's own: offline mode, request ids
    timeout = httpx2.Timeout(seconds, connect=min(seconds, 30.0))
    set_client_factory(lambda: httpx2.Client(event_hooks=hooks, follow_redirects=True, timeout=timeout))
