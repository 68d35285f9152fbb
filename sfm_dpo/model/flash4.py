"""flash-attn-4's kernels as PyTorch 2.13 calls them; imported only where FlashAttention 4 is activated."""

import importlib.metadata
import logging
from contextlib import suppress
from typing import Any

log = logging.getLogger(__name__)

RELEASE = "4.0.0b17"  # PyTorch 2.13 was tested with it (pytorch#190212)

with suppress(importlib.metadata.PackageNotFoundError):  # not installed by pip
    if (installed := importlib.metadata.version("flash-attn-4")) != RELEASE:
        log.warning(f"flash-attn-4 {installed}, not the {RELEASE} of PyTorch 2.13: used only if it agrees with FA2")

_kernels = importlib.import_module("flash_attn.cute.interface")
_flash_attn_bwd = _kernels._flash_attn_bwd


# Upstream: torch 2.13, nn/attention/_fa4.py, _fa4_run_forward: unpacks two values, but flash-attn-4 returns up to five
# since 4.0.0b19. Canary: test_canary_fa4_values
def _flash_attn_fwd(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The output and the log-sum-exp, the first two values."""
    output, logsumexp, *_ = _kernels._flash_attn_fwd(*args, **kwargs)
    return output, logsumexp
