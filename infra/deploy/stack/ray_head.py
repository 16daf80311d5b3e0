"""Ray's head: where engines on other machines, or in other processes here, are placed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from infra.deploy.stack.credentials import write_private
from infra.deploy.stack.service import Port, Service
from infra.deploy.stack.site import Site

# What the paths of Ray's Unix sockets add to its folder.
SOCKET_CHARACTERS = 68
OBJECT_STORE_BYTES = 2**28  # references only: artifacts travel through the store
# Its default of 30 s is too short where everything starts at once on few cores. A node gives its own processes 30 s as
# well, which no setting changes, so it has several tries.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "240", "PYTHONUNBUFFERED": "1"}
CHECK = "/ray.rpc.NodeInfoGcsService/CheckAlive"
CHECK_TIMEOUT_S = 5.0
TRIES = 5


def ray_head(site: Site) -> Service:
    """With the resources that the engines ask for; GPUs Ray finds by itself."""
    settings = site.settings
    temporary = site.short_folder("ray/tmp", SOCKET_CHARACTERS)
    ports = {"--port": settings.ray_port, "--ray-client-server-port": settings.ray_client_port}
    options = {
        "--node-ip-address": site.host,
        **{name: str(port) for name, port in ports.items()},
        # 0 is: any. Its default range would take ports of other servers.
        "--min-worker-port": "0",
        "--max-worker-port": "0",
        "--resources": json.dumps(settings.ray_resources),
        "--object-store-memory": str(OBJECT_STORE_BYTES),
        "--include-dashboard": "false",
        "--temp-dir": str(temporary),
    }
    start = [part for option in options.items() for part in option]
    return Service(
        name="ray",
        address=site.ray_address,
        ports=[
            Port(site.host, settings.ray_port, "RAY_PORT"),
            Port(site.host, settings.ray_client_port, "RAY_CLIENT_PORT"),
        ],
        command=[
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--head",
            "--block",
            "--disable-usage-stats",
            *start,
        ],
        folder=site.folder("ray"),
        environment=_environment(site, "ray"),
        prepare=lambda: _prepare(site, temporary),
        healthy=lambda: is_alive(site.ray_address, site.credentials.ray),
        tries=TRIES,
    )


def ray_nodes(site: Site) -> list[Service]:
    """Nodes beside the head, as other machines would be: each engine on its own, and one can be killed."""
    offers = site.settings.ray_nodes
    names = ["ray", *(f"ray-{number}" for number in range(1, len(offers) + 1))]
    # One after the other: of two that join at once on one machine, Ray may leave the first waiting.
    return [_node(site, name, offer, after) for after, name, offer in zip(names, names[1:], offers, strict=False)]


def _node(site: Site, name: str, offer: dict[str, float], after: str) -> Service:
    joined = site.folder("ray") / f"{name}.joined"
    where = [site.ray_address, json.dumps(offer), str(site.short_folder("ray/tmp", SOCKET_CHARACTERS)), str(joined)]
    return Service(
        name=name,
        address=f"node of {site.ray_address}",
        after=[after],
        command=[sys.executable, "-m", "infra.deploy.stack.ray_node", *where],
        folder=Path(__file__).parents[3],
        environment=_environment(site, name),
        prepare=lambda: joined.unlink(missing_ok=True),
        healthy=joined.exists,
        tries=TRIES,
    )


def _environment(site: Site, name: str) -> dict[str, str]:
    """Engines on a node fetch from S3, and keep what they have fetched in a folder of this node alone."""
    home = {"PPOFLOW_HOME": str(site.folder("ray") / f"{name}-home")}
    # Ray gives its workers little of the machine beside others; engines are what this one is for.
    return {**site.ray_environment(), **site.s3_environment(), **home, **QUIET, "RAY_worker_niceness": "0"}


def _prepare(site: Site, temporary: Path) -> None:
    temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(site.ray_token, site.credentials.ray)


def is_alive(address: str, token: str) -> bool:
    """What `ray health-check` asks, without starting a Python for it. False also where the token is refused."""
    import grpc

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        check = channel.unary_unary(CHECK)
        try:
            check(b"", timeout=CHECK_TIMEOUT_S, metadata=[("authorization", f"Bearer {token}")])
        except grpc.RpcError:
            return False
        return True
