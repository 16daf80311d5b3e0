"""A run on toy engines whose Prefect server is killed in the middle and comes back; prints what Prefect then says.

Or one whose server answers 500 for a while, as it does while its database restarts: at the start, or in the middle.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from infra.prefect_server import PrefectServer
from tasks.prefect.environment import prepare
from tests.infra.storage.s3.fault_proxy import FaultProxy
from tests.ports import free_port
from tests.waiting import LONG_S, until

ITERATIONS, DIES_AT, BACK_AT, FAILS_S = 20, 3, 12, 5.0


def fail(proxy: FaultProxy) -> None:
    """Answer 500 from now on."""
    proxy.refuse(500, "DatabaseRestarts")


def mend(proxy: FaultProxy, refused: list[int]) -> None:
    """Pass everything on again; how many calls got none of it."""
    refused.append(proxy.hits)
    proxy.inject("", lambda request: False)


def mend_later(proxy: FaultProxy, refused: list[int]) -> None:
    """After that time, and not before anything was refused."""
    time.sleep(FAILS_S)
    until(lambda: proxy.hits > 0)
    mend(proxy, refused)


def main(home: Path, outage: str) -> NoReturn:
    """Train, and tell."""
    prepare()
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from tests.tasks.toy_runs import ToyRun

    server = PrefectServer(home / "prefect", port=free_port())
    server.start()
    server.wait_until_healthy(LONG_S)
    again = PrefectServer(home / "prefect", port=int(server.ui_url.rpartition(":")[2]))
    proxy = FaultProxy(int(server.ui_url.rpartition(":")[2]))

    run, refused = ToyRun(home / "run"), list[int]()
    if outage == "killed":
        run.engines.before("generate_rollouts", DIES_AT, server.close)
        # It takes calls at once, and answers them seconds later.
        run.engines.before("generate_rollouts", BACK_AT, again.start)
    elif outage == "500 in the middle":
        run.engines.before("generate_rollouts", DIES_AT, lambda: fail(proxy))
        run.engines.before("generate_rollouts", BACK_AT, lambda: mend(proxy, refused))
    else:
        fail(proxy)
        threading.Thread(target=mend_later, args=(proxy, refused), daemon=True).start()
    toy = flow(name="toy", persist_result=False)(lambda: len(run.train(f"iterations={ITERATIONS}")))
    url = server.api_url if outage == "killed" else f"{proxy.uri}/api"
    with temporary_settings({PREFECT_API_URL: url}):
        committed = toy()
        with get_client(sync_client=True) as client:
            (found,) = client.read_flow_runs()
    print(json.dumps({"committed": committed, "state": found.state_name, "refused": refused}), flush=True)
    # Prefect would go on for a minute to tell of single tasks, over a connection that it takes for alive.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
