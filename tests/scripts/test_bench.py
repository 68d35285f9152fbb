"""bench/throughput.py: its lengths are Dolci's, its sums are right, and it runs."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from bench import throughput
from bench.lengths import sample_lengths


@pytest.mark.parametrize(
    ("kind", "quantiles", "covered"),
    [
        ("think", {0.5: 2138, 0.9: 9194, 0.95: 15433, 0.99: 24834}, {4096: 0.751, 8192: 0.877, 16384: 0.958}),
        ("instruct", {0.5: 682, 0.95: 3521}, {4096: 0.962}),
    ],
)
def test_lengths_are_those_of_the_data_sets(kind, quantiles, covered):
    """Totals (prompt + longer response) as published; a small sample has the shape of a large one."""
    for pairs in (65536, 128):
        lengths = sample_lengths(kind, pairs)
        total = lengths["prompt"] + np.maximum(lengths["chosen"], lengths["rejected"])
        for q, tokens in quantiles.items():
            if q < 0.99 or pairs > 1000:
                assert np.quantile(total, q) == pytest.approx(tokens, rel=0.1)
        for tokens, share in covered.items():
            assert (total <= tokens).mean() == pytest.approx(share, abs=0.02)
    if kind == "think":
        lengths = sample_lengths(kind, 65536)
        assert np.median(lengths["prompt"]) == pytest.approx(114, rel=0.02)
        assert np.quantile(lengths["rejected"], 0.95) == pytest.approx(9518, rel=0.02)


def run(variant: str, number: int, rate: float, peak: float = 1.0, **extra) -> dict:
    figures = {"epoch_pairs_per_second": rate, "tokens_per_second": 100 * rate, "mfu": 0.1, "padding_fraction": 0.0}
    return {"variant": variant, "round": number, "pairs_per_second": rate, "peak_memory_gib": peak} | figures | extra


def test_ratios_are_taken_within_a_round():
    runs = [run("stock", 0, 1.0), run("off", 0, 2.0), run("stock", 1, 10.0), run("off", 1, 30.0, peak=2.0)]
    runs += [run("stock", 2, 4.0), run("off", 2, 4.0)]
    summary = throughput.summarise(runs, ["stock", "off"])
    assert summary["stock"]["pairs_per_second"] == 4.0
    assert summary["off"]["pairs_per_second_ratio"] == 2.0
    assert summary["off"]["pairs_per_second_ratio_range"] == [1.0, 3.0]
    assert "2.00 (1.00-3.00)" in throughput.table(summary).splitlines()[3]


def test_variant_that_does_not_fit_is_named():
    runs = [{"variant": "stock", "round": 0, "error": "out of memory"}, run("off", 0, 1.0)]
    summary = throughput.summarise(runs, ["stock", "off"])
    assert "out of memory" in throughput.table(summary) and "ratio" not in summary["off"]


@pytest.mark.grid
def test_quick_run(tmp_path):
    variants = ["stock", "batch_rebalance", "as_shipped_in_stock_memory"]
    command = [sys.executable, throughput.ROOT / "bench/throughput.py", "--quick", "--out", tmp_path]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    picture = tmp_path / "loss.png"
    command += ["--plot", picture, "--variants", *variants]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = tmp_path.glob("*.json")
    assert picture.stat().st_size > 10_000
    assert str(path) in done.stdout
    result = json.loads(path.read_text())
    assert result["machine"] and result["torch"]
    runs = {run["variant"]: run for run in result["runs"]}
    assert list(runs) == variants == list(result["summary"])
    for variant, figures in runs.items():
        assert figures["loss"] == pytest.approx(math.log(2), abs=2e-3)  # nothing learnt at lr 1e-6: all do the same
        assert figures["pairs_per_second"] == pytest.approx(result["options"]["pairs"] / figures["seconds"])
        (end, loss), *_ = reversed(figures["curve"])
        assert figures["reference_seconds"] < end < figures["reference_seconds"] + figures["seconds"] + 1
        assert loss == pytest.approx(figures["loss"], abs=2e-3)
        assert (figures["padding_fraction"] > 0.1) is (variant == "stock")
        assert (figures["reference_seconds"] > 0) is (variant != "stock")
        assert 0 < figures["mfu"] < 1 and figures["peak_memory_gib"] > 0.1
    assert runs["as_shipped_in_stock_memory"]["memory_gib"] == runs["stock"]["peak_memory_gib"]
    # prefix_sharing, which the recipe sets
    assert runs["as_shipped_in_stock_memory"]["flops"] < runs["batch_rebalance"]["flops"]
    # The reference forward is in the step of stock
    assert runs["batch_rebalance"]["flops"] * 4 == pytest.approx(runs["stock"]["flops"] * 3)


def test_the_memory_of_stock_is_known_before_it_is_given(capsys):
    for variants in (["as_shipped_in_stock_memory"], ["as_shipped_in_stock_memory", "stock"]):
        with pytest.raises(SystemExit):
            throughput.parse(["--variants", *variants])
        assert "needs stock before it" in capsys.readouterr().err
