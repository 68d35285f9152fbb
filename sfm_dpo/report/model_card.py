"""What will its users read? The model card, README.md, from the files in a run's folder."""

import functools
import os
import statistics
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.repocard import RepoCard
from huggingface_hub.utils import validate_repo_id

from sfm_dpo.common.files import write_atomically
from sfm_dpo.common.secrets import mask
from sfm_dpo.hub.verify import Change
from sfm_dpo.report.page import FIGURES, changed_fields, duration, held_out, shell_command
from sfm_dpo.report.plots import PANELS, draw_curves
from sfm_dpo.run.reader import list_evaluations, list_restarts, read_run

# With h the log-ratio of chosen (y⁺) over rejected (y⁻), a sum over tokens; /|y| makes means of the sums.
_PER_TOKEN = r"(log π(y⁺|x) - log π_ref(y⁺|x)) / |y⁺| - (log π(y⁻|x) - log π_ref(y⁻|x)) / |y⁻|"
_SUMMED = r"log π(y⁺|x) - log π_ref(y⁺|x) - log π(y⁻|x) + log π_ref(y⁻|x)"
LOSS_FORMULAS = {
    "sigmoid_norm": f"-log σ(β [ {_PER_TOKEN} ])",
    "sigmoid": f"-log σ(β [ {_SUMMED} ])",
    "hinge": f"max(0, 1 - β [ {_SUMMED} ])",
    "ipo": f"( [ {_PER_TOKEN} ] - 1/(2β) )²",
}
_CURVES = {"loss": "Loss", "accuracy": "Reward accuracy", "margin": "Reward margin", "logps": "Log-probabilities"}
# How it was run here, which says nothing to somebody who repeats it.
_LOCAL = set("output_dir run_name push_to_hub report_to dataset_num_proc dataloader_num_workers project".split())

_CARD = """---
{metadata}
---

# {name}

{base}, post-trained with DPO (Direct Preference Optimization) on {data}{step}.

## Result

{results}
{curves}
## Training

| | |
|---|---|
{table}

Loss, with the policy π, the reference π_ref (the base model), a prompt x, the chosen answer y⁺ and the rejected y⁻:

    {formula}

{weights}
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repo}"{revision})
model = AutoModelForCausalLM.from_pretrained("{repo}"{revision})
messages = [{{"role": "user", "content": "What is the capital of France?"}}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=256)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```

## Repeat

With sfm-post-training at commit {commit}, and these fields in `recipe.yaml` (all others at their defaults):

```yaml
{recipe}
```

```
{command}
```

The run here was started with:

```
{given}
```

Software: {versions}.
"""


def write_model_card(
    run: Path,
    *,
    folder: Path | None = None,
    repo: str | None = None,
    revision: str = "main",
    step: int | None = None,
    changes: list[Change] | None = None,
) -> None:
    """Writes README.md, and beside it the figures that it shows.

    Args:
        run: the run's folder, whose files tell everything.
        folder: where to write; by default the run's own, whose figures are then the report's.
        repo: name on the Hub; by default hub_model_id or the folder.
        step: that of a checkpoint; metrics after it are left out.
        changes: what proof.compare_weights found.
    """
    run = Path(run)
    facts = read_run(run)
    folder = folder or run
    config, data, env = facts["config"], facts["data"], facts["environment"]
    log = [entry for entry in facts["log"] if step is None or entry["step"] <= step]
    if folder != run:
        shown = {
            "step",
            *(key for name in _CURVES for metric in PANELS[name][1] for key in (metric, f"eval_{metric}")),
        }
        points = [{key: value for key, value in entry.items() if key in shown} for entry in log]
        draw_curves(points, config, [at for at in list_restarts(facts) if step is None or at < step], folder / FIGURES)
    facts = facts | {"log": log}
    base, sources = config["model_name_or_path"], data["sources"]
    repo = repo or config["hub_model_id"] or config["output_dir"]
    revised = "" if revision == "main" else f', revision="{revision}"'
    recipe = {key: _shown(value) for key, value, _ in changed_fields(config) if _is_shared(key, value)}
    text = _CARD.format(
        metadata=_metadata(facts, repo).to_yaml(),
        name=Path(repo).name if step is None else f"{Path(repo).name}, step {step}",
        base=_link(base),
        data=" and ".join(_link(name, "datasets/") for name in sources),
        step="" if step is None else f": checkpoint of step {step}, before the end of the training",
        results=_results(facts),
        curves=_curves(folder),
        table="\n".join(f"| {name} | {value} |" for name, value in _table(facts, log)),
        formula=LOSS_FORMULAS.get(config["loss_type"][0], f"TRL's `{config['loss_type'][0]}`"),
        weights=_weights(changes),
        repo=repo,
        revision=revised,
        commit=(env["git_commit"] or "(not a git checkout)") + (" with local changes" if env["git_dirty"] else ""),
        recipe=yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).strip(),
        command=_launch(env["world_size"]) + " train_dpo.py --config recipe.yaml",
        given=shell_command([_shown(word) for word in env["command"]]),
        versions=", ".join(f"{name} {version}" for name, version in env["versions"].items() if version),
    )
    write_atomically(folder / "README.md", mask(str(ModelCard(text))))


