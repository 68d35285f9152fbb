"""Watchdog: ends a run with exit code 70 if no rank moves for `hang_timeout` seconds, and names the stuck rank. The
limit while a run loads, where one rank may tokenise for hours, is `ddp_timeout`, after which the others fail anyway.

A thread of each rank writes its progress to output_dir/heartbeats/rank-N.json (files, because the ranks may hang in a
collective). The other ranks read only that of rank 0, which passes on all others. Time is counted in rounds of
this thread, so a job that Slurm suspends is not taken for a hang.
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
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from sfm_dpo.common.distributed import is_main_process, rank, world_size
from sfm_dpo.common.errors import HUNG
from sfm_dpo.common.files import now, write_json
from sfm_dpo.run.checkpoint import newest_checkpoint
from sfm_dpo.run.folder import COLLECTIVES, ENVIRONMENT, State, read_file, write_status
from sfm_dpo.run.lock import LOCK
from sfm_dpo.train.callbacks import Progress

log = logging.getLogger(__name__)


class Watchdog:
    """Ends the process when no rank's progress has changed for `timeout` seconds; 0: never."""

    def __init__(self, folder: Path, timeout: float, loading_timeout: float, progress: Progress):
        self.folder = folder
        self.timeout = timeout
        self.loading_timeout = max(timeout, loading_timeout)
        self.progress = progress
        self.heartbeats = folder / "heartbeats"
        self.stacks = folder / "stacks"
        self.interval = min(max(timeout / 30, 0.2), 30.0)
        self._beats: list[dict[str, Any]] = [{}] * world_size()  # the newest heartbeat of each rank
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if is_main_process():
            shutil.rmtree(self.heartbeats, ignore_errors=True)  # of an earlier start
            self.stacks.mkdir(exist_ok=True)  # NCCL writes there too, see cluster/launch.py
        if timeout:
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        if is_main_process():
            shutil.rmtree(self.heartbeats, ignore_errors=True)
            with contextlib.suppress(OSError):  # it is not empty
                self.stacks.rmdir()

    def _watch(self) -> None:
        seen: list[Any] = []
        still = 0.0
        while not self._stopped.wait(self.interval):
            self._exchange_heartbeats()
            counts = [beat.get("count") for beat in self._beats]
            still = still + self.interval if counts == seen else 0.0
            seen = counts
            limit = self.timeout if self.progress.count else self.loading_timeout
            if still >= limit:
                self._end(limit, *find_culprit(self._beats, self.timeout / 2))

    def _exchange_heartbeats(self) -> None:
        """Rank 0 reads all, and passes them on with its own, which the others read. Where the file system does not
        answer (ESTALE, EIO), what is known counts."""
        mine = self._describe_progress()
        for other in range(1, world_size()) if is_main_process() else [0]:
            with contextlib.suppress(OSError):
                self._beats[other] = read_file(self.heartbeats / f"rank-{other}.json")
        passed_on = self._beats[0].pop("others", [])
        for other, beat in zip(range(1, world_size()), passed_on, strict=False):
            self._beats[other] = beat
        self._beats[rank()] = mine
        more = {"others": self._beats[1:]} if is_main_process() else {}
        with contextlib.suppress(OSError):
            self.heartbeats.mkdir(exist_ok=True)
            write_json(self.heartbeats / f"rank-{rank()}.json", mine | more, durable=False)

    def _describe_progress(self) -> dict[str, Any]:
        written = 0
        if self.progress.saving:
            with contextlib.suppress(OSError):  # files come and go
                files = (path for path in self.progress.saving.rglob("*") if path.parent != self.heartbeats)
                written = sum(file.stat().st_size for file in files)
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return {
            "rank": rank(),
            "count": [self.progress.count, written],
            "time": time.time(),
            "where": f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})",
            "host": os.environ.get("SLURMD_NODENAME") or platform.node(),
        }

    def _end(self, limit: float, culprit: dict[str, Any], cause: str) -> None:
        where = f"{self.progress.phase} at step {self.progress.step}"
        stacks = self.stacks / f"rank-{rank()}.txt"
        with contextlib.suppress(OSError), stacks.open("a") as file:  # a full disk
            print(f"\n{now()}, rank {rank()}, {where}:", file=file, flush=True)
            faulthandler.dump_traceback(file)
        with contextlib.suppress(OSError):  # raised if another rank was first
            (self.heartbeats / "verdict").touch(exist_ok=False)
            field = "hang_timeout" if self.progress.count else "ddp_timeout"
            message = f"no rank has moved for {limit:g} s ({field}), {where}: {cause}; "
            message += f"the stacks of all threads are in {self.stacks}/rank-N.txt"
            if world_size() > 1:
                message += f", the last collectives: torchfrtrace -p {COLLECTIVES} {self.stacks}"
            log.error(message)
            checkpoint = newest_checkpoint(self.folder)
            saved = checkpoint and str(checkpoint)
            hang = {"step": self.progress.step, "rank": culprit.get("rank"), "host": culprit.get("host")}
            write_status(self.folder, State.HUNG, HUNG, message, any_rank=True, **hang, checkpoint=saved)
            environment = read_file(self.folder / ENVIRONMENT)
            hang |= {"time": now(), "job": os.environ.get("SLURM_JOB_ID")}
            environment.setdefault("hangs", []).append(hang)
            write_json(self.folder / ENVIRONMENT, environment)
            (self.folder / LOCK).unlink(missing_ok=True)  # rank 0, its owner, may be the one that is stuck
        with contextlib.suppress(OSError):
            collectives: Any = torch._C._distributed_c10d
            dump = getattr(collectives, "_dump_nccl_trace", collectives._dump_fr_trace)  # the latter: of a CPU build
            (self.stacks / f"{COLLECTIVES}{rank()}").write_bytes(dump())
        time.sleep(2 * self.interval)  # lets the other ranks write their stacks before the launcher ends them
        os._exit(HUNG)


def find_culprit(beats: list[dict[str, Any]], patience: float) -> tuple[dict[str, Any], str]:
    """Heartbeat of the rank that is stuck, or {} if none can be named, and a description. A stopped process's
    heartbeat is more than `patience` seconds older than the newest, and so are those that a stopped rank 0 has passed
    on; a rank that has not begun has {}."""
    if {} in beats:
        absent = beats.index({})
        return {"rank": absent}, f"rank {absent} has not begun"
    newest = max(beat["time"] for beat in beats)
    culprit = min(beats, key=itemgetter("time"))
    if newest - beats[0]["time"] >= patience:
        culprit = beats[0]
    why = "its process is stopped, or does not release the interpreter"
    if newest - culprit["time"] < patience:
        culprit = min(beats, key=itemgetter("count"))
        why = "it is behind the others"
        if culprit["count"] == max(beat["count"] for beat in beats):
            return {}, "no rank is behind the others"
    return culprit, f"rank {culprit['rank']} on {culprit['host']} is stuck in {culprit['where']}: {why}"
