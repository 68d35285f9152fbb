"""Makes PyTorch's CPU build see one GPU, cuda:0, whose memory is the CPU's (device.cpp) and whose FlashAttention is
written out here. Import it before torch; `SIMULATED_CUDA` is the compiled library.

An operator that is given a CPU tensor beside a CUDA tensor raises as on a GPU, and so does a call that breaks the
contract of the flash kernels. `Syncs` counts where the host waits for the device.
"""

import ctypes
import os

DEVICE = ctypes.CDLL(os.environ["SIMULATED_CUDA"], ctypes.RTLD_GLOBAL)

import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from sfm_dpo.model import attention

# FA4 is installed, and wrong in this way: right, backward, mask, leak, window (a key too many) or long (it fails)
FAULT = os.environ.get("SIMULATED_FA4")
LONG = 500  # tokens of a row
NAME = "NVIDIA B200"
MEMORY = 180 << 30


class Stream:
    """Work on a stream is over when it is asked for."""

    def __init__(self, *args, **kwargs):
        pass

    wait_stream = wait_event = synchronize = record_event = __init__


def install() -> None:
    cuda = torch.cuda
    nothing = "_lazy_init init set_device synchronize empty_cache ipc_collect manual_seed"
    for name in [*nothing.split(), "manual_seed_all", "set_rng_state", "set_rng_state_all"]:
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name, read in (("", DEVICE.used_memory), ("max_", DEVICE.peak_memory)):
        read.restype = ctypes.c_size_t
        for kind in ("allocated", "reserved"):
            setattr(cuda, f"{name}memory_{kind}", lambda *args, read=read: read())
    cuda.reset_peak_memory_stats = lambda *args: DEVICE.reset_peak_memory()
    DEVICE.limit_memory(ctypes.c_size_t(int(os.environ.get("SIMULATED_LIMIT", MEMORY))))
    if FAULT is not None:
        attention.is_flash_attn_4_available = lambda: True
        torch.nn.attention.register_flash_attention_impl("FA4", register_fn=FA4)
    properties = SimpleNamespace(total_memory=MEMORY, major=10, minor=0, name=NAME, multi_processor_count=148)
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.is_bf16_supported = lambda *args, **kwargs: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_name = lambda *args: NAME
    cuda.get_device_capability = lambda *args: (10, 0)
    cuda.get_device_properties = lambda *args: properties
    cuda.mem_get_info = lambda *args: (MEMORY, MEMORY)
    cuda.memory_stats = lambda *args: {}
    cuda.get_rng_state = lambda *args: torch.zeros(16, dtype=torch.uint8)
    cuda.get_rng_state_all = lambda: [cuda.get_rng_state()]
    cuda.Stream = Stream
    cuda.current_stream = cuda.default_stream = lambda *args: Stream()
    cuda.stream = lambda stream: nullcontext()
    torch.Tensor.pin_memory = lambda self, *args: self
    torch.autograd.set_multithreading_enabled(False)  # `Syncs` sees one thread


KERNELS = torch.library.Library("aten", "IMPL")
CALLS: list = []  # of the flash kernels: shapes of queries and keys


@torch.library.impl(KERNELS, "addmm.dtype_out", "CUDA")
def addmm(base, a, b, out_dtype, *, beta=1, alpha=1, out):
    return out.copy_(beta * base + alpha * (a.to(out_dtype) @ b.to(out_dtype)))


def require(condition: bool, text: str) -> None:
    if not condition:
        raise RuntimeError(f"FlashAttention: {text}")


def check_call(q, k, v, cu_q, cu_k, max_q, max_k, causal, window) -> None:
    """What FlashAttention 2 requires of its arguments."""
    require(all(x.dtype == q.dtype for x in (k, v)), f"dtypes differ: {q.dtype}, {k.dtype}, {v.dtype}")
    require(q.dtype in (torch.float16, torch.bfloat16), f"{q.dtype} is not a 16-bit type")
    require(cu_q.dtype == cu_k.dtype == torch.int32, f"boundaries are {cu_q.dtype}, {cu_k.dtype}, not int32")
    require(all(x.is_cuda and x.is_contiguous() for x in (cu_q, cu_k)), "boundaries are not contiguous on the GPU")
    require(all(x.stride(-1) == 1 for x in (q, k, v)), "the last dimension is not contiguous")
    require(q.shape[-1] % 8 == 0 and q.shape[-1] <= 256, f"head size {q.shape[-1]}")
    require(q.shape[1] % k.shape[1] == 0, f"{q.shape[1]} heads of queries, {k.shape[1]} of keys")
    lengths_q = cu_q.cpu().diff()
    lengths_k = cu_k.cpu().diff()
    require(lengths_q.sum() == len(q) and lengths_k.sum() == len(k), "the boundaries do not end with the row")
    require(lengths_q.max() <= max_q and lengths_k.max() <= max_k, "a sequence is longer than its maximum")
    require((lengths_q <= lengths_k).all(), "a sequence has fewer keys than queries")
    require(causal == (window == (-1, 0)), "causal and window differ")


