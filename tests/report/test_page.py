"""The report of a run: real runs of a tiny model, runs that failed or were cut off, hostile text, odd figures."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import pytest

from sfm_dpo.common.files import write_json
from sfm_dpo.common.statistics import wilson
from sfm_dpo.report.model_card import hide_paths, write_model_card
from sfm_dpo.report.page import changed_fields, format_summary, format_yaml, last_user_turn, write_report
from sfm_dpo.report.plots import PANELS, draw_curves
from sfm_dpo.run.facts import RunFacts
from sfm_dpo.run.folder import read_file
from sfm_dpo.run.reader import describe_calibration, describe_run, judge_learning, read_run
from tests.toolbox import edit

STEPS = 6
HOSTILE = "</pre></div><script>alert(1)</script><img src=http://x.example/a.png onerror=alert(2)> & \"quoted\" 'text'"


class Page(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.tags = []
        self.attributes = []
        self.words = []
        self.feed(page)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.words.append(data)


def page_of(run: Path) -> Page:
    return Page(write_report(run).read_text())


def assert_nothing_is_loaded(run: Path, page: Page) -> None:
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(page.tags)
    for name, value in page.attributes:
        if name in ("src", "srcset", "href", "xlink:href", "data", "poster", "action"):
            assert value.startswith("#"), (name, value)
        assert not name.startswith("on")
        assert "url(" not in (value or "").replace("url(#", "")
    text = (run / "report.html").read_text()
    assert "@import" not in text and "url(http" not in text


def test_a_real_run_is_told_in_full_with_figures_that_are_not_blank(run):
    log = read_run(run)["log"]
    page = page_of(run)
    assert_nothing_is_loaded(run, page)
    assert "The run is done." in page.text and f"{STEPS} optimizer steps" in page.text
    assert "on 24 preference pairs" in page.text and "4 held-out pairs" in page.text
    assert "Truncated" in page.text and "python scripts/generate.py" in page.text
    norms = [entry["grad_norm"] for entry in log if "grad_norm" in entry]
    clipped = sum(norm > 1 for norm in norms) / len(norms)
    assert ("aria-label", f"Gradient norm, {clipped:.0%} of steps clipped by optimizer step") in page.attributes
    assert "empty response" in page.text  # the dropped row, in words
    calibration = describe_calibration(RunFacts.of(read_run(run)["data"]).calibration)
    assert calibration[0][0] == "noise of a log-prob" and all(" ".join(row) in page.text for row in calibration)
    after = [entry for entry in log if "eval_loss" in entry][-1]
    low, high = wilson(after["eval_rewards/accuracies"], 4)
    assert all(map(math.isnan, wilson(math.nan, 4)))
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)  # Newcombe 1998, table I, method 3
    assert f"{after['eval_rewards/accuracies']:.2f} ({low:.2f} to {high:.2f})" in page.text
    assert "before, step 0 after, step 6" in page.text and "0.50, all ties" in page.text
    assert "gap, per token +" in page.text
    assert "learning_rate" in page.text and "train_dpo" not in page.text.split("Configuration")[0]
    changed = {key for key, *_ in changed_fields(read_run(run)["config"])}
    assert {"learning_rate", "max_length"} <= changed and not changed & {"beta", "loss_type", "warmup_steps", "bf16"}
    fields = {"use_cpu": False, "bf16": False, "gradient_checkpointing": True, "use_peft": False}
    assert changed_fields(fields) == [("bf16", False, True), ("gradient_checkpointing", True, None)]
    assert changed_fields({"use_cpu": True, "bf16": False}) == [("use_cpu", True, False)]

    written = {path.stem for path in (run / "figures").glob("*.png")}
    assert set(PANELS) - {"perf_mfu"} <= written  # on a GPU
    assert page.tags.count("svg") == len(written)
    for path in (run / "figures").glob("*.png"):
        pixels = matplotlib.image.imread(path)[..., :3]
        colored = (pixels.max(axis=-1) - pixels.min(axis=-1)) > 0.2  # a curve; axes and text are grey
        assert pixels.shape[0] > 300 and pixels.std() > 0.05 and colored.mean() > 1e-3, path.name
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids)) > 0


def test_what_a_run_has_learned_is_said_everywhere(run, without_curves):
    log = [e | ({"eval_rewards/accuracies": 0.75} if "eval_loss" in e else {}) for e in read_run(run)["log"]]
    write_json(run / "trainer_state.json", {"global_step": STEPS, "log_history": log})
    (run / "log.jsonl").write_text("\n".join(map(json.dumps, log)))
    write_model_card(run)
    page = page_of(run)
    for text in (page.text.replace("\xa0", " "), (run / "README.md").read_text(), format_summary(run)):
        assert "No evidence of learning: the reward accuracy on 4 held-out pairs has changed by +0.250 (" in text
        assert "0.50, all ties" in text
    assert ("class", "state open") in page.attributes
    assert describe_run(run, None, 0.0)["verdict"] == "no evidence of learning"
    edit(run / "resolved_config.yaml", ref_model_name_or_path="another")
    assert "0.75 (0.30 to 0.95)" in format_summary(run) and not judge_learning(read_run(run))


def test_a_restart_is_drawn_and_steps_are_counted_since_it(run, without_curves):
    starts = read_run(run)["environment"]["starts"]
    write_json(run / "environment.json", read_run(run)["environment"] | {"starts": [*starts, starts[0] | {"step": 4}]})
    facts = read_run(run)
    assert f"{STEPS} optimizer steps, {STEPS - 4} of them since the last start in 0:00:" in format_summary(run)
    (_, svg), *_ = draw_curves(facts, run / "figures", panels=["loss"])
    (_, other), *_ = draw_curves(facts | {"environment": {}}, run / "figures", panels=["loss"])
    assert svg.count("<path") > other.count("<path")


def test_without_held_out_pairs_page_status_and_card_say_that_nothing_was_judged(run, without_curves):
    """However far the margin of the training pairs has grown; a run that has not ended has no verdict at all."""
    log = [{"step": i, "loss": 0.69, "rewards/margins": 1.0 + i / 9} for i in range(1, 41)]
    write_json(run / "trainer_state.json", {"global_step": 40, "log_history": log})
    (run / "log.jsonl").write_text("\n".join(map(json.dumps, log)))
    edit(run / "data.json", eval=0)
    write_model_card(run)
    for text in (page_of(run).text, (run / "README.md").read_text(), format_summary(run)):
        assert "Not judged: no pairs were held out (eval_fraction)." in text and "earned" not in text
    assert describe_run(run, None, 0.0)["verdict"] == "not judged"
    (run / "complete.json").unlink()
    write_json(run / "status.json", {"state": "stopped", "step": 29})
    assert describe_run(run, None, 0.0)["verdict"] is None
    assert "Not judged" not in page_of(run).text + format_summary(run)


def held_out(before: float, after: float) -> list[dict]:
    values = {0: before, 9: after}
    return [{"step": step, "eval_loss": 0.7, "eval_rewards/accuracies": share} for step, share in values.items()]


@pytest.mark.parametrize(
    ("log", "verdict", "words"),
    [
        (held_out(0.5, 0.55), "learned", "by +0.050 (95% interval +0.006 to +0.093)"),
        (held_out(0.47, 0.53), "no evidence of learning", "look at learning_rate"),
        (held_out(0.5, 0.45), "worse than the base model", "swapped"),
    ],
)
def test_the_verdict_is_that_of_the_interval(log, verdict, words):
    facts = {"config": {}, "data": {"eval": 500}, "status": {"state": "done"}, "log": log}
    ((found, sentence),) = judge_learning(facts)
    assert found == verdict and words in sentence


def test_hostile_text_is_shown_and_not_obeyed(run, without_curves):
    (run / "complete.json").unlink()
    write_json(run / "status.json", {"state": "failed", "message": HOSTILE})
    write_json(run / "preflight.json", {"verdict": HOSTILE, "reasons": [HOSTILE + "!"] * 2, "table": [[HOSTILE]]})
    write_json(run / "health.json", {"signal": HOSTILE, "nested": {"a": HOSTILE}})
    edit(run / "data.json", sources=[HOSTILE], dropped={HOSTILE: 3})
    write_json(run / "samples.json", [{"prompt": HOSTILE, "before": HOSTILE, "after": HOSTILE}])
    edit(run / "resolved_config.yaml", run_name=HOSTILE)
    page = page_of(run)
    assert page.text.count("alert(1)") >= 12  # each place shows it as text
    assert_nothing_is_loaded(run, page)


def test_a_run_that_failed_before_its_first_step(tmp_path):
    write_json(tmp_path / "status.json", {"state": "failed", "exit_code": 2, "message": "beta -1: must be above 0"})
    page = page_of(tmp_path)
    assert "The run failed." in page.text and "beta -1: must be above 0" in page.text
    assert "No metric was logged." in page.text and not (tmp_path / "figures").exists()
    assert "failed, 0 optimizer steps" in format_summary(tmp_path) and "beta -1" in format_summary(tmp_path)


def test_a_killed_run_with_damaged_files_is_told_from_its_newest_checkpoint(run, without_curves):
    (run / "trainer_state.json").unlink()
    (run / "data.json").unlink()
    (run / "resolved_config.yaml").write_text("{half a fi")
    (run / f"checkpoint-{STEPS}/complete.json").unlink()
    (run / "complete.json").unlink()
    write_json(run / "status.json", {"state": "running", "step": 5, "message": ""})
    page = page_of(run)
    assert "was killed" in page.text
    assert "checkpoint-4" in format_summary(run)  # and not the model, which a killed run may have half written


def test_values_that_are_no_numbers(run, without_curves):
    state = json.loads((run / "trainer_state.json").read_text())
    train = [entry for entry in state["log_history"] if "loss" in entry]
    train[2]["loss"] = math.nan
    train[3]["grad_norm"] = math.inf
    train[4]["rewards/margins"] = None
    for entry in train:
        entry["entropy"] = math.nan
        entry["perf/padding_fraction"] = 0.0
    write_json(run / "trainer_state.json", state | {"global_step": STEPS + 1})
    page_of(run)
    drawn = draw_curves(read_run(run), run / "drawn", panels=("loss", "margin", "entropy", "grad_norm"))
    assert {"Loss", "Reward margin", "Gradient norm"} <= {title.split(",")[0] for title, _ in drawn}


def test_perf_metrics_and_rewards_are_drawn(tmp_path):
    log = [{"step": i, "loss": 0.7 - i / 1000, "perf/mfu": i / 300, "eval_math-eval_loss": 0.6} for i in range(1, 201)]
    log[0] |= {"rewards/chosen": 0.5}
    facts = {"log": log, "config": {"beta": 5, "loss_type": ["sigmoid_norm", "sft"]}, "environment": {}}
    drawn = dict(draw_curves(facts, tmp_path / "figures"))
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {"loss", "rewards", "perf_mfu"}
    assert ">math-eval<" in drawn["Loss"] and re.search(r">share of the GPU.*s peak FLOPs<", drawn["MFU"])
    texts = re.findall("<text[^>]*>([^<]*)<", drawn["Rewards"])
    assert texts[:2] == ["1", "optimizer step"] and "0.50" in texts


@pytest.mark.parametrize(
    "prompt",
    [
        "system\nBe kind.\nuser\nOld?\nassistant\nYes.\nuser\nWhat is\na user?\nassistant\n",
        "<|system|>\nBe kind.\n<|user|>\nWhat is\na user?\n<|assistant|>\n<think>",
        "user\n\nWhat is\na user?assistant\n\n".replace("?a", "?\na"),
        "What is\na user?",
    ],
)
def test_of_a_rendered_prompt_the_last_question_is_shown(prompt):
    assert last_user_turn(prompt) == "What is\na user?"


def test_no_path_of_this_machine_is_in_the_card():
    given = ["/home/me/x y.jsonl", "sbatch /home/me/e.sh {out}", '{"m": "/home/me/m"}', "https://x.org/a", "a/b"]
    shown = ["path/to/x y.jsonl", "sbatch path/to/e.sh {out}", '{"m": "path/to/m"}', "https://x.org/a", "a/b"]
    assert hide_paths(format_yaml({"values": given})) == format_yaml({"values": shown})


def test_secrets_in_the_files_do_not_reach_report_and_summary(run, without_curves, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary0123456789canary")
    (run / "complete.json").unlink()
    write_json(run / "status.json", {"state": "failed", "message": "401 for canary0123456789canary, hf_" + "A" * 34})
    edit(run / "resolved_config.yaml", model_name_or_path="canary0123456789canary")  # `key: ***` would be an error
    text = write_report(run).read_text()
    out = format_summary(run)
    for shown in (text, out):
        assert "canary0123" not in shown and "hf_AAAA" not in shown and "401 for ***" in shown
    assert str(run / "report.html") in out.splitlines()[-1]
    write_model_card(run)
    assert "# run\n" in (run / "README.md").read_text() and "canary0123" not in (run / "README.md").read_text()


@pytest.mark.parametrize(
    ("launch", "processes", "command"),
    [
        ("ZeRO-3", 8, "accelerate launch --config_file configs/accelerate/zero3.yaml --num_processes 8 train_dpo.py"),
        ("whole weights", 2, "torchrun --nproc_per_node 2 train_dpo.py"),
        ("whole weights", 1, "python train_dpo.py"),
    ],
)
def test_the_card_repeats_the_launch_and_the_steps(run, launch, processes, command):
    assert read_file(run / "data.json")["launch"] == "whole weights"
    models = {"model_name_or_path": "hash-1", "ref_model_name_or_path": "hash-2"}
    edit(run / "data.json", launch=launch, models=models, sources=["gone/pairs.jsonl"], eval_sets={"math": 20})
    edit(run / "environment.json", world_size=processes, git_remote="https://github.com/lab/fork")
    edit(run / "resolved_config.yaml", max_steps=1200, eval_command="sbatch --account=us e.sh")
    folders = {"model_name_or_path": "outputs/sft", "ref_model_name_or_path": "outputs/ref"}  # gone by now
    edit(run / "resolved_config.yaml", **folders)
    write_model_card(run)
    card = (run / "README.md").read_text()
    assert "base_model" not in card and "\n`sft`, post-trained" in card and ", reference `ref` |" in card
    assert "datasets:" not in card and "on `pairs.jsonl`" in card and "huggingface.co" not in card
    assert "The results above are of 24 held-out pairs;" in card
    assert f"\n{command} --config recipe.yaml\n" in card and "pairs, 1,200 steps |" in card
    assert "account" not in card and "With [sfm-post-training](https://github.com/lab/fork) at commit" in card
