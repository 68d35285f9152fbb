"""What must not be seen? The secrets of the environment and of .env, masked in whatever is written or printed."""

import os
import re
import stat
import sys
import traceback
from pathlib import Path

from dotenv import dotenv_values, find_dotenv

_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|WEBHOOK")
# What .env may hold besides secrets, and logs name for good reasons: folders, projects, modes.
_SETTING = re.compile(r"^(HF|WANDB|TRACKIO|TENSORBOARD|CUDA|NCCL|OMP|TORCH|PYTORCH|SBATCH|SLURM|DS)_")
_SHORTEST = 8  # masking a shorter value would blot out ordinary text, and nobody's token is one


def secrets() -> set[str]:
    """Values of the environment's variables with a secret's name, and of whatever else .env holds but settings."""
    in_file = {name: value for name, value in dotenv_values(find_dotenv(usecwd=True)).items() if value}
    named = {value for name, value in (*os.environ.items(), *in_file.items()) if _SECRET.search(name.upper())}
    others = {value for name, value in in_file.items() if not _SETTING.search(name.upper())}
    return {value for value in named | others if len(value) >= _SHORTEST}


def mask(text: str) -> str:
    """`text` with `***` in the place of each secret, and of whatever looks like a token of the Hub."""
    for value in sorted(secrets(), key=len, reverse=True):  # a secret may be part of another
        text = text.replace(value, "***")
    return re.sub(r"\bhf_[A-Za-z0-9]{20,}", "***", text)


def mask_traceback(kind, error, trace) -> None:
    """For sys.excepthook: a library may have put the token it was given into its message."""
    print(mask("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr, flush=True)


def warn_of_open_env_file() -> None:
    """One line if others on this machine can read .env, by the process of rank 0."""
    path = Path(find_dotenv(usecwd=True) or ".env")
    if path.is_file() and os.environ.get("RANK", "0") == "0":
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            print(
                f"warning: {path.name} can be read by others (mode {mode:o}): chmod 600 {path}",
                file=sys.stderr,
                flush=True,
            )
