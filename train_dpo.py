#!/usr/bin/env python
"""Trains a language model with DPO, from a recipe to a documented model.

CPU, one process:   python train_dpo.py --config recipes/demo.yaml
4 GPUs, ZeRO-2:     accelerate launch --config_file accelerate_config.yaml train_dpo.py --config recipes/think.yaml
Slurm:              sbatch scripts/dpo_train.sh --learning_rate 5e-7

Any field of TRL's DPOConfig, of its ModelConfig and of sfm_dpo/config.py can be given in the recipe and overridden
after it. Exit codes: 0 done, 1 crashed, 2 wrong configuration or data, 3 refused by the preflight, 4 stopped by the
guard (docs/health.md), 5 trained and saved but not pushed to the Hub (docs/hub.md), 70 no progress
(docs/slurm.md), 75 stopped on request.
"""

import sfm_dpo

sfm_dpo.setup()

import errno
import logging
import os
import sys
import traceback
from pathlib import Path

from transformers import PreTrainedTokenizerBase, PrinterCallback, ProgressCallback
from trl import get_peft_config, get_quantization_config

from sfm_dpo.common.distributed import is_main_process, main_process_first
from sfm_dpo.common.errors import DiskFull, PreflightDone, RunEnd, StopRequested
from sfm_dpo.common.leases import Lease
from sfm_dpo.common.secrets import mask_traceback
from sfm_dpo.config import Config, parse_config
from sfm_dpo.data.preferences import Pairs
from sfm_dpo.data.tokenization import load_token_pairs, load_tokenizer
from sfm_dpo.health.guard import add_guard
from sfm_dpo.health.guard_rules import COLLAPSE_STEPS
from sfm_dpo.health.preflight import check_vocabulary, preflight_phase
from sfm_dpo.hub.callback import PushCheckpoints
from sfm_dpo.hub.publish import check_push, push_finished
from sfm_dpo.model.loading import load_model_config, model_init_kwargs
from sfm_dpo.model.sharding import checkpoint_bytes, disable_deepspeed_shm
from sfm_dpo.report.model_card import write_model_card
from sfm_dpo.report.page import format_summary, write_report
from sfm_dpo.run.checkpoint import (
    check_best,
    check_disk,
    check_resume,
    clear_stop,
    copy_best,
    find_start,
    newest_checkpoint,
    peak_checkpoint_count,
    read_best,
    step_of,
)
from sfm_dpo.run.folder import (
    DATA,
    RESOLVED_CONFIG,
    acquire,
    add_data_facts,
    describe,
    has_failed,
    message_of_rank,
    read_mapping,
    write_status,
)
from sfm_dpo.run.reader import eval_prefix
from sfm_dpo.train.fit_memory import fit_memory
from sfm_dpo.train.memory_use import explain_out_of_memory
from sfm_dpo.train.position import Position
from sfm_dpo.train.profiler import add_profiler
from sfm_dpo.train.progress import ProgressLine, describe_best
from sfm_dpo.train.reference_cache import hash_tokens, make_folder
from sfm_dpo.train.stop import StopCallback
from sfm_dpo.train.trainer import SFMDPOTrainer, build_sampler
from sfm_dpo.train.watchdog import Watchdog

log = logging.getLogger("sfm_dpo")

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


def main(argv: list[str]) -> int:
    """Runs and returns the exit code; every end but a kill is written to status.json."""
    run: Path | None = None  # once the folder is this run's to write into
    position = Position()
    watchdog = lease = None
    try:
        disable_deepspeed_shm()  # before parse_config, where transformers makes the process group
        config = parse_config(argv)
        pushes = config.train.push_to_hub
        lease = main_process_first(lambda: acquire(config))
        if lease is None:
            log.info(f"{config.train.output_dir}: already done; to run again remove it or choose another output_dir")
            return push(config) if pushes else 0
        run = Path(config.train.output_dir)
        watchdog = Watchdog(run, config.train.hang_timeout, position)
        pairs, tokenizer, checkpoint = load(config)
        trainer = build_trainer(config, pairs, tokenizer, checkpoint, position)
        train(config, trainer, checkpoint)
        finish(config, trainer, watchdog)
        return push(config) if pushes else 0
    except RunEnd as end:
        return close(run, end, lease)
    except BaseException as error:
        if run is not None and (memory := explain_out_of_memory(error, position, run)):
            return close(run, memory, lease)
        if run is not None and isinstance(error, OSError) and error.errno in UNWRITABLE:
            where = error.filename or run
            return close(run, DiskFull(f"{where}: {error.strerror}; mend that, and the same command goes on"), lease)
        if run is not None and run.is_dir() and not has_failed(run):
            if message := message_of_rank(run, "".join(traceback.format_exception_only(error)).strip()):
                write_status(run, "failed", 1, message, any_rank=True)
            report(run)
        raise
    finally:
        if watchdog:
            watchdog.stop()
        if lease:
            lease.release()


