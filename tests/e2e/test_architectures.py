"""Decoder types of Transformers train with equal losses, packed and padded, or are refused in one line."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import train_dpo
from tests.tiny_models import VOCAB_SIZE, tiny_tokenizer
from tests.toolbox import logged, on_cpu, pairs, sampled, write_jsonl

SMALL = dict.fromkeys(
    """num_hidden_layers num_layers n_layer num_blocks encoder_layers decoder_layers num_decoder_layers n_group
    topk_group num_experts_per_tok num_key_value_heads num_query_groups linear_num_key_heads""".split(),
    2,
)
SMALL |= dict.fromkeys(
    """num_attention_heads n_head encoder_attention_heads decoder_attention_heads linear_num_value_heads mamba_n_heads
    num_experts num_local_experts n_routed_experts""".split(),
    4,
)
SMALL |= dict.fromkeys(
    """head_dim attention_head_dim mamba_head_dim linear_key_head_dim linear_value_head_dim v_head_dim qk_rope_head_dim
    qk_nope_head_dim kv_channels kv_lora_rank q_lora_rank adapter_rank mamba_d_state state_size ssm_state_size
    num_heads mamba_num_heads""".split(),
    8,
)
SMALL |= dict.fromkeys(
    """moe_intermediate_size shared_intermediate_size shared_expert_intermediate_size chunk_size mamba_chunk_size
    moe_shared_expert_intermediate_size mamba_d_head mamba_headdim block_multiple_of""".split(),
    16,
)
SMALL |= dict.fromkeys("hidden_size d_model n_embd embedding_dim attention_hidden_size lru_width".split(), 32)
SMALL |= dict.fromkeys("intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim".split(), 48)
SMALL |= {"mamba_d_ssm": 64, "max_position_embeddings": 512, "n_positions": 512}
SMALL |= {"vocab_size": VOCAB_SIZE, "pad_token_id": 256, "bos_token_id": None, "eos_token_id": 259}
# What some types need besides: multi-head attention, a hybrid's first layer of attention, ...
CHANGES = ({}, {"num_key_value_heads": 4}, {"num_hidden_layers": 8}, {"num_experts_per_tok": 1}, {"rotary_dim": 8})
CHANGES += ({"bos_token_id": 1}, {"layer_types": ["full_attention", "linear_attention"]})
KINDS = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - {"bigbird_pegasus"})  # it attends to random blocks
# Of these the memory is planned, too: traced, guessed, without checkpointing
PLANNED = ("gpt_oss", "jetmoe", "llama", "mamba")
# These must train: softcap, sinks; and rates of dropout or jitter that TRL leaves on
TRAINED = ("gemma2", "gpt_oss", "opt", "phimoe", "seed_oss")


def make_model(kind: str, folder) -> str:
    """Saves a tiny model of a type; returns why it cannot be built, if it cannot."""
    reason = ""
    for change in CHANGES:
        try:
            save_model(kind, SMALL | change, folder)
            return ""
        except Exception as error:
            reason = reason or f"{type(error).__name__}: {error}"
    return reason


def save_model(kind: str, fields: dict, folder) -> None:
    known = AutoConfig.for_model(kind)
    config = AutoConfig.for_model(kind, **{name: value for name, value in fields.items() if hasattr(known, name)})
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(config).num_parameters()
    assert size < 2_000_000
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model(input_ids=torch.arange(12)[None])
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """One file, whose tokens are then in the cache."""
    return write_jsonl(tmp_path_factory.mktemp("data") / "pairs.jsonl", pairs(8))


@pytest.mark.grid
@pytest.mark.parametrize("kind", sorted({*sampled(KINDS, 5), *PLANNED, *TRAINED}))
@pytest.mark.usefixtures("environment")
def test_a_decoder_type_trains_packed_as_padded_or_is_refused_in_one_line(kind, tmp_path, data, monkeypatch, capsys):
    if reason := make_model(kind, tmp_path / "model"):
        pytest.skip(f"not built: {reason[:100]}")
    monkeypatch.setattr("sfm_dpo.training_run.report", lambda *run: True)
    fields = {"max_steps": 2, "learning_rate": 1e-3, "warmup_steps": 0, "save_strategy": "no"}
    fields |= {"gradient_checkpointing": None, "checkpointed_layers": 0}
    if kind in PLANNED:
        fields |= {"per_device_train_batch_size": None, "checkpointed_layers": None}
    losses = {}
    for name, packed in (("as configured", None), ("padded", "false")):
        run = tmp_path / name
        code = train_dpo.main(on_cpu(tmp_path / "model", data, run, **fields | {"padding_free": packed}))
        captured = capsys.readouterr()
        assert code in ((0,) if kind in TRAINED else (0, 2)), captured.err
        assert code == 0 or len([line for line in captured.err.splitlines() if line.startswith("error: ")]) == 1
        losses[name] = [entry["loss"] for entry in logged(run)] if code == 0 else None
    if losses["padded"] is None:
        assert losses["as configured"] is None
    else:
        assert losses["as configured"] == pytest.approx(losses["padded"], rel=1e-4)
