"""What a start does, for every state of a folder; which checkpoint it resumes from, and what must agree before."""

import re
from pathlib import Path

import pytest

from sfm_dpo.common.errors import UserError
from sfm_dpo.config.fields import parse_config
from sfm_dpo.run.checkpoint import COMPLETE, mark_complete, newest_checkpoint, rotate, step_of, why_incomplete
from sfm_dpo.run.facts import Calibration, ForwardPath, MicroBatch, RunFacts
from sfm_dpo.run.folder import describe
from sfm_dpo.run.start import Before, Start, choose_start, judge_folder
from tests.run.test_checkpoint import names, write_checkpoint

FIELDS = ["--model_name_or_path", "m", "--dataset_name", "d.jsonl", "--use_cpu", "--output_dir"]
CONFIG = parse_config([*FIELDS, "r"]).as_dict()
EMPTY = {"names": set(), "status": {}, "before": {}, "has_trained": False}
TRAINED = {"names": {"resolved_config.yaml", "log.jsonl"}, "before": CONFIG, "has_trained": True}
REPORTED = TRAINED | {"names": TRAINED["names"] | {"report.html", "README.md"}}
OTHER = {"before": CONFIG | {"learning_rate": 1.0}}
PUSH = ["--push_to_hub", "true"]
UNVERIFIED = ["--verify_checkpoints", "false"]


def status(state, **facts) -> dict:
    return {"status": {"state": state, **facts}}


DONE = REPORTED | status("done", open=[])


@pytest.mark.parametrize(
    ("folder", "options", "expected"),
    [
        ({}, [], "trains"),
        ({"names": {"status.json", "STOP", "heartbeats"}} | status("failed"), [], "trains"),
        ({"names": {"resolved_config.yaml"}} | OTHER | status("refused"), [], "trains"),
        ({"names": {"thesis.tex"}}, [], "output_dir r: holds files that do not belong to a run (thesis.tex)"),
        ({"names": {"status.json", "a"}} | status("failed"), [], "do not belong to a run (a, status.json)"),
        ({"names": {"status.json"}} | status("done"), [], "do not belong to a run"),
        (TRAINED | status("running"), [], "trains"),
        (TRAINED | status("stopped"), ["--save_steps", "7", "--dataset_num_proc", "2"], "trains"),
        (TRAINED | OTHER | status("running"), [], "holds another run (learning_rate is 1.0 there, 1e-06 here)"),
        (TRAINED | OTHER | status("done"), [], "holds another run (learning_rate is 1.0 there"),
        (TRAINED | {"before": {}} | status("running"), [], "resolved_config.yaml: missing or damaged; restore it"),
        (TRAINED | status("collapsed", message="m"), [], "output_dir r: the guard stopped this run; m"),
        (TRAINED | status("collapsed"), ["--guard", "warn"], "trains"),
        (DONE, PUSH, ["pushed"]),
        (REPORTED | status("done", pushed="commit"), PUSH, []),
        (REPORTED | status("push_failed", open=["pushed", "reported"]), PUSH, ["pushed", "reported"]),
        (REPORTED | status("push_failed", open=["pushed"]), [], []),
        (TRAINED | status("done", open=[]), [], ["reported"]),
        (DONE, ["--eval_command", "true {checkpoint} {out}"], ["evaluated"]),
        (TRAINED | status("done"), ["--eval_command", "true {checkpoint} {out}"], ["evaluated", "reported"]),
    ],
)
def test_a_start_trains_or_does_the_open_steps_or_refuses(folder, options, expected):
    facts = EMPTY | folder
    config = parse_config([*FIELDS, "r", *options])
    if isinstance(expected, str) and expected != "trains":
        with pytest.raises(UserError, match=re.escape(expected)):
            judge_folder(config, **facts)
        return
    assert judge_folder(config, **facts) == (Start(True) if expected == "trains" else Start(False, expected))


@pytest.mark.parametrize(
    ("fact", "now", "message"),
    [
        ("world_size", 4, "was written by 2 process(es), but this run has 4; restore that setting, "),
        ("train_tokens", "xyz", "the data have changed since it was written"),
        ("order", ["2"], "has other pairs in its steps, by another seed, global batch or length"),
        ("launch", "FSDP2", "was written with launch DDP or one process, but this run uses FSDP2"),
    ],
)
def test_a_run_resumes_only_with_what_wrote_the_checkpoint(tmp_path, fact, now, message):
    facts = {"launch": "whole weights", "world_size": 2, "train_tokens": "abc", "order": ["1", "2"]}
    facts |= {"models": {"model_name_or_path": "hash-1"}}
    before = Before(tmp_path, RunFacts(**facts))
    before.check(RunFacts(**facts))
    before.check(RunFacts())  # what is not known is not compared
    with pytest.raises(UserError, match=rf"^{tmp_path}: .*{re.escape(message)}"):
        before.check(RunFacts(**facts | {fact: now}))


def test_a_run_resumes_with_its_optimizer_on_the_host_or_not(tmp_path, caplog):
    written, other = RunFacts(launch="ZeRO-2"), RunFacts(launch="ZeRO-2 with offload")
    with caplog.at_level("INFO"):
        Before(tmp_path, written).check(written)
        assert not caplog.messages
        Before(tmp_path, written).check(other)
        Before(tmp_path, other).check(written)
    assert caplog.messages == [
        f"{tmp_path} was written with launch ZeRO-2; continued with ZeRO-2 with offload",
        f"{tmp_path} was written with launch ZeRO-2 with offload; continued with ZeRO-2",
    ]
    with pytest.raises(UserError, match="with launch ZeRO-2 with offload, but this run uses ZeRO-3"):
        Before(tmp_path, other).check(RunFacts(launch="ZeRO-3"))


