"""Comparison of two runs: every common metric step by step, what else differs between them, and the likeliest cause.

docs/reproducibility.md explains the tolerance and the order of the suspects.
"""

from bisect import bisect_left
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.tables import format_table
from sfm_dpo.run.folder import MAY_DIFFER
from sfm_dpo.run.reader import RunLog

# Shown first, in this order; the others follow by name
_FIRST = """train/loss rewards/margins rewards/chosen rewards/rejected logps/chosen logps/rejected grad_norm entropy
    learning_rate""".split()
_OF_THE_STEP = ("learning_rate", "num_tokens", "eval/")  # other logged values are means since the last logged step


def compare_runs(a: RunLog, b: RunLog, tolerance: float | None = None, until: int | None = None) -> dict[str, Any]:
    """Everything about the two, as plain types: metrics, verdict, suspects, what differs.

    Raises:
        UserError: fewer than two common steps, no common metric, or a value that is not finite.
    """
    a_log, b_log, note = align_steps(a, b, until)
    names = [{name for values in log.values() for name in values} for log in (a_log, b_log)]
    if not names[0] & names[1]:
        first = [", ".join(sorted(logged)[:4]) for logged in names]
        raise UserError(f"{a.name} and {b.name}: no metric in common: {first[0]} against {first[1]}")
    sixteen_bit = any(run.config.get(key) for run in (a, b) for key in ("bf16", "fp16"))
    tolerance = tolerance or (5e-2 if sixteen_bit else 1e-3)
    rows, series = [], {}
    for name in sorted(names[0] & names[1], key=lambda n: (_FIRST.index(n) if n in _FIRST else 99, n)):
        if steps := [step for step in a_log if name in a_log[step] and name in b_log[step]]:
            x, y = (np.array([log[step][name] for step in steps]) for log in (a_log, b_log))
            if not (finite := np.isfinite(x) & np.isfinite(y)).all():
                i = int(finite.argmin())
                remedy = f"compare the steps before it with --until {steps[i - 1]}" if i > 1 else "no steps before it"
                raise UserError(f"{name} at step {steps[i]}: {x[i]} in A, {y[i]} in B; {remedy}")
            rows.append(compare_metric(name, steps, x, y, tolerance))
            series[name] = {"steps": steps, "a": x.tolist(), "b": y.tolist()}
    differences = find_differences(a, b)
    identical = not any(row["absolute"] for row in rows)
    step, metric = min(((r["beyond"], r["metric"]) for r in rows if r["beyond"] is not None), default=(None, None))
    verdict = "identical" if identical else "within noise" if step is None else "diverging"
    return {
        "runs": {"a": f"{a.name} ({a.kind})", "b": f"{b.name} ({b.kind})"},
        "common_steps": [min(a_log), max(a_log), len(a_log)],
        "note": note,
        "tolerance": tolerance,
        "metrics": rows,
        "verdict": {"verdict": verdict, "step": step, "metric": metric},
        "suspects": [] if identical else rank_suspects(rows, min(a_log), differences),
        "differences": differences,
        "series": series,
    }


