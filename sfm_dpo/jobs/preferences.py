"""Preference evaluation without a benchmark: log-probs of base and trained model on another preference set."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import PeftModel
from transformers.utils import ADAPTER_CONFIG_NAME

from sfm_dpo.common.statistics import mean_interval, wilson
from sfm_dpo.config import parse_config
from sfm_dpo.config_checks import LENGTH_NORMALIZED_LOSSES, main_loss
from sfm_dpo.data.tokenization import load_token_pairs, load_tokenizer
from sfm_dpo.hub.publish import Source
from sfm_dpo.model.loading import load_model

# Fields of the run that decide what becomes of a text
_TEXTS = """model_name_or_path model_revision trust_remote_code max_length max_prompt_length pad_token seed
    dataset_num_proc max_dropped_fraction""".split()


def evaluate_pairs(source: Source, model: Path, dataset: str, limit: int | None) -> list[dict[str, Any]]:
    """`summarize_pairs` of the whole set and of each source in it; texts are prepared as in the run.

    Args:
        model: folder of the trained model's whole weights, or of its adapter.
        dataset: a Hub id, a file or a folder, as dataset_name.
        limit: this many of the pairs, drawn with the run's seed.

    Raises:
        UserError: as the training would of these data.
    """
    run = source.config
    words = [f"--{name}={run[name]}" for name in _TEXTS if run.get(name) is not None]
    words += [f"--max_samples={limit}"] if limit else []
    config = parse_config([*words, f"--dataset_name={dataset}"], training=False)
    tokens = load_token_pairs(config, load_tokenizer(config))[0].train
    device, dtype = ("cuda", "auto") if torch.cuda.is_available() else ("cpu", "float32")
    logps = []
    adapter = (model / ADAPTER_CONFIG_NAME).is_file()
    for folder in (None, model):
        name, revision = config.model.model_name_or_path, config.model.model_revision
        if folder and not adapter:
            name, revision = str(folder), None
        loaded = load_model(name, {"dtype": dtype, "revision": revision})
        loaded = PeftModel.from_pretrained(loaded, folder) if folder and adapter else loaded
        loaded = loaded.to(device).eval()
        logps.append(sum_logps(loaded, tokens, config.train.max_length))
        del loaded
    sources = np.array(list(map(str, tokens["source"])))
    groups = {Path(dataset).name if Path(dataset).exists() else dataset: np.full(len(sources), True)}
    if len(names := sorted(set(sources))) > 1:
        groups |= {name: sources == name for name in names}
    (base, lengths), (trained, _) = logps
    scale = run["beta"], main_loss(run["loss_type"]) in LENGTH_NORMALIZED_LOSSES
    return [
        {"source": name} | summarize_pairs(base[rows], trained[rows], lengths[rows], *scale)
        for name, rows in groups.items()
    ]


@torch.inference_mode()
def sum_logps(model: Any, tokens: Dataset, max_length: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Sums of log-probs (nats) and lengths of the responses, each [N, 2], chosen first; a sequence at a time."""
    sums, lengths = [], []
    for row in tokens:
        for side in ("chosen", "rejected"):
            ids = torch.tensor((row["prompt_ids"] + row[f"{side}_ids"])[:max_length], device=model.device)
            count = len(ids) - len(row["prompt_ids"])
            logits = model(input_ids=ids[None], logits_to_keep=count + 1).logits[0, :-1].float()
            logps = torch.log_softmax(logits, dim=-1).gather(1, ids[-count:, None])
            sums.append(logps.double().sum().item())
            lengths.append(count)
    return np.array(sums).reshape(-1, 2), np.array(lengths).reshape(-1, 2)


def summarize_pairs(
    base: np.ndarray, trained: np.ndarray, lengths: np.ndarray, beta: float, per_token: bool
) -> dict[str, Any]:
    """Figures with their 95% interval (mean, low, high) of sums of log-probs, each [N, 2] with chosen first.

    reward_accuracy: share of pairs whose chosen answer gained more. equal_length: the same with pairs whose chosen
    answer is the longer one and those whose is the shorter one weighing alike, so that a taste for length counts as
    chance; None where one of them is absent. margin: of the rewards, on the loss's scale (`per_token`: of means).
    base, trained: share of pairs whose chosen answer is the likelier one, on that scale.
    """
    scale = lengths if per_token else np.ones_like(lengths)
    rewards = beta * (trained - base) / scale
    wins = _share_first(rewards)
    longer = np.sign(lengths[:, 0] - lengths[:, 1])
    strata = [_share(wins[longer == sign]) for sign in (1, -1)]
    middle, low, high = (sum(values) / 2 for values in zip(*strata, strict=True))
    below, above = (math.hypot(*(stratum[i] - stratum[0] for stratum in strata)) / 2 for i in (1, 2))  # Newcombe 1998
    return {
        "pairs": len(base),
        "reward_accuracy": _share(wins),
        "equal_length": (middle, middle - below, middle + above) if math.isfinite(low + high) else None,
        "margin": mean_interval((rewards[:, 0] - rewards[:, 1]).tolist()),
        "base": _share(_share_first(base / scale)),
        "trained": _share(_share_first(trained / scale)),
    }


def _share(wins: np.ndarray) -> tuple[float, float, float]:
    """Mean of wins and its 95% interval; NaN where there are none."""
    share = float(wins.mean()) if len(wins) else math.nan
    return share, *(wilson(share, len(wins)) if len(wins) else (math.nan, math.nan))


def _share_first(values: np.ndarray) -> np.ndarray:
    """1 where the first column is larger, 0.5 where both are equal, else 0."""
    return (1 + np.sign(values[:, 0] - values[:, 1])) / 2
