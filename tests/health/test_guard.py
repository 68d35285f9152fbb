"""The guard: recorded collapses are stopped, simulated healthy runs are not, and a tiny model really collapses."""

import itertools
import json
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace

import generate
import numpy as np
import push_to_hub
import pytest
from transformers import AutoConfig, TrainerCallback

import train_dpo
from sfm_dpo.health.guard import Guard
from sfm_dpo.health.guard_rules import Finding, GuardContext, judge_log
from sfm_dpo.run.checkpoint import STOP
from sfm_dpo.run.folder import HEALTH, read_file, read_status
from sfm_dpo.train.trainer import SFMDPOTrainer
from tests.toolbox import error_line, logged, on_cpu

# A failed project's runs, losses on sums: (step, loss, margin)
FAST_RUN = [(1, 0.690, 0.006), (5, 0.276, 1.145), (6, 0.006, 5.156), (8, 0.0, 12.962), (10, 0.0, 18.207)]
MIDDLE_RUN = [
    *((1, 0.692, 0.002), (5, 0.658, 0.072), (10, 0.599, 0.199), (15, 0.095, 2.311)),
    *((18, 0.005, 5.292), (19, 0.003, 5.812)),
]
SLOW_RUN = [
    *((1, 0.693, 0.001), (10, 0.673, 0.041), (20, 0.558, 0.291), (23, 0.527, 0.366), (28, 0.143, 1.876)),
    *((30, 0.105, 2.203), (35, 0.004, 5.434), (38, 0.001, 6.984), (49, 0.0, 8.638), (52, 0.0, 9.022)),
]
EVERY_TENTH_STEP = [(10, 0.69, 0.0), (20, 0.66, 0.1), (30, 0.55, 0.4), (40, 0.004, 5.9)]  # as such a run might log
RUN = GuardContext(sigmoid=True, beta=0.1, chosen_tokens=200.0, max_steps=60, warmup_steps=6)
NORM = RUN._replace(beta=5.0, chosen_tokens=1.0)
COLLAPSE = ["--learning_rate", "1e-3", "--warmup_steps", "40"]


def entries(rows, names=("loss", "rewards/margins")) -> list[dict]:
    return [{"step": step} | dict(zip(names, values, strict=True)) for step, *values in rows]


def replay(log: list[dict], run: GuardContext = RUN) -> dict[str, Finding]:
    """Findings by signal as the guard would meet them, entry by entry; it ends at the first that stops."""
    findings: dict[str, Finding] = {}
    for i in range(len(log)):
        for finding in judge_log(log[: i + 1], run):
            findings.setdefault(finding.signal, finding)
        if any(finding.stops for finding in findings.values()):
            break
    return findings


def simulate(steps: int, end_loss: float = 0.5, noise: float = 0.03, seed: int = 0, warmup: float = 0.1) -> list[dict]:
    """A log shaped like OLMo's DPO with Gaussian noise: warmup, linear decay, loss from ln 2 to `end_loss`, chosen
    falling with rejected."""
    rng = random.Random(seed)
    log = []
    area = 0.0
    rates = [min((i + 1) / (warmup * steps), (steps - i) / steps / (1 - warmup)) for i in range(steps)]
    for i, rate in enumerate(rates):
        margin = 2 * (math.log(2) - end_loss) * area / sum(rates)
        area += rate
        margin += rng.gauss(0, noise * (0.2 + margin))
        loss = math.log1p(math.exp(-margin)) + rng.gauss(0, noise / 2)
        log.append({"step": i + 1, "loss": loss, "rewards/margins": margin, "rewards/chosen": -0.4 * margin})
    return log


@pytest.mark.parametrize(
    ("rows", "beta", "by_step", "began"),
    [(FAST_RUN, 0.5, 6, 5), (MIDDLE_RUN, 0.2, 19, 15), (SLOW_RUN, 0.1, 35, 28), (EVERY_TENTH_STEP, 0.1, 40, 40)],
)
def test_recorded_collapses_are_stopped_before_margin_6(rows, beta, by_step, began):
    log = entries(rows)
    (finding,) = replay(log, RUN._replace(beta=beta)).values()
    assert (finding.signal, finding.stops, finding.began) == ("collapse", True, began)
    assert finding.step <= by_step
    assert ("sigmoid_norm" in finding.remedy) == (RUN.chosen_tokens != 1)
    assert next(entry for entry in log if entry["step"] == finding.step)["rewards/margins"] < 6


