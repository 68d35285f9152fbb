"""For every Python that the tests start; conftest.py puts it on PYTHONPATH.

Imports make two million objects that stay. Looking for garbage among them, while importing and once more at the end,
is a third of the CPU time of a tiny run.
"""

import atexit
import gc

gc.set_threshold(1_000_000)
atexit.register(gc.freeze)
