"""Averages against a mean computed here in fp64, through the command; what cannot be averaged is one line."""

import shutil
from pathlib import Path

import average
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sfm_dpo.run.folder import read_status
from sfm_dpo.run.saved_model import find_model
from tests.tiny_models import tiny_model, tiny_tokenizer


def state(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.fixture
def parents(finished_run, tmp_path):
    """A function: (options of the model) -> three runs that hold such models with different weights."""

    def make(shard: str = "5GB", dtype: torch.dtype = torch.float32, **fields) -> list[Path]:
        runs = [tmp_path / f"seed{seed}" for seed in range(3)]
        for seed, run in enumerate(runs):
            run.mkdir()
            for name in ("resolved_config.yaml", "data.json", "environment.json", "status.json"):
                shutil.copy(finished_run / name, run)
            model = tiny_model("llama", seed=seed, dtype=dtype, **fields)
            model.save_pretrained(run, max_shard_size=shard if seed == 0 else "5GB")  # sharded in different ways
            tiny_tokenizer().save_pretrained(run)
        return runs

    return make


@pytest.mark.parametrize(
    ("counts", "tied", "dtype", "tolerance"),
    [((1, 1, 1), True, torch.float32, 1e-7), ((1, 2, 5), False, torch.bfloat16, 2**-8)],
    ids=str,
)
def test_the_mean_is_exact_sharded_as_the_first_and_loads(parents, tmp_path, counts, tied, dtype, tolerance):
    runs = parents("100KB", dtype, tie_word_embeddings=tied)
    output = tmp_path / "mean"
    words = [str(run) for run, count in zip(runs, counts, strict=True) for _ in range(count)]
    (tmp_path / ".mean.partial").mkdir()  # by one that was killed
    assert average.main([*words, "--output_dir", str(output)]) == 0

    states = [state(run) for run in runs]
    mean = state(output)
    shares = [count / sum(counts) for count in counts]
    assert mean.keys() == states[0].keys() and ("lm_head.weight" in mean) != tied
    for name, tensor in mean.items():
        expected = sum(share * other[name].double() for share, other in zip(shares, states, strict=True))
        assert tensor.dtype == dtype
        assert torch.allclose(tensor.double(), expected, rtol=tolerance, atol=1e-9), name
    assert not (tmp_path / ".mean.partial").exists()
    files = {path.name for path in runs[0].glob("*.safetensors*")}
    assert {path.name for path in output.glob("*.safetensors*")} == files and len(files) > 2

    loaded, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not any(info.values()) and loaded.dtype == dtype
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert find_model(output).step is None and read_status(output)["state"] == "done"
    card = (output / "README.md").read_text()
    assert "mean of the weights of seed0 (" in card and card.count(f"seed2 ({1 / sum(counts):.3g})") == counts[2]


SPOILS = {  # what is wrong with the second model: the message
    "base": (lambda run: (run / "resolved_config.yaml").write_text("model_name_or_path: x"), "base differ from"),
    "shape": (
        lambda run: tiny_model("llama", intermediate_size=80).save_pretrained(run),
        "intermediate_size differ from",
    ),
    "adapter": (lambda run: (run / "adapter_config.json").write_text("{}"), "is an adapter; merge"),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_models_that_do_not_go_together(parents, tmp_path, capsys, spoil):
    runs, (change, message) = parents(), SPOILS[spoil]
    change(runs[1])
    assert average.main([*map(str, runs), "--output_dir", str(tmp_path / "mean")]) == 2
    error = capsys.readouterr().err
    assert message in error and str(runs[1]) in error
    assert not (tmp_path / "mean").exists()


def test_a_kill_leaves_no_folder_that_the_next_start_refuses(parents, tmp_path, monkeypatch):
    words = [*map(str, parents()), "--output_dir", str(tmp_path / "mean")]

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("sfm_dpo.jobs.averaging.write_json", killed)
        assert average.main(words) == 130
    assert not (tmp_path / "mean").exists() and average.main(words) == 0
