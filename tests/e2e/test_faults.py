"""Faults at random moments of a run: the same command then ends bitwise as if nothing had happened.

A few cases of MATRIX and OPERATIONS by default, more in the grid. FAULTS=100 python -m pytest tests/e2e/test_faults.py
-k bitwise -s runs so many of each and prints a table; FAULT_SEED makes another series. A rank that is stopped for
longer than hang_timeout: test_hang.py.
"""

import contextlib
import ctypes
import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sfm_dpo.common.errors import DISK_REMEDIES
from sfm_dpo.run.checkpoint import checkpoints, newest_checkpoint, step_of, why_incomplete
from sfm_dpo.run.folder import State, read_status
from tests.e2e.runs import Place, Run, assert_same_run
from tests.e2e.test_resume import shards, write_killed
from tests.hub_server import TOKEN, HubServer
from tests.toolbox import error_line, in_grid, sampled, small_disk

PHASES = {  # and how long after the beginning of each, in seconds at most
    "tokenisation": 1.0,
    "reference pass": 0.1,
    "preflight": 0.3,
    "step": 0.1,
    "saving": 0.03,
    "rotation": 0.01,
    "evaluation": 0.2,
    "final save": 0.003,
    "report": 1.0,
    "push": 0.0,
}
IN_EACH_PHASE = ("kill -9", "SIGSTOP", "full disk: output_dir HF_HOME TMPDIR")  # of one of two processes
AFTER_A_KILL = ("flipped byte", "removed file", "clock set back")  # of what the killed run has left
KINDS = (*IN_EACH_PHASE, "full disk: output_dir", "read-only: output_dir", "full disk: TMPDIR")
KINDS += ("two runs on one cache", "SIGINT", "SIGTERM", "two starts", "full disk: HF_HOME", "read-only: HF_HOME")
KINDS += AFTER_A_KILL
# Each later operation on the disk fails with this error: failing_disk.c
FAILING = [f"{error}: {place}" for error in ("EIO", "EDQUOT", "ESTALE") for place in ("output_dir", "HF_HOME")]
LAUNCHES = {"1": (1, "cpu"), "2": (2, "cpu"), "ZeRO-3": (2, "cpu_zero3"), "FSDP2": (2, "cpu_fsdp2")}
LAUNCHES["offload"] = (2, "cpu_offload")
MATRIX = list(itertools.product(IN_EACH_PHASE, PHASES, ["2"]))
SPREAD = zip(itertools.product("12", KINDS), itertools.cycle(PHASES), strict=False)  # over the phases
MATRIX += [(kind, phase, launch) for (launch, kind), phase in SPREAD]
MATRIX += itertools.product(["kill -9"], PHASES, ["ZeRO-3", "FSDP2"])
MATRIX += itertools.product(["kill -9, twice"], PHASES, ["1"])
MATRIX += [(kind, phase, "1") for kind, phase in zip(FAILING * 2, PHASES, strict=False)]
MATRIX += itertools.product(["kill -9"], PHASES, ["offload"])
GROUP = 54_321  # also the id of another user
CASES = [("kill -9", "step", "2")]
GRID = [(kind, "reference pass", "1") for kind in ("read-only: HF_HOME", "two runs on one cache")]
GRID += sampled(MATRIX[5::11], 3)
CASES += [in_grid(*case) for case in GRID]
# One operation on a file of the run's folder fails, or it and each later one
MOST = {"write": (200, 80), "open": (80, 8), "read": (150, 20)}  # a run does as many, in rank 0 and in rank 1
CODES = {"write": ("ENOSPC", "EIO", "EROFS"), "open": ("EROFS", "ENOSPC", "EIO"), "read": ("EIO",)}
# That is which one: of each kind, in each launch, rank 1 too
OPERATIONS = [("write", "1"), ("read", "1"), ("read", "ZeRO-3"), ("open", "FSDP2"), ("write", "ZeRO-3"), ("open", "1")]
OPERATIONS += [("write", "FSDP2"), ("open", "ZeRO-3"), ("read", "FSDP2")]
SEEDS = [(seed, *operation) for seed, operation in enumerate(OPERATIONS + OPERATIONS[::3])]
SEEDS[1:] = [in_grid(*case) for case in sampled(SEEDS[1:], 3)]
if "FAULTS" in os.environ:
    CASES = MATRIX[: int(os.environ["FAULTS"])]
    SEEDS = [(seed, *OPERATIONS[seed % len(OPERATIONS)]) for seed in range(int(os.environ["FAULTS"]))]


@pytest.fixture(scope="session")
def failing_disk(tmp_path_factory) -> Path:
    library = tmp_path_factory.mktemp("failing_disk") / "failing_disk.so"
    source = Path(__file__).with_name("failing_disk.c")
    if subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source]).returncode:
        pytest.skip("no C compiler")
    return library


