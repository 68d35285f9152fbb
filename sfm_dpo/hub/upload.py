"""Who gets it? Access to the Hub, looked at before training, and an upload that survives a bad connection.

The upload itself is huggingface_hub's `upload_folder`: one commit, so that a repository is never half-written; data
that arrived is not sent again (by chunk with hf_xet, by file without), and what has not changed is not committed. It
asks each address up to six times in half a minute; here the whole is begun again when that was not enough.
"""

import re
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, get_token, set_client_factory
from huggingface_hub.constants import is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id
from huggingface_hub.utils._http import default_client_factory

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.secrets import mask

RETRY_SECONDS = (10, 60, 300)  # waits between the attempts to push
ASK_SECONDS = (2, 5)  # and to ask, before training
ACCESS_SECONDS, UPLOAD_SECONDS = 30.0, 300.0  # longest silence of the server
_TRANSIENT = {408, 409, 412, 425, 429, 500, 502, 503, 504}
_REASONS = {  # of the Hub's answer; {repo} is filled in
    401: "the Hub does not accept the token: put a valid one into .env as HF_TOKEN (huggingface.co/settings/tokens)",
    403: "the token may not write to {repo}: give it write access there, or choose another hub_model_id",
    404: "the Hub knows no {repo} to which this token leads: it was removed or renamed, or the token lost its access",
    409: "somebody else is changing {repo} at this moment",
    412: "somebody else is changing {repo} at this moment",
    429: "the Hub limits how often it may be asked",
}
# Removed from the repository when a new push does not hold them.
STALE = ["*.safetensors", "*.safetensors.index.json", "figures/*"]


class PushFailed(Exception):
    """A push that did not come about; one line that says why."""


class Unreachable(UserError):
    """No mistake of the user's: the Hub does not answer, or answers that it is not well."""


def check_access(model_id: str, private: bool | None, revision: str | None, remedy: str) -> str:
    """Makes sure that a push could begin now, and returns the repository's full name. Takes a second.

    The repository (private, unless `private` is False) and the branch `revision` are made where they are missing: that
    is the one sure proof. `remedy` ends the message where nothing is wrong with what was asked for: no network, or a
    Hub that is down.

    Raises:
        UserError: no token, or one that is not valid or may only read; a name that the Hub does not allow; no
            permission to write; a public repository where a private one was asked for; HF_HUB_OFFLINE.
        Unreachable: the Hub cannot be reached, or has a failure of its own.
    """
    try:
        validate_repo_id(model_id)
    except HFValidationError as error:
        raise UserError(f"hub_model_id {model_id}: {error}") from error
    if revision and not re.fullmatch(r"[A-Za-z0-9][\w./-]*", revision.replace("{step}", "0")):
        raise UserError(f"hub_revision {revision}: is no name of a branch; use letters, digits and . _ - /")
    if is_offline_mode():
        raise UserError(f"push_to_hub: HF_HUB_OFFLINE is set; unset it, or {remedy}")
    if not get_token():
        raise UserError(f"push_to_hub: there is no token; put HF_TOKEN into .env, or {remedy}")
    api = HfApi()
    with patience(ACCESS_SECONDS):
        me = _ask(api.whoami, model_id, remedy)
        role = me.get("auth", {}).get("accessToken", {}).get("role")
        if role == "read":
            raise UserError("push_to_hub: the token may only read; make one with write access and put it into .env")
        repo = model_id if "/" in model_id else f"{me['name']}/{model_id}"
        names = ", ".join([me["name"], *(org["name"] for org in me.get("orgs", []))])
        _ask(lambda: api.create_repo(repo, private=private is not False, exist_ok=True), repo, remedy, names)
        _ask(lambda: api.auth_check(repo, write=True), repo, remedy, names)
        if private is not False and not _ask(lambda: api.model_info(repo), repo, remedy).private:
            raise UserError(
                f"hub_model_id {repo}: is public; if the model may be seen by all say hub_private_repo: false"
            )
        if revision and "{step}" not in revision:
            _ask(lambda: api.create_branch(repo, branch=revision, exist_ok=True), repo, remedy, names)
    return repo


