"""Which settings of an evaluation belong to the policy that is evaluated, and which to the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.artifacts.local_store import LocalStore
from ppo_core.spec import RunSpec
from tasks.policies.held_out import adapt_spec
from tasks.policies.policy import Policy
from tasks.runs.iteration_record import IterationRecord
from tasks.stages.references import CheckpointRef
from tests.tasks.run_contexts import run_context, smoke_spec
from tests.tasks.toy_engines import ToyEngines

SAME = {"tokenizer.json": "{}", "tokenizer_config.json": "{}"}


def policy(store: LocalStore, name: str, spec: RunSpec, files: dict[str, str]) -> Policy:
    """One whose checkpoint has these files of its tokenizer."""
    folder = store.scratch()
    (folder / "policy").mkdir()
    for file, text in files.items():
        (folder / "policy" / file).write_text(text)
    checkpoint = CheckpointRef.of(store.put(folder, "checkpoint", name), {})
    return Policy(name, name, IterationRecord.model_construct(iteration=0), checkpoint, spec)


@pytest.mark.parametrize(
    ("files", "own"),
    [
        (SAME, False),
        (SAME | {"tokenizer.json": "{ }"}, True),
        (SAME | {"tokenizer_config.json": '{"eos_token": "<end>"}'}, True),
        (SAME | {"tokenizer_config.json": '{"is_local": true}'}, False),
        (SAME | {"tokenizer_config.json": '{"add_prefix_space": true}'}, True),
        ({"tokenizer.json": "{}"}, True),
        (SAME | {"chat_template.jinja": "{{ messages }}"}, True),
    ],
)
def test_a_policy_with_another_tokenizer_keeps_its_template_and_the_ids_that_end_its_answers(
    tmp_path: Path, files: dict[str, str], own: bool
) -> None:
    candidate = smoke_spec("rollout.stop_token_ids=[7]", "rollout.max_response_tokens=9")
    champion = smoke_spec("rollout.stop_token_ids=[3]", "model.tokenizer=other", "rollout.max_response_tokens=5")
    context = run_context(candidate, tmp_path, engines=ToyEngines())
    like = policy(context.store, "candidate", candidate, SAME)
    adapted = adapt_spec(context, policy(context.store, "champion", champion, files), like)
    assert adapted.rollout.stop_token_ids == ((3,) if own else (7,))
    assert adapted.model.tokenizer == (
        str(Path(champion.folder).absolute() / "other") if own else candidate.model.tokenizer
    )
    assert adapted.rollout.max_response_tokens == 9
