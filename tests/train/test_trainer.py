"""One step: the loss and its metrics against plain logits. Other losses: tests/e2e/test_oracle.py."""

import math

import pytest
import torch
from datasets import Dataset
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Llama4ForCausalLM, Llama4TextConfig
from trl.trainer.dpo_trainer import DataCollatorForPreference

from sfm_dpo.common.errors import UserError
from sfm_dpo.config.fields import parse_config
from sfm_dpo.data.lengths import Lengths
from sfm_dpo.data.pairs import Pairs
from sfm_dpo.data.tokenization import load_tokenizer, tokenize_pairs
from sfm_dpo.memory.asked import Asked, read_asked
from sfm_dpo.model.loading import blocks, load_model_config
from sfm_dpo.model.packing import find_shared
from sfm_dpo.run.facts import ForwardPath, MicroBatch, RunFacts
from sfm_dpo.train.base_model import base_model
from sfm_dpo.train.metrics import MetricSums, loss_scale, share_above, step_0_tolerance
from sfm_dpo.train.reference_cache import add_reference
from sfm_dpo.train.trainer import SFMDPOTrainer
from tests.e2e.test_oracle import measure
from tests.tiny_models import VOCAB_SIZE, tiny_model, tiny_tokenizer
from tests.toolbox import PLAIN, as_options


def pairs(n: int = 8) -> Dataset:
    """Plain text pairs whose responses differ in length by up to ten times; none is truncated."""
    rows = [{"prompt": f"question {i}" * (1 + i % 3) + ":", "chosen": " yes" * (1 + i * 3 % 7)} for i in range(n)]
    return Dataset.from_list([row | {"rejected": " nope" * (1 + i)} for i, row in enumerate(rows)])


def build_trainer(
    folder, output_dir, *cli: str, peft=None, data: Dataset | None = None
) -> tuple[SFMDPOTrainer, Asked, Pairs]:
    """A trainer that nothing has been applied to, what it was asked for, and its pairs."""
    argv = f"--model_name_or_path={folder} --dataset_name=x --output_dir={output_dir} --use_cpu --global_batch_size=4"
    argv += " --per_device_train_batch_size=4 --max_length=128 --learning_rate=1e-3 --logging_steps=1"
    config = parse_config([*argv.split(), "--save_strategy=no", *as_options(PLAIN), *cli])
    tokenizer = load_tokenizer(config)
    tokens, _ = tokenize_pairs(data or pairs(), tokenizer, config.train.max_length)
    asked = read_asked(config, load_model_config(config))
    own = {"peft_config": peft} if peft else {}
    trainer = SFMDPOTrainer(config, asked, train_dataset=tokens, processing_class=tokenizer, **own)
    return trainer, asked, Pairs({"train": tokens}, ["x"], len(tokens), [])


def make_trainer(folder, output_dir, *cli: str, peft=None, data: Dataset | None = None) -> SFMDPOTrainer:
    """A trainer that is ready to train, by the path that is tried first."""
    trainer, asked, pairs = build_trainer(folder, output_dir, *cli, peft=peft, data=data)
    path = ForwardPath(asked.can_pack, asked.can_share, asked.kernel or "fa2")
    with base_model(trainer) as base:
        pairs, caches = add_reference(base, path, pairs)
        layers = len(blocks(base.unwrapped())) if asked.layers is None else asked.layers
    trainer.apply(RunFacts(path=path, micro_batch=MicroBatch(asked.pairs or 1, layers), reference=caches), pairs)
    return trainer


def save(model, folder):
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def one_batch(trainer):
    """(loss, the metrics it recorded, the rows) of a batch of the first 4 pairs."""
    rows = [trainer.train_dataset[i] for i in range(4)]
    trainer.state.global_step = 1  # past the check of step 0
    trainer.model.train()
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(trainer.data_collator(rows)))
    metrics = trainer.train_sums.reduce()
    trainer.train_sums = MetricSums()
    return loss.item(), metrics, rows


def test_prefix_sharing_is_on_where_the_model_can(tiny_folder, tmp_path):
    trainer = make_trainer(tiny_folder("olmo3"), tmp_path, "--padding_free=true")
    assert trainer.path.prefix_sharing and trainer._precompute_model_hash is None  # test_canary_hash_module
    one_batch(trainer)
    counts = trainer.meter.counts
    assert counts["computed"] == counts["grid"] < counts["tokens"]
    for cli in (["--padding_free=false"], ["--padding_free=true", "--prefix_sharing=false"]):
        assert not make_trainer(tiny_folder("olmo3"), tmp_path, *cli).path.prefix_sharing


def test_a_loss_over_the_tokens_of_a_micro_batch(tiny_folder, tmp_path, caplog):
    """The balancing loss would count the tokens of a shared prompt once, and depends on the pairs per device."""
    caplog.set_level("INFO", "sfm_dpo")
    trainer = make_trainer(tiny_folder("olmoe"), tmp_path, "--padding_free=true")
    assert not trainer.path.prefix_sharing
    assert "prefix_sharing is off: router_aux_loss_coef: that loss counts" in caplog.text
    message = r"^prefix_sharing True: router_aux_loss_coef: .*; set prefix_sharing: false$"
    with pytest.raises(UserError, match=message):
        make_trainer(tiny_folder("olmoe"), tmp_path, "--padding_free=true", "--prefix_sharing=true")
    off = "--padding_free=true", "--prefix_sharing=true", "--router_aux_loss_coef=0"
    trainer = make_trainer(tiny_folder("olmoe"), tmp_path, *off)
    assert trainer.path.prefix_sharing


