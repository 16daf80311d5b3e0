"""What `ppoflow deploy` makes of work pools."""

from __future__ import annotations

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate

from tasks.prefect.automations import ensure_pool


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(
    ("description", "limit", "kept"),
    [(None, None, 1), (None, 3, 3), ("ours, without a limit", None, None)],
    ids=["made by a worker", "with a limit", "set by its owner"],
)
def test_a_pool_that_a_worker_made_by_itself_gets_a_limit(
    description: str | None, limit: int | None, kept: int | None
) -> None:
    name = f"pool-{description}-{limit}"
    with get_client(sync_client=True) as client:
        client.create_work_pool(
            WorkPoolCreate(name=name, type="process", description=description, concurrency_limit=limit)
        )
        said = ensure_pool(client, name)
        assert client.read_work_pool(name).concurrency_limit == kept
    assert ("no limit" if kept is None else f"at most {kept} at a time") in said
