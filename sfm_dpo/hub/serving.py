"""Whether a model's folder loads elsewhere: read by another version of Transformers, and the readings compared."""

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import PROJECT
from sfm_dpo.hub import probe
from sfm_dpo.hub.verify import Unfit

log = logging.getLogger(__name__)

ENVIRONMENTS = PROJECT / ".venv-serving"
OLDER = "4.57.6"  # the last of Transformers 4, which vLLM's releases of its time pin


def make_environment(version: str = OLDER) -> Path:
    """A virtual environment with that version of Transformers and no torch (240 MB), made once; returns its folder.

    Raises:
        UserError: pip cannot install it.
    """
    folder = ENVIRONMENTS / version
    if not (folder / ".complete").is_file():
        log.info(f"{folder}: installing transformers {version} there, once")
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
        command = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--quiet"]
        command += ["--disable-pip-version-check", f"transformers=={version}", "jinja2"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1]
            raise UserError(f"check_serving: pip cannot install transformers {version}: {reason}; name an environment")
        (folder / ".complete").touch()
    return folder


def check_serving(folder: Path, environment: Path) -> None:
    """Reads tokenizer, template and configurations with the Transformers in `environment`, and compares with ours.

    Raises:
        UserError: an adapter; no Python with Transformers in `environment`.
        Unfit: they cannot be read there, or do not mean the same.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"check_serving {folder}: holds no whole model; an adapter is served with its base model")
    python = environment / "bin/python" if environment.is_dir() else environment
    if shutil.which(python) is None:
        raise UserError(f"check_serving {environment}: no Python there; give the folder of a virtual environment")
    done = subprocess.run(
        [python, probe.__file__, folder.resolve()], capture_output=True, text=True, cwd=folder, check=False
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1]
        if "No module named 'transformers'" in reason:
            raise UserError(f"check_serving {environment}: holds no transformers; name an environment that does")
        raise Unfit(f"the Transformers of {environment} cannot read it: {reason}")
    there, here = json.loads(done.stdout.splitlines()[-1]), probe.read_folder(str(folder))
    versions = [reading.pop("version") for reading in (there, here)]
    for name, value in here.items():
        if there[name] != value:
            raise Unfit(f"Transformers {versions[0]} reads another {name}: {there[name]}, not {value}")
    log.info(f"{folder.name}: Transformers {versions[0]} reads the same as {versions[1]}: {', '.join(here)}")