def load(config: Config) -> tuple[Pairs, PreTrainedTokenizerBase, Path | None]:
    """The tokenised pairs, the tokenizer, and the checkpoint that the run goes on from, or None."""
    args = config.train
    for note in config.notes:
        log.info(note)
    model_config = load_model_config(config)  # first: a wrong path costs a second, not a download
    tokenizer = load_tokenizer(config)
    checkpoint = find_start(args)
    if checkpoint:
        check_resume(checkpoint, {"world_size": args.world_size}, args.ignore_resume_mismatch)
    if args.precompute_ref_log_probs:
        main_process_first(make_folder)  # now, and not when the model has been loaded
    if args.push_to_hub:
        main_process_first(lambda: check_push(args, bool(checkpoint)) if is_main_process() else None)
    pairs = main_process_first(lambda: load_token_pairs(config, tokenizer))
    check_vocabulary(pairs.train, tokenizer, model_config.get_text_config().vocab_size)
    log.info(f"data\n{pairs.table()}")
    if checkpoint:  # before the model is loaded
        check_resume(checkpoint, {"train_tokens": hash_tokens(pairs.train)}, args.ignore_resume_mismatch)
    facts = pairs.as_dict()
    if args.fit_memory:
        kept = read_mapping(Path(args.output_dir) / DATA).get("fit_memory", {}) if checkpoint else {}
        facts["fit_memory"] = fit_memory(config, pairs.train, model_config, kept)
    sampler = build_sampler(pairs.train, args)
    if left_out := len(pairs.train) - len(sampler):
        which = "the last ones" if args.train_sampling_strategy == "sequential" else "another random few each time"
        log.info(f"{left_out} pairs do not fill a last batch of {args.global_batch_size} and are left out: {which}")
    if is_main_process():
        describe(config, facts, step_of(checkpoint))
        pairs.write_dropped(Path(args.output_dir) / "dropped.jsonl")
        write_status(args.output_dir, "running", step=step_of(checkpoint))
    return pairs, tokenizer, checkpoint


