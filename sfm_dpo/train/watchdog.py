"""Watchdog: a run in which no rank moves for `hang_timeout` ends with exit code 70, and names the rank that is stuck.

A thread of each rank writes its position to output_dir/heartbeats/rank-N.json and reads the others': files, because
rank 0 may be the one that is stuck, and a collective may be what all others wait in. A pulse in each file shows that
the process itself runs. Time is counted in turns of the thread: a job that Slurm suspends and resumes does not look
like one that hangs.
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

from sfm_dpo.common.distributed import is_main_process, rank, world_size
from sfm_dpo.common.errors import Hung
from sfm_dpo.common.files import now, write_json
from sfm_dpo.run.checkpoint import newest_checkpoint
from sfm_dpo.run.folder import ENVIRONMENT, read_mapping, write_status
from sfm_dpo.train.position import Position

log = logging.getLogger(__name__)


class Watchdog:
    """Ends the process when no rank's position has changed for `timeout` seconds; 0: never.

    It watches from the first micro-batch on: while ranks load, they wait for each other for as long as it takes.
    """

    def __init__(self, run: str | Path, timeout: float, position: Position):
        self.run = Path(run)
        self.timeout = timeout
        self.position = position
        self.interval = min(max(timeout / 30, 0.2), 30.0)
        self.pulse = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if is_main_process():
            shutil.rmtree(self.run / "heartbeats", ignore_errors=True)  # of an earlier start
        if timeout:
            self._thread.start()

    def stop(self) -> None:
        """Ends the watch."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self.position.count:
            if self._stopped.wait(self.interval):
                return
        heartbeat = self._heartbeat(rank())
        stacks = self.run / "stacks" / f"rank-{rank()}.txt"
        for path in (heartbeat, stacks):
            path.parent.mkdir(exist_ok=True)
        with stacks.open("a") as file:
            self._compare_heartbeats(file)
        faulthandler.cancel_dump_traceback_later()
        heartbeat.unlink(missing_ok=True)
        if not stacks.stat().st_size:
            stacks.unlink()
        for path in (heartbeat, stacks):
            with contextlib.suppress(OSError):  # another rank's file is still there
                path.parent.rmdir()

    def _compare_heartbeats(self, stacks: IO[str]) -> None:
        seen: dict[int, Any] = {}
        pulses: dict[int, Any] = {}
        still = 0.0
        while not self._stopped.wait(self.interval):
            # From C, in case another thread never releases the interpreter; normally it is set back in time
            faulthandler.dump_traceback_later(self.timeout, file=stacks)
            beats = {other: read_mapping(self._heartbeat(other)) for other in range(world_size())}
            beats[rank()] = self._write_heartbeat()
            counts = {other: beat.get("count") for other, beat in beats.items()}
            still = still + self.interval if counts == seen else 0.0
            seen = counts
            if still < self.timeout / 2:
                pulses = {other: beat.get("pulse") for other, beat in beats.items()}
            if still >= self.timeout:
                stopped = [other for other, beat in beats.items() if beat.get("pulse") == pulses[other]]
                self._end(stacks, *find_culprit(beats, stopped))

    def _heartbeat(self, rank: int) -> Path:
        return self.run / "heartbeats" / f"rank-{rank}.json"

    def _write_heartbeat(self) -> dict[str, Any]:
        self.pulse += 1
        position = self.position
        written = 0
        if position.saving:
            with contextlib.suppress(OSError):  # files come and go
                written = sum(file.stat().st_size for file in position.saving.rglob("*"))
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        beat = {
            "rank": rank(),
            "count": [position.count, written],
            "pulse": self.pulse,
            "step": position.step,
            "phase": position.phase,
            "where": f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})",
            "host": os.environ.get("SLURMD_NODENAME") or platform.node(),
        }
        with contextlib.suppress(OSError):  # a full disk; this rank knows its own count
            write_json(self._heartbeat(rank()), beat)
        return beat

    def _end(self, stacks: IO[str], culprit: dict[str, Any], cause: str) -> NoReturn:
        """Writes this rank's stacks; the first rank that gets here also writes the verdict."""
        step, phase = self.position.step, self.position.phase
        print(f"\n{now()}, rank {rank()}, step {step}, {phase}:", file=stacks, flush=True)
        faulthandler.dump_traceback(stacks)
        with contextlib.suppress(FileExistsError):
            (self.run / "heartbeats" / "verdict").touch(exist_ok=False)
            message = (
                f"no rank has moved for {self.timeout:g} s (hang_timeout), {phase} at step {step}: {cause}; "
                f"the stacks of all threads are in {self.run / 'stacks'}/rank-N.txt"
            )
            log.error(message)
            hang = {"step": step, "rank": culprit.get("rank"), "host": culprit.get("host")}
            environment = read_mapping(self.run / ENVIRONMENT)
            hangs = environment.get("hangs", [])
            environment["hangs"] = [*hangs, hang | {"time": now(), "job": os.environ.get("SLURM_JOB_ID")}]
            write_json(self.run / ENVIRONMENT, environment)
            checkpoint = newest_checkpoint(self.run)
            hang["checkpoint"] = checkpoint and str(checkpoint)
            write_status(self.run, Hung.state, Hung.exit_code, message, any_rank=True, **hang)
        time.sleep(2 * self.interval)  # for the other ranks' stacks: the launcher ends them once this one has left
        os._exit(Hung.exit_code)


def find_culprit(beats: dict[int, dict[str, Any]], stopped: list[int]) -> tuple[dict[str, Any], str]:
    """The heartbeat of the rank that is stuck, empty where none can be named, and a description.

    Args:
        beats: each rank's last heartbeat; empty for a rank that has not begun.
        stopped: ranks whose pulse has not changed.
    """
    absent = [other for other, beat in beats.items() if not beat]
    if absent:
        return {"rank": absent[0]}, f"rank {absent[0]} has not begun"
    least = min(beat["count"] for beat in beats.values())
    behind = [other for other, beat in beats.items() if beat["count"] == least]
    if stopped:
        culprit, why = beats[stopped[0]], "its process is stopped, or does not release the interpreter"
    elif len(behind) < len(beats):
        culprit, why = beats[behind[0]], "it is behind the others"
    else:
        return {}, "no rank is behind the others"
    return culprit, f"rank {culprit['rank']} on {culprit['host']} is stuck in {culprit['where']}: {why}"
