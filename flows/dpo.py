"""Direct preference optimisation (DPO) as a flow, on the stages of a run of PPO:

    prompts ─► prepare_dataset ─► finetune_policy (where the spec has `sft`) ─► start_policy ─► evaluate_policy
    preferences ─► prepare_preferences ─────────────────────────────────────────┐    │
                                                        registry, MLflow, ◄─ train_dpo ◄┘
                                                        a folder             └─► evaluate_policy

The same prompts, seeds and reward judge the policy before and after as they judge one of PPO. What was made before
comes from the store: the same command after a kill goes on with the stage that was under way.
"""

from __future__ import annotations

from functools import partial

from flows.learning import PreferenceReport, check_called, preference_run, report_if_replaced
from flows.stages import run_stages
from ppo_core.spec import DpoSpec
from tasks.evaluate_policy import evaluate_policy
from tasks.prefect.deployment_params import requested, shown_name
from tasks.prefect.flow_tags import tag_run
from tasks.prefect.server import EmbeddedFlow
from tasks.preferences.context import DpoContext
from tasks.preferences.prepare_preferences import prepare_preferences
from tasks.preferences.register_dpo_policy import export_dpo_policy, register_dpo_policy
from tasks.preferences.report_dpo import all_metrics, report_dpo
from tasks.preferences.report_reward_model import begin_report
from tasks.preferences.train_dpo import train_dpo
from tasks.prepare_dataset import prepare_dataset
from tasks.runs.errors import RegistryError
from tasks.runs.kept import DPO_POLICIES, keep, with_inputs
from tasks.stages.references import StageRef
from tasks.stages.table import EVALUATE_POLICY, FINETUNE_POLICY, START_POLICY


def train(
    spec: DpoSpec, run: str | None = None, wait: bool = False, overrides: list[str] | None = None
) -> PreferenceReport:
    """Train a policy on preferences, and evaluate it on held-out preferences and prompts.

    Args:
        spec: What to train, on what, and how
        run: Name of the run. Without it, the spec's name, under a deployment with its start time
        wait: Wait while another process has this run, instead of refusing
        overrides: section.key=value over the spec, for example dpo.beta=0.3
    """
    spec, run = requested(spec, run, overrides)
    with preference_run(DpoContext, spec, run, "DPO run", wait=wait) as (context, console, downloads):
        preferences = prepare_preferences(context)
        begin_report(context, preferences, console.say)
        console.step(preferences.in_words())
        dataset = prepare_dataset(context)
        made = run_stages(context, dataset, None, {}, evaluate=spec.dataset.evaluates)
        evaluations = {"before": made[EVALUATE_POLICY.name]} if spec.dataset.evaluates else {}
        context.timings.iteration = 1
        policy = train_dpo(context, preferences, made[START_POLICY.name])
        console.step(policy.in_words())
        kept: list[StageRef] = [*downloads, preferences, dataset, *made.values()]
        keep_all(context, [*kept, policy])
        if spec.dataset.evaluates:
            evaluations["after"] = evaluate_policy(context, policy, dataset)
            keep_all(context, [*kept, evaluations["after"], policy])
            console.step("; ".join(f"{when}: {found.in_words()}" for when, found in evaluations.items()))
        version, complaints = None, []
        try:
            registered = register_dpo_policy(context, preferences, policy, evaluations.get("after"))
            version = f"models:/{registered.name}/{registered.version}"
        except RegistryError as error:
            complaints.append(f"the policy is not registered: {error}")
        complaint = report_dpo(context, dataset, preferences, made.get(FINETUNE_POLICY.name), policy, evaluations)
        with report_if_replaced(console, context.settings.dpo_policy_folder(run)):
            folder = export_dpo_policy(context, policy)
        return PreferenceReport(
            run=run,
            metrics=all_metrics(policy, evaluations),
            folder=folder,
            artifact=policy.uri,
            version=version,
            complaints=[*complaints, *filter(None, [complaint])],
        )


def keep_all(context: DpoContext, made: list[StageRef]) -> None:
    """Name what was made, and what evaluations are of, so that nobody collects it."""
    keep(context.store.root, context.run, with_inputs(context.store, made), DPO_POLICIES)


dpo: EmbeddedFlow[[DpoSpec, str | None, bool, list[str] | None], PreferenceReport] = EmbeddedFlow(
    fn=train,
    check=check_called,
    name="dpo",
    flow_run_name=partial(shown_name, DpoSpec),
    description="Train a policy on preferences (DPO), and evaluate it as one of PPO.",
    validate_parameters=True,
    persist_result=False,
    on_running=[tag_run],
)
