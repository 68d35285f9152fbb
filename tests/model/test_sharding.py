"""Which layers are checkpointed."""

import pytest

from sfm_dpo.model.layers import blocks, checkpoint_layers
from sfm_dpo.model.loading import meta_model
from tests.tiny_models import tiny_config


@pytest.mark.parametrize("count", range(9))
def test_checkpointed_layers_are_spread_evenly_and_the_last_is_not_among_them(count):
    model = meta_model(tiny_config("olmo3", num_hidden_layers=8, layer_types=None))
    model.activation_checkpointing_enable()
    checkpoint_layers(model, count)
    chosen = [index for index, layer in enumerate(blocks(model)) if layer.gradient_checkpointing]
    gaps = {after - before for before, after in zip(chosen, [*chosen[1:], 8], strict=False)}
    assert len(chosen) == count and (7 in chosen) is (count == 8)
    assert not gaps or max(gaps) - min(gaps) <= 1