def build_trainer(
    config: Config, pairs: Pairs, tokenizer: PreTrainedTokenizerBase, checkpoint: Path | None, position: Position
) -> SFMDPOTrainer:
    """Loads the model; computes the reference log-probs, where they are cached."""
    args = config.train
    pushes, args.push_to_hub = args.push_to_hub, False  # see hub/callback.py for what Trainer would do
    args.eval_on_start = bool(pairs.held_out()) and checkpoint is None  # held-out figures before as well as after
    args.model_init_kwargs = model_init_kwargs(config)
    trainer = SFMDPOTrainer(
        model=config.model.model_name_or_path,
        args=args,
        train_dataset=pairs.train,
        eval_dataset=pairs.held_out() or None,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(config.model),
        peft_config=get_peft_config(config.model),
        position=position,
        callbacks=[ProgressLine(), *([PushCheckpoints(position.advance)] if pushes else [])],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer


def train(config: Config, trainer: SFMDPOTrainer, checkpoint: Path | None) -> None:
    """From the preflight to the last step.

    Raises:
        PreflightRefused, GuardStopped, StopRequested, DiskFull: the run ends here.
    """
    args, run = config.train, config.train.output_dir
    size = checkpoint_bytes(trainer.model, trainer.zero_stage, trainer.is_fsdp_enabled)
    check_disk(run, size, peak_checkpoint_count(args, COLLAPSE_STEPS))
    if warning := trainer.launch_warning():
        log.warning(warning)
    log.info(
        f"training {run}: {len(trainer.train_dataset):,} pairs, global batch {args.global_batch_size} = "
        f"{args.per_device_train_batch_size} x {args.gradient_accumulation_steps} accumulation x {args.world_size} "
        f"process(es), loss {'+'.join(args.loss_type)}, beta {args.beta:g}, lr {args.learning_rate:g}"
    )
    if args.padding_free:
        log.info(f"padding-free, attention by {trainer.attention_kernel()}")
    if trainer.prefix_sharing:
        log.info(trainer.describe_sharing())
    sampler = build_sampler(trainer.train_dataset, args, trainer.prefix_sharing)
    largest = int(sampler.tokens[sampler.largest_micro_batch(sampler.micro_batch)].sum())
    where = "" if args.train_sampling_strategy == "sequential" else ", and comes first: what fits there fits"
    log.info(f"the largest micro-batch has {largest:,} tokens{where}")
    if is_main_process():
        add_data_facts(run, trainer.describe_data())
    if checkpoint:
        check_resume(checkpoint, trainer.resume_facts(), args.ignore_resume_mismatch)
        if args.load_best_model_at_end and (best := read_best(checkpoint)):
            check_best(best, args)
        log.info(f"going on from {checkpoint}")
    else:
        preflight_phase(trainer, config)
    if args.preflight_only:
        raise PreflightDone("preflight_only: nothing was trained")
    stop, guard = StopCallback(), add_guard(trainer)
    trainer.add_callback(stop)
    add_profiler(trainer)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if stop.stopped or (guard and guard.stopped):
        trainer.save_state()
        if guard:
            guard.raise_if_stopped()
        raise StopRequested(f"stopped on request at step {trainer.state.global_step} of {trainer.state.max_steps}")


def finish(config: Config, trainer: SFMDPOTrainer, watchdog: Watchdog) -> None:
    """Evaluates, saves and reports a trained model."""
    run = Path(config.train.output_dir)
    last = [entry for entry in trainer.state.log_history if entry["step"] == trainer.state.global_step]
    if trainer.eval_dataset is not None and not any(map(eval_prefix, last)):
        trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    if config.train.load_best_model_at_end:
        copy_best(trainer.state.best_model_checkpoint, config.train)
    watchdog.stop()
    clear_stop(run)  # it came too late
    write_status(run, "done", 0, step=trainer.state.global_step, **describe_best(config.train, trainer.state))
    report(run)
    if is_main_process():
        write_model_card(run)
    trainer.end()


def push(config: Config) -> int:
    """Pushes a finished run; returns the exit code."""
    code = push_finished(config.train)
    if code:
        report(Path(config.train.output_dir))  # once more, with what became of the push
    return code


def close(run: Path | None, end: RunEnd, lease: Lease | None) -> int:
    """Reports an end that is no crash; returns the exit code."""
    stopped, status = isinstance(end, StopRequested), end.status
    message = str(end) if stopped else message_of_rank(run, str(end))
    if stopped:
        assert run is not None
        clear_stop(run)
        checkpoint = newest_checkpoint(run)
        status = {"step": step_of(checkpoint), "checkpoint": checkpoint and str(checkpoint)} | status
        log.info(f"{end}; the same command goes on from {checkpoint or 'the beginning'}")
    elif message:
        log.error(message)
    if run is not None and message:
        run.mkdir(parents=True, exist_ok=True)
        write_status(run, end.state, end.exit_code, message, any_rank=not stopped, **status)
        if lease:
            lease.release()  # before the report: a launcher ends this rank soon after another one has left
        report(run)
    # A launcher would make a crash of 75: there the ranks leave with 0, and status.json says it
    return 0 if stopped and "TORCHELASTIC_RUN_ID" in os.environ else end.exit_code


def report(run: Path) -> None:
    """report.html and the closing lines; also of a run that failed, once it had begun."""
    if is_main_process() and (run / RESOLVED_CONFIG).is_file():
        try:
            write_report(run)
        except OSError as error:  # a full disk must not make a failure of a trained model
            log.info(f"report not written: {error}; later: python -m sfm_dpo.report.page {run}")
        log.info(format_summary(run))


if __name__ == "__main__":
    sys.excepthook = mask_traceback
    sys.exit(main(sys.argv[1:]))
