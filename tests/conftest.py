"""Settings of the whole suite: no hub, no telemetry, one thread less contention; the repository on the path."""

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "TRACKIO_DISABLED": "1"}
