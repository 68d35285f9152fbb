"""Where were we? The newest complete checkpoint of a run."""

from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


def newest_checkpoint(run: str | Path) -> str | None:
    """The newest checkpoint-N that transformers finished writing: trainer_state.json is its last file."""
    found = [p for p in Path(run).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if (p / TRAINER_STATE_NAME).is_file()]
    found = [p for p in found if p.name.rsplit("-", 1)[1].isdigit()]
    return str(max(found, key=lambda p: int(p.name.rsplit("-", 1)[1]))) if found else None
