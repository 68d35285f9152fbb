"""How are the layers compiled? Each decoder layer in place, with dynamic shapes, once for all batches.

Left to transformers, accelerate 1.15 would compile the model as a whole, whose packed forward reads lengths from the
device; its regional compilation has no effect outside DeepSpeed, because it compiles a copy of the model, and the
forward that TRL's fused LM head puts on the instance stays the original's.
"""

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def compile_layers(model: PreTrainedModel, backend: str, mode: str | None) -> None:
    """torch.compile for each decoder layer of `model`, in place: names in the state dict stay as they were.

    Layers that differ in weights only share one graph; kinds of layer (OLMo 3's windows), training and reference
    forward have one each. `generate` runs uncompiled: its cache would need a graph for every layer.
    """
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(dynamic=True, backend=backend, mode=mode, recompile_limit=32)
    model.generate = torch.compiler.set_stance("force_eager")(model.generate)
