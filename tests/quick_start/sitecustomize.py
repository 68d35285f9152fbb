"""For every Python that the tests start: looking for garbage among what imports make is half of a tiny run."""

import atexit
import gc

collect = gc.collect


def collect_and_freeze(generation: int = 2) -> int:
    """The first collection that a library asks for; the later ones leave out what has survived it."""
    gc.collect = collect
    found = collect(generation)
    gc.freeze()
    return found


gc.collect = collect_and_freeze
gc.set_threshold(1_000_000)
atexit.register(gc.freeze)
