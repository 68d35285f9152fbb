"""Settings chosen by memory; the optimizer's state before the first step; what an out-of-memory error says. None of it
changes a loss."""

import functools
import json
import math
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

import train_dpo
from sfm_dpo.calibration.choose_micro_batch import calibrate
from sfm_dpo.common.errors import UserError
from sfm_dpo.config.fields import parse_config
from sfm_dpo.memory.activations import trace_activations
from sfm_dpo.memory.asked import Asked
from sfm_dpo.model import packing
from sfm_dpo.run.checkpoint import STOP
from sfm_dpo.run.folder import LOG, RESOLVED_CONFIG, describe, read_file
from sfm_dpo.run.start import NEW, choose_start
from sfm_dpo.train.base_model import BaseModel, base_model
from sfm_dpo.train.callbacks import NEW_RUN, REMEDIES, Progress, explain_out_of_memory
from sfm_dpo.train.metrics import peak_memory_gib
from sfm_dpo.train.trainer import arguments_for_trl
from tests.e2e.runs import make_place
from tests.tiny_models import tiny_config, tiny_model, tiny_tokenizer
from tests.toolbox import as_options, error_line, in_grid, logged, on_cpu, pairs
from tests.train.test_trainer import build_trainer, make_trainer

CUDA = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.02 GiB is"
ADAPTER = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
BY_MEMORY = {"use_cpu": "true", "per_device_train_batch_size": None, "gradient_checkpointing": None}
ALONE = [in_grid(2, "true"), in_grid(1, "false"), in_grid(1, "true")]  # in a start of their own


@functools.cache
def trace_once(*given):
    return trace_activations(tiny_config("olmo3"), *given)


@pytest.fixture
def train(tiny_folder, write_rows, tmp_path, monkeypatch):
    """A function: name of a run and fields -> (exit code, losses, its folder)."""
    monkeypatch.setattr(psutil.Process, "memory_info", lambda self: SimpleNamespace(rss=2**29))  # or it grows by runs

    def measure_as_planned(base, tokens, plan, candidate):
        return plan.states + candidate.activations

    monkeypatch.setattr("sfm_dpo.calibration.choose_micro_batch.measure_memory", measure_as_planned)
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
    for_trl = arguments_for_trl(config.train, Asked(8, 3, None, None, None, True, True))
    assert for_trl.activation_checkpointing_kwargs["offload"] is True


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
        facts = read_file(run / "data.json")
        return facts["micro_batch"] | {"bytes": facts["calibration"]["measured_bytes"]}, losses

    chosen, _ = resume(64, stop=True)
    assert (chosen["pairs"], chosen["checkpointed_layers"]) == (8, 0)
    asked = read_file(run / RESOLVED_CONFIG)
    assert asked["flash_attention"] == "auto"
    assert asked["per_device_train_batch_size"] is None and asked["gradient_checkpointing"] is None
    less = (chosen["bytes"] - 1) / 2**30
    smaller, _ = resume(less, stop=True)
    assert smaller["bytes"] <= less * 2**30 and smaller["pairs"] in (1, 2, 4, 8)
    newest = run / "checkpoint-2/complete.json"
    facts = read_file(newest)
    assert facts["path"]["kernel"] == "fa2"
    facts["path"]["kernel"] = "fa4"  # as was measured then
    facts["calibration"] |= {"from_a_later_version": 1, "ratios": None}
    newest.write_text(json.dumps(facts))
    kept, resumed = resume(64, stop=False)
    both = ("pairs", "checkpointed_layers")
    assert [kept[name] for name in both] == [smaller[name] for name in both] != [8, 0]
    assert read_file(run / "data.json")["path"]["kernel"] == "fa4"
    code, losses, _ = train("uninterrupted", **fit, memory_gib=64)
    assert code == 0 and resumed == pytest.approx(losses, abs=1e-5)
    code, _, _ = train("other", **fit, memory_gib=0.0001)
    assert code == 2 and "GiB; the smallest is 1 pair(s) per device" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("fields", [{"prefix_sharing": "false"}, in_grid({"padding_free": "false"})])
