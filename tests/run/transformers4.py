"""A reader of models under Transformers 4 and 5: `make` writes bases as Transformers 4 publishes them, `read` loads
folders and prints as JSON what it gets from each."""

import json
import sys

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

SHAPE = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2}
SHAPE |= {"bos_token_id": None, "eos_token_id": 259, "pad_token_id": None, "tie_word_embeddings": False}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
# RoPE as it is by default nowhere: a reader that misses a field computes something else. All types of the recipes that
# Transformers 4 knows, Qwen 3's mixture and Gemma 3
BASES = {
    "gpt_neox": {"rotary_emb_base": 500000, "rotary_pct": 0.5},
    "olmo2": {"rope_theta": 700000, "num_key_value_heads": 4},
    "olmo3": {"rope_theta": 500000, "rope_scaling": YARN, "sliding_window": 8},
    "llama": {"rope_theta": 700000.0, "rope_scaling": LLAMA3},
    "olmoe": {"rope_theta": 700000.0, "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "apertus": {"rope_theta": 4000000, "rope_scaling": LLAMA3},
    "smollm3": {"rope_theta": 5000000.0, "no_rope_layer_interval": 2},
    "qwen3_moe": {"rope_theta": 700000.0, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gemma3_text": {"rope_theta": 700000.0, "rope_local_base_freq": 777.0, "sliding_window": 8},
}
TEXT = "<|im_start|>user\nHello wörld 12345<|im_end|>\n"
CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"


def make(root: str) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    extra = {"eos_token": special[3], "additional_special_tokens": special[2:], "model_max_length": 512}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **extra)
    fast.chat_template = CHAT
    for kind, fields in BASES.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **SHAPE | fields)
        AutoModelForCausalLM.from_config(config, torch_dtype=torch.bfloat16).save_pretrained(f"{root}/{kind}")
        fast.save_pretrained(f"{root}/{kind}", save_jinja_files=kind != "llama")


def read(folder: str) -> dict:
    """Logits in fp32 of 200 ids, more than windows and original contexts hold; dtype; a text's ids; a chat."""
    ids = torch.arange(3, 203)[None] % 251
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = {"dtype": str(AutoConfig.from_pretrained(folder).dtype), "ids": tokenizer(TEXT)["input_ids"]}
    found["chat"] = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    found["special"] = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return found | {"logits": model.eval()(ids).logits[0, ::10].flatten().tolist()}


if __name__ == "__main__":
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    command, *folders = sys.argv[1:]
    if command == "make":
        make(*folders)
    else:
        print(json.dumps({folder: read(folder) for folder in folders}))
