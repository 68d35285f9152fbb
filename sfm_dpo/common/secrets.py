"""Secrets from the environment and from .env: read once, and masked in everything that is written or printed."""

import io
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from dotenv import dotenv_values

from sfm_dpo.common.distributed import is_main_process
from sfm_dpo.common.errors import Interrupted
from sfm_dpo.common.files import PROJECT

_SECRET = re.compile(r"(TOKEN|KEY|SECRET|PASSW(OR)?D|PASSPHRASE|CREDENTIAL|HOOK)S?(_|\d|$)")
_NO_SECRET = re.compile(r"_(PATH|FILE|DIR|HOME|NAME)$")  # HF_TOKEN_PATH
_SHORTEST = 8  # masking shorter values would make ordinary text illegible, and no token is that short


def load_env_file() -> None:
    """Loads .env into the environment: from the working directory, then from the project's folder. A file that another
    user owns or may change is not read: its HF_ENDPOINT would get the token."""
    for path in dict.fromkeys((Path.cwd() / ".env", PROJECT / ".env")):
        if not path.is_file():
            continue
        facts = path.stat()
        mode = facts.st_mode & 0o777
        is_foreign = facts.st_uid not in (0, os.getuid()) or mode & 0o022 or not os.access(path, os.R_OK)
        if is_main_process() and (is_foreign or mode & 0o077):  # not on stdout, where check_config.py prints a result
            what = "not read: others own it or can change it" if is_foreign else "readable by others"
            print(f"warning: {path} is {what} (mode {mode:o}): chmod 600 {path}", file=sys.stderr, flush=True)
        if not is_foreign:
            text = io.StringIO(path.read_text("utf-8", "surrogateescape"))  # a comment may be in another encoding
            for name, value in dotenv_values(stream=text).items():  # warns about a line that is not NAME=value
                os.environ.setdefault(name, value or "")


def mask(text: str) -> str:
    """`text` with `***` for Hub tokens and the values of variables named like a secret, except numbers and paths."""
    names = {name for name in os.environ if _SECRET.search(name.upper()) and not _NO_SECRET.search(name.upper())}
    lines = {line for name in names for line in os.environ[name].splitlines()}  # messages are printed in one line
    for value in sorted(lines, key=len, reverse=True):  # one may contain another
        if value in text and len(value) >= _SHORTEST and not value.isdigit() and not os.path.exists(value):
            text = text.replace(value, "***")
    return re.sub(r"\bhf_[A-Za-z0-9]{20,}", "***", text)


def mask_values(content: Any) -> Any:
    """Parsed JSON or YAML with each string masked; masking the file's raw text could break its syntax."""
    if isinstance(content, dict):
        return {key: mask_values(value) for key, value in content.items()}
    if isinstance(content, list):
        return [mask_values(value) for value in content]
    return mask(content) if isinstance(content, str) else content


def mask_traceback(kind, error, trace) -> None:
    """For sys.excepthook: a library's message may contain the token it was given. Ctrl-C, for instance while libraries
    are imported, prints one line and ends with its exit code."""
    if kind is KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr, flush=True)
        sys.exit(Interrupted.exit_code)
    print(mask("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr, flush=True)
