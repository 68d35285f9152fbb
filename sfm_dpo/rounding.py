"""Is it rounding or a bug? How far a code path may be from the reference, and what gives a bug away.

Rounding is measured, not guessed, on the reference path (eager, padded) itself. For fp32: the same path once more with
every weight moved by its last bit. For bf16: against fp32. Another correct path does the same operations in another
order, so it is off by about as much; a bug is off by what the wrong tokens are worth, whatever the precision. (fp64
would be the plainer measure of fp32, but models of transformers 5.23 do not run in it: their softmax is fp32, where
fp64's mask of -1.8e308 is -inf, and OLMo 3's fully masked rows NaN.) Hence three rules:

1. A token outside the response that counts, or one inside that does not, is a bug at any size: rounding moves no mask.
2. A difference over FACTOR times the measured rounding of its precision is a bug: of log-probs in the mean, and in the
   maximum; of gradients in the layer that is farthest off.
3. Rounding scales with the precision. Where bf16 is off by over SCALING times fp32's rounding times 2^16 (the ratio of
   their unit roundoffs), the bf16 path has a bug of its own, and cannot be the measure of other bf16 paths.
"""

import math
import re
from typing import Any

import torch

FACTOR = 8.0
SCALING = 32.0
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8}


def rounding_level(reference: Any, rounded: Any) -> dict[str, float]:
    """How far rounding takes the reference path from itself: parity.Measured of the two. Never below one roundoff."""
    level = log_prob_difference(reference.logps, rounded.logps)
    size = torch.cat(reference.logps).abs()
    unit = ROUNDOFF[rounded.variant.dtype]
    level = {"max": max(level["max"], unit * size.max().item()), "mean": max(level["mean"], unit * size.mean().item())}
    if reference.gradients:
        layers = gradient_difference(reference.gradients, rounded.gradients)
        level["gradient"] = max(max(layer["relative"] for layer in layers.values()), unit)
    if reference.after:
        level["after"] = max(log_prob_difference(reference.after, rounded.after)["mean"], level["mean"])
    return level


def log_prob_difference(expected: list[torch.Tensor], got: list[torch.Tensor]) -> dict[str, float]:
    """Over the tokens of all sequences that count in either, in nats per token."""
    a, b = torch.cat(expected), torch.cat(got)
    gap = (a - b).abs()[(a != 0) | (b != 0)]
    return {"max": gap.max().item(), "mean": gap.mean().item()} if len(gap) else {"max": 0.0, "mean": 0.0}


