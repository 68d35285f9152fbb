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

sfm_dpo.setup(by_ranks=True)

import faulthandler
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace

from transformers import TrainerCallback

from sfm_dpo.calibration.choose_micro_batch import calibrate
from sfm_dpo.common.distributed import disable_deepspeed_shm, load_only_tensors, main_process_first, on_main_process
from sfm_dpo.common.errors import PreflightDone, StopRequested
from sfm_dpo.common.process import end_process
from sfm_dpo.config.fields import Config, parse_config
from sfm_dpo.data.pairs import Pairs
from sfm_dpo.data.tokenization import load_data
from sfm_dpo.evaluation.eval_command import EvalCommand
from sfm_dpo.health.guard import make_guard
from sfm_dpo.health.preflight import preflight
from sfm_dpo.hub.upload import PushCheckpoints, check_push
from sfm_dpo.memory.asked import read_asked
from sfm_dpo.memory.host import check_host_memory
from sfm_dpo.memory.planner import measure_optimizer
from sfm_dpo.model.loading import identify_models, load_model_config, meta_adapter
from sfm_dpo.model.sharding import checkpoint_bytes, model_bytes
from sfm_dpo.run.checkpoint import check_disk, peak_checkpoint_count
from sfm_dpo.run.facts import ForwardPath, MicroBatch
from sfm_dpo.run.model_files import find_folder
from sfm_dpo.run.reader import eval_prefix
from sfm_dpo.run.start import Before
from sfm_dpo.train.base_model import BaseModel, base_model
from sfm_dpo.train.callbacks import Profiler, ProgressLine, StopCallback
from sfm_dpo.train.reference_cache import add_reference, make_cache_folder, reference_root
from sfm_dpo.train.trainer import SFMDPOTrainer, check_weights
from sfm_dpo.training_run import TrainingRun, first_facts

log = logging.getLogger("sfm_dpo")


def main(
    argv: list[str], trainer_class: type[SFMDPOTrainer] = SFMDPOTrainer, callbacks: Sequence[TrainerCallback] = ()
) -> int:
    """Runs and returns the exit code; however the run ends, unless it is killed, status.json says so.

    `trainer_class` (for another loss) and `callbacks` are for own scripts (docs/extending.md).
    """
    disable_deepspeed_shm()  # before parse_config, in which Transformers makes the process group
    load_only_tensors()
    with TrainingRun() as run:
        config = parse_config(argv)
        start = run.begin(config)
        steps = start.steps
        evaluations = EvalCommand(config.train)
        pushes = PushCheckpoints(config.train)
        if start.trains:
            before = start.before
            config = identify_models(config, before.facts.models, before.config)
            check_access(config, before)
            pairs, tokenizer = load_data(config, before.facts.template_date)
            facts = first_facts(config, pairs, before)
            asked = read_asked(config, load_model_config(config), before)
            run.record(facts, config, pairs)
            data = {"train_dataset": pairs.train, "eval_dataset": pairs.held_out() or None}
            trainer = trainer_class(config, asked, processing_class=tokenizer, progress=run.progress, **data)
            with base_model(trainer) as base:
                check_space(trainer, len(pairs.train))
                path, micro_batch, calibration = calibrate(base, pairs.train, asked, before)
                facts = replace(facts, path=path, micro_batch=micro_batch, calibration=calibration)
                run.record(facts)
                describe_training(base, path, micro_batch, pairs, before)
                pairs, caches = add_reference(base, path, pairs)
                facts = replace(facts, reference=caches)
                run.record(facts)
                if config.train.preflight != "skip" and (config.train.preflight_only or not before.checkpoint):
                    with base.computing(path), base.progress.during("the preflight"):
                        preflight(base, config, pairs.train, tokenizer, micro_batch.pairs)
            if config.train.preflight_only:
                raise PreflightDone("preflight_only: nothing was trained")
            trainer.apply(facts, pairs)
            for callback in (pushes, evaluations, *callbacks):
                trainer.add_callback(callback)
            train(trainer, pairs, before)
            save_final(trainer)
            steps = run.end_training(trainer)
        run.close_steps(config, steps, evaluations)
        pushes.wait()
    return run.exit_code


