"""Runs on toy engines whose Prefect server fails and comes back; prints what Prefect then says of each.

It answers 500 for a while, as it does while its database restarts, at the start or in the middle; or it is killed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from infra.prefect_server import PrefectServer
from tasks.prefect.environment import prepare
from tests.infra.storage.s3.fault_proxy import FaultProxy
from tests.ports import free_port
from tests.waiting import LONG_S, until

ITERATIONS, DIES_AT, BACK_AT, FAILS_S = 20, 3, 12, 5.0
OUTAGES = AT_THE_START, IN_THE_MIDDLE, KILLED = "500 at the start", "500 in the middle", "killed"


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


def train(home: Path, outage: str, servers: tuple[PrefectServer, PrefectServer], proxy: FaultProxy) -> dict[str, Any]:
    """A run that meets this outage: how many iterations it committed, the state that Prefect then has of it, and how
    many calls were refused."""
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from tests.tasks.toy_runs import ToyRun

    (server, again), refused = servers, list[int]()
    run = ToyRun(home / "".join(filter(str.isalnum, outage)))
    if outage == KILLED:
        run.engines.before("generate_rollouts", DIES_AT, server.close)
        # It takes calls at once, and answers them seconds later.
        run.engines.before("generate_rollouts", BACK_AT, again.start)
    elif outage == IN_THE_MIDDLE:
        run.engines.before("generate_rollouts", DIES_AT, lambda: fail(proxy))
        run.engines.before("generate_rollouts", BACK_AT, lambda: mend(proxy, refused))
    else:
        fail(proxy)
        threading.Thread(target=mend_later, args=(proxy, refused), daemon=True).start()
    toy = flow(name=outage, persist_result=False)(lambda: len(run.train(f"iterations={ITERATIONS}")))
    url = server.api_url if outage == KILLED else f"{proxy.uri}/api"
    with temporary_settings({PREFECT_API_URL: url}):
        committed = toy()
        with get_client(sync_client=True) as client:
            (found,) = client.read_flow_runs(flow_filter=FlowFilter(name=FlowFilterName(any_=[outage])))
    return {"committed": committed, "state": found.state_name, "refused": refused}


def main(home: Path) -> NoReturn:
    """Train through one outage after the other, and tell. What is killed last is the server of all."""
    prepare()
    server = PrefectServer(home / "prefect", port=free_port())
    server.start()
    server.wait_until_healthy(LONG_S)
    port = int(server.ui_url.rpartition(":")[2])
    servers, proxy = (server, PrefectServer(home / "prefect", port=port)), FaultProxy(port)
    print(json.dumps({outage: train(home, outage, servers, proxy) for outage in OUTAGES}), flush=True)
    # Prefect would go on for a minute to tell of single tasks, over a connection that it takes for alive.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
