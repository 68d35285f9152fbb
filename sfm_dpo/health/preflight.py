"""The preflight: judges by the base model's log-probs and the tokens, before the first step, whether DPO can work.

If the base model finds the chosen answers nearly impossible, DPO's loss still falls, but only because the rejected
answers become impossible, too.
"""

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from sfm_dpo.common.distributed import broadcast, is_main_process
from sfm_dpo.common.errors import PreflightRefused
from sfm_dpo.common.files import format_table, write_json
from sfm_dpo.config.checks import main_loss
from sfm_dpo.config.fields import Config
from sfm_dpo.data.lengths import Lengths, count_trained
from sfm_dpo.data.pairs import HISTORY, describe_ignored
from sfm_dpo.health.preflight_rules import Figure, compute_pair_figures, exact, format_finding, judge_base_model
from sfm_dpo.run.folder import PREFLIGHT

log = logging.getLogger(__name__)


def inspect_tokens(rows: list[dict], lengths: Lengths, eos: set[int], max_length: int | None) -> dict[str, Figure]:
    """Shares of responses without any of `eos` (in the sample `rows`), and of truncated ones (in all `lengths`)."""
    endless = []
    for row in rows:
        for side in ("chosen", "rejected"):
            if max_length is None or row["prompt_length"] + row[f"{side}_length"] <= max_length:
                endless.append(eos.isdisjoint(row[f"{side}_ids"][-4:]))
    cut = float((lengths.truncate(max_length).responses < lengths.responses).mean())
    return {"no_eos": exact(float(np.mean(endless)) if endless else 0.0), "cut": exact(cut)}


def count_wrong_rope_layers(config: PretrainedConfig) -> int:
    """Kinds of layer of an OLMo 3 that have the wrong RoPE scaling; 0 for other models.

    Full attention is YaRN-scaled if the context is longer than the 8,192 tokens of pretraining; sliding attention is
    never scaled. Flat `rope_parameters` lose the scaling, and nothing else shows it.
    """
    if config.model_type != "olmo3":
        return 0
    parameters = config.rope_parameters or {}
    sliding = parameters.get("sliding_attention") or {}
    full = parameters.get("full_attention") or {}
    is_lost = config.max_position_embeddings > 8192 and full.get("rope_type") != "yarn"
    return is_lost + (sliding.get("rope_type", "default") != "default")


def compute_base_logps(trainer, policy, rows: np.ndarray) -> np.ndarray:
    """[len(rows), 2] sums of log-probs (nats) under `policy`, a FrozenModel; all ranks get the same result."""
    ranks = trainer.accelerator.num_processes
    padded = np.resize(rows, math.ceil(len(rows) / ranks) * ranks)  # every rank needs the same number of forwards
    mine = padded[trainer.accelerator.process_index :: ranks].tolist()
    size = trainer.settings.micro_batch
    sums: list[list[float]] = []
    for start in range(0, len(mine), size):
        sums += policy.score(trainer.train_dataset, mine[start : start + size]).float().tolist()
    by_row = dict(gather_object(list(zip(mine, sums, strict=True))))
    return np.array([by_row[row] for row in rows.tolist()])


def score_pairs(trainer, policy, sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pairs to judge [N] and their log-probs [N, 2] (float64 sums in nats) under the base model: all pairs from
    the reference cache, or those of `sample` computed here."""
    dataset = trainer.train_dataset
    if "ref_chosen_logps" not in dataset.column_names or trainer.args.ref_model_name_or_path:
        return sample, compute_base_logps(trainer, policy, sample)
    names = ["ref_chosen_logps", "ref_rejected_logps"]
    columns = dataset.select_columns(names).with_format("numpy")[:]
    return np.arange(len(dataset)), np.stack([columns[name] for name in names], axis=1).astype(np.float64)


def inspect_model(trainer, rows: list[dict]) -> dict[str, Figure]:
    """The figures about the tokens of the training set (`rows`: a sample of it) and the model's configuration."""
    dataset = trainer.train_dataset
    model = trainer.accelerator.unwrap_model(trainer.model)
    of_model = model.generation_config.eos_token_id if model.can_generate() else None
    eos = {trainer.processing_class.eos_token_id, *(of_model if isinstance(of_model, list) else [of_model])}
    figures = inspect_tokens(rows, Lengths.of(dataset), eos, trainer.args.max_length)
    unseen = [any(not kind.endswith(HISTORY) for kind in kinds.split()) for kinds in dataset["ignored"][:]]
    figures["rope_layers"] = exact(count_wrong_rope_layers(model.config.get_text_config()))
    figures["control_tokens"] = exact(float(np.mean(dataset["control_tokens"][:])))
    figures["ignored"] = exact(float(np.mean(unseen)))
    return figures


def run_preflight(trainer, policy, config: Config) -> dict[str, Any]:
    """The content of preflight.json, the same on all ranks. `policy`: the base model as a FrozenModel (train/).

    With a reference cache it judges all pairs and computes none.
    """
    args = config.train
    dataset = trainer.train_dataset
    loss_type = main_loss(args.loss_type)
    sample = np.sort(np.random.default_rng(args.seed).permutation(len(dataset))[: args.preflight_samples])
    rows = list(dataset.select(sample))

    judged, logps = score_pairs(trainer, policy, sample)
    responses = np.maximum(count_trained(dataset, args.max_length), 1)[judged]
    figures = compute_pair_figures(logps, responses) | inspect_model(trainer, rows)
    verdict, findings = judge_base_model(figures, loss_type)
    for finding in findings:
        if finding["rule"] == "ignored":
            finding["what"] = "; ".join(describe_ignored(dataset).values())
    reasons = [format_finding(finding) for finding in findings]

    interval = "{:+.2f} ({:+.2f} to {:+.2f}) nats"
    table = [
        ("pairs judged", f"{len(judged):,} of {len(dataset):,}; means with 95% intervals"),
        ("chosen, per token", interval.format(*figures["chosen_logp"])),
        ("gap, per token", interval.format(*figures["token_gap"])),
        ("gap, sum", interval.format(*figures["sum_gap"])),
        ("boundary", show_boundary(rows[0], trainer.processing_class)),
    ]
    result = {"verdict": verdict, "reasons": reasons, "pairs": len(judged), "figures": figures}
    return broadcast(result | {"findings": findings, "table": table})


def show_boundary(row: dict, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text around the boundary of prompt and chosen response, and the response's end."""
    response = row["chosen_ids"]
    parts = [tokenizer.decode(ids) for ids in (row["prompt_ids"][-12:], response[:12], response[-6:])]
    return "...{!r} | {!r} ... {!r}".format(*parts)


def preflight_phase(trainer, policy, config: Config) -> None:
    """Runs the preflight, logs it and writes preflight.json. Raises PreflightRefused."""
    result = run_preflight(trainer, policy, config)
    reasons = [f"  {reason}" for reason in result["reasons"]]
    log.info("\n".join([f"preflight: {result['verdict']}", format_table(result["table"]), *reasons]))
    if is_main_process():
        write_json(Path(config.train.output_dir) / PREFLIGHT, result)
    if result["verdict"] == "no-go" and config.train.preflight == "abort":
        worst = next(reason for reason in result["reasons"] if reason.startswith("no-go"))
        raise PreflightRefused(f"preflight: {worst}; nothing was trained; to train regardless: preflight: warn")
