"""Canaries: each runs stock upstream alone and asserts a bug that sfm_dpo works around in an override or a patch.

When one fails, the code below the comment `Upstream: ... Canary: its name` in sfm_dpo can be deleted.
"""

import gc
import inspect
import json
import re
import warnings
import weakref
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from datasets import Dataset, load_dataset
from datasets.fingerprint import get_temporary_cache_files_directory
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime.zero.partition_parameters import free_param
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounter
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from trl import DPOConfig, DPOTrainer
from trl.models.utils import disable_gradient_checkpointing

import train_dpo
from sfm_dpo.common.files import PROJECT
from tests.offload import train_engine
from tests.tiny_models import tiny_model, tiny_tokenizer
from tests.toolbox import on_cpu, write_jsonl
from tests.toolbox import pairs as toy_pairs
from tests.train.test_trainer import pairs

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}


def make(output_dir, model=None, train_dataset=None, eval_dataset=None, **args) -> DPOTrainer:
    """A stock DPOTrainer whose policy and reference are alike."""
    small = {"per_device_train_batch_size": 2, "max_length": 128, "save_strategy": "no", "logging_steps": 1}
    small |= {"use_cpu": True, "bf16": False, "report_to": "none", "gradient_checkpointing": False}
    args = DPOConfig(str(output_dir), **small | args)
    model = model or tiny_model("llama", **SMALL)
    reference = None if args.precompute_ref_log_probs else tiny_model("llama", **SMALL)
    return DPOTrainer(model, reference, args, None, train_dataset or pairs(), eval_dataset, tiny_tokenizer())


@pytest.fixture(scope="module")
def trainer(tmp_path_factory) -> DPOTrainer:
    """Not trained; no test may change it for good."""
    return make(tmp_path_factory.mktemp("trainer"), loss_type=["sigmoid_norm"])


def test_canary_arguments(tmp_path, monkeypatch):
    trainer = make(tmp_path, padding_free=True)
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(2)])
    assert not trainer.padding_free and not batch["attention_mask"].all()

    real = DPOConfig.__post_init__

    def under_zero3(self):
        real(self)
        self.deepspeed_plugin = SimpleNamespace(zero_stage=3)

    def read_arguments(self, args, **kwargs):
        assert args.gradient_checkpointing_kwargs == {"use_reentrant": True}
        assert args.activation_checkpointing_kwargs is None
        raise InterruptedError

    monkeypatch.setattr(DPOConfig, "__post_init__", under_zero3)
    monkeypatch.setattr(Trainer, "__init__", read_arguments)
    model = get_peft_model(tiny_model("llama", **SMALL), LoraConfig(target_modules="all-linear"))
    with pytest.raises(InterruptedError):
        make(tmp_path, model, precompute_ref_log_probs=True, gradient_checkpointing=True)


def test_canary_prepare_dataset(tmp_path, trainer):
    ids = trainer.train_dataset.select_columns(["prompt_ids", "chosen_ids", "rejected_ids"])
    with pytest.raises(KeyError):  # it looks for the text
        make(tmp_path, train_dataset=ids)
    prints = [make(tmp_path, learning_rate=rate).train_dataset._fingerprint for rate in (1e-6, 1e-6, 2e-6)]
    assert prints[0] == prints[1] != prints[2]


def test_canary_precompute_ref_logps(tmp_path, monkeypatch):
    rows = pairs()
    assert rows._get_cache_file_path("key").startswith(get_temporary_cache_files_directory())  # each process's own
    rows.save_to_disk(tmp_path / "rows")
    rows = Dataset.load_from_disk(tmp_path / "rows")

    def caches(rate: float) -> set[str]:
        trainer = make(tmp_path, train_dataset=rows, precompute_ref_log_probs=True, learning_rate=rate)
        return {file["filename"] for file in trainer.train_dataset.cache_files}

    assert caches(1e-6) == caches(1e-6) != caches(2e-6)
    compute = DPOTrainer.compute_ref_log_probs
    batches = []

    def die_in_the_last_batch(self, model, batch):
        batches.append(batch)
        if len(batches) == 4:
            raise InterruptedError
        return compute(self, model, batch)

    monkeypatch.setattr(DPOTrainer, "compute_ref_log_probs", die_in_the_last_batch)
    with pytest.raises(InterruptedError):
        caches(3e-6)
    caches(3e-6)
    assert len(batches) == 4 + 4


