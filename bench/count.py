#!/usr/bin/env python
"""Time of an optimizer step by part, counted from FLOPs, bytes and assumed rates; no GPU is needed or measured.

A count is optimistic: its MFU of 42 to 56% on B200 is above every bf16 figure published for B200 (PUBLISHED).

    python bench/count.py recipes/think.yaml --gpu b200 --num_gpus 4 --shape gpt_neox_6.9b --lengths dolci_think
    ... --flash_attention fa4                    with another kernel
    ... --torch_compile true                     and any other field of train_dpo.py

`--shape` and `--lengths` name files of bench/shapes; without them the recipe's model and data are read.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import sfm_dpo

sfm_dpo.setup()

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sfm_dpo.common.cli import Arguments, command, number
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import PROJECT, format_table
from sfm_dpo.config.effects import short_run
from sfm_dpo.config.fields import parse_config
from sfm_dpo.data.lengths import Lengths
from sfm_dpo.data.tokenization import load_token_pairs, load_tokenizer
from sfm_dpo.memory.activations import TRACED_TOKENS, build_backbone, count_kinds, run_backbone
from sfm_dpo.model.flops import ForwardFlops, peak_flops
from sfm_dpo.model.loading import load_model_config
from sfm_dpo.planning.run_plan import Planner, read_lengths


@dataclass(frozen=True)
class Rates:
    """Per second and GPU. Memory and links: NVIDIA's data sheets, of which BANDWIDTH is reached."""

    memory: float  # bytes
    link: float  # bytes to the other GPUs of the node, in one direction
    attention: dict[str, tuple[float, float]]  # FLOPs of forward and backward


# FA2 on B200: flash-attention #1589; FA4: #2150, causal, 8k, head size 128; FA2 and FA3 on H100: their papers
RATES = {
    "B200": Rates(8.0e12, 900e9, {"fa2": (350e12, 330e12), "fa4": (1388e12, 1081e12)}),
    "H200": Rates(4.8e12, 450e9, {"fa2": (350e12, 320e12), "fa3": (640e12, 550e12)}),
    "H100": Rates(3.35e12, 450e9, {"fa2": (350e12, 320e12), "fa3": (640e12, 550e12)}),
}
# MFU of training in bf16 on 8 B200: prime-rl, 4B, 16k; torchao, 8B, power-limited. 7B on 4 H200: KempnerForge. DPO of
# 7B on 32 H100: open-instruct #1827, ZeRO-3 and OLMo-core, both packed
PUBLISHED = "16% and 19% on B200, 54% on H200; of DPO, 3% and 9% on H100"
PRODUCTS = 0.72  # share of the dense bf16 peak that large matrix products reach (assumed)
BANDWIDTH = 0.8  # share of the data sheet's bandwidth (assumed)
FUSED = {"gpt_neox": 0.66}  # bytes of a compiled layer over those of an eager one (docs/memory-and-speed.md)
FUSED_OLMO = 0.19
# Of a weight in a micro-batch: written, copied, reduced, flattened, added in fp32 (DeepSpeed 0.19)
GRADIENT_BYTES = 16
UPDATE_BYTES = 30  # of a rank's weight in a step: gradient, norm, weight and moments read and written, 16-bit copy
WAITS = 5  # of the host in a micro-batch: TRL selects tokens by masks (tests/gpu)
STEP_WAITS = 5  # of the host in a step with a log: stop file, loss, norm, number of FLOPs, metrics (tests/gpu)
WAIT = 3e-4  # seconds until the GPU is busy again (assumed)


