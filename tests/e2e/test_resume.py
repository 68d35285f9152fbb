"""Stopped, killed, damaged, disk full: a run goes on where it was, and ends bitwise where it would have ended.

The kills come at random moments, two of them by default, four in the grid:
`KILLS=20 python -m pytest tests/e2e/test_resume.py -k kill -s` does twenty and prints the table of docs/slurm.md;
`KILL_SEED` makes another series.
"""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import train_dpo
from sfm_dpo.hub.publish import consolidate_shards
from sfm_dpo.run.checkpoint import STOP, checkpoints, newest_checkpoint, step_of, why_incomplete
from sfm_dpo.run.folder import write_status
from tests.e2e.runs import ROOT, Place, Run, as_options, assert_same_run, clean_environment, copy_run, pairs

KILLS = [int(os.environ["KILLS"])] if "KILLS" in os.environ else [2, pytest.param(4, marks=pytest.mark.grid)]
KILL_SEED = int(os.environ.get("KILL_SEED", "4"))
PHASES = ("reference pass", "training", "saving a checkpoint", "saving the model")


@pytest.mark.parametrize("processes", [1, 2], ids=["one process", "ZeRO-2"])
def test_stop_file_then_the_same_command_is_bitwise_the_uninterrupted_run(place, uninterrupted, processes):
    expected = uninterrupted(processes)
    run = place.start(f"stopped-{processes}", processes)
    assert run.until_step(3)
    (run.folder / STOP).touch()
    assert run.wait() == (75 if processes == 1 else 0), run.log[-4000:]  # a launcher would make a crash of 75

    status, step = run.status, run.status["step"]
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    assert 3 <= step < 8, "the stop must fall into the middle of the run for this test to mean anything"
    assert status["checkpoint"] == str(run.folder / f"checkpoint-{step}")
    assert why_incomplete(run.folder / f"checkpoint-{step}") is None
    assert not (run.folder / STOP).exists()
    assert f"stopped on request at step {step} of 8; run the same command again to resume from" in run.log
    assert not (run.folder / "model.safetensors").exists()

    again = place.start(f"stopped-{processes}", processes).finish()
    assert f"resuming from {run.folder}/checkpoint-{step}" in again.log
    assert "step 1/8" not in again.log
    assert_same_run(again, expected)


@pytest.mark.grid
@pytest.mark.parametrize("processes", [1, 2], ids=["one process", "ZeRO-2"])
def test_the_best_checkpoint_is_the_same_through_a_stop(place, processes):
    """By the loss on pairs whose sides are swapped, which rises from the first evaluation on."""
    swapped = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in pairs(5)]
    (place.folder / "swapped.jsonl").write_text("".join(json.dumps(row) + "\n" for row in swapped))
    fields = {"eval_datasets": json.dumps({"swapped": str(place.folder / "swapped.jsonl")}), "eval_strategy": "steps"}
    fields |= {"eval_steps": 2, "save_steps": 2, "save_total_limit": 2, "load_best_model_at_end": "true"}
    fields |= {"metric_for_best_model": "swapped_loss"}
    expected = place.start(f"best-{processes}", processes, **fields).finish()
    run = place.start(f"best-stopped-{processes}", processes, **fields)
    assert run.until_step(5)
    (run.folder / STOP).touch()
    run.wait()
    assert run.status["state"] == "stopped" and run.status["best"]["step"] == 2, run.log[-3000:]
    run = place.start(f"best-stopped-{processes}", processes, **fields).finish()
    assert "resuming from" in run.log
    assert_same_run(run, expected)
    for found in (run, expected):
        assert found.status["best"] == expected.status["best"] | {"checkpoint": str(found.folder / "checkpoint-2")}
        assert {path.name for path in found.folder.glob("checkpoint-*")} >= {"checkpoint-2", "checkpoint-8"}
        saved = (found.folder / "checkpoint-2/model.safetensors").read_bytes()
        assert found.weights() == saved != (found.folder / "checkpoint-8/model.safetensors").read_bytes()
    assert [e["step"] for e in figures(run, "eval_swapped_loss")] == [0, 2, 4, 6, 8]
    assert figures(run, "eval_swapped_loss") == figures(expected, "eval_swapped_loss")


def figures(run: Run, metric: str) -> list[dict]:
    """The log's entries with this metric, without figures about time."""
    history = json.loads((run.folder / "trainer_state.json").read_text())["log_history"]
    return [{k: v for k, v in e.items() if "runtime" not in k and "second" not in k} for e in history if metric in e]


