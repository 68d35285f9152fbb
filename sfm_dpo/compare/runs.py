"""Do two runs agree? Metric by metric and step by step, what differs between them, and the first suspect."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sfm_dpo.common.errors import UserError
from sfm_dpo.health.guard_rules import STEP_0_TOLERANCE
from sfm_dpo.run.folder import MAY_DIFFER
from sfm_dpo.run.reader import RunLog

# Fields that change how the same arithmetic is done, not what is computed
_FORWARD = {"per_device_train_batch_size", "gradient_accumulation_steps", "train_sampling_strategy"}
_MODEL = set(
    """padding_free attn_implementation torch_compile torch_compile_backend torch_compile_mode bf16 fp16 tf32 dtype
    torch_dtype use_liger_kernel gradient_checkpointing gradient_checkpointing_kwargs bf16_full_eval fp16_full_eval
    full_determinism use_cpu model_init_kwargs deepspeed fsdp fsdp_config _attn_implementation
    transformers_version""".split()
)
# Act from the first update on, so step 1 cannot show them
_UPDATE = set(
    """learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio weight_decay max_grad_norm
    num_train_epochs max_steps optim optim_args adam_beta1 adam_beta2 adam_epsilon""".split()
)
# Up to it a difference of loss and gradient at step 1 contradicts nothing: the mean of logps over a batch (hundreds of
# nats, in fp32) hides what these still show.
RESOLUTION = 1e-5
_REFERENCE = {"precompute_ref_log_probs", "precompute_ref_batch_size", "ref_model_mixup_alpha", "sync_ref_model"}
# What of a reference cache follows from the run's own attention path and precision
_FOLLOWS = {"key", "dtype", "autocast", "attention", "packed", "compilation"}
_NO_EFFECT = MAY_DIFFER - {"gradient_accumulation_steps"} | {"logging_dir", "eval_strategy", "eval_steps"}
_TIMES = {"starts", "command", "slurm", "cpus", "wandb_run_id", "git_dirty"}


def differences(a: RunLog, b: RunLog) -> dict[str, Any]:
    """{topic: {name: (in A, in B)}}, or a sentence where a topic cannot be compared or is the same."""
    found: dict[str, Any] = {}
    topics = {
        "configuration": ({k: v for k, v in a.config.items()}, {k: v for k, v in b.config.items()}, _NO_EFFECT),
        "environment": (_flat(a.environment), _flat(b.environment), set()),
        "data": (_data(a.data), _data(b.data), set()),
        "reference cache": (_reference(a), _reference(b), set()),
    }
    for topic, (x, y, ignored) in topics.items():
        if not x or not y:
            without = " and ".join(run.name for run, facts in ((a, x), (b, y)) if not facts)
            found[topic] = f"not compared: {without} does not say"
            continue
        # A run of another code base has fields that ours lacks, and the other way round: only common ones can differ
        names = [name for name in x if name in y and name not in ignored and x[name] != y[name]]
        found[topic] = {name: (x[name], y[name]) for name in names} or "the same"
    if found["data"] == "the same":
        order = "order" in a.data and "order" in b.data
        found["data"] = "same pairs, same order" if order else "the same as far as both say"
    return found


def find_suspects(rows: list, first_step: int, found: dict[str, Any]) -> list[dict[str, str]]:
    """Causes in the study's order; those that step 1 contradicts come last.

    Args:
        rows: compare.Difference of every metric.
        first_step: the first common one. At step 1 the policy still is the base model, so what differs there tells
            the forward (logps), the reference (loss, rewards) and the backward (gradient norm) apart.
        found: from `differences`.
    """
    config, data, reference, environment = (
        _only(found[topic]) for topic in ("configuration", "data", "reference cache", "environment")
    )
    pattern = first_step_pattern(rows, RESOLUTION) if first_step == 1 else None
    forward, model, cached, update = (_pick(config, names) for names in (_FORWARD, _MODEL, _REFERENCE, _UPDATE))
    objective = {k: v for k, v in config.items() if k not in _FORWARD | _MODEL | _REFERENCE | _UPDATE}
    model |= {k: v for k, v in environment.items() if k.startswith(("versions", "gpus", "cuda", "git", "world_size"))}
    own_batch = "per_device_train_batch_size" in forward  # then each made its cache with the batch it trained with
    cached |= {k: v for k, v in reference.items() if k not in _FOLLOWS and not (k == "made" and own_batch)}
    if not update and any(row.metric == "learning_rate" and row.absolute for row in rows):
        update = {"learning_rate": ("as logged", "another")}
    if not data and any(row.metric == "num_tokens" and row.first == first_step for row in rows):
        data = {"num_tokens": ("at the first step", "another number")}

    # (cause, what is known to differ, what it can be, patterns of step 1 that contradict it)
    candidates = [
        ("data", data, "other pairs, or another order", ()),
        ("objective", objective, "", ()),
        (
            "reference log-probs",
            cached,
            "made in another way than the policy's forward",
            ("forward", "backward", "update"),
        ),
        (
            "forward",
            forward,
            "another batch shape, or chosen and rejected in separate forwards",
            ("reference", "update"),
        ),
        ("model implementation", model, "other code, attention, precision or versions", ("reference", "update")),
        ("optimisation", update, "", ("forward", "reference", "backward")),
    ]
    known = any(facts for _, facts, *_ in candidates)
    if first_step == 1 and pattern in (None, "update") and not known:
        pattern = first_step_pattern(rows, 0.0)  # last bits are weak evidence, and all there is
    causes = {"forward": "forward", "reference": "reference log-probs", "backward": "model implementation"}
    meant = causes.get(pattern or "", "optimisation" if pattern else None)
    ranked = []
    for place, (cause, facts, why, contradicted_by) in enumerate(candidates):
        if facts or cause == meant:
            contradicted = pattern in contradicted_by
            # What is known to differ goes before what only may
            ranked.append((contradicted, not facts, place, _suspect(cause, facts, why, pattern, meant, contradicted)))
    if not ranked:
        why = "nothing that is known of the two differs; run scripts/parity.py, and log step 1 (logging_first_step)"
        return [{"cause": "unknown", "why": why}]
    return [suspect for *_, suspect in sorted(ranked, key=lambda entry: entry[:3])]


def first_step_pattern(rows: list, resolution: float) -> str | None:
    """Which part of step 1 differs first: forward, reference, backward, or only the update after it.

    Differences of loss and gradient up to `resolution` of their scale count as none; None where only such are found.
    """

    def differs(*names: str, above: float = resolution) -> bool | None:
        chosen = [row.at_start > above for row in rows if row.metric in names]
        return any(chosen) if chosen else None

    policy = differs("logps/chosen", "logps/rejected", above=0.0)
    losses = ("train/loss", "rewards/chosen", "rewards/rejected", "rewards/margins")
    loss = differs(*losses)
    gradient = differs("grad_norm")
    if policy is None:
        return None
    if policy:
        return "forward"
    if loss or (gradient and differs(*losses, above=0.0)):
        return "reference"
    if gradient:
        return "backward"
    if loss is None or any(row.at_start for row in rows if row.metric not in ("learning_rate", "num_tokens")):
        return None
    return "update"


_PATTERNS = {
    "forward": "logps differ at step 1, before any update",
    "reference": "at step 1 the policy's logps are equal and the loss is not",
    "backward": "at step 1 logps and loss are equal and the gradient norm is not",
    "update": "step 1 is equal, later ones are not",
}


def _suspect(
    cause: str, facts: dict[str, Any], why: str, pattern: str | None, meant: str | None, contradicted: bool
) -> dict[str, str]:
    named = "; ".join(f"{name} {_brief(x)} against {_brief(y)}" for name, (x, y) in list(facts.items())[:4])
    named += f" and {len(facts) - 4} more" if len(facts) > 4 else ""
    seen = _PATTERNS.get(pattern or "", "") if contradicted or cause == meant else ""
    if contradicted:
        seen = f"but {seen}"
    return {"cause": cause, "why": "; ".join(part for part in (named, why, seen) if part)}


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 48 else text[:45] + "..."


def _only(entries: Any) -> dict[str, Any]:
    return entries if isinstance(entries, dict) else {}


def _pick(config: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: pair for name, pair in config.items() if name in names}


def _flat(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if key in _TIMES:
            continue
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _data(data: dict[str, Any]) -> dict[str, Any]:
    # datasets' own fingerprint also changes with the path of a file; the hash of the tokens says it better
    names = ("sources", "rows", "train", "eval", "train_tokens", "order")
    return {name: data[name] for name in names if name in data}


def _reference(run: RunLog) -> dict[str, Any]:
    """Facts of the training split's cache; that there is none is a fact too."""
    if "reference" not in run.data:
        return {}
    facts = dict(run.data["reference"].get("train", {"key": "no cache: computed with every batch"}))
    made = facts.pop("made", [])
    if made:
        facts["made"] = ", ".join(
            f"batches of up to {m['batch_size']} pairs on {m['device']}" if m else "not said" for m in made
        )
    return facts


