"""DeepSpeed's buckets hold the largest tensor of every shape; otherwise its gradient would be overwritten on a GPU."""

import pytest
from transformers import AutoConfig

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import PROJECT
from sfm_dpo.model.loading import meta_model
from sfm_dpo.model.sharding import fit_buckets, zero_config
from tests.tiny_models import tiny_model

SHAPES = sorted(path.parent.name for path in PROJECT.glob("bench/shapes/*/config.json"))


@pytest.mark.parametrize("launch", ["zero2", "zero3"])
def test_every_shape_fits_in_the_buckets(launch):
    """At any number of ranks: what fits in a bucket is copied into it, however it is partitioned."""
    zero = zero_config(launch)
    for name in SHAPES:
        model = meta_model(AutoConfig.from_pretrained(PROJECT / "bench/shapes" / name))
        assert fit_buckets(zero, model) == zero
    with pytest.raises(UserError, match=r"reduce_bucket_size 1000: .* 16640 elements, .* set it to 16640 or more"):
        fit_buckets(zero | {"reduce_bucket_size": 1000}, tiny_model("llama"))
