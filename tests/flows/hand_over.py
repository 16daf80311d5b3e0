"""A trained toy run whose policies are registered in a real MLflow database, and the commands that work on them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from flows.promotion import try_candidate
from tasks.policies.policy import Policy, find_policy
from tasks.policies.promote_policy import Trial, alias_at, move_alias
from tasks.register_policy import register_policy
from tasks.runs.iteration_record import Best
from tests.tasks.toy_runs import ToyRun

MODEL = "arithmetic-smoke"


@dataclass
class HandOver:
    """Versions 1, 2 and 3 are the policies of the run's iterations 0, 1 and 2."""

    run: ToyRun

    @classmethod
    def made_in(cls, home: Path) -> HandOver:
        """Train, and register the policy of each iteration."""
        run = ToyRun(home, ("iterations=2", "evaluation.every=1"))
        context = None
        for record in run.train():
            context = context or run.context()
            value = record.metrics["evaluation/score"]
            best = Best(
                metric="evaluation/score", iteration=record.iteration, value=value, checkpoint=record.checkpoint
            )
            register_policy(context, record, best)
        assert context is not None
        assert context.lease is not None
        context.lease.release()
        return cls(run)

    def settings(self, patch: pytest.MonkeyPatch) -> None:
        """Have the commands find it."""
        patch.setenv("PPOFLOW_HOME", str(self.run.home))
        patch.setenv("PPOFLOW_TRACKING_URI", f"sqlite:///{self.run.home}/mlflow.db")

    def policy(self, version: int) -> Policy:
        """A version as the flows see it."""
        return find_policy(f"models:/{MODEL}/{version}")

    def trial(self, candidate: int, champion: int | None, *overrides: str) -> Trial:
        """A comparison, on engines of its own."""
        policy = self.policy(candidate)
        context = self.run.context().with_spec(policy.spec.with_overrides(list(overrides)))
        try:
            return try_candidate(context, policy, None if champion is None else self.policy(champion))
        finally:
            assert context.lease is not None
            context.lease.release()

    def promote(self, version: int) -> str:
        """Without asking anybody."""
        alias, standing = alias_at(MODEL, "champion")
        champion = None if standing.version is None else int(standing.version)
        return move_alias(alias, standing, self.policy(version), self.trial(version, champion), None)
