"""What a check refuses before anything starts: folders, settings, models, rows, and the run of that name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from infra.backend import acquire_lease
from infra.engines.protocol import EngineTimeout
from infra.prefect_server import PrefectServerError
from infra.runs.owner import LeaseHeld
from infra.settings import Settings
from ppo_core.records import InputError
from ppo_core.spec import RunSpec
from tasks.checks.model_folder import require_model
from tasks.checks.run import check_run
from tasks.prefect.listening import require_prefect
from tasks.runs.errors import InvalidRunName
from tasks.runs.state_folder import require_readable_state, require_writable_state, unknown_variables
from tasks.stages.jobs import StageJob
from tests.flows.test_refusals import SMALL_HEADS
from tests.tasks.run_contexts import smoke_spec
from tests.tasks.toy_runs import ToyRun

ROOT = Path(__file__).parents[3]
NOBODY = 65534


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("below", ["", "deep/inside"])
def test_a_file_in_the_way_of_the_state_folder_is_named(home: Path, below: str) -> None:
    home.write_text("mine")
    wanted = home / below
    file = "it" if wanted == home else str(home)
    message = f"^the state folder {wanted} cannot be used: {file} is a file. Move it, or set PPOFLOW_HOME to another"
    for require in (require_readable_state, require_writable_state):
        with pytest.raises(InputError, match=message):
            require(Settings(home=wanted))


def test_a_file_in_the_way_of_the_store_or_of_what_lies_below_is_named(home: Path, tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("mine")
    with pytest.raises(
        InputError, match=f"^the store {file} cannot be used: it is a file. Move it, or set PPOFLOW_STORE"
    ):
        require_writable_state(Settings(store=str(file)))
    home.mkdir()
    (home / "prefect").write_text("mine")
    with pytest.raises(InputError, match=f"state folder {home}/prefect cannot be used: it is a file"):
        require_writable_state(Settings())


def test_folders_that_are_not_there_yet_are_no_mistake(home: Path) -> None:
    require_writable_state(Settings(store="s3://bucket/runs"))
    require_writable_state(Settings())
    assert not home.exists()


def test_a_folder_without_the_right_to_write_is_refused() -> None:
    """By a process of a user who has none: root may write everywhere."""
    program = f"""
import os, sys
from infra.engines.protocol import EngineTimeout
from infra.settings import Settings
from ppo_core.records import InputError
from tasks.runs.state_folder import require_readable_state, require_writable_state

if os.geteuid() == 0:
    os.setuid({NOBODY})
require_readable_state(Settings(home=sys.argv[1]))
for home in sys.argv[1:]:
    try:
        require_writable_state(Settings(home=home))
    except InputError as error:
        print(error)
