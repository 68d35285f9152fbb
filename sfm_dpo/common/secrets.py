"""Secrets of the environment and of .env, which is read once, and masked in whatever is written or printed."""

import os
import re
import sys
import traceback
from pathlib import Path

from dotenv import dotenv_values, find_dotenv

from sfm_dpo.common.distributed import is_main_process
from sfm_dpo.common.files import PROJECT

_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|WEBHOOK")
# What .env may hold besides secrets: folders, projects, modes
_SETTING = re.compile(r"^(HF|WANDB|TRACKIO|TENSORBOARD|CUDA|NCCL|OMP|TORCH|PYTORCH|SBATCH|SLURM|DS)_")
_SHORTEST = 8  # masking a shorter value would make ordinary text illegible, and no token is so short
_env_file_values: set[str] = set()  # what load_env_file has read, but settings


def load_env_file() -> None:
    """Puts .env of the working directory, of a folder above it, or else the project's, into the environment."""
    path = Path(find_dotenv(usecwd=True) or PROJECT / ".env")
    if not path.is_file():
        return
    mode = path.stat().st_mode & 0o777
    if is_main_process() and mode & 0o077:  # not on stdout, where check_config.py prints a result
        print(f"warning: .env can be read by others (mode {mode:o}): chmod 600 {path}", file=sys.stderr, flush=True)
    for name, value in dotenv_values(path).items():  # which warns about a line that is not NAME=value
        os.environ.setdefault(name, value or "")
        if value and not _SETTING.search(name.upper()):
            _env_file_values.add(value)


def mask(text: str) -> str:
    """`text` with `***` for the values of variables with a secret's name, for all of .env but settings, and for tokens
    of the Hub."""
    secrets = {value for name, value in os.environ.items() if _SECRET.search(name.upper())} | _env_file_values
    for value in sorted(secrets, key=len, reverse=True):  # a secret may be part of another
        if len(value) >= _SHORTEST:
            text = text.replace(value, "***")
    return re.sub(r"\bhf_[A-Za-z0-9]{20,}", "***", text)


def mask_traceback(kind, error, trace) -> None:
    """For sys.excepthook: a library may have put the token it was given into its message."""
    print(mask("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr, flush=True)
