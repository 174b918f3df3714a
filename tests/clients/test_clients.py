"""The table of MCP clients says what the clients do: every row is probed with the real client."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from interlock import Interlock
from tests.clients import table
from tests.clients.probes import PROBES
from tests.clients.target import Target, opened
from tests.thorough import THOROUGH

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("module_leaves_nothing_behind"),
    # The SDK's client warns of what the modern era gave up; clients of the handshake era go on using it.
    pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # pydantic-ai expects no questions in the modern era. It is asked, in the result of its call.
    pytest.mark.filterwarnings("ignore:.*will never be called:UserWarning"),
    pytest.mark.timeout(1800),  # a thorough run installs clients
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target(
    module_leaves_nothing_behind: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[tuple[Interlock, Target]]:
    async with opened(tmp_path_factory.mktemp("clients")) as made:
        yield made


# The clients of other environments have to be installed, which a normal run does not do.
ROWS = [(name, wire) for name in (table.CLIENTS if THOROUGH else PROBES) for wire in table.WIRES]


@pytest.mark.parametrize(("name", "wire"), ROWS)
async def test_a_client_does_what_the_table_says(target: tuple[Interlock, Target], name: str, wire: str) -> None:
    assert await table.row(*target, name, wire) == table.stated()[name, wire]


async def test_the_table_has_a_row_for_every_client_and_no_other() -> None:
    assert list(table.stated()) == [(name, wire) for name in table.CLIENTS for wire in table.WIRES]
    assert table.lines() == [*table.HEADER, *table.stated().values()], (
        "each row once, under the features that are probed"
    )
