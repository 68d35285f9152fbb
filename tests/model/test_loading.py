"""Loading a model's weights."""

import shutil

import pytest

from sfm_dpo.common.errors import UserError
from sfm_dpo.model.loading import load_model


def test_weights_that_could_run_code_are_not_loaded(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"cannot be loaded: .*no file named model.safetensors"):
        load_model(str(folder), {})