class ByteCounter(TorchDispatchMode):
    """Bytes that operators read and write beside matrix products and attention."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        counts = func.namespace == "aten" and not func.is_view
        if counts and func.overloadpacket.__name__ not in ("mm", "bmm", "addmm", "_unsafe_view", "empty_like"):
            leaves = tree_leaves((args, kwargs, output))
            self.total += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        return output


def elementwise_bytes(config) -> tuple[float, float]:
    """Bytes for each token that eager layers move in forward and backward: of one layer, times their number."""
    kind = next(iter(count_kinds(config)))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build_backbone(config, torch.bfloat16, [kind])
        with ByteCounter() as forward:
            output = run_backbone(model, TRACED_TOKENS)
        with ByteCounter() as backward:
            output.sum().backward()
    layers = config.num_hidden_layers
    return layers * forward.total / TRACED_TOKENS, layers * backward.total / TRACED_TOKENS


def count_step(planner: Planner, flash: str) -> dict[str, float]:
    """Seconds of each part of an optimizer step under ZeRO-2, and of the reference pass over all pairs."""
    gpu = planner.gpu
    rates = RATES[gpu]
    memory = BANDWIDTH * rates.memory
    products = PRODUCTS * (peak_flops(gpu) or math.nan)
    choice = planner.plan_launch("zero2")["choice"]
    flops = ForwardFlops.of(planner.memory.model)
    pairs = planner.args.global_batch_size / planner.gpus
    micro_batches = pairs / choice["per_device"]
    tokens = pairs * float(planner.lengths.computed(planner.memory.prefix_sharing).mean())
    responses = pairs * float(planner.lengths.responses.mean())
    share = pairs / len(planner.lengths) / planner.epochs
    training = share * planner.count_flops()["training"] / 3  # one forward
    linear = flops.per_token * tokens
    head = flops.per_response_token * responses
    attention = training - linear - head
    forward_bytes, backward_bytes = elementwise_bytes(planner.memory.model_config)
    if planner.args.torch_compile:
        fused = FUSED.get(planner.memory.model_config.model_type, FUSED_OLMO)
        forward_bytes *= fused
        backward_bytes *= fused
    forward_rate, backward_rate = rates.attention[flash]
    forward = linear / products + attention / forward_rate + forward_bytes * tokens / memory
    recomputed = choice["checkpointed_layers"] / choice["layers"]
    backward = 2 * linear / products + 2.5 * attention / backward_rate + backward_bytes * tokens / memory
    weights = planner.memory.trained
    gpus = planner.gpus
    sent = 2 * weights * (gpus - 1) / gpus / (BANDWIDTH * rates.link)  # 16-bit weights once; gradients twice as much
    parts = {
        "matrix products": 3 * linear / products,
        "attention": attention / forward_rate + 2.5 * attention / backward_rate,
        "elementwise": (forward_bytes + backward_bytes) * tokens / memory,
        "LM head": 4 * head / products,  # forward, again in the backward, two gradients
        "recomputed layers": recomputed * forward,
        "gradients": micro_batches
        * (GRADIENT_BYTES * weights / memory + max(0.0, 2 * sent - backward / micro_batches)),
        "waits of the host": (micro_batches * WAITS + STEP_WAITS) * WAIT,
        "optimizer": UPDATE_BYTES * weights / gpus / memory + sent,
    }
    cached = planner.args.precompute_ref_log_probs
    passes = len(planner.lengths) / planner.args.global_batch_size if cached else 0.0
    parts["reference pass"] = passes * (forward + head / products)
    return parts


@command
def main(argv: list[str]) -> None:
    parser = Arguments(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--gpu", choices=[name.lower() for name in RATES], default="b200")
    parser.add_argument("--num_gpus", type=number(int, 1), default=4)
    parser.add_argument("--shape", help="a folder of bench/shapes")
    parser.add_argument("--lengths", choices=["dolci_think", "dolci_instruct"])
    parser.add_argument("--flash_attention", choices=["fa2", "fa3", "fa4"], default="fa2")
    ours, fields = parser.parse_known_args(argv)
    gpu = ours.gpu.upper()
    if ours.flash_attention not in RATES[gpu].attention:
        raise UserError(f"--flash_attention {ours.flash_attention}: no rate is known for {gpu}; choose another one")
    if ours.shape:
        fields += ["--model_name_or_path", str(PROJECT / "bench/shapes" / ours.shape)]
    options = short_run(["--config", ours.recipe, *fields], eval_fraction=None)
    config = parse_config(options, world_size=ours.num_gpus, training=False)
    if ours.lengths:
        lengths = read_lengths(PROJECT / f"bench/shapes/{ours.lengths}_lengths.json")
    else:
        lengths = Lengths.of(load_token_pairs(config, load_tokenizer(config)).train)
    planner = Planner(config, load_model_config(config), lengths, gpu, ours.num_gpus)
    parts = count_step(planner, ours.flash_attention)
    reference = parts.pop("reference pass")
    step = sum(parts.values())
    peak = (peak_flops(gpu) or math.nan) * ours.num_gpus
    mfu = planner.count_flops()["training"] / (planner.steps * step * peak)
    run_hours = (planner.steps * step + reference) / 3600
    rows = [(name, f"{seconds:.2f}", f"{seconds / step:.0%}") for name, seconds in parts.items()]
    print(f"{ours.recipe} on {ours.num_gpus} {gpu}, {ours.flash_attention}: counted with assumed rates, not measured")
    print(format_table([*rows, ("step", f"{step:.2f}", "100%")], ["part", "seconds", "share"], "lrr"))
    print(f"MFU of the steps {mfu:.0%}; published: {PUBLISHED}")
    print(f"{run_hours:.1f} hours, {reference / 3600:.1f} of them for the reference pass")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
