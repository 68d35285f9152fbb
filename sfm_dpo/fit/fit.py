"""What a run uses: pairs per device, checkpointed layers, attention path and kernel.

`first_facts` compares a start with the checkpoint that it resumes from and takes the settings recorded there. Where
there are none, `fit` plans from lengths and memory, measures on the trainer that is there, and sets what fits.
"""

import logging
import math
import os
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

import torch

from sfm_dpo.common.distributed import gather, launched_with
from sfm_dpo.common.errors import RunEnd, UserError, user_input
from sfm_dpo.common.process import available_memory, resident_bytes
from sfm_dpo.config.checks import check_length_of_run
from sfm_dpo.config.fields import Config, TrainConfig
from sfm_dpo.data.lengths import Lengths
from sfm_dpo.data.pairs import Pairs
from sfm_dpo.fit import calibration
from sfm_dpo.memory.activations import TraceError
from sfm_dpo.memory.planner import Candidate, MemoryPlanner, asked_pairs, asks_layers, memory_limit
from sfm_dpo.model.loading import load_model_config
from sfm_dpo.run.facts import Calibration, RunFacts, Settings
from sfm_dpo.run.reader import describe_calibration
from sfm_dpo.run.start import Before
from sfm_dpo.train.callbacks import is_out_of_memory
from sfm_dpo.train.trainer import state_facts

log = logging.getLogger(__name__)

ROUNDS = 5  # settings that are tried
AIM = 0.97  # of the limit, until a setting has been measured to fit
# Measured over planned activations on a CPU before the first measurement: up to 1.9 was seen (SmolLM2-135M), and a
# process that exceeds its memory there is killed
CPU_RATIO = 2.0


def first_facts(config: Config, pairs: Pairs, before: Before) -> RunFacts:
    """The facts of a start, before its model is loaded: with the settings of the run that it resumes or, where those
    cannot be kept, provisional ones. All ranks must call it. Raises UserError if the checkpoint is another run's."""
    args = config.train
    facts = replace(state_facts(config, pairs.train), counts=pairs.as_dict(), template_date=pairs.template_date)
    assert facts.settings
    kept = keep_settings(config, facts.settings, before)
    if kept:
        facts = replace(facts, settings=kept, calibration=before.facts.calibration)
    is_decided = kept or asked_pairs(args) is not None
    before.check(facts if is_decided else replace(facts, settings=None))
    check_length_of_run(args, len(pairs.train))
    if left_out := len(pairs.train) % args.global_batch_size:
        log.info(f"{left_out} pairs of an epoch do not fill a last batch of {args.global_batch_size} and are left out")
    return facts


def keep_settings(config: Config, configured: Settings, before: Before) -> Settings | None:
    """The settings of the resumed run; None if there are none, if others are asked for, or if the memory that was
    measured for them is not there. All ranks must call it."""
    args = config.train
    settings = before.facts.settings
    if before.checkpoint is None or settings is None:
        return None
    size = before.facts.calibration.measured_bytes or settings.memory.get("bytes")
    if size and size > find_limit(args):
        log.info(f"the settings of {before.checkpoint} were measured at {size / 2**30:.2f} GiB: others are chosen")
        return None
    asked: dict[str, Any] = {}
    if asked_pairs(args) is not None:
        asked["micro_batch"] = configured.micro_batch
    if asks_layers(args):
        asked["checkpointed_layers"] = configured.checkpointed_layers
    if args.flash_attention != "auto":
        asked["flash_attention"] = args.flash_attention
    return settings if asked.items() <= vars(settings).items() else None


