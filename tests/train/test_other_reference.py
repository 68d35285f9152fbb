"""A reference that is another model (ref_model_name_or_path). Launchers: tests/e2e/test_oracle.py."""

import gc
import json
import math
import shutil
import weakref

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

import train_dpo
from sfm_dpo.run.facts import ForwardPath, MicroBatch, RunFacts
from sfm_dpo.run.folder import read_file
from sfm_dpo.train import reference_cache
from sfm_dpo.train.base_model import BaseModel
from tests.e2e.test_oracle import measure
from tests.tiny_models import tiny_model, tiny_tokenizer
from tests.toolbox import error_line, on_cpu, pairs
from tests.train.test_trainer import build_trainer, make_trainer

LORA = LoraConfig(r=4, target_modules=["q_proj"])
CACHED = "--precompute_ref_log_probs=true"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(reference_cache, "HF_CACHE_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf/sfm_dpo/reference"


@pytest.fixture
def other(tiny_folder) -> str:
    return f"--ref_model_name_or_path={tiny_folder('gpt_neox')}"


@pytest.mark.parametrize(("packed", "cached"), [("true", "false"), ("false", "true")])
def test_step_0_of_an_adapter_is_that_of_plain_torch_in_float64(tiny_folder, tmp_path, other, packed, cached):
    """Without an adapter: tests/e2e/test_oracle.py."""
    cli = f"--padding_free={packed}", f"--precompute_ref_log_probs={cached}"
    trainer = make_trainer(tiny_folder("llama"), tmp_path, other, *cli, peft=LORA)
    rows = [trainer.train_dataset[i] for i in range(4)]
    trainer.model.train()
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(trainer.data_collator(rows)))
    assert trainer.step_0_checked
    models = (AutoModelForCausalLM.from_pretrained(tiny_folder(name)).double() for name in ("llama", "gpt_neox"))
    policy, reference = models
    expected, metrics = measure(policy, reference, rows, "sigmoid_norm", 5.0)
    assert abs(expected.item() - math.log(2)) > 0.05
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    recorded = trainer.train_sums.reduce()
    assert recorded["rewards/chosen"] == pytest.approx(metrics["rewards/chosen"], abs=1e-4)


def test_the_key_is_that_of_the_reference(tiny_folder, tmp_path, cache, other):
    llama = tiny_folder("llama")
    neox = tiny_folder("gpt_neox")

    def fill(model, *cli, peft=None) -> int:
        make_trainer(model, tmp_path / "run", CACHED, *cli, peft=peft)
        return len(list(cache.iterdir()))

    assert fill(llama) == 1
    assert fill(llama, f"--ref_model_name_or_path={llama}") == 1
    assert fill(llama, other) == 2
    assert fill(llama, other, peft=LORA) == 2
    assert fill(neox) == 2


@pytest.mark.parametrize("packed", ["false", "true"])
def test_a_cached_reference_is_gone_when_training_begins(tiny_folder, tmp_path, other, monkeypatch, packed):
    seen = []
    scored = BaseModel.score

    def look(self, dataset, rows, by_reference=False):
        seen.append(weakref.ref(self.reference))
        return scored(self, dataset, rows, by_reference)

    monkeypatch.setattr(BaseModel, "score", look)
    gc.disable()
    trainer = make_trainer(tiny_folder("llama"), tmp_path, other, CACHED, f"--padding_free={packed}")
    gc.enable()
    assert trainer and seen and seen[0]() is None


def test_a_cached_reference_that_deepspeed_keeps_has_no_weights(tiny_folder, tmp_path, other):
    trainer, _, tokens = build_trainer(tiny_folder("llama"), tmp_path, other, CACHED)
    reference = trainer.ref_model
    for parameter in reference.parameters():
        parameter.ds_tensor = parameter.data.clone()
    trainer.zero_stage = 3
    trainer.apply(RunFacts(path=ForwardPath(False, False, "fa2"), micro_batch=MicroBatch(4, 0)), tokens)
    assert not any(parameter.nbytes + parameter.ds_tensor.nbytes for parameter in reference.parameters())


@pytest.mark.slow
def test_a_run_of_train_dpo(tiny_folder, tmp_path, write_rows, capsys):
    """The preflight judges the policy; a resumed run must have the reference."""
    data = write_rows("pairs.jsonl", pairs(12))
    run = tmp_path / "run"
    fields = {"max_steps": 2, "save_steps": 1, "precompute_ref_log_probs": "true"}
    fields |= {"preflight": "warn", "guard": "warn"}
    other = tiny_folder("gpt_neox")

    def train(name, **more) -> int:
        return train_dpo.main(on_cpu(tiny_folder("llama"), data, tmp_path / name, **fields | more))

    sets = json.dumps({"same": str(data)})
    assert train("run", ref_model_name_or_path=other, eval_datasets=sets) == train("plain") == 0
    figures = [read_file(tmp_path / name / "preflight.json")["figures"] for name in ("run", "plain")]
    assert figures[0]["chosen_logp"] == pytest.approx(figures[1]["chosen_logp"], abs=1e-4)
    assert "reference `gpt_neox` |" in (run / "README.md").read_text()
    (run / "status.json").unlink()
    shutil.rmtree(run / "checkpoint-2")
    capsys.readouterr()
    assert train("run", eval_datasets=sets) == 2
    assert f"holds another run (ref_model_name_or_path is {other} there" in error_line(capsys.readouterr().err)


def test_what_is_refused(tiny_folder, tmp_path, write_rows, capsys):
    data = write_rows("pairs.jsonl", pairs(12))
    for name in ("template", "vocabulary", "embeddings"):
        tokenizer = tiny_tokenizer()
        if name == "template":
            tokenizer.chat_template += " "
        elif name == "vocabulary":
            tokenizer.add_tokens(["<other>"])
        size = {"vocab_size": 100, "pad_token_id": None, "eos_token_id": None} if name == "embeddings" else {}
        tiny_model("llama", **size).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    words = {"template": "its chat template differs", "vocabulary": "its vocabulary differs"}
    words |= {"embeddings": "its vocabulary differs", "absent": "neither a folder with a model nor"}
    for name, reason in words.items():
        fields = {"ref_model_name_or_path": tmp_path / name}
        assert train_dpo.main(on_cpu(tiny_folder("llama"), data, tmp_path / "run", **fields)) == 2
        assert f"ref_model_name_or_path {tmp_path / name}: {reason}" in error_line(capsys.readouterr().err)
