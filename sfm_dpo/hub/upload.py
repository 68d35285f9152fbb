"""Access to the Hub, checked before training, and an upload that survives a bad connection.

The upload is huggingface_hub's `upload_folder`: one commit, so that a repository is never half-written; data that
arrived is not sent again (by chunk with hf_xet, by file without), and what has not changed is not committed. The
library sends a file up to six times within half a minute, but a commit once; here the whole is begun again.
"""

import logging
import re
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
REASONS = {  # by the status of the Hub's answer; {repo} is filled in
    401: "the Hub does not accept the token: put a valid one into .env as HF_TOKEN (huggingface.co/settings/tokens)",
    403: "the token may not write to {repo}: give it write access there, or choose another hub_model_id",
    404: "the Hub knows no {repo} that this token may see: it was removed or renamed, or the token lost its access",
    **dict.fromkeys((409, 412), "another push to {repo} is going on"),
    429: "the Hub's rate limit is reached",
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

    The repository (private, unless `private` is False) and the branch `revision` are made where they are missing: that
    is the one sure proof. `remedy` ends the message where nothing is wrong with what was asked for: no network, or a
    Hub that is down.

    Raises:
        HubError: the Hub refuses (no permission to write, a token that is not valid), or cannot be reached.
        UserError: no token, or one that may only read; a name that the Hub does not allow; a public repository where
            a private one was asked for; HF_HUB_OFFLINE.
    """
    try:
        validate_repo_id(model_id)
    except HFValidationError as error:
        raise UserError(f"hub_model_id {model_id}: {error}") from error
    if revision and not re.fullmatch(r"[A-Za-z0-9][\w./-]*", revision.replace("{step}", "0")):
        raise UserError(f"hub_revision {revision}: is not a branch name; use letters, digits and . _ - /")
    if is_offline_mode():
        raise UserError(f"push_to_hub: HF_HUB_OFFLINE is set; unset it, or {remedy}")
    if not get_token():
        raise UserError(f"push_to_hub: there is no token; put HF_TOKEN into .env, or {remedy}")
    set_timeout(ACCESS_SECONDS)
    api, repo, namespaces = HfApi(), model_id, []
    try:
        user = call_hub(api.whoami, repo, ACCESS_WAITS)
        if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise UserError("push_to_hub: the token may only read; make one with write access and put it into .env")
        namespaces = [user["name"], *(org["name"] for org in user.get("orgs", []))]
        repo = model_id if "/" in model_id else f"{user['name']}/{model_id}"
        call_hub(lambda: api.create_repo(repo, private=private is not False, exist_ok=True), repo, ACCESS_WAITS)
        call_hub(lambda: api.auth_check(repo, write=True), repo, ACCESS_WAITS)
        if private is not False and not call_hub(lambda: api.model_info(repo), repo, ACCESS_WAITS).private:
            raise UserError(f"hub_model_id {repo}: is public; if that is meant, set hub_private_repo: false")
        if revision and "{step}" not in revision:
            call_hub(lambda: api.create_branch(repo, branch=revision, exist_ok=True), repo, ACCESS_WAITS)
    except HubError as error:
        hint = f"; try again, or {remedy}" if error.transient else ""
        if namespaces and "(HTTP 403)" in str(error):
            hint = f"; the token's namespaces: {', '.join(namespaces)}"
        raise HubError(f"push_to_hub: {error}{hint}", error.transient) from error
    return repo


def upload_folder(folder: Path, repo: str, revision: str, message: str) -> tuple[str, bool]:
    """Makes branch `revision` of `repo` hold the files of `folder`; returns (commit's address, is it new).

    Files that match STALE and are not in `folder` are removed there, all others are left.

    Raises:
        HubError: the Hub refuses, or could not be reached in any of the attempts.
    """
    set_timeout(UPLOAD_SECONDS)
    api = HfApi()

    def commit_folder() -> tuple[str, bool]:
        if revision != "main":
            api.create_branch(repo, branch=revision, exist_ok=True)
        before = api.model_info(repo, revision=revision).sha
        commit = api.upload_folder(
            repo_id=repo, folder_path=folder, revision=revision, commit_message=message, delete_patterns=STALE
        )
        return f"{api.endpoint}/{repo}/commit/{commit.oid}", commit.oid != before

    return call_hub(commit_folder, repo, UPLOAD_WAITS)


def format_push_command(path: Path, repo: str, revision: str | None, private: bool | None) -> str:
    """What to type to push later, from the project's folder."""
    words = ["python", "scripts/push_to_hub.py", str(path), "--hub_model_id", repo]
    words += ["--hub_revision", revision] if revision else []
    words += ["--hub_private_repo", "false"] if private is False else []
    return shlex.join(words)


def call_hub(request: Callable[[], T], repo: str, waits: Sequence[float]) -> T:
    """What `request` returns; it is repeated after each of the `waits` (seconds) while its error is transient.

    Raises:
        HubError: with one line for whatever huggingface_hub raised.
    """
    try:
        return request()
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
            other = "the Hub has an internal error" if status >= 500 else f"the Hub refuses: {_shorten(cause)}"
            return f"{REASONS.get(status, other).format(repo=repo)} (HTTP {status})", status in TRANSIENT
        if isinstance(cause, httpx2.TimeoutException):
            return "the Hub did not answer in time", True
        if isinstance(cause, httpx2.TransportError):
            what = "the Hub cannot be reached" if isinstance(cause, httpx2.ConnectError) else "the connection broke"
            return f"{what}: {_shorten(cause)}", True
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