class FA4:
    """What registers FA4; its handle."""

    fault = None  # of the active kernel

    def __init__(self, **_):
        FA4.fault = FAULT

    def remove(self):
        FA4.fault = None


def attend(q, k, v, cu_q, cu_k, scale, window):
    """Attention of CPU tensors written out in fp32, differentiable; a causal mask ends with the keys."""
    groups = q.shape[1] // k.shape[1]
    rows = []
    for n, (start, end) in enumerate(cu_q.unfold(0, 2, 1).tolist()):
        query = q[start:end].float()
        first = max(0, int(cu_k[n]) - (FA4.fault == "leak"))
        key, value = (x[first : cu_k[n + 1]].float().repeat_interleave(groups, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", query, key) * (scale or q.shape[-1] ** -0.5)
        start = 0 if FA4.fault == "mask" else len(key) - len(query)
        distance = torch.arange(start, start + len(query))[:, None] - torch.arange(len(key))
        seen = window[0] + (FA4.fault == "window")
        hidden = distance < 0 if window[0] < 0 else (distance < 0) | (distance > seen)
        rows.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value))
    return torch.cat(rows).to(q.dtype)


def differentiate(gradient, q, k, v, *others):
    inputs = [x.requires_grad_() for x in (q, k, v)]
    d_query, *rest = torch.autograd.grad(attend(*inputs, *others), inputs, gradient)
    return d_query * (1.5 if FA4.fault == "backward" else 1), *rest


KERNEL = ThreadPoolExecutor(1)  # a thread without the modes and dispatch keys of its caller


def on_cpu(call, *args):
    """The result of `call` with copies of CUDA tensors, on the GPU again; the host does not wait for a kernel."""
    copied = [KERNEL.submit(x.detach().cpu).result() if isinstance(x, torch.Tensor) else x for x in args]
    result = KERNEL.submit(call, *copied).result()
    return KERNEL.submit(tree_map_only, torch.Tensor, lambda x: x.detach().cuda(), result).result()


@torch.library.impl(KERNELS, "histc", "CUDA")
def histc(values, bins=100, min=0, max=0):  # the CPU has none for integers
    return on_cpu(lambda x: x.float().histc(bins, min, max).to(x.dtype), values)


for name in ("convolution", "convolution_backward"):  # PyTorch would select cuDNN's or a kernel of its own
    KERNELS.impl(name, partial(on_cpu, getattr(torch.ops.aten, name)), "CUDA")


@torch.library.impl(KERNELS, "_flash_attention_forward", "CUDA")
def flash_forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, **options):
    window = options["window_size_left"], options["window_size_right"]
    KERNEL.submit(check_call, q, k, v, cu_q, cu_k, max_q, max_k, causal, window).result()
    require(FA4.fault != "long" or len(q) < LONG, "too many tokens")
    CALLS.append((tuple(q.shape), tuple(k.shape)))
    output = on_cpu(attend, q, k, v, cu_q, cu_k, options.get("scale"), window)
    logsumexp = torch.zeros(q.shape[1], len(q), device=q.device)
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return output, logsumexp, state, state[0], output.new_zeros(0)


@torch.library.impl(KERNELS, "_flash_attention_backward", "CUDA")
def flash_backward(gradient, q, k, v, output, lse, cu_q, cu_k, max_q, max_k, dropout, causal, *state, **options):
    require(gradient.dtype == q.dtype and gradient.stride(-1) == 1, f"gradient {gradient.dtype} {gradient.stride()}")
    window = options["window_size_left"], options["window_size_right"]
    KERNEL.submit(check_call, q, k, v, cu_q, cu_k, max_q, max_k, causal, window).result()
    return on_cpu(differentiate, gradient, q, k, v, cu_q, cu_k, options.get("scale"), window)


WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "bincount"}


class Syncs(TorchDispatchMode):
    """Counts the operators that wait for the device, by the line of a library or of the package that calls them."""

    def __init__(self):
        super().__init__()
        self.counts: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self._waits(func.overloadpacket.__name__, args, kwargs or {}):
            self.counts[f"{func.overloadpacket.__name__} {caller()}"] += 1
        return func(*args, **(kwargs or {}))

    def _waits(self, name, args, kwargs) -> bool:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if name in ("copy_", "_to_copy") and not tensors[-1].is_cuda:
            to_gpu = tensors[0].is_cuda or torch.device(kwargs.get("device") or "cpu").type == "cuda"
            return to_gpu and not (kwargs.get("non_blocking") or True in args[2:])
        if not any(x.is_cuda for x in tensors):
            return False
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            return any(x is not None and (x.dtype == torch.bool or not x.is_cuda) for x in args[1])
        if name == "repeat_interleave":
            return "output_size" not in kwargs or kwargs["output_size"] is None
        to_cpu = name == "copy_" and not args[0].is_cuda
        to_cpu |= name == "_to_copy" and torch.device(kwargs.get("device") or "cuda").type == "cpu"
        return to_cpu or name in WAITS


def caller() -> str:
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if {"sfm_dpo", "trl", "transformers", "accelerate"} & set(path.parts):
            return f"{path.parent.name}/{path.name}:{frame.lineno}"
    return "elsewhere"