@pytest.mark.parametrize(("kind", "phase", "launch"), CASES)
def test_the_same_command_then_ends_bitwise(place, uninterrupted, tmp_path, kind, phase, launch, request):
    dice = random.Random(f"{os.environ.get('FAULT_SEED')}, {kind}, {phase}, {launch}")
    if kind == "two runs on one cache":
        phase = "reference pass"
    disk = tmp_path / "d"  # short, because the path of a socket in TMPDIR must have less than 108 characters
    disk.mkdir()
    with small_disk(disk, "64m") if ":" in kind else contextlib.nullcontext(), HubServer() as hub:
        fault = Fault(kind, phase, launch, disk, place, hub, dice)
        if kind in FAILING:
            fault.env |= {"LD_PRELOAD": str(request.getfixturevalue("failing_disk")), "FAILING_DISK": str(disk)}
        fault.begin()
        code = fault.strike(uninterrupted)
        again, newest = fault.start_again(code)
        assert_same_run(again, uninterrupted(*LAUNCHES[launch]))
    start = newest.name if newest else "the beginning"
    print(f"| {kind} | {phase} | {launch} | code {code} | {start} |", flush=True)


@pytest.mark.parametrize(("seed", "kind", "launch"), SEEDS)
def test_after_a_failed_operation_the_same_command_ends_bitwise(
    place, uninterrupted, failing_disk, tmp_path, seed, kind, launch
):
    dice = random.Random(f"{os.environ.get('FAULT_SEED')}, {seed}")
    processes, _ = LAUNCHES[launch]
    rank = dice.randrange(processes)
    error = dice.choice(CODES[kind])
    number = round(MOST[kind][rank] ** dice.random())  # a start does little, and most of what can be lost by it
    operation = f"{kind} {number} {getattr(errno, error)} {dice.choice(['once', 'later'])}"
    name = tmp_path.name
    failed = tmp_path / "failed"
    env = {"LD_PRELOAD": str(failing_disk), "FAILING_DISK": f"{place.folder / name}/", "FAILING_LOG": str(failed)}
    env |= {"FAILING_OPERATION": operation, "FAILING_RANK": str(rank)}
    run = place.start(name, *LAUNCHES[launch], env=env)
    code = run.wait()
    what = failed.read_text().splitlines()[0] if failed.exists() else "none: fewer are done"
    print(f"| {operation} | rank {rank} | {launch} | code {code} | {what} |", flush=True)
    assert run.log.count("Traceback") == (processes > 1 and code != 0), f"not the launcher's alone: {run.log[-6000:]}"
    assert run.log.count("\nerror: ") <= processes, run.log[-6000:]
    remedies = (
        DISK_REMEDIES[getattr(errno, error)],
        "full, failing or read-only, or `ulimit -f` reached",
    )  # torch.save
    assert code == 0 or any(remedy in run.log for remedy in remedies), run.log[-6000:]
    was_done = State.of(read_status(run.folder)).has_model
    again = place.start(name, *LAUNCHES[launch]).finish()
    assert was_done == ("already done" in again.log), again.log[-4000:]
    assert not list(run.folder.rglob(".tmp*")) and not list(run.folder.rglob(".*.partial"))
    assert_same_run(again, uninterrupted(*LAUNCHES[launch]))


def test_a_disk_that_fails_does_not_make_a_lock_stale(failing_disk, tmp_path):
    env = {"LD_PRELOAD": str(failing_disk), "FAILING_DISK": f"{tmp_path}/", "FAILING_LOG": os.devnull}
    env |= {"FAILING_OPERATION": f"read 1 {errno.EIO} later"}
    code = f"from pathlib import Path; from sfm_dpo.run.lock import take_folder; take_folder(Path('{tmp_path}'))"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True)
    assert f"Input/output error: '{tmp_path}/.lock'" in done.stderr, done.stderr


def obey_permissions() -> None:
    """For root between fork and exec: no capability that overrides what files permit (CAP_DAC_*, CAP_FOWNER)."""
    for capability in (1, 2, 3):
        ctypes.CDLL(None).prctl(24, capability)  # PR_CAPBSET_DROP


@pytest.mark.grid
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files to another user")
@pytest.mark.parametrize("umask", sampled([0o002, 0o022, 0o077], 2), ids=oct)
def test_what_another_user_left_in_hf_home_is_used_or_refused_in_one_line(place, uninterrupted, tmp_path, umask):
    """Of two users of a group that shares the folder the first writes with this umask."""
    home = tmp_path / "hf"
    home.mkdir()
    os.chown(home, -1, GROUP)
    home.chmod(0o2775)
    here = Place(place.folder, place.model, home)
    here.start(f"first-{umask:o}", popen={"umask": umask}).finish()
    for path in (home, *home.rglob("*")):
        os.chown(path, GROUP, -1)
    user = {"umask": 0o002, "extra_groups": [GROUP], "preexec_fn": obey_permissions}
    second = here.start(f"second-{umask:o}", popen=user)
    code = second.wait()
    print(f"umask {umask:o}: code {code}", second.log[-300:] if code else "", flush=True)
    if code and umask != 0o002:
        assert f"HF_HOME: {home}" in error_line(second.log)
    else:
        assert_same_run(second, uninterrupted(1))


