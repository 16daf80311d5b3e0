"""One more Ray node on this machine, on loopback alone.

    python -m infra.deploy.stack.ray_node <address> <resources as JSON> <temporary folder> <file that says it joined>

`ray start --address` refuses loopback (see Site.ray_environment), so this makes the node as Ray's own tests do.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

LOOK_EVERY_S = 0.5


def main(arguments: list[str]) -> None:
    """Start the node and stay until one of its processes ends."""
    address, resources, folder, joined = arguments[1:]
    Path(joined).unlink(missing_ok=True)
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    parameters = RayParams(
        gcs_address=address,
        node_ip_address=address.rpartition(":")[0],
        resources=json.loads(resources),
        object_store_memory=2**28,
        temp_dir=folder,
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
        include_log_monitor=False,  # type: ignore[arg-type]
    )
    parameters.dashboard_agent_listen_port = None  # any: the head has the usual one
    # With a reaper, its processes end when this one is killed.
    node = Node(parameters, head=False, shutdown_at_exit=False, spawn_reaper=True)
    Path(joined).touch()
    while not (ended := node.dead_processes()):
        time.sleep(LOOK_EVERY_S)
    print(f"{ended} ended, and the node with it", flush=True)
    node.kill_all_processes(check_alive=False, allow_graceful=False)


if __name__ == "__main__":
    main(sys.argv)
