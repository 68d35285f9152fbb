#!/usr/bin/env python
"""Trains a language model with DPO, from a recipe to a documented model.

CPU, one process:   python train_dpo.py --config recipes/demo.yaml
4 GPUs, ZeRO-2:     accelerate launch --config_file accelerate_config.yaml train_dpo.py --config recipes/think.yaml
Slurm:              sbatch scripts/dpo_train.sh --learning_rate 5e-7

Any field of TRL's DPOConfig, of its ModelConfig and of sfm_dpo/config.py can be given in the recipe and overridden
after it. Exit codes: 0 done, 1 crashed, 2 wrong configuration or data, 3 refused by the preflight, 4 stopped by the
guard (docs/health.md), 5 trained and saved but not pushed to the Hub (docs/hub.md).
"""

import sfm_dpo  # noqa: F401  (first: it reads .env)

# isort: split
import os
import sys
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, ProgressCallback
from trl import get_peft_config, get_quantization_config

from sfm_dpo.common.distributed import is_main_process, main_process_first
from sfm_dpo.common.errors import StopRequested, UserError
from sfm_dpo.common.secrets import mask, mask_traceback
from sfm_dpo.config import Config, parse_config
from sfm_dpo.data.sampler import RecordData
from sfm_dpo.data.tokenization import load_token_pairs, load_tokenizer
from sfm_dpo.health.guard import add_guard
from sfm_dpo.health.preflight import check_vocabulary, preflight_phase
from sfm_dpo.hub.callback import PushCheckpoints
from sfm_dpo.hub.publish import check_push, push_finished
from sfm_dpo.model.loading import load_model_config, model_init_kwargs
from sfm_dpo.model.sharding import checkpoint_bytes, disable_deepspeed_shm
from sfm_dpo.report.page import summary, write_report
from sfm_dpo.run.checkpoint import (
    check_disk,
    check_resume,
    clear_stop,
    find_start,
    most_at_once,
    newest_checkpoint,
    step_of,
)
from sfm_dpo.run.folder import RESOLVED_CONFIG, check_not_running, claim, describe, write_status
from sfm_dpo.train.profiler import add_profiler
from sfm_dpo.train.progress import ProgressLine
from sfm_dpo.train.stop import StopCallback
from sfm_dpo.train.trainer import SFMDPOTrainer


def main(argv: list[str]) -> int:
    """Runs and returns the exit code; every end but a kill is written to status.json."""
    config, owned = None, False  # owned: output_dir is this run's to write into
    try:
        disable_deepspeed_shm()  # before parse_config, where transformers makes the process group
        config = parse_config(argv)
        if not claim(config):
            say(f"{config.train.output_dir}: already done; to run again remove it or choose another output_dir")
            return push_finished(config.train, say) if config.train.push_to_hub else 0
        check_not_running(config.train.output_dir)
        owned = True
        return train(config)
    except StopRequested as stop:
        assert config is not None
        clear_stop(config.train.output_dir)
        return stopped(config, str(stop), **stop.status)
    except UserError as error:
        alone = error.exit_code == 1  # a disk is full: perhaps no other rank knows
        if is_main_process() or alone:
            print(mask(f"error: {error}"), file=sys.stderr, flush=True)
        if config is not None and owned:
            os.makedirs(config.train.output_dir, exist_ok=True)
            state = {3: "refused", 4: "collapsed"}.get(error.exit_code, "failed")
            write_status(config.train.output_dir, state, error.exit_code, str(error), any_rank=alone, **error.status)
            report(config)
        return error.exit_code
    except BaseException as error:
        if config is not None and os.path.isdir(config.train.output_dir):
            write_status(config.train.output_dir, "failed", 1, f"{type(error).__name__}: {error}")
            report(config)
        raise