def test_damaged_and_half_written_checkpoints_are_named_and_skipped(place, uninterrupted):
    """A flipped bit in what rank 1 wrote and rank 0 never reads, a file that is cut short, and a missing mark."""
    folder = Path(shutil.copytree(uninterrupted(2).folder, place.folder / "damaged"))
    write_killed(folder, 8)
    name = "global_step8/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    flip(folder / "checkpoint-8" / name, 12)
    os.truncate(folder / "checkpoint-6" / "model.safetensors", 1000)
    (folder / "checkpoint-4" / "complete.json").unlink()
    again = place.start(folder.name, 2).finish()
    assert f"{folder}/checkpoint-8 has a damaged {name} (its checksum differs); skipped" in again.log
    assert f"{folder}/checkpoint-6 has a damaged model.safetensors (1,000 bytes of" in again.log
    assert f"{folder}/checkpoint-4 was not fully written; skipped" in again.log
    assert f"{folder}/checkpoint-2: checksums verified" in again.log
    assert f"resuming from {folder}/checkpoint-2" in again.log
    assert_same_run(again, uninterrupted(2))


def flip(path: Path, position: int) -> None:
    """Changes one bit of a file, not its size."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


class Fault:
    """A run that meets a fault. What `kind` names is on `disk`, all else that the run writes beside it."""

    def __init__(self, kind, phase, launch, disk: Path, place: Place, hub: HubServer, dice: random.Random):
        self.kind = kind
        self.phase = phase
        self.processes, self.launch = LAUNCHES[launch]
        self.disk = disk
        self.hub = hub
        self.dice = dice
        beside = disk.with_name("beside")
        self.place = Place(place.folder, place.model, (disk if "HF_HOME" in kind else beside) / "hf")
        self.fields = {"output_dir": (disk if "output_dir" in kind else beside) / "run"}
        self.env = {"TMPDIR": str(disk)} if "TMPDIR" in kind else {}
        if phase == "rotation":
            self.fields |= {"save_total_limit": 2, "guard": "skip"}  # which would keep the first one
        elif phase == "evaluation":
            self.fields |= {"eval_datasets": f'{{"held": "{place.folder}/pairs.jsonl"}}'}
            self.fields |= {"eval_strategy": "steps", "eval_steps": 2}
        elif phase == "push":
            self.env |= {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
            self.fields |= {"push_to_hub": "true", "hub_model_id": "lab/model"}

    def begin(self) -> None:
        self.run = self.start()
        victim = 0 if self.phase == "push" else self.dice.randrange(self.processes)  # only rank 0 pushes
        self.rank = self.run.ranks(self.processes)[victim]  # now: looking takes longer than saving

    def start(self, name: str = "", **fields) -> Run:
        name = f"{self.disk.parent.name}{name}"
        return self.place.start(name, self.processes, self.launch, env=dict(self.env), **self.fields | fields)

    def wait_for_moment(self) -> None:
        """Waits for a random moment of the phase."""
        run = self.run
        wanted = self.dice.randrange(1, 5)
        seen: set[Path] = set()

        def is_saving() -> bool:
            half_written = {c for c in checkpoints(run.folder) if not (c / "complete.json").exists()}
            seen.update(half_written)
            return len(seen) >= min(wanted, 2) and bool(half_written)

        first = run.folder / "checkpoint-2"
        if self.phase == "rotation":  # makes the deletion of it take some milliseconds
            ballast = run.folder.with_name("ballast")
            ballast.mkdir(parents=True)
            for number in range(3000):
                (ballast / str(number)).touch()
            run.until((first / "complete.json").exists)
            ballast.rename(first / ballast.name)
        has_begun = {
            "tokenisation": (run.folder / ".lock").exists,
            "reference pass": lambda: len(shards(self.place)) >= 3 * wanted,
            "preflight": lambda: "the largest micro-batch has" in run.log,
            "step": lambda: f"step {2 * wanted - 1}/" in run.log,
            "saving": is_saving,
            "rotation": lambda: not (first / "complete.json").exists(),
            "evaluation": lambda: f"step {2 * wanted}/" in run.log,
            "final save": (run.folder / "config.json").exists,
            "report": lambda: run.status.get("state") == "done",
            "push": lambda: self.hub.count("preupload") > 0,
        }
        assert run.until(has_begun[self.phase], every=0.0005), run.log[-3000:]
        time.sleep(self.dice.random() * PHASES[self.phase])

    def strike(self, uninterrupted) -> int:
        """Waits for the moment, then does what `kind` says; returns the exit code of the run."""
        self.wait_for_moment()
        with contextlib.suppress(psutil.NoSuchProcess):  # it was over before
            if "kill" in self.kind or self.kind in AFTER_A_KILL:
                self.rank.kill()
            elif self.kind in ("SIGINT", "SIGTERM"):
                self.rank.send_signal(signal.Signals[self.kind])
            elif self.kind == "SIGSTOP":
                self.rank.suspend()
                time.sleep(3 + 4 * self.dice.random())
                self.rank.resume()
            elif self.kind.startswith("two"):
                self.rank.suspend()  # or the first run would be over before the second has read its packages
                self.start_second(uninterrupted)
        if ":" in self.kind:
            self.spoil_disk()
        code = self.run.wait()
        log = self.run.log
        assert code == 0 or self.kind != "SIGSTOP", log[-3000:]
        assert code == 0 or ":" not in self.kind or "\nerror: " in log, log[-3000:]
        if "read-only" in self.kind:
            subprocess.run(["umount", self.disk], check=True)
        if self.processes == 1 and "kill" not in self.kind:
            assert "Traceback" not in log and log.count("\nerror: ") == (code in (1, 2)), log[-3000:]
        return code

    def start_second(self, uninterrupted) -> None:
        """A second run, while the first is stopped, which then resumes, or is killed where they share a cache."""
        if self.kind == "two starts":
            second = self.start("-second")
            assert second.wait() == (1 if self.processes > 1 else 2) and ": locked by " in second.log, second.log
            self.rank.resume()
            return
        second = self.start("-second", output_dir=self.disk / "second")
        assert second.until(lambda: ", waiting for process" in second.log), second.log
        self.run.kill()  # the second one takes over the lease
        assert_same_run(second.finish(), uninterrupted(self.processes, self.launch))

    def start_again(self, code: int) -> tuple[Run, Path | None]:
        """The run that the same command makes, and the checkpoint that it resumed from."""
        if "twice" in self.kind:
            self.begin()
            self.run.until(lambda: "the largest micro-batch has" in self.run.log)
            time.sleep(self.dice.random())
            with contextlib.suppress(psutil.NoSuchProcess):
                self.run.kill()
        run = self.run
        for fault in ("others", "errno"):
            (self.disk / fault).unlink(missing_ok=True)
        newest = newest_checkpoint(run.folder)
        if self.kind in AFTER_A_KILL:
            self.damage()
        written = shards(self.place)
        expected = [f"resuming from {newest}"] if newest else []
        expected += [
            f"{c} {why_incomplete(c)}; skipped" for c in checkpoints(run.folder) if step_of(c) > step_of(newest)
        ]
        if run.status["state"] in ("done", "push_failed"):
            expected = ["already done"]
        again = self.start().finish()
        if self.kind == "kill -9":
            assert code or self.phase == "report"  # rank 1 may be over by then
            assert all(line in again.log for line in expected), expected
            assert written.items() <= shards(self.place).items(), "a shard was computed twice"
        assert (again.folder / "report.html").is_file() and (again.folder / "README.md").is_file()
        assert self.phase != "push" or self.hub.repos["lab/model"].files("main")["model.safetensors"]
        return again, newest

    def damage(self) -> None:
        """Changes one file of the checkpoints or the reference cache, or the times of all."""
        files = sorted(path for folder in checkpoints(self.run.folder) for path in folder.rglob("*") if path.is_file())
        files += shards(self.place)
        path = self.dice.choice(files)
        if self.kind == "removed file":
            path.unlink()
        elif self.kind == "flipped byte":
            flip(path, self.dice.randrange(path.stat().st_size))
        else:  # whatever was written was written in an hour from now
            later = time.time() + 3600
            for path in (*files, *self.run.folder.iterdir()):
                os.utime(path, (later, later))

    def spoil_disk(self) -> None:
        """Fills the disk or makes it read-only while the rank is stopped, so that its next write meets the fault."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.rank.suspend()
        if "full" in self.kind:
            self.fill_disk()
        elif self.kind in FAILING:
            (self.disk / "errno").write_text(str(getattr(errno, self.kind.partition(":")[0])))
        else:  # a mount above it, because a lease is open for writing, and a remount would be refused
            subprocess.run(["mount", "-o", "bind,ro", self.disk, self.disk], check=True)
        with contextlib.suppress(psutil.NoSuchProcess):
            self.rank.resume()

    def fill_disk(self) -> None:
        """Somebody else's data, up to the last page."""
        with (self.disk / "others").open("wb", buffering=0) as file:
            for size in (2**20, 4096):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(b"x" * size)
