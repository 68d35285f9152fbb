"""Which tokens? Chat template to prompt_ids, chosen_ids and rejected_ids: batched, parallel, cached on disk.

The ids are those of TRL's own preparation (`DPOTrainer._prepare_dataset`), which tokenises one row at a time and
whose cache key covers every training argument.
"""

import functools
import inspect
import json
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import datasets
import numpy as np
import transformers
from datasets import Dataset, Features, List, Value
from datasets.fingerprint import Hasher
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl.data_utils import common_prefix_length

from sfm_dpo.common.errors import UserError
from sfm_dpo.config import Config
from sfm_dpo.data.preferences import Pairs, load_pairs
from sfm_dpo.data.sources import room_in_cache
from sfm_dpo.model.loading import TOKENIZER_FILES, check_files

# Rows a call of the tokenizer: it holds some 300 bytes a token beside the ids, and a long pair has 50,000 tokens.
BATCH_ROWS = 100
_IDS = List(Value("int32"))
_COUNT = Value("int32")
_TOKENS = Features(
    {
        "prompt_ids": _IDS,
        "chosen_ids": _IDS,
        "rejected_ids": _IDS,
        "prompt_length": _COUNT,
        "chosen_length": _COUNT,
        "rejected_length": _COUNT,
        "prompt_trimmed": _COUNT,  # tokens taken from the prompt's end because prompt+response diverges from it
        "source": Value("string"),
        "dropped": Value("string"),
    }
)


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The tokenizer in the model's own folder or repository, with a pad token.

    Raises:
        UserError: no such model, or a folder without a tokenizer.
    """
    name, args = config.model.model_name_or_path, config.train
    check_files(name, TOKENIZER_FILES)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=config.model.model_revision, trust_remote_code=args.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model_name_or_path {name}: no tokenizer can be loaded: {_first_line(error)}") from error
    if tokenizer.eos_token is None:
        raise UserError(f"model_name_or_path {name}: its tokenizer has no EOS token; set eos_token in its config")
    if args.pad_token is not None and args.pad_token not in tokenizer.get_vocab():
        raise UserError(
            f"pad_token {args.pad_token}: is not in the tokenizer of {name}; remove it, or name one that is"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@room_in_cache()
def tokenize_pairs(
    pairs: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    max_prompt_length: int | None = None,
    num_proc: int | None = None,
) -> tuple[Dataset, Counter]:
    """Token ids and lengths of `pairs` (see data.py), and counts of what happened to them.

    A second call with the same pairs and tokenizer reads the cache, whatever the two lengths: `max_prompt_length`
    copies it with the starts of longer prompts left out, and `max_length` truncates in TRL's collator and here only
    drops the pairs whose prompt fills it.

    Returns:
        The dataset (columns of _TOKENS but `dropped`; ids are lists of int) and a Counter over the keys
        "malformed", "chosen_equals_rejected", "empty_response", "prompt_too_long" (dropped), "prompt_cut" and
        "prompt_trimmed" (kept).
    """
    tokens = pairs.map(
        _tokenize_batch,
        batched=True,
        batch_size=BATCH_ROWS,
        fn_kwargs={"tokenizer": tokenizer},
        remove_columns=pairs.column_names,
        features=_TOKENS,
        num_proc=num_proc,
        # datasets hashes a tokenizer's state, which changes when it is used, and not the code of this module.
        new_fingerprint=Hasher.hash(
            (
                pairs._fingerprint,
                tokenizer_key(tokenizer),
                inspect.getsource(sys.modules[__name__]),
                transformers.__version__,
                datasets.__version__,
            )
        ),
        desc="Tokenizing",
    )
    cut = np.zeros(len(tokens), dtype=bool)
    if max_prompt_length is not None:
        cut = np.asarray(tokens.with_format("numpy")["prompt_length"][:]) > max_prompt_length
    if cut.any():
        tokens = tokens.map(
            _cut_prompts,
            batched=True,
            input_columns="prompt_ids",
            fn_kwargs={"max_prompt_length": max_prompt_length},
            num_proc=num_proc,
            new_fingerprint=Hasher.hash((tokens._fingerprint, max_prompt_length)),
            desc="Cutting prompts",
        )
    columns = tokens.select_columns([name for name in _TOKENS if not name.endswith("_ids")]).with_format("numpy")[:]
    reasons = np.asarray(columns["dropped"], dtype=object)
    empty = (columns["chosen_length"] == 0) | (columns["rejected_length"] == 0)
    reasons[(reasons == "") & empty] = "empty_response"
    if max_length is not None:
        reasons[(reasons == "") & (columns["prompt_length"] >= max_length)] = "prompt_too_long"
    keep = reasons == ""
    counts = Counter(reasons[~keep].tolist())
    counts["prompt_cut"] = int(cut[keep].sum())
    counts["prompt_trimmed"] = int((columns["prompt_trimmed"][keep] > 0).sum())
    if not keep.all():
        tokens = tokens.select(np.flatnonzero(keep))
    return tokens.remove_columns("dropped"), counts


def load_token_pairs(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[Pairs, list[str]]:
    """The pairs of a run as token ids, train and eval split, and lines that say what happened to their prompts.

    Raises:
        UserError: as `load_pairs`; no pair of a split fits into max_length; too many were dropped.
    """
    args, pairs, notes = config.train, load_pairs(config), []
    for split in ("train", "eval"):
        texts = getattr(pairs, split)
        if texts is None:
            continue
        tokens, counts = tokenize_pairs(
            texts, tokenizer, args.max_length, args.max_prompt_length, args.dataset_num_proc
        )
        if cut := counts.pop("prompt_cut"):
            limit = args.max_prompt_length
            notes.append(f"{split}: {cut:,} prompts are longer than max_prompt_length {limit} and keep their end")
        if trimmed := counts.pop("prompt_trimmed"):
            notes.append(
                f"{split}: {trimmed:,} prompts are no token prefix of prompt+response; their last tokens count as "
                "response"
            )
        pairs.dropped.update(counts)
        if not len(tokens):
            raise pairs.none_left(split, counts, args.max_length)
        # Flat: or every rank would write the rest anew when the trainer adds columns
        # Upstream: datasets 5.2, arrow_dataset.py, Dataset.flatten_indices: writes a flat dataset anew, too, and no
        # public name says whether it is one. Canary: test_canary_datasets_indices
        setattr(pairs, split, tokens if tokens._indices is None else tokens.flatten_indices())
    pairs.check_dropped(args.max_dropped_fraction)
    return pairs, notes


def pair_tokens(tokens: Dataset, max_length: int | None) -> np.ndarray:
    """What each pair costs: [N] tokens of chosen and rejected sequence together, after truncation to `max_length`."""
    columns = tokens.select_columns(["prompt_length", "chosen_length", "rejected_length"]).with_format("numpy")[:]
    chosen, rejected = (columns["prompt_length"] + columns[f"{side}_length"] for side in ("chosen", "rejected"))
    if max_length is not None:
        chosen, rejected = np.minimum(chosen, max_length), np.minimum(rejected, max_length)
    return chosen + rejected


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of what decides the ids: vocabulary, merges, normaliser, special tokens, chat template."""
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        backend |= {"padding": None, "truncation": None}  # left behind by the last call with padding
        backend = json.dumps(backend)  # text is hashed twenty times as fast
    else:
        backend = tokenizer.get_vocab()
    return Hasher.hash((backend, tokenizer.chat_template, sorted(map(str, tokenizer.special_tokens_map.items()))))