def fit(trainer: Any, before: Before) -> RunFacts:
    """Sets the pairs per device, the checkpointed layers and the kernel that fit and are fastest, as measured on the
    trainer's model, pairs and device; a resumed run keeps its own. Returns the trainer's facts with what was found.

    All ranks must call it before the reference pass, and get the same. Raises UserError if a path or kernel differs
    from the padded one by more than the noise, and if no setting fits into memory.
    """
    facts = trainer.facts
    if before.checkpoint and facts.settings == before.facts.settings:
        return facts
    log.info("calibration: measuring noise, memory and speed of this model on these pairs")
    begin = time.monotonic()
    # ZeRO-3 and FSDP2 shard the policy only when training begins
    is_whole = trainer.zero_stage != 3 and not trainer.is_fsdp_enabled
    resident = max(gather(int(calibration.reset_peak_memory())))  # before anything has run
    remedy = "choose another model, set flash_attention: fa2, or report it upstream"
    failing = user_input("calibration: the model's own code fails", remedy)
    with failing, calibration.base_policy(trainer) as model:
        noise, ratios, kernels = choose_path(trainer, model, is_whole)
        plan = plan_memory(trainer, resident, is_whole)
        found = Calibration(noise, ratios)
        if is_whole and not trainer.args.preflight_only:
            flash, milliseconds = calibration.choose_kernel(trainer, model, kernels)
            trainer.use(replace(trainer.settings, flash_attention=flash))
            found = replace(found, kernels=milliseconds)
            if plan:
                try:
                    candidate = find_setting(trainer, model, plan, resident)
                except Exception as error:  # of a kernel, on rows longer than those compared; the same on all ranks
                    if isinstance(error, RunEnd) or flash in ("fa2", trainer.config.train.flash_attention):
                        raise
                    log.warning(f"calibration: {flash} fails: {str(error)[:300]}; it is not used")
                    trainer.use(replace(trainer.settings, flash_attention="fa2"))
                    candidate = find_setting(trainer, model, plan, resident)
                trainer.use(apply_candidate(trainer.settings, candidate))
                planned = plan.states + candidate.activations
                found = replace(found, planned_bytes=planned, measured_bytes=candidate.bytes)
            found = replace(found, **calibration.measure_speed(trainer, model))
        elif plan:
            candidate = plan.planner.choose(plan.limit, plan.states)
            if candidate.bytes > plan.limit and not trainer.args.preflight_only:
                plan.refuse(candidate)
            log.info(f"planned, not measured: {candidate}")
            trainer.use(apply_candidate(trainer.settings, candidate))
    facts = replace(trainer.facts, calibration=replace(found, seconds=time.monotonic() - begin))
    before.check(facts)
    log.info(f"calibration: {'; '.join(map(' '.join, describe_calibration(facts.calibration)))}")
    trainer.noise = noise or trainer.noise
    trainer.facts = facts
    return facts


def choose_path(trainer: Any, model: Any, backward: bool) -> tuple[float, dict[str, float], list[str]]:
    """`compare_paths` once sharing, then packing, are off where they fail. Raises UserError for what is set."""
    batches = calibration.select_pairs(trainer)
    while True:
        try:
            return calibration.compare_paths(trainer, model, backward, batches)
        except calibration.PathError as error:
            trainer.drop_path("prefix_sharing" if error.status["path"] == "shared" else "padding_free", str(error))
        except Exception as error:  # of the model's code, which may not take the arguments of packed attention
            if isinstance(error, RunEnd) or is_out_of_memory(error) or not trainer.packed:
                raise
            trainer.drop_path("padding_free", f"{type(error).__name__}: {str(error)[:300]}")


def apply_candidate(settings: Settings, candidate: Candidate) -> Settings:
    return replace(
        settings,
        micro_batch=candidate.per_device,
        accumulation_steps=settings.micro_batch * settings.accumulation_steps // candidate.per_device,
        checkpointed_layers=candidate.checkpointed_layers,
        memory=asdict(candidate),
    )


@dataclass(frozen=True)
class MemoryPlan:
    """What memory a run may use, and what training will need of it; the same on all ranks."""

    planner: MemoryPlanner
    states: int  # bytes of weights, gradients, optimizer and buffers, on a CPU also of the process
    absent: int  # of these, bytes that training will allocate
    limit: int  # bytes that each process may use

    def refuse(self, smallest: Candidate) -> NoReturn:
        """Raises the UserError for settings of which none fits; names the fields that leave no smaller one."""
        args = self.planner.config.train
        names = ("per_device_train_batch_size", "gradient_checkpointing", "checkpointed_layers")
        given = [name for name in names if vars(args)[name] is not None]
        what = f"with {' and '.join(given)} as set, " if given else ""
        remedy = f"remove {'these fields' if len(given) > 1 else given[0]}, or " if given else ""
        raise UserError(
            f"memory: {what}no setting fits in {self.limit / 2**30:.2f} GiB; the smallest is {smallest}; "
            f"{remedy}use a smaller max_length, more GPUs, or LAUNCH=zero3"
        )


