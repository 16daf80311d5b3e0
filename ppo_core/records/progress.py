"""The loss in the progress messages of fine-tuning."""

from __future__ import annotations

LOSS_DIGITS = 4
NOTED_LOSS = "loss "


def loss_note(loss: float) -> str:
    """What the progress of a supervised start says of a step."""
    return f"{NOTED_LOSS}{loss:.{LOSS_DIGITS}f}"


def noted_loss(note: str) -> float | None:
    """The loss in such a note; None where it says something else."""
    return float(note.removeprefix(NOTED_LOSS)) if note.startswith(NOTED_LOSS) else None
