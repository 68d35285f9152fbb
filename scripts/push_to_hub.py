#!/usr/bin/env python
"""Pushes the model of a run, or one of its checkpoints, to the Hugging Face Hub.

    python scripts/push_to_hub.py outputs/dpo
    python scripts/push_to_hub.py outputs/dpo/checkpoint-500 --hub_model_id my-org/my-model --hub_revision step-500

Needs HF_TOKEN, in .env or the environment. The same command continues an interrupted push (docs/hub.md).
Exit codes: 0 pushed, 2 wrong arguments or an unpublishable checkpoint, 5 the push failed, 142 it took too long.
"""

import logging
import math
import signal
import sys
from pathlib import Path

import _setup  # noqa: F401  (first: finds the package, reads .env)
from huggingface_hub import get_session

from sfm_dpo.common.cli import Arguments, command, number, reads_runs
from sfm_dpo.common.errors import NOT_PUSHED, UserError
from sfm_dpo.config.fields import TrainConfig
from sfm_dpo.hub.upload import HubError, choose_repo, push, record_failure
from sfm_dpo.run.model_files import list_files
from sfm_dpo.run.saved_model import check_health, find_model

SLOWEST = 5e6  # bytes per second

log = logging.getLogger("sfm_dpo.scripts.push_to_hub")  # below sfm_dpo, whose handler the package installs


@command
@reads_runs
def main(argv: list[str]) -> int:
    parser = Arguments(prog="push_to_hub.py", description=__doc__)
    parser.add_argument("path", metavar="RUN_OR_CHECKPOINT", type=Path)
    parser.add_argument("--hub_model_id", help="default: the run's hub_model_id, or the name of its folder")
    parser.add_argument("--hub_revision", help="branch; {step} is replaced; default: the run's hub_revision")
    parser.add_argument("--hub_private_repo", choices=("true", "false"), help="for a new repository; default: true")
    parser.add_argument("--hub_timeout", type=number(float, 1), help="seconds for a request; default: the run's")
    parser.add_argument("--publish_anyway", action="store_true", help="push even if the guard stopped the run")
    options = parser.parse_args(argv)
    model = find_model(options.path)
    if not options.publish_anyway:
        check_health(model, remedy=", or add --publish_anyway")
    given = {"hub_model_id": options.hub_model_id} if options.hub_model_id else {}
    repo = choose_repo(model.config | given, model.run)
    revision = options.hub_revision or model.config.get("hub_revision")
    private = model.config.get("hub_private_repo", True)
    if options.hub_private_repo:
        private = options.hub_private_repo == "true"
    timeout = options.hub_timeout or model.config.get("hub_timeout", TrainConfig.hub_timeout)
    get_session().timeout = timeout  # of a request; huggingface_hub 2.4 has none
    size = sum(path.stat().st_size for path in list_files(model.folder))
    signal.alarm(math.ceil(timeout + size / SLOWEST))  # ends this process
    try:
        push(model, repo, revision, private)
    except UserError as error:
        is_of_hub = isinstance(error, HubError)  # the same command may succeed later
        log.error(record_failure(options.path, str(error), ["scripts/push_to_hub.py", *argv] if is_of_hub else []))
        return NOT_PUSHED if is_of_hub else error.exit_code
    finally:
        signal.alarm(0)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # lets it clean up
    sys.exit(main(sys.argv[1:]))
