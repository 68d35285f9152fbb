"""flash-attn-4's kernels as PyTorch 2.13, which pins 4.0.0b17 (pytorch#190212), calls them; calibration compares those
of any release with FA2. Imported only where FlashAttention 4 is activated."""

import importlib
from typing import Any

_kernels = importlib.import_module("flash_attn.cute.interface")
_flash_attn_bwd = _kernels._flash_attn_bwd


# Upstream: torch 2.13, nn/attention/_fa4.py, _fa4_run_forward: unpacks two values, but flash-attn-4 returns up to five
# since 4.0.0b19. Canary: test_canary_fa4_values
def _flash_attn_fwd(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The output and the log-sum-exp, the first two values."""
    output, logsumexp, *_ = _kernels._flash_attn_fwd(*args, **kwargs)
    return output, logsumexp
