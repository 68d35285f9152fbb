"""How the setting of a run is found by measuring, with memory that is not what was planned."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import PartialState

from sfm_dpo.calibration.choose_micro_batch import (
    AIM,
    ROUNDS,
    MemoryPlan,
    choose_micro_batch,
    find_setting,
    reset_peak_memory,
)
from sfm_dpo.calibration.choose_path import KernelError
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import PROJECT
from sfm_dpo.common.process import available_memory
from sfm_dpo.config.effects import short_run
from sfm_dpo.config.fields import parse_config
from sfm_dpo.memory.planner import Candidate
from sfm_dpo.model.loading import load_model_config
from sfm_dpo.model.sharding import fit_buckets, zero_config
from sfm_dpo.planning.run_plan import Planner, read_lengths
from sfm_dpo.run.facts import ForwardPath
from sfm_dpo.train.metrics import peak_memory_gib
from tests.memory.test_planner import configuration, plan_memory

GIB = 2**30


@pytest.fixture(scope="module")
def planner():
    found = plan_memory(configuration("--padding_free=true"), hidden_size=512, intermediate_size=2048)
    found.list_candidates()  # traces
    return found


def test_a_gpu_of_the_machine_is_not_asked_with_use_cpu(monkeypatch):
    PartialState(cpu=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert reset_peak_memory() > 0 and peak_memory_gib() > 0


def find(planner, limit: int, states: int, ratio) -> tuple[Candidate, int, list[Candidate]]:
    """The setting found where activations take `ratio` (of the setting's number) times what was planned, its bytes,
    and those that were tried."""
    tried = []

    def measure(candidate: Candidate) -> float:
        activations = ratio(len(tried)) * candidate.activations
        tried.append(candidate)
        return states + activations

    return *find_setting(MemoryPlan(planner, states, 0, limit), measure), tried


@pytest.mark.parametrize("ratio", [0.45, 0.9, 1.0, 1.03, 1.3, 2.2])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_what_is_found_is_within_one_step_of_the_best(planner, ratio, share):
    states = GIB
    every = planner.list_candidates(states, ratio)
    largest = max(candidate.bytes for candidate in every)
    limit = int(states + share * (largest - states))
    found, size, tried = find(planner, limit, states, lambda _: ratio)
    fitting = [candidate for candidate in every if candidate.bytes <= limit]
    better = [candidate for candidate in fitting if candidate.work < found.work]
    assert len(better) <= 1 and len(tried) <= ROUNDS
    assert size <= limit


def test_two_near_misses_do_not_choose_the_smallest(planner):
    """The first setting takes 3% more than planned, the second one just more than there is, all others 3% more."""
    states = GIB
    every = planner.list_candidates(states)
    limit = int(every[len(every) // 3].bytes * 1.001)
    second = next(c for c in planner.list_candidates(states, 1.03) if c.bytes <= AIM * limit)

    def ratio(number: int) -> float:
        return 1.001 * (limit - states) / second.activations if number == 1 else 1.03

    found, _, tried = find(planner, limit, states, ratio)
    assert (tried[1].per_device, tried[1].checkpointed_layers) == (second.per_device, second.checkpointed_layers)
    left = [c for c in planner.list_candidates(states, 1.03) if c.bytes <= limit and not c.takes_as_much(second)]
    better = [candidate for candidate in left if candidate.work < found.work]
    assert len(better) <= 1 and 3 <= len(tried) <= ROUNDS


RUNS = [("think", "gpt_neox_6.9b", "dolci_think", 4), ("olmo3_7b_instruct", "olmo3_7b", "dolci_instruct", 8)]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "shape", "data", "gpus"), RUNS)
def test_the_first_try_is_right_where_the_plan_is_and_the_best_is_always_found(recipe, shape, data, gpus):
    """Of a recipe on H100 under ZeRO-2, where activations take 0.9 to 1.2 times what is planned. On a GPU, they took
    0.996 to 1.003 times that (test_the_plan_is_what_a_gpu_took)."""
    options = [f"--config={PROJECT}/recipes/{recipe}.yaml", f"--model_name_or_path={PROJECT}/bench/shapes/{shape}"]
    config = parse_config(short_run(options), gpus, training=False)
    lengths = read_lengths(PROJECT / f"bench/shapes/{data}_lengths.json").select(np.arange(20_000))
    run = Planner(config, load_model_config(config), lengths, "H100", gpus)
    run.memory.launch = "zero2"
    states = sum(run.memory.states(fit_buckets(zero_config("zero2"), run.memory.model)).values())
    for ratio in (0.9, 0.95, 0.99, 1.0, 1.01, 1.05, 1.1, 1.15, 1.2):
        found, size, tried = find(run.memory, run.limit, states, lambda _, ratio=ratio: ratio)
        fitting = [each for each in run.memory.list_candidates(states, ratio) if each.bytes <= run.limit]
        assert found == fitting[0] and size <= run.limit, ratio
        assert len(tried) <= (1 if abs(ratio - 1) <= 0.01 else 3), ratio


def test_a_setting_that_does_not_fit_is_measured_once_and_named_with_what_was_measured():
    asked = plan_memory(configuration("--per_device_train_batch_size=4", "--checkpointed_layers=8"))
    tried = []

    def measure(candidate: Candidate) -> float:
        tried.append(candidate)
        return 3.21 * GIB

    with pytest.raises(UserError, match=r"4 pair\(s\) per device, 8 of 8 layers checkpointed; measured: 3\.21 GiB; "):
        find_setting(MemoryPlan(asked, GIB, 0, 3 * GIB), measure)
    assert len(tried) == 1


def test_if_nothing_fits_the_fields_that_are_set_are_named(planner):
    with pytest.raises(UserError, match=r"no setting fits in .*; the smallest is 1 pair.*; use a smaller max_length"):
        find(planner, GIB, GIB, lambda _: 1.0)
    asked = plan_memory(configuration("--per_device_train_batch_size=4"), hidden_size=512, intermediate_size=2048)
    with pytest.raises(UserError, match=r"with per_device_train_batch_size as set, .*; remove per_device_"):
        find(asked, GIB, GIB, lambda _: math.inf)


def test_a_kernel_that_fails_on_another_rank_at_the_longest_rows_is_used_by_none(planner, monkeypatch):
    here = "sfm_dpo.calibration.choose_micro_batch"
    monkeypatch.setattr(f"{here}.plan_memory", lambda *args: MemoryPlan(planner, GIB, 0, 10**6 * GIB))
    monkeypatch.setattr(f"{here}.measure_memory", lambda *args: GIB)
    monkeypatch.setattr("sfm_dpo.calibration.choose_path.gather_values", lambda mine: [mine, "no kernel image"])
    config = SimpleNamespace(train=SimpleNamespace(preflight_only=False))
    base = SimpleNamespace(config=config, is_sharded=False, computing=lambda path: nullcontext())
    with pytest.raises(KernelError, match="fa3 fails: no kernel image"):
        choose_micro_batch(base, None, ForwardPath(True, False, "fa3"), SimpleNamespace(kernel=None), 0)


@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_of_a_cpu_is_that_of_the_tightest_cgroup(tmp_path, version):
    """Slurm limits the job, not the step in which the process is."""
    controllers, limit, used = (
        ("memory", "limit_in_bytes", "usage_in_bytes") if version == 1 else ("", "max", "current")
    )
    groups = tmp_path / "proc/self/cgroup"
    groups.parent.mkdir(parents=True)
    groups.write_text(f"3:cpu:/\n{4 if controllers else 0}:{controllers}:/slurm/job_1/step_0\n")
    base = tmp_path / "sys/fs/cgroup" / controllers
    facts = {"slurm": ("max", 10), "slurm/job_1": (16 * 2**20, 6 * 2**20), "slurm/job_1/step_0": ("max", 5)}
    for name, (most, now) in facts.items():
        (base / name).mkdir(parents=True)
        (base / name / f"memory.{limit}").write_text(f"{most}\n")
        (base / name / f"memory.{used}").write_text(f"{now}\n")
    assert available_memory(str(tmp_path)) == 10 * 2**20
    (base / "slurm/job_1/memory.stat").write_text(f"anon 1\ninactive_file {2**20}\n")  # the kernel drops it if needed
    assert available_memory(str(tmp_path)) == 11 * 2**20
    assert available_memory(str(tmp_path / "no cgroups")) > 2**20
