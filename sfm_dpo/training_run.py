"""A run owns its folder while it is alive. However it ends, it logs one line (or a crash's traceback) and writes
status.json."""

import errno
import logging
import os
import shutil
import signal
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from sfm_dpo.common.distributed import LAUNCHES, is_main_process, launch_name, on_main_process
from sfm_dpo.common.errors import (
    DISK_REMEDIES,
    DiskFull,
    GuardStopped,
    Interrupted,
    PeerLost,
    PreflightDone,
    PreflightRefused,
    RunEnd,
    StopRequested,
    UserError,
)
from sfm_dpo.common.files import write_atomically, write_json
from sfm_dpo.common.secrets import mask
from sfm_dpo.config.checks import check_length_of_run
from sfm_dpo.config.fields import Config
from sfm_dpo.data.pairs import Pairs
from sfm_dpo.data.sampler import order_pairs
from sfm_dpo.data.tokenization import hash_tokens
from sfm_dpo.evaluation.eval_command import EvalCommand
from sfm_dpo.hub.upload import push_finished
from sfm_dpo.report.model_card import write_model_card
from sfm_dpo.report.page import format_summary, write_report
from sfm_dpo.run.checkpoint import (
    clear_stop,
    mark_complete,
    newest_checkpoint,
    remove_unlisted,
    rotate_run,
    step_of,
    stop_is_for_good,
)
from sfm_dpo.run.facts import RunFacts
from sfm_dpo.run.folder import (
    DATA,
    ERROR,
    EVALUATED,
    HEALTH,
    PUSHED,
    REPORTED,
    RESOLVED_CONFIG,
    STATUS,
    State,
    describe,
    describe_end,
    has_failed,
    make_folder,
    message_of_rank,
    read_file,
    read_status,
    write_end,
    write_status,
)
from sfm_dpo.run.lock import Lease, take_folder
from sfm_dpo.run.model_files import list_files
from sfm_dpo.run.saved_model import find_model
from sfm_dpo.run.start import Before, Start, choose_start, list_open
from sfm_dpo.train.callbacks import Progress, explain_out_of_memory
from sfm_dpo.train.trainer import SFMDPOTrainer
from sfm_dpo.train.watchdog import Watchdog

log = logging.getLogger(__name__)

# In errors of gloo and NCCL
PEER_LOST_SIGNS = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
UNWRITABLE = DISK_REMEDIES.keys() - {errno.EPERM}  # not only of files
# Signs of these in exceptions of torch.save, which does not say why, and of safetensors; and the remedies
OF_TORCH = dict.fromkeys(("unexpected pos", "iostream error"), "free space, or check its disk or file server")
UNWRITABLE_SIGNS = OF_TORCH | {os.strerror(number): DISK_REMEDIES[number] for number in UNWRITABLE}


def first_facts(config: Config, pairs: Pairs, before: Before) -> RunFacts:
    """What identifies a run on these tokenised pairs, before its model is loaded. All ranks must call it. Raises
    UserError if the checkpoint that it resumes from is another run's, or nothing would be trained."""
    args = config.train
    sampler = order_pairs(pairs.train, args)
    launch = launch_name()
    facts = RunFacts(
        models=config.model_ids,
        world_size=args.world_size,
        launch="whole weights" if launch == "none" else LAUNCHES.get(launch, launch),
        counts=pairs.as_dict(),
        train_tokens=hash_tokens(pairs.train),
        template_date=pairs.template_date,
        order=[sampler.fingerprint(epoch) for epoch in range(sampler.epochs)],
    )
    before.check(facts)
    check_length_of_run(args, len(pairs.train))
    steps = args.count_steps(len(pairs.train))
    of_another_run = before.checkpoint and before.checkpoint.parent != Path(args.output_dir)
    if of_another_run and step_of(before.checkpoint) >= steps:
        what = f"resume_from_checkpoint {before.checkpoint}: nothing would be trained in {steps} step(s)"
        raise UserError(f"{what}; raise num_train_epochs or max_steps")
    if left_out := len(pairs.train) % args.global_batch_size:
        log.info(f"{left_out} pairs of an epoch do not fill a last batch of {args.global_batch_size} and are left out")
    return facts