def align_steps(a: RunLog, b: RunLog, until: int | None = None) -> tuple[dict, dict, str]:
    """The two logs at their common steps, and a line about what was averaged.

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
    aligned, notes = [], []
    for run, log in zip((a, b), logs, strict=True):
        intervals: dict[int, dict[str, list[float]]] = {step: defaultdict(list) for step in common}
        log = {step: values for step, values in log.items() if step <= common[-1]}
        for step, values in log.items():
            for name, value in values.items():
                intervals[common[bisect_left(common, step)]][name].append(value)
        aligned.append(
            {
                step: {
                    name: v[-1] if name.startswith(_OF_THE_STEP) else sum(v) / len(v) for name, v in metrics.items()
                }
                for step, metrics in intervals.items()
            }
        )
        if len(log) > len(common):
            notes.append(f"{run.name} logged more often: its values are averaged over the other's intervals")
    return aligned[0], aligned[1], "; ".join(notes)


def compare_metric(name: str, steps: list[int], x: np.ndarray, y: np.ndarray, tolerance: float) -> dict[str, Any]:
    """Of two series [n] at the same steps: the largest difference, `absolute` and `relative` to the larger value;
    `first` step with a difference of any size, and `beyond`, with one beyond the tolerance, or None; `at_start`, the
    difference at the first step in units of the scale.

    The scale is the larger value of a step, but at least the metric's median size, and for the loss and the rewards
    at least 1: they are in nats of the loss, whose gradient they bend by that much. Metrics that do not `decide` are
    never beyond: shares of pairs jump by whole pairs where a margin crosses 0; learning rate and number of tokens are
    causes, not effects.
    """
    gap = np.abs(x - y)
    larger = np.maximum(np.abs(x), np.abs(y))
    scale = np.maximum(larger, np.median(larger))
    if name.endswith("loss") or "rewards/" in name:
        scale = np.maximum(scale, 1.0)
    decides = not any(part in name for part in ("accurac", "learning_rate", "num_tokens"))

    def first_step(condition: np.ndarray) -> int | None:
        return steps[int(np.argmax(condition))] if condition.any() else None

    return {
        "metric": name,
        "absolute": float(gap.max()),
        "relative": float(np.divide(gap, larger, out=np.zeros_like(gap), where=larger > 0).max()),
        "first": first_step(gap > 0),
        "beyond": first_step((gap > tolerance * scale) & decides),
        "decides": decides,
        "at_start": float(gap[0] / scale[0]) if scale[0] else 0.0,
    }


# ---- what else differs

_NO_EFFECT = MAY_DIFFER - {"gradient_accumulation_steps"} | {"logging_dir", "eval_strategy", "eval_steps"}
# datasets' own fingerprint also changes with the path of a file; the hash of the tokens says it better
_DATA_FACTS = ("sources", "rows", "train", "eval", "train_tokens", "order")
_ENVIRONMENT_FACTS = ("git_commit", "cuda", "gpus", "world_size")


def find_differences(a: RunLog, b: RunLog) -> dict[str, Any]:
    """{topic: {name: (in A, in B)}}, or a sentence where a topic cannot be compared or is the same."""
    differences: dict[str, Any] = {}
    topics: dict[str, list[dict]] = {"configuration": [], "environment": [], "data": [], "reference cache": []}
    for run in (a, b):
        versions = {f"versions.{name}": version for name, version in run.environment.get("versions", {}).items()}
        topics["configuration"].append({k: v for k, v in run.config.items() if k not in _NO_EFFECT})
        topics["environment"].append(versions | {k: v for k, v in run.environment.items() if k in _ENVIRONMENT_FACTS})
        topics["data"].append({k: v for k, v in run.data.items() if k in _DATA_FACTS})
        topics["reference cache"].append(_select_reference_facts(run.data))
    for topic, (x, y) in topics.items():
        if x and y:
            # A run of another code base has other fields than ours: only common ones can differ
            differences[topic] = {k: (x[k], y[k]) for k in x if k in y and x[k] != y[k]} or "the same"
        else:
            unknown = " and ".join(run.name for run, facts in ((a, x), (b, y)) if not facts)
            differences[topic] = f"not compared: {unknown} does not say"
    return differences


def _select_reference_facts(data: dict[str, Any]) -> dict[str, Any]:
    """Of the training split's cache; that there is none is a fact too."""
    if "reference" not in data:
        return {}
    facts = dict(data["reference"].get("train", {"key": "no cache: computed with every batch"}))
    if made := facts.get("made"):
        words = (f"batches of up to {m['batch_tokens']:,} tokens on {m['device']}" if m else "unknown" for m in made)
        facts["made"] = ", ".join(words)
    return facts


# ---- suspects

# What of step 1 can differ, where the policy still is the base model
_PATTERNS = {
    "forward": "logps differ at step 1, before any update",
    "reference": "at step 1 the policy's logps are equal and the loss is not",
    "backward": "at step 1 logps and loss are equal and the gradient norm is not",
    "update": "step 1 is equal, later ones are not",
}
# A smaller difference of loss or gradient at step 1 contradicts nothing: the mean of logps over a batch (hundreds of
# nats, in fp32) hides what these still show.
RESOLUTION = 1e-5
_LOSSES = ("train/loss", "rewards/chosen", "rewards/rejected", "rewards/margins")


class Cause(NamedTuple):
    """Why two runs may differ.

    `fields` of the configuration (what no cause has is the objective's); `patterns` of step 1 that it can make, of
    which the first alone points to it and other ones contradict it.
    """

    fields: str
    patterns: tuple[str, ...]
    explanation: str


_CAUSES = {  # in the study's order
    "data": Cause("", (), "other pairs, or another order"),
    "objective": Cause("", (), ""),
    "reference log-probs": Cause(
        "precompute_ref_log_probs precompute_ref_batch_size ref_model_mixup_alpha sync_ref_model",
        ("reference",),
        "made in another way than the policy's forward",
    ),
    "forward": Cause(
        "per_device_train_batch_size gradient_accumulation_steps train_sampling_strategy",
        ("forward", "backward"),
        "another batch shape, or chosen and rejected in separate forwards",
    ),
    "model implementation": Cause(
        """padding_free prefix_sharing flash_attention attn_implementation torch_compile torch_compile_backend
        torch_compile_mode bf16 fp16 tf32 dtype torch_dtype use_liger_kernel gradient_checkpointing
        gradient_checkpointing_kwargs bf16_full_eval fp16_full_eval full_determinism use_cpu model_init_kwargs
        deepspeed fsdp fsdp_config _attn_implementation transformers_version""",
        ("backward", "forward"),
        "other code, attention, precision or versions",
    ),
    "optimisation": Cause(
        """learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio weight_decay max_grad_norm
        num_train_epochs max_steps optim optim_args adam_beta1 adam_beta2 adam_epsilon""",
        ("update",),
        "",
    ),
}
# Facts of a reference cache that follow from the run's own attention path and precision
_CACHE_FOLLOWS = {"key", "dtype", "autocast", "attention", "packed", "prefix_sharing", "compilation"}


