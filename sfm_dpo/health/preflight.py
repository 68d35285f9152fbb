"""The preflight: judges by the base model's log-probs and the tokens, before the first step, whether DPO can work.

If the base model finds the chosen answers nearly impossible, DPO's loss still falls, but only because the rejected
answers become impossible, too.
"""

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch.nn.functional import avg_pool1d
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from sfm_dpo.common.distributed import broadcast, is_main_process
from sfm_dpo.common.errors import PreflightRefused
from sfm_dpo.common.files import format_table, write_json
from sfm_dpo.common.statistics import LOGP_NOISE
from sfm_dpo.config import Config
from sfm_dpo.config_checks import main_loss
from sfm_dpo.data.answers import compare_sides, find_traits, tabulate_sides
from sfm_dpo.data.lengths import Lengths, count_trained
from sfm_dpo.health.preflight_rules import MOVE, compute_pair_figures, format_finding, judge_base_model
from sfm_dpo.run.files import PREFLIGHT

log = logging.getLogger(__name__)

WINDOW = 16  # tokens


def inspect_tokens(rows: list[dict], lengths: Lengths, eos: set[int], max_length: int | None) -> dict[str, float]:
    """Shares of responses without any of `eos` (in the sample `rows`), and of truncated ones (in all `lengths`)."""
    endless = []
    for row in rows:
        for side in ("chosen", "rejected"):
            if max_length is None or row["prompt_length"] + row[f"{side}_length"] <= max_length:
                endless.append(eos.isdisjoint(row[f"{side}_ids"][-4:]))
    cut = float((lengths.truncate(max_length).responses < lengths.responses).mean())
    return {"no_eos": float(np.mean(endless)) if endless else 0.0, "cut": cut}


