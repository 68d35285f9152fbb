"""Two processes under ZeRO-2 on CPU wait for each other where DeepSpeed reduces gradients, and else once a step."""

import json

import pytest

from tests.e2e.runs import ROOT, make_place
from tests.toolbox import pairs


@pytest.mark.slow
def test_collectives_of_a_step(tmp_path):
    """In 4 micro-batches of each process: none of the package's or of TRL's."""
    place = make_place(tmp_path, pairs(24), {"olmo3": {}}, {"max_steps": 3, "per_device_train_batch_size": 1})
    run = place.start("run", 2, script=ROOT / "tests/gpu/counted_collectives.py")
    assert run.wait() == 0, run.log[-3000:]
    counted = next(line for line in run.log.splitlines() if line.startswith('{"'))
    of_file = {}
    for name, count in json.loads(counted).items():
        file = name.split()[1].partition(":")[0]
        of_file[file] = of_file.get(file, 0) + count
    # The stop file; Transformers' loss and number of FLOPs in each log; the metrics
    assert of_file == {"train/callbacks.py": 1, "transformers/trainer_pt_utils.py": 2, "train/metrics.py": 1}