def replay_guard(log: list[dict], folder: Path, model: str = "llama") -> Guard:
    """The guard of a run of this kind of model after it has logged these entries."""
    guard = Guard(200.0, [], lambda: None)
    args = SimpleNamespace(output_dir=folder, loss_type=["sigmoid"], beta=0.1, guard="stop", router_aux_loss_coef=None)
    args.ref_model_name_or_path = None
    args.get_warmup_steps = lambda steps: 6
    state = SimpleNamespace(global_step=0, max_steps=200, log_history=[])
    guard.on_train_begin(args, state, None, model=SimpleNamespace(config=AutoConfig.for_model(model)))
    for entry in log:
        state.log_history.append(entry)
        guard.on_log(args, state, SimpleNamespace(), entry)
    return guard


def test_the_loss_that_balances_experts_is_no_divergence_and_hides_no_collapse(tmp_path):
    """OLMoE's coefficient is 0.01, and 8 experts of each token in use make a loss of 8."""
    for aux_loss, log in ((8.0, entries(FAST_RUN)), (200.0, simulate(60))):
        added = [entry | {"loss": entry["loss"] + 0.01 * aux_loss, "aux_loss": aux_loss} for entry in log]
        guard = replay_guard(added, tmp_path, "olmoe")
        assert [finding.signal for finding in guard.findings] == ["collapse"] * (aux_loss == 8)


@pytest.mark.parametrize("every", [1, 5, 10, 20, 25])
@pytest.mark.parametrize("recorded", [FAST_RUN, MIDDLE_RUN, SLOW_RUN])
def test_recorded_collapses_are_found_whatever_logging_steps_is(recorded, every, tmp_path):
    """An entry is the mean of its steps, which hides a loss of 0 beside one of ln 2."""
    steps, *values = map(list, zip(*recorded, strict=True))
    losses, margins = (np.interp(range(1, 201), steps, of) for of in values)
    log = entries(
        (step, losses[step - every : step].mean(), margins[step - every : step].mean())
        for step in range(every, 201, every)
    )
    guard = replay_guard(log, tmp_path)
    assert guard.stopped.signal == "collapse" and guard.stopped.step <= 35 + 2 * every


def test_a_simulated_standstill_is_named():
    log = simulate(600, end_loss=math.log(2), noise=0.004)
    (finding,) = replay(log, RUN._replace(beta=0.3, max_steps=600, warmup_steps=60)).values()
    assert (finding.signal, finding.began, finding.step) == ("standstill", 61, 180)


@pytest.mark.parametrize(
    ("steps", "end_loss"),
    [*itertools.product([12, 60, 300, 1172], [0.6, 0.5, 0.35]), (2000, 0.66)],  # the last stays near ln 2 for long
)
def test_simulated_healthy_runs_pass_without_an_alarm(steps, end_loss):
    for seed in range(3 if steps < 1000 else 1):
        log = simulate(steps, end_loss, seed=seed)
        assert not replay(log, NORM._replace(max_steps=steps, warmup_steps=math.ceil(0.1 * steps)))


def test_a_margin_made_of_likelier_chosen_answers_is_no_collapse():
    rows = [(i, math.log1p(math.exp(-m)), m, 0.9 * m) for i, m in enumerate([0, 0.5, 2, 4, 6, 7], 1)]
    log = entries(rows, ("loss", "rewards/margins", "rewards/chosen"))
    assert not replay(log, NORM)
    (finding,) = replay([entry | {"rewards/chosen": -entry["rewards/chosen"]} for entry in log], NORM).values()
    assert finding.signal == "collapse" and "sigmoid_norm" not in finding.remedy


def test_with_another_reference_the_rules_count_from_the_first_entry():
    run = NORM._replace(other_reference=True)
    log = [e | {"loss": e["loss"] + 2, "rewards/chosen": e["rewards/chosen"] - 6} for e in simulate(60)]
    assert replay(log, NORM) and not replay(log, run)
    displaced = [entry | {"rewards/chosen": entry["rewards/chosen"] - 0.9 * i} for i, entry in enumerate(log)]
    assert set(replay(displaced, run)) == {"displacement"}
    diverged = [entry | {"loss": entry["loss"] * 1.5**i} for i, entry in enumerate(log)]
    assert set(replay(diverged, run)) == {"divergence"}


