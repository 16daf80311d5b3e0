"""The supervised start (SFT) as a flow of its own, for whoever needs its model before PPO begins:

    prepare_dataset ─► finetune_policy ─► start_policy ─► a folder

Training with the same run name takes all of it from the store.
"""

from __future__ import annotations

from pathlib import Path

from flows.console import RunConsole
from flows.recovery import clean_up
from ppo_core.spec import RunSpec
from ppo_core.spec.rlhf import SupervisedStart
from tasks.finetune_policy import finetune_policy
from tasks.prefect.crashed_runs import holder_note, page_is_open
from tasks.prefect.deployment_params import requested, shown_name
from tasks.prefect.flow_tags import tag_run
from tasks.prefect.server import EmbeddedFlow, page_url
from tasks.prefect.store_outages import report_outages
from tasks.prepare_dataset import prepare_dataset
from tasks.runs.progress import ProgressFile
from tasks.stages.context import RunContext, open_run_context
from tasks.stages.download_source import download_sources
from tasks.start_policy import export_start, start_policy


def fine_tune(spec: RunSpec, run: str | None = None, wait: bool = False) -> Path:
    """Fine-tune the policy that PPO will start from, and leave it in the run's folder.

    Args:
        spec: The spec of the run, with a section `sft`
        run: Name of the run. Without it, the spec's name
        wait: Wait while another process has the run, instead of refusing
    """
    spec, run = requested(SupervisedStart.of(spec), run, None)
    console = RunConsole(run, 0, file=ProgressFile(run))
    opened = open_run_context(
        RunContext, spec, run, console.progress, note=holder_note(), wait=wait, keep=lambda: not page_is_open()
    )
    with console, report_outages(console.say), opened as context:
        context.engines.start()
        console.step(f"SFT of run {run}; Prefect page {page_url()} (flow supervised)")
        clean_up(context, console)
        for download in download_sources(context):
            console.say(download.in_words())
        dataset = prepare_dataset(context)
        model = finetune_policy(context, dataset)
        console.step(model.in_words())
        return export_start(context, start_policy(context, dataset, model))


supervised: EmbeddedFlow[[RunSpec, str | None, bool], Path] = EmbeddedFlow(
    fn=fine_tune,
    name="supervised",
    flow_run_name=shown_name,
    description="Fine-tune the policy that PPO starts from.",
    validate_parameters=True,
    persist_result=False,
    on_running=[tag_run],
)
