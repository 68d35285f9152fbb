#!/usr/bin/env python
"""Trains a language model with DPO, from a recipe to a documented model.

CPU, one process:   python train_dpo.py --config recipes/demo.yaml
4 GPUs, ZeRO-2:     accelerate launch --config_file accelerate_config.yaml train_dpo.py --config recipes/think.yaml
Slurm:              sbatch scripts/dpo_train.sh --learning_rate 5e-7

Any field of TRL's DPOConfig and ModelConfig and of sfm_dpo/config/fields.py can be set in the recipe and on the
command line.
Exit codes: 0 done, 1 crashed, 2 wrong configuration or data, 3 refused by the preflight, 4 stopped by the
guard (docs/health.md), 5 trained and saved but not pushed to the Hub (docs/hub.md), 70 no progress
(docs/slurm.md), 75 stopped on request, 130 interrupted.
"""

import sfm_dpo

sfm_dpo.setup()

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate.utils import release_memory
from transformers import PreTrainedTokenizerBase, PrinterCallback, ProgressCallback, TrainerCallback

from sfm_dpo.common.distributed import (
    disable_deepspeed_shm,
    is_main_process,
    load_only_tensors,
    main_process_first,
    on_main_process,
)
from sfm_dpo.common.errors import PreflightDone, StopRequested
from sfm_dpo.common.files import write_json
from sfm_dpo.config.checks import check_length_of_run
from sfm_dpo.config.fields import Config, parse_config
from sfm_dpo.data.pairs import TokenPairs
from sfm_dpo.data.tokenization import (
    check_positions,
    check_reference,
    check_vocabulary,
    hash_tokens,
    load_token_pairs,
    load_tokenizer,
)
from sfm_dpo.evaluation.eval_command import EvalCommand
from sfm_dpo.fit.calibration import Calibration, calibrate
from sfm_dpo.health.guard import add_guard
from sfm_dpo.health.preflight import preflight_phase
from sfm_dpo.hub.callback import PushCheckpoints
from sfm_dpo.hub.upload import check_push
from sfm_dpo.model.loading import identify_models, load_model_config, meta_adapter, meta_model
from sfm_dpo.model.sharding import checkpoint_bytes, fit_buckets
from sfm_dpo.run.checkpoint import check_disk, peak_checkpoint_count, step_of
from sfm_dpo.run.folder import DATA, State, describe, read_file, write_status
from sfm_dpo.run.reader import eval_prefix
from sfm_dpo.run.start import Origin
from sfm_dpo.train.callbacks import Profiler, Progress, ProgressLine, StopCallback
from sfm_dpo.train.fit_memory import MemoryPlan
from sfm_dpo.train.frozen_model import frozen_model
from sfm_dpo.train.reference_cache import add_reference, make_cache_folder, reference_root
from sfm_dpo.train.settings import Settings, decide_settings
from sfm_dpo.train.trainer import SFMDPOTrainer, build_sampler
from sfm_dpo.training_run import Run

log = logging.getLogger("sfm_dpo")


def main(
    argv: list[str], trainer_class: type[SFMDPOTrainer] = SFMDPOTrainer, callbacks: Sequence[TrainerCallback] = ()
) -> int:
    """Runs and returns the exit code; however the run ends, unless it is killed, status.json says so.

    `trainer_class` (for another loss) and `callbacks` are for own scripts (docs/extending.md).
    """
    disable_deepspeed_shm()  # before parse_config, in which Transformers makes the process group
    load_only_tensors()
    with Run() as run:
        config = parse_config(argv)
        start = run.begin(config)
        steps = start.open
        evaluations = EvalCommand(config.train)
        pushes = PushCheckpoints(config.train)
        if start.trains:
            origin = start.origin
            config = identify_models(config, origin.known, origin.config)
            pairs, tokenizer, settings, plan = load(config, origin)
            build = functools.partial(build_trainer, config, pairs, tokenizer, run.progress, trainer_class)
            trainer = build_calibrated(build, settings, plan, origin)
            for callback in (pushes, evaluations, *callbacks):
                trainer.add_callback(callback)
            add_reference(trainer)
            check(config, trainer, origin)
            train(config, trainer, origin.checkpoint)
            finish(trainer)
            steps = run.finish(trainer)
        run.close_steps(config, steps, evaluations)
        pushes.finish()
    return run.exit_code