def test_stop_file_during_the_reference_pass_keeps_its_shards(place, uninterrupted, tmp_path):
    apart = Place(tmp_path, place.model, tmp_path / "hf")
    shutil.copy(place.folder / "pairs.jsonl", tmp_path)
    run = apart.start("run")
    assert run.until(lambda: len(shards(apart)) >= 3)
    (run.folder / STOP).touch()
    assert run.wait() == 75, run.log[-4000:]
    kept = {path: path.stat().st_mtime_ns for path in shards(apart)}
    assert 3 <= len(kept) < 64
    assert "stopped on request during the reference pass; its shards are kept in" in run.status["message"]
    assert (run.status["step"], run.status["checkpoint"]) == (0, None)

    again = apart.start("run").finish()
    assert f"reference log-probs of the train pairs: {len(kept)} of 64 shards" in again.log
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "a shard was computed twice"
    assert_same_run(again, uninterrupted(1))


@pytest.mark.grid
def test_a_run_and_a_prefetch_share_the_reference_pass_and_the_killed_one_is_taken_over(
    place, uninterrupted, tmp_path
):
    apart = Place(tmp_path, place.model, tmp_path / "hf")
    shutil.copy(place.folder / "pairs.jsonl", tmp_path)
    log = tmp_path / "prefetch.log"
    fields = as_options(apart.values("prefetched", learning_rate=1e-4))
    command = [sys.executable, str(ROOT / "scripts" / "prefetch.py"), *fields, "--reference"]

    def prefetch() -> subprocess.Popen:
        with log.open("wb") as file:
            return subprocess.Popen(command, cwd=ROOT, env=clean_environment(apart.hf_home), stdout=file, stderr=file)

    def has_begun() -> bool:
        held = apart.hf_home.glob("sfm_dpo/reference/*/0*.lease")
        is_computing = any(not lease.with_suffix(".safetensors").exists() for lease in held)
        return is_computing and len(shards(apart)) >= 3

    first = prefetch()
    while not has_begun():
        assert first.poll() is None, log.read_text()
        time.sleep(0.002)
    psutil.Process(first.pid).suspend()  # it lives, and holds a shard: the run does all others, and waits
    run = apart.start("run")
    assert run.until(lambda: f", waiting for process {first.pid} on " in run.log), run.log[-4000:]
    first.kill()
    first.wait()
    run.finish()
    assert_same_run(run, uninterrupted(1))  # which learnt at another rate
    by = Counter()
    for shard in shards(apart):
        with safe_open(shard, "numpy") as file:
            by[json.loads(file.metadata()["by"])["pid"]] += 1
    assert by.keys() == {first.pid, run.process.pid} and by.total() == 64
    mine = by[run.process.pid]
    assert f"reference, train: {mine} shards computed here, {64 - by[first.pid] - mine} by other jobs" in run.log

    before = {path: path.stat().st_mtime_ns for path in shards(apart)}
    assert prefetch().wait() == 0, log.read_text()
    assert before == {path: path.stat().st_mtime_ns for path in shards(apart)}
    key = next((apart.hf_home / "sfm_dpo" / "reference").iterdir()).name
    assert f"reference log-probs of the train pairs: key {key}" in log.read_text()
    assert not (tmp_path / "prefetched").exists()


def write_killed(run: Path, step: int) -> None:
    """The status of a process that was killed after this step and is no more."""
    (run / "status.json").write_text(json.dumps({"state": "running", "exit_code": None, "step": step, "message": ""}))


def test_a_run_that_had_finished_but_was_killed_before_it_said_so(place, uninterrupted):
    """Killed in save_model, or right after it: all steps are done, the final files are half there."""
    copy = copy_run(uninterrupted(1), "half-saved")
    (copy / "model.safetensors").write_bytes(b"half")
    (copy / "trainer_state.json").unlink()
    write_killed(copy, 8)
    again = place.start("half-saved").finish()
    assert "resuming from" in again.log and "step 8/8" not in again.log
    assert_same_run(again, uninterrupted(1))


