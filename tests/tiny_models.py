"""Tiny random models and a tokenizer for tests: real transformers classes, no hub, no files, made in milliseconds."""

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    ApertusConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OlmoHybridConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    SmolLM3Config,
)
from transformers.models.auto import AutoModelForCausalLM

PAD = "<|pad|>"
EOS = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
VOCAB_SIZE = 260  # 256 bytes and the four special tokens

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Threads cost more than they give at these sizes: the tests are ten times slower with two on a machine that is busy
torch.set_num_threads(1)

ARCHITECTURES = ("gpt_neox", "olmo3", "llama", "olmoe")


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer (one token a byte, so nothing is ever unknown) with a ChatML template, pad and eos."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (PAD, EOS, IM_START, IM_END)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=IM_END)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_config(architecture: str, **overrides) -> PreTrainedConfig:
    """Config of one of `ARCHITECTURES`, or of a recipe."""
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,  # large enough that attention is far from uniform: a leak shows in the log-probs
        "pad_token_id": 256,
        "bos_token_id": None,
        "eos_token_id": 259,
        "tie_word_embeddings": False,
    }
    yarn = {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    specific = {
        "gpt_neox": (GPTNeoXConfig, {}),
        "olmo3": (
            Olmo3Config,
            {
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "rope_parameters": {
                    "full_attention": yarn,
                    "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
                },
            },
        ),
        "llama": (LlamaConfig, {"num_key_value_heads": 2}),
        "gpt2": (GPT2Config, {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}),  # absolute positions
        # For their recipes
        "olmo2": (Olmo2Config, {}),
        "apertus": (ApertusConfig, {"num_key_value_heads": 2}),
        "smollm3": (
            SmolLM3Config,
            {"num_key_value_heads": 2, "no_rope_layer_interval": 2, "tie_word_embeddings": True},
        ),
        "olmo_hybrid": (OlmoHybridConfig, {"num_key_value_heads": 4}),  # see tests/model/test_hybrid.py
        "olmoe": (
            OlmoeConfig,
            {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1},
        ),
    }
    config_class, extra = specific[architecture]
    return config_class(**{**shape, **extra, **overrides})


def tiny_model(
    architecture: str,
    *,
    seed: int = 0,
    attn_implementation: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    **overrides,
) -> PreTrainedModel:
    """Causal language model of one of `ARCHITECTURES`, random weights from `seed`; `overrides` change its config."""
    torch.manual_seed(seed)
    config = tiny_config(architecture, **overrides)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=dtype)