class TrainingRun:
    """A run and its folder, which it owns until it ends; status.json and the report then say how it ended."""

    is_alive = False

    def __init__(self) -> None:
        self.output_dir: Path | None = None
        self.folder: Path | None = None  # output_dir, while this run may write its end into it
        self.has_made_folder = False  # and owns it
        self.facts: RunFacts | None = None
        self.step = 0  # at which this start begins
        self.progress = Progress()
        self.watchdog: Watchdog | None = None
        self.lease: Lease | None = None
        self.exit_code = 0  # of the process
        self.is_training = True  # not only a preflight, which has logged its result
        self.handlers: dict[int, Any] = {}  # of the caller, by signal; empty in a thread, which may not change them

    def __enter__(self) -> Self:
        TrainingRun.is_alive = True
        if threading.current_thread() is threading.main_thread():
            present = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            self.handlers = {number: handler for number, handler in present.items() if handler is not None}
        # Under a launcher, runs are stopped by the file STOP
        if "LOCAL_RANK" not in os.environ and self.handlers.get(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, raise_interrupt)
        return self

    def begin(self, config: Config) -> Start:
        """Takes the folder, and returns what this start does. Raises UserError if another run owns it."""
        folder = self.output_dir = Path(config.train.output_dir)

        def lock() -> None:
            is_new = not folder.exists()
            self.lease = take_folder(make_folder(folder))
            self.has_made_folder = is_new

        on_main_process(lock)
        start = choose_start(config)
        on_main_process(lambda: remove_unlisted(folder))
        if not start.trains:
            on_main_process(lambda: find_model(folder))  # raises UserError if it is damaged
            rest = f"; still to do: {', '.join(start.steps)}" if start.steps else ""
            log.info(f"{folder}: already done; to run again, remove it or choose another output_dir{rest}")
            return start
        self.folder = folder
        self.is_training = not config.train.preflight_only
        self.step = step_of(start.before.checkpoint)
        on_main_process(lambda: (folder / ERROR).unlink(missing_ok=True))
        if not (folder / RESOLVED_CONFIG).is_file():  # without it, the folder is empty until the data are read
            write_status(folder, State.RUNNING, message="loading")
        self.watchdog = Watchdog(folder, config.train.hang_timeout, config.train.ddp_timeout, self.progress)
        return start

    def record(self, facts: RunFacts, config: Config | None = None, pairs: Pairs | None = None) -> None:
        """Writes data.json; the first time, with `config` and `pairs`, also the folder's other files of a start."""
        self.facts = facts
        if not is_main_process():
            return
        assert self.folder
        if config and pairs:
            describe(config, self.step)
            pairs.write_dropped(self.folder / "dropped.jsonl")
            sampler = order_pairs(pairs.train, config.train)
            steps = (rows for epoch in range(sampler.epochs) for rows in sampler.steps(epoch))
            pairs.write_steps(self.folder / "steps.jsonl", steps)
            write_status(self.folder, State.RUNNING, step=self.step)
        write_json(self.folder / DATA, facts.as_dict())

    def end_training(self, trainer: SFMDPOTrainer) -> list[str]:
        """Marks a run as trained and saved, whatever happens next; returns the steps of its end that are left."""
        assert self.folder and self.watchdog
        self.watchdog.stop()
        steps = list_open(trainer.config.train, {}, ())
        mark_complete(self.folder, {"step": trainer.state.global_step, "open": steps}, list_files(self.folder))
        if is_main_process():
            rotate_run(trainer.config.train)  # what could not be deleted before
            write_end(self.folder, steps, step=trainer.state.global_step)
        self.folder = None  # later errors no longer change its state
        trainer.end()
        return steps

    def close_steps(self, config: Config, steps: list[str], evaluations: EvalCommand) -> None:
        """Does these steps of the end of a run on rank 0; what is done is no longer `open` in status.json."""
        if not is_main_process():
            return
        folder = Path(config.train.output_dir)
        actions = {
            PUSHED: lambda: push_finished(config.train),
            REPORTED: lambda: report(folder),
            EVALUATED: evaluations.wait,
        }
        if steps:
            still = list(steps)
            write_end(folder, still)
            for step in steps:
                if actions[step]():
                    still.remove(step)
                    write_end(folder, still)
            self.exit_code = describe_end(still)["exit_code"]
            if read_status(folder)["open"] != still:
                log.error(f"{folder}: {STATUS} cannot be written; make it writable, and run the same command again")
        clear_stop(folder)  # a request to stop came too late

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        """Logs every end in one line, except a crash, for which Python prints the traceback."""
        if isinstance(error, KeyboardInterrupt):
            for number in self.handlers:
                signal.signal(number, signal.SIG_IGN)  # a second interrupt must not cut this short
        end = self._explain(error) if error else None
        # A start that is refused before it has data leaves nothing, unless a batch script or error.txt says why
        is_plain = isinstance(error, UserError) and end is error and not error.__cause__
        is_void = is_plain and self.has_made_folder and not self.facts and "LOCAL_RANK" not in os.environ
        if is_void:
            self.folder = None
        try:
            if end:
                self._close(end)
            if error:
                self._record_error(error, end)
        except OSError as later:  # the folder cannot even be read; another end has been logged before
            if isinstance(end, StopRequested):
                log.error(str(self._explain(later) or later))
        finally:
            self._release(is_void)
        return end is not None

    def _record_error(self, error: BaseException, end: RunEnd | None) -> None:
        """Writes the traceback that an end's one line hides into ERROR, and a crash into status.json and report."""
        folder = self.folder
        if folder is None or not folder.is_dir():
            return
        if end:
            is_translated = end is not error or end.__cause__  # its line does not say where it happened
            if is_translated and has_failed(folder):
                with suppress(OSError):  # the disk may be full
                    write_atomically(folder / ERROR, mask("".join(traceback.format_exception(error))))
        elif not has_failed(folder):
            if message := message_of_rank(folder, "".join(traceback.format_exception_only(error)).strip()):
                write_status(folder, State.FAILED, 1, message, any_rank=True)
            report(folder)

    def _release(self, is_void: bool) -> None:
        """Gives back what this process has taken while the run was alive; removes the folder of a void start."""
        TrainingRun.is_alive = False
        if self.watchdog:
            self.watchdog.stop()
        if is_void and self.output_dir:
            shutil.rmtree(self.output_dir, ignore_errors=True)
        if self.lease:
            self.lease.release()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _explain(self, error: BaseException) -> RunEnd | None:
        """The end that an exception means; None for a crash."""
        cause = error.__cause__ if isinstance(error, RunEnd) else error  # of user_input, or what it has wrapped
        smaller = self.facts.calibration.smaller if self.facts else None
        if cause and self.folder and (memory := explain_out_of_memory(cause, self.progress, smaller)):
            return memory
        if isinstance(cause, RuntimeError) and any(sign in str(cause) for sign in PEER_LOST_SIGNS):
            return PeerLost(f"another rank has ended: {str(cause).splitlines()[0]}")
        if isinstance(error, RunEnd):
            return error
        if self.output_dir and not self.output_dir.is_dir():
            return DiskFull(f"output_dir {self.output_dir}: was removed or moved during the run; start it again")
        if self.output_dir and isinstance(error, OSError) and error.errno in UNWRITABLE:
            where = error.filename or self.output_dir
            remedy = DISK_REMEDIES[error.errno]
            return DiskFull(f"{where}: {error.strerror}; {remedy}, and run the same command again to resume")
        if self.folder is None:
            return None
        if isinstance(error, KeyboardInterrupt):
            return Interrupted(f"interrupted at step {self.progress.step}")
        if self.progress.saving and (found := [sign for sign in UNWRITABLE_SIGNS if sign in str(error)]):
            sign = found[-1]
            reason = "disk full, failing or read-only, or `ulimit -f` reached" if sign in OF_TORCH else sign
            what = f"{self.progress.saving}: {reason}; {UNWRITABLE_SIGNS[sign]}"
            return DiskFull(f"{what}, and run the same command again to resume")
        return None

    def _close(self, end: RunEnd) -> None:
        self.exit_code = end.exit_code
        is_stop = isinstance(end, StopRequested)
        message = str(end) if is_stop else message_of_rank(self.folder, str(end), not isinstance(end, PeerLost))
        status = end.status
        if is_stop:
            assert self.folder
            checkpoint = newest_checkpoint(self.folder)
            status = {"step": step_of(checkpoint), "checkpoint": checkpoint and str(checkpoint)} | status
            status["for_good"] = stop_is_for_good(self.folder)
            clear_stop(self.folder)
            then = "; no checkpoint was saved; the same command starts again"
            if checkpoint:
                then = f"; run the same command again to resume from {checkpoint}"
            log.info(f"{end}{'' if isinstance(end, PreflightDone) else then}")
            if "TORCHELASTIC_RUN_ID" in os.environ:
                self.exit_code = 0  # a launcher would report 75 as a crash; status.json has the state
        elif message:
            log.error(message)
        if end.state == State.COLLAPSED and self.folder and is_main_process():
            found = {"verdict": "collapsed", "stopped": True, "last_healthy": status["checkpoint"]}
            with suppress(OSError):  # the disk may be full; status.json matters more
                health = read_file(self.folder / HEALTH)
                write_json(self.folder / HEALTH, health if health.get("stopped") else health | found)
        if self.folder and message:
            write_status(self.folder, State(end.state), end.exit_code, message, any_rank=not is_stop, **status)
            if self.lease:
                self.lease.release()  # before the report: a launcher ends this rank soon after another rank's exit
            if not isinstance(end, Interrupted):
                report(self.folder, self.is_training)
        is_shared = isinstance(end, StopRequested | GuardStopped | PreflightRefused)  # by all ranks
        if is_shared and not isinstance(end, Interrupted) and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # NCCL warns of one that is left


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    """The handler of SIGTERM while a run without a launcher is alive."""
    raise KeyboardInterrupt


def _prepare_child() -> None:
    """For a process of a pool, such as that of datasets.map: a pool ends its processes by SIGTERM, but nothing ends
    them if this process is killed."""
    if signal.getsignal(signal.SIGTERM) is raise_interrupt:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if TrainingRun.is_alive:
        threading.Thread(target=_end_after, args=[os.getppid()], daemon=True).start()


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


os.register_at_fork(after_in_child=_prepare_child)


def report(run: Path, with_summary: bool = True) -> bool:
    """Writes report.html and a trained run's model card, and logs the summary; also for a run that failed. An error in
    it is one line, and changes nothing in how the run ends. Returns whether both are written."""
    if not (is_main_process() and (run / RESOLVED_CONFIG).is_file()):
        return False
    try:
        write_report(run)
        if State.of(read_status(run)).has_model:
            write_model_card(run)
        if with_summary:
            log.info(f"result\n{format_summary(run)}")
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        log.info(f"report not written: {reason}")
        return False
    return True
