"""A run on toy engines whose Prefect server is killed in the middle and comes back; prints what Prefect then says."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NoReturn

from infra.prefect_server import PrefectServer
from tasks.prefect_environment import prepare

ITERATIONS, DIES_AT, BACK_AT = 20, 3, 12


def main(home: Path) -> NoReturn:
    """Train, and tell."""
    prepare()
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from tests.tasks.toy_runs import ToyRun

    server = PrefectServer(home / "prefect", port=0)
    server.start()
    server.wait_until_healthy()
    again = PrefectServer(home / "prefect", port=int(server.ui_url.rpartition(":")[2]))

    run = ToyRun(home / "run")
    run.engines.before("generate_rollouts", DIES_AT, server.close)
    run.engines.before("generate_rollouts", BACK_AT, again.start)  # takes calls at once, and answers them seconds later
    toy = flow(name="toy", persist_result=False)(lambda: len(run.train(f"iterations={ITERATIONS}")))
    with temporary_settings({PREFECT_API_URL: server.api_url}):
        committed = toy()
        assert again.api_url == server.api_url
        with get_client(sync_client=True) as client:
            (found,) = client.read_flow_runs()
    print(json.dumps({"committed": committed, "state": found.state_name}), flush=True)
    # Prefect would go on for a minute to tell of single tasks, over a connection that it takes for alive.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
