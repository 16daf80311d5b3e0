"""The spec of the whole way: its parts come from files or stand there, and contradictions are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ppo_core.spec import RewardModelSpec, RlhfSpec, RunSpec, SpecError
from ppo_core.spec.loading import laid_over
from ppo_core.spec.reward_model import PreferencesSpec
from ppo_core.spec.rlhf import POLICY, REWARD_MODEL
from tasks.preferences.context import preferences_job

HELPFUL = Path(__file__).parents[3] / "examples" / "helpful"
EXAMPLE = HELPFUL / "rlhf.yaml"
READS = {"kind": "model", "path": REWARD_MODEL}
MODEL = {"path": "base"}
RUN = {
    "dataset": {"train": "p.jsonl", "evaluation": "e.jsonl"},
    "model": MODEL,
    "sft": {"data": "s.jsonl"},
    "reward": {"sources": [READS]},
}
TRAINING = {"dataset": {"train": "pairs.jsonl", "evaluation": "held.jsonl"}, "model": MODEL}


def spec(**changes: Any) -> RlhfSpec:
    return RlhfSpec.model_validate(laid_over({"name": "mine", "reward_model": TRAINING, "run": RUN}, changes))


def test_the_example_has_the_specs_of_its_files_but_for_the_wire() -> None:
    found = RlhfSpec.from_yaml(EXAMPLE)
    assert found.reward_model is not None
    alone = RewardModelSpec.from_yaml(HELPFUL / "reward_model.yaml")
    assert found.reward_model_from("unused").document() == alone.document()
    assert Path(found.reward_model_from("unused").folder).resolve() == HELPFUL
    (path,) = RunSpec.from_yaml(HELPFUL / "ppo.yaml").reward.folders
    assert found.run_with(path, None).document() == RunSpec.from_yaml(HELPFUL / "ppo.yaml").document()
    assert found.run_with("there", None).reward.folders == ("there",)
    assert found.stages == ("SFT", "reward model", "PPO", "evaluation", "promotion")


def test_set_reaches_nested_fields_of_files_too_and_keys_go_over_those_of_the_file(tmp_path: Path) -> None:
    changed = RlhfSpec.from_yaml(EXAMPLE, ["reward_model.fit.num_steps=7", "run.sft.num_steps=9", "run.iterations=2"])
    assert changed.reward_model is not None
    assert (changed.reward_model.fit.num_steps, changed.reward_model.fit.batch_size) == (7, 32)
    assert changed.run.sft is not None
    assert (changed.run.sft.num_steps, changed.run.sft.batch_size, changed.run.iterations) == (9, 32, 2)
    again = changed.with_overrides(["run.rollout.temperature=0.5", "given.policy=models:/start/3"])
    assert (again.run.rollout.temperature, again.run.iterations) == (0.5, 2)
    assert again.stages[0] == "reward model"
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "ppo.yaml").write_text(yaml.safe_dump({**RUN, "iterations": 3, "name": "theirs"}))
    outer = {"name": "outer", "reward_model": TRAINING, "run": {"file": "below/ppo.yaml", "sft": {"batch_size": 8}}}
    (tmp_path / "rlhf.yaml").write_text(yaml.safe_dump(outer))
    laid = RlhfSpec.from_yaml(tmp_path / "rlhf.yaml", ["run.sft.num_steps=5"])
    assert laid.run.sft is not None
    assert (laid.run.name, laid.run.sft.data, laid.run.sft.batch_size) == ("theirs", "s.jsonl", 8)
    assert laid.run.sft.num_steps == 5
    assert laid.run_with("x", None).folder == str(tmp_path / "below")
    assert laid.reward_model_from("unused").folder == str(tmp_path)


def test_parts_without_a_name_are_called_after_the_whole() -> None:
    found = spec()
    assert found.reward_model is not None
    assert (found.run.name, found.reward_model.name) == ("mine", "mine-reward-model")
    assert spec(run={"name": "own"}).run.name == "own"
    assert "folder" not in {**found.document(), **found.document()["run"], **found.document()["reward_model"]}


def test_a_given_policy_takes_the_place_of_sft_and_of_the_model() -> None:
    found = spec(given={"policy": "start"})
    run = found.run_with("rm", "/there/start")
    assert (run.sft, run.model.path, run.model.config, run.reward.folders) == (None, "/there/start", None, ("rm",))
    assert found.run_before("/there/start").model.path == "/there/start"
    assert spec().run_with("rm", None).sft is not None
    assert found.stages == ("reward model", "PPO", "evaluation", "promotion")


def test_until_the_reward_model_is_there_something_scores_in_its_place() -> None:
    named = spec(run={"reward": {"sources": [{**READS, "name": "learned", "weight": 2.0}, {"kind": "exact_match"}]}})
    stand_in, other = named.run_before(None).reward.rewards
    assert (stand_in.component, stand_in.weight, stand_in.folders) == ("learned", 2.0, ())
    assert other.label == "exact_match"


def test_the_critic_may_begin_as_the_reward_model_once_that_is_there() -> None:
    found = spec(run={"model": {**MODEL, "critic": REWARD_MODEL}})
    assert found.run_with("rm", None).critic == "rm"
    assert found.run_before(None).critic is None
    other = spec(run={"model": {**MODEL, "critic": "own"}}, given={"policy": "start"})
    assert [run.critic for run in (other.run_with("rm", "/start"), other.run_before("/start"))] == ["own", "own"]
    assert spec().run_with("rm", None).critic is None


def test_the_reward_model_can_start_from_the_policy() -> None:
    found = spec(reward_model={"model": {"path": POLICY, "dtype": "bfloat16"}, "training": {"zero_stage": 1}})
    assert found.learns_from_policy
    made = found.reward_model_from("/there/policy").model
    assert (made.path, made.config, made.tokenizer, made.dtype) == ("/there/policy", None, None, "bfloat16")
    new = found.run.model.model_copy(update={"path": None, "config": {"model_type": "llama"}, "tokenizer": "/t"})
    like = found.reward_model_from(new).model
    assert (like.path, like.config, like.tokenizer, like.dtype) == (None, {"model_type": "llama"}, "/t", "bfloat16")
    assert not spec().learns_from_policy
    assert spec().reward_model_from("/there/policy").model.path == "base"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no reward model": ({"reward_model": None}, "there is no reward model: add the section reward_model"),
    "nobody reads it": (
        {"run": {"reward": {"sources": [{"kind": "model", "path": "mine"}]}}},
        "no reward of the run uses the reward model: add {kind: model, path: <reward_model>} to run.reward.sources",
    ),
    "no policy to start from": (
        {"reward_model": {"model": {"path": POLICY}}, "run": {"sft": None}},
        r"reward_model.model.path=<policy> stands for the policy that PPO starts from, but neither run.sft nor",
    ),
    "one name for both": (
        {"run": {"name": "mine-reward-model"}},
        "policy and reward model would both be registered as mine-reward-model: give one of them another registry",
    ),
    "nothing held out": ({"run": {"dataset": {"evaluation": None}}}, "run.dataset has no held-out prompts to evaluate"),
    "an alias": ({"given": {"policy": "models:/a@champion"}}, "'models:/a@champion' is not a version of a registered"),
    "an address": (
        {"given": {"policy": "hf://a/b"}},
        "'hf://a/b' is a name on the Hugging Face Hub: write it",
    ),
    "a file of the hub": ({"given": {"reward_model": "hf://a/b:c"}}, "a model is a whole repository: leave :c out"),
    "nothing left": (
        {"given": {"trained_policy": "models:/a/1"}, "evaluate": False, "promote": False},
        "given.trained_policy=models:/a/1 leaves nothing to do where evaluate and promote are false",
    ),
    "promoted, not registered": (
        {"given": {"trained_policy": "r@3"}},
        "given.trained_policy=r@3 is no registered version, and only those are promoted",
    ),
    "one that may change": ({"given": {"trained_policy": "r"}}, "'r' is no policy that ppoflow has trained: write"),
    "a start that nobody reads": (
        {"given": {"trained_policy": "models:/a/1", "policy": "start"}},
        "policy has no effect beside trained_policy=models:/a/1, which is trained already: leave one of them out",
    ),
    "a key of a part": ({"run": {"rollouts": {}}}, "Extra inputs are not permitted"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_refused(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        spec(**changes)


def test_a_given_reward_model_needs_no_training_and_nothing_held_out_only_where_nothing_is_evaluated() -> None:
    given = spec(given={"reward_model": "models:/rm/2"}, reward_model=None)
    assert (given.trained, given.stages[1]) == (None, "PPO")
    assert spec(given={"reward_model": "rm"}).trained is None
    hub = spec(given={"reward_model": "hf://a/b@main"}, run={"model": {**MODEL, "critic": REWARD_MODEL}})
    assert (hub.trained, hub.run_with("hf://a/b@main", None).model_folders) == (None, ("hf://a/b@main",))
    alone = spec(run={"dataset": {"evaluation": None}}, evaluate=False, promote=False)
    assert alone.stages == ("SFT", "reward model", "PPO")


def test_a_trained_policy_skips_all_that_trains() -> None:
    found = spec(given={"trained_policy": "models:/a/1"}, reward_model=None, run={"dataset": {"evaluation": None}})
    assert (found.trained, found.stages) == (None, ("evaluation", "promotion"))
    assert spec(given={"trained_policy": "r@3"}, promote=False).stages == ("evaluation",)


def test_mistakes_in_a_part_name_the_key_and_in_a_file_the_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"run\.rolout: unknown key; did you mean rollout\?"):
        RlhfSpec.from_yaml(EXAMPLE, ["run.rolout.temperature=1"])
    with pytest.raises(SpecError, match=r"nowhere\.yaml: cannot be read"):
        RlhfSpec.from_yaml(EXAMPLE, ["run.file=nowhere.yaml"])
    with pytest.raises(SpecError, match=r"run.registry.model: 'a/b' has /, which"):
        RlhfSpec.from_yaml(EXAMPLE, ["run.registry.model=a/b"])
    with pytest.raises(SpecError, match=r"reward_model.registry.model: 'a@b' has @, which"):
        RlhfSpec.from_yaml(EXAMPLE, ["reward_model.registry.model=a@b"])
    with pytest.raises(SpecError, match=r"run: registry.alias=champion is promotion.alias too"):
        RlhfSpec.from_yaml(EXAMPLE, ["run.registry.alias=champion"])


def test_the_reward_model_learns_from_prompts_in_the_form_that_ppo_has() -> None:
    with pytest.raises(ValueError, match=r"run.dataset.chat is True, but reward_model.dataset.chat False: the reward"):
        spec(run={"dataset": {"chat": True}})
    chat = {"dataset": {"chat": True, "system_prompt": "Be brief."}}
    with pytest.raises(ValueError, match=r"run.dataset.system_prompt is 'Be brief.', but .*system_prompt None: the"):
        spec(run=chat, reward_model={"dataset": {"chat": True}})
    found = spec(run=chat, reward_model=chat).reward_model
    assert found is not None
    job = preferences_job(found)
    assert (job.chat, job.system_prompt, job.by_policy) == (True, "Be brief.", False)
    assert job.dataset == PreferencesSpec(train="pairs.jsonl", evaluation="held.jsonl")
    spec(run=chat, given={"reward_model": "there"})


def test_the_reward_model_learns_from_several_sources() -> None:
    train = [{"path": "one.jsonl", "weight": 3}, {"path": "hf://us/pairs:two.jsonl", "weight": 1}]
    found = spec(reward_model={"dataset": {"train": train, "duplicates": "drop", "too_long": "drop"}})
    trained = found.reward_model_from("unused")
    assert trained.data == ("one.jsonl", "hf://us/pairs:two.jsonl", "held.jsonl")
    assert RlhfSpec.model_validate(found.document()).document() == found.document()
    job = preferences_job(trained)
    assert job.dataset == PreferencesSpec.model_validate({**TRAINING["dataset"], **trained_on(train)})
    assert job.model_validate(job.model_dump(mode="json")) == job


def trained_on(sources: list[dict[str, Any]]) -> dict[str, Any]:
    """The changed keys of the preferences."""
    return {"train": sources, "duplicates": "drop", "too_long": "drop"}
