#!/usr/bin/env python
"""Time of packed attention by a flash kernel, for the heads and windows of a model; scripts/check_gpu.sh runs it.

    python bench/attention.py bench/shapes/olmo3_7b [--flash_attention fa4] [--json FILE]

A row holds 32,000 tokens in sequences of 4,000 to 8,000; on the CPU, a hundredth of that. It prints milliseconds per
layer, the mean over the model's attention layers; each kind of layer is timed as the median of ten.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import sfm_dpo

sfm_dpo.setup()

import numpy as np
import torch
from torch.utils.benchmark import Timer
from transformers import AutoConfig, PretrainedConfig

from sfm_dpo.common.cli import Arguments, command
from sfm_dpo.common.files import write_json
from sfm_dpo.model.attention import activate_flash, boundary_arguments, packed_attention_forward
from sfm_dpo.model.flops import attention_flops

LENGTHS = (4000, 5000, 7000, 8000, 8000)


def time_attention(config: PretrainedConfig, lengths: Sequence[int], device: str) -> list[float]:
    """[2]: milliseconds of forward and backward in bf16, a layer, for a row of sequences of these `lengths`."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    total = sum(lengths)
    draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
    # [1, heads, T, size], in memory token by token, as projections leave it
    q, k, v = [draw(1, total, n, size).transpose(1, 2).requires_grad_() for n in (heads, kv_heads, kv_heads)]
    gradient = draw(1, total, heads, size)
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    arguments = {"attention_mask": None, **boundary_arguments(cu_seqlens, max(lengths))}
    layers = dict(attention_flops(config))  # by window; FLOPs are proportional to the number of layers
    times = []
    for window in layers:
        forward = partial(packed_attention_forward, torch.nn.Module(), q, k, v, **arguments, sliding_window=window)
        backward = partial(torch.autograd.grad, forward()[0], [q, k, v], gradient, retain_graph=True)
        times.append([milliseconds(forward), milliseconds(backward)])
    return np.average(times, axis=0, weights=list(layers.values())).tolist()


def milliseconds(call: partial) -> float:
    timer = Timer("call()", globals={"call": call})  # synchronises a GPU before and after
    return 1e3 * median(timer.timeit(5).mean for _ in range(10))  # five in a row: a GPU need not wait for Python


@command
def main(argv: list[str]) -> None:
    parser = Arguments(description=__doc__)
    parser.add_argument("model", help="a folder with config.json")
    parser.add_argument("--flash_attention", choices=["fa2", "fa3", "fa4"], default="fa2")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        activate_flash(options.flash_attention)
    lengths = [length // (1 if on_gpu else 100) for length in LENGTHS]
    config = AutoConfig.from_pretrained(options.model).get_text_config()
    times = time_attention(config, lengths, "cuda" if on_gpu else "cpu")
    print(f"{options.flash_attention}: forward {times[0]:.2f} ms, backward {times[1]:.2f} ms")
    if options.json:
        write_json(options.json, times)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