"""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        command = [sys.executable, "-c", program, folder, f"{folder}/new"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith(f"the state folder {folder} cannot be used: user ")
    assert first.endswith("may not write to it. Change its permissions, or set PPOFLOW_HOME to another folder")
    assert f"{folder}/new cannot be used: user" in second
    assert f"may not write to {folder}. Change" in second


def test_a_setting_of_the_environment_that_is_refused_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPOFLOW_CACHE_GIB", "-1")
    monkeypatch.setenv("PPOFLOW_PREFECT_API_URL", "here")
    with pytest.raises(InputError) as refusal:
        require_readable_state()
    lines = str(refusal.value).splitlines()
    assert lines[0] == "PPOFLOW_CACHE_GIB='-1' in the environment: must be greater than 0"
    server = "PPOFLOW_PREFECT_API_URL or PREFECT_API_URL='here' in the environment: not the address of a server: "
    assert lines[1] == f"{server}write http://HOST:PORT/api"
    assert len(lines) == 2


def test_a_variable_that_means_nothing_is_named_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PPOFLOW_STORE", "PPOFLOW_STACK_HOST", "PPOFLOW_ENGINE_THREADS", "PPOFLOW_GUARDED"):
        monkeypatch.setenv(name, "1")
    known = unknown_variables()
    monkeypatch.setenv("PPOFLOW_STROE", "s3://mine/runs")
    monkeypatch.setenv("PPOFLOW_ZZZ", "1")
    assert [line for line in unknown_variables() if line not in known] == [
        "PPOFLOW_STROE is not a setting of ppoflow: did you mean PPOFLOW_STORE?",
        "PPOFLOW_ZZZ is not a setting of ppoflow",
    ]


@pytest.mark.parametrize(
    ("names", "remedy"),
    [
        (["PPOFLOW_PREFECT_API_URL"], "start it, or unset PPOFLOW_PREFECT_API_URL to have one"),
        (["PREFECT_API_URL"], "start it, or unset PREFECT_API_URL to have one"),
        (["PPOFLOW_PREFECT_API_URL", "PREFECT_API_URL"], "unset PPOFLOW_PREFECT_API_URL and PREFECT_API_URL to"),
        ([], "or prefect config unset PREFECT_API_URL, in Prefect's profile, to have one"),
    ],
)
def test_a_server_that_does_not_answer_is_unset_where_it_was_set(
    monkeypatch: pytest.MonkeyPatch, names: list[str], remedy: str
) -> None:
    for name in ("PPOFLOW_PREFECT_API_URL", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in names:
        monkeypatch.setenv(name, "http://127.0.0.1:9/api")
    with pytest.raises(PrefectServerError, match=remedy):
        require_prefect("http://127.0.0.1:9/api")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "has no config.json: give the folder of a Hugging Face causal LM"),
        ("", "config.json is not a JSON object"),
        ("[]", "config.json is not a JSON object"),
    ],
)
def test_a_folder_that_is_no_models_is_refused(tmp_path: Path, config: str | None, message: str) -> None:
    with pytest.raises(InputError, match="there is no folder"):
        require_model(tmp_path / "nowhere")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(InputError, match=message):
        require_model(tmp_path)


@pytest.mark.usefixtures("prefect_server", "shared_engine")
def test_a_run_that_exists_with_another_spec_is_refused_with_the_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = ToyRun(tmp_path, ("iterations=1",), "toy")
    toy.train()
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path))
    monkeypatch.setenv("PPOFLOW_STORE", str(tmp_path / "store"))
    spec = toy.context().spec
    before = sorted(tmp_path.rglob("*"))
    changed = spec.with_overrides(["rollout.temperature=0.5"])
    with pytest.raises(InputError, match=r"run toy exists with another spec [\s\S]*rollout.temperature: 1.0 -> 0.5"):
        check_run(changed, "toy")
    found = check_run(spec, "toy", again=True)
    assert found.good["run"] == "toy, finished: it has 1 iterations, and iterations=1; raise that to continue training"
    assert check_run(spec, "toy").good == {}  # its rows were checked when it began
    with pytest.raises(InvalidRunName):
        check_run(spec, "../toy")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("prefect_server", "shared_engine")
def test_rows_that_were_changed_since_a_run_began_are_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path))
    monkeypatch.setenv("PPOFLOW_STORE", str(tmp_path / "store"))
    base = smoke_spec("iterations=1", f"dataset.train={tmp_path / 'rows.jsonl'}", "sft=null")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 32)
    ToyRun(tmp_path, (), "toy").train(spec=base)
    with (tmp_path / "rows.jsonl").open("a") as rows:
        rows.write(json.dumps({"prompt": "1" + "+1" * 20 + "=", "answer": "21"}) + "\n")
    with pytest.raises(InputError, match=r"42 tokens, but dataset.max_prompt_tokens="):
        check_run(base.with_overrides(["iterations=60"]), "toy")


@pytest.mark.usefixtures("shared_engine")
def test_a_run_that_another_process_has_is_refused_at_once_and_noted_by_a_check(home: Path) -> None:
    spec = smoke_spec()
    lease = acquire_lease(home / "store", "mine")
    with pytest.raises(
        LeaseHeld, match=r"^run mine: process \d+ on .* has it, .*; or use --wait, and this command waits"
    ):
        check_run(spec, "mine")
    notes = check_run(spec, "mine", again=True).notes
    (told,) = [note for note in notes if note.startswith("run mine: process ")]
    assert "--wait" not in told
    with pytest.raises(InputError, match=r"there is no file .*nowhere\.py"):  # and no longer that it is held
        check_run(spec.with_overrides(["reward.function=nowhere.py:right"]), "mine", wait=True)
    lease.release()


REWARDS = """
from json import dumps as written

def right(prompts, completions, answer): return [1.0] * len(prompts)
def raises(prompts, completions, answer):
    return [written({1, 2}) for _ in prompts]
def nobody(prompts, completions, answer): return [None] * len(prompts)
def slow(prompts, completions, answer):
    import time
    time.sleep(600)
