"""What a folder's tokenizer and configuration mean to the Transformers of an environment without torch, as JSON."""

import json
import sys

TEXTS = ["The fox's 1234567 tests don't stop.", "  def f(x):\n\treturn x  # 12\n\n\n", "naïve Öfen, 東京 🙂"]
TEXTS += ["<think>ok</think>{eos} and on"]
CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is 4."}]


def read_model(folder: str) -> dict:
    import transformers
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    texts = [text.format(eos=tokenizer.eos_token) for text in TEXTS]
    rope = getattr(config, "rope_parameters", None) or {}
    if transformers.__version__ < "5":
        rope = getattr(config, "rope_scaling", None) or {"rope_type": "default"}
        theta = getattr(config, "rotary_emb_base", None) or getattr(config, "rope_theta", None)
        rope = dict(rope, rope_theta=theta, partial_rotary_factor=getattr(config, "rotary_pct", None))
    rope = rope.get("full_attention", rope)
    names = ("hidden_size", "vocab_size", "use_cache", "sliding_window")
    return {
        "token ids": [tokenizer(text)["input_ids"] for text in texts],
        "special tokens": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
        "chat template": tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True),
        "generation config": GenerationConfig.from_pretrained(folder).eos_token_id,
        "rope": {key: value for key, value in rope.items() if value is not None},
        "configuration": [getattr(config, name, None) for name in names],
    }


if __name__ == "__main__":
    print(json.dumps(read_model(sys.argv[1])))
