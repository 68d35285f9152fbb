"""Launchers, ranks from their environment, collectives on Python values, and why a rank sees no GPU."""

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from sfm_dpo.common.errors import RunEnd, UserError

T = TypeVar("T")
# By LAUNCH, the names in data.json, messages and model cards
LAUNCHES = {"zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2", "offload": "ZeRO-2 with offload"}
DRIVER = Path("/proc/driver/nvidia/version")  # exists if NVIDIA's driver is loaded
# For a process that must not use a GPU even if the node has some; DeepSpeed, which accelerate imports, then looks for
# none. Set it before torch is imported. In the batch scripts: hide_gpus (scripts/common.sh)
CPU_ONLY = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
# Variables of a launcher's ranks, of their Slurm job and of their W&B run, and how they load checkpoints
_OF_RANKS = """RANK LOCAL_ WORLD_SIZE MASTER_ TORCHELASTIC_ PET_ ACCELERATE_ GROUP_ ROLE_ FSDP_ PMI OMPI_ MV2_ SLURM_
    WANDB_RUN_ID WANDB_RESUME WANDB_SERVICE TORCH_FORCE_WEIGHTS_ONLY_LOAD""".split()
_COMPLETE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # every launcher sets all of them
# Variables by which accelerate takes a process for one of several, and their values for a single process
_SINGLE = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"), "1"),
    **dict.fromkeys(("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"), "false"),
}


def settle_launch(by_ranks: bool) -> None:
    """Makes this process a rank or a single process for all libraries. With `by_ranks` it is a rank if a launcher has
    set all variables of one; UserError if there are only some. A single process loses them. Call it before importing a
    library that reads them."""
    missing = [name for name in _COMPLETE if name not in os.environ]
    if by_ranks and not missing:
        return
    several = [name for name, value in _SINGLE.items() if os.environ.get(name, value).lower() != value]
    if by_ranks and several:
        named = dict.fromkeys([*several, *_COMPLETE])
        given = " ".join(f"{name}={os.environ[name]}" for name in named if name in os.environ)
        remedy = "unset them for a single process, or use accelerate launch or torchrun, which set all"
        raise UserError(f"{given}: set without {', '.join(missing)}; {remedy}")
    for name in _SINGLE:
        os.environ.pop(name, None)


def is_main_process() -> bool:
    """Whether this is rank 0; works before the process group exists."""
    return rank() == 0


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def launch_file(name: str) -> str:
    """The launch configuration for `LAUNCH=name`, relative to the project."""
    return "accelerate_config.yaml" if name == "zero2" else f"configs/accelerate/{name}.yaml"


def launched_with() -> str:
    """zero (2 or 3), fsdp or none, from the launcher's environment variables; works before a trainer exists."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        return "zero"
    return "fsdp" if os.environ.get("ACCELERATE_USE_FSDP") == "true" else "none"


def launch_name() -> str:
    """One of LAUNCHES, from the launcher's environment variables; works before a trainer exists."""
    launcher = launched_with()
    if launcher != "zero":
        return {"fsdp": "fsdp2"}.get(launcher, launcher)
    from accelerate import DeepSpeedPlugin

    plugin = DeepSpeedPlugin()
    is_offload = plugin.zero_stage == 2 and plugin.hf_ds_config.is_offload()
    return "offload" if is_offload else f"zero{plugin.zero_stage}"


# Upstream: deepspeed 0.19, comm/torch.py, build_shm_op: compiles its own all-reduce for CPU for half a minute, and a
# process killed meanwhile leaves a lock file that every later start waits for forever.
# Canary: test_canary_deepspeed_compiles_an_all_reduce_on_cpu
def disable_deepspeed_shm() -> None:
    """Makes DeepSpeed use gloo on CPU processes. Call it before the process group exists."""
    if launched_with() == "zero":
        import deepspeed

        if deepspeed.get_accelerator().device_name() == "cpu":  # it probes all ops, which takes seconds on a GPU
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