"""


def own_spec(folder: Path) -> RunSpec:
    """The smoke run's, with rows and rewards of its own."""
    (folder / "rewards.py").write_text(REWARDS)
    row = '{"prompt": "1+1=", "answer": "2"}\n'
    (folder / "rows.jsonl").write_text(row * 2)
    (folder / "table.jsonl").write_text("prompt,answer\n1+1=,2\n")
    (folder / "array.jsonl").write_text(f"[\n{row}]\n")
    (folder / "columns.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    base = smoke_spec()
    data = ["dataset.train=rows.jsonl", "dataset.evaluation=rows.jsonl", "evaluation.num_prompts=2", "sft=null"]
    tokenizer = f"model.tokenizer={Path(base.folder) / 'tokenizer'}"
    spec = base.with_overrides([*data, tokenizer, "reward.function=rewards.py:right"])
    return RunSpec.model_validate({**spec.model_dump(mode="json"), "folder": str(folder)})


@pytest.mark.usefixtures("shared_engine")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward.function=rewards.py:raises", r"rewards.py:raises raised TypeError: .* \(rewards.py:6\)$"),
        ("reward.function=rewards.py:wrong", r"no function 'wrong' \(it has: nobody, raises, right, slow\)$"),
        ("dataset.train=table.jsonl", r"table.jsonl is CSV, but its name says JSONL: rename it to table.csv"),
        ("dataset.evaluation=array.jsonl", r"array.jsonl is one JSON array, .*: rename it to array.json"),
        (
            "dataset.train=columns.jsonl",
            r"row 1 has prompt=None: .*; the row has the columns answer, question: name the right one in prompt_column",
        ),
        ("evaluation.num_prompts=3", r"evaluation.num_prompts=3 is more than the 2 rows of rows.jsonl: lower it"),
        ("dataset.max_prompt_tokens=2", r"row 1 has a prompt of 4 tokens, but dataset.max_prompt_tokens=2"),
        ("rollout.max_response_tokens=126", r"max_response_tokens=126 does not fit the model's context 128"),
        ("engines.kv_cache_gib=0.0001", r"kv_cache_gib=0.0001 is too small for one sequence of 52 tokens"),
        ("engines.kv_cache_gib=1000000", r"kv_cache_gib=1e\+06 is more than this machine's memory of"),
        ("model.config.num_key_value_heads=3", r"num_key_value_heads=3 does not divide its num_attention_heads=4"),
        ("engines.tensor_parallel_size=3", r"tensor_parallel_size=3 does not divide the model's 4 attention heads"),
        ("model.config.model_type=llamma", r"'llamma' is unknown to the installed transformers; did you mean llama"),
        (SMALL_HEADS, r"\(head_dim\) of 16, and vLLM on CPU takes only"),
    ],
)
def test_what_cannot_run_is_refused_once_and_leaves_nothing(
    override: str, message: str, home: Path, tmp_path: Path
) -> None:
    own = own_spec(tmp_path)
    with pytest.raises(InputError, match=message):
        check_run(own.with_overrides([override]))
    assert not home.exists()


@pytest.mark.usefixtures("shared_engine")
def test_scores_that_teach_nothing_are_a_note_and_no_refusal(home: Path, tmp_path: Path) -> None:
    (same,) = check_run(own_spec(tmp_path)).notes
    assert same.startswith("every row has the same score (1.0): PPO learns nothing from that; try  ppoflow reward")
    (nobody,) = check_run(own_spec(tmp_path).with_overrides(["reward.function=rewards.py:nobody"])).notes
    assert nobody == "no row has a score (not scored by nobody): training would end at its first iteration"


def test_a_reward_that_takes_too_long_is_refused_with_the_key(home: Path, tmp_path: Path) -> None:
    spec = own_spec(tmp_path).with_overrides(["reward.function=rewards.py:slow", "engines.reward_timeout_s=8"])
    with pytest.raises(
        InputError, match=r"rewards.py:slow .* engines.reward_timeout_s=8 seconds: make them faster, or"
    ):
        check_run(spec)
    assert not home.exists()


@pytest.mark.parametrize(("engine", "key"), [("scoring", "reward_timeout_s=300"), ("training", "timeout_s=1800")])
def test_an_engine_that_is_silent_for_too_long_names_the_key(tmp_path: Path, engine: str, key: str) -> None:
    toy = ToyRun(tmp_path, ("iterations=1",), "toy")
    context = toy.context()

    def silent() -> None:
        raise EngineTimeout("no message")

    toy.engines.before("score_rollouts", 1, silent)
    with pytest.raises(EngineTimeout, match=rf"^no message \(the spec's engines.{key}\)$") as error:
        context.run_job(engine, StageJob("score_rollouts", {}, "scores", "0" * 64))
    assert error.value.retryable