# Shown first, in this order; the others follow by name.
_FIRST = "train/loss rewards/margins rewards/chosen rewards/rejected logps/chosen logps/rejected".split()
_FIRST += "grad_norm entropy learning_rate".split()


@dataclass
class Difference:
    """Of one metric over the common steps. `relative` is |a - b| / max(|a|, |b|), at the step where it is largest.

    `beyond` is the first step at which the difference exceeds the tolerance; None also where `decides` is false.
    """

    metric: str
    absolute: float
    relative: float
    first: int | None  # step of the first difference of any size
    beyond: int | None
    decides: bool
    at_start: float  # at the first common step, in units of the metric's scale (see metric_difference)


def compare(a: RunLog, b: RunLog, tolerance: float | None = None, until: int | None = None) -> dict[str, Any]:
    """Everything about the two, as plain types: metrics, verdict, suspects, what differs.

    Raises:
        UserError: fewer than two common steps, no common metric, or a value that is no finite number.
    """
    a_log, b_log, note = align(a, b, until)
    names = {name for values in a_log.values() for name in values}
    names &= {name for values in b_log.values() for name in values}
    if not names:
        raise UserError(f"{a.name} and {b.name}: no metric in common: {_some(a_log)} against {_some(b_log)}")
    sixteen_bit = any(run.config.get(key) for run in (a, b) for key in ("bf16", "fp16"))
    tolerance = tolerance or STEP_0_TOLERANCE["16-bit" if sixteen_bit else "32-bit"]
    rows, series = [], {}
    for name in sorted(names, key=lambda n: (_FIRST.index(n) if n in _FIRST else 99, n)):
        steps = [step for step in a_log if name in a_log[step] and name in b_log.get(step, {})]
        if steps:
            x, y = (np.array([log[step][name] for step in steps]) for log in (a_log, b_log))
            _must_be_finite(name, steps, (a, x), (b, y))
            rows.append(metric_difference(name, steps, x, y, tolerance))
            series[name] = {"steps": steps, "a": x.tolist(), "b": y.tolist()}
    differing = differences(a, b)
    suspects = find_suspects(rows, min(a_log), differing) if any(row.absolute for row in rows) else []
    return {
        "runs": {"a": f"{a.name} ({a.kind})", "b": f"{b.name} ({b.kind})"},
        "common_steps": [min(a_log), max(a_log), len(a_log)],
        "note": note,
        "tolerance": tolerance,
        "metrics": [asdict(row) for row in rows],
        "verdict": verdict(rows),
        "suspects": suspects,
        "differences": differing,
        "series": series,
    }


