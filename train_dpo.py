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

import logging
import sys
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase, PrinterCallback, ProgressCallback, TrainerCallback

from sfm_dpo.common.distributed import disable_deepspeed_shm, load_only_tensors, main_process_first, on_main_process
from sfm_dpo.common.errors import PreflightDone, StopRequested
from sfm_dpo.config.fields import Config, parse_config
from sfm_dpo.data.pairs import Pairs
from sfm_dpo.data.tokenization import load_data
from sfm_dpo.evaluation.eval_command import EvalCommand
from sfm_dpo.fit.fit import first_facts, fit
from sfm_dpo.health.guard import add_guard
from sfm_dpo.health.preflight import preflight_phase
from sfm_dpo.hub.upload import PushCheckpoints, check_push
from sfm_dpo.model.loading import identify_models, load_model_config, meta_adapter
from sfm_dpo.model.sharding import checkpoint_bytes
from sfm_dpo.run.checkpoint import check_disk, peak_checkpoint_count
from sfm_dpo.run.facts import RunFacts
from sfm_dpo.run.reader import eval_prefix
from sfm_dpo.run.start import Before
from sfm_dpo.train.callbacks import Profiler, Progress, ProgressLine, StopCallback
from sfm_dpo.train.frozen_model import frozen_model
from sfm_dpo.train.reference_cache import add_reference, make_cache_folder, reference_root
from sfm_dpo.train.trainer import SFMDPOTrainer
from sfm_dpo.training_run import TrainingRun

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
        steps = start.open
        evaluations = EvalCommand(config.train)
        pushes = PushCheckpoints(config.train)
        if start.trains:
            config = identify_models(config, start.before.facts.models, start.before.config)
            check_access(config, start.before)
            pairs, tokenizer = load_data(config, start.before.facts.template_date)
            facts = first_facts(config, pairs, start.before)
            run.record(facts, config, pairs)
            trainer = build_trainer(trainer_class, config, facts, pairs, tokenizer, run.progress)
            run.record(fit(trainer, start.before))
            for callback in (pushes, evaluations, *callbacks):
                trainer.add_callback(callback)
            run.record(add_reference(trainer))
            preflight(trainer, start.before)
            train(trainer, start.before)
            save_final(trainer)
            steps = run.finish(trainer)
        run.close_steps(config, steps, evaluations)
        pushes.wait()
    return run.exit_code


def check_access(config: Config, before: Before) -> None:
    """Checks what the run will need later, before data and model are read: LoRA's modules, reference cache and Hub."""
    args = config.train
    meta_adapter(config, load_model_config(config))
    if args.precompute_ref_log_probs:
        main_process_first(lambda: make_cache_folder(reference_root()))
    if args.push_to_hub:
        on_main_process(lambda: check_push(config, bool(before.checkpoint)))


def build_trainer(
    trainer_class: type[SFMDPOTrainer],
    config: Config,
    facts: RunFacts,
    pairs: Pairs,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
) -> SFMDPOTrainer:
    """Loads the model, and packs it where that is possible."""
    trainer = trainer_class(
        config,
        facts,
        train_dataset=pairs.train,
        eval_dataset=pairs.held_out() or None,
        processing_class=tokenizer,
        progress=progress,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer


def preflight(trainer: SFMDPOTrainer, before: Before) -> None:
    """Logs what will be trained and how, and checks disk space and, at a first start, whether DPO can work."""
    config = trainer.config
    args = config.train
    if not args.preflight_only:  # it writes no checkpoint
        size = checkpoint_bytes(trainer.model, trainer.zero_stage, trainer.is_fsdp_enabled)
        on_main_process(lambda: check_disk(args.output_dir, size, peak_checkpoint_count(args)))
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
    if before.checkpoint:
        log.info(f"resuming from {before.checkpoint}")
    elif args.preflight != "skip":
        with frozen_model(trainer, "policy") as policy:
            preflight_phase(trainer, policy, config)
    if args.preflight_only:
        raise PreflightDone("preflight_only: nothing was trained")


def train(trainer: SFMDPOTrainer, before: Before) -> None:
    """Trains to the last step; raises GuardStopped or StopRequested if the guard or a request stops the run."""
    stop = StopCallback()
    guard = add_guard(trainer)
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
    sys.exit(main(sys.argv[1:]))
