"""DPO post-training: TRL's own flags, made to work together under DeepSpeed ZeRO-2.

Importing the package reads .env, so commands import it before the libraries that look at HF_HOME and the tokens.
"""

import importlib.util
import os
import sys
import warnings

if _missing := [
    name
    for name in "dotenv psutil numpy rich torch transformers accelerate datasets deepspeed peft matplotlib trl".split()
    if not importlib.util.find_spec(name)
]:
    print(
        f"error: {', '.join(_missing)}: not installed for {sys.executable}; type `make setup` once, then "
        "`source .venv/bin/activate`",
        file=sys.stderr,
    )
    raise SystemExit(2)

# isort: split
from sfm_dpo.common import log
from sfm_dpo.common.secrets import load_env_file

log.install()
load_env_file()
# Packed rows differ in length: fixed segments of the CUDA allocator would fragment. (torch prefers the older name.)
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
warnings.filterwarnings("ignore", category=FutureWarning)  # deprecations are for developers, not for a job's log