def test_a_path_that_is_asked_for_is_used_by_a_run_that_goes_on(train, tmp_path, capsys, fields):
    """By another run that starts from its checkpoint, and by the run itself."""
    saved = {"save_strategy": "steps", "save_steps": 100}
    run = tmp_path / "run"
    run.mkdir()
    (run / STOP).touch()
    code, _, _ = train("run", **saved)
    path = read_file(run / "data.json")["path"]
    assert code == 75 and path == {"packed": True, "prefix_sharing": True, "kernel": "fa2"}
    _, expected, _ = train("uninterrupted", **saved)
    for name, start in (("other", run / "checkpoint-1"), ("run", None)):
        capsys.readouterr()
        code, losses, folder = train(name, **saved, resume_from_checkpoint=start, **fields)
        printed = capsys.readouterr().out
        used = read_file(folder / "data.json")["path"]
        recorded = read_file(folder / RESOLVED_CONFIG)
        assert code == 0 and losses == pytest.approx(expected, abs=1e-5) and "resuming from" in printed
        assert used["packed"] is recorded["padding_free"] is ("padding-free, attention by" in printed)
        assert used["prefix_sharing"] is False, name


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
    facts = read_file(run / "data.json")
    assert code == 0 and facts["micro_batch"]["pairs"] == int(fields["per_device_train_batch_size"])
    assert facts["micro_batch"]["checkpointed_layers"] == int(fields["checkpointed_layers"])
    assert facts["calibration"]["smaller"] is None


def test_the_layers_stay_checkpointed_as_asked(tiny_folder, tmp_path):
    cli = "--max_steps=1", "--warmup_steps=0", "--precompute_ref_log_probs=false", "--checkpointed_layers=2"
    trainer = make_trainer(tiny_folder("olmo3"), tmp_path, *cli)
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
)
def test_errors_that_are_out_of_memory(error, line):
    progress = Progress()
    progress.phase = "training"
    progress.begin_micro_batch(7, {})
    end = explain_out_of_memory(error, progress, None)
    assert (end is None) == (line is None)
    if end:
        assert (end.exit_code, end.state) == (2, "failed") and line in str(end)
        assert str(end).endswith(f"; or {NEW_RUN}, or LAUNCH=zero3")
        assert NEW_RUN in str(explain_out_of_memory(error, progress, ""))


@pytest.mark.parametrize("phase", [*REMEDIES, "loading"])
def test_the_runs_own_folder_accepts_each_remedy_that_names_no_other_one(tmp_path, phase):
    fields = ["--model_name_or_path", "m", "--dataset_name", "d.jsonl", "--use_cpu", "--output_dir", str(tmp_path)]
    describe(parse_config(fields))
    (tmp_path / LOG).write_text('{"step": 1, "loss": 0.7}')
    progress = Progress()
    progress.phase = phase
    progress.begin_micro_batch(7, {})
    here, _, elsewhere = str(explain_out_of_memory(MemoryError(), progress, None)).partition("in a new output_dir, ")
    options = {"gradient_checkpointing: true": ["--gradient_checkpointing", "true"]}
    options |= {name: [f"--{name}", "1"] for name in re.findall(r"\w+_batch_size", here)}
    named = [value for name, value in options.items() if name in here]
    assert bool(named) == (phase != "loading")
    for remedy in named:
        assert choose_start(parse_config([*fields, *remedy])).trains, remedy
    assert "max_length" in elsewhere
    with pytest.raises(UserError, match="holds another run"):
        choose_start(parse_config([*fields, "--max_length", "512"]))


ZERO_3 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}


@pytest.mark.parametrize("launched", [{"ACCELERATE_USE_FSDP": "true"}, ZERO_3])
def test_a_remedy_that_would_change_nothing_is_not_printed(launched, monkeypatch):
    """A smaller batch than one pair; sharding where weights are sharded."""
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    progress = Progress()
    progress.begin_micro_batch(7, {"attention_mask": torch.ones(2, 5)})
    for phase in REMEDIES:
        progress.phase = phase
        line = str(explain_out_of_memory(MemoryError(), progress, None))
        expected = f"set gradient_checkpointing: true; or {NEW_RUN}" if phase == "training" else NEW_RUN
        assert "1 pairs, 10 tokens without padding (MemoryError); " in line and line.endswith(f"); {expected}"), phase


def leak_one_key(monkeypatch, rows: int = 1000):
    """Lets each sequence of the first packed rows see the last token of the one before."""
    real = packing.boundary_arguments
    left = iter(range(rows))

    def leaking(cu: torch.Tensor, max_length: int, **shared) -> dict:
        if next(left, None) is None:
            return real(cu, max_length, **shared)
        keys = []
        is_copy = []
        for start, end in cu.unfold(0, 2, 1).tolist():
            leaked = [start - 1] * (start > 0)
            keys += [*leaked, *range(start, end)]
            is_copy += [True] * len(leaked) + [False] * (end - start)
        cu_keys = cu + (torch.arange(len(cu)) - 1).clamp(min=0)
        order = torch.tensor(is_copy).byte().argsort(stable=True).int()
        shared = {"cu_seq_lens_k": cu_keys.int(), "shared_keys": torch.tensor(keys).int(), "shared_order": order}
        return real(cu, max_length + 1, **shared)

    monkeypatch.setattr(packing, "boundary_arguments", leaking)


