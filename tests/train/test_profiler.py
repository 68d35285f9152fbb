"""Profiler: shares that add up, and a real run whose planted delay is named."""

import json
import time

import pytest
import torch
from torch.autograd.profiler_util import FunctionEvent

import train_dpo
from sfm_dpo.train.profiler import classify_events, describe_bottleneck, time_shares
from sfm_dpo.train.trainer import SFMDPOTrainer


def test_every_moment_counts_once_and_hidden_communication_not_at_all():
    intervals = {
        "data loading": [(0, 10)],
        "compute": [(10, 60), (55, 70)],
        "optimizer": [(70, 80), (72, 75)],
        "communication": [(20, 50), (65, 90)],  # of it 80 to 90 alone is waited for
    }
    assert time_shares(intervals, (0, 100)) == pytest.approx(
        {"data loading": 0.1, "optimizer": 0.1, "compute": 0.6, "communication": 0.1, "idle": 0.1}
    )
    assert describe_bottleneck(time_shares(intervals, (0, 100))).startswith("bottleneck: compute, 60% of the time: ")


def test_annotations_on_the_gpus_row_are_no_kernels():
    """record_function of FSDP2 and the optimizer: Kineto repeats it on the GPU, over the kernels it spans."""

    def event(name: str, start: int, end: int, annotation: bool = False) -> FunctionEvent:
        cuda = torch.autograd.DeviceType.CUDA
        return FunctionEvent(start, name, 0, start, end, device_type=cuda, is_user_annotation=annotation)

    events = [event("FSDP::all_gather", 0, 100, True), event("gemm", 10, 30), event("ncclDevKernel_AllGather", 40, 50)]
    intervals, kernels, _ = classify_events(events, on_gpu=True)
    assert dict(intervals) == {"compute": [(10, 30)], "communication": [(40, 50)]}
    assert list(kernels) == ["gemm"]


@pytest.mark.slow
def test_a_real_run_whose_batches_take_long_to_collate(
    tiny_folder, write_rows, tmp_path, monkeypatch, capsys, no_report
):
    delay = 0.2
    init = SFMDPOTrainer.__init__

    def slow(self, **kwargs):
        init(self, **kwargs)
        collate = self.data_collator
        self.data_collator = lambda rows: (time.sleep(delay), collate(rows))[1]

    monkeypatch.setattr(SFMDPOTrainer, "__init__", slow)
    rows = [{"prompt": f"{i}?", "chosen": "yes " * (i % 5 + 1), "rejected": "no " * 3} for i in range(16)]
    fields = ["--model_name_or_path", str(tiny_folder("llama")), "--dataset_name", str(write_rows("p.jsonl", rows))]
    fields += ["--output_dir", str(tmp_path / "run"), "--use_cpu", "--global_batch_size", "4"]
    fields += ["--per_device_train_batch_size", "2", "--preflight", "skip", "--guard", "skip", "--logging_steps", "1"]
    assert train_dpo.main([*fields, "--profile_steps", "2", "3"]) == 0

    folder = tmp_path / "run" / "profile"
    result = json.loads((folder / "profile.json").read_text())
    assert sum(result["shares"].values()) == pytest.approx(1)
    assert min(result["shares"].values()) >= 0
    assert "bottleneck: data loading" in result["bottleneck"]
    assert result["shares"]["data loading"] * result["seconds"] == pytest.approx(4 * delay, rel=0.2)
    assert result["shares"]["communication"] == 0
    assert result["shares"]["optimizer"] > 0 and result["shares"]["compute"] > 0
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    tokens = {entry["step"]: entry["num_tokens"] for entry in history if "num_tokens" in entry}
    assert result["tokens"] == tokens[3] - tokens[1]
    assert any(name == "aten::mm" for name, _ in result["kernels"])
    names = {event.get("name") for event in json.loads((folder / "trace.json").read_text())["traceEvents"]}
    assert "aten::mm" in names
    assert (folder / "profile.txt").read_text() in capsys.readouterr().out


@pytest.mark.parametrize("steps", [["3"], ["3", "2"], ["0", "2"], ["1", "2", "3"]])
def test_a_mistake_is_one_line(tmp_path, capsys, steps):
    fields = ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", str(tmp_path / "run")]
    assert train_dpo.main([*fields, "--profile_steps", *steps]) == 2
    assert "error: profile_steps [" in capsys.readouterr().err
