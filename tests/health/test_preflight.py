"""The preflight: figures against sums written out here, verdicts on recorded log-probs, faults injected one by one."""

import json

import numpy as np
import pytest
import torch
from datasets import Dataset

import train_dpo
from scripts import preflight
from sfm_dpo.data.lengths import Lengths
from sfm_dpo.data.tokenization import tokenize_pairs
from sfm_dpo.health.preflight import count_wrong_rope_layers, inspect_tokens, run_preflight
from sfm_dpo.health.preflight_rules import compute_pair_figures, exact, format_finding, judge_base_model
from sfm_dpo.run.facts import ForwardPath
from sfm_dpo.train.base_model import base_model
from sfm_dpo.train.reference_cache import add_reference
from tests.oracle import by_hand
from tests.tiny_models import tiny_config, tiny_tokenizer
from tests.toolbox import on_cpu, pairs, user, with_tool
from tests.train.test_trainer import build_trainer
from tests.train.test_trainer import pairs as toy_pairs

# A failed project's pairs; of the lengths only the means per token are known (5.2 and 0.8 nats)
RECORDED = np.array([[-1034, -38], [-1045, -18], [-623, -23]], dtype=float)
RECORDED_LENGTHS = np.abs(RECORDED) / [5.2, 0.8]


def verdict_of(logps, lengths, loss_type="sigmoid_norm"):
    logps = np.asarray(logps, float)
    lengths = np.asarray(lengths, float)
    verdict, findings = judge_base_model(compute_pair_figures(logps, lengths), loss_type)
    return verdict, {finding["rule"]: finding["level"] for finding in findings}


def typical(n=256, chosen=-0.9, rejected=-1.0, lengths=(900, 700), seed=0):
    """Pairs like those of published DPO sets: both sides a model's own kind of text, lengths spread by a factor."""
    rng = np.random.default_rng(seed)
    tokens = np.maximum(8, np.array(lengths) * np.exp(rng.normal(0, 0.7, (n, 2)))).round()
    return (np.array([chosen, rejected]) + rng.normal(0, 0.3, (n, 2))) * tokens, tokens


def test_rope_scaling_of_olmo_3():
    config = tiny_config("olmo3")
    assert count_wrong_rope_layers(config) == 0
    config.rope_parameters["sliding_attention"] = config.rope_parameters["full_attention"]
    assert count_wrong_rope_layers(config) == 1
    # Flat parameters: transformers reads neither yarn nor its factor for any layer
    flat = tiny_config("olmo3", rope_parameters={"rope_type": "yarn", "factor": 8.0}, max_position_embeddings=65536)
    assert count_wrong_rope_layers(flat) == 1
    assert count_wrong_rope_layers(tiny_config("olmo3", max_position_embeddings=65536)) == 0
    assert count_wrong_rope_layers(tiny_config("llama", max_position_embeddings=65536)) == 0
    assert judge_base_model({"rope_layers": exact(1)}, "sigmoid_norm")[0] == "no-go"


@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm"])
def test_recorded_log_probs_are_no_go(loss_type):
    verdict, rules = verdict_of(RECORDED, RECORDED_LENGTHS, loss_type)
    assert verdict == "no-go"
    assert rules["token_gap"] == rules["chosen_logp"] == "no-go"
    assert ("sum_gap" in rules) == (loss_type == "sigmoid")


def test_a_finding_shows_the_interval_that_is_judged():
    figures = {"chosen_logp": (-6.92, -7.06, -6.78), "token_gap": (-2.6, -2.8, -2.4), "cut": exact(0.3)}
    verdict, findings = judge_base_model(figures, "sigmoid_norm")
    gap, chosen, cut = map(format_finding, findings)
    assert gap.startswith("caution: token_gap -2.6 (95% interval -2.8 to -2.4), limit -1 (")
    assert chosen.startswith("no-go: chosen_logp -6.92 (95% interval -7.06 to -6.78), limit -4.5 (")
    assert cut.startswith("caution: cut 0.3, limit 0.25 (share") and verdict == "no-go"


LONGER_CHOSEN = {"chosen": -1.0, "rejected": -1.0, "lengths": (1500, 800)}  # sums 600 nats apart, but no token gap


@pytest.mark.parametrize(
    ("pairs", "loss_type", "verdict", "rules"),
    [
        ({}, "sigmoid_norm", "go", {}),
        ({"lengths": (80, 70)}, "sigmoid", "go", {}),  # short answers are what sums were made for
        (LONGER_CHOSEN, "sigmoid", "caution", {"sum_gap": "caution"}),
        (LONGER_CHOSEN, "sigmoid_norm", "go", {}),
        ({"chosen": -2.6, "rejected": -1.2}, "sigmoid_norm", "caution", {"token_gap": "caution"}),
        ({"chosen": -4.2, "rejected": -0.9}, "sigmoid_norm", "no-go", {"token_gap": "no-go"}),
        ({"chosen": -3.4, "rejected": -3.4}, "sigmoid_norm", "caution", {"chosen_logp": "caution"}),
        ({"chosen": -5.0, "rejected": -5.2}, "sigmoid_norm", "no-go", {"chosen_logp": "no-go"}),
    ],
)
def test_each_side_of_each_threshold(pairs, loss_type, verdict, rules):
    found, broken = verdict_of(*typical(**pairs), loss_type)
    assert found == verdict and rules.items() <= broken.items()


