"""Loading weights; DeepSpeed on CPUs, and log-probs that FSDP2 must not round."""

import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from huggingface_hub import constants
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoModelForCausalLM, GraniteMoeConfig, OPTConfig, Qwen3_5Config
from transformers.utils.logging import info_once
from trl.models import prepare_fsdp
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

from sfm_dpo.common.distributed import disable_deepspeed_shm, load_only_tensors
from sfm_dpo.common.errors import UserError
from sfm_dpo.config.fields import parse_config
from sfm_dpo.data.tokenization import load_tokenizer
from sfm_dpo.model.loading import (
    count_positions,
    disable_noise,
    find_base,
    identify_model,
    load_model,
    load_model_config,
    meta_adapter,
)
from sfm_dpo.model.sharding import keep_precision, prepare_blocks
from tests.tiny_models import tiny_model, tiny_tokenizer
from tests.toolbox import edit

STOCK_ATTRIBUTES = dict(GraniteMoeConfig.attribute_map)  # before a load_model in this process adds num_experts


def test_weights_that_could_run_code_are_not_loaded(tiny_folder, tmp_path):
    """In a folder and on the Hub; what the error says to do works."""
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "m")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    for name in (str(folder), put_on_hub(folder, "lab/pickle")[0]):
        with pytest.raises(UserError, match=r"has no model\.safetensors; pytorch_model\.bin is a pickle"):
            load_model(name, {})
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)
    assert load_model(str(folder), {})


def put_on_hub(folder: Path, name: str) -> tuple[str, str]:
    """Name and commit of a repository in the cache of the Hub, as snapshot_download leaves it."""
    repo = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")
    commit = "0123456789" * 4
    shutil.copytree(folder, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text(commit)
    return name, commit


def test_an_adapter_by_its_hub_id_is_that_of_its_folder(tiny_folder, tmp_path):
    """Without a network. Its tokenizer lies beside it; config.json is its base's."""
    options = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapter = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_folder("llama")), options)
    adapter.save_pretrained(tmp_path / "adapter")
    tiny_tokenizer().save_pretrained(tmp_path / "adapter")
    name, commit = put_on_hub(tmp_path / "adapter", "lab/sft-adapter")
    config = parse_config(["--model_name_or_path", name, "--dataset_name=x", "--use_cpu"])
    model_config = load_model_config(config)
    assert identify_model(config) == commit and model_config.model_type == "llama"
    assert count_positions(config, model_config) == model_config.max_position_embeddings
    config.train.model_init_kwargs = {"max_position_embeddings": 99}
    assert count_positions(config, model_config) == 99
    assert load_tokenizer(config).get_vocab() == tiny_tokenizer().get_vocab()
    assert find_base(name, "main") == (str(tiny_folder("llama")), None)
    merged, expected = (load_model(each, {}).state_dict() for each in (name, str(tmp_path / "adapter")))
    assert all(torch.equal(merged[key], weight) for key, weight in expected.items())
    base = load_model(str(tiny_folder("llama")), {}).state_dict()
    assert not torch.equal(
        merged["model.layers.0.self_attn.q_proj.weight"], base["model.layers.0.self_attn.q_proj.weight"]
    )


