"""What can be said of the container files without running them: references resolve, nothing is secret or unpinned."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.deploy.stack.containers import USER, container_variables, write_container_files
from infra.deploy.stack.credentials import Credentials
from tests.infra.programs import ROOT
from tests.infra.stack.stack_sites import site_in

DEPLOY = ROOT / "infra/deploy"
KUBERNETES = DEPLOY / "kubernetes"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
VARIABLES = set(container_variables(Credentials(**dict.fromkeys(Credentials.model_fields, "x" * 20))))
SECRET_NAME = re.compile(r"PASSWORD|SECRET|TOKEN|LOGIN|AUTH_STRING")
REQUIRED = re.compile(r"\$\{([A-Z0-9_]+):\?[^}]+\}")
PINNED = re.compile(r"[a-z0-9./-]+:(?!latest)[A-Za-z0-9_.-]*\d[A-Za-z0-9_.-]*")
KUBERNETES_SECRETS = {"ppoflow": VARIABLES, "ppoflow-s3": {"aws-credentials"}, "ppoflow-ray": {"auth_token"}}


@cache
def documents() -> list[dict[str, Any]]:
    files = [path for path in KUBERNETES.rglob("*.yaml") if path.name != "kustomization.yaml"]
    found = [document for path in sorted(files) for document in yaml.safe_load_all(path.read_text())]
    return [document for document in found if isinstance(document, dict)]


def pods() -> Iterator[dict[str, Any]]:
    """Every pod template: its metadata and spec."""
    for document in documents():
        spec = document.get("spec") or {}
        if document["kind"] == "RayCluster":
            yield from (group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]))
        elif "template" in spec:
            yield spec["template"]


def containers() -> list[dict[str, Any]]:
    return [container for pod in pods() for container in pod["spec"]["containers"]]


def named(values: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {value["name"]: value for value in values}


def selected(selector: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods that labels, matchLabels or matchExpressions choose; asserts that each value names one."""
    labels = [pod["metadata"]["labels"] for pod in pods()]
    wanted = [(key, [value]) for key, value in selector.get("matchLabels", {}).items()]
    wanted += [(rule["key"], rule["values"]) for rule in selector.get("matchExpressions", [])]
    for key, values in wanted:
        assert set(values) <= {label.get(key) for label in labels}
    return [pod for pod in pods() if all(pod["metadata"]["labels"].get(key) in values for key, values in wanted)]


def test_compose_services_can_be_reached_from_this_machine_alone():
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.parametrize("name", SERVICES)
def test_a_compose_service_is_pinned_watched_and_has_no_rights(name: str):
    service = SERVICES[name]
    assert PINNED.fullmatch(service["image"])
    assert service["healthcheck"]["test"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert set(service.get("depends_on", {})) <= set(SERVICES)
    assert set(service.get("secrets", [])) <= set(COMPOSE["secrets"])
    volumes = [volume.split(":")[0] for volume in service.get("volumes", [])]
    assert {volume for volume in volumes if not volume.startswith(".")} <= set(COMPOSE["volumes"])
    assert all((DEPLOY / volume).is_file() for volume in volumes if volume.startswith("."))
    for variable, value in service.get("environment", {}).items():
        if SECRET_NAME.search(variable) and not value.startswith("/"):
            assert REQUIRED.fullmatch(value), variable


def test_compose_asks_for_what_the_stack_writes():
    used = set(re.findall(r"\$\{([A-Z0-9_]+)", (DEPLOY / "compose.yaml").read_text()))
    assert used - {"PPOFLOW_UID", "PPOFLOW_SECRETS", "PPOFLOW_PASSWORDS", "TORCH_INDEX"} <= VARIABLES
    hosts = set(re.findall(r"://([a-z0-9-]+):\d+", str(SERVICES)))
    assert hosts <= set(SERVICES)
    override = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())["services"]
    assert set(override) <= set(SERVICES)


