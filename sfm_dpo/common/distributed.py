"""TODO."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # scripts/status.py reads this module without the seconds that TRL takes to import
    pass

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # scripts/status.py reads this module without the seconds that TRL takes to import
    pass

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # scripts/status.py reads this module without the seconds that TRL takes to import
    pass

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # scripts/status.py reads this module without the seconds that TRL takes to import
    pass

from sfm_dpo.common.errors import UserError

T = TypeVar("T")


def is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def main_process_first(action: Callable[[], T]) -> T:
    """Runs `action` on rank 0, which fills caches, then on the others, which read them.

    A UserError of rank 0 is raised on every rank, so that all leave with the same line. (Under accelerate's
    `main_process_first` the others would die at the barrier, with a traceback that hides it.)
    """
    from accelerate.utils import broadcast_object_list

    result: Any = None
    error: UserError | None = None
    if is_main_process():
        try:
            result = action()
        except UserError as raised:
            error = raised
    outcome = [error and (str(error), error.exit_code)]
    broadcast_object_list(outcome, from_process=0)
    if outcome[0]:
        raise error or UserError(*outcome[0])
    return result if is_main_process() else action()


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
