"""The places of the contract suites: what is stated of one kind of store is stated of all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.infra.busy_places import BusyBucket, Disk
from tests.infra.places import Bucket, Folder


@pytest.fixture(params=["folder", "bucket"])
def new_place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Folder | Bucket]:
    """Makes an empty store."""
    numbers = itertools.count()
    return Bucket if request.param == "bucket" else lambda: Folder(tmp_path / f"place-{next(numbers)}")


@pytest.fixture
def place(new_place: Callable[[], Folder | Bucket]) -> Folder | Bucket:
    """An empty store."""
    return new_place()


@pytest.fixture(params=[Disk, BusyBucket], ids=["disk", "bucket"])
def new_busy_place(request: pytest.FixtureRequest) -> Callable[[], Disk | BusyBucket]:
    """Makes an empty store with processes that can be stopped."""
    make: Callable[[], Disk | BusyBucket] = request.param
    return make


@pytest.fixture
def busy_place(new_busy_place: Callable[[], Disk | BusyBucket]) -> Disk | BusyBucket:
    """An empty store with processes that can be stopped."""
    return new_busy_place()
