"""torch_compile: one graph for all batch shapes, the same figures, the same names in a checkpoint, with every flag.

Under ZeRO-2: tests/e2e/test_golden.py.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers.modeling_layers import GradientCheckpointingLayer
from trl.trainer.utils import add_fused_lm_head

import train_dpo
from sfm_dpo.model.packing import compile_layers, enable_padding_free
from sfm_dpo.run.folder import write_status
from tests.tiny_models import tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.grid, pytest.mark.usefixtures("no_report")]
KINDS_OF_LAYER = {"gpt_neox": 1, "llama": 1, "olmo3": 2}
ALL_FLAGS = "--padding_free true --precompute_ref_log_probs true --train_sampling_strategy batch_rebalance"

GRAPHS = []


@torch._dynamo.register_backend
def counting(graph, example_inputs):
    """The name of a backend, for `torch_compile_backend`: runs the graph as it is, and remembers it."""
    GRAPHS.append(graph)
    return graph.forward


@pytest.fixture
def graphs():
    """Each graph that a backend is asked to compile."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    GRAPHS.clear()
    yield GRAPHS
    torch._dynamo.reset()


def make_batch(seed: int, device: str = "cpu", longest: int = 60) -> dict[str, torch.Tensor]:
    """TRL's batch: between 2 and 6 sequences of 4 to `longest` tokens, prompts of 3."""
    generator = torch.Generator().manual_seed(seed)
    rows = 2 * int(torch.randint(1, 4, (1,), generator=generator))
    lengths = torch.randint(4, longest, (rows, 1), generator=generator)
    position = torch.arange(int(lengths.max()))[None]
    ids = torch.randint(0, 250, (rows, position.shape[1]), generator=generator)
    ids[rows // 2 :, :3] = ids[: rows // 2, :3]
    batch = {
        "input_ids": ids.where(position < lengths, 256),
        "attention_mask": (position < lengths).long(),
        "labels": ids.where((position < lengths) & (position > 2), -100),
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


def make_model(
    architecture: str, *, packed=True, sharing=False, checkpointing=False, backend=None, device="cpu", **kwargs
):
    model = tiny_model(architecture, **kwargs).to(device).train()
    add_fused_lm_head(model)
    if packed:
        enable_padding_free(model, sharing)
    if checkpointing:
        model.gradient_checkpointing_enable()
    if backend:
        compile_layers(model, backend, None)
    return model


def loss_and_gradients(model, batch) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    loss = (model(**batch, fused_lm_head=True).log_probs ** 2).mean()
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_equal(expected, got, tolerance=1e-5):
    assert got[0] == pytest.approx(expected[0], rel=tolerance)
    assert (got[1] - expected[1]).norm() <= tolerance * expected[1].norm()


@pytest.mark.parametrize(
    ("architecture", "packed", "sharing", "checkpointing"),
    [
        ("llama", False, False, True),
        ("gpt_neox", True, False, False),
        ("olmo3", True, False, False),
        ("olmo3", True, True, False),
        ("olmo3", True, True, True),
    ],
)
def test_one_graph_per_kind_of_layer_whatever_the_batch(architecture, packed, sharing, checkpointing, graphs):
    """6 batches, and a reference forward (no gradients) with each."""
    plain = make_model(architecture, packed=packed, checkpointing=checkpointing)
    options = {"packed": packed, "sharing": sharing, "checkpointing": checkpointing}
    compiled = make_model(architecture, **options, backend="counting")
    batches = [make_batch(seed) for seed in range(6)]
    assert len({batch["input_ids"].shape for batch in batches}) > 4
    for batch in batches:
        assert_equal(loss_and_gradients(plain, batch), loss_and_gradients(compiled, batch))
        with torch.no_grad():
            compiled(**batch, fused_lm_head=True)
    kinds = KINDS_OF_LAYER[architecture] if packed else 1
    # With and without gradients, and under checkpointing transformers makes the embeddings' output require gradients,
    # which tells the first layer from the others. 3 layers x 6 batches ran.
    assert kinds <= len(graphs) <= (3 if checkpointing else 2) * kinds
    assert torch._dynamo.utils.counters["graph_break"] == {}


def test_inductor_gives_the_same_figures():
    torch._dynamo.reset()
    plain = make_model("olmo3", checkpointing=True)
    compiled = make_model("olmo3", sharing=True, checkpointing=True, backend="inductor")
    for seed in range(2):
        batch = make_batch(seed)
        assert_equal(loss_and_gradients(plain, batch), loss_and_gradients(compiled, batch))


def test_generate_compiles_nothing(graphs):
    compiled, plain = make_model("olmo3", backend="counting").eval(), make_model("olmo3").eval()
    prompt = torch.arange(12)[None]
    expected = plain.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(compiled.generate(prompt, max_new_tokens=6, do_sample=False), expected)
    assert graphs == []
    loss_and_gradients(compiled, make_batch(0))
    assert len(graphs) == 2


# ---- through the trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("compile")
    tiny_model("olmo3").save_pretrained(path / "model")
    tiny_tokenizer().save_pretrained(path / "model")
    rng = np.random.default_rng(0)
    with (path / "pairs.jsonl").open("w") as file:
        for i in range(24):
            good, bad = ("xyz" * int(n) for n in np.exp(rng.normal(1.5, 1.0, 2)).clip(1, 18))
            file.write(json.dumps({"prompt": f"q{i}", "chosen": good, "rejected": bad + "-"}) + "\n")
    return path


def arguments(folder: Path, out: Path, extra: str) -> list[str]:
    argv = f"--model_name_or_path {folder / 'model'} --dataset_name {folder / 'pairs.jsonl'} --output_dir {out}"
    argv += " --global_batch_size 4 --per_device_train_batch_size 2 --max_length 64 --learning_rate 1e-3"
    argv += f" --logging_steps 1 --save_strategy no --report_to none --preflight skip --max_steps 3 {extra}"
    return argv.split()


def test_checkpoints_have_plain_names_and_resume(folder, tmp_path, monkeypatch, graphs):
    """All flags: a compiled run against an uncompiled one, and the run continued from its checkpoint."""
    saving = f"{ALL_FLAGS} --save_strategy steps --save_steps 2"
    compiled = f"{saving} --torch_compile true --torch_compile_backend counting"
    monkeypatch.setattr("sfm_dpo.train.reference_cache.HF_CACHE_HOME", str(tmp_path))
    whole, run = tmp_path / "whole", tmp_path / "run"
    for out, flags in ((whole, saving), (run, compiled)):
        assert train_dpo.main(arguments(folder, out, flags)) == 0
    # Training and reference forward, sliding and full layers. Neither number of batches nor of layers
    assert 0 < len(graphs) <= 4
    histories = [json.loads((out / "trainer_state.json").read_text())["log_history"] for out in (whole, run)]
    for expected, got in zip(*histories, strict=True):
        for name in {"loss", "grad_norm", "rewards/margins"} & expected.keys():
            assert got[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5)

    def tensors(path: Path) -> dict[str, torch.Tensor]:
        return load_file(path / "model.safetensors")

    expected, got = tensors(whole / "checkpoint-2"), tensors(run / "checkpoint-2")
    assert expected.keys() == got.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-3, atol=1e-4)

    finished = tensors(run)
    (run / "model.safetensors").unlink()
    shutil.rmtree(run / "checkpoint-3", ignore_errors=True)
    write_status(run, "stopped", 75, step=2)
    assert train_dpo.main(arguments(folder, run, compiled)) == 0
    resumed = tensors(run)
    for name in finished:
        assert torch.equal(resumed[name], finished[name])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", KINDS_OF_LAYER)
def test_on_cuda_in_bfloat16(architecture, checkpointing):
    """varlen_attn inside the compiled layer; log-probs within bf16's rounding, recompilations bounded."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    size = {"hidden_size": 256, "initializer_range": 0.02, "dtype": torch.bfloat16, "device": "cuda"}
    plain = make_model(architecture, checkpointing=checkpointing, **size)
    compiled = make_model(architecture, checkpointing=checkpointing, backend="inductor", **size)
    assert sum(isinstance(m, GradientCheckpointingLayer) for m in compiled.modules()) == 3
    for seed in range(10):
        batch = make_batch(seed, "cuda", longest=200)
        expected, got = loss_and_gradients(plain, batch), loss_and_gradients(compiled, batch)
        assert got[0] == pytest.approx(expected[0], rel=1e-2)
        assert torch.nn.functional.cosine_similarity(got[1].float(), expected[1].float(), dim=0) > 0.99
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2 * KINDS_OF_LAYER[architecture]
    assert torch._dynamo.utils.counters["graph_break"] == {}
