"""Ranks, by the launcher's environment, and how they agree on a value."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

from sfm_dpo.common.errors import UserError

T = TypeVar("T")


def is_main_process() -> bool:
    """Whether this is rank 0; also before the process group exists."""
    return rank() == 0


def rank() -> int:
    """The number of this process among all."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Processes over all nodes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Processes on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def broadcast(value: T) -> T:
    """Rank 0's value, on every rank. All ranks must call it; the value is pickled."""
    from accelerate.utils import broadcast_object_list

    values = [value]
    broadcast_object_list(values, from_process=0)
    return values[0]


def gather(value: T) -> list[T]:
    """The values of all ranks, on every rank. All ranks must call it; the values are pickled."""
    from accelerate.utils import gather_object

    return gather_object([value])


def main_process_first(action: Callable[[], T]) -> T:
    """Runs `action` on rank 0, which fills caches, then on the others. Rank 0's UserError is raised on every rank."""
    result: Any = None
    error: UserError | None = None
    if is_main_process():
        try:
            result = action()
        except UserError as raised:
            error = raised
    agreed = broadcast(error)
    if agreed:
        raise agreed
    return result if is_main_process() else action()