def plan_memory(trainer: Any, resident: int, is_measured: bool) -> MemoryPlan | None:
    """The plan by which memory decides; None on a CPU if pairs and layers are set. `resident`: bytes that the process
    takes so far. A model that cannot be traced gets a rough plan if it `is_measured`; else UserError is raised. All
    ranks must call it."""
    args = trainer.config.train
    settings = trainer.settings
    model_config = load_model_config(trainer.config)
    if args.use_cpu and asked_pairs(args) is not None and asks_layers(args):
        return None
    lengths = Lengths.of(trainer.train_dataset).truncate(args.max_length)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    packing = (settings.packed, settings.prefix_sharing)
    planner = MemoryPlanner(
        trainer.config, model_config, lengths, args.world_size, *packing, dtype, on_gpu=not args.use_cpu
    )
    try:
        _ = planner.activations
    except TraceError as error:
        reason = f"memory cannot be planned for {model_config.model_type}: {error}"
        if not is_measured:
            raise UserError(f"{reason}; set per_device_train_batch_size and gradient_checkpointing") from error
        log.info(f"{reason}; one pair is measured first")
        planner.guess_activations()
    launch = "fsdp2" if launched_with() == "fsdp" else "none"
    zero = {}
    if args.deepspeed_plugin is not None:
        launch = f"zero{args.deepspeed_plugin.zero_stage}"
        zero = args.deepspeed_plugin.deepspeed_config["zero_optimization"]
    parts = planner.states(launch, zero)
    absent = parts["gradients"] + parts["optimizer"] + parts["buffers"]
    states = sum(parts.values())
    if args.use_cpu:  # weights, a live reference and the rest of the process are there
        states = absent + resident
    return MemoryPlan(planner, states, absent, find_limit(args))


def find_limit(args: TrainConfig) -> int:
    """Bytes that a process may use of its device, the least of all ranks; all of it if pairs and layers are set."""
    if args.use_cpu:  # other processes use some of the machine's memory, and so does this one already
        total = resident_bytes() + available_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    else:
        total = torch.cuda.mem_get_info()[1]
    is_asked = asked_pairs(args) is not None and asks_layers(args)
    limit = total if is_asked and not args.memory_gib else memory_limit(total, args.memory_gib)
    return min(gather(int(limit)))


def find_setting(trainer: Any, model: Any, plan: MemoryPlan, resident: int) -> Candidate:
    """The setting of least work that has been measured to fit, with these bytes. Raises UserError if none fits.

    The next one to try is chosen by the largest ratio of measured to planned activations so far. Whatever has as many
    tokens and no more checkpointed layers than a setting that did not fit is never tried.
    """
    ratio = 1.0 if plan.planner.on_gpu else CPU_RATIO
    absent = plan.absent
    if trainer.ref_model is not None and trainer.config.train.precompute_ref_log_probs:  # freed once it is cached
        absent = max(0, absent - sum(parameter.nbytes for parameter in trainer.ref_model.parameters()))
    states = resident + absent
    fitting: list[Candidate] = []
    failed: list[Candidate] = []
    candidate = plan.planner.choose(plan.limit if plan.planner.is_traced else 0, states, ratio)
    while candidate not in failed and len(fitting) + len(failed) < ROUNDS:
        size, activations = calibration.measure_memory(trainer, model, candidate, absent, resident)
        shown = f"{size / 2**30:.2f} GiB" if math.isfinite(size) else "more than there is"
        log.info(f"calibration: {candidate}; measured: {shown} of {plan.limit / 2**30:.2f} GiB")
        if not math.isfinite(activations):
            activations = 1.1 * max(plan.limit - states, candidate.activations)
        measured = activations / candidate.activations
        ratio = max(ratio, measured) if fitting or failed else measured
        if size <= plan.limit:
            fitting.append(replace(candidate, bytes=int(size)))
        else:
            failed.append(candidate)
        is_last = len(failed) == ROUNDS - 1
        aim = AIM * plan.limit
        if is_last:
            aim = 0  # the smallest of those that are left
        elif fitting and plan.planner.on_gpu:
            aim = plan.limit
        candidate = plan.planner.choose(aim, states, ratio, failed)
        if fitting and candidate.work >= min(known.work for known in fitting):
            break
    if not fitting:
        plan.refuse(failed[-1])
    return min(fitting, key=lambda candidate: candidate.work)