def mounted_files(variables: Path) -> set[Path]:
    """What Compose mounts, by the variables that `write_container_files` wrote."""
    written = dict(line.split("=", 1) for line in variables.read_text().splitlines())
    return {Path(REQUIRED.sub(lambda name: written[name[1]], one["file"])) for one in COMPOSE["secrets"].values()}


def test_compose_mounts_the_passwords_that_the_settings_name(tmp_path: Path):
    """The containers' servers would not know each other by others."""
    site = site_in(tmp_path / "stack", passwords=tmp_path / "elsewhere.json")
    mounted = mounted_files(write_container_files(site))
    assert mounted == {tmp_path / "elsewhere.json", site.s3_credentials}
    assert all(file.is_file() for file in mounted)


def test_the_containers_may_read_what_root_has_made_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    site = site_in(tmp_path / "stack")
    given: list[tuple[str, int, int]] = []
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(os, "chown", lambda path, user, group: given.append((Path(path).name, user, group)))
    mounted = mounted_files(write_container_files(site))
    assert {name for name, *_ in given} == {file.name for file in mounted}
    assert {(user, group) for _, user, group in given} == {(USER, USER)}
    given.clear()
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    assert "PPOFLOW_UID=1234" in write_container_files(site).read_text()
    assert given == []


def test_the_image_is_installed_from_the_lock_and_runs_as_nobody_special():
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    known: set[str] = set()
    for source, stage in stages:
        assert source in known or PINNED.fullmatch(source)
        known.add(stage)
    built = [*SERVICES.values(), *yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())["services"].values()]
    assert {service["build"]["target"] for service in built if "build" in service} == {"cpu", "cuda", "s3"} <= known
    bodies = dict(
        zip([stage for _, stage in stages], re.split(r"^FROM .*$", DOCKERFILE, flags=re.MULTILINE)[1:], strict=True)
    )
    for target in ("cpu", "cuda", "s3"):
        assert re.findall(r"^USER (\S+)$", bodies[target], re.MULTILINE)[-1] == "ppoflow"
        assert "HEALTHCHECK" in bodies[target]
    # `make install` reads requirements.lock; nothing else brings packages of Python.
    assert DOCKERFILE.count("RUN make install GPU=") == 2
    assert "pip install" not in DOCKERFILE
    allowed = {
        line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")
    }
    copied = {word for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE) for word in line.split()}
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.parametrize("addresses", ["172.18.0.5", "fd00::2 172.18.0.5", "172.18.0.5 172.19.0.3 fd00::2 "])
def test_of_several_addresses_of_a_container_the_first_of_ipv4_counts(tmp_path: Path, addresses: str):
    """Docker gives it one of each network and, where it has IPv6, one of that."""
    (tmp_path / "hostname").write_text(f"#!/bin/sh\necho '{addresses}'\n")
    (tmp_path / "hostname").chmod(0o755)
    commands = [json.loads(words) for words in re.findall(r"CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)]
    commands += [service["healthcheck"]["test"] for service in SERVICES.values()]
    asked = [words[-1].replace("$$", "$") for words in commands if "hostname" in words[-1]]
    assert len(asked) == 4
    path = f"{tmp_path}:{os.environ['PATH']}"
    for text in asked:
        shown = f"echo {text[text.index('$(') : text.index(')') + 1]}"
        done = subprocess.run(["sh", "-c", shown], env={"PATH": path}, stdout=subprocess.PIPE, text=True, check=True)
        assert done.stdout == "172.18.0.5\n"


def test_of_several_addresses_of_a_pod_probes_ask_the_one_that_kubernetes_names():
    probes = [str(pod[kind]) for pod in containers() for kind in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert not [probe for probe in probes if "hostname" in probe]
    (head,) = (container for container in containers() if container["name"] == "ray-head")
    assert {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}} in head["env"]
    assert "$POD_IP:6379" in str(head["readinessProbe"])


def test_every_manifest_is_used_and_exists():
    used: set[Path] = set()
    for path in KUBERNETES.rglob("kustomization.yaml"):
        content = yaml.safe_load(path.read_text())
        listed = [*content.get("resources", []), *(patch["path"] for patch in content.get("patches", []))]
        used |= {(path.parent / name).resolve() for name in listed}
        folders = [(path.parent / name).resolve() for name in [*content.get("components", []), *listed]]
        assert all(folder.exists() for folder in folders)
    files = {path for path in KUBERNETES.rglob("*.yaml") if path.name != "kustomization.yaml"}
    assert files == {path for path in used if path.is_file()}


def test_every_container_is_pinned_probed_limited_and_without_rights():
    assert len(containers()) == 7
    for pod in pods():
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["automountServiceAccountToken"] is False
    for container in containers():
        assert PINNED.fullmatch(container["image"])
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
        assert {"cpu", "memory"} <= set(container["resources"]["limits"])
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_secrets_are_referred_to_and_never_given():
    assert [document for document in documents() if document["kind"] == "Secret"] == []
    for container in containers():
        for variable in container.get("env", []):
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference:
                assert reference["key"] in KUBERNETES_SECRETS[reference["name"]]
            else:
                assert not SECRET_NAME.search(variable["name"])
    config = {
        document["metadata"]["name"]: document["data"] for document in documents() if document["kind"] == "ConfigMap"
    }
    assert not [name for data in config.values() for name in data if SECRET_NAME.search(name)]
    for container in containers():
        assert {source["configMapRef"]["name"] for source in container.get("envFrom", [])} <= set(config)
    (cluster,) = (document for document in documents() if document["kind"] == "RayCluster")
    assert cluster["spec"]["authOptions"] == {"mode": "token", "secretName": "ppoflow-ray"}


def test_references_between_manifests_resolve():
    config = {document["metadata"]["name"] for document in documents() if document["kind"] == "ConfigMap"}
    for pod in pods():
        volumes = named(pod["spec"].get("volumes", []))
        claims = {"data"} if pod["metadata"]["labels"]["app.kubernetes.io/name"] == "postgres" else set()
        for volume in volumes.values():
            assert volume.get("secret", {}).get("secretName", "ppoflow") in KUBERNETES_SECRETS
            assert volume.get("configMap", {}).get("name", "ppoflow") in config
        for container in pod["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= {*volumes, *claims}
            probes = [container[kind] for kind in ("startupProbe", "readinessProbe", "livenessProbe")]
            asked = {probe["httpGet"]["port"] for probe in probes if "httpGet" in probe}
            assert asked <= set(named(container.get("ports", [])))
    for document in documents():
        if document["kind"] == "Service" and "selector" in document["spec"]:
            (pod,) = selected({"matchLabels": document["spec"]["selector"]})
            ports = named(pod["spec"]["containers"][0]["ports"])
            assert {port["targetPort"] for port in document["spec"]["ports"]} <= set(ports)
        if document["kind"] == "NetworkPolicy":
            assert selected(document["spec"]["podSelector"])
            sources = [source for rule in document["spec"].get("ingress", []) for source in rule["from"]]
            assert all(selected(source["podSelector"]) for source in sources)


def test_addresses_in_manifests_are_those_of_services():
    services = {
        document["metadata"]["name"]: [port["port"] for port in document["spec"]["ports"]]
        for document in documents()
        if document["kind"] == "Service" and "ports" in document["spec"]
    }
    text = str(documents()) + (DEPLOY / "mlflow-auth.ini").read_text()
    used = {(host, int(port)) for host, port in re.findall(r"://([a-z]+):(\d+)", text)}
    assert used
    assert all(port in services[host] for host, port in used)


def test_the_gpu_overlay_changes_what_is_there():
    (cluster,) = (document for document in documents() if document["kind"] == "RayCluster")
    for change in yaml.safe_load((KUBERNETES / "overlays/gpu/engines.yaml").read_text()):
        place: Any = cluster
        for part in change["path"].split("/")[1:-1]:
            place = place[int(part)] if isinstance(place, list) else place[part]
        assert (change["op"], change["path"].endswith("/nvidia.com~1gpu")) == ("add", True)
        assert "memory" in place
