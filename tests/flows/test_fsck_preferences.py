"""`ppoflow fsck` on what is learned from preferences: pages, what they name, and the copies of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.fsck import repair
from infra.artifacts import ArtifactRef, open_store
from infra.backend import acquire_lease
from infra.settings import Settings
from ppo_core.records import InputError
from tasks.runs.findings import Findings
from tasks.runs.fsck import check_run, check_store
from tasks.runs.kept import DPO_POLICIES, REWARD_MODELS, keep
from tasks.runs.retention import find_garbage
from tasks.stages.holding import DPO, REWARD_MODEL, lease_name
from tests.tasks.toy_reward_models import toy_engines
from tests.tasks.toy_runs import DAMAGES, flip_a_bit, lose_it, replace, snapshot

pytestmark = pytest.mark.usefixtures("prefect_server")
HELPFUL = Path(__file__).parents[2] / "examples" / "helpful"
COMMAND = "`ppoflow reward-model SPEC --run learned`"
AGAIN = f"{COMMAND} (or `ppoflow rlhf`) makes it again"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a reward model of toy engines was trained."""
    place = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PPOFLOW_HOME", str(place / "home"))
        patch.setenv("PPOFLOW_TRACKING_URI", f"sqlite:///{place}/mlflow.db")
        patch.delenv("PPOFLOW_STORE", raising=False)
        toy_engines(patch)
        train()
        yield place / "home"


@pytest.fixture
def home(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its copy, where ppoflow keeps its state."""
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    shutil.copytree(trained, tmp_path / "home")
    return tmp_path / "home"


def train() -> None:
    """Train it by its command."""
    done = CliRunner().invoke(app, ["reward-model", str(HELPFUL / "reward_model.yaml"), "--run", "learned"])
    assert done.exit_code == 0, done.output


def fsck(*arguments: str) -> tuple[int, str]:
    """Exit status, and what is said."""
    done = CliRunner().invoke(app, ["fsck", *arguments])
    return done.exit_code, " ".join(done.output.split())


def check() -> list[tuple[str | None, str, str | None]]:
    """All damages of the store: whose, what, and how it is repaired."""
    everything = check_store(lambda text: None)
    return [(found.run, damage.what, damage.repair) for found in everything for damage in found.damages]


def the(home: Path, kind: str) -> Path:
    """The only artifact of a kind."""
    (found,) = (home / "store" / kind).iterdir()
    return found


def pages(home: Path, folder: str = REWARD_MODELS) -> list[Path]:
    """Those of a store."""
    return sorted((home / "store" / folder).iterdir())


def test_a_reward_model_is_read_under_its_name_and_its_leases_are_no_runs(home: Path) -> None:
    assert (home / "store" / "runs" / lease_name(REWARD_MODEL, "learned")).is_dir()
    for name in ("_evaluation-1", lease_name(DPO, "other")):
        acquire_lease(open_store(Settings().store_root).root, name).release()
    before = snapshot(home)
    status, said = fsck()
    assert status == 0
    assert said.startswith(f"run learned: {len(pages(home))} records, 3 artifacts, ")
    assert "not in any run: 0 artifacts" in said
    assert "run _" not in said
    assert fsck("learned")[0] == 0
    assert snapshot(home) == before
    for private in ("_evaluation-1", lease_name(REWARD_MODEL, "learned")):
        with pytest.raises(InputError, match=rf"there is no run {private} .*runs there: learned\)"):
            check_run(private, lambda text: None)


@pytest.mark.parametrize(
    ("kind", "damage"),
    [*(("reward_model", how) for how in DAMAGES), ("preferences", flip_a_bit), ("reward_evaluation", flip_a_bit)],
)
def test_what_is_damaged_is_set_aside_and_its_command_makes_it_again(
    home: Path, kind: str, damage: Callable[[Path], None]
) -> None:
    place = the(home, kind)
    before = {name: content for name, content in snapshot(place).items() if name != "manifest.json"}
    damage(place)
    assert check() == [("learned", f"{kind} of run learned", "set aside")]
    status, said = fsck("learned", "--repair")
    assert status == 1  # it is missing until the command is given
    assert AGAIN in said
    assert (f"{kind}/{place.name} was set aside at " in said) is (damage is not lose_it)
    train()
    assert fsck()[0] == 0
    assert {name: content for name, content in snapshot(place).items() if name != "manifest.json"} == before


def test_what_is_whole_again_when_it_is_repaired_stays(home: Path) -> None:
    place = the(home, "reward_model")
    flip_a_bit(place)
    found = check_run("learned", lambda text: None)
    repair(found)
    train()
    assert repair(found) == []
    assert place.is_dir()


@pytest.mark.parametrize("content", [b"{", b"", b"{}"])
def test_a_page_that_cannot_be_read_is_reported_with_what_helps(home: Path, content: bytes) -> None:
    page = pages(home)[0]
    replace(page, content)
    assert check() == [("learned", f"page {page.name} of reward-models", None)]
    status, said = fsck("learned")
    assert status == 1
    assert f"remove it, and give {COMMAND}" in said
    assert (find_garbage().artifacts, list(find_garbage().unreadable)) == ([], ["the pages of reward models"])
    page.unlink()
    train()
    assert fsck()[0] == 0


def test_a_page_with_another_key_keeps_the_reward_model(home: Path) -> None:
    key = the(home, "reward_model").name
    changed = ("1" if key[0] == "0" else "0") + key[1:]
    for page in pages(home):
        replace(page, page.read_bytes().replace(key.encode(), changed.encode()))
    assert {what for _, what, _ in check()} == {f"page {page.name} of reward-models" for page in pages(home)}
    assert find_garbage().artifacts == []


@pytest.mark.parametrize("folder", ["reward-model-commits", "dpo-commits", "rlhf-commits", "rlhf-reward-model-commits"])
def test_a_damaged_page_of_commits_is_reported(home: Path, folder: str) -> None:
    (home / "store" / folder).mkdir()
    (home / "store" / folder / f"mine-{'0' * 16}.json").write_text("{")
    assert check() == [("mine", f"page mine-{'0' * 16}.json of {folder}", None)]
    assert "remove it, and write commits into the spec" in fsck("mine")[1]


def test_of_a_dpo_policy_that_is_lost_its_own_command_is_named(home: Path) -> None:
    lost = ArtifactRef(kind="dpo_policy", uri=f"artifact://dpo_policy/{'a' * 64}", digest="a" * 64)
    keep(open_store(Settings().store_root).root, "other", [lost], DPO_POLICIES)
    found: Findings = check_run("other", lambda text: None)
    (told,) = found.damages
    assert (told.what, told.repair) == ("dpo_policy of run other", "set aside")
    assert told.remedy == "`ppoflow dpo SPEC --run other` makes it again"
    assert repair(found) == []


def test_the_copy_of_a_reward_model_is_read_too(home: Path) -> None:
    flip_a_bit(home / "runs" / "learned" / "reward-model")
    assert check() == [("learned", "copy of the reward model", None)]
    assert AGAIN in fsck("learned")[1]
    train()
    assert fsck()[0] == 0


def test_what_came_out_differently_when_it_was_made_again_is_no_damage(home: Path) -> None:
    root, place = open_store(Settings().store_root).root, the(home, "reward_model")
    before = ArtifactRef(kind="reward_model", uri=f"artifact://reward_model/{place.name}", digest="0" * 64)
    keep(root, "learned", [before])
    assert check() == []
    keep(root, "other", [before])
    assert check() == [("other", "reward_model of run other", "set aside")]
