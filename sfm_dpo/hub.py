"""Who gets it? The model card of a run, written from the files in the run's folder."""

import json
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from sfm_dpo.run_dir import DATA, ENVIRONMENT, RESOLVED_CONFIG, write_atomically

LOSS_FORMULAS = {
    "sigmoid_norm": r"-log σ(β [ (log π(y⁺|x) - log π_ref(y⁺|x)) / |y⁺| - (log π(y⁻|x) - log π_ref(y⁻|x)) / |y⁻| ])",
    "sigmoid": r"-log σ(β [ log π(y⁺|x) - log π_ref(y⁺|x) - log π(y⁻|x) + log π_ref(y⁻|x) ])",
}

_CARD = """---
{metadata}
---

# {name}

{base}, post-trained with DPO on {data}.

| | |
|---|---|
| Loss | `{loss}`, beta {beta:g}{formula} |
| Pairs | {pairs} |
| Learning rate | {lr:g}, {scheduler}, warmup {warmup:g} |
| Global batch | {batch} pairs, {epochs:g} epoch(s) |
| Length | {max_length} tokens, prompt {max_prompt_length} |
{results}
## Use

```python
from transformers import pipeline

chat = pipeline("text-generation", "{repo}")
print(chat([{{"role": "user", "content": "What is the capital of France?"}}], max_new_tokens=128))
```

## Repeat

With sfm-post-training at commit {commit}:

```
{command}
```

Software: {versions}.
"""


def write_model_card(run: str | Path, log_history: list[dict[str, Any]]) -> None:
    """Writes README.md into the run's folder: base, data, objective, result, how to use and repeat it."""
    run = Path(run)
    config = yaml.safe_load((run / RESOLVED_CONFIG).read_text())
    data, env = json.loads((run / DATA).read_text()), json.loads((run / ENVIRONMENT).read_text())
    loss = config["loss_type"][0]
    # A local path means nothing to a reader, and metadata must name repositories.
    is_repo = {name: not Path(name).exists() for name in (config["model_name_or_path"], *data["sources"])}
    metadata = ModelCardData(
        base_model=config["model_name_or_path"] if is_repo[config["model_name_or_path"]] else None,
        datasets=[name for name in data["sources"] if is_repo[name]] or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["trl", "dpo", "sfm-post-training"],
    )
    text = _CARD.format(
        metadata=metadata.to_yaml(),
        name=Path(config["output_dir"]).name,
        base=_link(config["model_name_or_path"], is_repo),
        data=" and ".join(_link(name, is_repo, "datasets/") for name in data["sources"]),
        loss=" + ".join(config["loss_type"]),
        beta=config["beta"],
        formula=f": {LOSS_FORMULAS[loss]}" if loss in LOSS_FORMULAS else "",
        pairs=f"{data['train']:,} trained, {data['eval']:,} held out, {sum(data['dropped'].values()):,} dropped",
        lr=config["learning_rate"],
        scheduler=config["lr_scheduler_type"],
        warmup=config["warmup_steps"],
        batch=config["global_batch_size"],
        epochs=config["num_train_epochs"],
        max_length=config["max_length"],
        max_prompt_length=config["max_prompt_length"] or "not limited",
        results=_results(log_history),
        repo=config["hub_model_id"] or config["output_dir"],
        commit=env["git_commit"] or "(not a git checkout)",
        command=" ".join(env["command"]),
        versions=", ".join(f"{name} {version}" for name, version in env["versions"].items() if version),
    )
    write_atomically(run / "README.md", str(ModelCard(text)))


def held_out(log_history: list[dict[str, Any]], metric: str) -> tuple[float, float] | None:
    """First and last value of an eval metric, or None where nothing was held out."""
    values = [entry[f"eval_{metric}"] for entry in log_history if f"eval_{metric}" in entry]
    return (values[0], values[-1]) if values else None


def _results(log_history: list[dict[str, Any]]) -> str:
    rows = []
    for metric, name in (("rewards/accuracies", "reward accuracy"), ("rewards/margins", "margin"), ("loss", "loss")):
        if values := held_out(log_history, metric):
            rows.append(f"| Held-out {name} | {values[0]:.3f} before, {values[1]:.3f} after |\n")
    return "".join(rows)


def _link(name: str, is_repo: dict[str, bool], prefix: str = "") -> str:
    return f"[{name}](https://huggingface.co/{prefix}{name})" if is_repo[name] else f"`{Path(name).name}`"
