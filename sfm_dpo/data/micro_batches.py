"""The largest micro-batch of a run, for each number of pairs per device: what has to fit into memory."""

import math

from sfm_dpo.config import Config
from sfm_dpo.data.sampler import FIRST_STEPS_FOR, PairSampler
from sfm_dpo.data.token_lengths import Lengths
from sfm_dpo.model.memory_plan import MicroBatch


def list_micro_batches(config: Config, lengths: Lengths, prefix_sharing: bool, ranks: int) -> list[MicroBatch]:
    """Of the usual numbers of pairs, and of the one that the configuration names, those that the global batch allows.

    Args:
        lengths: of the pairs to train on, truncated.
    """
    args = config.train
    seed = args.seed if args.data_seed is None else args.data_seed
    tokens = lengths.computed(prefix_sharing)
    sampler = PairSampler(tokens, args.train_sampling_strategy, args.global_batch_size, 1, seed, args.padding_free)
    micro_batches = []
    for size in sorted({*FIRST_STEPS_FOR, config.micro_batch}):
        if args.global_batch_size % (size * ranks):
            continue
        rows = sampler.largest_micro_batch(size, math.ceil(args.num_train_epochs))
        largest = int(tokens[rows].sum())
        if not args.padding_free:
            largest = 2 * size * int(lengths.total.max())
        responses = int(lengths.responses[rows].sum())
        waiting = sampler.imbalance(size, ranks, None if args.padding_free else lengths.total)
        micro_batches.append(MicroBatch(size, largest, responses, waiting))
    return micro_batches
