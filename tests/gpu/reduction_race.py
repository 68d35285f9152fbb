"""Run by test_buckets.py: DeepSpeed ZeRO-2's own reduction on the CPU, with CUDA's streams as vector clocks.

CUDA's caching allocator hands a freed block out again on the stream that allocated it. If that stream has not waited
for another one that still uses the block, and `record_stream` was not called, the new owner overwrites what the other
stream reads. Prints, for each bucket size in argv, how many blocks are freed in this way. The process group is a fake
of five ranks: nothing is communicated.
"""

import contextlib
import json
import sys
from collections import Counter, defaultdict

import torch
import torch.distributed as dist
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sfm_dpo.common.distributed import disable_deepspeed_shm
from sfm_dpo.model.sharding import zero_config

VOCAB = 64
HIDDEN = 32
RANKS = 5


class Stream:
    """`seen[s]`: how many operations of stream s are known to be over when the next one of this stream starts."""

    def __init__(self, *args, **kwargs):
        self.seen: Counter = Counter()

    def wait_stream(self, other):
        self.seen |= other.seen

    def synchronize(self):
        for stream in STREAMS:
            stream.wait_stream(self)


COMPUTE = Stream()
STREAMS = [COMPUTE]


class StreamedCPU(CPU_Accelerator):
    """The CPU, with the streams of a GPU."""

    active = COMPUTE

    def is_synchronized_device(self):
        return False

    resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def Stream(self, *args, **kwargs):
        STREAMS.append(Stream())
        return STREAMS[-1]

    @contextlib.contextmanager
    def stream(self, stream):
        before = self.active
        self.active = stream
        yield
        self.active = before

    def current_stream(self, device_index=None):
        return self.active

    def default_stream(self, device_index=None):
        return COMPUTE

    def synchronize(self, device_index=None):
        for stream in list(STREAMS):
            stream.synchronize()


class Allocator(TorchDispatchMode):
    """Follows every storage: who allocated it, and who used it last; counts unsafe frees."""

    def __init__(self, accelerator):
        super().__init__()
        self.accelerator = accelerator
        self.storages: dict = {}  # address: reference, allocating stream, last operation of each stream
        self.freed: defaultdict = defaultdict(list)
        self.recorded: set = set()
        self.unsafe = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        stream = self.accelerator.active
        self._reuse(stream)
        output = func(*args, **(kwargs or {}))
        stream.seen[id(stream)] += 1
        for tensor in tree_leaves((args, kwargs, output)):
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                self._use(tensor.untyped_storage(), stream)
        return output

    def _use(self, storage, stream):
        known = self.storages.get(storage._cdata)
        if known is None or known[0].expired():
            known = self.storages[storage._cdata] = StorageWeakRef(storage), stream, {}
        known[2][id(stream)] = stream.seen[id(stream)]

    def _reuse(self, stream):
        """The next operation of `stream` may take any block that this stream allocated and that is free by now."""
        for address in [address for address, (reference, _, _) in self.storages.items() if reference.expired()]:
            _, owner, uses = self.storages.pop(address)
            if address not in self.recorded:
                self.freed[id(owner)].append(uses)
            self.recorded.discard(address)
        for uses in self.freed.pop(id(stream), ()):
            self.unsafe += any(stream.seen[other] < last for other, last in uses.items())


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, HIDDEN)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4)))
        self.head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids):
        return self.head(self.layers(self.embed(ids))).float().logsumexp(-1).mean()


def count_unsafe_frees(bucket: int, accelerator: StreamedCPU) -> int:
    import deepspeed

    zero = zero_config("zero2") | {"reduce_bucket_size": bucket}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}}
    config |= {"data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": zero}
    net = Net().bfloat16()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    allocator = Allocator(accelerator)
    torch.Tensor.record_stream = lambda self, stream: allocator.recorded.add(self.untyped_storage()._cdata)
    with allocator:
        for _ in range(4):
            engine.backward(engine(torch.randint(VOCAB, (3, 7))))
            engine.step()
    return allocator.unsafe


def main(buckets: list[str]) -> None:
    disable_deepspeed_shm()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    accelerator = StreamedCPU()
    set_accelerator(accelerator)
    print(json.dumps({bucket: count_unsafe_frees(int(bucket), accelerator) for bucket in buckets}))


if __name__ == "__main__":
    main(sys.argv[1:])
