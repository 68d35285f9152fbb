"""DPO post-training: TRL's own flags, made to work together under DeepSpeed ZeRO-2."""

import importlib.util
import os
import sys
import warnings

PACKAGES = "dotenv psutil numpy torch transformers accelerate datasets deepspeed peft matplotlib trl".split()


def setup() -> None:
    """Prepares the process of a command: packages, log, .env, progress bars, the CUDA allocator. Ends it with code 2
    if a package is missing. Call it before importing Hugging Face's libraries, which read HF_HOME once."""
    missing = [name for name in PACKAGES if not importlib.util.find_spec(name)]
    if missing:
        remedy = "type `make setup` once, then `source .venv/bin/activate`"
        print(f"error: {', '.join(missing)}: not installed for {sys.executable}; {remedy}", file=sys.stderr)
        raise SystemExit(2)

    from sfm_dpo.common.cli import install_log
    from sfm_dpo.common.secrets import load_env_file, mask_traceback

    sys.excepthook = mask_traceback
    install_log()
    load_env_file()
    if not sys.stderr.isatty():  # in a log their carriage returns make one long line
        for bars in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(bars, "1")
    # Packed rows differ in length: fixed segments of the CUDA allocator would fragment. torch prefers the older name.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    warnings.filterwarnings("ignore", category=FutureWarning)  # deprecations are for developers, not for a job's log