def rank_suspects(rows: list[dict], first_step: int, differences: dict[str, Any]) -> list[dict[str, str]]:
    """[{cause, why}] in the study's order; what is known to differ before what only may, what step 1 contradicts last.

    `rows` from compare_metric, of every metric; `first_step`, the first common one; from find_differences the rest.
    """
    config, data, reference, environment = (
        facts if isinstance(facts := differences[topic], dict) else {}
        for topic in ("configuration", "data", "reference cache", "environment")
    )
    known: dict[str, dict[str, Any]] = {name: {} for name in _CAUSES} | {"data": dict(data)}
    causes = {field: name for name, cause in _CAUSES.items() for field in cause.fields.split()}
    for key, values in config.items():
        known[causes.get(key, "objective")][key] = values
    # Another batch size alone explains how the shards were made
    follows = _CACHE_FOLLOWS | ({"made"} if "per_device_train_batch_size" in config else set())
    known["reference log-probs"] |= {k: v for k, v in reference.items() if k not in follows}
    known["model implementation"] |= environment
    for name, metric in (("data", "num_tokens"), ("optimisation", "learning_rate")):  # of runs that are logs alone
        if not known[name] and any(row["metric"] == metric and row["absolute"] for row in rows):
            known[name] = {f"logged {metric}": ("one value", "another")}

    pattern = find_first_step_pattern(rows) if first_step == 1 else None
    ranked = []
    for name, cause in _CAUSES.items():
        points_to_it = pattern in cause.patterns[:1]
        contradicted = bool(pattern and cause.patterns) and pattern not in cause.patterns
        if known[name] or points_to_it:
            facts = [f"{key} {_shorten(x)} against {_shorten(y)}" for key, (x, y) in known[name].items()]
            parts = [*facts[:4], f"and {len(facts) - 4} more" if len(facts) > 4 else "", cause.explanation]
            if pattern and (points_to_it or contradicted):
                parts.append(("but " if contradicted else "") + _PATTERNS[pattern])
            suspect = {"cause": name, "why": "; ".join(filter(None, parts))}
            ranked.append((contradicted, not known[name], suspect))
    if not ranked:
        why = "nothing that is known of the two differs; run scripts/parity.py, and log step 1 (logging_first_step)"
        return [{"cause": "unknown", "why": why}]
    return [suspect for *_, suspect in sorted(ranked, key=lambda entry: entry[:2])]


def find_first_step_pattern(rows: list[dict]) -> str | None:
    """Which part of step 1 differs first: forward, reference, backward, or only the update after it.

    None where logps were not logged, or where there are only differences of loss and gradient below RESOLUTION.
    """
    start = defaultdict(float, {row["metric"]: row["at_start"] for row in rows})
    if "logps/chosen" not in start:
        return None
    if start["logps/chosen"] or start["logps/rejected"]:
        return "forward"
    loss, gradient = max(start[name] for name in _LOSSES), start["grad_norm"]
    if max(loss, gradient) > RESOLUTION:
        return "reference" if loss else "backward"
    equal = not any(gap for name, gap in start.items() if name not in ("learning_rate", "num_tokens"))
    return "update" if equal else None


# ---- for a terminal


def format_comparison(result: dict[str, Any]) -> str:
    """The table, what differs, the verdict and the suspects."""
    low, high, count = result["common_steps"]
    lines = [f"A  {result['runs']['a']}", f"B  {result['runs']['b']}"]
    lines.append(f"{count} common steps, {low} to {high}; tolerance {result['tolerance']:g}")
    lines += [*filter(None, [result["note"]]), ""]
    table = []
    for row in result["metrics"]:
        first, beyond = ("-" if row[key] is None else f"step {row[key]}" for key in ("first", "beyond"))
        sizes = [f"{row['absolute']:.2e}", f"{row['relative']:.2e}"]
        table.append([row["metric"], *sizes, first, beyond if row["decides"] else "does not decide"])
    headings = ["metric", "max abs diff", "max rel diff", "differs from", "beyond tolerance"]
    lines += [format_table(table, headings, align="lrrrl", indent=0), ""]
    for topic, entries in result["differences"].items():
        if isinstance(entries, str):
            lines.append(f"{topic}: {entries}")
        else:
            lines += [f"{topic}: {name}  A {_shorten(x)}  B {_shorten(y)}" for name, (x, y) in entries.items()]
    verdict, step, metric = (result["verdict"][key] for key in ("verdict", "step", "metric"))
    if verdict == "identical":
        verdict = "identical, bit by bit, in every common metric"
    elif verdict == "within noise":
        verdict = f"equal within noise (tolerance {result['tolerance']:g})"
    else:
        series = result["series"][metric]
        a, b = (series[run][series["steps"].index(step)] for run in ("a", "b"))
        verdict = (
            f"diverging from step {step} ({metric}: {a:.6g} in A, {b:.6g} in B; tolerance {result['tolerance']:g})"
        )
    lines += ["", f"verdict: {verdict}"]
    for i, suspect in enumerate(result["suspects"]):
        lines.append(f"{'then' if i else 'first suspect'}: {suspect['cause']}: {suspect['why']}")
    return "\n".join(lines)


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