def test_the_length_column_is_what_is_computed(tiny_folder, tmp_path):
    """Also of prompts that were cut, and of pairs whose two renderings share only part of the prompt, or nothing."""
    tokenizer = tiny_tokenizer()
    texts = [("a long prompt of many words", "yes", "no"), ("p", "yes", "no"), ("prompt", "x" * 200, "y" * 90)]
    rows = [dict(zip(("prompt", "chosen", "rejected"), text, strict=True)) for text in texts]
    tokens, _ = tokenize_pairs(Dataset.from_list(rows), tokenizer, 64, max_prompt_length=9)
    empty_prompt = {"prompt_ids": [], "chosen_ids": [5, 6, 7], "rejected_ids": [8, 6], "common_length": 0}
    tokens = [*tokens.to_list(), empty_prompt]
    for row in tokens:
        row.update({f"{name}_length": len(row[f"{name}_ids"]) for name in ("prompt", "chosen", "rejected")})
    tokens = Dataset.from_list(tokens)
    batch = DataCollatorForPreference(pad_token_id=0, max_length=64)(tokens.to_list())
    shared = find_shared(batch["input_ids"], batch["attention_mask"], batch["completion_mask"] == 1)
    assert shared[:4].sum() == 0 and shared[4:].sum(dim=1).tolist() == [8, 0, 5, 0]
    computed = (batch["attention_mask"].bool() & ~shared).sum(dim=1)
    lengths = Lengths.of(tokens).truncate(64)
    assert lengths.computed(True).tolist() == (computed[:4] + computed[4:]).tolist()
    real = batch["attention_mask"].sum(dim=1)
    assert lengths.computed(False).tolist() == (real[:4] + real[4:]).tolist()


def test_a_tie_counts_half(tiny_folder, tmp_path):
    assert share_above(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 2.0, 2.0])).tolist() == [0.0, 0.5, 1.0]
    options = ["--loss_type=sigmoid", "--beta=100", "--allow_unnormalized_beta=true", "--padding_free=true"]
    trainer = make_trainer(tiny_folder("gpt_neox"), tmp_path, "--precompute_ref_log_probs=true", *options)
    assert one_batch(trainer)[1]["rewards/accuracies"] == 0.5
    with torch.no_grad():
        trainer.model.get_output_embeddings().weight.mul_(1.001)
    assert one_batch(trainer)[1]["rewards/accuracies"] != 0.5


def test_training_metrics_depend_on_no_micro_batch(tiny_folder, tmp_path):
    logs = []
    for size in (4, 1):
        trainer = make_trainer(tiny_folder("gpt_neox"), tmp_path, f"--per_device_train_batch_size={size}")
        trainer.train()
        entries = [entry for entry in trainer.state.log_history if "loss" in entry]
        logs.append([{k: v for k, v in entry.items() if not k.startswith("perf/")} for entry in entries])
    assert len(logs[0]) == 2 and {"entropy", "logits/chosen", "mean_token_accuracy", "num_tokens"} < set(logs[0][0])
    for one, other in zip(*logs, strict=True):
        assert one == pytest.approx(other, abs=1e-4, rel=1e-4)


def test_held_out_metrics_of_tokens_depend_on_no_batch_size(tiny_folder, tmp_path):
    """Against each sequence alone: pairs of other lengths count by their tokens."""
    trainer = make_trainer(tiny_folder("llama"), tmp_path, "--padding_free=true")
    dataset = trainer.train_dataset.select(range(5))
    model = trainer.bare_model().eval()
    entropies: list[torch.Tensor] = []
    hits: list[torch.Tensor] = []
    for row in dataset:
        for side in ("chosen", "rejected"):
            ids = torch.tensor([row["prompt_ids"] + row[f"{side}_ids"]])
            answer = slice(len(row["prompt_ids"]) - 1, -1)  # whose tokens these positions predict
            logits = model(input_ids=ids).logits[0, answer].detach().double()
            entropies.append(torch.distributions.Categorical(logits=logits).entropy())
            if side == "chosen":
                hits.append((logits.argmax(-1) == ids[0, len(row["prompt_ids"]) :]).double())
    assert len({len(entropy) for entropy in entropies}) > 2
    for size in (1, 2, 5):
        trainer.args.per_device_eval_batch_size = size
        metrics = trainer.evaluate(dataset)
        assert metrics["eval_entropy"] == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-5)
        assert metrics["eval_mean_token_accuracy"] == pytest.approx(torch.cat(hits).mean().item(), abs=1e-6)


