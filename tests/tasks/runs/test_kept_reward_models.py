"""What was learned from preferences stays in the store because its page names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.artifacts import ArtifactRef
from infra.artifacts.local_store import LocalStore
from infra.backend import open_log
from infra.runs.records import RecordError
from ppo_core.records import InputError
from tasks.runs.kept import DPO_POLICIES, REWARD_MODELS, is_kept, keep
from tasks.runs.reachability import Reachability
from tasks.runs.run_state import committed, spec_of_run
from tests.tasks.toy_runs import replace


def ref(kind: str, letter: str) -> ArtifactRef:
    return ArtifactRef(kind=kind, uri=f"artifact://{kind}/{letter * 64}", digest=letter * 64)


def test_what_a_page_names_is_needed_and_a_damaged_page_keeps_everything(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    made = [ref("preferences", "a"), ref("reward_evaluation", "b"), ref("reward_model", "c")]
    for _ in range(2):
        keep(store.root, "mine", made)
    assert len(open_log(store.root, REWARD_MODELS).names()) == 1
    wanted = {(one.kind, one.key) for one in made}
    assert Reachability(store).of_pages(REWARD_MODELS) == Reachability(store).of_all() == wanted
    policy = ref("dpo_policy", "e")
    keep(store.root, "mine", [made[0], policy], DPO_POLICIES)
    assert Reachability(store).of_all() == wanted | {(policy.kind, policy.key)}
    open_log(store.root, REWARD_MODELS).create("odd.json", b"{}")
    with pytest.raises(RecordError, match=r"page odd.json of reward-models carries no checksum: remove it"):
        Reachability(store).of_pages(REWARD_MODELS)
    needs = Reachability(store)
    other = ("rollouts", "d" * 64)
    assert needs.among([other])() == {other, (made[0].kind, made[0].key), (policy.kind, policy.key)}
    assert list(needs.unreadable) == ["the pages of reward models"]


def test_a_run_is_trained_once_a_page_names_what_it_trains_and_not_what_it_downloads(tmp_path: Path) -> None:
    root = LocalStore(tmp_path).root

    def trained(run: str) -> bool:
        return is_kept(root, REWARD_MODELS, run, "reward_model")

    keep(root, "mine", [ref("download", "a")])
    assert not trained("mine")
    keep(root, "mine", [ref("download", "a"), ref("preferences", "b"), ref("reward_model", "c")])
    assert (trained("mine"), trained("other")) == (True, False)
    assert not is_kept(root, DPO_POLICIES, "mine", "reward_model")
    open_log(root, REWARD_MODELS).create(f"damaged-{'d' * 16}-{'e' * 16}.json", b"{}")
    assert not trained("damaged")


@pytest.mark.parametrize(("pages", "command"), [(REWARD_MODELS, "reward-model"), (DPO_POLICIES, "dpo")])
def test_a_run_of_preferences_alone_is_told_with_the_command_that_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: str, command: str
) -> None:
    monkeypatch.setenv("PPOFLOW_STORE", str(tmp_path / "store"))
    keep(LocalStore(tmp_path / "store").root, "mine", [ref("reward_model", "c")], pages)
    for ask in (spec_of_run, committed):
        with pytest.raises(InputError, match=rf"run mine has no iterations: `ppoflow {command} SPEC --run mine`"):
            ask("mine")
        with pytest.raises(InputError, match=r"run other|no run other"):
            ask("other")


@pytest.mark.parametrize("pages", [REWARD_MODELS, DPO_POLICIES])
def test_a_page_with_one_character_of_a_key_changed_is_damaged_and_keeps_everything(tmp_path: Path, pages: str) -> None:
    store, made = LocalStore(tmp_path), ref("reward_model", "c")
    keep(store.root, "mine", [made], pages)
    (page,) = (tmp_path / pages).iterdir()
    replace(page, page.read_bytes().replace(b"cccc", b"cccd", 1))
    command = {REWARD_MODELS: "reward-model", DPO_POLICIES: "dpo"}[pages]
    with pytest.raises(RecordError, match=rf"its own sha256 .*: remove it, .*`ppoflow {command} SPEC --run mine`"):
        Reachability(store).of_pages(pages)
    name = (made.kind, made.key)
    assert Reachability(store).among([name])() == {name}


@pytest.mark.parametrize("place", [f"{REWARD_MODELS}/other-{'c' * 16}-{'0' * 16}.json", f"{DPO_POLICIES}/NAME"])
def test_a_page_speaks_only_where_it_was_written(tmp_path: Path, place: str) -> None:
    store = LocalStore(tmp_path)
    keep(store.root, "mine", [ref("reward_model", "c")])
    (page,) = (tmp_path / REWARD_MODELS).iterdir()
    other = tmp_path / place.replace("NAME", page.name)
    other.parent.mkdir(exist_ok=True)
    page.rename(other)
    with pytest.raises(RecordError, match=f"page {other.name} of {other.parent.name} does not have its own sha256"):
        Reachability(store).of_pages(other.parent.name)
