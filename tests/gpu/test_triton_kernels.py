"""TRL's Triton kernels, which compute all log-probs on a GPU: compiled for Hopper and Blackwell without a device, and
run by Triton's interpreter."""

import inspect
import os
import subprocess
import sys

import pytest
import torch
from transformers.utils import is_triton_available
from trl.kernels import chunked_logprob
from trl.trainer.utils import add_fused_lm_head

from sfm_dpo.common.files import PROJECT
from tests.tiny_models import tiny_model

if is_triton_available():
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import mangle_type

pytestmark = pytest.mark.skipif(not is_triton_available(), reason="needs Triton, which PyTorch's CPU build lacks")
OUTPUTS = ("log_probs", "entropy", "mean_logits", "is_top1")  # as DPOTrainer asks for them
CODE_FOR_CPUS = {"_forward_kernel": "_forward_tile", "_backward_kernel": "_backward_tile"}


def train(dtype: torch.dtype) -> list[torch.Tensor]:
    """OUTPUTS, and the gradients, of a vocabulary that is two blocks of a kernel wide and not a multiple of one."""
    model = tiny_model("llama", vocab_size=1500).to(dtype)
    add_fused_lm_head(model, outputs=OUTPUTS)
    ids = torch.randint(1500, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.where(torch.arange(9) > 3, -100)
    output = model(input_ids=ids, labels=labels, fused_lm_head=True)
    output.log_probs.pow(2).sum().backward()
    return [output[name] for name in OUTPUTS] + [parameter.grad for parameter in model.parameters()]


@pytest.fixture
def calls(monkeypatch) -> dict[str, dict]:
    """The arguments that the kernels are called with in bf16."""
    found = {}

    class Launched:
        def __init__(self, name: str):
            self.name = name
            self.tile = getattr(chunked_logprob, CODE_FOR_CPUS[name])

        def __getitem__(self, grid):
            return self

        def __call__(self, *args, **kwargs):
            found[self.name] = inspect.signature(self.tile).bind(*args, **kwargs).arguments
            self.tile(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(chunked_logprob, "_use_triton", lambda device: True)
        for name in CODE_FOR_CPUS:
            patch.setattr(chunked_logprob, name, Launched(name))
        train(torch.bfloat16)
    return found


@pytest.mark.parametrize("architecture", [90, 100])
def test_kernels_compile(architecture, calls, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name, arguments in calls.items():
        kernel = getattr(chunked_logprob, name)
        values = dict(zip(kernel.arg_names, arguments.values(), strict=True))
        constants = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
        signature = {name: "constexpr" if name in constants else mangle_type(values[name]) for name in values}
        source = ASTSource(kernel, signature, constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
        assert f".target sm_{architecture}" in compiled.asm["ptx"]
        assert compiled.asm["cubin"]


def compare_kernels_with_code_for_cpus() -> None:
    """Needs TRITON_INTERPRET=1 from the start of the process."""
    expected = train(torch.float32)
    chunked_logprob._use_triton = lambda device: True
    for found, wanted in zip(train(torch.float32), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_interpreted_kernels_compute_what_the_code_for_cpus_does():
    code = "from tests.gpu import test_triton_kernels as here; here.compare_kernels_with_code_for_cpus()"
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[:3000]  # leaks of nanobind follow