def _metadata(facts: dict[str, Any], repo: str) -> ModelCardData:
    config, data = facts["config"], facts["data"]
    base, sources = config["model_name_or_path"], data["sources"]
    evals = list_evaluations(facts["log"])
    results = None
    if evals and data["eval"] and "eval_rewards/accuracies" in evals[-1]:
        results = [
            EvalResult(
                task_type="text-generation",
                dataset_type=sources[0] if _is_repo(sources[0]) else Path(sources[0]).name,
                dataset_name=f"{data['eval']} held-out pairs of {' and '.join(Path(name).name for name in sources)}",
                dataset_split=config["dataset_train_split"],
                metric_type="accuracy",
                metric_name="reward accuracy on held-out pairs",
                metric_value=round(evals[-1]["eval_rewards/accuracies"], 4),
            )
        ]
    return ModelCardData(
        model_name=Path(repo).name if results else None,
        eval_results=results,
        base_model=base if _is_repo(base) else None,
        datasets=[name for name in sources if _is_repo(name)] or None,
        license=licence(base),
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["trl", "dpo", "sfm-post-training"],
    )


def _results(facts: dict[str, Any]) -> str:
    rows = held_out(facts)
    if not rows:
        return "No pairs were held out, so nothing is known about pairs that it has not seen.\n"
    table = [f"| {row['text']} | {row['before']} | {row['after']} |" for row in rows]
    head = f"On {facts['data']['eval']:,} pairs that it was not trained on (95% confidence intervals in brackets):\n\n"
    return head + "\n".join(["| | before | after |", "|---|---|---|", *table]) + "\n"


def _curves(folder: Path) -> str:
    there = [(name, title) for name, title in _CURVES.items() if (folder / FIGURES / f"{name}.png").is_file()]
    return "".join(f"![{title}]({FIGURES}/{name}.png)\n" for name, title in there)


def _table(facts: dict[str, Any], log: list[dict[str, Any]]) -> list[tuple[str, str]]:
    config, data, env = facts["config"], facts["data"], facts["environment"]
    gpus, world, starts = env["gpus"], env["world_size"], len(env.get("starts") or [1])
    hardware = f"{world} x {gpus[0]}" if gpus else f"CPU, {world} process(es)"
    rows = [
        ("Base model", f"{_link(config['model_name_or_path'])}{_licence_of(config['model_name_or_path'])}"),
        *(("Data", f"{_link(s, 'datasets/')}{_licence_of(s, 'dataset')}") for s in data["sources"]),
        ("Split", f"`{config['dataset_train_split']}`, seed {config['seed']}"),
        ("Pairs", f"{data['train']:,} trained, {data['eval']:,} held out, {sum(data['dropped'].values()):,} dropped"),
        ("Fingerprint of the pairs", f"`{data.get('train_fingerprint', 'not recorded')}`"),
        ("Objective", f"`{' + '.join(config['loss_type'])}`, beta {config['beta']:g}"),
        (
            "Learning rate",
            f"{config['learning_rate']:g}, {config['lr_scheduler_type']}, warmup {config['warmup_steps']:g}",
        ),
        ("Batch", f"{config['global_batch_size']} pairs, {config['num_train_epochs']:g} epoch(s)"),
        ("Length", f"{config['max_length']} tokens, prompt {config['max_prompt_length'] or 'not limited'}"),
        ("Hardware", hardware),
    ]
    if facts["seconds"]:
        since = f", since the last of {starts} starts" if starts > 1 else ""
        rows.append(("Time", f"{facts['seconds'] / 3600:.2f} hours ({duration(facts['seconds'])}{since})"))
    if pace := [entry["perf/tokens_per_second"] for entry in log if "perf/tokens_per_second" in entry]:
        rows.append(("Speed", f"{statistics.median(pace):,.0f} tokens/s over all processes, padding not counted"))
    return rows


def _weights(changes: list[Change] | None) -> str:
    if not changes:
        return ""
    rows = [f"| {c.group} | {c.parameters:,} | {c.share:.2%} | {c.largest:.3g} |" for c in changes]
    head = [
        "Weights against the base model's:",
        "",
        "| | parameters | changed | largest change |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows]) + "\n"


def _launch(world_size: int) -> str:
    return "python" if world_size == 1 else "accelerate launch --config_file accelerate_config.yaml"


def _is_shared(key: str, value: Any) -> bool:
    return key not in _LOCAL and not key.startswith(("hub_", "trackio_", "logging_"))


def _shown(value: Any) -> Any:
    """A path of this machine means nothing elsewhere, and names its user: its last part stays."""
    if isinstance(value, str):
        option, equals, word = value.partition("=") if value.startswith("--") else ("", "", value)
        return f"{option}{equals}path/to/{Path(word).name}" if os.path.isabs(word) and len(word) > 1 else value
    return [_shown(item) for item in value] if isinstance(value, list) else value


def _is_repo(name: str) -> bool:
    """Whether metadata may name it: the name of a repository, and no file or folder here."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def _link(name: str, prefix: str = "") -> str:
    return f"[{name}](https://huggingface.co/{prefix}{name})" if _is_repo(name) else f"`{Path(name).name}`"


def _licence_of(name: str, kind: str = "model") -> str:
    found = licence(name, kind)
    return f", licence {found}" if found else ", licence not known"


@functools.cache  # the card is written with every checkpoint
def licence(name: str, kind: str = "model") -> str | None:
    """The licence that the card of a model or dataset states: in its folder, in the cache or on the Hub; else None."""
    try:
        path = Path(name) / "README.md"
        if _is_repo(name):
            path = Path(hf_hub_download(name, "README.md", repo_type=kind))
        found = RepoCard.load(path, ignore_metadata_errors=True).data.get("license")
    except Exception:  # no network, no card, a card without metadata: it is not known
        return None
    return ", ".join(found) if isinstance(found, list) else found
