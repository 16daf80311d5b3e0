"""All that can be known of the whole way from preferences to a promoted policy before any of it starts."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from pathlib import Path

from infra.storage.outage import stop_waiting
from ppo_core.records import InputError
from ppo_core.spec import RlhfSpec
from ppo_core.spec.hub import is_hub_name
from ppo_core.spec.promotion import fewest_pairs
from ppo_core.spec.rlhf import REGISTERED
from tasks.checks.model_folder import require_model
from tasks.checks.preferences import check_preferences
from tasks.checks.run import Findings, check_engine, check_run
from tasks.checks.threads import submit
from tasks.policies.held_out import absolute
from tasks.policies.policy import find_policy
from tasks.preferences.given import Places, places_now, places_of


def check_rlhf(spec: RlhfSpec, run: str | None = None, *, again: bool = False, wait: bool = False) -> Findings:
    """Raise InputError (or another error of `tasks.runs.errors`) for what would end any of the stages.

    A reward model that is still to be trained is left out of the trial of the rewards, and a policy that is still to be
    fine-tuned counts as the model that it is made of.
    """
    if spec.given.trained_policy is not None:
        return check_trained(spec, spec.given.trained_policy)
    with check_engine():  # one for all of them: its imports take longest
        return _check_parts(spec, run or spec.name, again=again, wait=wait)


@contextmanager
def checking_rlhf(spec: RlhfSpec, run: str | None = None, *, wait: bool = False) -> Iterator[Future[Findings]]:
    """The same while the caller does something else; all is ended on the way out."""
    shared = nullcontext() if spec.given.trained_policy is not None else check_engine()
    with shared as engine, ThreadPoolExecutor(1) as pool:
        try:
            yield submit(pool, copy_context().run, partial(check_rlhf, spec, run, wait=wait))
        except KeyboardInterrupt:
            stop_waiting()
            if engine is not None:
                engine.close()  # its job must not keep who was interrupted
            raise


def _check_parts(spec: RlhfSpec, name: str, *, again: bool, wait: bool) -> Findings:
    now, later = places_now(spec, name), places_of(spec, name)
    require_given(spec, later)
    notes, good, learned = [], {"stages": ", ".join(spec.stages)}, ""
    if spec.trained is None:
        trial = spec.run_with(now.reward_model, now.policy)
    else:
        before = spec.run_before(now.policy)
        model = spec.reward_model_from(absolute(before.model, Path(before.folder)))
        found = check_preferences(model, name, again=again, wait=wait)
        notes, learned = found.notes, found.learned
        base = model.model.path  # a critic that begins as the reward model has its tokens, layers and context
        critic = None if base is None or is_hub_name(base) else str(Path(model.folder) / base)
        trial = spec.run_before(now.policy, critic)
        keys = {"pairs": "data", "scorer": "model"}  # nothing is, of what is still to be downloaded
        good |= {subject: found.good[key] for subject, key in keys.items() if key in found.good}
    whole = spec.run_with(later.reward_model, later.policy)
    found = check_run(whole, name, again=again, wait=wait, trial=None if trial == whole else trial, learned=learned)
    good |= found.good
    if spec.trained is not None and "reward" in good:
        good["reward"] = f"{whole.reward.labels}; tried once the reward model is trained"
    fewest, given = fewest_pairs(spec.run.promotion.confidence), spec.run.evaluation.num_prompts
    if spec.promote and given < fewest:
        notes = [*notes, f"no champion can be replaced on run.evaluation.num_prompts={given}: set at least {fewest}"]
    return Findings(list(dict.fromkeys([*notes, *found.notes])), good)


def check_trained(spec: RlhfSpec, name: str) -> Findings:
    """What is said of a policy that is only evaluated and promoted, as the spec of its run says."""
    policy = find_policy(name)
    if not policy.spec.dataset.evaluates:
        raise InputError(
            f"given.trained_policy={name}: run {policy.run} has no held-out prompts to evaluate it with; give a policy "
            "of a run whose dataset has evaluation or evaluation_fraction"
        )
    made = f"{name}, of iteration {policy.iteration} of run {policy.run}"
    return Findings([], {"stages": ", ".join(spec.stages), "policy": made})


def require_given(spec: RlhfSpec, places: Places) -> None:
    """Raise InputError where a folder that the spec names in `given` is none of a model; what is registered is one.

    What a name of the hub is, the check of the run says.
    """
    for key, what, given, place in (
        ("given.reward_model", "sequence classifier", spec.given.reward_model, places.reward_model),
        ("given.policy", "causal LM", spec.given.policy, places.policy),
    ):
        if given is not None and not given.startswith(REGISTERED) and not is_hub_name(given):
            require_model(Path(place), key, what, given)
