"""For every Python that the tests start: looking for garbage among what imports make is a third of a tiny run."""

import atexit
import gc

gc.set_threshold(1_000_000)
atexit.register(gc.freeze)
