"""Settings chosen by memory; the optimizer's state before the first step; what an out-of-memory error says. None of it
changes a loss."""

import functools
import json
import re
import shlex
from types import SimpleNamespace

import psutil
import pytest
import torch

import train_dpo
from sfm_dpo.common.errors import UserError
from sfm_dpo.config import parse_config
from sfm_dpo.memory.activations import trace_activations
from sfm_dpo.run.checkpoint import COMPLETE, STOP
from sfm_dpo.run.files import read_file
from sfm_dpo.run.folder import LOG, describe, read_resolved_config
from sfm_dpo.run.start import begin
from sfm_dpo.train.callbacks import Progress
from sfm_dpo.train.fit_memory import REMEDIES, explain_out_of_memory
from sfm_dpo.train.settings import Settings
from sfm_dpo.train.upstream import arguments_for_trl
from tests.tiny_models import tiny_config
from tests.toolbox import error_line, logged, on_cpu, pairs
from tests.train.test_trainer import make_trainer

CUDA = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.02 GiB is"


@functools.cache
def trace_once(dtype: torch.dtype, checkpointing: bool, copies: float | None):
    return trace_activations(tiny_config("olmo3"), dtype, checkpointing, copies)


@pytest.fixture
def train(tiny_folder, write_rows, tmp_path, monkeypatch):
    """A function: name of a run and fields -> (exit code, losses, its folder)."""
    monkeypatch.setattr(psutil.Process, "memory_info", lambda self: SimpleNamespace(rss=2**29))  # or it grows by runs
    monkeypatch.setattr("sfm_dpo.memory.planner.trace_activations", lambda config, *given: trace_once(*given))
    model = tiny_folder("olmo3")
    data = write_rows("pairs.jsonl", pairs(32))

    def run(name: str, **fields):
        folder = tmp_path / name
        given = {"global_batch_size": 8, "per_device_train_batch_size": None, "padding_free": "true", "max_steps": 3}
        given["gradient_checkpointing"] = None
        given |= {"learning_rate": 1e-3, "train_sampling_strategy": "batch_rebalance", "save_strategy": "no"}
        code = train_dpo.main(on_cpu(model, data, folder, **given | fields))
        return code, [entry["loss"] for entry in logged(folder)] if code == 0 else [], folder

    return run


def test_checkpointing_kwargs_that_are_given_are_kept():
    options = ["--model_name_or_path=m", "--dataset_name=x", "--use_cpu=true"]
    config = parse_config([*options, '--gradient_checkpointing_kwargs={"offload": true}'])
    shown = config.as_dict()
    assert shown["gradient_checkpointing_kwargs"] == {"offload": True} and shown["gradient_checkpointing"] is None
    for_trl = arguments_for_trl(config.train, Settings(8, 16, 3, "fa2"))
    assert for_trl.activation_checkpointing_kwargs["offload"] is True


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
def test_losses_do_not_depend_on_the_setting(train):
    runs = []
    for size, count in ((4, 0), (2, 3), (1, 2), (4, 2)):
        code, losses, _ = train(f"{size}-{count}", per_device_train_batch_size=size, checkpointed_layers=count)
        assert code == 0 and len(losses) == 3
        runs.append(losses)
    assert runs[1] == pytest.approx(runs[0], abs=1e-5) and runs[2] == pytest.approx(runs[0], abs=1e-5)
    assert runs[3] == runs[0]
    assert abs(runs[0][2] - runs[0][0]) > 1e-3  # they moved


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
def test_the_choice_is_kept_at_resume_where_it_fits_and_is_not_recorded_as_asked(train, tmp_path, capsys):
    fit = {"save_strategy": "steps", "save_steps": 100}
    run = tmp_path / "run"
    run.mkdir()

    def resume(gib: float, stop: bool) -> tuple[dict, list[float]]:
        if stop:
            (run / STOP).touch()
        code, losses, _ = train("run", **fit, memory_gib=gib)
        assert code == (75 if stop else 0)
        return read_file(run / "data.json")["settings"]["memory"], losses

    chosen, _ = resume(64, stop=True)
    facts = read_file(run / "data.json")
    assert facts["settings"]["flash_attention"] == "fa2"
    facts["settings"]["flash_attention"] = "fa4"  # as was measured then
    (run / "data.json").write_text(json.dumps(facts))
    assert (chosen["per_device"], chosen["checkpointed_layers"]) == (8, 0)
    asked = read_resolved_config(run)
    assert asked["flash_attention"] == "auto"
    assert asked["per_device_train_batch_size"] is None and asked["gradient_checkpointing"] is None
    less = (chosen["bytes"] - 1) / 2**30
    smaller, _ = resume(less, stop=True)
    assert smaller["bytes"] <= less * 2**30 and smaller["per_device"] in (1, 2, 4, 8)
    kept, resumed = resume(64, stop=False)
    both = ("per_device", "checkpointed_layers")
    assert [kept[name] for name in both] == [smaller[name] for name in both] != [8, 0]
    assert read_file(run / "data.json")["settings"]["flash_attention"] == "fa4"
    code, losses, _ = train("uninterrupted", **fit, memory_gib=64)
    assert code == 0 and resumed == pytest.approx(losses, abs=1e-5)
    code, _, _ = train("other", **fit, memory_gib=0.0001)
    assert code == 2 and "GiB; the smallest is 1 pair(s) per device" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