def test_the_facts_of_version_0_3_are_read():
    """As its complete.json records them, without the parts that have not changed."""
    memory = {"per_device": 4, "checkpointed_layers": 2, "layers": 3, "tokens": 512, "activations": 9, "bytes": 77}
    settings = {"micro_batch": 4, "accumulation_steps": 2, "checkpointed_layers": 2, "flash_attention": "fa4"}
    settings |= {"packed": True, "prefix_sharing": False, "memory": memory | {"work": 1.2, "smaller": None}}
    calibration = {"noise": 1e-5, "ratios": {"packed": 0.5}, "planned_bytes": None, "measured_bytes": None}
    facts = RunFacts.of({"step": 2, "world_size": 2, "settings": settings, "calibration": calibration})
    assert (facts.path, facts.micro_batch) == (ForwardPath(True, False, "fa4"), MicroBatch(4, 2))
    assert facts.calibration == Calibration(1e-5, {"packed": 0.5}, planned_bytes=77, smaller="")
    as_asked = RunFacts.of({"settings": settings | {"memory": {}}})
    assert as_asked.micro_batch == MicroBatch(4, 2) and as_asked.calibration.smaller is None
    assert RunFacts.of(facts.as_dict()) == facts and RunFacts.of({}) == RunFacts()


def start_from(run: Path, *options) -> Path | None:
    config = parse_config([*FIELDS, str(run), *map(str, options)])
    if not (run / "resolved_config.yaml").exists():
        describe(config)
    return choose_start(config).before.checkpoint


def test_a_checkpoint_asked_for_must_be_complete(tmp_path, capsys):
    bad = write_checkpoint(tmp_path, 3, complete=False)
    with pytest.raises(UserError, match=r"resume_from_checkpoint .*checkpoint-3: was not fully written; choose"):
        start_from(tmp_path, "--resume_from_checkpoint", bad)
    good = write_checkpoint(tmp_path, 2)
    capsys.readouterr()
    assert start_from(tmp_path, *UNVERIFIED) == good
    assert capsys.readouterr().out[9:] == f"{bad} was not fully written; skipped\n"
    assert (step_of(good), step_of(None), step_of(tmp_path / "base")) == (2, 0, 0)


def test_a_run_that_is_done_is_no_checkpoint(tmp_path):
    """Its folder has a mark, too, and the state of the trainer, but no optimizer."""
    done = tmp_path / "dpo-2"
    done.mkdir()
    mark_complete(done, {"step": 2, "open": []})
    with pytest.raises(UserError, match=r"dpo-2: is the folder of a run, not one of its checkpoints; choose"):
        start_from(tmp_path, "--resume_from_checkpoint", done)


@pytest.mark.parametrize(("field", "now"), [("optim", "adafactor"), ("use_peft", "true"), ("seed", "5")])
def test_a_checkpoint_of_another_run_goes_on_with_its_order_and_its_optimizer(tmp_path, field, now):
    checkpoint = write_checkpoint(tmp_path / "a run", 2)
    start_from(tmp_path / "a run", "--resume_from_checkpoint", checkpoint)
    (tmp_path / "now").mkdir()
    with pytest.raises(UserError, match=rf"^{field} .*: {checkpoint} was written with .*; set {field}: .* '.*'\)$"):
        start_from(tmp_path / "now", "--resume_from_checkpoint", checkpoint, f"--{field}", now)


def test_a_requeued_job_goes_on_from_its_newest_checkpoint_not_from_the_one_asked_for(tmp_path, capsys):
    asked = write_checkpoint(tmp_path, 2)
    options = ("--resume_from_checkpoint", asked)
    assert start_from(tmp_path, *options) == asked and "to go back" not in capsys.readouterr().out
    newer = write_checkpoint(tmp_path, 3)
    assert start_from(tmp_path, *options) == newer
    assert f"this run has its own, {newer}, and continues from that; to go back, " in capsys.readouterr().out
    rotate(tmp_path, 1)
    assert start_from(tmp_path, *options) == newer and not asked.exists()


def test_a_flipped_bit_is_named_and_the_checkpoint_before_is_used(tmp_path, capsys):
    name = "global_step3/zero_pp_rank_0.pt"
    good = write_checkpoint(tmp_path, 2)
    bad = write_checkpoint(tmp_path, 3)
    (bad / name).write_bytes(b"x" * 50 + b"y" + b"x" * 49)
    assert why_incomplete(bad) is None and start_from(tmp_path, *UNVERIFIED) == bad
    with pytest.raises(UserError, match=f"resume_from_checkpoint .*checkpoint-3: has a damaged {name}"):
        start_from(tmp_path, "--resume_from_checkpoint", bad)
    assert why_incomplete(bad) is None, "a checkpoint that was asked for may be another run's: it is left as it is"
    capsys.readouterr()
    assert start_from(tmp_path) == good
    lines = [line[9:] for line in capsys.readouterr().out.splitlines()]  # after the time
    assert lines[0] == f"{bad} has a damaged {name} (its checksum differs); skipped"
    assert lines[1] == f"{good}: checksums verified"
    # From now on it counts for nobody: neither for the next start, nor for the rotation
    assert newest_checkpoint(tmp_path) == start_from(tmp_path, *UNVERIFIED) == good
    rotate(tmp_path, 2)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    assert start_from(write_checkpoint(tmp_path, 3).parent) == bad  # written anew
    (bad / COMPLETE).unlink()
    write_checkpoint(tmp_path, 4)
    rotate(tmp_path, 2)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]
