"""The local Slurm cluster, one for all tests here. REQUIRE_SLURM=1 (CI) makes its absence a failure."""

import os
from pathlib import Path

import pytest

from tests.project import make_project
from tests.slurm.cluster import Cluster, local_cluster, missing


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    if reason := missing():
        if os.environ.get("REQUIRE_SLURM") == "1":
            pytest.fail(f"REQUIRE_SLURM=1, but {reason}")
        pytest.skip(f"no local Slurm: {reason}")
    with local_cluster() as running:
        yield running


@pytest.fixture(scope="session")
def project(tmp_path_factory) -> Path:
    return make_project(tmp_path_factory.mktemp("slurm"))
