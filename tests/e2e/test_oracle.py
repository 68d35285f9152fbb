"""Training against an outside oracle: plain PyTorch, one sequence at a time, float64, without the package's code.

Loss, gradients (by the weights that SGD leaves), logged metrics and held-out metrics, over launchers, samplers,
padded and packed, cached and live reference, the policy's own or another, losses: each launcher with each of these
once, not with each combination of them. With a tail that is left out, a ragged evaluation, and results of tools in
every third pair. Only the token ids and the rows of each step are the package's (tests/data shows both).
"""

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sfm_dpo.config.fields import parse_config
from sfm_dpo.data.sampler import order_pairs
from sfm_dpo.data.tokenization import load_token_pairs, load_tokenizer
from tests.e2e.runs import Place, make_place
from tests.oracle import trained_logps
from tests.toolbox import as_options, logged, pairs, with_tool

MAX_LENGTH = 96
STEPS = 2
RATE = 0.01
FIELDS = {
    "optim": "sgd",
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "weight_decay": 0,
    "max_grad_norm": 1e9,
    "max_steps": STEPS,
    "eval_fraction": 0.27,  # 11 of 41 pairs: a ragged batch on two ranks; of the other 30 pairs 6 are a tail
}
LOSSES = {"sigmoid_norm": 5.0, "sigmoid": 0.1, "ipo": 0.1, "hinge": 0.1, "apo_zero": 0.1, "bco_pair": 0.1}
LOSSES |= {"sigmoid_norm sft": 5.0}
SFT_WEIGHT = 0.3
PATHS = {
    "padded, live": {"padding_free": "false", "precompute_ref_log_probs": "false"},
    "packed, cached": {"padding_free": "true", "prefix_sharing": "false", "precompute_ref_log_probs": "true"},
    "packed, live": {"padding_free": "true", "prefix_sharing": "false", "precompute_ref_log_probs": "false"},
    "shared, cached": {"padding_free": "true", "prefix_sharing": "true", "precompute_ref_log_probs": "true"},
    "shared, live": {"padding_free": "true", "prefix_sharing": "true", "precompute_ref_log_probs": "false"},
}
OTHER = [f"{path}, other" for path in PATHS if not path.startswith("packed")]  # another model as the reference
SAMPLERS = ["batch_rebalance", "random"]
Combination = tuple[str, str, str]  # loss, path, sampler
# Logged metrics, weights at the end, source and row of each held-out pair with its metrics, lines of steps.jsonl
Expected = tuple[list[dict[str, float]], dict[str, torch.Tensor], list, list]
FEW: list[Combination] = [
    ("sigmoid_norm", "packed, cached", "batch_rebalance"),
    ("sigmoid", "padded, live", "random"),
    ("sigmoid_norm", "shared, live", "random"),
    ("sigmoid_norm", "shared, cached, other", "batch_rebalance"),
    ("sigmoid_norm sft", "shared, cached", "random"),
]


def cover(launch: int) -> list[Combination]:
    """Each loss, path and sampler, every launch with other samplers for its paths. Against another reference ipo has
    pairs that are nearly ties."""
    losses = [*LOSSES]
    return [(losses[i - 1], path, SAMPLERS[(i + launch) % 2]) for i, path in enumerate([*PATHS, *OTHER])]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    rows = pairs(41)
    for i, row in enumerate(rows[::3]):
        for side in ("chosen", "rejected"):  # the longest results are cut by MAX_LENGTH
            result = f"{side} " * (1 + 2 * (i % 5))
            row[side] = with_tool(side[:5], result, row[side][:9], "tool" if i % 2 else "environment")
    return make_place(tmp_path_factory.mktemp("oracle"), rows, {"olmo3": {}, "llama": {}}, FIELDS)


@pytest.fixture(scope="module")
def expect(place) -> Callable[..., Expected]:
    """The oracle's result, computed once for all paths and launchers: only loss, order and reference may change it."""
    return functools.cache(lambda *given: oracle(place, settings(place, *given)))


LAUNCHES = enumerate(("single", "cpu 2", "cpu_zero3 2", "cpu_fsdp2 2", "cpu_offload 2"))
GRID = [pytest.param(launch, cover(number), marks=pytest.mark.grid) for number, launch in LAUNCHES]


@pytest.mark.parametrize(("launch", "combinations"), [("single", FEW), *GRID])
def test_against_plain_pytorch(place, expect, launch, combinations):
    """Prints the largest difference of each combination: `-s` shows the table."""
    runs = {}
    for loss, path, sampler in combinations:
        name = f"{launch}, {len(combinations)}, {loss}, {path}, {sampler}"
        runs[name] = settings(place, loss, sampler, path in OTHER) | PATHS[path.removesuffix(", other")]
    folders = place.run_many(launch, runs)
    for (loss, path, sampler), (name, folder) in zip(combinations, folders.items(), strict=True):
        expected, weights, margins, steps = expect(loss, sampler, path in OTHER)
        worst = 0.0
        for entry, metrics in zip(logged(folder) + logged(folder, "eval_loss"), expected, strict=True):
            for metric, value in metrics.items():
                error = abs(entry[metric] - value) / max(1.0, abs(value))
                worst = max(worst, error)
                assert error < 2e-4, f"{name}, step {entry['step']}: {metric} is {entry[metric]}, not {value}"
        assert read_lines(folder / "steps.jsonl")[:STEPS] == steps
        for line, (origin, metrics) in zip(read_lines(folder / f"margins/eval-{STEPS}.jsonl"), margins, strict=True):
            assert (line.pop("source"), line.pop("row")) == origin
            expected_metrics = {name: metrics[name] for name in ("logps/chosen", "logps/rejected", "rewards/margins")}
            assert line == pytest.approx(expected_metrics, rel=2e-4, abs=2e-4)
        saved = load_file(folder / "model.safetensors")
        drift = max((saved[key].double() - weight).abs().max().item() for key, weight in weights.items())
        assert drift < 2e-5, f"{name}: weights differ by {drift}"
        print(f"{name}: metrics {worst:.1e}, weights {drift:.1e}")


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def settings(place: Place, loss: str, sampler: str, other: bool) -> dict[str, Any]:
    """The fields on which the result depends."""
    reference = {"ref_model_name_or_path": place.folder / "llama"} if other else {}
    weights = {"loss_weights": [1.0, SFT_WEIGHT]} if "sft" in loss else {}
    return {"loss_type": loss.split(), "beta": LOSSES[loss], "train_sampling_strategy": sampler} | weights | reference


