"""What was learned from preferences stays in the store because its page names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.artifacts import ArtifactRef
from infra.artifacts.local_store import LocalStore
from infra.backend import open_log
from infra.runs.records import RecordError
from tasks.preferences.kept import DPO_POLICIES, REWARD_MODELS, keep, kept
from tasks.runs.reachability import Reachability


def ref(kind: str, letter: str) -> ArtifactRef:
    return ArtifactRef(kind=kind, uri=f"artifact://{kind}/{letter * 64}", digest=letter * 64)


def test_what_a_page_names_is_needed_and_a_damaged_page_keeps_everything(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    made = [ref("preferences", "a"), ref("reward_evaluation", "b"), ref("reward_model", "c")]
    for _ in range(2):
        keep(store.root, "mine", made)
    assert len(open_log(store.root, REWARD_MODELS).names()) == 1
    wanted = {(one.kind, one.key) for one in made}
    assert kept(store.root) == Reachability(store).of_all() == wanted
    policy = ref("dpo_policy", "e")
    keep(store.root, "mine", [made[0], policy], DPO_POLICIES)
    assert Reachability(store).of_all() == wanted | {(policy.kind, policy.key)}
    open_log(store.root, REWARD_MODELS).create("odd.json", b"{}")
    with pytest.raises(RecordError, match=r"page odd.json of reward-models is damaged .*: remove it"):
        kept(store.root)
    needs = Reachability(store)
    other = ("rollouts", "d" * 64)
    assert needs.among([other])() == {other, (made[0].kind, made[0].key), (policy.kind, policy.key)}
    assert list(needs.unreadable) == ["the pages of reward models"]