def list_eos(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids that end a response, from the tokenizer and the model's generation config."""
    of_model = model.generation_config.eos_token_id if model.can_generate() else None
    return {tokenizer.eos_token_id, *(of_model if isinstance(of_model, list) else [of_model])}


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
    size = trainer.args.per_device_train_batch_size
    sums: list[list[float]] = []
    for start in range(0, len(mine), size):
        sums += policy.score(trainer.train_dataset, mine[start : start + size]).float().tolist()
    by_row = dict(gather_object(list(zip(mine, sums, strict=True))))
    return np.array([by_row[row] for row in rows.tolist()])


@torch.no_grad()
def compute_packed_difference(trainer, policy, rows: np.ndarray) -> float:
    """Largest difference between log-probs computed in one packed row and sequence by sequence, relative to its
    tolerance. Differences are averaged over WINDOW tokens, because a leaked key affects only an answer's first tokens.

    `rows`: pairs of the training set. The two sides of one pair are enough to reveal a leak between sequences.
    """
    model = policy.model
    batch = trainer.load_batch(trainer.train_dataset, rows)
    outputs = []

    def forward(**kwargs: Any) -> Any:
        outputs.append(model(**kwargs))
        return outputs[-1]

    trainer.compute_ref_log_probs(forward, batch)
    differences = []
    inputs = zip(
        batch["input_ids"], batch["attention_mask"], batch["completion_mask"], outputs[0].log_probs, strict=True
    )
    for padded_ids, mask, padded_completion, packed in inputs:
        ids = padded_ids[mask.bool()]
        completion = padded_completion[mask.bool()].bool()
        # A plain forward: transformers' own attention, one sequence in the row, not compiled
        with trainer.accelerator.autocast(), torch.compiler.set_stance("force_eager"):
            output = model(input_ids=ids[None], attention_mask=torch.ones_like(ids[None]), use_cache=False)
            logits = output.logits[0, :-1]
        logps = torch.log_softmax(logits.float(), dim=-1).gather(1, ids[1:, None])[:, 0][completion[1:]]
        gaps = (packed[padded_completion[1:].bool()] - logps).abs()
        differences.append(avg_pool1d(gaps[None], min(WINDOW, len(gaps)), stride=1).max().item())
    return max(differences) / (5 * LOGP_NOISE[trainer.accelerator.mixed_precision])


def run_preflight(trainer, policy, config: Config) -> dict[str, Any]:
    """The content of preflight.json, and `text` for the log; the same on all ranks. `policy`: the base model as a
    FrozenModel (train/).

    With a reference cache it judges all pairs and computes only one, to compare packed with single sequences.
    """
    args = config.train
    dataset = trainer.train_dataset
    tokenizer = trainer.processing_class
    loss_type = main_loss(args.loss_type)
    sample = np.sort(np.random.default_rng(args.seed).permutation(len(dataset))[: args.preflight_samples])
    lengths = Lengths.of(dataset)
    responses = np.maximum(count_trained(dataset, args.max_length), 1)
    if "ref_chosen_logps" in dataset.column_names and not args.ref_model_name_or_path:
        judged = np.arange(len(dataset))
        reference = dataset.select_columns(["ref_chosen_logps", "ref_rejected_logps"]).with_format("numpy")[:]
        logps = np.stack([reference["ref_chosen_logps"], reference["ref_rejected_logps"]], axis=1)
    else:
        judged = sample
        logps = compute_base_logps(trainer, policy, sample)
    figures = compute_pair_figures(logps.astype(np.float64), responses[judged], loss_type, args.beta)

    model = trainer.accelerator.unwrap_model(trainer.model)
    rows = list(dataset.select(sample))
    figures |= inspect_tokens(rows, lengths, list_eos(model, tokenizer), args.max_length)
    figures["rope_layers"] = float(count_wrong_rope_layers(model.config.get_text_config()))
    figures["control_tokens"] = float(np.mean(dataset["control_tokens"][:]))
    if args.padding_free:
        size = lengths.prompt + responses.max(axis=1)
        by_size = sample[np.argsort(size[sample], kind="stable")]
        median = by_size[[(len(by_size) - 1) // 2]]
        figures["packed_difference"] = compute_packed_difference(trainer, policy, median)
    sources = np.array(dataset["source"][:], dtype=object)
    ids = [row[name] for name in ("chosen_ids", "rejected_ids") for row in rows]
    traits = find_traits(tokenizer.batch_decode(ids, skip_special_tokens=True))
    sides = {name: (sources[sample], np.reshape(has, (2, -1)).T) for name, has in traits.items()}
    sides["tokens"] = (sources[judged], responses[judged])
    sides["base margin"] = (sources[judged], logps / responses[judged])
    figures["sides"] = compare_sides(sides)
    verdict, findings = judge_base_model(figures, loss_type)
    reasons = [format_finding(finding) for finding in findings]
    response = rows[0]["chosen_ids"]
    boundary = [tokenizer.decode(ids) for ids in (rows[0]["prompt_ids"][-12:], response[:12], response[-6:])]
    means = tabulate_means(figures, len(dataset), boundary)
    by_source = [*zip(*tabulate_sides(figures["sides"]), strict=True)]
    lines = [
        f"preflight: {verdict}",
        format_table(means),
        *(f"  {reason}" for reason in reasons),
        format_table(by_source),
    ]
    result = {"verdict": verdict, "reasons": reasons, "figures": figures, "findings": findings}
    return broadcast(result | {"text": "\n".join(lines), "table": [*means, *by_source]})


def preflight_phase(trainer, policy, config: Config) -> None:
    """Runs the preflight, logs it and writes preflight.json. Raises PreflightRefused."""
    result = run_preflight(trainer, policy, config)
    log.info(result.pop("text"))
    if is_main_process():
        write_json(Path(config.train.output_dir) / PREFLIGHT, result)
    if result["verdict"] == "no-go" and config.train.preflight == "abort":
        worst = next(reason for reason in result["reasons"] if reason.startswith("no-go"))
        raise PreflightRefused(f"preflight: {worst}; nothing was trained; to train regardless: preflight: warn")


def tabulate_means(figures: dict[str, Any], total: int, boundary: list[str]) -> list[tuple[str, str]]:
    """The figures about all pairs as rows of text. `total`: pairs of the dataset."""

    def interval(name: str) -> str:
        return "{:+.2f} ({:+.2f} to {:+.2f}) nats".format(*figures[name])

    return [
        ("pairs", f"{figures['pairs']:,} of {total:,}; means with 95% intervals"),
        ("chosen, per token", interval("chosen_logp")),
        ("gap, per token", interval("token_gap")),
        ("gap, sum", interval("sum_gap")),
        ("gradient weight", f"0.5 at the start, {figures['weight_after_move']:.2g} after {MOVE:g} nats per token"),
        ("boundary", "...{!r} | {!r} ... {!r}".format(*boundary)),
    ]
