"""Watchdog: a run in which no rank moves for `hang_timeout` ends with exit code 70, and names the rank that is stuck.

A thread of each rank writes its position to output_dir/heartbeats/rank-N.json and reads the others': files, because
rank 0 may be the one that is stuck, and a collective may be what all others wait in. Time is counted in turns of the
thread: a job that Slurm suspends and resumes does not look like one that hangs.
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
from typing import Any, NoReturn

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
        self.heartbeats = self.run / "heartbeats"
        self.timeout = timeout
        self.position = position
        self.interval = min(max(timeout / 30, 0.2), 30.0)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._remove_heartbeats()  # of an earlier start
        if timeout:
            self._thread.start()

    def stop(self) -> None:
        """Ends the watch."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        self._remove_heartbeats()

    def _remove_heartbeats(self) -> None:
        if is_main_process():
            shutil.rmtree(self.heartbeats, ignore_errors=True)

    def _watch(self) -> None:
        while not self.position.count:
            if self._stopped.wait(self.interval):
                return
        self.heartbeats.mkdir(exist_ok=True)
        seen: list[int | None] = []
        still = 0.0
        while not self._stopped.wait(self.interval):
            beats = [read_mapping(self._heartbeat(other)) for other in range(world_size())]
            beats[rank()] = self._write_heartbeat()
            counts = [beat.get("count") for beat in beats]
            still = still + self.interval if counts == seen else 0.0
            seen = counts
            if still >= self.timeout:
                self._end(beats)

    def _heartbeat(self, rank: int) -> Path:
        return self.heartbeats / f"rank-{rank}.json"

    def _write_heartbeat(self) -> dict[str, Any]:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        beat = {
            "rank": rank(),
            "count": self.position.count,
            "where": f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})",
            "host": os.environ.get("SLURMD_NODENAME") or platform.node(),
        }
        with contextlib.suppress(OSError):  # a full disk; this rank knows its own count
            write_json(self._heartbeat(rank()), beat)
        return beat

    def _find_stopped(self) -> list[int]:
        """Ranks that no longer write heartbeats, by the clock of the file system."""
        written = {other: self._heartbeat(other).stat().st_mtime for other in range(world_size())}
        return [other for other, when in written.items() if max(written.values()) - when > self.timeout / 2]

    def _end(self, beats: list[dict[str, Any]]) -> NoReturn:
        """Writes this rank's stacks; the first rank that gets here also writes the verdict."""
        try:
            stacks = self.run / "stacks" / f"rank-{rank()}.txt"
            stacks.parent.mkdir(exist_ok=True)
            with stacks.open("a") as file:
                print(f"\n{now()}, rank {rank()}:", file=file, flush=True)
                faulthandler.dump_traceback(file)
            (self.heartbeats / "verdict").touch(exist_ok=False)
            stopped = [] if {} in beats else self._find_stopped()
            self._write_verdict(*find_culprit(beats, stopped))
        except OSError:  # another rank has written the verdict, or the disk is full
            pass
        finally:
            time.sleep(2 * self.interval)  # for the other ranks' stacks: the launcher ends them once this one has left
            os._exit(Hung.exit_code)

    def _write_verdict(self, culprit: dict[str, Any], cause: str) -> None:
        step = self.position.step
        message = (
            f"no rank has moved for {self.timeout:g} s (hang_timeout), {self.position.phase} at step {step}: {cause}; "
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


def find_culprit(beats: list[dict[str, Any]], stopped: list[int]) -> tuple[dict[str, Any], str]:
    """The heartbeat of the rank that is stuck, empty where none can be named, and a description.

    Args:
        beats: each rank's last heartbeat; empty for a rank that has not begun.
        stopped: ranks that no longer write heartbeats.
    """
    if {} in beats:
        absent = beats.index({})
        return {"rank": absent}, f"rank {absent} has not begun"
    culprit = min(beats, key=lambda beat: beat["count"])
    why = "it is behind the others"
    if stopped:
        culprit = beats[stopped[0]]
        why = "its process is stopped, or does not release the interpreter"
    elif all(beat["count"] == culprit["count"] for beat in beats):
        return {}, "no rank is behind the others"
    return culprit, f"rank {culprit['rank']} on {culprit['host']} is stuck in {culprit['where']}: {why}"
