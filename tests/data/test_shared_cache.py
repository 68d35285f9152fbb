"""HF_HOME that belongs to a group, to somebody else, or is full: what is written there, and what is said."""

import json
import multiprocessing
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from sfm_dpo.common.errors import DiskFull, UserError
from sfm_dpo.data import sources
from sfm_dpo.train import reference_cache

ADA, BOB, EVE, GROUP = 65534, 65533, 65532, 5000


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """HF_HOME, for this process."""
    if os.getuid() != 0:
        pytest.skip("only root can act for several users")
    folder = tmp_path / "hf"
    folder.mkdir()
    for part in (folder, *list(folder.parents)[:-2]):  # pytest's own are closed to others
        part.chmod(part.stat().st_mode | 0o055)
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"chosen": "a", "rejected": "b"}) + "\n")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "warm")
    sources.load_rows(str(tmp_path / "pairs.jsonl"))  # imports what only root may be able to read
    monkeypatch.setattr(sources, "HF_CACHE_HOME", str(folder))
    monkeypatch.setattr(reference_cache, "HF_CACHE_HOME", str(folder))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
    return folder


def act(user: int, umask: int, action: Callable[[], object], groups: tuple[int, ...] = ()) -> str:
    """What `action` returns, or how it ends, in a process of this user's."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()

    def run() -> None:
        os.setgroups(groups)
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        os.umask(umask)
        try:
            there.send(str(action()))
        except BaseException as error:
            there.send(f"{type(error).__name__}: {error}")

    process = fork.Process(target=run)
    process.start()
    process.join(60)
    assert here.poll(), "it ended without a word"
    return here.recv()


def ignore(left: int, holder: str) -> None:
    """No report."""


def never() -> bool:
    return False


def fill(home: Path) -> str:
    """Loads the pairs, and computes a reference cache: what a run writes there. Returns counts."""
    rows = sources.load_rows(str(home.parent / "pairs.jsonl"))
    cache = reference_cache.ReferenceCache(home / "sfm_dpo" / "reference" / "key", np.arange(1, 9), 1)
    missing = cache.missing_shards()
    if missing:
        reference_cache.make_folder(cache.folder)
    cache.compute(missing, lambda rows: torch.from_numpy(np.stack([rows, rows], axis=1)), ignore, never)
    return f"{len(rows)} rows, {cache.computed} shards computed"


def test_a_folder_of_the_group_stays_the_groups_whatever_the_umask(home):
    os.chown(home, 0, GROUP)
    home.chmod(0o2775)
    assert act(ADA, 0o077, lambda: fill(home), (GROUP,)) == "1 rows, 8 shards computed"
    for path in home.rglob("*"):
        mode = path.stat().st_mode
        assert path.stat().st_gid == GROUP and mode & stat.S_IRGRP, path
        assert mode & stat.S_IWGRP or path.is_file(), path
    shard = next(home.rglob("*.safetensors"))
    shard.write_bytes(b"damaged")
    assert act(BOB, 0o022, lambda: fill(home), (GROUP,)) == "1 rows, 1 shards computed"
    assert act(EVE, 0o022, lambda: fill(home)).startswith(f"UserError: HF_HOME: {home}/")


def test_a_folder_without_the_setgid_bit_is_left_to_the_umask(home):
    """The group of what is new there would be that of its owner: on many systems, of everybody."""
    home.chmod(0o777)
    assert act(ADA, 0o022, lambda: fill(home)) == "1 rows, 8 shards computed"
    assert not [path for path in home.rglob("*") if path.stat().st_mode & stat.S_IWGRP and not path.is_symlink()]


@pytest.mark.parametrize("part", [".", "datasets", "sfm_dpo", "sfm_dpo/reference/key"])
def test_what_belongs_to_somebody_else_is_named_and_not_blamed_on_the_data(home, part):
    folder = home / part
    folder.mkdir(parents=True, exist_ok=True)
    for path in (home, *home.rglob("*")):
        path.chmod(0o755 if path == folder else 0o777)
    message = act(ADA, 0o022, lambda: fill(home))
    assert message.startswith(f"UserError: HF_HOME: {folder.resolve()} cannot be written (owner root, mode 755); set")
    assert "dataset_name" not in message


def test_a_lock_of_somebody_else_is_named(home):
    """As `datasets` leaves it where the umask of its owner keeps the group out."""
    home.chmod(0o777)
    act(ADA, 0o022, lambda: sources.load_rows(str(home.parent / "pairs.jsonl")))
    for path in home.rglob("*"):
        path.chmod(0o777 if path.is_dir() else 0o600)
    message = act(BOB, 0o022, lambda: sources.load_rows(str(home.parent / "pairs.jsonl")))
    assert message.startswith(f"UserError: HF_HOME: {home}/datasets/") and "owner nobody, mode 600" in message


def test_a_full_disk_in_the_reference_pass_is_one_line_of_whichever_rank(home):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", home], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode().strip()}")
    try:
        cache = reference_cache.ReferenceCache(home / "sfm_dpo" / "reference" / "key", np.arange(1, 65), 1)
        reference_cache.make_folder(cache.folder)
        with pytest.raises(DiskFull) as caught:
            cache.compute(cache.missing_shards(), lambda rows: torch.zeros(len(rows), 2), ignore, never)
        assert f"HF_HOME: no space is left in {cache.folder}; free some, or set HF_HOME" in str(caught.value)
        assert not list(cache.folder.glob("*.lease*")), "the others wait for nothing"
        assert isinstance(caught.value, UserError)
    finally:
        subprocess.run(["umount", home], check=True)