def oracle(place: Place, fields: dict[str, Any]) -> Expected:
    """Metrics of each training step, then of the two held-out evaluations; the weights at the end; and the lines."""
    config = parse_config(as_options(place.values("nowhere", per_device_train_batch_size=2, **fields)), world_size=1)
    split = load_token_pairs(config, load_tokenizer(config))
    steps = order_pairs(split.train, config.train).steps(0)[:STEPS]
    policy = AutoModelForCausalLM.from_pretrained(place.model, dtype=torch.float64)
    reference = copy.deepcopy(policy)
    if folder := fields.get("ref_model_name_or_path"):
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    loss_type = " ".join(fields["loss_type"])
    beta = fields["beta"]
    held_out = list(split.held_out()["eval"])
    before = measure(policy, reference, held_out, loss_type, beta)[1]
    expected = []
    for rows in steps:
        loss, metrics = measure(policy, reference, [split.train[int(i)] for i in rows], loss_type, beta)
        policy.zero_grad()
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in policy.parameters()]).norm().item()
        expected.append(metrics | {"loss": loss.item(), "grad_norm": norm})
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter -= RATE * parameter.grad
    after = measure(policy, reference, held_out, loss_type, beta)[1]
    alone = [measure(policy, reference, [row], loss_type, beta)[1] for row in held_out]
    margins = [((row["source"], row["row"]), metrics) for row, metrics in zip(held_out, alone, strict=True)]
    source = str(place.folder / "pairs.jsonl")
    trained = [{"step": number, "rows": {source: split.train[rows]["row"]}} for number, rows in enumerate(steps, 1)]
    for metrics in (before, after):
        expected.append({f"eval_{name}": value for name, value in metrics.items()})
    return expected, {name: p.detach() for name, p in policy.named_parameters()}, margins, trained


def measure(policy, reference, rows: list[dict], loss_type: str, beta: float) -> tuple[torch.Tensor, dict[str, float]]:
    """Mean loss of pairs, and the metrics that are logged of them."""
    losses = []
    metrics = []
    chosen_logps = []
    for row in rows:
        sums = []
        gains = []
        lengths = []
        for side in ("chosen", "rejected"):
            own = trained_logps(policy, row, side, MAX_LENGTH)
            with torch.no_grad():
                base = trained_logps(reference, row, side, MAX_LENGTH)
            sums.append(own.sum())
            gains.append((own - base).sum())
            lengths.append(len(own))
            if side == "chosen":
                chosen_logps.append(own)
        scale = lengths if loss_type.startswith(("sigmoid_norm", "ipo")) else [1, 1]
        chosen, rejected = (gain / n for gain, n in zip(gains, scale, strict=True))
        losses.append(loss_of(loss_type, beta, chosen, rejected))
        c = beta * chosen.item()
        r = beta * rejected.item()
        likely = [(s / n).item() for s, n in zip(sums, scale, strict=True)]
        metrics.append(
            {
                "rewards/chosen": c,
                "rewards/rejected": r,
                "rewards/margins": c - r,
                "rewards/average": (c + r) / 2,
                "rewards/accuracies": 0.5 if abs(c - r) <= 1e-4 else float(c > r),
                "logps/chosen": sums[0].item(),
                "logps/rejected": sums[1].item(),
                "logps/accuracies": float(likely[0] > likely[1]),
            }
        )
    means = {name: float(np.mean([f[name] for f in metrics])) for name in metrics[0]}
    loss = torch.stack(losses).mean()
    if "sft" in loss_type:
        loss = loss - SFT_WEIGHT * torch.cat(chosen_logps).mean()  # over all tokens of the global batch
    return loss, means | {"loss": loss.item()}


def loss_of(loss_type: str, beta: float, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """The papers' formulas, for sigmoid_norm open-instruct's; chosen and rejected are log-ratios, means over tokens
    for sigmoid_norm and ipo."""
    margin = chosen - rejected
    return {
        "sigmoid_norm": -F.logsigmoid(beta * margin),
        "sigmoid": -F.logsigmoid(beta * margin),
        "ipo": (margin - 1 / (2 * beta)) ** 2,
        "hinge": torch.relu(1 - beta * margin),
        "apo_zero": 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected),
        "bco_pair": -F.logsigmoid(beta * chosen) - F.logsigmoid(-beta * rejected),
    }[loss_type.split()[0]]