def test_lora_trains_the_adapter_and_its_reference_is_the_base(tiny_folder, tmp_path):
    folder = tiny_folder("llama")
    peft = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = make_trainer(folder, tmp_path, "--num_train_epochs", "3", "--learning_rate", "1e-2", peft=peft)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    adapter = {name for name in before if "lora" in name}
    assert {name for name, p in trainer.model.named_parameters() if p.requires_grad} == adapter
    trainer.train()
    curve = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert curve[0] == pytest.approx(math.log(2), abs=1e-5) and curve[-1] < curve[0] - 0.05
    assert {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])} == adapter

    loss, _, rows = one_batch(trainer)
    merged = trainer.model.merge_and_unload()
    expected, _ = measure(merged, AutoModelForCausalLM.from_pretrained(folder), rows, "sigmoid_norm", 5.0)
    assert loss == pytest.approx(expected.item(), abs=1e-4)


def test_lora_of_a_type_that_peft_does_not_know_trains_all_linear_layers(tiny_folder, tmp_path):
    trainer = make_trainer(tiny_folder("olmo3"), tmp_path, "--use_peft=true", "--lora_dropout=0")
    adapters = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    assert len(adapters) == 2 * 7 * 3 and not any("lm_head" in name for name in adapters)


def test_step_0_stops_a_run_whose_policy_is_not_its_reference(tiny_folder, tmp_path):
    trainer = make_trainer(tiny_folder("gpt_neox"), tmp_path)
    torch.nn.init.normal_(trainer.model.get_output_embeddings().weight)
    with pytest.raises(UserError, match=r"step 0: .*policy and reference are different models"):
        trainer.train()


def test_step_0_names_dropout(tiny_folder, tmp_path):
    model = save(tiny_model("gpt_neox", hidden_dropout=0.3), tmp_path / "model")
    with pytest.raises(UserError, match=r"step 0: .*dropout"):
        make_trainer(model, tmp_path / "a", "--disable_dropout", "false").train()


def test_a_model_without_a_backbone_is_refused(tmp_path):
    shape = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    shape |= {"intermediate_size": 96, "intermediate_size_mlp": 96, "num_local_experts": 2, "head_dim": 16}
    config = Llama4TextConfig(**shape, pad_token_id=256)
    model = save(Llama4ForCausalLM(config), tmp_path / "model")
    with pytest.raises(UserError, match="fused LM head finds no backbone in Llama4ForCausalLM"):
        make_trainer(model, tmp_path / "a")


@pytest.mark.parametrize("noise", [0.015, 2e-5])
@pytest.mark.parametrize(("loss", "beta"), [("sigmoid_norm", 5.0), ("sigmoid", 0.1)])
@pytest.mark.parametrize("tokens", [2, 50, 4000])
def test_rounding_passes_step_0_and_a_wrong_reference_does_not(loss, beta, noise, tokens):
    """Of 4,096 pairs whose tokens are off by noise, and by noise and a twentieth of a nat on every rejected token."""
    mask = torch.ones(2, tokens)
    scale = loss_scale(mask, loss)
    tolerance = step_0_tolerance(mask, scale, beta, noise).item()
    sums = torch.randn(4096, 2, generator=torch.Generator().manual_seed(0)) * noise * tokens**0.5
    error = beta * (sums / scale).diff(dim=1).abs() / 2
    assert error.mean() < tolerance / 2 and error.quantile(0.999) < tolerance
    if noise < 0.01 or tokens >= 50:  # two tokens in bf16 cannot tell
        assert beta * 0.05 * tokens / scale[0].item() / 2 > tolerance


def test_all_weights_of_a_checkpoint_come_back_and_none_is_drawn_at_random(tiny_folder, tmp_path):
    """save_pretrained gives GPT-NeoX's head another name than the module's."""
    trainer = make_trainer(tiny_folder("gpt_neox"), tmp_path / "run")
    saved = tiny_model("gpt_neox", seed=1)
    folder = save(saved, tmp_path / "checkpoint-2")
    weights = load_file(folder / "model.safetensors")
    trainer._load_from_checkpoint(str(folder))
    for name, weight in saved.named_parameters():
        assert torch.equal(trainer.model.get_parameter(name), weight), name
    del weights[next(name for name in weights if "layers.1" in name)]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"checkpoint-2: its weights do not match .*layers\.1\..* is missing"):
        trainer._load_from_checkpoint(str(folder))


def test_tied_weights_are_saved_once_and_no_pickle_of_the_arguments(tmp_path):
    save(tiny_model("llama", tie_word_embeddings=True), tmp_path / "model")
    trainer = make_trainer(tmp_path / "model", tmp_path / "run")
    trainer._save(str(tmp_path / "run"), clone_tensors_for_torch_save(trainer.model.state_dict()))  # as under ZeRO-2
    names = load_file(tmp_path / "run/model.safetensors").keys()
    assert names == load_file(tmp_path / "model/model.safetensors").keys()
    assert not (tmp_path / "run/training_args.bin").exists()
    trainer._load_from_checkpoint(str(tmp_path / "run"))
    assert (tmp_path / "run/model.safetensors").stat().st_mode == (tmp_path / "run/config.json").stat().st_mode
    written = (tmp_path / "run/tokenizer_config.json").read_text()
    assert "is_local" not in written and "local_files_only" not in written