def calibrated(folder, output_dir, *cli: str, **options):
    trainer, asked, pairs = build_trainer(folder, output_dir, "--padding_free=true", *cli, **options)
    random = torch.get_rng_state()
    with base_model(trainer) as base:
        result = calibrate(base, pairs.train, asked, NEW)[2]
    assert torch.equal(torch.get_rng_state(), random) and result.hours > 0
    assert all(p.grad is None for p in trainer.model.parameters())
    return result


def test_the_peak_of_a_measurement_is_not_that_of_training(tiny_folder, tmp_path, monkeypatch):
    run = BaseModel.run_micro_batch
    peaks = []

    def run_with_more(*args):
        torch.ones(2**26)
        peaks.append(peak_memory_gib())
        run(*args)

    monkeypatch.setattr(BaseModel, "run_micro_batch", run_with_more)
    calibrated(tiny_folder("llama"), tmp_path)
    assert peaks and peak_memory_gib() < max(peaks) - 0.2


def random_pairs(tokens: int) -> Dataset:
    rng = np.random.default_rng(0)
    answers = ["".join(map(chr, rng.integers(97, 123, tokens))) for _ in range(2)]
    return Dataset.from_list([{"prompt": "a short question?", "chosen": answers[0], "rejected": answers[1]}] * 4)


@pytest.mark.parametrize(("tokens", "bf16"), [(20, "true"), (200, "false"), in_grid(2000, "true")])
def test_one_key_of_another_sequence_is_seen_in_a_long_answer(tiny_folder, tmp_path, monkeypatch, bf16, tokens):
    cli = ["--prefix_sharing=false", "--max_length=4096", f"--bf16={bf16}"]
    assert calibrated(tiny_folder("llama"), tmp_path, *cli, data=random_pairs(tokens)).ratios["packed"] < 3
    leak_one_key(monkeypatch)
    line = r"^padding_free True: calibration: packed differs .*, \d+ times noise; it may .*; set padding_free: false$"
    with pytest.raises(UserError, match=line):
        calibrated(tiny_folder("llama"), tmp_path, *cli, data=random_pairs(tokens))


def test_a_difference_that_a_second_pair_does_not_show_is_no_fault(tiny_folder, tmp_path, monkeypatch):
    leak_one_key(monkeypatch, rows=1)
    ratios = calibrated(tiny_folder("llama"), tmp_path, "--prefix_sharing=false", "--bf16=true").ratios
    assert 0 < ratios["packed"] < 3


def test_a_gradient_that_is_not_finite_names_the_kernels_of_a_hybrid_model(tiny_folder, tmp_path, monkeypatch):
    trainer, asked, pairs = build_trainer(tiny_folder("olmo_hybrid"), tmp_path, "--padding_free=false")
    monkeypatch.setattr("sfm_dpo.calibration.choose_path.has_delta_net_kernels", lambda: True)
    trainer.model.lm_head.weight.register_hook(lambda gradient: gradient * math.nan)
    message = r"gradient.* are not finite; .*: pip uninstall flash-linear-attention"
    with base_model(trainer) as base, pytest.raises(UserError, match=message):
        calibrate(base, pairs.train, asked, NEW)


def test_a_shared_prompt_whose_keys_are_wrong_stops_the_start(tiny_folder, tmp_path, monkeypatch):
    real = packing.boundary_arguments

    def shift(cu, longest, **shared):
        if shared:
            shared["shared_keys"] = shared["shared_keys"].roll(1)
        return real(cu, longest, **shared)

    monkeypatch.setattr(packing, "boundary_arguments", shift)
    with pytest.raises(UserError, match=r"^prefix_sharing True: .*shared differs .*; set prefix_sharing: false$"):
        calibrated(tiny_folder("llama"), tmp_path, "--prefix_sharing=true")
    ratios = calibrated(tiny_folder("llama"), tmp_path).ratios
    assert "packed" in ratios and "shared" not in ratios  # where it is not set, it is off


