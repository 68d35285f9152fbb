"""HF_HOME that is full or somebody else's: one line that names the place."""

import errno

import datasets
import numpy as np
import pytest
import torch

from sfm_dpo.common.errors import DiskFull, UserError
from sfm_dpo.data.sources import explain_cache_errors, load_rows
from sfm_dpo.train import reference_cache
from tests.toolbox import small_disk


def test_what_cannot_be_written_is_named_and_other_errors_stay():
    def fail(cause):
        with explain_cache_errors():
            raise ValueError("the library's own") from cause

    with pytest.raises(UserError, match=r"^HF_HOME: /hf/x: Permission denied; free space, or set HF_HOME"):
        fail(PermissionError(errno.EACCES, "Permission denied", "/hf/x"))
    with pytest.raises(ValueError, match="the library's own"):
        fail(None)


def test_a_full_disk_while_pairs_are_read_and_in_the_reference_pass(write_rows, tmp_path, monkeypatch):
    """On a file system that is really full: needs root, and the right to mount."""
    path = write_rows("pairs.jsonl", [{"prompt": f"{i} " + "q" * 1000} for i in range(600)])
    with small_disk(tmp_path / "hf", "64k") as home:
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "datasets")
        with pytest.raises(UserError, match=f"HF_HOME: {home}/datasets.*: No space left on device"):
            load_rows(str(path))
        cache = reference_cache.ReferenceCache(home / "key", np.arange(1, 65), 1)
        reference_cache.make_folder(cache.folder)
        with pytest.raises(DiskFull, match=f"HF_HOME: {home}/key.*: No space left on device"):
            cache.compute(cache.missing_shards(), lambda rows: torch.zeros(len(rows), 2), lambda left, owner: None)
        assert not list(cache.folder.glob("*.lease*")), "the others wait for nothing"
