"""The command line's own part: what it refuses, and how it says so."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import again, app
from flows.cli.friendly_errors import say, with_set
from infra.mlflow.registry import Version
from ppo_core.records import InputError
from tasks.policies.policy import registered_policy
from tests.tasks.run_contexts import ARITHMETIC

DPO = str(ARITHMETIC.parent / "helpful" / "dpo.yaml")
RLHF = str(ARITHMETIC.parent / "helpful" / "rlhf.yaml")
SMOKE = str(ARITHMETIC / "smoke.yaml")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for state."""
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["train", SMOKE, "--set", "rollout.max_tokens=3"], "did you mean max_response_tokens?"),
        (["train", SMOKE, "--set", "update.num_minibatches=5"], "choose one of [1, 2, 4, 8, 16, 32]"),
        (["train", SMOKE, "--set", "rollout.top_p=0.9"], "Set top_p: 1"),
        (["train", SMOKE, "--set", "iterations"], "is not section.key=value"),
        (["train", DPO], f"Error: {DPO} is a spec for another command: ppoflow dpo {DPO}\n"),
        (["reward", RLHF], f"Error: {RLHF} is a spec for another command: ppoflow rlhf {RLHF}\n"),
        (["status", "unknown"], "there is no run unknown"),
        (["status", "../evil"], "run name '../evil'"),
        (["resume", "unknown"], "there is no run unknown"),
        (["fork", "unknown@3", "new"], "there is no run unknown"),
        (["fork", "unknown", "new"], "'unknown': write RUN@ITERATION, for example demo@12"),
        (
            ["rerun", "unknown@3", "--from", "scoring"],
            "--from scoring: choose one of generate, score, advantages, update, evaluate\n",
        ),
        (["rerun", "unknown@0", "--from", "score"], "unknown@0: give an iteration from 1 on\n"),
        (["verify", "unknown"], "there is no run unknown"),
        (["preferences", "unknown", "--output", "pairs.jsonl"], "there is no run unknown"),
        (
            ["promote", "unknown"],
            "'unknown' is no registered version: write models:/NAME@ALIAS or models:/NAME/VERSION",
        ),
        (["sample", "/no/such/folder", "1+1="], "is no Hugging Face folder"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line_and_leaves_nothing(
    arguments: list[str], message: str, home: Path
) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not home.exists()


def test_a_registered_reward_model_is_not_taken_for_a_policy() -> None:
    version = Version("rm", "1", "", {"ppoflow.run": "r", "ppoflow.reward_model": "{}"}, 0)
    with pytest.raises(InputError, match=r"^models:/rm/1 is a reward model, .*: it cannot be sampled, traced, "):
        registered_policy(version, "models:/rm/1", None)
    unknown = r"models:/rm/1 has no lineage \(the tags ppoflow.run, .*: only versions that ppoflow has registered"
    with pytest.raises(InputError, match=unknown):
        registered_policy(replace(version, tags={}), "models:/rm/1", None)


def test_reward_shows_scores_and_components(home: Path) -> None:
    result = CliRunner().invoke(app, ["reward", SMOKE, "--completion", "<answer>0</answer>", "--completion", "no"])
    assert result.exit_code == 0, result.output
    assert "correct" in result.output
    assert "0.1" in result.output  # well formed, and hardly ever right


def test_reward_complains_when_every_row_scores_the_same(home: Path) -> None:
    result = CliRunner().invoke(app, ["reward", SMOKE, "--completion", "nothing"])
    assert result.exit_code == 1
    assert "every row has the same score (0.0)" in result.output


def test_the_command_that_goes_on_can_be_pasted() -> None:
    spec = Path("a b.yaml")
    assert again(spec, "r", ["seed=1"]) == "ppoflow train 'a b.yaml' --run r --set seed=1"


def test_an_answer_is_printed_as_the_policy_gave_it(capsys: pytest.CaptureFixture[str]) -> None:
    say("a[1:x:2], [bold] and 3:100:4")
    assert capsys.readouterr().out == "a[1:x:2], [bold] and 3:100:4\n"


def test_of_one_key_the_last_setting_counts_and_is_printed_once() -> None:
    longer = again(Path("a.yaml"), "r", ["iterations=4", "seed=1", "iterations=6"])
    assert longer == "ppoflow train a.yaml --run r --set iterations=6 --set seed=1"
    assert with_set(longer, "iterations=16") == "ppoflow train a.yaml --run r --set iterations=16 --set seed=1"
    assert with_set("ppoflow resume r", "iterations=16") == "ppoflow resume r --set iterations=16"


def test_the_version_is_told() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"ppoflow {version('ppoflow')}\n"
