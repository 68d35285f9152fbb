"""The preflight: judges by the base model's log-probs and the tokens, before the first step, whether DPO can work.

If the base model finds the chosen answers nearly impossible, DPO's loss still falls, but only because the rejected
answers become impossible, too.
"""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from datasets import Dataset
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from sfm_dpo.common.distributed import broadcast, gather_values, is_main_process, rank, world_size
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


class Scorer(Protocol):
    """What the preflight needs of the base model (train/base_model.py)."""

    def score(self, dataset: Dataset, rows: Sequence[int]) -> torch.Tensor: ...
    def unwrapped(self) -> PreTrainedModel: ...
    def eos_ids(self) -> set[int]: ...


def compute_base_logps(base: Scorer, tokens: Dataset, rows: np.ndarray, size: int) -> np.ndarray:
    """[len(rows), 2] sums of log-probs (nats), computed in batches of `size`; all ranks get the same result."""
    padded = np.resize(rows, math.ceil(len(rows) / world_size()) * world_size())  # all ranks need as many forwards
    mine = padded[rank() :: world_size()].tolist()
    sums: list[list[float]] = []
    for start in range(0, len(mine), size):
        sums += base.score(tokens, mine[start : start + size]).float().tolist()
    by_row = dict(pair for of_rank in gather_values(list(zip(mine, sums, strict=True))) for pair in of_rank)
    return np.array([by_row[row] for row in rows.tolist()])


def inspect_model(base: Scorer, tokens: Dataset, rows: list[dict], max_length: int | None) -> dict[str, Figure]:
    """The figures about the tokens of the training set (`rows`: a sample of it) and the model's configuration."""
    figures = inspect_tokens(rows, Lengths.of(tokens), base.eos_ids(), max_length)
    unseen = [any(not kind.endswith(HISTORY) for kind in kinds.split()) for kinds in tokens["ignored"][:]]
    figures["rope_layers"] = exact(count_wrong_rope_layers(base.unwrapped().config.get_text_config()))
    figures["control_tokens"] = exact(float(np.mean(tokens["control_tokens"][:])))
    figures["ignored"] = exact(float(np.mean(unseen)))
    return figures


def run_preflight(
    base: Scorer, config: Config, tokens: Dataset, tokenizer: PreTrainedTokenizerBase, size: int
) -> dict[str, Any]:
    """The content of preflight.json, the same on all ranks. With a reference cache it judges all pairs and computes
    none; otherwise it computes a sample, in batches of `size` pairs."""
    args = config.train
    sample = np.sort(np.random.default_rng(args.seed).permutation(len(tokens))[: args.preflight_samples])
    rows = list(tokens.select(sample))
    names = ["ref_chosen_logps", "ref_rejected_logps"]
    if names[0] in tokens.column_names and not args.ref_model_name_or_path:
        judged = np.arange(len(tokens))
        columns = tokens.select_columns(names).with_format("numpy")[:]
        logps = np.stack([columns[name] for name in names], axis=1).astype(np.float64)
    else:
        judged = sample
        logps = compute_base_logps(base, tokens, sample, size)
    responses = np.maximum(count_trained(tokens, args.max_length), 1)[judged]
    figures = compute_pair_figures(logps, responses) | inspect_model(base, tokens, rows, args.max_length)
    verdict, findings = judge_base_model(figures, main_loss(args.loss_type))
    for finding in findings:
        if finding["rule"] == "ignored":
            finding["what"] = "; ".join(describe_ignored(tokens).values())
    reasons = [format_finding(finding) for finding in findings]

    interval = "{:+.2f} ({:+.2f} to {:+.2f}) nats"
    response = rows[0]["chosen_ids"]
    boundary = [tokenizer.decode(ids) for ids in (rows[0]["prompt_ids"][-12:], response[:12], response[-6:])]
    table = [
        ("pairs judged", f"{len(judged):,} of {len(tokens):,}; means with 95% intervals"),
        ("chosen, per token", interval.format(*figures["chosen_logp"])),
        ("gap, per token", interval.format(*figures["token_gap"])),
        ("gap, sum", interval.format(*figures["sum_gap"])),
        ("boundary", "...{!r} | {!r} ... {!r}".format(*boundary)),
    ]
    result = {"verdict": verdict, "reasons": reasons, "pairs": len(judged), "figures": figures}
    return broadcast(result | {"findings": findings, "table": table})


def preflight(base: Scorer, config: Config, tokens: Dataset, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
    """Judges the base model as `run_preflight`, logs it and writes preflight.json. Raises PreflightRefused."""
    result = run_preflight(base, config, tokens, tokenizer, size)
    reasons = [f"  {reason}" for reason in result["reasons"]]
    log.info("\n".join([f"preflight: {result['verdict']}", format_table(result["table"]), *reasons]))
    if is_main_process():
        write_json(Path(config.train.output_dir) / PREFLIGHT, result)
    if result["verdict"] == "no-go" and config.train.preflight == "abort":
        worst = next(reason for reason in result["reasons"] if reason.startswith("no-go"))
        raise PreflightRefused(f"preflight: {worst}; nothing was trained; to train regardless: preflight: warn")
