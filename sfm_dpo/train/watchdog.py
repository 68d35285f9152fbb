"""Watchdog: a run in which no rank moves for `hang_timeout` ends with exit code 70, and names the rank that stands.

Each rank counts its micro-batches (reference pass, training, evaluation), steps and saves. A thread of each writes the
count to output_dir/heartbeats/rank-N.json and reads the others': files, because rank 0 may be the one that stands, and
a collective may be what all others wait in. Beside the count is a pulse, which shows that the process itself runs.
Time is counted in turns of the thread: a job that Slurm suspends and resumes does not look like one that hangs.
"""

import contextlib
import faulthandler
import logging
import os
import platform
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any, NoReturn

from transformers import TrainerCallback

from sfm_dpo.common.distributed import is_main_process, world_size
from sfm_dpo.common.errors import Hung
from sfm_dpo.common.files import now, write_json
from sfm_dpo.run.checkpoint import newest_checkpoint
from sfm_dpo.run.folder import ENVIRONMENT, read_mapping, write_status

log = logging.getLogger(__name__)


class Watchdog(TrainerCallback):
    """Counts what this rank does, and ends a run that stands still. It watches from the first beat on.

    Args:
        run: output_dir.
        timeout: seconds without progress of any rank; 0: never ends anything.
    """

    def __init__(self, run: str | Path, timeout: float):
        self.run, self.timeout, self.interval = Path(run), timeout, min(max(timeout / 30, 0.2), 30.0)
        self.rank, self.ranks = int(os.environ.get("RANK", "0")), world_size()
        self.count = self.pulse = self.step = 0
        self.phase, self.inputs = "loading", dict[str, Any]()  # of the micro-batch in hand
        self.saving: Path | None = None  # a checkpoint that is being written: its growth is progress
        self._stopped, self._thread = threading.Event(), threading.Thread(target=self._watch, daemon=True)
        if is_main_process():
            shutil.rmtree(self.run / "heartbeats", ignore_errors=True)  # of an earlier start

    def beat(self, **position: Any) -> None:
        """Something was done. `position`: phase, step and inputs, where they are new."""
        self.count += 1
        self.__dict__.update(position)
        if self.timeout and not self._thread.is_alive() and not self._stopped.is_set():
            self._thread.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.beat(step=state.global_step)

    on_save = on_evaluate = on_train_begin = on_step_end

    def stop(self) -> None:
        """The end of what is watched, for good."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        stacks, heartbeat = self.run / "stacks" / f"rank-{self.rank}.txt", self._heartbeat(self.rank)
        for path in (stacks, heartbeat):
            path.parent.mkdir(exist_ok=True)
        seen: dict[int, Any] = {}
        pulses: dict[int, Any] = {}
        still = 0.0
        with stacks.open("a") as file:
            while not self._stopped.wait(self.interval):
                # From C, for the case that another thread never lets go of the interpreter; as a rule set back in time
                faulthandler.dump_traceback_later(self.timeout, file=file)
                beats = {rank: read_mapping(self._heartbeat(rank)) for rank in range(self.ranks)}
                beats[self.rank] = self._write(heartbeat)
                counts = {rank: beat.get("count") for rank, beat in beats.items()}
                still = still + self.interval if counts == seen else 0.0
                seen = counts
                if still < self.timeout / 2:
                    pulses = {rank: beat.get("pulse") for rank, beat in beats.items()}
                if still >= self.timeout:
                    self._end(file, beats, [rank for rank in beats if beats[rank].get("pulse") == pulses[rank]])
        faulthandler.cancel_dump_traceback_later()
        heartbeat.unlink(missing_ok=True)
        if not stacks.stat().st_size:
            stacks.unlink()
        for folder in (heartbeat.parent, stacks.parent):
            with contextlib.suppress(OSError):  # another rank's is still there
                folder.rmdir()

    def _heartbeat(self, rank: int) -> Path:
        return self.run / "heartbeats" / f"rank-{rank}.json"

    def _write(self, path: Path) -> dict[str, Any]:
        self.pulse += 1
        frame, written = sys._current_frames()[threading.main_thread().ident or 0], 0
        if self.saving:
            with contextlib.suppress(OSError):  # files come and go
                written = sum(file.stat().st_size for file in self.saving.rglob("*"))
        where = f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        beat = {"count": [self.count, written], "pulse": self.pulse, "step": self.step, "phase": self.phase}
        beat |= {"where": where, "host": os.environ.get("SLURMD_NODENAME") or platform.node()}
        with contextlib.suppress(OSError):  # a full disk; this rank knows its own count
            write_json(path, beat)
        return beat

    def _end(self, stacks: IO[str], beats: dict[int, dict[str, Any]], stopped: list[int]) -> NoReturn:
        """Writes the stacks; the first rank to come here also writes what it found."""
        print(f"\n{now()}, rank {self.rank}, step {self.step}, {self.phase}:", file=stacks, flush=True)
        faulthandler.dump_traceback(stacks)
        with contextlib.suppress(FileExistsError):
            (self.run / "heartbeats" / "verdict").touch(exist_ok=False)
            rank, cause = find_culprit(beats, stopped)
            host = None if rank is None else beats[rank].get("host")
            message = (
                f"no rank has moved for {self.timeout:g} s (hang_timeout), {self.phase} at step {self.step}: {cause}; "
                f"the stacks of all threads are in {stacks.name.replace(f'-{self.rank}.', '-N.')}"
            )
            log.error(message)
            fault = {"step": self.step, "rank": rank, "host": host}
            start = read_mapping(self.run / ENVIRONMENT)
            start["hangs"] = [*start.get("hangs", []), fault | {"time": now(), "job": os.environ.get("SLURM_JOB_ID")}]
            write_json(self.run / ENVIRONMENT, start)
            checkpoint = newest_checkpoint(self.run)
            fault |= {"checkpoint": checkpoint and str(checkpoint)}
            write_status(self.run, Hung.state, Hung.exit_code, message, any_rank=True, **fault)
        time.sleep(2 * self.interval)  # the other ranks' turn: the launcher ends them once this one has left
        os._exit(Hung.exit_code)


def find_culprit(beats: dict[int, dict[str, Any]], stopped: list[int]) -> tuple[int | None, str]:
    """The rank that stands, if one can be named, and a description of it.

    Args:
        beats: what each rank has written last; empty for a rank that has not begun.
        stopped: ranks whose pulse stands.
    """
    absent = [rank for rank, beat in beats.items() if not beat]
    least = min(beat["count"] for beat in beats.values() if beat)
    behind = [rank for rank, beat in beats.items() if beat and beat["count"] == least]
    if absent:
        return absent[0], f"rank {absent[0]} has not begun"
    if stopped:
        rank, why = stopped[0], "its process is stopped, or does not let go of the interpreter"
    elif len(behind) < len(beats):
        rank, why = behind[0], "it is behind the others"
    else:
        return None, "each rank is as far as the others"
    return rank, f"rank {rank} on {beats[rank]['host']} stands in {beats[rank]['where']}: {why}"
