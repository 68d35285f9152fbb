"""Can DPO work here? A verdict from the base model's log-probs and the tokens, before the first step.

DPO moves a policy away from its base model. Where the base model finds the chosen answers nearly impossible, the loss
still falls, but by making the rejected answers impossible too. The numbers that show it are there before training.
"""

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sfm_dpo.common.distributed import is_main_process
from sfm_dpo.common.errors import PreflightRefused, UserError
from sfm_dpo.common.files import write_atomically
from sfm_dpo.config import Config
from sfm_dpo.data.token_lengths import Lengths
from sfm_dpo.health.preflight_rules import MOVE, judge, pair_figures, rule_values, scale, sentence

PREFLIGHT = "preflight.json"


def response_lengths(columns: dict[str, np.ndarray], max_length: int | None) -> np.ndarray:
    """[N, 2] trained tokens of chosen and rejected, after truncation. Columns as in tokenization.py."""
    return Lengths.from_columns(columns).truncate(max_length).responses


def data_traps(rows: list[dict], columns: dict[str, np.ndarray], eos: set[int], max_length: int | None) -> dict:
    """Quantities of the rules about tokens.

    Args:
        rows: a sample of the dataset, with ids.
        columns: lengths of all pairs.
        eos: ids that end a response.
    """
    whole = [
        row[f"{side}_ids"]
        for row in rows
        for side in ("chosen", "rejected")
        if max_length is None or row["prompt_length"] + row[f"{side}_length"] <= max_length
    ]
    full = np.stack([columns["chosen_length"], columns["rejected_length"]], axis=1)
    return {
        "no_eos": float(np.mean([not eos & set(ids[-4:]) for ids in whole])) if whole else 0.0,
        "cut": float((response_lengths(columns, max_length) < full).mean()),
        "prompt_trimmed": float((columns["prompt_trimmed"] > 0).mean()),
    }


def model_traps(model: PreTrainedModel) -> dict[str, float]:
    """Quantities of the rules about the model."""
    dropout = [m for m in model.modules() if isinstance(m, torch.nn.modules.dropout._DropoutNd) and m.p > 0]
    return {
        "dropout": float(len(dropout)),
        "rope_layers": float(wrong_rope_layers(model.config.get_text_config())),
    }


