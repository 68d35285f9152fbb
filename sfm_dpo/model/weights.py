"""The tensors in a folder's safetensors: read one at a time, and checked."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from sfm_dpo.common.errors import UserError


def open_tensors(folder: Path) -> dict[str, Callable[[str], torch.Tensor]]:
    """Name of each tensor in the folder's safetensors -> the function that reads it; UserError without any."""
    tensors: dict[str, Callable[[str], torch.Tensor]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        reader = safe_open(file, framework="pt")
        tensors |= dict.fromkeys(reader.keys(), reader.get_tensor)
    if not tensors:
        raise UserError(f"{folder}: holds no safetensors")
    return tensors


def read_finite(tensors: dict[str, Callable[[str], torch.Tensor]], name: str) -> torch.Tensor:
    """A tensor of `open_tensors`. Raises UserError if a value is NaN or infinite."""
    tensor = tensors[name](name)
    if not torch.isfinite(tensor).all():
        raise UserError(f"{name} holds values that are not finite numbers")
    return tensor