def test_max_steps_in_the_middle_of_an_epoch_is_not_exceeded_by_a_start_after_the_last_step(place):
    """transformers 5.23 does one step more than max_steps where the last checkpoint lies inside an epoch."""
    first = place.start("middle", max_steps=3).finish()
    weights, losses = first.weights(), first.losses()
    (first.folder / "model.safetensors").write_bytes(b"half")
    write_killed(first.folder, 3)
    again = place.start("middle", max_steps=3).finish()
    assert again.status["step"] == 3
    assert again.losses() == losses
    assert again.weights() == weights


def test_damaged_and_half_written_checkpoints_are_named_and_skipped_and_stay(place, uninterrupted):
    """The newest lacks its mark, the one before is cut short: the run goes on from the one before that."""
    base = uninterrupted(1)
    folder = copy_run(base, "damaged")
    write_killed(folder, 7)
    shutil.rmtree(folder / "checkpoint-8")
    (folder / "checkpoint-6" / "complete.json").unlink()
    optimizer = folder / "checkpoint-4" / "optimizer.pt"
    optimizer.write_bytes(optimizer.read_bytes()[:1000])
    again = place.start("damaged").finish()
    assert f"{folder}/checkpoint-6 was not written to the end: skipped" in again.log
    assert f"{folder}/checkpoint-4 has a damaged optimizer.pt (1,000 bytes of" in again.log
    assert f"resuming from {folder}/checkpoint-2" in again.log
    assert all(why_incomplete(c) is None for c in checkpoints(folder))
    assert_same_run(again, base)


def test_a_flipped_byte_of_any_rank_is_found_by_its_checksum(place, uninterrupted):
    """One in what rank 1 wrote and rank 0 never reads, one in the header of the weights; no file changes its size."""
    base = uninterrupted(2)
    folder = copy_run(base, "flipped")
    write_killed(folder, 8)
    damaged = {8: "global_step8/zero_pp_rank_1_mp_rank_00_optim_states.pt", 6: "model.safetensors"}
    for step, name in damaged.items():
        with (folder / f"checkpoint-{step}" / name).open("r+b") as file:
            file.seek(12)
            byte = file.read(1)
            file.seek(12)
            file.write(bytes([byte[0] ^ 1]))
    again = place.start(folder.name, 2).finish()
    for step, name in damaged.items():
        assert f"{folder}/checkpoint-{step} has a damaged {name} (its checksum is another): skipped" in again.log
    assert f"{folder}/checkpoint-4: checksums verified" in again.log
    assert f"resuming from {folder}/checkpoint-4" in again.log
    assert_same_run(again, base)


def test_other_pairs_in_the_file_are_an_error(place, uninterrupted, tmp_path, capsys, environment):
    """In this process: nothing is trained. Other fields: tests/run/test_folder.py, world sizes: train/test_ends.py."""
    unfinished = copy_run(uninterrupted(1), "other-pairs")
    write_status(unfinished, "stopped", 75, step=8)
    pairs, resolved = tmp_path / "pairs.jsonl", unfinished / "resolved_config.yaml"
    pairs.write_text((place.folder / "pairs.jsonl").read_text().replace("Indeed", "Surely"))
    resolved.write_text(resolved.read_text().replace(str(place.folder / "pairs.jsonl"), str(pairs)))
    before = sorted(p.name for p in unfinished.iterdir())
    assert train_dpo.main(as_options(place.values(unfinished.name, dataset_name=pairs))) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "the data have changed since it was written" in errors[0]
    assert sorted(p.name for p in unfinished.iterdir()) == before


# ---- kill -9


def shards(place: Place) -> list[Path]:
    return sorted(place.hf_home.glob("sfm_dpo/reference/*/*.safetensors"))


def half_written(run: Run) -> list[Path]:
    return [c for c in checkpoints(run.folder) if not (c / "complete.json").exists()]


def wait_for_phase(run: Run, phase: str, place: Place, dice: random.Random) -> bool:
    """Waits for a random moment in `phase`; False if the run was over before."""
    if phase == "reference pass":
        wanted = dice.randrange(1, 60)
        reached = run.until(lambda: len(shards(place)) >= wanted)
    elif phase == "training":
        reached = run.until_step(dice.randrange(1, 8))
    elif phase == "saving a checkpoint":
        nth = dice.randrange(1, 5)
        seen: set[Path] = set()

        def saving() -> bool:
            seen.update(half_written(run))
            return len(seen) >= nth and bool(half_written(run))

        reached = run.until(saving, every=0.0005)
    else:
        reached = run.until(lambda: (run.folder / "config.json").exists(), every=0.0005)
    time.sleep(dice.random() * {"reference pass": 0.1, "training": 0.3, "saving the model": 0.003}.get(phase, 0.03))
    return reached


