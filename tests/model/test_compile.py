"""torch_compile: the same results, no graph for each batch, the same names in a checkpoint.

Under ZeRO-2: tests/e2e/test_golden.py. That the kernel's branch is one graph: tests/model/test_attention.py.
"""

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer
from trl.trainer.utils import add_fused_lm_head

from sfm_dpo.model.packing import compile_layers, enable_padding_free
from tests.model.test_packing import make_pairs
from tests.tiny_models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.grid]
KINDS_OF_LAYER = {"gpt_neox": 1, "llama": 1, "olmo3": 2}

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


# (prompt, chosen, rejected) tokens of the pairs of each batch
BATCHES = [
    [(3, 20, 41)],
    [(3, 5, 9), (3, 50, 33)],
    [(4, 30, 7), (9, 14, 15), (3, 1, 50)],
    [(3, 44, 2), (5, 5, 6)],
    [(6, 11, 12), (3, 27, 13), (8, 40, 2)],
    [(7, 35, 21)],
]


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


@pytest.mark.parametrize(
    ("architecture", "packed", "sharing", "checkpointing"),
    [
        ("llama", False, False, True),
        ("gpt_neox", True, False, False),
        ("olmo3", True, True, False),
        ("olmo3", True, True, True),
    ],
)
def test_no_batch_needs_a_graph_of_its_own(architecture, packed, sharing, checkpointing, graphs):
    """6 batches, and a reference forward (no gradients) with each. On the CPU packed attention breaks the graph."""
    plain = make_model(architecture, packed=packed, checkpointing=checkpointing)
    options = {"packed": packed, "sharing": sharing, "checkpointing": checkpointing}
    compiled = make_model(architecture, **options, backend="counting")
    counts = []
    for batch in map(make_pairs, BATCHES):
        expected_loss, expected = loss_and_gradients(plain, batch)
        loss, gradients = loss_and_gradients(compiled, batch)
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert (gradients - expected).norm() <= 1e-5 * expected.norm()
        with torch.no_grad():
            compiled(**batch, fused_lm_head=True)
        counts.append(len(graphs))
    assert counts[-1] == counts[0]
    assert counts[0] > 0 or (packed and checkpointing)  # a checkpointed layer is one graph, or with a break none
    assert compiled.state_dict().keys() == plain.state_dict().keys()


def test_generate_compiles_nothing(graphs):
    compiled, plain = make_model("olmo3", backend="counting").eval(), make_model("olmo3").eval()
    prompt = torch.arange(12)[None]
    expected = plain.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(compiled.generate(prompt, max_new_tokens=6, do_sample=False), expected)
    assert graphs == []
    loss_and_gradients(compiled, make_pairs(BATCHES[0]))
    assert graphs


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
    for pairs in BATCHES:
        batch = {name: tensor.cuda() for name, tensor in make_pairs(pairs).items()}
        expected, got = loss_and_gradients(plain, batch), loss_and_gradients(compiled, batch)
        assert got[0] == pytest.approx(expected[0], rel=1e-2)
        assert torch.nn.functional.cosine_similarity(got[1].float(), expected[1].float(), dim=0) > 0.99
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2 * KINDS_OF_LAYER[architecture]
    assert torch._dynamo.utils.counters["graph_break"] == {}
