"""Where were we? The newest complete checkpoint of a run."""

import math
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


def newest_checkpoint(run: str | Path, before: float = math.inf) -> str | None:
    """The newest checkpoint-N with N < `before` that is complete: trainer_state.json is the last file written."""
    found = [p for p in Path(run).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if (p / TRAINER_STATE_NAME).is_file()]
    found = [p for p in found if p.name.rsplit("-", 1)[1].isdigit()]
    found = [p for p in found if int(p.name.rsplit("-", 1)[1]) < before]
    return str(max(found, key=lambda p: int(p.name.rsplit("-", 1)[1]))) if found else None
