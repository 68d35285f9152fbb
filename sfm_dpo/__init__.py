"""DPO post-training: TRL's own flags, made to work together under DeepSpeed ZeRO-2 and ZeRO-3, and FSDP2."""

import importlib.util
import logging
import os
import sys
import warnings

# Variables that no installed library reads any more, and what took their place
SUCCESSORS = {
    **dict.fromkeys(("TRANSFORMERS_CACHE", "PYTORCH_TRANSFORMERS_CACHE", "PYTORCH_PRETRAINED_BERT_CACHE"), "HF_HOME"),
    **dict.fromkeys(("HF_API_TOKEN", "HUGGINGFACE_TOKEN", "HUGGINGFACE_HUB_TOKEN"), "HF_TOKEN"),
    "WANDB_DISABLED": "WANDB_MODE=disabled",
}
PACKAGES = "dotenv psutil numpy torch transformers accelerate datasets deepspeed peft matplotlib trl".split()
BARS = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")


def setup(by_ranks: bool = False) -> None:
    """Prepares the process of a command: packages, rank, log, .env, progress bars, torch's allocators. Ends it with
    code 2 if a package or, in a command that is run `by_ranks`, a variable of its rank is missing. Call it before
    importing Hugging Face's libraries, which read HF_HOME once."""
    missing = [name for name in PACKAGES if not importlib.util.find_spec(name)]
    if missing:
        remedy = "type `make setup` once, then `source .venv/bin/activate`"
        print(f"error: {', '.join(missing)}: not installed for {sys.executable}; {remedy}", file=sys.stderr)
        raise SystemExit(2)

    from sfm_dpo.common.cli import install_log
    from sfm_dpo.common.distributed import settle_launch
    from sfm_dpo.common.errors import UserError
    from sfm_dpo.common.secrets import load_env_file, mask_traceback

    try:
        settle_launch(by_ranks)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    sys.excepthook = mask_traceback
    install_log()
    load_env_file()
    for name, successor in SUCCESSORS.items():
        if name in os.environ and successor.partition("=")[0] not in os.environ:
            logging.getLogger(__name__).warning(f"{name}: no library reads this variable any more; set {successor}")
    if not sys.stderr.isatty():  # in a log their carriage returns make one long line
        for bars in BARS:
            os.environ.setdefault(bars, "1")
    # Packed rows differ in length: fixed segments of the CUDA allocator would fragment. torch prefers the older name.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Huge pages for large CPU tensors: otherwise half of a training's CPU time goes into page faults
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)  # deprecations are for developers, not for a job's log
