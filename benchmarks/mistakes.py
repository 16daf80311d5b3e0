"""How long a new user waits for the message about a mistake, and what it says.

    python -m benchmarks.mistakes [--only TEXT]

Makes each mistake of `tests/experience` in a fresh project, prints the seconds with the last lines of what the command
says, and writes `benchmarks/results/mistakes.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tests.experience.meeting import Mistake, meet
from tests.experience.mistakes import MISTAKES
from tests.experience.project import make_model, make_project

RESULTS = Path("benchmarks/results/mistakes.json")


def main() -> None:
    """Make all mistakes, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only mistakes whose description contains this text")
    wanted = parser.parse_args().only
    chosen = [mistake for mistake in MISTAKES if wanted in mistake.what]
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        results = [
            measure(mistake, make_project(Path(folder) / str(n) / "project", model)) for n, mistake in enumerate(chosen)
        ]
    seconds = [result["seconds"] for result in results]
    print(f"\n{len(results)} mistakes: median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s")
    if not wanted:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def measure(mistake: Mistake, project: Path) -> dict[str, Any]:
    """Make one mistake, print what was said, and return it."""
    answer = meet(mistake, project)
    says = (answer.error or answer.output).replace(str(project), "…").strip()
    print(f"{answer.seconds:5.1f} s  {mistake.what}\n         {' '.join(mistake.command)}\n         {says}", flush=True)
    return {"mistake": mistake.what, "seconds": round(answer.seconds, 2), "status": answer.status, "says": says}


if __name__ == "__main__":
    main()