def train(config: Config) -> int:
    args = config.train
    for note in config.notes:
        say(note)

    # The model's own configuration first: a wrong path costs a second, not a download.
    model_config = load_model_config(config)
    tokenizer = load_tokenizer(config)

    checkpoint = find_start(args, say)
    push = args.push_to_hub
    if push:
        main_process_first(lambda: check_push(args, bool(checkpoint), say) if is_main_process() else None)
    pairs, notes = main_process_first(lambda: load_token_pairs(config, tokenizer))
    train_set, eval_set = pairs.train, pairs.eval
    for note in notes:
        say(note)
    check_vocabulary(train_set, tokenizer, model_config.get_text_config().vocab_size)
    say(f"data\n{pairs.table()}")
    if is_main_process():
        describe(config, pairs.as_dict(), step_of(checkpoint))
        write_status(args.output_dir, "running", step=step_of(checkpoint))

    args.push_to_hub = False  # see background.py for what Trainer would do
    args.eval_on_start = eval_set is not None and checkpoint is None  # held-out figures before as well as after
    args.model_init_kwargs = model_init_kwargs(config)
    stop = StopCallback()
    trainer = SFMDPOTrainer(
        model=config.model.model_name_or_path,
        args=args,
        train_dataset=train_set,
        eval_dataset=eval_set,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(config.model),
        peft_config=get_peft_config(config.model),
        callbacks=[ProgressLine(), stop, *([PushCheckpoints(say)] if push else [])],
    )
    trainer.add_callback(RecordData(trainer.data_facts))
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    size = checkpoint_bytes(trainer.model, trainer.zero_stage, trainer.is_fsdp_enabled)
    check_disk(args.output_dir, size, most_at_once(args))
    if warning := trainer.launch_warning():
        say(f"warning: {warning}")
    say(
        f"training {args.output_dir}: {len(train_set):,} pairs, global batch {args.global_batch_size} = "
        f"{args.per_device_train_batch_size} x {args.gradient_accumulation_steps} accumulation x {args.world_size} "
        f"process(es), loss {'+'.join(args.loss_type)}, beta {args.beta:g}, lr {args.learning_rate:g}"
    )
    if args.padding_free:
        say(f"padding-free, attention by {trainer.attention_kernel()}")
    if checkpoint:
        check_resume(checkpoint, trainer.resume_facts(), args.ignore_resume_mismatch)
        say(f"going on from {checkpoint}")
    else:
        preflight_phase(trainer, config)
    guard = add_guard(trainer)
    add_profiler(trainer)

    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if guard and guard.stopped:
        trainer.save_state()
        guard.raise_if_stopped()
    if stop.stopped:
        clear_stop(args.output_dir)
        trainer.save_state()
        return stopped(config, f"stopped on request at step {trainer.state.global_step} of {trainer.state.max_steps}")
    last = [entry for entry in trainer.state.log_history if entry["step"] == trainer.state.global_step]
    if eval_set is not None and not any("eval_loss" in entry for entry in last):
        trainer.evaluate()

    trainer.save_model()
    trainer.save_state()
    clear_stop(args.output_dir)  # it came too late
    write_status(args.output_dir, "done", 0, step=trainer.state.global_step)
    report(config)
    trainer.create_model_card()
    trainer.end()
    code = push_finished(args, say) if push else 0
    if code:
        report(config)  # once more, with what became of the push
    return code


def stopped(config: Config, message: str, **extra) -> int:
    """Says that the run can go on. A launcher would make a crash of 75, so there the ranks leave with 0."""
    checkpoint, _ = newest_checkpoint(config.train.output_dir)
    where: dict[str, Any] = {"step": step_of(checkpoint), "checkpoint": checkpoint and str(checkpoint)}
    write_status(config.train.output_dir, "stopped", 75, message, **where, **extra)
    report(config)
    say(f"{message}; the same command goes on from {checkpoint or 'the beginning'}")
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else 75


def report(config: Config) -> None:
    """report.html and the closing lines; also of a run that failed, once it had begun."""
    run = Path(config.train.output_dir)
    if is_main_process() and (run / RESOLVED_CONFIG).is_file():
        try:
            write_report(run)
        except OSError as error:  # a full disk must not make a failure of a trained model
            say(f"report not written: {error}; later: python -m sfm_dpo.report.page {run}")
        say(summary(run))


def say(text: str) -> None:
    if is_main_process():
        print(mask(text), flush=True)


if __name__ == "__main__":
    sys.excepthook = mask_traceback
    sys.exit(main(sys.argv[1:]))