def test_canary_hash_module(tmp_path):
    """Its only use is in `_precompute_ref_logps`, which is overridden."""
    assert make(tmp_path, precompute_ref_log_probs=True)._precompute_model_hash
    assert "_precompute_model_hash" in inspect.getsource(DPOTrainer._precompute_ref_logps)


def test_canary_sft_weight(tmp_path):
    trainer = make(tmp_path, loss_type=["sft"])

    def mean_loss(*batches: list[int]) -> float:
        losses = []
        for rows in batches:
            batch = trainer.data_collator([trainer.train_dataset[row] for row in rows])
            losses.append(trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch)).item())
        return sum(losses) / len(losses)

    assert mean_loss([0, 1, 2, 3]) != pytest.approx(mean_loss([0, 1], [2, 3]), rel=1e-4)


def test_canary_compute_loss(trainer):
    row = {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 5], "rejected_ids": [6, 7, 8]}
    batch = trainer.data_collator([row]) | {"ref_chosen_logps": torch.zeros(1), "ref_rejected_logps": torch.ones(1)}
    trainer.precompute_ref_logps = True
    loss = trainer.compute_loss(trainer.model.train(), batch)
    trainer.precompute_ref_logps = False
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    margin = torch.tensor(metrics["rewards/margins"])
    assert metrics["rewards/chosen"] == pytest.approx(trainer.beta * metrics["logps/chosen"])
    assert loss.item() == pytest.approx(-F.logsigmoid(margin / 3).item()) and abs(margin) > 0.1


def test_canary_gathered_metrics(trainer, monkeypatch):
    row = {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 5], "rejected_ids": [6, 7, 8]}
    gathered = []
    for name in ("gather", "gather_for_metrics"):
        monkeypatch.setattr(trainer.accelerator, name, lambda value: gathered.append(value) or value)
    trainer.compute_loss(trainer.model.train(), trainer.data_collator([row]))
    assert len(gathered) == 15


def test_canary_eval_metrics(tmp_path):
    trainer = make(tmp_path, eval_dataset=pairs(3))
    by_batch = []
    for trainer.args.per_device_eval_batch_size in (2, 3):
        trainer.evaluate()
        by_batch.append(trainer.state.log_history[-1]["eval_logps/rejected"])
    assert by_batch[0] != pytest.approx(by_batch[1], rel=1e-2)
    logged = make(tmp_path, eval_dataset={"math": pairs(2)}).evaluate()
    assert "eval_math_loss" in logged and "eval_rewards/accuracies" in logged
    assert not [name for name in logged if name.startswith("eval_math_") and "rewards" in name]


