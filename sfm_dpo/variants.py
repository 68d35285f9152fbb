"""Which code paths? The names of parity.py's variants, and which of them this machine can compute."""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.utils import is_flash_attn_2_available

from sfm_dpo.checks import nearest
from sfm_dpo.errors import UserError

WORDS: dict[str, dict[str, Any]] = {  # of a variant's name, joined by +: what each changes
    "eager": {"attention": "eager"},
    "sdpa": {"attention": "sdpa"},
    "padded": {"attention": "sdpa"},
    "packed": {"attention": "packed"},
    "flash": {"attention": "flash_attention_2"},
    "separate": {"separate": True},
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "compile": {"compiled": True},
    "rope_gpu": {"rope": True},
}
DEFAULT_VARIANTS = "padded packed separate batch_1 compile rope_gpu bf16 packed+bf16 flash+bf16".split()


@dataclass(frozen=True)
class Variant:
    """A way to compute a batch. `batch`: pairs in one forward, None for all; `dtype` bfloat16 is autocast.

    `nudged`, which has no word: every weight moved by its last bit, to see what rounding is worth (rounding.py).
    """

    name: str
    attention: str = "eager"
    separate: bool = False
    batch: int | None = None
    dtype: str = "float32"
    compiled: bool = False
    rope: bool = False
    nudged: bool = False


def parse_variant(name: str) -> Variant:
    """`packed+bf16` and the like. Raises UserError for an unknown word."""
    variant = Variant(name)
    for word in name.split("+"):
        batch = re.fullmatch(r"batch_([1-9]\d*)", word)
        if not batch and word not in WORDS:
            raise UserError(
                f"--variants {name}: unknown word {word!r}{nearest(word, set(WORDS))}; the words are "
                f"{', '.join(WORDS)}, batch_N, joined by +"
            )
        variant = replace(variant, **({"batch": int(batch[1])} if batch else WORDS[word]))
    return variant


def why_skipped(variant: Variant) -> str | None:
    """Why a variant cannot be computed on this machine."""
    gpu = torch.cuda.is_available()
    if variant.rope and not gpu:
        return "no GPU is visible: RoPE frequencies can be made on the CPU only"
    if variant.attention == "flash_attention_2":
        if not gpu or not is_flash_attn_2_available():
            return "flash-attn is not installed" if gpu else "no GPU is visible: flash-attn has no CPU kernel"
        if variant.dtype not in ("bfloat16", "float16"):
            return "flash-attn computes in 16 bit only; ask for flash+bf16"
    return None
