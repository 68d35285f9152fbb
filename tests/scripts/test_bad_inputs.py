"""Wrong input to every command: one line that names field, value and remedy. Recipes: config/test_fields.py."""

import importlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import train_dpo
from tests.toolbox import edit, error_line, write_jsonl

ROOT = Path(__file__).parents[2]
RECIPE = "--model_name_or_path {kit}/model --dataset_name {kit}/pairs.jsonl --use_cpu"
TRAIN = f"{RECIPE} --output_dir {{out}} --max_length 256 --global_batch_size 4 --per_device_train_batch_size 2"
ON = f"{TRAIN} --model_name_or_path {{kit}}/models"
CHATS = f"{TRAIN} --dataset_name {{kit}}/chats.jsonl --model_name_or_path {{kit}}/models"
DATA = "{kit}/pairs.jsonl --model_name_or_path {kit}/model"
RUN = "{kit}/run"


def with_file(name: str, content: bytes | str) -> Callable[[Path], None]:
    """A change to a folder: file `name` gets this content."""
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def with_config(**fields) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", **fields)


# Copies of a good model, and of a good run, each with one thing wrong.
MODELS = {
    "more_layers": with_config(num_hidden_layers=4),
    "other_size": with_config(intermediate_size=97),
    "few_positions": with_config(max_position_embeddings=8),
    "no_tokenizer": lambda folder: [path.unlink() for path in folder.glob("*token*")],
    "template_syntax": with_file("chat_template.jinja", "{% for m in messages %}{{ m['content'] }"),
    "kernel": with_config(_attn_implementation="evil/kernel"),
    "encoder": with_config(model_type="t5"),
    "tied": with_config(tie_word_embeddings=True),
    "no_shard": lambda folder: (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors"),
}
RUNS = {"config_list": with_file("resolved_config.yaml", "- a\n")}


@pytest.fixture(scope="module")
def kit(tmp_path_factory, tiny_folder) -> Path:
    """A folder with a space in its name: a model, pairs, a finished run of two steps, damaged copies of all three."""
    kit = tmp_path_factory.mktemp("a kit")
    shutil.copytree(tiny_folder("llama"), kit / "model")
    rows = [{"prompt": f"q {i}", "chosen": "a good answer", "rejected": "none " * (i + 1)} for i in range(8)]
    sides = ("chosen", "rejected")
    chats = [row | {side: [{"role": "assistant", "content": row[side]}] for side in sides} for row in rows]
    write_jsonl(kit / "pairs.jsonl", rows)
    write_jsonl(kit / "chats.jsonl", chats)
    argv = f"{TRAIN} --max_steps 2 --save_steps 1 --preflight skip --guard skip"
    assert train_dpo.main(words(argv, kit, kit / "run")) == 0
    for source, changes in (("model", MODELS), ("run", RUNS)):
        for name, change in changes.items():
            shutil.copytree(kit / source, kit / f"{source}s" / name)
            change(kit / f"{source}s" / name)
    for name, content in {
        "empty.jsonl": b"",
        "models/no_shard/model.safetensors.index.json": b'{"metadata": {}, "weight_map": {"a": "gone.safetensors"}}',
        "deep.jsonl": b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}\n",
        "list.json": b"[1, 2]",
        "half.jsonl": (kit / "pairs.jsonl").read_bytes() + b'{"prompt": "\\ud83d", "chosen": "a", "rejected": "b"}\n',
        "task.yaml": b"task: t\ndataset_path: json\ndataset_kwargs: {data_files: {test: nowhere.jsonl}}\n"
        b"test_split: test\noutput_type: generate_until\ndoc_to_text: a\ndoc_to_target: b\n",
        "good.yaml": f"task: t\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {kit}/pairs.jsonl}}}}\n"
        "test_split: test\noutput_type: generate_until\ndoc_to_text: a\ndoc_to_target: b\n".encode(),
    }.items():
        (kit / name).write_bytes(content)
    return kit


def words(text: str, kit: Path, out: Path) -> list[str]:
    return [word.format(kit=kit, out=out) for word in shlex.split(text)]


def main_of(command: str) -> Callable[[list[str]], int]:
    return importlib.import_module("bench.throughput" if command == "throughput" else command).main