def rising(n: int, **metrics) -> list[dict]:
    return [{"step": i + 1, "loss": 0.6} | {k: f(i) for k, f in metrics.items()} for i in range(n)]


@pytest.mark.parametrize(
    ("signal", "log", "run"),
    [
        ("non_finite", [*rising(5), {"step": 6, "loss": 0.0, "rewards/margins": math.nan}], RUN),
        ("non_finite", rising(5, grad_norm=lambda i: math.inf if i > 1 else 1.0), RUN),
        ("displacement", rising(9, **{"rewards/chosen": lambda i: -0.9 * i}), NORM),
        # 0.1 x 200 tokens: 1 nat per token is a reward of -20 on sums
        ("displacement", rising(9, **{"rewards/chosen": lambda i: -4.5 * i}), RUN),
        ("divergence", [entry | {"loss": 0.7 + 0.4 * entry["step"]} for entry in rising(12)], RUN),
    ],
)
def test_each_signal_is_detected_and_not_where_it_is_mild(signal, log, run):
    assert signal in replay(log, run)
    mild = [entry | {k: v / 4 for k, v in entry.items() if k != "step" and math.isfinite(v)} for entry in log]
    if signal != "non_finite":
        assert signal not in replay(mild, run)


def test_one_infinite_gradient_norm_is_a_skipped_update():
    assert not replay(rising(5, grad_norm=lambda i: math.inf if i == 2 else 1.0))


def test_losses_with_another_floor_are_judged_by_margins_alone():
    log = entries([(1, 1.0, 0.0), (5, 0.4, 0.5), (9, 0.2, 5.5)])
    assert list(replay(log, RUN._replace(sigmoid=False))) == ["collapse"]
    assert not replay(log)


@pytest.fixture
def command(tiny_folder, write_rows, tmp_path) -> list[str]:
    rows = [{"prompt": f"question {i}:", "chosen": f" yes {i}" * 3, "rejected": " no no" * 4} for i in range(24)]
    fields = {"num_train_epochs": 8, "per_device_train_batch_size": 4, "save_steps": 2, "preflight": "warn"}
    fields |= {"precompute_ref_log_probs": "true", "guard": "stop", "save_total_limit": 9}
    return on_cpu(tiny_folder("llama"), write_rows("p.jsonl", rows), tmp_path / "run", **fields)


def push(path: Path, *options: str) -> int:
    return push_to_hub.main([str(path), "--hub_model_id", "lab/model", *options])


@pytest.mark.slow
def test_a_collapse_is_stopped_and_the_last_healthy_checkpoint_kept(command, tmp_path, capsys, no_report, request):
    out = tmp_path / "run"
    assert train_dpo.main(command + COLLAPSE) == 4
    status, health = (json.loads((out / name).read_text()) for name in ("status.json", "health.json"))
    assert (status["state"], status["exit_code"], health["verdict"]) == ("collapsed", 4, "collapsed")
    finding = next(f for f in health["findings"] if f["stops"])
    assert finding["step"] == status["step"] < 48
    healthy = Path(health["last_healthy"])
    assert (healthy / "model.safetensors").is_file() and status["checkpoint"] == str(healthy)
    assert int(healthy.name.split("-")[1]) < finding["began"]
    steps = [int(p.name.split("-")[1]) for p in out.glob("checkpoint-*")]
    assert max(steps) < status["step"] and not (out / "model.safetensors").exists()  # nothing is saved after the stop
    assert logged(out)[-1]["step"] == status["step"]
    assert finding["signal"] in capsys.readouterr().err

    assert train_dpo.main(command + COLLAPSE) == 2  # it does not go on by itself
    line = capsys.readouterr().err
    assert "the guard stopped this run" in line
    remedy = re.search(r"\((--resume_from_checkpoint \S+)\) in another output_dir, and lower learning_rate", line)[1]
    lower = [*COLLAPSE[:1], "1e-5", *COLLAPSE[2:], "--output_dir", str(tmp_path / "lower"), *remedy.split()]
    assert train_dpo.main([*command, *lower]) == 0
    before = {entry["step"]: entry["learning_rate"] for entry in logged(out) if "learning_rate" in entry}
    after = {entry["step"]: entry["learning_rate"] for entry in logged(tmp_path / "lower") if "learning_rate" in entry}
    start = int(healthy.name.split("-")[1])
    shared = [step for step in before if start < step and step in after]
    assert shared and all(after[step] == pytest.approx(before[step] / 100) for step in shared)
    changed = [*lower, "--seed", "5", "--output_dir", str(tmp_path / "other")]
    assert train_dpo.main([*command, *changed]) == 2 and "was written with 42" in capsys.readouterr().err

    hub = request.getfixturevalue("hub")  # now: it takes time.sleep away
    later = out / f"checkpoint-{max(steps)}"
    assert push(later) == 2
    error = capsys.readouterr().err
    assert "the guard stopped this run" in error and healthy.name in error and "--publish_anyway" in error
    assert push(out, "--publish_anyway") == generate.main([str(out), "Hi"]) == 2
    assert capsys.readouterr().err.count("not finished (state collapsed); choose one of its checkpoints") == 2
    assert not hub.repos
    assert push(later, "--publish_anyway") == push(healthy) == 0 and read_status(out)["state"] == "collapsed"