def load(config: Config, origin: Origin) -> tuple[TokenPairs, PreTrainedTokenizerBase, Settings, MemoryPlan | None]:
    """The tokenised pairs, the tokenizer, and the settings of a run that may resume from `origin`."""
    args = config.train
    log.info(config.tracking)
    model_config = load_model_config(config)
    if args.deepspeed_plugin:
        trained = meta_adapter(config, model_config) or meta_model(model_config)
        deepspeed = args.deepspeed_plugin.deepspeed_config
        deepspeed["zero_optimization"] = fit_buckets(deepspeed["zero_optimization"], trained)
    tokenizer = load_tokenizer(config)
    if args.ref_model_name_or_path:
        check_reference(config, tokenizer)
    origin.check(config.model_ids)
    if args.precompute_ref_log_probs:  # fails now, not after the model has been loaded
        main_process_first(lambda: make_cache_folder(reference_root()))
    if args.push_to_hub:
        on_main_process(lambda: check_push(config, bool(origin.checkpoint)))
    pairs = main_process_first(lambda: load_token_pairs(config, tokenizer))
    for tokens in pairs.splits.values():
        check_vocabulary(tokens, tokenizer, model_config.get_text_config().vocab_size)
        for part in config.parts:
            check_positions(tokens, load_model_config(part).get_text_config(), args)
    log.info(f"data\n{pairs.table()}")
    if origin.checkpoint:  # before the model is loaded
        origin.check({"train_tokens": hash_tokens(pairs.train)})
    eval_on_start = bool(pairs.held_out()) and not origin.checkpoint  # held-out metrics before as well as after
    before = origin.data.get("settings", {})
    settings, plan = decide_settings(config, pairs.train, model_config, before, eval_on_start)
    sampler = build_sampler(pairs.train, args, settings)
    check_length_of_run(args, len(pairs.train))
    if left_out := len(pairs.train) - len(sampler):
        log.info(f"{left_out} pairs of an epoch do not fill a last batch of {args.global_batch_size} and are left out")
    if is_main_process():
        step = step_of(origin.checkpoint)
        decided = {"settings": asdict(settings), "calibration": origin.data.get("calibration", {})}
        describe(config, pairs.as_dict() | decided, step)
        pairs.write_dropped(Path(args.output_dir) / "dropped.jsonl")
        write_status(args.output_dir, State.RUNNING, step=step)
    return pairs, tokenizer, settings, plan


def build_trainer(
    config: Config,
    pairs: TokenPairs,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
    trainer_class: type[SFMDPOTrainer],
    settings: Settings,
) -> SFMDPOTrainer:
    """Loads the model, and packs it where that is possible."""
    trainer = trainer_class(
        config,
        settings,
        train_dataset=pairs.train,
        eval_dataset=pairs.held_out() or None,
        processing_class=tokenizer,
        progress=progress,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer


def build_calibrated(
    build: Callable[[Settings], SFMDPOTrainer], settings: Settings, plan: MemoryPlan | None, origin: Origin
) -> SFMDPOTrainer:
    """The trainer with the settings that calibration has found; a resumed run keeps its own."""
    trainer: Any = build(settings)
    if origin.checkpoint:
        trainer.adopt(Calibration(**origin.data.get("calibration", {})), settings)
        return trainer
    calibration, found = calibrate(trainer, None if trainer.args.preflight_only else plan)
    if is_main_process():
        data = Path(trainer.args.output_dir) / DATA
        facts = {"settings": asdict(found), "calibration": asdict(calibration)}
        write_json(data, read_file(data) | facts)
    if found.memory != settings.memory:
        log.info("the model is loaded again, for the settings that calibration has found")
        trainer.discard()
        trainer = None
        release_memory()
        trainer = build(found)
    trainer.adopt(calibration, found)
    return trainer


def check(config: Config, trainer: SFMDPOTrainer, origin: Origin) -> None:
    """Logs what will be trained and how, and checks disk space, the checkpoint to resume from, and the preflight."""
    args = config.train
    if not args.preflight_only:  # it writes no checkpoint
        size = checkpoint_bytes(trainer.model, trainer.zero_stage, trainer.is_fsdp_enabled)
        check_disk(args.output_dir, size, peak_checkpoint_count(args))
    settings = trainer.settings
    batch = f"{settings.micro_batch} x {settings.accumulation_steps} accumulation x {args.world_size} process(es)"
    what = "checking" if args.preflight_only else f"training {args.output_dir}"
    log.info(
        f"{what}: {len(trainer.train_dataset):,} pairs, global batch {args.global_batch_size} = "
        f"{batch}, loss {'+'.join(args.loss_type)}, beta {args.beta:g}, lr {args.learning_rate:g}"
    )
    if trainer.packed:
        log.info(f"padding-free, attention by {trainer.attention_kernel()}")
    sampler = trainer.train_sampler
    largest = sampler.layout.count(sampler.largest_micro_batch(sampler.micro_batch))
    log.info(f"the largest micro-batch has {largest:,} tokens")
    if is_main_process():
        data = Path(args.output_dir) / DATA
        write_json(data, read_file(data) | trainer.describe_data())
    if origin.checkpoint:
        origin.check(trainer.resume_facts())
        log.info(f"resuming from {origin.checkpoint}")
    elif args.preflight != "skip":
        with frozen_model(trainer, "policy") as policy:
            preflight_phase(trainer, policy, config)
    if args.preflight_only:
        raise PreflightDone("preflight_only: nothing was trained")


def train(config: Config, trainer: SFMDPOTrainer, checkpoint: Path | None) -> None:
    """Trains to the last step; raises GuardStopped or StopRequested if the guard or a request stops the run."""
    stop = StopCallback()
    guard = add_guard(trainer)
    trainer.add_callback(stop)
    trainer.add_callback(ProgressLine())  # after the guard, which adds metrics to the log entry
    if config.train.profile_steps:
        trainer.add_callback(Profiler(*config.train.profile_steps))
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if stop.stopped or (guard and guard.stopped):
        trainer.save_state()
        if guard:
            guard.raise_if_stopped()
        raise StopRequested(f"stopped on request at step {trainer.state.global_step} of {trainer.state.max_steps}")


def finish(trainer: SFMDPOTrainer) -> None:
    last = [entry for entry in trainer.state.log_history if entry["step"] == trainer.state.global_step]
    if trainer.eval_dataset is not None and not any(map(eval_prefix, last)):
        trainer.evaluate()
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
