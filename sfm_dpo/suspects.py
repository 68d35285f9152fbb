"""Why do two runs differ? What is not the same about them, and which of it can have made the difference.

The order of causes is that of a study of two DPO code bases with one configuration that diverged. Confirmed there: a
reference cache made in batches of 4 while training used 1; chosen and rejected in separate forwards; another
implementation of the model (gradient norms 251.35 against 265.74 with identical weights). Ruled out: the order of the
data, batched against varlen FlashAttention (difference 0.0), RoPE frequencies made on CPU or GPU. Before them stands
what the study held fixed: data and configuration.
"""

from typing import Any

from sfm_dpo.run_dir import MAY_DIFFER
from sfm_dpo.run_log import RunLog

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