def upload(folder: Path, repo: str, revision: str, message: str, say: Callable[[str], None]) -> tuple[str, bool]:
    """Makes branch `revision` of `repo` hold the files of `folder`; returns (commit's address, is it new).

    Files that match STALE and are not in `folder` are removed there, all others are left.

    Raises:
        PushFailed: the Hub refuses, or could not be reached in any of the attempts.
    """
    api = HfApi()
    for wait in (*RETRY_SECONDS, None):
        try:
            with patience(UPLOAD_SECONDS):
                if revision != "main":
                    api.create_branch(repo, branch=revision, exist_ok=True)
                before = api.model_info(repo, revision=revision).sha
                commit = api.upload_folder(
                    repo_id=repo, folder_path=folder, revision=revision, commit_message=message, delete_patterns=STALE
                )
            return f"{api.endpoint}/{repo}/commit/{commit.oid}", commit.oid != before
        except Exception as error:  # hf_xet and the LFS client raise RuntimeError; the model is safe whatever it is
            reason, transient = explain(error, repo)
            if wait is None or not transient:
                raise PushFailed(reason) from error
            say(f"push to {repo}: {reason}; again in {wait:g} s, what has arrived is kept")
            time.sleep(wait)
    raise AssertionError("unreachable")


def push_command(path: Path, repo: str, revision: str | None, private: bool | None) -> str:
    """What to type to push later, from the project's folder."""
    words = ["python", "scripts/push_to_hub.py", str(path), "--hub_model_id", repo]
    words += ["--hub_revision", revision] if revision else []
    words += ["--hub_private_repo", "false"] if private is False else []
    return shlex.join(words)


def explain(error: BaseException, repo: str) -> tuple[str, bool]:
    """One line for whatever a call of huggingface_hub raised, and whether trying again may help."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for link in chain:
        if isinstance(link, HfHubHTTPError):
            status = link.response.status_code
            reason = _REASONS.get(status) or (
                "the Hub has a failure of its own" if status >= 500 else f"the Hub refuses: {_line(link)}"
            )
            return f"{reason.format(repo=repo)} (HTTP {status})", status in _TRANSIENT
    for link in chain:
        if isinstance(link, OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set", False
        if isinstance(link, httpx2.TimeoutException):
            return "the Hub was silent for too long", True
        if isinstance(link, httpx2.ConnectError):
            return f"the Hub cannot be reached: {_line(link)}", True
        if isinstance(link, httpx2.TransportError):
            return f"the connection broke: {_line(link)}", True
    first = chain[0]
    return f"{type(first).__name__}: {_line(first)}", isinstance(first, ConnectionError | RuntimeError)


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """huggingface_hub 2.4 waits for an answer without end; in here a silence of `seconds` is an error."""

    def client() -> httpx2.Client:
        made = default_client_factory()
        made.timeout = httpx2.Timeout(seconds, connect=min(seconds, 30.0))
        return made

    set_client_factory(client)
    try:
        yield
    finally:
        set_client_factory(default_client_factory)


def _ask(call: Callable, repo: str, remedy: str, names: str = ""):
    """The answer of a call before training; a Hub that stumbles is asked three times."""
    for wait in (*ASK_SECONDS, None):
        try:
            return call()
        except Exception as error:
            reason, transient = explain(error, repo)
            if not transient:
                hint = f" (this token's own: {names})" if names and "(HTTP 403)" in reason else ""
                raise UserError(f"push_to_hub: {reason}{hint}") from error
            if wait is None:
                raise Unreachable(f"push_to_hub: {reason}; try again, or {remedy}") from error
            time.sleep(wait)


def _line(error: BaseException) -> str:
    return mask(" ".join(str(error).split()))[:300] or type(error).__name__
