"""Three servers on one PostgreSQL store are replaced one by one while callers never stop: no call fails."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest

from interlock.store.schema_version import SCHEMA_HEAD
from tests.support import releases
from tests.support.balancer import balancing
from tests.support.cluster import Cluster, Load, load, run
from tests.support.next_release import NEXT, program, write_migrations
from tests.support.postgres import Server
from tests.support.schemas import FIRST_WITH_RULES
from tests.thorough import THOROUGH

NODES = 3


@pytest.fixture
def release(tmp_path: Path) -> releases.Release:
    return releases.newest(tmp_path / "release")


@pytest.fixture
def cluster(tmp_path: Path, postgres_server: Server, release: releases.Release) -> Generator[Cluster]:
    made = Cluster(tmp_path, postgres_server.new_schema(), NODES, release.words)
    yield made
    made.close()


async def schema(cluster: Cluster) -> str:
    return (await asyncio.to_thread(cluster.clis[0].ask, "migrate", "status"))["schema"]


def nothing_failed(cluster: Cluster, told: Load) -> None:
    assert not told.failed, f"{told.failed}"
    assert min(told.reads, len(told.done)) > 0
    made = cluster.entries()
    assert {name: made[name] for name in told.done} == dict(Counter(told.done))


def test_every_tag_of_a_release_is_listed_with_its_commit() -> None:
    assert releases.tags().items() <= releases.RELEASES.items()


@pytest.mark.supports("OPS-08")
def test_every_migration_since_the_first_release_can_be_undone(tmp_path: Path) -> None:
    # tests/store/test_migrations.py undoes all of them, one by one, down to this one.
    assert releases.first(tmp_path).schema >= FIRST_WITH_RULES


@pytest.mark.part_of("OPS-11", rest="manifests are validated and not applied to a cluster")
@pytest.mark.proves("OPS-08")
async def test_servers_are_upgraded_and_set_back_one_by_one_without_a_failed_call(
    cluster: Cluster, release: releases.Release, tmp_path: Path
) -> None:
    """From the newest release to this program with one migration more, and back."""
    newer = program(write_migrations(tmp_path / "next", release.schema))
    nodes = [cluster.start(number, release.words) for number in range(NODES)]
    done: list[str] = []
    async with balancing(*(node.port for node in nodes)) as balancer:
        if THOROUGH:
            async with load(cluster, balancer.port, "restart") as told:
                nodes = [await cluster.replace(balancer, node, release.words) for node in nodes]
            nothing_failed(cluster, told)
        assert await schema(cluster) == release.schema

        async with load(cluster, balancer.port, "upgrade") as told:
            nodes[0] = await cluster.replace(balancer, nodes[0], newer)
            # The first one has migrated, and serves beside two of the release before.
            assert await schema(cluster) == NEXT
            nodes[1:] = [await cluster.replace(balancer, node, newer) for node in nodes[1:]]
        nothing_failed(cluster, told)
        done += told.done

        async with load(cluster, balancer.port, "back") as told:
            nodes = [await cluster.replace(balancer, node, release.words) for node in nodes]
        nothing_failed(cluster, told)
        done += told.done

        # All servers are of the release before; the newer one undoes its migration under them.
        async with load(cluster, balancer.port, "down") as told:
            undone = await asyncio.to_thread(run, cluster.clis[0], newer, "migrate", "down")
            assert undone.code == 0, undone.err
            assert await schema(cluster) == SCHEMA_HEAD
        nothing_failed(cluster, told)

        # What either release wrote is there: each key still has its first result.
        async with httpx.AsyncClient(headers=cluster.bearer, timeout=300) as client:
            for name in (done[0], done[len(done) // 2], done[-1]):
                sent = {"tool_id": "cluster.post", "parameters": {"name": name}, "idempotency_key": name}
                answer = await client.post(f"http://127.0.0.1:{balancer.port}/v1/tools/invoke", json=sent)
                assert answer.json()["result"] == name
        assert set(cluster.entries().values()) == {1}
        verified = await asyncio.to_thread(cluster.clis[0], "audit", "verify")
        assert verified.code == 0, verified.out
