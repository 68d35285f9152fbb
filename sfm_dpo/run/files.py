"""The files of a run, and how they are read: a kill, a full disk or a hand may have damaged them."""

import functools
import json
import logging
from pathlib import Path
from typing import Any

import yaml

from sfm_dpo.common.errors import UserError, user_input

log = logging.getLogger(__name__)

RESOLVED_CONFIG = "resolved_config.yaml"
ENVIRONMENT = "environment.json"
DATA = "data.json"
STATUS = "status.json"
PREFLIGHT = "preflight.json"
HEALTH = "health.json"
SAMPLES = "samples.json"
EVALUATION = "evaluation.json"
REPORT = "report.html"
CARD = "README.md"
RUN_FILES = (RESOLVED_CONFIG, ENVIRONMENT, DATA, STATUS, PREFLIGHT, HEALTH, SAMPLES, EVALUATION)
TRAINER_STATE = "trainer_state.json"  # in a run's folder and in each checkpoint
EVALUATIONS = "evaluations"  # a folder: step-N.json with what eval_command has measured, and step-N.log


def read_file(path: Path) -> Any:
    """The content of a run's JSON or YAML file; empty if there is no such file, and, after one warning, if it is
    damaged."""
    if path.exists():
        try:
            return read_sound_file(path, "treated as absent")
        except UserError as error:
            _warn_once(str(error))
    return [] if path.name == SAMPLES else {}


def read_sound_file(path: Path, remedy: str) -> Any:
    """The content of a run's file. Raises UserError with the `remedy` if the file is absent or neither JSON nor YAML,
    or does not hold a mapping, or for SAMPLES a list."""
    with user_input(f"{path}: missing or damaged", remedy):
        text = path.read_text()
        content = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
        expected = list if path.name == SAMPLES else dict
        if not isinstance(content, expected):
            raise ValueError(f"holds a {type(content).__name__}, not a {expected.__name__}")
        return content


@functools.cache
def _warn_once(message: str) -> None:
    log.warning(message)
