"""GPUs that torch does not see: the reason, by driver and build, and who says so."""

import pytest

from sfm_dpo.common import gpus
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.gpus import explain_driver, explain_missing_gpus, read_driver_version
from sfm_dpo.config import parse_config


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\nGCC",
            "535.104.05",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
        ("something else", None),
    ],
)
def test_version_of_the_driver(tmp_path, text, version):
    (tmp_path / "version").write_text(text)
    assert read_driver_version(tmp_path / "version") == version
    assert read_driver_version(tmp_path / "none") is None


def test_reasons():
    assert "driver 535.104.05 is too old for torch's CUDA 13.0, which needs 580 or newer" in explain_driver(
        "535.104.05", "13.0"
    )
    assert "the GPU itself fails" in explain_driver("580.65.06", "13.0")
    assert "no NVIDIA driver is loaded" in explain_driver(None, "13.0")
    assert "a build without CUDA" in explain_driver("580.65.06", None)


@pytest.mark.skipif(gpus.torch.cuda.is_available(), reason="a GPU is visible")
def test_a_gpu_that_slurm_gave_and_torch_does_not_see_is_named_as_that(monkeypatch, tmp_path):
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    fields = ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", str(tmp_path)]
    assert explain_missing_gpus() is None
    assert parse_config(fields, training=False).train.use_cpu
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    with pytest.raises(UserError, match=r"^Slurm gave 4 GPU\(s\) that torch does not see: .*--use_cpu true"):
        parse_config([*fields, "--bf16", "true"])
    with pytest.raises(UserError, match="Slurm gave 4"):  # without bf16 it would train on the CPU in silence
        parse_config(fields)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert explain_missing_gpus() is None