def _tokenize_batch(batch: dict[str, list], tokenizer: PreTrainedTokenizerBase) -> dict[str, list]:
    ids, reasons = _encode(batch, tokenizer)
    out: dict[str, list] = {name: [] for name in _TOKENS}
    sources = batch["source"] if "source" in batch else [None] * len(reasons)
    for prompt, prompt_chosen, prompt_rejected, reason, source in zip(*ids, reasons, sources, strict=True):
        # As in TRL: the responses start where the prompt stops being a prefix of prompt+response.
        length = min(common_prefix_length(prompt, prompt_chosen), common_prefix_length(prompt, prompt_rejected))
        row = {
            "prompt_ids": prompt[:length],
            "chosen_ids": prompt_chosen[length:],
            "rejected_ids": prompt_rejected[length:],
            "prompt_trimmed": len(prompt) - length,
            "source": source,
            # A template may leave out what made the two sides differ, or strip white space.
            "dropped": reason or ("chosen_equals_rejected" if prompt_chosen == prompt_rejected else ""),
        }
        row |= {f"{name}_length": len(row[f"{name}_ids"]) for name in ("prompt", "chosen", "rejected")}
        for name, value in row.items():
            out[name].append(value)
    return out


def _cut_prompts(prompts: list[list[int]], max_prompt_length: int) -> dict[str, list]:
    kept = [ids[-max_prompt_length:] for ids in prompts]
    return {"prompt_ids": kept, "prompt_length": [len(ids) for ids in kept]}