def test_unlearnable_pairs_are_found_where_the_mean_is_fine():
    logps, lengths = typical(n=200)
    logps[:60, 0] = -6 * lengths[:60, 0]
    assert "unlearnable_pairs" in verdict_of(logps, lengths)[1]


def test_figures_are_what_their_names_say():
    logps = np.array([[-10.0, -30.0], [-40.0, -20.0]])
    lengths = np.array([[10.0, 10.0], [20.0, 40.0]])
    figures = compute_pair_figures(logps, lengths)
    assert figures["chosen_logp"] == pytest.approx((-1.5, -1.5 - 1.96 * 0.5, -1.5 + 1.96 * 0.5), abs=1e-4)
    assert figures["token_gap"][0] == pytest.approx((2.0 - 1.5) / 2)
    assert figures["sum_gap"][0] == 0.0


def test_not_a_number_breaks_every_rule():
    assert verdict_of(np.full((4, 2), np.nan), np.ones((4, 2)))[0] == "no-go"


def test_missing_eos_and_cut_responses_are_counted():
    texts = {"prompt": ["q", "q"], "chosen": ["yes" * 3, "x" * 80], "rejected": ["no", "no"]}
    tokens, _ = tokenize_pairs(Dataset.from_dict(texts), tiny_tokenizer(), max_length=64)
    eos = {tiny_tokenizer().eos_token_id}
    rows = list(tokens)
    lengths = Lengths.of(tokens)
    assert inspect_tokens(rows, lengths, eos, 64) == {"no_eos": exact(0.0), "cut": exact(0.25)}
    for row in rows:
        row["chosen_ids"] = [i for i in row["chosen_ids"] if i not in eos]
    assert inspect_tokens(rows, lengths, eos, 64)["no_eos"][0] == pytest.approx(1 / 3)  # the cut one does not count
    assert judge_base_model({"no_eos": exact(1 / 3), "cut": exact(0.3)}, "sigmoid_norm")[0] == "caution"


@pytest.mark.parametrize(
    ("cli", "tools"), [((), False), (("--precompute_ref_log_probs", "true", "--padding_free", "true"), True)]
)
def test_figures_of_a_model_are_those_of_plain_forwards(tiny_folder, tmp_path, cli, tools):
    folder = tiny_folder("olmo3")
    rows = toy_pairs().to_list()
    rows[-1]["prompt"] = "<|im_start|>"
    if tools:
        for row in rows:
            row["prompt"] = [user(row["prompt"])]
            row |= {side: with_tool(side, "7", row[side]) for side in ("chosen", "rejected")}
    trainer, asked, pairs = build_trainer(folder, tmp_path / "run", *cli, data=Dataset.from_list(rows))
    before = {name: p.clone() for name, p in trainer.model.state_dict().items()}
    path = ForwardPath(asked.can_pack, asked.can_share, "fa2")
    with base_model(trainer) as base:
        pairs, _ = add_reference(base, path, pairs)
        result = run_preflight(base, trainer.config, pairs.train, trainer.processing_class, 4)
    logps = by_hand(folder, list(trainer.train_dataset))
    chosen = logps["chosen_sum"]
    rejected = logps["rejected_sum"]
    assert result["figures"]["sum_gap"][0] == pytest.approx((chosen - rejected).mean().item(), abs=1e-2)
    chosen_mean = logps["chosen_mean"]
    rejected_mean = logps["rejected_mean"]
    assert result["figures"]["chosen_logp"][0] == pytest.approx(chosen_mean.mean().item(), abs=1e-4)
    assert result["verdict"] == "no-go"  # random weights
    assert result["pairs"] == 8
    margin = (chosen_mean - rejected_mean).mean().item()
    assert result["figures"]["token_gap"][0] == pytest.approx(margin, abs=1e-3)
    json.dumps(result, allow_nan=False)
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.state_dict().items())


@pytest.mark.slow
def test_it_judges_a_recipe_that_cannot_train_here(tiny_folder, write_rows, tmp_path, no_report, monkeypatch, capsys):
    monkeypatch.setattr(train_dpo, "check_disk", None)  # nothing is saved
    fields = {"eval_fraction": 0.25, "eval_strategy": "steps", "eval_steps": 2, "guard_generations": 2}
    fields |= {"save_steps": 2, "bf16": "true", "use_cpu": "false", "torch_compile_backend": "no_such_backend"}
    fields |= {"memory_gib": 0.001, "gradient_checkpointing": None, "per_device_train_batch_size": None}
    options = on_cpu(tiny_folder("llama"), write_rows("p.jsonl", pairs(8)), tmp_path, **fields)
    assert preflight.main(options) == 3
    assert "preflight: no-go" in capsys.readouterr().out


@pytest.mark.slow
def test_a_no_go_ends_the_run_before_its_first_step(tiny_folder, write_rows, tmp_path, capsys, no_report):
    out = tmp_path / "run"
    assert train_dpo.main(on_cpu(tiny_folder("llama"), write_rows("p.jsonl", pairs(8)), out, preflight="abort")) == 3
    status, result = (json.loads((out / name).read_text()) for name in ("status.json", "preflight.json"))
    assert (status["state"], status["exit_code"], result["verdict"]) == ("refused", 3, "no-go")
    captured = capsys.readouterr()
    assert "preflight: no-go" in captured.out
    assert captured.err.splitlines()[-1].startswith("error: preflight: no-go: chosen_logp")
    assert not (out / "model.safetensors").exists()
