"""The model card, README.md: results, training, usage and reproduction, from the files in a run's folder."""

import re
from pathlib import Path

from huggingface_hub import ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.utils import ADAPTER_CONFIG_NAME

from sfm_dpo.common.distributed import LAUNCHES, launch_file
from sfm_dpo.common.errors import user_input
from sfm_dpo.common.files import write_atomically
from sfm_dpo.common.secrets import mask
from sfm_dpo.data.sources import LOCAL_FORMATS
from sfm_dpo.report.page import FIGURES, changed_fields, format_yaml, render_page
from sfm_dpo.report.plots import draw_curves
from sfm_dpo.run.folder import CARD, EVALUATION, read_file
from sfm_dpo.run.reader import judge_learning, read_run
from sfm_dpo.run.saved_model import find_on_hub

_CURVES = ("loss", "accuracy", "margin", "rewards")
LAUNCHERS = {name: launch_file(launch) for launch, name in LAUNCHES.items()}  # by `launch` in data.json
# Prefixes of fields about this run's machine and project, which do not matter to somebody who reproduces it.
_LOCAL = tuple(
    "output_dir run_name push_to report_to dataset_num dataloader_ project hub_ trackio_ logging_ eval_command".split()
)
_PATH = re.compile(r"(?<![^\s'\"{=,])/[^\s'\"{},]+")  # an absolute path as a word of a text


@user_input("model card: a file of the run is missing or damaged", "restore it")
def write_model_card(
    run: Path,
    *,
    folder: Path | None = None,
    repo: str | None = None,
    revision: str = "main",
    step: int | None = None,
) -> None:
    """Writes README.md and the figures it shows, from the files in a run's folder.

    `folder`: where to write, by default the run's folder; `repo`: the name on the Hub, by default hub_model_id or the
    folder; `step`: a checkpoint's step, without later metrics.
    """
    folder = folder or run
    facts = read_run(run)
    if step is not None:  # the run's own evaluation is of the final model
        facts["log"] = [entry for entry in facts["log"] if entry["step"] <= step]
        facts["environment"]["starts"] = [s for s in facts["environment"].get("starts", []) if s["step"] < step]
        by_step = facts["evaluation"].get("checkpoints", {})
        facts["evaluation"] = read_file(run / f"checkpoint-{step}" / EVALUATION)
        facts["evaluation"]["checkpoints"] = {n: scores for n, scores in by_step.items() if n <= step}
    config = facts["config"]
    if folder != run:
        draw_curves(facts, folder / FIGURES, panels=_CURVES)
    repo = repo or config["hub_model_id"] or config["output_dir"]
    recipe = {key: value for key, value, _ in changed_fields(config) if not key.startswith(_LOCAL)}
    models = facts["data"]["models"]
    base = _name_model(config["model_name_or_path"], models.get("model_name_or_path"))
    reference = _name_model(config.get("ref_model_name_or_path") or "", models.get("ref_model_name_or_path"))
    datasets = facts["data"]["sources"]
    metadata = ModelCardData(
        base_model=base if _is_repo(base) else None,
        datasets=[name for name in datasets if _is_repo(name)] or None,
        library_name="peft" if (folder / ADAPTER_CONFIG_NAME).is_file() else "transformers",
        pipeline_tag="text-generation",
        tags=["trl", "dpo", "sfm-post-training"],
    )
    text = render_page(
        "model_card.md.jinja",
        facts,
        metadata=metadata.to_yaml(),
        name=Path(repo).name if step is None else f"{Path(repo).name}, step {step}",
        step=step,
        base=_format_link(base),
        reference=_format_link(reference),
        datasets=[_format_link(name, "datasets/") for name in datasets],
        verdicts=judge_learning(facts),
        figures=[name for name in _CURVES if (folder / FIGURES / f"{name}.png").is_file()],
        repo=repo,
        revision="" if revision == "main" else f', revision="{revision}"',
        recipe=hide_paths(format_yaml(recipe)).strip(),
        launcher=LAUNCHERS.get(facts["data"].get("launch")),
    )
    write_atomically(folder / CARD, mask(text) + "\n")


def hide_paths(text: str) -> str:
    """`text` with `path/to/NAME` for each absolute path: paths mean nothing elsewhere and may contain a user name."""
    return _PATH.sub(lambda found: f"path/to/{Path(found[0]).name}", text)


def _name_model(path: str, identity: str | None) -> str:
    """The Hub id of a model that a run used, or else its absolute path, which no repository's name is."""
    on_hub = find_on_hub(path, identity)
    return on_hub[0] if on_hub else str(Path(path).absolute())


def _is_repo(name: str) -> bool:
    """Whether this could be the name of a repository on the Hub, and neither is nor was a local file or folder."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists() and Path(name).suffix not in LOCAL_FORMATS


def _format_link(name: str, prefix: str = "") -> str:
    return f"[{name}](https://huggingface.co/{prefix}{name})" if _is_repo(name) else f"`{Path(name).name}`"