@pytest.mark.timeout(300 + 240 * int(os.environ.get("KILLS", "4")))
@pytest.mark.parametrize("kills", KILLS)
def test_kill_9_of_a_random_rank_at_random_moments(place, uninterrupted, tmp_path, kills):
    dice = random.Random(KILL_SEED)
    print("\n| # | processes | rank killed | during | had done | half-written | went on from | equal |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for number in range(kills):
        phase, processes = PHASES[number % len(PHASES)], 1 + (number + number // len(PHASES)) % 2
        expected = uninterrupted(processes)
        here = place
        if phase == "reference pass":  # a cache of its own, or there would be nothing to compute
            here = Place(place.folder, place.model, tmp_path / f"hf-{number}")
        name = f"killed-{number}"
        run = here.start(name, processes)
        victim = dice.randrange(processes)
        rank = run.all_ranks(processes)[victim]  # before the moment: looking takes longer than saving
        assert wait_for_phase(run, phase, here, dice), run.log[-4000:]
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
        code = run.wait(120)  # the launcher ends the other ranks
        assert code != 0, "the run was over before it was killed: nothing was shown"
        newest = newest_checkpoint(run.folder)
        skipped = [
            f"{c} {why_incomplete(c)}: skipped" for c in checkpoints(run.folder) if step_of(c) > step_of(newest)
        ]
        written = {path: path.stat().st_mtime_ns for path in shards(here)}
        half = [c.name for c in half_written(run)]
        reached = len(written) if phase == "reference pass" else run.log.count("\nstep ")

        done = run.status["state"] == "done"  # killed after the last file: everything must be there
        again = here.start(name, processes).finish()
        if done:
            assert "already done" in again.log
        elif newest:
            assert f"resuming from {newest}" in again.log
        for line in skipped if not done else ():
            assert line in again.log
        assert_same_run(again, expected)
        assert written == {path: path.stat().st_mtime_ns for path in written}, "a shard was computed twice"
        unit = "shards" if phase == "reference pass" else "steps"
        went_on = "had said done" if done else newest.name if newest else "the beginning"
        row = (number + 1, processes, victim, phase, f"{reached} {unit}", ", ".join(half) or "-", went_on)
        print("|", " | ".join(map(str, row)), "| bitwise |", flush=True)
        shutil.rmtree(run.folder)


# ---- a full disk


@pytest.fixture
def small_disk(tmp_path):
    """A file system of a few MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)]
    mounted = subprocess.run(options, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_during_a_save_leaves_the_previous_checkpoint_and_one_line(place, uninterrupted, small_disk):
    def start() -> Run:
        return place.start("disk", output_dir=small_disk / "run", save_total_limit=2)

    expected, run = uninterrupted(1), start()
    assert run.until_step(3)
    assert run.until(lambda: newest_checkpoint(run.folder) is not None)
    filler = small_disk / "others"  # somebody else's data
    with filler.open("wb", buffering=0) as file:
        file.write(b"x" * (shutil.disk_usage(small_disk).free - 2**19))
    assert run.wait() == 1, run.log[-4000:]
    newest = newest_checkpoint(run.folder)
    assert newest is not None
    errors = [line for line in run.log.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "disk full while writing" in errors[0], run.log[-4000:]
    assert f"the run can go on from {newest}" in errors[0]
    assert "Traceback" not in run.log
    assert run.status["state"] == "failed" and "disk full" in run.status["message"]

    early = start()  # still full: said before the first step
    assert early.wait() == 2, early.log[-4000:]
    assert "are free, checkpoints will take" in early.log and "step " not in early.log.split("data\n")[1]
    filler.unlink()
    again = start().finish()
    assert f"resuming from {newest}" in again.log
    assert_same_run(again, expected)


def test_a_checkpoint_of_shards_alone_is_put_together(uninterrupted, tmp_path):
    """DeepSpeed's shards give the model that the whole save holds; the names are those of from_pretrained."""
    checkpoint = Path(shutil.copytree(uninterrupted(2).folder / "checkpoint-8", tmp_path / "checkpoint-8"))
    expected = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    (tmp_path / "whole").mkdir()
    consolidate_shards(checkpoint, tmp_path / "whole")
    found = load_file(tmp_path / "whole" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
