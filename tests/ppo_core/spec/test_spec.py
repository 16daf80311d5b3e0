"""The spec: its defaults, what it refuses and in which words, and how it is read from YAML."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from ppo_core.spec import (
    AdaptiveKl,
    FixedKl,
    PpoSpec,
    RlooSpec,
    RunSpec,
    Section,
    SpecError,
    differing_keys,
    flow_spec,
    run_spec,
)
from ppo_core.spec import advantages as spec_advantages
from ppo_core.spec import algorithms as spec_algorithms
from ppo_core.spec import loading as spec_loading
from ppo_core.spec import promotion as spec_promotion
from ppo_core.spec import section as spec_section
from ppo_core.spec import sections as spec_sections
from tests.ppo_core.spec.refused_learning import FIXED_LOSS, PAIRS, REFUSED_LEARNING, RLOO
from tests.ppo_core.spec.refused_specs import NO_KEYS, REFUSED, SMALLEST

ROOT = Path(__file__).parents[3]


def write(folder: Path, document: Any) -> Path:
    path = folder / "spec.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return path


def loaded(folder: Path, changes: dict[str, Any] | None = None, overrides: tuple[str, ...] = ()) -> RunSpec:
    return RunSpec.from_yaml(write(folder, {**SMALLEST, **(changes or {})}), overrides)


def test_the_examples_hold() -> None:
    modules = (flow_spec, run_spec, spec_section, spec_sections, spec_loading, spec_advantages)
    assert [doctest.testmod(module).failed for module in modules] == [0] * len(modules)


def test_three_sections_are_enough_and_the_defaults_are_the_recipe(tmp_path: Path) -> None:
    run = loaded(tmp_path)
    assert (run.rollout.num_responses, run.rollout.max_response_tokens, run.rollout.temperature) == (256, 48, 1.0)
    assert (run.update.num_ppo_epochs, run.update.num_minibatches, run.update.learning_rate) == (2, 4, 1e-4)
    assert (run.update.critic_learning_rate, run.update.betas, run.update.eps) == (1e-3, (0.9, 0.95), 1e-5)
    assert (run.update.clip_low, run.update.clip_high, run.update.value_clip) == (0.2, 0.2, None)
    assert (run.advantages.gamma, run.advantages.gae_lambda, run.advantages.whiten) == (1.0, 0.95, None)
    assert run.advantages.kl == FixedKl(coef=0.01, estimator="k1")
    assert (run.folder, run.model_name, run.sft) == (str(tmp_path), "ppo", None)
    assert [(reward.label, reward.weight) for reward in run.reward.rewards] == [("reward.py:correct", 1.0)]


@pytest.mark.parametrize(
    ("changes", "message"), REFUSED + REFUSED_LEARNING, ids=[str(one)[:50] for one, _ in REFUSED + REFUSED_LEARNING]
)
def test_what_cannot_run_is_refused_with_value_limit_and_remedy(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message) as refusal:
        loaded(tmp_path, changes)
    assert all(line.startswith(f"{tmp_path}/spec.yaml: ") for line in str(refusal.value).splitlines())


def test_every_problem_has_its_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refusal:
        loaded(tmp_path, {"iterations": 0, "dataset": {}, "rollout": {"samples": 2}})
    assert len(str(refusal.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2", "spec.yaml line 1, column 4: not valid YAML here; look at commas, .* not closed: 'a: .1'$"),
        ("a: 1\nb: c: d", "line 2, column 5: .* here; look at the indentation, and at colons .*: 'b: c: d'$"),
        ("a: [\n", "spec.yaml line 2, column 1: not valid YAML here; .*: the file ends$"),
        ("a: \0", "spec.yaml: not valid YAML: unacceptable character #x0000: .* position 3$"),
        ("name: x\nrollout:\n\ttemperature: 1", "line 3 is indented with a tab: YAML takes only spaces"),
        ("- 1\n- 2", r"holds \[1, 2\]: a spec consists of sections"),
        ("", "is empty: a spec consists of sections"),
        ("1: 2", "Keys should be strings"),
        ("seed: 1\nname: x\nseed: 2", "not valid YAML: line 3: the key seed was set on line 1 already: remove one"),
        ("rollout:\n  stop: [a]\n  top_k: 0\n  stop: [b]", "line 4: the key stop was set on line 2 already"),
        ("rollout: {top_k: 0, top_k: 1}", "line 1: the key top_k was set on line 1 already"),
    ],
)
def test_a_file_that_is_no_spec_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        RunSpec.from_yaml(write(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none.yaml: cannot be read \(No such file or directory\)"):
        RunSpec.from_yaml(tmp_path / "none.yaml")


def test_overrides_come_before_all_checks(tmp_path: Path) -> None:
    overrides = ("rollout.top_k=-1", "update.learning_rate=1e-6", "sft.data=a.jsonl", "name=other", "seed = 7")
    run = loaded(tmp_path, {"rollout": {"top_k": 50}}, overrides)
    assert (run.rollout.top_k, run.update.learning_rate, run.name, run.seed) == (-1, 1e-6, "other", 7)
    assert run.sft is not None
    assert run.sft.data == "a.jsonl"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "is not section.key=value"),
        ("=1", "is not section.key=value"),
        ("rollout.=1", "is not section.key=value"),
        ("seed.x=1", "seed is a value, not a section: write seed=VALUE"),
        ("seed=[1", "the value is not valid YAML"),
        ("rollout.temprature=1", "did you mean temperature"),
    ],
)
def test_a_bad_override_is_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        loaded(tmp_path, {"seed": 1}, (override,))


def test_a_horizon_that_is_just_long_enough_is_taken(tmp_path: Path) -> None:
    kl = {"kind": "adaptive", "target": 6, "horizon": 52}
    assert loaded(tmp_path, {"advantages": {"kl": kl}}).advantages.kl == AdaptiveKl(target=6.0, horizon=52)


def test_a_kl_coefficient_without_a_kind_is_a_fixed_one(tmp_path: Path) -> None:
    assert loaded(tmp_path, {"advantages": {"kl": {"coef": 0.5}}}).advantages.kl == FixedKl(coef=0.5)


@pytest.mark.parametrize(
    "changes",
    [
        {**PAIRS, "advantages": {"whiten": True, "whiten_centred": False}},
        {**PAIRS, "advantages": {"whiten": "minibatch", "whiten_centred": False}},
        {"algorithm": {"kind": "reinforce", "baseline": "none"}, "advantages": {"whiten": False}},
        {"algorithm": {"kind": "reinforce", "baseline": "none"}, "advantages": {"whiten_centred": False}},
        {"update": FIXED_LOSS, "advantages": {"kl": {"coef": 0}}},
        {"update": FIXED_LOSS, "advantages": {"kl": {"coef": 0.01}}},
        {"update": FIXED_LOSS, "advantages": {"kl": {"kind": "adaptive", "target": 6, "coef": 0.05}}},
        {"update": FIXED_LOSS, "advantages": {"kl": {"coef": 0}, "reference": {"kind": "every", "iterations": 2}}},
        {"advantages": {"reference": {"kind": "ema"}}},
        {"update": {"schedule": "constant", "decay_iterations": 9, "entropy_coef": 1, "entropy_schedule": "linear"}},
        {"update": {"schedule": "constant", "decay_iterations": 9}, "advantages": {"kl": {"schedule": "linear"}}},
        {"reward": {"function": "a.py:f", "options": NO_KEYS}},
    ],
)
def test_settings_that_have_an_effect_are_taken_and_survive_the_document(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    run = loaded(tmp_path, changes)
    assert RunSpec.model_validate(run.document()).document() == run.document()


def test_a_record_has_the_end_of_its_schedule_also_where_nothing_falls(tmp_path: Path) -> None:
    document = loaded(tmp_path, {"update": {"schedule": "constant"}}).document()
    document["update"]["decay_iterations"] = 30
    assert RunSpec.model_validate(document).update.decay_iterations == 30


def test_a_record_may_have_a_name_and_an_alias_that_are_refused_now(tmp_path: Path) -> None:
    document = loaded(tmp_path).document()
    document["registry"] |= {"alias": "champion", "model": "a/b"}
    recorded = RunSpec.model_validate(document)
    assert (recorded.registry.alias, recorded.model_name) == ("champion", "a/b")
    assert loaded(tmp_path, {"registry": {"alias": None}}).registry.alias is None


@pytest.mark.parametrize(
    ("prompts", "near"),
    [
        (99_999_999_999, [1, 3, 9, 21_649, 64_947, 1_539_717, 4_619_151, 11_111_111_111]),
        (2**61 - 1, [1, 2**61 - 1]),
        (3 * 10**30 + 1, [1, 3 * 10**30 + 1]),
    ],
)
def test_a_huge_number_is_answered_at_once_with_few_divisors(tmp_path: Path, prompts: int, near: list[int]) -> None:
    with pytest.raises(SpecError) as refusal:
        loaded(tmp_path, {"rollout": {"prompts_per_iteration": prompts}})
    assert str(refusal.value).endswith(f"samples_per_prompt): choose one of {near}")


@pytest.mark.parametrize("size", [48, 1000])
def test_a_microbatch_need_not_divide(tmp_path: Path, size: int) -> None:
    assert loaded(tmp_path, {"training": {"microbatch_size": size}}).training.microbatch_size == size


@pytest.mark.parametrize(
    ("changes", "notes"),
    [
        ({}, []),
        ({"iterations": 5, "update": {"warmup_iterations": 5}}, []),
        (
            {"iterations": 4, "update": {"warmup_iterations": 5}},
            ["update.warmup_iterations=5 is cut to the 4 iterations of the run"],
        ),
        (
            {"update": {"decay_iterations": 3, "warmup_iterations": 5}},
            ["update.warmup_iterations=5 is cut to the 3 iterations of the schedule (update.decay_iterations)"],
        ),
        ({"sft": {"data": "a", "num_steps": 20}}, ["sft.warmup_steps=30 is cut to sft.num_steps=20"]),
        ({"sft": {"data": "a", "num_steps": 30}}, []),
        (
            {"iterations": 20, "update": {"critic_warmup_iterations": 18, "warmup_iterations": 5}},
            ["update.warmup_iterations=5 is cut to the 2 iterations of the run after those of the critic alone"],
        ),
    ],
)
def test_a_warm_up_that_does_not_fit_is_taken_and_noted(
    tmp_path: Path, changes: dict[str, Any], notes: list[str]
) -> None:
    assert loaded(tmp_path, changes).notes() == notes


def by_position(schema: dict[str, Any]) -> list[str]:
    fields = schema["properties"]
    return sorted(sorted(fields), key=lambda name: fields[name]["position"])


def test_a_spec_is_frozen(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        loaded(tmp_path).seed = 1  # type: ignore[misc]


def test_the_document_is_the_run_wherever_it_lies(tmp_path: Path) -> None:
    run = loaded(tmp_path, {"update": {"betas": [0.8, 0.9]}})
    document = run.document()
    assert "folder" not in document
    assert document["update"]["betas"] == [0.8, 0.9]
    assert RunSpec.model_validate(document).document() == document


def test_an_algorithm_is_chosen_by_its_kind_and_survives_the_document(tmp_path: Path) -> None:
    """The document has every key, also those that the algorithm would refuse: at their defaults they say nothing."""
    assert loaded(tmp_path).algorithm == PpoSpec()
    run = loaded(tmp_path, RLOO, ("rollout.samples_per_prompt=4",))
    assert run.algorithm == RlooSpec()
    assert RunSpec.model_validate(run.document()).document() == run.document()
    assert run.with_overrides(["algorithm.kind=ppo", "update.value_clip=0.2"]).algorithm == PpoSpec()


def test_differing_keys_are_named_with_both_values(tmp_path: Path) -> None:
    before = loaded(tmp_path).document()
    changes = {"seed": 4, "advantages": {"kl": {"kind": "fixed", "coef": 0.5}}, "sft": {"data": "a"}}
    lines = differing_keys(before, loaded(tmp_path, changes).document())
    assert lines[0] == "advantages.kl.coef: 0.01 -> 0.5"
    assert lines[1] == "seed: 0 -> 4"
    assert lines[2].startswith("sft: None -> {")
    assert (len(lines), differing_keys(before, before)) == (3, [])


def all_sections() -> list[type[Section]]:
    named = {**vars(spec_sections), **vars(spec_advantages), **vars(spec_algorithms), **vars(spec_promotion)}
    found = {value for value in named.values() if isinstance(value, type) and issubclass(value, Section)}
    return sorted(found - {Section} | {RunSpec}, key=lambda section: section.__name__)


@pytest.mark.parametrize("section", all_sections())
def test_every_field_has_a_type_and_a_sentence_for_the_form(section: type[Section]) -> None:
    schema = section.model_json_schema()
    for name, field in schema["properties"].items():
        assert field.get("description"), f"{section.__name__}.{name}"
        assert {"type", "anyOf", "oneOf", "$ref", "const"} & field.keys(), f"{section.__name__}.{name}"
    assert by_position(schema) == list(section.model_fields)


@pytest.mark.parametrize("module", ["ppo_core.spec", "ppo_core.records"])
def test_it_is_imported_without_torch(module: str) -> None:
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=300, check=False).returncode == 0


def test_a_record_that_is_older_than_a_rule_is_read() -> None:
    waits = {"sources": [{"function": "a.py:f", "timeout_s": 300}]}
    assert RunSpec.model_validate({**SMALLEST, "reward": waits}).engines.reward_timeout_s == 300
