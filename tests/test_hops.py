"""How many functions and tasks one call passes on its way to the tool and back. `python -m tests.hops` prints them.

The numbers may only fall: what is added to a call that is made thousands of times a second has to be worth it.
"""

from __future__ import annotations

from tests import hops


async def test_a_read_passes_few_functions_in_one_task_and_is_looked_up_once() -> None:
    trace = await hops.read()
    assert trace.hops <= 40, trace.functions
    assert trace.files <= 20, trace.functions
    assert len(trace.tasks) == 1, trace.tasks  # that of the request
    assert trace.look_ups == 1, trace.functions


async def test_a_write_passes_few_functions_in_three_tasks_and_is_looked_up_once() -> None:
    trace = await hops.write()
    assert trace.hops <= 150, trace.functions
    assert trace.files <= 70, trace.functions
    assert len(trace.tasks) == 3, trace.tasks  # of the request, of the call, which outlives it, and of its tool
    assert trace.look_ups == 1, trace.functions