def align(a: RunLog, b: RunLog, until: int | None = None) -> tuple[dict, dict, str]:
    """The two logs at their common steps, and a line that says what was done to them.

    A logged value is the mean since the last logged step, so where one run logged more often, its values are averaged
    over the other's intervals.
    """
    logs = [{step: values for step, values in run.steps.items() if until is None or step <= until} for run in (a, b)]
    common = sorted(set(logs[0]) & set(logs[1]))
    if len(common) < 2:
        spans = [f"{min(log)} to {max(log)}" if log else "none" for log in logs]
        raise UserError(
            f"{a.name} and {b.name}: {len(common)} logged step(s) in common (steps {spans[0]} against {spans[1]}); "
            "a comparison needs 2: set logging_steps: 1 and train further"
        )
    notes, out = [], []
    for run, log in zip((a, b), logs, strict=True):
        within = [step for step in log if step <= common[-1]]
        if len(within) > len(common) and any("train/loss" in log[step] for step in set(within) - set(common)):
            notes.append(f"{run.name} logged more often: its values are averaged over the other's intervals")
            edges = [0, *common]
            log = {
                stop: _mean([log[step] for step in within if start < step <= stop])
                for start, stop in zip(edges, common, strict=False)
            }
        out.append({step: log[step] for step in common})
    return out[0], out[1], "; ".join(notes)


