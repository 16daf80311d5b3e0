"""Training of a reward model as a flow:

    preferences ─► prepare_preferences ─► train_reward_model ─► evaluate_reward_model ─► registry, MLflow, a folder

What was made before comes from the store: the same command after a kill goes on with the stage that was under way.
"""

from __future__ import annotations

from functools import partial

from flows.learning import PreferenceReport, check_called, preference_run, report_if_replaced
from ppo_core.spec import RewardModelSpec
from tasks.prefect.deployment_params import requested, shown_name
from tasks.prefect.flow_tags import tag_run
from tasks.prefect.server import EmbeddedFlow
from tasks.preferences.context import RewardModelContext
from tasks.preferences.evaluate_reward_model import evaluate_reward_model
from tasks.preferences.prepare_preferences import prepare_preferences
from tasks.preferences.register_reward_model import export_reward_model, register_reward_model
from tasks.preferences.report_reward_model import begin_report, report_reward_model
from tasks.preferences.train_reward_model import train_reward_model
from tasks.runs.errors import RegistryError
from tasks.runs.kept import keep


def train(
    spec: RewardModelSpec, run: str | None = None, wait: bool = False, overrides: list[str] | None = None
) -> PreferenceReport:
    """Train a reward model on preferences, and measure it on held-out ones.

    Args:
        spec: What to train, on what, and how
        run: Name of the run. Without it, the spec's name, under a deployment with its start time
        wait: Wait while another process trains the reward model of this run, instead of refusing
        overrides: section.key=value over the spec, for example fit.num_steps=1000
    """
    spec, run = requested(spec, run, overrides)
    with preference_run(RewardModelContext, spec, run, "reward model", wait=wait) as (context, console, downloads):
        from_hub = [download.bare() for download in downloads]
        dataset = prepare_preferences(context)
        begin_report(context, dataset, console.say)
        console.step(dataset.in_words())
        model = train_reward_model(context, dataset)
        console.step(model.in_words())
        keep(context.store.root, run, [*from_hub, dataset.bare(), model.bare()])
        evaluation = evaluate_reward_model(context, model, dataset)
        keep(context.store.root, run, [*from_hub, dataset.bare(), evaluation.bare(), model.bare()])
        console.step(f"held out: {evaluation.in_words()}")
        version, complaints = None, []
        try:
            registered = register_reward_model(context, dataset, model, evaluation)
            version = f"models:/{registered.name}/{registered.version}"
        except RegistryError as error:
            complaints.append(f"the reward model is not registered: {error}")
        complaints += filter(None, [report_reward_model(context, dataset, model, evaluation)])
        folder = context.settings.reward_model_folder(run)
        with report_if_replaced(console, folder):
            export_reward_model(context.store, model.bare(), run, folder)
        return PreferenceReport(
            run=run,
            metrics={**model.metrics, **evaluation.metrics},
            folder=folder,
            artifact=model.uri,
            version=version,
            complaints=complaints,
        )


reward_model: EmbeddedFlow[[RewardModelSpec, str | None, bool, list[str] | None], PreferenceReport] = EmbeddedFlow(
    fn=train,
    check=check_called,
    name="reward-model",
    flow_run_name=partial(shown_name, RewardModelSpec),
    description="Train a reward model on preferences, from pairs or rankings to a registered sequence classifier.",
    validate_parameters=True,
    persist_result=False,
    on_running=[tag_run],
)
