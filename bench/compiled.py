#!/usr/bin/env python
"""Bytes that a layer moves beside matrix products and attention, eager and compiled; no GPU is needed.

    python bench/compiled.py

Forward and backward, in units of tokens x hidden size x 2 bytes. docs/memory-and-speed.md has the ratios. The fusions
are those of the CPU where there is no GPU. Inductor's interfaces are private: torch 2.13.
"""

import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import sfm_dpo

sfm_dpo.setup()

import torch
from functorch.compile import make_boxed_func
from torch._inductor import compile_fx
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from bench.count import ByteCounter
from sfm_dpo.common.cli import Arguments
from sfm_dpo.common.files import PROJECT
from sfm_dpo.model import attention
from sfm_dpo.model.attention import PACKED, boundary_arguments
from sfm_dpo.model.loading import blocks, compile_layers

MODELS = ("gpt_neox_6.9b", "olmo3_7b")
TOKENS = 8192
COMPILED_BYTES: list[int] = []


@torch._dynamo.register_backend
def counting_bytes(graph, example_inputs):
    """Inductor up to its fused kernels, whose bytes it counts, without code for them; the graph runs eagerly."""
    return compile_fx.compile_fx(graph, example_inputs, inner_compile=_count_fused_bytes)


def _count_fused_bytes(graph, example_inputs, **kwargs):
    fake_mode = torch._dynamo.utils.detect_fake_mode(example_inputs)
    assert fake_mode is not None
    with V.set_fake_mode(fake_mode), V.set_debug_handler(DebugContext()):
        compile_fx._recursive_post_grad_passes(graph, False)
        compile_fx.record_original_output_strides(graph)
        lowering = GraphLowering(graph, example_inputs=example_inputs, shape_env=fake_mode.shape_env)
        with V.set_graph_handler(lowering):
            lowering.run(*example_inputs)
            lowering._update_scheduler()
            kernels = [node for node in lowering.scheduler.nodes if not isinstance(node, ExternKernelSchedulerNode)]
            COMPILED_BYTES.append(sum(kernel.get_read_write_buffers_sizes() for kernel in kernels))
    return make_boxed_func(graph.forward)


def layer_bytes(shape: str, backend: str | None) -> list[float]:
    """Of a layer in bf16 at its full width: what eager operators move in forward and backward, or, with a backend,
    what Inductor's kernels do in each."""
    config = AutoConfig.from_pretrained(PROJECT / "bench/shapes" / shape, vocab_size=16, pad_token_id=None)
    kinds = getattr(config, "layer_types", None) or []
    config.num_hidden_layers = 1
    config.layer_types = kinds[-1:] or None
    torch._dynamo.reset()
    COMPILED_BYTES.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):  # no memory, no arithmetic
        model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED, dtype=torch.bfloat16).train()
        if backend:
            compile_layers(model, backend, None)
        hidden = torch.empty(1, TOKENS, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
        rope = model.base_model.rotary_emb(hidden, ids, *kinds[-1:])
        boundaries = boundary_arguments(torch.empty(9, dtype=torch.int32), 2048)
        forward = ByteCounter()
        backward = ByteCounter()
        with contextlib.nullcontext() if backend else forward:  # torch.compile is off inside of such a mode
            output = blocks(model)[0](hidden, position_ids=ids, position_embeddings=rope, **boundaries)
        with contextlib.nullcontext() if backend else backward:
            output.backward(torch.empty_like(output))
    counted = COMPILED_BYTES if backend else [forward.total, backward.total]
    return [count / (TOKENS * config.hidden_size * 2) for count in counted]


def main(argv: list[str]) -> None:
    Arguments(description=__doc__).parse_args(argv)
    attention._takes_varlen = lambda *_: True  # as on a GPU
    for shape in MODELS:
        eager = layer_bytes(shape, None)
        compiled = layer_bytes(shape, "counting_bytes")
        figures = [f"{count:.0f}" for count in (*eager, *compiled)]
        print(f"{shape}: eager {figures[0]} + {figures[1]}, compiled {figures[2]} + {figures[3]}", end=", ")
        print(f"{sum(compiled) / sum(eager):.0%}")


if __name__ == "__main__":
    main(sys.argv[1:])