def metric_difference(name: str, steps: list[int], x: np.ndarray, y: np.ndarray, tolerance: float) -> Difference:
    """Of two series [n] at the same steps.

    The tolerance is relative to the larger value of a step, but at least to the metric's median size, and for the
    loss and the rewards at least to 1: they are in nats of the loss, whose gradient they bend by that much. Shares of
    pairs jump by whole pairs where a margin crosses 0, and learning rate and number of tokens are causes, not
    effects: they do not decide.
    """
    gap = np.abs(x - y)
    larger = np.maximum(np.abs(x), np.abs(y))
    relative = np.divide(gap, larger, out=np.zeros_like(gap), where=larger > 0)
    scale = np.maximum(larger, np.median(larger))
    if name.endswith("loss") or "rewards/" in name:
        scale = np.maximum(scale, 1.0)
    decides = not any(part in name for part in ("accurac", "learning_rate", "num_tokens"))
    beyond = np.flatnonzero((gap > tolerance * scale) & decides)
    first = np.flatnonzero(gap)
    return Difference(
        name,
        float(gap.max()),
        float(relative.max()),
        steps[first[0]] if len(first) else None,
        steps[beyond[0]] if len(beyond) else None,
        decides,
        float(gap[0] / scale[0]) if scale[0] else 0.0,
    )


def verdict(rows: list[Difference]) -> dict[str, Any]:
    """`identical`, `within noise`, or `diverging` with the step and the metric that left the tolerance first."""
    if not any(row.absolute for row in rows):
        return {"verdict": "identical", "step": None, "metric": None}
    out = [(row.beyond, row.metric) for row in rows if row.beyond is not None]
    if not out:
        return {"verdict": "within noise", "step": None, "metric": None}
    step, metric = min(out, key=lambda entry: entry[0])
    return {"verdict": "diverging", "step": step, "metric": metric}


def as_text(result: dict[str, Any]) -> str:
    """The table, what differs, the verdict and the suspects, for a terminal."""
    low, high, count = result["common_steps"]
    lines = [f"A  {result['runs']['a']}", f"B  {result['runs']['b']}"]
    lines.append(f"{count} common steps, {low} to {high}; tolerance {result['tolerance']:g}")
    lines += [result["note"]] * bool(result["note"])
    width = max(len(row["metric"]) for row in result["metrics"])
    lines += [
        "",
        f"{'metric':<{width}}  {'max abs diff':>12}  {'max rel diff':>12}  {'differs from':>12}  beyond tolerance",
    ]
    for row in result["metrics"]:
        first = "-" if row["first"] is None else f"step {row['first']}"
        beyond = "-" if row["beyond"] is None else f"step {row['beyond']}"
        beyond = beyond if row["decides"] else "does not decide"
        lines.append(
            f"{row['metric']:<{width}}  {row['absolute']:>12.2e}  {row['relative']:>12.2e}  {first:>12}  {beyond}"
        )
    lines.append("")
    for topic, entries in result["differences"].items():
        if isinstance(entries, str):
            lines.append(f"{topic}: {entries}")
        for name, (x, y) in entries.items() if isinstance(entries, dict) else ():
            lines.append(f"{topic}: {name}  A {_short(x)}  B {_short(y)}")
    lines += ["", f"verdict: {sentence(result)}"]
    for i, suspect in enumerate(result["suspects"]):
        lines.append(f"{'first suspect' if i == 0 else 'then'}: {suspect['cause']}: {suspect['why']}")
    return "\n".join(lines)


def sentence(result: dict[str, Any]) -> str:
    found = result["verdict"]
    if found["verdict"] == "identical":
        return "identical, bit by bit, in every common metric"
    if found["verdict"] == "within noise":
        return f"equal within noise (tolerance {result['tolerance']:g})"
    series = result["series"][found["metric"]]
    at = series["steps"].index(found["step"])
    return (
        f"diverging from step {found['step']} ({found['metric']}: {series['a'][at]:.6g} in A, {series['b'][at]:.6g} "
        f"in B; tolerance {result['tolerance']:g})"
    )


def _must_be_finite(name: str, steps: list[int], *runs: tuple[RunLog, np.ndarray]) -> None:
    for run, values in runs:
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            step = steps[bad[0]]
            remedy = f"compare the steps before it with --until {steps[bad[0] - 1]}" if bad[0] > 1 else "mend that run"
            raise UserError(f"{run.name}: {name} is {values[bad[0]]} at step {step}; {remedy}")


def _mean(entries: list[dict[str, float]]) -> dict[str, float]:
    names = {name for entry in entries for name in entry}
    # The learning rate is that of the step, not a mean
    return {
        name: entries[-1].get(name, math.nan)
        if name == "learning_rate"
        else float(np.mean([entry[name] for entry in entries if name in entry]))
        for name in names
    }


def _some(log: dict[int, dict[str, float]]) -> str:
    return ", ".join(sorted({name for values in log.values() for name in values})[:4])


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