def check_vocabulary(tokens: Dataset, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raises UserError where the tokenizer is not the model's: an id without a row in the embedding.

    Left alone that is an IndexError on CPU, and a device assert or garbage on a GPU. Looks at 1,000 pairs at most.
    """
    rows = tokens.select(np.linspace(0, len(tokens) - 1, min(len(tokens), 1000), dtype=int))
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    highest = max(max(ids, default=0) for row in rows for ids in (row[name] for name in names))
    highest = max(highest, tokenizer.pad_token_id, tokenizer.eos_token_id)
    if highest >= vocab_size:
        raise UserError(
            f"model_name_or_path {tokenizer.name_or_path}: its tokenizer gives id {highest} "
            f"({tokenizer.convert_ids_to_tokens(highest)!r}), but the model has {vocab_size} embeddings; use the "
            "tokenizer the model was trained with, or resize the embedding"
        )


def wrong_rope_layers(config) -> int:
    """How many kinds of layer of an OLMo 3 have the wrong RoPE scaling; 0 for other models.

    Full attention is YaRN-scaled where the context was made longer than the 8,192 tokens of pretraining.
    """
    if config.model_type != "olmo3":
        return 0
    parameters = config.rope_parameters or {}
    sliding, full = (parameters.get(kind) or {} for kind in ("sliding_attention", "full_attention"))
    lost = config.max_position_embeddings > 8192 and full.get("rope_type") != "yarn"
    return lost + (sliding.get("rope_type", "default") != "default")


def base_logps(trainer, rows: np.ndarray) -> np.ndarray:
    """[len(rows), 2] sums of log-probs under the base model, computed by all ranks; equal on all of them."""
    accelerator, dataset = trainer.accelerator, trainer.train_dataset
    model = trainer.forward_model()
    rank, ranks, size = accelerator.process_index, accelerator.num_processes, trainer.args.per_device_train_batch_size
    mine = np.resize(rows, math.ceil(len(rows) / ranks) * ranks)[rank::ranks]  # as many forwards on each rank
    was_training, sums = model.training, []
    model.eval()
    for start in range(0, len(mine), size):
        pairs = [dataset[int(i)] for i in mine[start : start + size]]
        batch = trainer._prepare_inputs(trainer.data_collator(pairs))
        chosen, rejected = trainer.compute_ref_log_probs(model, batch)
        sums += torch.stack([chosen, rejected], dim=1).float().tolist()
    model.train(was_training)
    found = dict(gather_object(list(zip(mine.tolist(), sums, strict=True))))
    return np.array([found[int(i)] for i in rows])


@torch.no_grad()
def packed_difference(trainer, rows: np.ndarray) -> float:
    """Largest difference per token between sums computed in one packed row and sequence by sequence, over tolerance.

    `rows`: pairs of the training set. The two sides of one are enough for a sequence that sees another's tokens.
    """
    dataset, args = trainer.train_dataset, trainer.args
    model = trainer.forward_model()
    was_training = model.training
    model.eval()
    collated = trainer._prepare_inputs(trainer.data_collator([dataset[int(i)] for i in rows]))
    packed = torch.cat(trainer.compute_ref_log_probs(model, collated))
    differences = []
    inputs = zip(collated["input_ids"], collated["attention_mask"], collated["completion_mask"], packed, strict=True)
    for ids, mask, completion, together in inputs:
        ids, completion = ids[mask.bool()], completion[mask.bool()].bool()
        with trainer.accelerator.autocast():  # a plain forward: transformers' own attention, nothing else in the row
            logits = model(input_ids=ids[None], attention_mask=torch.ones_like(ids[None])).logits[0, :-1]
        alone = torch.log_softmax(logits.float(), dim=-1).gather(1, ids[1:, None])[:, 0][completion[1:]]
        differences.append(abs(together.item() - alone.sum().item()) / len(alone))
    model.train(was_training)
    return max(differences) / (5e-2 if args.bf16 or args.fp16 else 1e-4)


def run_preflight(trainer, config: Config) -> dict[str, Any]:
    """Figures, verdict and what was looked at, equal on all ranks; nothing is written. All ranks must call it.

    The policy must still be the base model. With a reference cache all pairs are judged, and nothing is computed
    but one pair for the comparison of packed and single sequences.
    """
    args, dataset, tokenizer = config.train, trainer.train_dataset, trainer.processing_class
    sample = np.sort(np.random.default_rng(args.seed).permutation(len(dataset))[: args.preflight_samples])
    names = ["prompt_length", "chosen_length", "rejected_length", "prompt_trimmed"]
    columns = dataset.select_columns(names).with_format("numpy")[:]
    rows = list(dataset.select(sample))
    cached = "ref_chosen_logps" in dataset.column_names
    model = trainer.accelerator.unwrap_model(trainer.model)
    if cached:
        judged = np.arange(len(dataset))
        reference = dataset.select_columns(["ref_chosen_logps", "ref_rejected_logps"]).with_format("numpy")[:]
        logps = np.stack([reference["ref_chosen_logps"], reference["ref_rejected_logps"]], axis=1)
    else:
        judged, logps = sample, base_logps(trainer, sample)
    lengths = np.maximum(response_lengths(columns, args.max_length), 1)
    sources = dataset["source"][:] if "source" in dataset.column_names else [""] * len(dataset)
    sources = [str(sources[i]) for i in judged]
    figures = pair_figures(logps.astype(np.float64), lengths[judged], sources, args.loss_type[0], args.beta)
    eos = model.generation_config.eos_token_id if model.can_generate() else None
    eos = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}
    traps = data_traps(rows, columns, eos, args.max_length) | model_traps(model)
    if args.padding_free:
        total = columns["prompt_length"] + lengths.max(axis=1)
        middle = sample[np.argsort(total[sample], kind="stable")][: max(1, len(sample) // 2)][-1:]
        traps["packed_difference"] = packed_difference(trainer, middle)
    verdict, findings = judge(rule_values(figures, traps), args.loss_type[0])
    result = {
        "verdict": verdict,
        "reasons": [sentence(finding) for finding in findings],
        "pairs": f"all {len(judged):,}"
        if cached
        else f"{len(judged):,} of {len(dataset):,}, drawn with seed {args.seed}",
        "loss": {"loss_type": args.loss_type, "beta": args.beta, "scale": scale(args.loss_type[0])},
        "figures": figures,
        "values": rule_values(figures, traps),
        "findings": findings,
        "boundary": boundary(rows[0], tokenizer),
        "tokenizer": {
            "pad": tokenizer.pad_token,
            "eos": tokenizer.eos_token,
            "pad_is_eos": tokenizer.pad_token_id == tokenizer.eos_token_id,
            "vocabulary": len(tokenizer),
            "embedding": getattr(model.get_input_embeddings(), "num_embeddings", None),
        },
    }
    agreed = [result]
    broadcast_object_list(agreed)
    return agreed[0]


def preflight_phase(trainer, config: Config) -> None:
    """Runs the preflight, prints it, writes preflight.json; on a no-go ends the run where `preflight` is abort.

    Raises:
        PreflightRefused
    """
    mode, path = config.train.preflight, Path(config.train.output_dir) / PREFLIGHT
    if mode == "skip":
        return
    start = time.monotonic()
    result = run_preflight(trainer, config) | {"preflight": mode}
    result["seconds"] = round(time.monotonic() - start, 3)
    result["text"] = as_text(result)
    if is_main_process():
        write_atomically(path, json.dumps(result, indent=2) + "\n")
        print(result["text"], flush=True)
    if result["verdict"] == "no-go" and mode == "abort":
        raise refusal(result)


def refusal(result: dict[str, Any]) -> PreflightRefused:
    worst = next(finding for finding in result["findings"] if finding["level"] == "no-go")
    return PreflightRefused(
        f"preflight: no-go: {sentence(worst)}; nothing was trained; preflight: warn trains regardless"
    )


def boundary(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The end of a prompt, and the beginning and end of its chosen response, as the model sees them."""
    prompt, chosen = row["prompt_ids"], row["chosen_ids"]
    return {
        "prompt_end": tokenizer.decode(prompt[-12:]),
        "response_start": tokenizer.decode(chosen[:12]),
        "response_end": tokenizer.decode(chosen[-6:]),
    }


def as_text(result: dict[str, Any]) -> str:
    """The block in the log."""
    f, loss, edge = result["figures"], result["loss"], result["boundary"]

    def mean(values, form=".1f"):
        return f"{values[0]:{form}} ({values[1]:{form}} to {values[2]:{form}})"

    def quantiles(values):
        return " / ".join(f"{v:.2g}" for v in values)

    token, total, length, prefers = f["logp_token"], f["logp_sum"], f["length"], f["preferred"]
    corr, perplexity = f["correlation_gap_length"], f["perplexity"]
    lines = [
        ("pairs", f"{result['pairs']}; means with their 95% interval"),
        ("log-prob per token", f"chosen {mean(token['chosen'], '.2f')}, rejected {mean(token['rejected'], '.2f')}"),
        ("perplexity", f"chosen {perplexity['chosen']:.1f}, rejected {perplexity['rejected']:.1f}"),
        ("gap per token", f"{mean(token['gap'], '+.2f')} nats"),
        ("log-prob, sum", f"chosen {mean(total['chosen'])}, rejected {mean(total['rejected'])}"),
        ("gap, sum", f"{mean(total['gap'], '+.1f')} nats"),
        ("prefers chosen", f"{prefers[0]:.0%} of pairs ({prefers[1]:.0%} to {prefers[2]:.0%}), by {loss['scale']}"),
        ("response tokens", f"chosen {length['chosen']:.0f}, rejected {length['rejected']:.0f}"),
        ("gap with length", "no correlation" if corr is None else f"correlation {corr:+.2f}, by {loss['scale']}"),
        (
            "gradient weight",
            f"1/2 at the start; after {MOVE:g} nats per token {quantiles(f['weight_after_move'])} (5, 50, 95%)",
        ),
        ("boundary", f"...{edge['prompt_end']!r} | {edge['response_start']!r} ... {edge['response_end']!r}"),
    ]
    width = max(len(name) for name, _ in lines)
    for row in f["by_source"]:
        gaps = f"gap {row['gap_token']:+.2f} per token, {row['gap_sum']:+.0f} in sum"
        lines.append(
            ("source", f"{row['source']}: {row['pairs']:,} pairs, {gaps}, prefers chosen {row['preferred']:.0%}")
        )
    text = [f"preflight: {result['verdict']}", *(f"  {name:<{width}}  {value}" for name, value in lines)]
    return "\n".join(text + [f"  {reason}" for reason in result["reasons"]])
