#!/usr/bin/env python
"""Pushes the model of a run, or one of its checkpoints, to the Hugging Face Hub.

    python scripts/push_to_hub.py outputs/dpo
    python scripts/push_to_hub.py outputs/dpo/checkpoint-500 --hub_model_id my-org/my-model --hub_revision step-500
    python scripts/push_to_hub.py outputs/dpo --check_serving [ENV]     pushes nothing: does it load elsewhere?

First it checks that the weights differ from the base model's and that everything loads with the plain Auto classes;
then model, tokenizer, model card and figures go up in one commit. The same command continues an interrupted push, and
changes nothing where nothing is new. Needs HF_TOKEN, in .env or the environment.

Exit codes: 0 pushed, 2 a mistake, or a checkpoint not fit to be published, 5 the Hub refuses or cannot be reached.
"""

import argparse
import logging
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import _setup  # noqa: F401  (first: finds the package, reads .env)

from sfm_dpo.common.cli import Arguments, command
from sfm_dpo.hub.publish import choose_repo, find_source, publish, push_run, stage_files
from sfm_dpo.hub.serving import OLDER, check_serving, make_environment
from sfm_dpo.hub.upload import HubError, check_access, format_push_command
from sfm_dpo.hub.verify import check_loads

log = logging.getLogger("sfm_dpo.scripts.push_to_hub")  # whose handler the package installs


@command
def main(argv: list[str]) -> int:
    parser = Arguments(prog="push_to_hub.py", description=__doc__)
    parser.add_argument("path", metavar="RUN_OR_CHECKPOINT", type=Path)
    parser.add_argument("--hub_model_id", help="default: the run's own, or the name of its folder")
    parser.add_argument("--hub_revision", help="branch; {step} in it is a checkpoint's step; default: the run's own")
    parser.add_argument("--hub_private_repo", choices=("true", "false"), help="of a new repository; default: true")
    parser.add_argument(
        "--publish_anyway", action="store_true", help="also what the guard stopped, or what the checks refuse"
    )
    parser.add_argument(
        "--check_serving",
        nargs="?",
        type=Path,
        const=OLDER,
        metavar="ENV",
        help=f"read the files with the Transformers of this virtual environment; default: {OLDER}, installed once",
    )
    options = parser.parse_args(argv)
    if options.check_serving is None:
        return push(options)
    environment = make_environment() if options.check_serving == OLDER else options.check_serving
    with TemporaryDirectory() as staged:
        stage_files(find_source(options.path, options.publish_anyway).folder, Path(staged))
        check_loads(Path(staged))
        check_serving(Path(staged), environment)
    return 0


def push(options: argparse.Namespace) -> int:
    source = find_source(options.path, options.publish_anyway)
    config = source.config
    private = config.get("hub_private_repo", True)
    if options.hub_private_repo:
        private = options.hub_private_repo == "true"
    revision = options.hub_revision or config.get("hub_revision")
    repo = options.hub_model_id or choose_repo(config, source.run)
    repo = check_access(repo, private, revision, remedy="push when it is back")
    if source.step is None:
        return push_run(source, repo, revision, private, options.publish_anyway)
    try:
        publish(source, repo, revision, options.publish_anyway)
    except HubError as error:
        later = format_push_command(options.path, repo, revision, private)
        log.error(f"push failed: {error}; push later with: {later}")
        return 5
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it clears up behind itself
    sys.exit(main(sys.argv[1:]))
