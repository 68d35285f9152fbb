"""Random fields and values: each configuration passes the checks, or is refused with one line for each field."""

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sfm_dpo.common.errors import UserError
from sfm_dpo.config.fields import FieldParser, parse_config

NAMES = sorted(set(FieldParser().fields) - {"config", "deepspeed"})  # the latter starts DeepSpeed's process group
NUMBERS = [0, 1, -1, 2, 7, 0.1, -0.5, 1e-6, 1e30, float("nan"), float("inf")]
WORDS = ["", "no", "none", "auto", "steps", "epoch", "a b", "\n", "{}", "[", "true", "null", "cosine_with_min_lr"]
plain = st.sampled_from([*NUMBERS, *WORDS, None, True, False]) | st.text(max_size=5) | st.integers() | st.floats()
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "path"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@st.composite
def recipes(draw) -> dict:
    """Mostly values that a field accepts, because the checks after the first error are not reached."""
    fields = FieldParser().fields
    recipe = {}
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4)):
        choices = [str(getattr(choice, "value", choice)) for choice in fields[name].choices or ()]
        recipe[name] = draw(st.sampled_from(choices) | values if choices else values)
    return recipe


@pytest.mark.grid
@settings(max_examples=300, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(recipe=recipes())
def test_any_recipe_passes_the_checks_or_is_refused_with_a_line_for_each_field(recipe, tmp_path_factory):
    environment = dict(os.environ)
    path = tmp_path_factory.mktemp("random") / "recipe.yaml"
    needed = {"model_name_or_path": "m", "dataset_name": "d.jsonl", "use_cpu": True, "output_dir": str(path.parent)}
    path.write_text(json.dumps(needed | recipe))  # YAML, too
    try:
        config = parse_config(["--config", str(path)])
        json.dumps(config.as_dict())
    except UserError as error:
        first, *problems = str(error).split("\n- ")
        assert "\n" not in first + "".join(problems) and len(str(error)) < 2000  # four fields, their conflicts
        assert not problems or first.startswith(f"{len(problems)} fields to correct in ")
    finally:
        os.environ.clear()
        os.environ.update(environment)
