"""DeepSpeed's buckets hold the largest tensor of every shape; otherwise its gradient would be overwritten on a GPU."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import PROJECT
from sfm_dpo.model.loading import meta_model
from sfm_dpo.model.sharding import check_buckets, zero_config
from tests.gpu.reduction_race import HIDDEN, RANKS, VOCAB
from tests.tiny_models import tiny_model

SHAPES = sorted(path.parent.name for path in PROJECT.glob("bench/shapes/*/config.json"))


@pytest.mark.parametrize("launch", ["zero2", "zero3"])
def test_every_shape_fits_in_the_buckets(launch):
    """At any number of ranks: what fits in a bucket is copied into it, however it is partitioned."""
    zero = zero_config(launch)
    for name in SHAPES:
        model = meta_model(AutoConfig.from_pretrained(PROJECT / "bench/shapes" / name))
        check_buckets(SimpleNamespace(deepspeed_config={"zero_optimization": zero}), model)
    smaller = SimpleNamespace(deepspeed_config={"zero_optimization": zero | {"reduce_bucket_size": 1000}})
    with pytest.raises(UserError, match=r"reduce_bucket_size 1000: .* 16640 elements, .* set it to 16640 or more"):
        check_buckets(smaller, tiny_model("llama"))


@pytest.mark.slow
def test_canary_gradient_larger_than_the_bucket():
    """What fits in a bucket is safe, one element more is not."""
    largest = VOCAB * HIDDEN
    env = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(PROJECT), "ACCELERATE_USE_DEEPSPEED": "true"}
    env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(RANKS)}
    command = [sys.executable, "-m", "tests.gpu.reduction_race", str(largest - 2), str(largest)]
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    unsafe = json.loads(done.stdout.splitlines()[-1])
    assert unsafe[str(largest)] == 0
    assert unsafe[str(largest - 2)] > 0