def gradient_difference(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> dict[str, dict]:
    """By layer: norms, cosine, and |got - expected| / |expected|."""
    sums: dict[str, list[float]] = {}
    for name, a in expected.items():
        a, b = a.double(), got[name].double() if name in got else torch.zeros_like(a, dtype=torch.double)
        parts = ((a * a).sum(), (b * b).sum(), (a * b).sum(), ((a - b) ** 2).sum())
        total = sums.setdefault(layer_of(name), [0.0] * 4)
        for i, part in enumerate(parts):
            total[i] += part.item()
    return {
        layer: {
            "norm": math.sqrt(bb),
            "expected_norm": math.sqrt(aa),
            "cosine": ab / math.sqrt(aa * bb) if aa and bb else float(aa == bb),
            "relative": math.sqrt(gap / aa) if aa else float(gap > 0),
        }
        for layer, (aa, bb, ab, gap) in sums.items()
    }


def layer_of(parameter: str) -> str:
    """`layer 3` of model.layers.3.mlp.up_proj.weight; for what stands outside the layers its module's name."""
    number = re.search(r"\.(\d+)\.", parameter)
    return f"layer {number[1]}" if number else parameter.split(".")[-2]


def judge(reference: Any, measured: Any, levels: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Figures and verdict of a variant; `levels` by dtype, from rounding_level."""
    out: dict[str, Any] = {"dtype": measured.variant.dtype, "loss": measured.loss}
    tokens = wrong_tokens(measured.logps, measured.expected)
    if tokens:
        out |= {"verdict": "bug", "why": tokens}
    if [len(row) for row in measured.logps] != [len(row) for row in reference.logps]:
        return out | {"verdict": "bug", "why": tokens or "sequences have other lengths than those of the reference"}
    if not all(torch.isfinite(row).all() for row in (*measured.logps, *measured.after, *measured.gradients.values())):
        return out | {"verdict": "bug", "why": "a log-prob or a gradient is not finite"}
    level = levels[measured.variant.dtype]
    logps = log_prob_difference(reference.logps, measured.logps)
    out |= {"logps": logps}
    times = {"log-probs, mean": logps["mean"] / level["mean"], "log-probs, max": logps["max"] / level["max"]}
    if measured.gradients and reference.gradients:
        layers = gradient_difference(reference.gradients, measured.gradients)
        worst = max(layers, key=lambda name: layers[name]["relative"])
        norms = [math.sqrt(sum(layer[key] ** 2 for layer in layers.values())) for key in ("expected_norm", "norm")]
        out["gradient"] = {
            "norm": norms[1],
            "expected_norm": norms[0],
            "cosine": min(layer["cosine"] for layer in layers.values()),
            "worst": worst,
            "layers": layers,
        }
        times[f"gradient of {worst}"] = layers[worst]["relative"] / level["gradient"]
    if measured.after and reference.after:
        out["after"] = log_prob_difference(reference.after, measured.after)
        times["log-probs after the steps"] = out["after"]["mean"] / level["after"]
    what = max(times, key=times.__getitem__)
    out["times_rounding"] = times[what]
    if tokens:
        return out
    if measured.variant.dtype == "bfloat16":
        expected = levels["float32"]["mean"] * ROUNDOFF["bfloat16"] / ROUNDOFF["float32"]
        if level["mean"] > SCALING * expected:
            why = f"bf16 is off by {level['mean']:.1e} a token where fp32's rounding makes one expect {expected:.1e}"
            return out | {"verdict": "bug", "why": why}
    if times[what] > FACTOR:
        why = f"{what}: {times[what]:,.0f} times rounding" + where(reference, measured, level)
        return out | {"verdict": "bug", "why": why}
    by_layer = out["gradient"]["layers"] if "gradient" in out else {}
    exact = logps["max"] == 0 and all(layer["relative"] == 0 for layer in by_layer.values())
    verdict = "equal" if exact else "rounding"
    return out | {"verdict": verdict, "why": f"at most {times[what]:.1f} times rounding ({what})"}


def wrong_tokens(logps: list[torch.Tensor], expected: list[torch.Tensor]) -> str | None:
    """Rule 1, in words, or None. A log-prob of exactly 0 is a certain token, or one that does not count."""
    if [len(row) for row in logps] != [len(row) for row in expected]:
        return "sequences have other lengths than their token ids"
    counted, meant = torch.cat(logps) != 0, torch.cat(expected)
    extra, missing = int((counted & ~meant).sum()), int((~counted & meant).sum())
    prompts = int((~meant).sum())
    if extra and extra == prompts:
        return f"the prompt's tokens count in the loss ({extra} of {prompts})"
    if extra and missing:
        return f"the mask is off: {extra} tokens outside the response count, {missing} of it do not"
    if extra:
        return f"{extra} tokens outside the response count in the loss: the mask is off"
    # A model may be certain of single tokens; of the same token of most responses it is not
    if missing * 2 >= len(expected):
        return f"{missing} tokens of the responses do not count: the mask is off"
    return None


def where(reference: Any, measured: Any, level: dict[str, float]) -> str:
    """Which sequences are off: with leaking boundaries all but the first of a row."""
    gaps = [(a - b).abs() for a, b in zip(reference.logps, measured.logps, strict=True)]
    gaps = [gap[meant] for gap, meant in zip(gaps, measured.expected, strict=True) if meant.any()]
    off = [gap.mean().item() > FACTOR / 2 * level["mean"] or gap.max().item() > FACTOR * level["max"] for gap in gaps]
    first_is_right = not off[0] and gaps[0].mean().item() < 2 * level["mean"]
    if measured.variant.attention == "packed" and first_is_right and sum(off) > len(off[1:]) / 2:
        return f"; the first sequence of the row is right, {sum(off)} of {len(off) - 1} later ones are not: boundaries"
    return f"; {sum(off)} of {len(off)} sequences are off" if any(off) else ""
