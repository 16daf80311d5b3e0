"""Preference pairs out of the scored samples that a run recorded, as a file that DPO and reward models train on."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from infra.artifacts import open_store
from infra.backend import open_records
from infra.engines.protocol import EngineInput, EngineJob
from infra.settings import Settings
from ppo_core.records import InputError, PairSamplesJob
from tasks.runs.iteration_record import IterationRecord
from tasks.runs.run_state import committed, spec_of_run
from tasks.runs.state_folder import require_writable_state
from tasks.runs.verification import chosen_iterations
from tasks.stages.engine_programs import EnginePlan, launch
from tasks.stages.jobs import ask
from tasks.stages.references import StageRef
from tasks.stages.table import GENERATE_ROLLOUTS, SCORE_ROLLOUTS

PAIRS, SILENCE_S = "pairs.jsonl", 600.0
ROLLOUTS, SCORES = GENERATE_ROLLOUTS.kind, SCORE_ROLLOUTS.kind


@dataclass(frozen=True)
class PairsReport:
    """What was written, and `counts` of what was left out, as `ppo_core/data/sampled_pairs.py` counts."""

    run: str
    iterations: list[int]
    counts: Mapping[str, int]

    def in_words(self) -> str:
        """How many pairs of how many prompts, and why not of the others."""
        counts, numbers = self.counts, self.iterations
        which = f"iteration {numbers[0]}" if len(numbers) == 1 else f"iterations {numbers[0]}..{numbers[-1]}"
        left_out = [f"{counts[name]:,} {why}" for name, why in WHY.items() if counts[name]]
        said = f"{counts['pairs']:,} pairs of {counts['prompts']:,} prompts in {which} of run {self.run}"
        return f"{said} ({'; '.join(left_out)})" if left_out else said


WHY = {
    "alike": "whose responses score alike",
    "alone": "with less than two scored responses",
    "cut": "in which only responses cut at the length limit are better",
    "unscored": "responses without a score",
}
"""What is left out, by the name of its count."""


def write_pairs(run: str, output: Path, iterations: str | None) -> PairsReport:
    """Write the pairs of some iterations, `3..5`, `4` or all.

    Raises InputError for an unknown run, iterations that it does not have, a file that exists, or where there are no
    pairs; ArtifactError for samples that are damaged or gone.
    """
    settings = Settings()
    sampled = sampled_records(run, iterations)
    with new_file(output) as written:
        require_writable_state(settings)
        store = open_store(settings.store_root)
        refs = {f"{name}_{record.iteration}": ref for record in sampled for name, ref in samples_of(record).items()}
        inputs = {name: EngineInput(store.fetch(ref.bare()), ref.digest) for name, ref in refs.items()}
        numbers = [record.iteration for record in sampled]
        job = PairSamplesJob(iterations=tuple(numbers)).model_dump(mode="json")
        engine = launch(EnginePlan("scoring", "preferences"), settings, settings.home / "logs")
        try:
            reply = ask(engine, EngineJob("pair_samples", inputs, written.parent, job), silence_s=SILENCE_S)
        finally:
            engine.close()
        report = PairsReport(run, numbers, reply.result)
        if not report.counts["pairs"]:
            raise InputError(
                f"there is nothing to write to {output}: {report.in_words()}: {remedy(run, report.counts)}"
            )
    return report


def sampled_records(run: str, iterations: str | None) -> list[IterationRecord]:
    """Those of the wanted iterations that sampled. Raises InputError where there are none."""
    records = committed(run).records
    wanted = chosen_iterations(open_records(open_store(Settings().store_root).root, run), iterations)
    sampled = [record for record in records if record.iteration in wanted and record.made(ROLLOUTS) is not None]
    if not sampled:
        raise InputError(
            f"iteration 0 of run {run} is its start, which samples nothing: name iterations from 1 on, or train "
            f"further:  ppoflow resume {run}"
        )
    return sampled


def samples_of(record: IterationRecord) -> dict[str, StageRef]:
    """Prompts, responses and scores of an iteration."""
    made = {name: record.made(name) for name in (ROLLOUTS, SCORES)}
    return {"dataset": record.dataset, **{name: ref for name, ref in made.items() if ref is not None}}


@contextmanager
def new_file(output: Path) -> Iterator[Path]:
    """Where to write a file in the meantime, on its own disk: at the end it is there, complete, and nowhere before.

    Raises InputError where something is there already, which may be anybody's, or nothing can be written.
    """
    require_new(output)
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    except OSError as error:
        raise InputError(f"{output} cannot be written: {error.strerror}; choose another place") from None
    try:
        yield folder / PAIRS
        try:
            os.link(folder / PAIRS, output)
        except FileExistsError:
            require_new(output)
        except OSError:  # a file system without hard links
            require_new(output)
            (folder / PAIRS).rename(output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def require_new(output: Path) -> None:
    """Raise InputError where something is there."""
    if os.path.lexists(output):
        raise InputError(f"{output} exists already: remove it, or write to another file")


def remedy(run: str, counts: Mapping[str, int]) -> str:
    """What gives pairs the next time, by what most prompts lack."""
    most, samples = max(("alone", "alike", "cut"), key=counts.__getitem__), "rollout.samples_per_prompt"
    if most == "alone":
        given = spec_of_run(run).rollout.samples_per_prompt
        return f"{samples} is {given}; sample {4 if given == 1 else 'more'} in a new run, or see why scores are missing"
    if most == "cut":
        return "raise rollout.max_response_tokens in a new run"
    return f"raise {samples} or rollout.temperature in a new run, or use a reward that tells responses apart"