@pytest.mark.slow
@pytest.mark.parametrize("guard", ["stop", "warn", "skip"])
def test_a_model_that_is_not_finite_is_neither_saved_nor_done(command, tmp_path, no_report, monkeypatch, guard):
    """An infinite gradient in the last step, after the last log entry that a guard could read."""
    step = SFMDPOTrainer.training_step

    def overflow(trainer, *args):
        loss = step(trainer, *args)
        if trainer.state.global_step == 3:
            next(p for p in trainer.model.parameters() if p.grad is not None).grad.fill_(math.inf)
        return loss

    monkeypatch.setattr(SFMDPOTrainer, "training_step", overflow)
    assert train_dpo.main([*command, "--max_steps", "4", "--guard", guard]) == 4
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert status["state"] == "collapsed" and status["checkpoint"].endswith("checkpoint-2")
    assert not list((tmp_path / "run").glob("*.safetensors")) and not (tmp_path / "run/checkpoint-4").exists()
    health = json.loads((tmp_path / "run/health.json").read_text())
    assert (health["verdict"], health["last_healthy"]) == ("collapsed", status["checkpoint"])


class StopAt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 105:
            (Path(args.output_dir) / STOP).touch()


@pytest.mark.slow
def test_a_finding_silences_its_own_run_and_mode_alone(command, tmp_path, capsys, no_report):
    """A run that does not move under guard: warn, then another run from its checkpoint, then itself under stop."""
    run = tmp_path / "run"
    still = [*command, *"--learning_rate 1e-12 --warmup_steps 0 --max_steps 130 --save_steps 20".split()]
    assert train_dpo.main([*still, "--guard", "warn"], callbacks=[StopAt()]) == 75
    health = read_file(run / HEALTH)
    assert (health["verdict"], health["last_healthy"]) == ("standstill", str(run / "checkpoint-105"))

    other = tmp_path / "other"
    start = ["--resume_from_checkpoint", health["last_healthy"]]
    assert train_dpo.main([*still, *start, "--output_dir", str(other)]) == 0  # of 100 flat entries 25 are its own
    health = read_file(other / HEALTH)
    assert (health["verdict"], health["findings"]) == ("healthy", [])
    assert health["last_healthy"] == str(other / "checkpoint-130")

    assert train_dpo.main(still) == 4
    status, health = read_status(run), read_file(run / HEALTH)
    assert (status["state"], status["exit_code"], status["step"]) == ("collapsed", 4, 106)
    assert (health["verdict"], health["stopped"]) == ("standstill", True)
    assert [finding["mode"] for finding in health["findings"]] == ["warn", "stop"]
    capsys.readouterr()
    assert train_dpo.main(still) == 2
    line = error_line(capsys.readouterr().err)
    assert status["message"] in line and "and raise learning_rate by a factor of 10;" in line and "lower" not in line
    assert "or train on with --guard warn" in line and train_dpo.main([*still, "--guard", "warn"]) == 0