# Upstream: deepspeed 0.19, comm/torch.py, TorchBackend.new_group: passes no timeout on, so ZeRO reduces gradients on a
# group with PyTorch's own, 10 minutes for NCCL. Canary: test_canary_timeout_of_zero
def set_zero_timeout(seconds: int) -> None:
    """Gives the group on which ZeRO reduces the timeout of the others. All ranks must call it, before any engine."""
    import deepspeed
    from deepspeed.utils import groups
    from torch.distributed.distributed_c10d import _set_pg_timeout

    deepspeed.init_distributed(dist_init_required=False)  # on CPU processes accelerate leaves it to the engine
    _set_pg_timeout(timedelta(seconds=seconds), groups._get_data_parallel_group())


def load_only_tensors() -> None:
    """Makes `torch.load` refuse what could run code: DeepSpeed 0.19 loads its files in a checkpoint as any pickle."""
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    if launched_with() == "zero":
        import torch
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        torch.serialization.add_safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address])


def is_on_gpu() -> bool:
    """Whether this process computes on a GPU; with `use_cpu` it does not, although the machine may have one."""
    from accelerate import PartialState

    return PartialState().device.type == "cuda"


def is_cpu_only() -> bool:
    """Whether this process was started with CPU_ONLY."""
    return os.environ.get("DS_ACCELERATOR") == CPU_ONLY["DS_ACCELERATOR"]


def first_gpu() -> str:
    """CUDA_VISIBLE_DEVICES for a process with one GPU: the first of those given. Set it before importing torch."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]


def environment_outside_launcher() -> dict[str, str]:
    """The environment for a process that must not take itself for a rank, or for a part of this Slurm job."""
    return {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or not k.startswith(tuple(_OF_RANKS))}


def broadcast(value: T) -> T:
    """Returns rank 0's value on every rank. All ranks must call it; the value is pickled."""
    from accelerate.utils import broadcast_object_list

    values = [value]
    broadcast_object_list(values, from_process=0)
    return values[0]


def gather_values(value: T) -> list[T]:
    """Returns the values of all ranks on every rank. All ranks must call it; the values are pickled."""
    from accelerate.utils import gather_object

    return gather_object([value])


def on_main_process(action: Callable[[], T]) -> T:
    """Returns on every rank what `action` returns on rank 0, pickled. Rank 0's RunEnd or OSError is raised on all."""
    result: Any = None
    error: RunEnd | OSError | None = None
    if is_main_process():
        try:
            result = action()
        except (RunEnd, OSError) as raised:
            error = raised
    result, error = broadcast((result, error))
    if error:
        raise error
    return result


def main_process_first(action: Callable[[], T]) -> T:
    """Runs `action` on rank 0, which fills caches, then on the others. Rank 0's RunEnd is raised on every rank."""
    results: list[T] = []
    on_main_process(lambda: results.append(action()))
    return results[0] if results else action()


def share_error(message: str) -> str:
    """Tells the other ranks why this one fails, without a file, and returns what the first of them said."""
    from torch.distributed import distributed_c10d

    if distributed_c10d.is_initialized():
        with suppress(RuntimeError):  # the process that held the store is gone
            return distributed_c10d._get_default_store().compare_set("sfm_dpo/error", "", message).decode()
    return message


def explain_missing_gpus() -> str | None:
    """Why torch sees no GPU although the node should have one; None if nothing is wrong."""
    import torch

    given = os.environ.get("SLURM_GPUS_ON_NODE")
    is_cpu_meant = is_cpu_only() or os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if is_cpu_meant or torch.cuda.is_available() or not (given or DRIVER.exists()):
        return None
    reason = "no reason given"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the latter: a build of torch without CUDA
        reason = str(error).rstrip(".")
    what = f"Slurm gave {given} GPU(s) that torch does not see" if given else "torch does not see the GPU of this node"
    return f"{what} ({reason}); ask for another node (--exclude), or check the driver and torch's CUDA"