def check_access(config: Config, before: Before) -> None:
    """Checks and fetches what the run will need later, before data and model are read: the weights' names, LoRA's
    modules, the base's tokenizer files, host memory, reference cache and Hub."""
    args = config.train
    on_main_process(lambda: check_weights(config))
    meta_adapter(config, load_model_config(config))
    on_main_process(lambda: find_folder(config.model.model_name_or_path, config.revision))  # with its tokenizer files
    check_host_memory(config)
    if args.precompute_ref_log_probs:
        main_process_first(lambda: make_cache_folder(reference_root()))
    if args.push_to_hub:
        on_main_process(lambda: check_push(config, bool(before.checkpoint)))


def check_space(trainer: SFMDPOTrainer, pairs: int) -> None:
    """Checks that there is disk space for the checkpoints of a run on so many pairs or, without any, for the model."""
    args = trainer.config.train
    if args.preflight_only:  # it writes neither
        return
    state = measure_optimizer(args, is_flat=trainer.zero_stage > 0)
    size = checkpoint_bytes(trainer.model, trainer.zero_stage, trainer.is_fsdp_enabled, state)
    model = model_bytes(trainer.model, trainer.is_fsdp_enabled) if args.save_strategy == "no" else None
    most = peak_checkpoint_count(args, pairs)
    on_main_process(lambda: check_disk(args.output_dir, size, most, model))


def describe_training(
    base: BaseModel, path: ForwardPath, micro_batch: MicroBatch, pairs: Pairs, before: Before
) -> None:
    """Logs what will be trained and how."""
    args = base.config.train
    accumulation = micro_batch.count_accumulation(args.global_batch_size, args.world_size)
    batch = f"{micro_batch.pairs} x {accumulation} accumulation x {args.world_size} process(es)"
    what = "checking" if args.preflight_only else f"training {args.output_dir}"
    log.info(
        f"{what}: {len(pairs.train):,} pairs, global batch {args.global_batch_size} = "
        f"{batch}, loss {'+'.join(args.loss_type)}, beta {args.beta:g}, lr {args.learning_rate:g}"
    )
    if path.packed:
        with base.computing(path):
            log.info(f"padding-free, attention by {base.attention_kernel()}")
    sampler = base.make_sampler(pairs.train, path.packed, path.prefix_sharing, micro_batch.pairs)
    largest = sampler.layout.count(sampler.largest_micro_batch(micro_batch.pairs))
    log.info(f"the largest micro-batch has {largest:,} tokens")
    if before.checkpoint:
        log.info(f"resuming from {before.checkpoint}")


def train(trainer: SFMDPOTrainer, pairs: Pairs, before: Before) -> None:
    """Trains to the last step; raises GuardStopped or StopRequested if the guard or a request stops the run."""
    stop = StopCallback()
    guard = make_guard(trainer.config.train, pairs, trainer.meter.skip_time)
    if guard:
        trainer.add_callback(guard)
    trainer.add_callback(stop)
    trainer.add_callback(ProgressLine())  # after the guard, which adds metrics to the log entry
    if trainer.config.train.profile_steps:
        trainer.add_callback(Profiler(*trainer.config.train.profile_steps))
    # Held-out metrics before training as well as after
    trainer.args.eval_on_start = bool(trainer.eval_dataset) and not before.checkpoint
    trainer.train(resume_from_checkpoint=str(before.checkpoint) if before.checkpoint else None)
    if stop.stopped or (guard and guard.stopped):
        trainer.save_state()
        if guard:
            guard.raise_if_stopped()
        raise StopRequested(f"stopped on request at step {trainer.state.global_step} of {trainer.state.max_steps}")


def save_final(trainer: SFMDPOTrainer) -> None:
    """Evaluates the trained model, unless its last step did, and saves it."""
    last = [entry for entry in trainer.state.log_history if entry["step"] == trainer.state.global_step]
    if trainer.eval_dataset is not None and not any(map(eval_prefix, last)):
        trainer.evaluate()
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    faulthandler.enable(2)  # on standard error: a library that aborts the process does not say where
    end_process(main(sys.argv[1:]))
