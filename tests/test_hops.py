"""How many functions one call passes on its way to the tool and back. `python -m tests.hops` prints them.

The numbers may only fall: what is added to a call that is made thousands of times a second has to be worth it.
"""

from __future__ import annotations

from tests import hops


async def test_a_read_passes_few_functions() -> None:
    trace = await hops.read()
    assert trace.hops <= 40, trace.functions
    assert trace.files <= 20, trace.functions


async def test_a_write_passes_few_functions() -> None:
    trace = await hops.write()
    assert trace.hops <= 150, trace.functions
    assert trace.files <= 70, trace.functions