def test_canary_num_tokens(tmp_path):
    make(tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    trainer = make(tmp_path, max_steps=3)
    trainer.train(resume_from_checkpoint=True)
    before, after = [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry][-2:]
    assert after < before


def test_canary_steps_of_a_resumed_run(tmp_path):
    make(tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    trainer = make(tmp_path, max_steps=3, save_strategy="steps", save_steps=1)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.save_steps == 2


def test_canary_learning_rate_of_a_resumed_run(tmp_path):
    make(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, learning_rate=1e-3).train()
    trainer = make(tmp_path, max_steps=3, learning_rate=1e-5, lr_scheduler_type="constant")
    trainer.train(resume_from_checkpoint=True)
    assert trainer.optimizer.param_groups[0]["lr"] == 1e-3


def test_canary_tied_weights():
    cloned = clone_tensors_for_torch_save(tiny_model("llama", tie_word_embeddings=True, **SMALL).state_dict())
    assert cloned["lm_head.weight"].data_ptr() != cloned["model.embed_tokens.weight"].data_ptr()


def test_canary_torch_compile(tmp_path):
    trainer = make(tmp_path, torch_compile=True, torch_compile_backend="eager")
    compiled = trainer.accelerator.prepare_model(trainer.model)
    assert isinstance(compiled, torch._dynamo.OptimizedModule)
    assert not [name for name in vars(trainer.args) if "regional" in name]


def test_canary_prepare_input(trainer, monkeypatch):
    config = HfTrainerDeepSpeedConfig({"bf16": {"enabled": True}})
    config._dtype = torch.bfloat16  # as trainer_config_process fills it in
    state = vars(trainer.accelerator.state)
    monkeypatch.setitem(state, "distributed_type", DistributedType.DEEPSPEED)
    monkeypatch.setitem(state, "deepspeed_plugins", SimpleNamespace(hf_ds_config=config))
    monkeypatch.setattr(trainer, "is_deepspeed_enabled", True)
    assert trainer._prepare_inputs({"ref_chosen_logps": torch.tensor([-1001.0])})["ref_chosen_logps"] == -1000


def test_canary_compute_ref_log_probs(trainer, monkeypatch):
    entered = []
    monkeypatch.setattr(trainer, "is_fsdp_enabled", True)
    monkeypatch.setattr(trainer.accelerator, "autocast", lambda: entered.append(True) or nullcontext())
    batch = trainer._prepare_inputs(trainer.data_collator(list(trainer.train_dataset.select(range(2)))))
    trainer.compute_loss(trainer.model, batch)
    assert not entered  # the policy's autocast is in the forward that accelerate prepares, but for FSDP2
    trainer.compute_ref_log_probs(trainer.ref_model, batch)
    assert entered


def test_canary_checkpointed_layers(trainer):
    trainer.model.activation_checkpointing_enable({"use_reentrant": False})
    layers = [module for module in trainer.model.modules() if isinstance(module, GradientCheckpointingLayer)]
    layers[-1].gradient_checkpointing = False
    hooks = trainer.model.get_input_embeddings()._forward_hooks
    before = len(hooks)
    with disable_gradient_checkpointing(trainer.model, {"use_reentrant": False}):
        assert not trainer.model.is_gradient_checkpointing
    assert all(layer.gradient_checkpointing for layer in layers) and len(hooks) > before
    trainer.model.gradient_checkpointing_disable()


def test_canary_sync_each_batch(tmp_path, process_group):
    trainer = make(tmp_path, gradient_accumulation_steps=2, max_steps=1)
    trainer.is_fsdp_enabled = True
    state = trainer.accelerator.state
    state.distributed_type = PartialState().distributed_type = DistributedType.FSDP  # see test_canary_fsdp_on_cpu
    state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    reduced = []

    class Watch(TrainerCallback):
        def on_substep_end(self, args, state, control, model, **kwargs):
            reduced.extend(parameter.grad is not None for parameter in model.parameters())

        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            reduced.append(all(isinstance(parameter.grad, DTensor) for parameter in model.parameters()))

    trainer.add_callback(Watch())
    trainer.train()
    *after_the_first, in_the_end = reduced
    assert after_the_first and not any(after_the_first) and in_the_end  # whole until then, where autograd put them


def test_canary_load_from_checkpoint(tmp_path):
    saved = tiny_model("gpt_neox", seed=1)
    trainer = make(tmp_path, tiny_model("gpt_neox"))
    saved.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    trainer._load_from_checkpoint(str(tmp_path))
    assert torch.equal(trainer.model.get_input_embeddings().weight, saved.get_input_embeddings().weight)
    assert not torch.equal(trainer.model.lm_head.weight, saved.lm_head.weight)
    config = {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(AttributeError, match="max_position_embeddings"):
        trainer._load_from_checkpoint(str(tmp_path))


def test_canary_save_model(tmp_path, trainer, monkeypatch):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    monkeypatch.setattr(trainer, "is_fsdp_enabled", True)
    monkeypatch.setitem(vars(trainer.accelerator.state), "fsdp_plugin", plugin)
    trainer.save_model(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_canary_graph_for_every_layer():
    for use_cache, graphs in ((False, 1), (True, 2)):
        model = tiny_model("llama", **SMALL)
        counter = CompileCounter()
        for layer in model.model.layers:
            layer.compile(dynamic=True, backend=counter)
        with torch.no_grad():
            model(torch.ones(1, 4, dtype=torch.long), use_cache=use_cache)
        assert counter.frame_count == graphs
        torch.compiler.reset()


def test_canary_fsdp_on_cpu(process_group):
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    assert isinstance(accelerator.prepare_model(torch.nn.Linear(2, 2)), torch.nn.parallel.DistributedDataParallel)


def test_canary_fsdp_outputs():
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.output_dtype == torch.bfloat16
    assert plugin.mixed_precision_policy.cast_forward_inputs
    plugin.mixed_precision_policy = {"param_dtype": torch.bfloat16, "output_dtype": None}
    with pytest.raises(ValueError, match="output_dtype"):
        plugin.set_mixed_precision("bf16")


def test_canary_timeout_of_zero(process_group):
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=7))
    groups = [dist.group.WORLD, TorchBackend.new_group(None, [0])]
    timeouts = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
    assert timeouts == [timedelta(seconds=7), timedelta(minutes=30)]  # gloo's own


def test_canary_zero3_parameter():
    """Its size and shape; deepspeed.zero.Init keeps those of the whole tensor in ds_numel and ds_shape alone."""
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    parameter.ds_active_sub_modules = set()
    parameter.ds_status = None
    free_param(parameter)
    assert parameter.numel() == 0 and parameter.shape != (2, 3)


def test_canary_zero3_keeps_a_model(process_group):
    """That nothing else refers to, with its shards."""
    model = torch.nn.Linear(8, 8)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with (
        patch.dict(deepspeed.ops.__compatible_ops__, {"deepspeed_shm_comm": False}),  # otherwise it is compiled
        patch.object(deepspeed.utils.groups, "_WORLD_GROUP", None),  # it would outlive the process group
    ):
        engine = deepspeed.initialize(model=model, config=config)[0]
    engine.optimizer.destroy()
    kept = weakref.ref(model)
    del model, engine
    gc.collect()
    assert kept().weight.ds_tensor.nbytes


def test_canary_offloaded_gradients(process_group):
    """After one gradient that is not finite all updates are skipped; a layer without gradients takes its last ones."""
    nan = float("nan")
    assert train_engine("offload", [(True, nan), (True, 1), (True, 1)])[0] == [1, 2, 3]
    assert train_engine("zero2", [(True, nan), (True, 1), (True, 1)])[0] == [1, 1, 1]
    weights = {launch: train_engine(launch, [(True, 1), (False, 1)])[1] for launch in ("zero2", "offload")}
    assert weights["zero2"][0] == weights["zero2"][1] and weights["offload"][0] != weights["offload"][1]


def test_canary_datasets_fingerprint():
    rows = pairs()
    assert not [name for name in dir(rows) if "fingerprint" in name and not name.startswith("_")]
    assert rows.select([1, 0])._fingerprint == rows.select([1, 0])._fingerprint != rows._fingerprint


def test_canary_datasets_indices():
    rows = pairs()
    assert [name for name in dir(rows) if "indices" in name and name[0] != "_"] == ["flatten_indices"]
    assert rows._indices is None and rows.select([1, 0])._indices is not None
    assert rows.flatten_indices()._fingerprint != rows._fingerprint  # written anew, though there is nothing to do


def test_canary_datasets_json(tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"content": text} for text in ("42", '"Yes."', ["parts"])])
    loaded = load_dataset("json", data_files=str(rows), split="train")
    assert loaded["content"][:] == [42, "Yes.", ["parts"]]


