"""The decoder layers of a model: their kinds, which of them are checkpointed, and their compilation."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

ATTENTION = {"full_attention", "sliding_attention"}  # in `layer_types` of a model's configuration


def blocks(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpoint_layers(model: PreTrainedModel, count: int) -> None:
    """Leaves gradient checkpointing, which is on, to `count` blocks, evenly spread. The last block is among them only
    if all are: the backward frees its activations before it computes those of a checkpointed block again."""
    layers = blocks(model)
    chosen = {number * len(layers) // count for number in range(count)}
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index in chosen


def compile_layers(model: PreTrainedModel, backend: str | Callable, mode: str | None) -> None:
    """Compiles each decoder layer in place, so names in the state dict do not change. `generate` runs uncompiled.

    accelerate 1.15's `compile_regions` compiles a copy of the model, whose forward, bound by TRL, still runs the
    original's layers; its variants for DeepSpeed and FSDP2 also compile `generate`, and none compiles before training.
    """
    for layer in blocks(model):
        layer.compile(dynamic=True, backend=backend, mode=mode, recompile_limit=32)
    # Upstream: transformers 5.24, cache_utils.py, Cache.update: takes the layer's index, so torch.compile
    # makes a graph for each index. Canary: test_canary_graph_for_every_layer
    model.generate = torch.compiler.set_stance("force_eager")(model.generate)
