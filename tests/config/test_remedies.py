"""Each remedy in the answer to a wrong recipe is followed: the recipe then reads, or has another answer."""

import re

import pytest

from sfm_dpo.common.errors import UserError
from sfm_dpo.config.effects import REFUSED
from sfm_dpo.config.fields import parse_config

NEEDED = {"model_name_or_path": "org/model", "dataset_name": "pairs.jsonl", "use_cpu": "true"}
VALUES = {"accelerator_config": "{split_batches: true}", "fsdp_config": "{version: 2}", "dataloader_in_order": "false"}
VALUES |= dict.fromkeys(("ld_alpha", "label_smoothing_factor", "neftune_noise_alpha", "test_split_size"), "0.5")
MISTAKES = [
    """torch_dtype: null, learning_rat: 1e-6, beta: strong, seed: 1.5, warmup_steps: 10%, bf16: maybe, exp_name: e,
    loss_type: dpo_norm, micro_batch_size: 2, gradient_accumulation_steps: 4, use_slow_tokenizer: true""",
    """dtype: float16, bf16: auto, beta: 0, max_length: 1, eval_fraction: 1.0, learning_rate: null, loss_type: dpo,
    use_flash_attn: true, tokenizer_name: m, save_strategy: best, guard_generations: 5, report_to: wanbd""",
    """gradient_accumulation_steps: 3, max_steps: 1, dpo_beta: 0.1, eval_strategy: steps, dataset_mixer_list: a 1.0,
    use_dora: true, max_prompt_length: 2000""",
    "max_steps: 0, eval_steps: 5, loss_type: [], prefix_sharing: true, padding_free: false",
    """max_steps: 2, warmup_steps: 2, checkpointed_layers: 2, gradient_checkpointing: false, loss_type: sigmoid,
    logging_strategy: "no", global_batch_size: 10, per_device_train_batch_size: 4""",
    "datasets: [{path: p, type: chat_template, field_messages: c}]",
    ", ".join(f"{name}: {VALUES.get(name, 'true')}" for name in REFUSED),
]


def follow(line: str, fields: dict[str, str]) -> None:
    """Does to the fields of a recipe what a line of an error message recommends."""
    name = re.search(r"unknown field '(\w+)'|^(\w+)", line)
    name = name[1] or name[2]
    if found := re.search(r"(?:did you mean|here:) (?!none)(\w+)(?:\?|,| \()", line):
        is_value = f"{name} {fields[name]}: unknown" in line
        fields[name if is_value else found[1]] = found[1] if is_value else fields.pop(name)
    elif found := re.search(r"(set|here:|or) (\w+): ([\w./-]+)", line):
        if found[1] == "here:" or "remove" in line:
            fields.pop(name)
        fields[found[2]] = found[3]
    elif "keep one of them" in line or re.search("here: none|remove", line):
        removed = re.search(r"remove (\w+)", line)
        fields.pop(removed[1] if removed and removed[1] in fields else name)
    elif found := re.search(r"such as (\{.*\})", line):
        fields[name] = f"[{found[1]}]"
    else:
        found = re.search(r"(?:such as|for instance) ([\w.]+)", line)
        found = found or re.search(r"(?:choose|at least|above|give a|give) (\w+)", line)
        assert found, f"no remedy: {line}"
        fields[name] = "0.1" if "above 0" in line else found[1]


@pytest.mark.parametrize("mistakes", MISTAKES)
def test_a_remedy_works_or_leads_on(mistakes, tmp_path):
    wrong = dict(re.findall(r"(\w+): (\[.*\]|\{.*?\}|[^,\n]+)", mistakes))
    fields = NEEDED | wrong
    recipe = tmp_path / "recipe.yaml"
    answers: list[str] = []
    while True:
        recipe.write_text("".join(f"{name}: {value}\n" for name, value in fields.items()))
        try:
            parse_config(["--config", str(recipe)], world_size=2)
            break
        except UserError as error:
            answers.append(str(error))
        assert answers[-1] not in answers[:-1]
        for line in answers[-1].split("\n- ")[answers[-1].count("\n") > 0 :]:
            follow(line.removeprefix(f"{recipe}: "), fields)
    assert not {name for name in wrong if name not in " ".join(answers)}
