"""Reads the files of a run, which a kill, a full disk or a hand may have damaged."""

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
EVALUATION = "evaluation.json"

_TEXT = (str, None)
_COUNT = (int, None)
_NUMBER = (int, float, None)
_SCORE = {"value": (int, float), "stderr": _NUMBER}
_ROW = {"task": str, "metric": str, "filter": str, "samples": int, "base": _SCORE, "trained": _SCORE}
_ROW |= {"difference": (int, float), "low": _NUMBER, "high": _NUMBER}
_FINDING = {"reasons": [str], "verdict": str, "text": str}
# By file, what its readers expect of a value: a type, a list or a mapping ({str: ...}: of any names), or a tuple of
# alternatives. A file may lack a name of the top level, or one that may be None, and hold more names than these.
SCHEMAS: dict[str, Any] = {
    STATUS: {"state": str, "message": _TEXT, "step": _COUNT, "max_steps": _COUNT, "checkpoint": _TEXT}
    | dict.fromkeys(("job", "task", "log", "trained"), _TEXT)
    | {"exit_code": _COUNT, "time": str, "files": ({str: int}, None), "pushed": _TEXT, "eta_seconds": _NUMBER}
    | {"loss": _NUMBER, "margin": _NUMBER, "pairs_per_second": _NUMBER}
    | {"best": ({"step": int, "metric": str, "value": (int, float), "better_base": _NUMBER}, None)},
    ENVIRONMENT: {"starts": [{"step": int, "time": _TEXT, "end": _TEXT, "world_size": _COUNT}]}
    | {"hangs": [{"job": _TEXT}], "versions": {str: _TEXT}, "gpus": [str]}
    | {"command": [str], "world_size": int, "git_commit": _TEXT, "wandb_run_id": str},
    DATA: {"sources": [str], "rows": int, "train": int, "eval": int, "eval_sets": {str: int}, "dropped": {str: int}}
    | {"reference": {str: dict}, "settings": dict, "launch": str, "order": [str], "train_tokens": str}
    | {"models": {str: _TEXT}},
    "preflight.json": _FINDING | {"table": ([[str]], None)},
    "health.json": _FINDING,
    EVALUATION: {"benchmarks": [_ROW], "pairs": [{"source": str, "pairs": int}]},
    "trainer_state.json": {"global_step": int, "best_global_step": _COUNT, "log_history": [{"step": int}]},
    "samples.json": [{"prompt": str, "before": str, "after": str}],
    RESOLVED_CONFIG: {"model_name_or_path": str, "loss_type": [str], "beta": (int, float), "max_steps": int}
    | {"learning_rate": (int, float), "warmup_steps": (int, float), "num_train_epochs": (int, float)},
    "complete.json": {"files": {str: int}, "xxh3_128": {str: str}, "model_name_or_path": str}
    | {"ref_model_name_or_path": str},
}


def read_file(path: Path) -> Any:
    """The content of a run's JSON or YAML file; empty, after one warning, if it does not match its schema (a mapping
    for a file without one). Empty if there is no such file."""
    schema = SCHEMAS.get(path.name, {})
    if not path.exists():
        return type(schema)()
    try:
        return read_sound_file(path, "treated as absent")
    except UserError as error:
        _warn_once(str(error))
        return type(schema)()


def read_sound_file(path: Path, remedy: str) -> Any:
    """The content of a run's file. Raises UserError with the `remedy` if it is absent or does not match its schema."""
    with user_input(f"{path}: missing or damaged", remedy):
        text = path.read_text()
        content = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
        if wrong := _find_mismatch(content, SCHEMAS.get(path.name, {})):
            raise ValueError(f"wrong type of {wrong}")
        return content


@functools.cache
def _warn_once(message: str) -> None:
    log.warning(message)


def _find_mismatch(value: Any, schema: Any, where: str = "the file", is_optional: bool = True) -> str:
    """Where `value` does not match the schema; empty if it matches."""
    if isinstance(schema, tuple):
        found = [_find_mismatch(value, alternative, where, is_optional) for alternative in schema]
        return min(found, key=len)
    if schema is None or isinstance(schema, type):
        return "" if isinstance(value, schema or type(None)) else where
    if not isinstance(value, type(schema)):
        return where
    if isinstance(schema, list):
        parts = [(item, schema[0], f"{where}[{number}]") for number, item in enumerate(value)]
    else:
        names = value if str in schema else [name for name in schema if name in value or not is_optional]
        parts = [(value.get(name), schema.get(name, schema.get(str)), name) for name in names]
    found = [_find_mismatch(*part, is_optional=False) for part in parts]
    return next(filter(None, found), "")
