"""How is the reference cache filled? By all ranks, each its shards, or together where the weights are split."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset

from sfm_dpo import reference
from sfm_dpo.checkpoint import stop_requested
from sfm_dpo.run_dir import write_status
from sfm_dpo.sharding import gathered_hash
from sfm_dpo.stop import StopRequested
from sfm_dpo.tokenization import pair_tokens

if TYPE_CHECKING:
    from sfm_dpo.trainer import SFMDPOTrainer


def fill(trainer: "SFMDPOTrainer", dataset: Dataset, name: str, batch_size: int) -> Dataset:
    """ref_chosen_logps and ref_rejected_logps of `dataset`, [N] each, from the cache, which it completes.

    Args:
        name: train or eval, for the log.
        batch_size: as many tokens as so many of the longest pairs are computed at once.

    Raises:
        StopRequested: the stop file was seen; the shards done are kept.
    """
    args, accelerator, device = trainer.args, trainer.accelerator, trainer.accelerator.device
    model = trainer.forward_model()
    model.eval()
    settings = {
        "weights": gathered_hash(model) if trainer.is_zero3 else trainer._precompute_model_hash,
        "dtype": next(model.parameters()).dtype,
        "autocast": accelerator.mixed_precision,
        "attention": trainer._bare_model().config._attn_implementation,
        "packed": trainer._packed,
        "compilation": trainer._compilation,
        "max_length": args.max_length,
        "truncation_mode": args.truncation_mode,
        "ld_alpha": trainer.ld_alpha,
    }
    folder = reference.cache_folder(dataset, **settings)
    lengths = pair_tokens(dataset, args.max_length)
    shards = reference.shard_indices(lengths)
    paths = [folder / f"{number:06}.safetensors" for number in range(len(shards))]
    missing: list[list[int]] = [[]]
    if accelerator.is_main_process:  # who looks for a file before it is written may on NFS not see it for a minute
        missing = [[n for n, path in enumerate(paths) if reference.read_shard(path, shards[n]) is None]]
    broadcast_object_list(missing, from_process=0)
    todo, rank, ranks = missing[0], accelerator.process_index, accelerator.num_processes
    if accelerator.is_main_process:
        state = f"{len(shards) - len(todo)} of {len(shards)} shards in {folder}"
        print(f"reference log-probs of the {name} pairs: {state}", flush=True)

    def tell(line: str) -> None:  # hours may pass here: the log and status.json say that it moves
        print(line, flush=True)
        write_status(args.output_dir, "running", message=line)

    def forward(rows: np.ndarray) -> torch.Tensor:
        batch = trainer._prepare_inputs(trainer.data_collator([dataset[int(i)] for i in rows]))
        with mode():
            return torch.stack(trainer.compute_ref_log_probs(model, batch), dim=1)

    def agreed_stop() -> bool:
        seen = [rank == 0 and stop_requested(args.output_dir)]
        broadcast_object_list(seen, from_process=0)
        return seen[0]

    together = trainer.forwards_in_lockstep()
    mode = torch.no_grad if together else torch.inference_mode  # gathered weights outlive the forward
    mine = todo if together else todo[rank::ranks]
    progress = reference.Progress(f"reference, {name}", sum(int(lengths[shards[n]].sum()) for n in mine), tell)
    report = progress if rank == 0 else lambda tokens: None
    budget = batch_size * int(lengths.max(initial=1))  # as many tokens as `batch_size` of the longest pairs
    made: dict[str, Any] = {"batch_size": batch_size, "batch_tokens": budget}
    made |= {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type}
    if together:
        done = reference.compute_in_lockstep(
            folder, shards, mine, lengths, budget, forward, rank, ranks, gather_object, report, agreed_stop, made
        )
    else:
        done = reference.compute_shards(
            folder, shards, mine, lengths, budget, forward, report, lambda: stop_requested(args.output_dir), made
        )
    finished = accelerator.gather(torch.tensor([done], device=device)).all().item()
    if not finished:
        count = sum(path.exists() for path in paths) + trainer._reference_shards
        message = f"stopped on request during the reference pass; its shards are kept in {folder}"
        raise StopRequested(message, shards=count)
    trainer._reference_shards += len(shards)
    trainer._reference_folder = folder
    logps = reference.read_all(paths, shards)
    if accelerator.is_main_process:
        trainer.data_facts["reference"][name] = reference.describe_cache(folder, paths, settings)
    return Dataset.from_dict({"ref_chosen_logps": logps[:, 0], "ref_rejected_logps": logps[:, 1]})