CASES = {
    "plan": [
        (f"{RECIPE} --num_gpus 0", "--num_gpus: '0': must be at least 1 (see"),
        (f"{RECIPE} --gpu b2000", "--gpu B2000: unknown; "),
        (f"{RECIPE} --lengths {{kit}}/list.json", "--lengths", "list.json", "give the JSON of analyze_dataset.py"),
        (f"{RECIPE} --global_batch_size 8 --model_name_or_path {{kit}}/models/encoder", "t5 is not a causal language"),
    ],
    "prefetch": [("--model_name_or_path 'a b' --dataset_name {kit}/pairs.jsonl", "path a b: cannot be downloaded")],
    "status": [("{kit}/nowhere", "nowhere: no such folder"), ("{kit} --jsn", "unrecognized arguments: --jsn (see")],
    "compare_runs": [(f"{RUN}/trainer_state.json {RUN}", "trainer_state.json: not a run's folder")],
    "push_to_hub": [
        (f"{RUN} --hub_model_id 'a name/x y'", "hub_model_id a name/x y: ", "give a name such as my-org/my-model"),
        ("{kit}/runs/config_list", "resolved_config.yaml: missing or damaged", "restore it"),
    ],
    "evaluate": [
        (RUN, "run: nothing to evaluate; give --tasks"),
        (f"{RUN} --tasks arc_esy", "--tasks arc_esy: cannot be loaded", "`lm_eval ls tasks` lists all tasks"),
        (f"{RUN} --tasks {{kit}}/task.yaml", "task.yaml: cannot be loaded", "nowhere.jsonl"),
        (f"{RUN} --tasks {{kit}}/good.yaml --model_args atn=1", "--model_args atn=1: TypeError", "check the options"),
    ],
    "generate": [("{kit}/nothing hi", "nothing: neither a folder with a model nor a model on", "has no nothing")],
    "check_config": [
        (f"four {TRAIN}", "cannot read four: FileNotFoundError"),
        (f"configs/accelerate/cpu.yaml four {TRAIN}", "four: give a launch file, the number of processes"),
    ],
    "analyze_dataset": [
        (f"{DATA} --plot no/lengths.png", "'no/lengths.png' cannot be written"),
        (f"{DATA} --plot {{out}}.xyz", "unknown format; choose one of .png, .svg, .pdf"),
    ],
    "throughput": [("--pairs 3", "--pairs 3: give a multiple of 4 x --accumulation 4")],
    "train_dpo": [
        (f"{TRAIN} --use_peft --lora_target_modules qproj", "lora_target_modules", "name modules of the model"),
        (f"{ON}/tied --use_peft --lora_target_modules embed_tokens", "the LM head is the embedding", "all-linear"),
        (f"{TRAIN} --warmup_steps 9", "warmup_steps 9: the run has only 2 step(s)", "or set warmup_steps: 0.1"),
        (f"{TRAIN} --dataset_name {{kit}}/empty.jsonl", "empty.jsonl: is empty; give a file with rows"),
        # before the data are read
        (f"{ON}/no_shard --dataset_name nowhere.jsonl", "no_shard: cannot be loaded", "gone.safetensors"),
        (f"{TRAIN} --attn_implementation flash_attention_2 --dataset_name nowhere.jsonl", "remove attn_impl"),
        (f"{TRAIN} --global_batch_size 16", "there are only 8 pairs", "use a smaller global_batch_size (2), or"),
        (f"{ON}/few_positions", "max_length 256: a pair has", "the model has 8 positions", "set max_length: 8"),
        (f"{ON}/few_positions --max_length=", "max_length None: a pair has 44", "{max_position_embeddings: 44}"),
        (f"{TRAIN} --model_name_or_path {{kit}}/model/config.json", "config.json: is a file; give the folder"),
        (f"{TRAIN} --dataset_name {{kit}}/half.jsonl", "half.jsonl: line 9: ", "surrogates not allowed"),
        (f"{TRAIN} --dataset_name {{kit}}/deep.jsonl", "deep.jsonl: line 1: maximum recursion depth"),
        (f"{TRAIN} --model_name_or_path /nope", "model_name_or_path /nope: neither a folder with a model nor"),
        (f"{ON}/no_tokenizer", "no_tokenizer: cannot load a tokenizer"),
        (f"{ON}/more_layers --dataset_name no", "model.layers.3.", "is missing (and 8 more)", "take config.json and"),
        (f"{ON}/other_size", "mlp", "has another shape"),
        (f"{CHATS}/template_syntax", "its chat template, line 1"),
        (f"{ON}/kernel", "config.json asks for the kernel evil/kernel, code from the Hub; remove it there"),
        (f"{TRAIN} --model_init_kwargs steps", "model_init_kwargs steps: give a mapping, such as {a: 1}"),
        (f"{TRAIN} --model_init_kwargs '{{{{\"atn\": 1}}}}'", "unexpected keyword argument 'atn'"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(("command", "case"), [(command, case) for command in CASES for case in CASES[command]])
def test_wrong_input_is_one_line_and_exit_code_2(command, case, kit, tmp_path, capsys, environment):
    text, *parts = case
    main = main_of(command)
    capsys.readouterr()
    try:
        code = main(words(text, kit, tmp_path / "run"))
    except SystemExit as end:
        code = end.code
    assert_one_line(code, capsys.readouterr().err, parts)


def test_a_model_without_chat_template_and_pad_token_continues_the_text(kit, tmp_path, capsys):
    shutil.copytree(kit / "model", tmp_path / "plain", ignore=shutil.ignore_patterns("chat_template*"))
    edit(tmp_path / "plain/tokenizer_config.json", pad_token=None)
    assert not main_of("generate")([str(tmp_path / "plain"), "hi", "--max_new_tokens", "2"])
    assert "prompt: hi\ntrained: " in capsys.readouterr().out


SCRIPTS = [path for folder in (".", "scripts", "bench") for path in sorted((ROOT / folder).glob("*.py"))]
COMMANDS = [path for path in SCRIPTS if "__main__" in path.read_text() and path.name != "worker.py"]


@pytest.mark.parametrize("script", COMMANDS, ids=lambda path: path.name)
def test_outside_the_environment(script, tmp_path):
    """-S: without site-packages, as /usr/bin/python is."""
    done = subprocess.run([sys.executable, "-S", script], cwd=tmp_path, capture_output=True, text=True)
    assert "trl: not installed for" in done.stderr and "source .venv/bin/activate" in done.stderr
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr


def test_a_time_limit_below_the_grace_period():
    env = os.environ | {"SLURM_JOB_ID": "1", "SLURM_JOB_START_TIME": "0", "SLURM_JOB_END_TIME": "600"}
    command = ["bash", "scripts/dpo_train.sh"]
    options = {"capture_output": True, "text": True}
    done = subprocess.run(command, cwd=ROOT, env=env, **options)
    assert_one_line(done.returncode, done.stderr, ["--time: shorter than the 600 s before its end"])
    done = subprocess.run(command, cwd=ROOT, env=env | {"SFM_GRACE_SECONDS": "120", "VENV": "/no"}, **options)
    assert "VENV=/no" in done.stderr, "with --signal=B:USR1@120 it is long enough"


@pytest.mark.parametrize(
    ("env", "part"),
    [
        ({"NUM_GPUS": "all"}, "processes per node is 'all': submit with --gpus-per-node=4, or set NUM_GPUS"),
        ({"VENV": "/no/venv"}, "VENV=/no/venv: no accelerate in its bin folder; create it with: make setup"),
    ],
)
def test_variables_of_the_batch_scripts(env, part):
    """What they do before Slurm is needed; tests/slurm has the rest."""
    command = ["bash", "-c", "source scripts/common.sh; use_environment; count_processes"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path} | env
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert_one_line(done.returncode, done.stderr, [part])


@pytest.mark.parametrize("words", [[], ["scripts/prefetch.py"]])
def test_prepare_without_a_script(words):
    done = subprocess.run(["bash", "scripts/prepare.sh", *words], cwd=ROOT, capture_output=True, text=True)
    assert_one_line(done.returncode, done.stderr, [f"'{''.join(words)}': no file in scripts; give prefetch.py or"])


@pytest.mark.parametrize("mine", ["", "/mine"])
def test_each_node_chooses_its_folder_for_kernels(mine, tmp_path):
    command = "source scripts/common.sh; TMPDIR=$ONE use_environment; TMPDIR=$TWO use_environment; env"
    env = {"ONE": f"{tmp_path}/1", "TWO": f"{tmp_path}/2", "TRITON_CACHE_DIR": mine, "TORCHINDUCTOR_CACHE_DIR": ""}
    env |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for folder in ("1", "2"):
        (tmp_path / folder).mkdir()
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=os.environ | env, capture_output=True, text=True)
    two = f"{tmp_path}/2/sfm-dpo-{os.getuid()}"
    assert f"TRITON_CACHE_DIR={mine or f'{two}/triton'}\n" in done.stdout, done.stderr
    assert f"TORCHINDUCTOR_CACHE_DIR={two}/inductor\n" in done.stdout


def assert_one_line(code: int, stderr: str, parts: list[str]) -> None:
    line = error_line(stderr)
    assert code == 2 and stderr.rstrip().endswith(line.rstrip()) and "usage:" not in stderr, stderr
    assert all(part in line for part in parts), line
    assert len(line) < 700
