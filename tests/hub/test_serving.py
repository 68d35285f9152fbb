"""What a run saves means the same to Transformers 4.57.6, without torch, as to the version here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

import train_dpo
from sfm_dpo.common.files import PROJECT
from sfm_dpo.hub.publish import check_loads
from tests.hub import read_model
from tests.tiny_models import CHAT_TEMPLATE, tiny_model

OLDER = "4.57.6"  # the last of Transformers 4, which vLLM's releases of its time pin
LINES = ["the quick brown fox jumps over 1234567 lazy dogs, don't stop", "def f(x):\n    return x + 12", "Öfen 東京"]
GPT4 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KINDS = {  # architecture, tokenizer_class on the Hub, BOS, EOS of the pretrained model, pad
    "gpt_neox": ("gpt_neox", "GPTNeoXTokenizer", None, "<|endoftext|>", "<|padding|>"),
    "llama3": ("llama", "PreTrainedTokenizerFast", "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"),
}


def make_tokenizer(kind: str, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json as Transformers 4 wrote them, with ChatML and one token more."""
    _, name, bos, eos, pad = KINDS[kind]
    tokenizer = Tokenizer(models.BPE())
    if kind == "gpt_neox":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(GPT4), "isolated")
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    special = list(filter(None, (pad, bos, eos)))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(LINES * 5, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens(["<think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": name, "eos_token": "<|im_end|>", "pad_token": pad, "chat_template": CHAT_TEMPLATE}
    fields |= {"additional_special_tokens": ["<|im_start|>", eos]} | ({"bos_token": bos} if bos else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def make_base(kind: str, folder: Path) -> Path:
    """A base model whose config.json is in the form of Transformers 4."""
    size = 512
    tiny_model(KINDS[kind][0], num_hidden_layers=2, vocab_size=size, layer_types=None).save_pretrained(folder)
    make_tokenizer(kind, folder)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    end = AutoTokenizer.from_pretrained(folder).eos_token_id
    rope = rope.get("full_attention", rope)
    theta = rope.pop("rope_theta")
    share = rope.pop("partial_rotary_factor", None)
    names = {"rotary_emb_base": theta, "rotary_pct": share} if share else {"rope_theta": theta}
    config |= names | ({} if share else {"rope_scaling": rope if rope["rope_type"] != "default" else None})
    config |= {"torch_dtype": config.pop("dtype"), "use_cache": True, "eos_token_id": end, "unknown_field": 7}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end, "pad_token_id": 0}))
    return folder


@pytest.fixture(scope="session")
def older_python() -> Path:
    """The Python of a virtual environment with that version of Transformers and no torch (240 MB), made once."""
    folder = PROJECT / ".venv-serving" / OLDER
    if not (folder / ".complete").is_file():
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
        command = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet"]
        if subprocess.run([*command, f"transformers=={OLDER}", "jinja2"], check=False).returncode:
            pytest.skip(f"transformers {OLDER} cannot be installed")
        (folder / ".complete").touch()
    return folder / "bin/python"


def read_elsewhere(folder: Path, python: Path) -> dict:
    command = [python, read_model.__file__, folder]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_run_saves_means_the_same_to_older_transformers(kind, older_python, tmp_path, no_report, write_rows):
    base = make_base(kind, tmp_path / "base")
    run = tmp_path / "run"
    rows = [{"prompt": f"{i} + {i}?", "chosen": f"It is {2 * i}.", "rejected": f"No {i}."} for i in range(4)]
    words = f"""--model_name_or_path {base} --dataset_name {write_rows("pairs.jsonl", rows)} --use_cpu
        --output_dir {run} --global_batch_size 4 --per_device_train_batch_size 4 --max_length 64 --max_steps 2
        --save_steps 1 --preflight skip --guard skip"""
    assert train_dpo.main(words.split()) == 0
    for folder in (run, run / "checkpoint-1"):
        assert read_elsewhere(folder, older_python) == read_model.read_model(str(folder))

    before, after = (json.loads((folder / "config.json").read_text()) for folder in (base, run))
    changed = {name for name, value in after.items() if before.get(name, value) != value}
    # the Trainer gives the model the tokenizer's special tokens
    assert changed <= {"pad_token_id", "bos_token_id", "transformers_version"}
    assert after["use_cache"] and after["unknown_field"]
    assert (set(after) - set(before)) == {"dtype", "rope_parameters"}
    assert read_model.read_model(str(run)) == read_model.read_model(str(base))  # today's Transformers
    check_loads(run)