def test_a_micro_batch_that_does_not_fit_is_a_line_that_names_a_smaller_setting(train, monkeypatch, capsys):
    def does_not_fit(*args):
        raise torch.OutOfMemoryError(CUDA)

    with monkeypatch.context() as patch:
        patch.setattr(train_dpo.SFMDPOTrainer, "_compute_loss", does_not_fit)
        code, _, run = train("large")
    assert code == 2 and read_file(run / "status.json")["state"] == "failed"
    line = error_line(capsys.readouterr().err)
    assert re.search(r"out of memory in training, step 1, micro-batch of 8 pairs, [\d,]+ tokens", line), line
    smaller = shlex.split(re.search(r"; use the next smaller setting: (--per_device[^;]*);", line)[1])
    fields = {name.removeprefix("--"): value for name, value in zip(smaller[::2], smaller[1::2], strict=True)}
    code, _, _ = train("large", **fields)
    settings = read_file(run / "data.json")["settings"]
    assert code == 0 and settings["micro_batch"] == int(fields["per_device_train_batch_size"])
    assert settings["checkpointed_layers"] == int(fields["checkpointed_layers"]) and not settings["memory"]


def test_the_layers_stay_checkpointed_as_asked(tiny_folder, tmp_path):
    live = "--precompute_ref_log_probs=false"
    trainer = make_trainer(tiny_folder("olmo3"), tmp_path, "--max_steps=1", live, "--checkpointed_layers=2")
    trainer.eval_dataset = trainer.train_dataset

    def checkpointed():
        return [layer.gradient_checkpointing for layer in trainer.bare_model().model.layers]

    hooks = trainer.bare_model().get_input_embeddings()._forward_hooks
    trainer.train()
    assert checkpointed() == [True, True, False] and len(hooks) == 1
    trainer.evaluate()
    batch = trainer._prepare_inputs(trainer.data_collator([trainer.train_dataset[0]]))
    trainer.compute_ref_log_probs(trainer.ref_model or trainer.model, batch)
    assert checkpointed() == [True, True, False]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (torch.OutOfMemoryError(CUDA), "step 8 (CUDA out of memory. Tried to allocate 2.50 GiB."),
        (RuntimeError("alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried"), "alloc_cpu.cpp"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), "; use a smaller"),
        (MemoryError(), "training, step 8 (MemoryError); use a smaller per_device_train_batch_size; or set"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
    ],
    ids=["CUDA", "CPU", "cuBLAS", "Python", "another"],
)
def test_errors_that_are_out_of_memory(error, line, tmp_path):
    progress = Progress()
    progress.begin_micro_batch("training", 7, {})
    end = explain_out_of_memory(error, progress, tmp_path)
    assert (end is None) == (line is None)
    if end:
        assert (end.exit_code, end.state) == (2, "failed") and line in str(end)


@pytest.mark.parametrize(
    ("field", "settings", "remedies"),
    [
        ([], {"micro_batch": 1, "checkpointed_layers": 4}, []),
        ([], {"micro_batch": 2, "checkpointed_layers": 4}, ["use a smaller per_device_train_batch_size"]),
        (["--gradient_checkpointing=false"], {"micro_batch": 1}, ["set gradient_checkpointing: true"]),
        (["--checkpointed_layers=2"], {"micro_batch": 1, "checkpointed_layers": 2}, ["remove checkpointed_layers"]),
    ],
    ids=["nothing", "size", "checkpointing", "layers"],
)
def test_what_helps_if_the_memory_of_a_setting_is_exceeded(tmp_path, field, settings, remedies):
    fields = ["--model_name_or_path", "m", "--dataset_name", "d.jsonl", "--use_cpu", "--output_dir", str(tmp_path)]
    describe(parse_config([*fields, *field]), {"settings": settings})
    progress = Progress()
    progress.begin_micro_batch("training", 7, {})

    def suggested() -> list[str]:
        _, *parts = str(explain_out_of_memory(MemoryError(), progress, tmp_path)).split("; ")
        return [part.removeprefix("or ") for part in parts[:-1]]

    assert suggested() == remedies
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / COMPLETE).write_text('{"micro_batch": 2}')  # of a mixture of experts
    assert suggested() == [part for part in remedies if "batch_size" not in part]


@pytest.mark.parametrize("phase", [*REMEDIES, "loading"])
def test_the_runs_own_folder_accepts_each_remedy_that_names_no_other_one(tmp_path, phase):
    fields = ["--model_name_or_path", "m", "--dataset_name", "d.jsonl", "--use_cpu", "--output_dir", str(tmp_path)]
    describe(parse_config(fields), {})
    (tmp_path / LOG).write_text('{"step": 1, "loss": 0.7}')
    progress = Progress()
    progress.begin_micro_batch(phase, 7, {})
    here, _, elsewhere = str(explain_out_of_memory(MemoryError(), progress, tmp_path)).partition(
        "in a new output_dir, "
    )
    options = {"gradient_checkpointing: true": ["--gradient_checkpointing", "true"]}
    options |= {name: [f"--{name}", "1"] for name in re.findall(r"\w+_batch_size", here)}
    named = [value for name, value in options.items() if name in here]
    assert bool(named) == (phase != "loading")
    for remedy in named:
        assert begin(parse_config([*fields, *remedy])).trains, remedy
    assert "max_length" in elsewhere
    with pytest.raises(UserError, match="holds another run"):
        begin(parse_config([*fields, "--max_length", "512"]))