def _encode(batch: dict[str, list], tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[list, list, list], list[str]]:
    """Ids of prompt, prompt+chosen and prompt+rejected of each row, and the rows' drop reasons."""
    rows = list(zip(batch["prompt"], batch["chosen"], batch["rejected"], strict=True))
    texts: list[tuple[str, str, str]] = []
    reasons, given = [""] * len(rows), batch.get("template") or [None] * len(rows)
    is_text = [isinstance(prompt, str) for prompt, _, _ in rows]
    for i, (prompt, chosen, rejected) in enumerate(rows):
        if is_text[i]:
            chosen, rejected = (s if s.endswith(tokenizer.eos_token) else s + tokenizer.eos_token for s in rows[i][1:])
            texts.append((prompt, prompt + chosen, prompt + rejected))
            continue
        if tokenizer.chat_template is None:
            raise UserError(
                f"model_name_or_path {tokenizer.name_or_path}: its tokenizer has no chat template, but the data are "
                "conversations; take a model with one, or put a chat_template.jinja into its folder"
            )
        render = functools.partial(tokenizer.apply_chat_template, tokenize=False, **json.loads(given[i] or "{}"))
        try:
            texts.append(
                (render(prompt, add_generation_prompt=True), render(prompt + chosen), render(prompt + rejected))
            )
        except TemplateSyntaxError as error:
            remedy = f"line {error.lineno} of its chat template is no valid Jinja: {error}; mend chat_template.jinja"
            raise UserError(f"model_name_or_path {tokenizer.name_or_path}: {remedy}") from error
        except (TemplateError, TypeError):  # a template that refuses the roles, or their order
            texts.append(("", "", ""))
            reasons[i] = "malformed"
    encoded: list[Any] = [None] * len(rows)
    # Plain text gets the tokenizer's special tokens, a rendered chat template holds its own.
    for special in (True, False):
        index = [i for i, text in enumerate(is_text) if text is special]
        if index:
            cuts = () if special else _cuts(tokenizer)
            pieces = [_share_lead(texts[i], cuts) for i in index]
            flat = [text for piece in pieces for text in piece]
            ids = tokenizer(flat, add_special_tokens=special, return_attention_mask=False)["input_ids"]
            for n, i in enumerate(index):
                lead, *rest = ids[4 * n : 4 * n + 4]
                # An empty text may have tokens too: a BOS
                encoded[i] = [lead + tail for tail in rest] if pieces[n][0] else rest
    return tuple(map(list, zip(*encoded, strict=True))), reasons  # type: ignore[return-value]


def _share_lead(texts: tuple[str, str, str], cuts: Iterable[str]) -> tuple[str, str, str, str]:
    """Prompt, prompt+chosen and prompt+rejected as the lead that they share and three rests, so that a long prompt is
    tokenized once. Cut before the prompt's last special token (of `cuts`), where no id can depend on what precedes."""
    prompt, *sides = texts
    at, token = max(((prompt.rfind(token), token) for token in cuts), default=(-1, ""))
    if at < 1 or not all(side.startswith(prompt[: at + len(token)]) for side in sides):
        return "", *texts
    chosen, rejected = sides
    return prompt[:at], prompt[at:], chosen[at:], rejected[at:]


def _cuts(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Special tokens before which a text can be cut in two without changing an id."""
    if not tokenizer.is_fast or tokenizer.split_special_tokens:
        return ()
    return _cuts_among(
        tuple(
            (token.content, not (token.normalized or token.lstrip or token.single_word))
            for token in tokenizer.added_tokens_decoder.values()
        )
    )


@functools.lru_cache(maxsize=4)
def _cuts_among(added: tuple[tuple[str, bool], ...]) -> tuple[str, ...]:
    """tokenizers looks for the added tokens first, leftmost and longest, and treats the text between them piece by
    piece. So a cut before one of them is exact if it matches wherever it stands (no other can begin or end within it)
    and does not look to its left (`lstrip`, `single_word`, or text changed by the normaliser: the bool of `added`)."""

    def overlaps(other: str, token: str) -> bool:
        if other != token and other.startswith(token):
            return True
        starts = (i for i in range(1, len(other)) if other[i] == token[0])
        return any(other.startswith(token, i) or token.startswith(other[i:]) for i in starts)

    return tuple(t for t, plain in added if t and plain and not any(overlaps(other, t) for other, _ in added))


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
