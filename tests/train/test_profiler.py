"""Profiler: shares that add up, and a real run with a injected delay."""

import json
import time

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

import train_dpo
from sfm_dpo.train.profiler import time_shares
from sfm_dpo.train.trainer import SFMDPOTrainer
from tests.toolbox import on_cpu, pairs


def kernel(name: str, start: int, end: int, annotation: bool = False) -> FunctionEvent:
    return FunctionEvent(start, name, 0, start, end, device_type=DeviceType.CUDA, is_user_annotation=annotation)


def test_each_moment_counts_once_and_annotations_on_the_gpu_are_no_kernels():
    events = [
        kernel("FSDP::all_gather", 0, 100, annotation=True),  # as Kineto repeats it over the kernels that it spans
        kernel("flash::flash_fwd_kernel<cutlass::bfloat16_t>", 10, 20),
        kernel("nvjet_tst_128x64_TNT", 20, 50),
        kernel("at::native::vectorized_elementwise_kernel", 45, 60),
        kernel("ncclDevKernel_AllGather", 30, 80),  # what products and element-wise kernels hide does not count
        kernel("Memcpy HtoD", 80, 85),
    ]
    shares = time_shares(events, wall=100, on_gpu=True)
    expected = {"attention": 0.1, "products": 0.3, "copies": 0.05, "other": 0.1, "communication": 0.2, "idle": 0.25}
    assert shares == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
def test_a_real_run_whose_batches_take_long_to_collate(tiny_folder, write_rows, tmp_path, monkeypatch, capsys):
    collate = SFMDPOTrainer._prepare_inputs

    def slow(self, inputs):
        time.sleep(0.2)
        return collate(self, inputs)

    monkeypatch.setattr(SFMDPOTrainer, "_prepare_inputs", slow)
    data = write_rows("p.jsonl", pairs(16))
    assert train_dpo.main(on_cpu(tiny_folder("llama"), data, tmp_path / "run", profile_steps=[2, 3])) == 0

    folder = tmp_path / "run" / "profile"
    result = json.loads((folder / "profile.json").read_text())
    shares = result["shares"]
    assert result["steps"] == [2, 3] and sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) >= 0 and shares["idle"] > 0.5 and shares["communication"] == 0
    assert min(shares["products"], shares["attention"], shares["other"]) > 0
    assert '"aten::mm"' in (folder / "trace.json").read_text()
    text = (folder / "profile.txt").read_text()
    assert "aten::mm" in text and text in capsys.readouterr().out