@pytest.mark.parametrize(
    ("architecture", "options", "trained"),
    [
        ("olmo3", (), {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("olmo3", ("--lora_target_modules", "q_proj", "k_proj"), {"q_proj", "k_proj"}),
        ("llama", (), {"q_proj", "v_proj"}),  # PEFT's own choice
        ("olmoe", ("--lora_target_parameters", "mlp.experts.down_proj"), {"experts"}),
    ],
)
def test_lora_without_target_modules(tiny_folder, caplog, architecture, options, trained):
    caplog.set_level("INFO", "sfm_dpo")
    info_once.cache_clear()
    argv = [f"--model_name_or_path={tiny_folder(architecture)}", "--dataset_name=x", "--use_cpu", "--use_peft=true"]
    config = parse_config([*argv, "--lora_dropout=0", *options])
    for _ in range(2):
        adapter = meta_adapter(config, load_model_config(config))
    names = {
        name.partition(".lora_A")[0].rpartition(".")[2] for name, _ in adapter.named_parameters() if "lora_A" in name
    }
    assert names == trained
    assert caplog.text.count("(all-linear)") == (len(trained) > 2), "said once"


def test_cudnn_attention_is_off_once_a_model_is_loaded(tiny_folder):
    torch.backends.cuda.enable_cudnn_sdp(True)
    load_model(str(tiny_folder("llama")), {})
    assert not torch.backends.cuda.cudnn_sdp_enabled()


class Attack:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.mark.parametrize("is_attack", [False, True])
def test_a_zero_checkpoint_that_could_run_code_is_not_loaded(tmp_path, environment, is_attack):
    """Real checkpoints: ZeRO-2 and ZeRO-3 resume in tests/e2e."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    load_only_tensors()
    scalers = [LossScaler(1.0), DynamicLossScaler(2.0, 2, 1, 1, 1)]
    stored = [*scalers, ZeroStageEnum.gradients, fragment_address(1, 2)]
    torch.save([*stored, Attack(tmp_path / "ran")] if is_attack else stored, tmp_path / "states.pt")
    engine = TorchCheckpointEngine()
    with pytest.raises(UnpicklingError) if is_attack else nullcontext():
        engine.load(str(tmp_path / "states.pt"))
    assert not (tmp_path / "ran").exists()


def start(folder, *options) -> None:
    """What every start does before it reads data."""
    load_model_config(parse_config([f"--model_name_or_path={folder}", "--dataset_name=x", "--use_cpu", *options]))


@pytest.mark.parametrize(
    ("declared", "name"),
    [({"quant_method": "fp8"}, "fp8"), ({"load_in_4bit": True}, "load_in_4bit"), (None, None)],
)
def test_quantised_weights_are_refused_by_name(tiny_folder, tmp_path, declared, name):
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "m")
    edit(folder / "config.json", quantization_config=declared)
    with nullcontext() if name is None else pytest.raises(UserError, match=rf"quantised \({name}\); take .* bf16"):
        start(folder)


@pytest.mark.parametrize(
    ("kind", "trusted", "remedy"),
    [
        ("llama", "true", "remove trust_remote_code"),
        ("own", "true", "choose a model"),
        ("own", "false", "choose a model"),
    ],
)
def test_a_model_with_its_own_code_is_refused(tiny_folder, tmp_path, kind, trusted, remedy):
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "m")
    edit(folder / "config.json", model_type=kind, auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    (folder / "configuration_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UserError, match=rf"m: config.json names its own code \(auto_map\), .*; {remedy}"):
        start(folder, f"--trust_remote_code={trusted}")
    assert not (tmp_path / "ran").exists()
    edit(folder / "config.json", model_type="llama")
    start(folder)  # with Transformers' class


def test_a_text_class_that_would_lose_tensors_is_refused(tmp_path):
    Qwen3_5Config().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"'qwen3_5' is more than a language model: Qwen3_5ForCausalLM would lose"):
        start(tmp_path)


@pytest.mark.parametrize("published", [{"temperature": 0.6, "top_p": 0.9}, {"do_sample": False, "top_k": 20}])
def test_a_published_generation_config_is_saved_again(tiny_folder, tmp_path, published):
    """Though TRL and Transformers change its tokens."""
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps(published))
    start(folder)
    model = load_model(str(folder), {})
    model.generation_config.pad_token_id = 7
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/generation_config.json").read_text())
    assert saved.items() >= (published | {"do_sample": True, "pad_token_id": 7}).items()


@pytest.mark.parametrize("published", [{"temperature": 0.0}, {"length_penalty": 2.0}, {"num_return_sequences": 3}])
def test_a_generation_config_that_could_not_be_saved_is_refused_at_the_start(tiny_folder, tmp_path, published):
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps(published))
    (field,) = published
    with pytest.raises(UserError, match=rf"generation_config.json: .*`{field}`.*; correct or remove it$"):
        start(folder)


def test_a_head_of_its_own_is_saved_as_such(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "m")
    edit(folder / "config.json", tie_word_embeddings=True)
    load_model(str(folder), {}).save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["tie_word_embeddings"] is False
    weights = [load_file(path / "model.safetensors")["lm_head.weight"] for path in (folder, tmp_path / "saved")]
    assert torch.equal(*weights)


@pytest.mark.parametrize("loaded", [False, True])
def test_canary_num_experts(tmp_path, loaded, monkeypatch):
    """Stock TRL's head reads it; if that ever ends, correct_config need not add it."""
    monkeypatch.setattr(GraniteMoeConfig, "attribute_map", dict(STOCK_ATTRIBUTES))
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}
    model = AutoModelForCausalLM.from_config(GraniteMoeConfig(**shape, pad_token_id=0))
    if loaded:
        model.save_pretrained(tmp_path)
        model = load_model(str(tmp_path), {})
    add_fused_lm_head(model)
    ids = torch.ones(2, 8, dtype=torch.long)
    with nullcontext() if loaded else pytest.raises(AttributeError, match="num_experts"):
        assert model(input_ids=ids, labels=ids, fused_lm_head=True).aux_loss > 0


def test_canary_disable_dropout():
    """Stock TRL leaves OPT's rates; if that ever ends, disable_noise can go."""
    shape = {"vocab_size": 64, "hidden_size": 16, "ffn_dim": 16, "word_embed_proj_dim": 16, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(OPTConfig(**shape, num_hidden_layers=1, dropout=0.1))
    disable_dropout_in_model(model)
    layer = model.model.decoder.layers[0]
    assert layer.dropout == 0.1
    disable_noise(model)
    assert layer.dropout == layer.self_attn.dropout == 0.0


def test_routers_loss_of_a_policy_without_experts_is_refused(tiny_folder):
    dense = f"--model_name_or_path={tiny_folder('llama')}"
    experts = f"--model_name_or_path={tiny_folder('olmoe')}"
    fields = ["--dataset_name=x", "--use_cpu", "--router_aux_loss_coef=0.1"]
    config = parse_config([*fields, experts, f"--ref_model_name_or_path={tiny_folder('llama')}"])
    assert load_model_config(config).num_experts and load_model_config(config.reference)
    with pytest.raises(UserError, match=r"router_aux_loss_coef 0.1: .* is not a mixture of experts; remove it"):
        load_model_config(parse_config([*fields, dense]))


@pytest.mark.parametrize("disable", [False, True])
def test_canary_deepspeed_compiles_an_all_reduce_on_cpu(monkeypatch, disable):
    """Stock DeepSpeed builds it whatever the backend; if that ever ends, disable_deepspeed_shm can go."""
    import deepspeed
    from deepspeed.comm.torch import build_shm_op
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    cpu = deepspeed.accelerator.cpu_accelerator.CPU_Accelerator
    monkeypatch.setattr("deepspeed.comm.torch.get_accelerator", cpu, raising=False)  # imported at its first use
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", True)
    monkeypatch.setattr(ShareMemCommBuilder, "load", lambda self: "compiled")
    if disable:
        disable_deepspeed_shm()
    assert build_shm_op() == (None if disable else "compiled")


def split(prepare) -> tuple[torch.nn.Module, int]:
    """A model that is prepared for FSDP2, and its units."""
    state = SimpleNamespace(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = prepare(tiny_model("olmo3"), SimpleNamespace(state=state, device=torch.device("cpu")))
    return model, sum(isinstance(module, FSDPModule) for module in model.modules())


def test_the_reference_is_split_by_block(process_group):
    model, units = split(prepare_blocks)
    assert units == 3 + 1 and not model.training
    ids = torch.randint(0, 250, (2, 12))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, tiny_model("olmo3").eval()(ids).logits)


def test_canary_reference_is_one_unit(process_group):
    assert split(prepare_fsdp)[1] == 1


@pytest.mark.parametrize("kept", [False, True])
def test_log_probs_under_fsdp2_are_not_rounded(process_group, kept):
    """accelerate's own policy rounds them to bf16: if that ever ends, keep_precision can go."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    if kept:
        keep_precision(plugin)
    model = tiny_model("llama")
    add_fused_lm_head(model)
    fully_shard(model, mp_policy=plugin.mixed_precision_policy)
    ids = torch.randint(0, 250, (2, 12))
    with torch.no_grad():
        log_probs = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
    assert log_probs.dtype == (torch.float32 if kept else torch.bfloat16)
    assert torch.equal(log_probs, log_probs.bfloat16()) is not kept
