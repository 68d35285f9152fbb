"""What a configuration asks for, and that each decision has one writer."""

import ast
from pathlib import Path

import pytest

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import PROJECT
from sfm_dpo.memory.asked import read_asked
from sfm_dpo.run.facts import ForwardPath, MicroBatch, RunFacts
from sfm_dpo.run.start import Before
from tests.memory.test_planner import configuration
from tests.tiny_models import tiny_config

WRITERS = {"ForwardPath": "choose_path.py", "MicroBatch": "choose_micro_batch.py"}


@pytest.mark.parametrize(("record", "writer"), WRITERS.items())
def test_one_module_makes_a_record_and_no_other_one_changes_it(record, writer):
    """A record is made by its class, and changed by `replace` of a name that holds one."""
    names = {"ForwardPath": {"path", "packed", "shared"}, "MicroBatch": {"micro_batch"}}[record]
    for file in [PROJECT / "train_dpo.py", *PROJECT.glob("sfm_dpo/**/*.py"), *PROJECT.glob("scripts/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or file.name == writer:
                continue
            called = ast.unparse(node.func).removeprefix("dataclasses.")
            changed = ast.unparse(node.args[0]).rpartition(".")[2] if node.args else ""
            assert called != record, f"{file}: {node.lineno}"
            assert called != "replace" or changed not in names, f"{file}: {node.lineno}"


def test_a_balancing_loss_keeps_the_micro_batch_and_the_packing_of_the_run_that_it_resumes():
    was = RunFacts(path=ForwardPath(False, False, "fa2"), micro_batch=MicroBatch(2, 3))
    before = Before(Path("run/checkpoint-4"), was)
    mixture = tiny_config("olmoe")
    asked = read_asked(configuration(), mixture, before)
    assert (asked.pairs, asked.can_pack) == (2, False)
    for field, then in (("per_device_train_batch_size=4", "2"), ("padding_free=true", "False")):
        message = rf"checkpoint-4 was written with {then}: another balancing loss; set \w+: {then}, or use another"
        with pytest.raises(UserError, match=message):
            read_asked(configuration(f"--{field}"), mixture, before)
    assert read_asked(configuration("--router_aux_loss_coef=0"), mixture, before).pairs is None
    assert read_asked(configuration("--per_device_train_batch_size=4"), tiny_config("llama"), before).pairs == 4


def test_layers_that_a_configuration_checkpoints():
    def layers(*fields: str) -> int | None:
        return read_asked(configuration(*fields), tiny_config("llama")).layers

    assert layers() is None
    assert (layers("--gradient_checkpointing=false"), layers("--gradient_checkpointing=true")) == (0, 3)
    assert layers("--checkpointed_layers=1") == layers("--gradient_checkpointing=true", "--checkpointed_layers=1") == 1
    with pytest.raises(UserError, match=r"^checkpointed_layers 4: the model has 3; give at most 3$"):
        layers("--checkpointed_layers=4")
