"""`accelerate launch`, but each rank is a fork of the launcher, which has imported what train_dpo.py imports: that
takes each process longer than its training does. The ranks are processes of their own in every other respect.

The launcher as it is: tests/slurm, test_commands.py.
"""

import atexit
import gc
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from accelerate.commands.launch import main
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import train_dpo  # noqa: F401


class Fork(subprocess.Popen):
    """A Python process that runs a script: [python, -u, script, arguments]."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        self.pid = os.fork()
        self._child_created = True
        if not self.pid:
            os.setsid()  # as torchrun starts its ranks
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.update(env)
            atexit._clear()  # the launcher's
            run_script(args[2:])


def run_script(words: list[str]) -> None:
    """Runs a script with its arguments and ends the process with its exit code."""
    sys.argv[:] = words
    sys.path[0] = str(Path(words[0]).parent)
    code = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    gc.freeze()
    subprocess_handler.Popen = Fork
    main()
