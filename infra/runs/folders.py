"""What a run leaves on a machine besides artifacts and records, each in a folder of its own."""

from __future__ import annotations

from pathlib import Path

from infra.runs.names import validate_run_name


class RunFolders:
    """Places below `home`. Each raises ValueError for a name that is no run's."""

    home: Path

    def run_folder(self, run: str) -> Path:
        """That of the run."""
        return self.home / "runs" / validate_run_name(run)

    def best_policy_folder(self, run: str) -> Path:
        """The folder for a copy of a run's best policy, for people and other programs."""
        return self.run_folder(run) / "best-policy"

    def reward_model_folder(self, run: str) -> Path:
        """The folder for a copy of a run's reward model."""
        return self.run_folder(run) / "reward-model"

    def start_policy_folder(self, run: str) -> Path:
        """The folder for a copy of the policy that a run starts from."""
        return self.run_folder(run) / "start-policy"

    def log_folder(self, run: str) -> Path:
        """The folder for the logs of a run's processes."""
        return self.run_folder(run) / "logs"

    def dpo_policy_folder(self, run: str) -> Path:
        """The folder for a copy of the policy that a run has trained on preferences."""
        return self.run_folder(run) / "dpo-policy"