@pytest.mark.parametrize(
    ("architecture", "cli", "peft"),
    [
        *((architecture, [], None) for architecture in ("gpt_neox", "olmo3", "olmoe", "smollm3")),
        ("llama", ["--bf16=true", "--gradient_checkpointing=false"], ADAPTER),
        in_grid("llama", ["--torch_compile=true", "--torch_compile_backend=aot_eager"], None),
        ("llama", ["--padding_free=false"], None),
        ("llama", ["--max_length=20", "--global_batch_size=1", "--per_device_train_batch_size=1"], None),  # 3 pairs
    ],
)
def test_noise_explains_what_differs(architecture, cli, peft, tiny_folder, tmp_path):
    result = calibrated(tiny_folder(architecture), tmp_path, *cli, peft=peft)
    assert 0 < result.noise < 0.05 and max(result.ratios.values()) < 3


def test_large_logits_are_noisy_and_not_wrong(tmp_path, write_rows, no_report):
    """A base model whose largest logits are about 200, in bf16: from calibration to the loss of step 0."""
    model = tiny_model("llama")
    model.lm_head.weight.data *= 25
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    cached = {"bf16": "true", "padding_free": "true", "precompute_ref_log_probs": "true", "max_steps": 2}
    argv = on_cpu(tmp_path / "model", write_rows("pairs.jsonl", pairs(8)), tmp_path / "run", **cached)
    assert train_dpo.main(argv) == 0
    assert read_file(tmp_path / "run/data.json")["calibration"]["noise"] > 0.1


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A function: number of processes, kind and fields of each run by its name -> the folders of the runs, which share
    one start."""
    place = make_place(tmp_path_factory.mktemp("calibrated"), pairs(24), {"olmo3": {}}, {"max_steps": 3})

    def run(processes: int, runs: dict[str, tuple[str, dict]], launch: str = "cpu") -> dict[str, Path]:
        calls = [[kind, as_options(place.values(name, **fields))] for name, (kind, fields) in runs.items()]
        place.start_together(calls, processes, launch, by="tests.calibration.calibrated_runs:train")
        return {name: place.folder / name for name in runs}

    return run


def with_and_without(processes: int, bf16: str) -> dict[str, tuple[str, dict]]:
    fields = {"use_cpu": "true", "bf16": bf16, "checkpointed_layers": 1}
    return {f"{kind}, {processes}, {bf16}": (kind, fields) for kind in ("with", "without")}


@pytest.fixture(scope="module")
def together(start) -> dict[str, Path]:
    of_a_rank = {"first": ("less", BY_MEMORY), "again": ("first", BY_MEMORY)}
    of_a_rank["padded"] = ("path", {"use_cpu": "true", "padding_free": None})
    return start(2, with_and_without(2, "false") | of_a_rank)


def weights(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "bf16"), [(2, "false"), *ALONE])
def test_a_calibrated_run_ends_with_the_weights_of_one_that_is_not(start, request, processes, bf16):
    runs = with_and_without(processes, bf16)
    is_alone = (processes, bf16) != (2, "false")
    folders = start(processes, runs) if is_alone else request.getfixturevalue("together")
    calibrated, plain = (folders[name] for name in runs)
    assert weights(calibrated) == weights(plain)
    assert read_file(calibrated / "data.json")["calibration"]["noise"] > 0


@pytest.mark.slow
def test_where_one_rank_has_less_memory_all_take_a_smaller_setting(together):
    less = together["first"]
    again = together["again"]
    data, expected = (read_file(run / "data.json") for run in (less, again))
    assert data["micro_batch"] == expected["micro_batch"] != {"pairs": 4, "checkpointed_layers": 0}
    assert data["calibration"]["measured_bytes"] > data["calibration"]["planned_bytes"] / 2
    assert weights(less) == weights(again) and logged(less) == logged(again)


@pytest.mark.slow
def test_a_path_that_fails_on_one_rank_is_used_by_none(together):
    run = together["padded"]
    assert read_file(run / "data.json")["path"] == {"packed": False, "prefix_sharing": False, "kernel": "fa2"}
    assert logged(run)[-1]["step"] == 3


@pytest.mark.slow
@pytest.mark.timeout(600)  # ranks that wait for each other would wait for hours
def test_a_kernel_that_fails_on_one_rank_of_a_sharded_run_ends_all_of_them(start):
    fields = {"use_cpu": "true", "bf16": "false", "padding_free": "true", "hang_timeout": 0, "flash_attention": "fa4"}
    folder = start(2, {"kernel": ("kernel", fields)}, "cpu_fsdp2")["kernel"]
    message = read_file(folder / "status.json")["message"]
    assert message == "flash_attention fa4: fa4 fails: no kernel image is available; set flash_attention: fa2"