def test_canary_template_clock():
    """Which no argument sets: a function becomes text that cannot be called."""
    with pytest.raises(TypeError, match="not callable"):
        template = "{{ strftime_now('%Y') }}"
        messages = [{"role": "user", "content": "q"}]
        options = {"chat_template": template, "strftime_now": lambda form: "1999"}
        tiny_tokenizer().apply_chat_template(messages, tokenize=False, **options)


COMMENT = re.compile(r"Upstream: \w+ [\d.]+, \S+, [^:]+: .+? Canary: (test_canary_\w+)")


def test_each_comment_names_a_canary_and_each_canary_has_a_comment():
    found = set()
    for path in PROJECT.glob("sfm_dpo/**/*.py"):
        lines = [line.strip() for line in path.read_text().splitlines()]
        comments = " ".join(line[2:] if line.startswith("# ") else "\n" for line in lines)
        named = COMMENT.findall(comments)
        assert len(named) == comments.count("Upstream: "), path
        found.update(named)
    tests = "\n".join(path.read_text() for path in PROJECT.glob("tests/**/*.py"))
    assert found == set(re.findall(r"^def (test_canary_\w+)", tests, re.MULTILINE))


def test_deprecated_names_in_use_are_on_the_page(tiny_folder, tmp_path):
    """A run of this project warns of no name that a next version removes, except those that the page explains."""
    data = write_jsonl(tmp_path / "pairs.jsonl", toy_pairs(8))
    fields = {"padding_free": "true", "gradient_checkpointing": "true", "precompute_ref_log_probs": "true"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert train_dpo.main(on_cpu(tiny_folder("llama"), data, tmp_path / "run", **fields)) == 0
    deprecated = [str(w.message) for w in caught if issubclass(w.category, FutureWarning | DeprecationWarning)]
    names = {re.search(r"`(\w+)", message)[1] for message in deprecated if "will be removed" in message}
    page = (PROJECT / "docs/internals/upstream.md").read_text().split("## Next versions")[1]
    assert names == {"gradient_checkpointing", "is_gradient_checkpointing"}
    assert all(f"`{name}`" in page for name in names)
