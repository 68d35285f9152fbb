"""How fast? Model FLOPs by formula, tokens and pairs a second, MFU.

FLOPs counted are the useful ones, for real tokens only: 2 for each weight a token is multiplied with, 4 x head size x
heads for each (query, key) pair that attention lets see each other, in the window of the layer; the LM head for
response tokens; three times the forward for a training step (forward and backward). Padding, recomputation under
gradient checkpointing and the optimizer are not counted; a reference forward in the step is counted once more.
"""

import resource
import time
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, TrainerCallback

from sfm_dpo.sharding import ATTENTION, numel, shape

# Dense bf16 peak in FLOP/s, without sparsity, from the vendors' data sheets.
PEAK_FLOPS = {
    "B300": 2.25e15,
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}


def peak_flops(gpu_name: str) -> float | None:
    """Peak by GPU name as torch.cuda.get_device_name gives it; None where it is not known."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in gpu_name), None)


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of one forward, by the model's shape.

    Attributes:
        per_token: in the layers' matrices.
        per_response_token: in the LM head.
        attention: for each kind of layer (window or None, FLOPs for a visible (query, key) pair over these layers).
    """

    per_token: int
    per_response_token: int
    attention: tuple[tuple[int | None, int], ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ForwardFlops":
        """Counts the weights that a token meets (of a mixture of experts: the active ones)."""
        config = model.config.get_text_config()
        embeddings = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
        weights = 0
        for name, parameter in model.named_parameters():
            if id(parameter) in embeddings or len(shape(parameter)) < 2:
                continue
            share = config.num_experts_per_tok / config.num_experts if ".experts." in name else 1
            weights += int(numel(parameter) * share)
        head = model.get_output_embeddings().weight
        return cls(2 * weights, 2 * numel(head), _attention(config))

    @classmethod
    def of_config(cls, config: PretrainedConfig) -> "ForwardFlops":
        """The same from the configuration alone: the model is built without memory for its weights."""
        with torch.device("meta"):
            return cls.of(AutoModelForCausalLM.from_config(config))

    def __call__(self, lengths: torch.Tensor, response_tokens: int) -> int:
        """FLOPs of a forward over sequences of these lengths, [n] real tokens each."""
        total = self.per_token * int(lengths.sum()) + self.per_response_token * response_tokens
        n = lengths.double()
        for window, flops in self.attention:
            inside = n.clamp(max=window) if window is not None else n
            visible = inside * (inside + 1) / 2 + (n - inside) * inside  # causal pairs within the window
            total += int(flops * visible.sum())
        return total


def _attention(config: PretrainedConfig) -> tuple[tuple[int | None, int], ...]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    flops = 4 * head_dim * config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    kinds = [kind for kind in kinds if kind in ATTENTION]  # of linear attention the projections alone count
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    return tuple((window, flops * windows.count(window)) for window in dict.fromkeys(windows))


@dataclass
class Meter:
    """Counts the work of this rank between two logs."""

    forward_flops: ForwardFlops
    reference_in_step: bool
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("pairs", "tokens", "grid", "flops"), 0.0))
    seconds: float = 0.0
    mark: float = field(default_factory=time.monotonic)

    def add(self, attention_mask: torch.Tensor, completion_mask: torch.Tensor, packed: bool) -> None:
        """A micro-batch: masks are [2B, L]."""
        lengths = attention_mask.sum(dim=1).cpu()
        tokens = int(lengths.sum())
        self.counts["pairs"] += len(lengths) // 2
        self.counts["tokens"] += tokens
        self.counts["grid"] += tokens if packed else attention_mask.numel()
        passes = 4 if self.reference_in_step else 3
        self.counts["flops"] += passes * self.forward_flops(lengths, int(completion_mask.sum()))

    def skip(self) -> None:
        """Leaves out the time since the last step's end: evaluation, saving."""
        self.mark = time.monotonic()

    def step_ended(self) -> None:
        now = time.monotonic()
        self.seconds, self.mark = self.seconds + now - self.mark, now

    def metrics(self, totals: dict[str, float], world_size: int) -> dict[str, float]:
        """perf/* from the counts summed over ranks, and a fresh start."""
        seconds, self.seconds = max(self.seconds, 1e-9), 0.0
        self.counts = dict.fromkeys(self.counts, 0.0)
        out = {
            "perf/tokens_per_second": totals["tokens"] / seconds,
            "perf/pairs_per_second": totals["pairs"] / seconds,
            "perf/padding_fraction": 1 - totals["tokens"] / max(totals["grid"], 1),
            "perf/peak_memory_gib": peak_memory_gib(),
        }
        peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
        if peak is not None:
            out["perf/mfu"] = totals["flops"] / seconds / (peak * world_size)
        return out


def peak_memory_gib() -> float:
    """Peak of this process: allocated on the GPU, or resident on a machine without one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


class MeterCallback(TrainerCallback):
    """Tells the meter when a step ended, and what time was not training."""

    def __init__(self, meter: Meter):
        self.meter = meter

    def on_step_end(self, *args, **kwargs) -> None:
        self.meter.step_ended()

    def on_train_begin(self, *args, **kwargs) -> None:
        self.meter.skip()

    on_evaluate = on_save = on_train_begin
