"""Tables of cases that are one test. A test of its own for each case takes longer than most cases do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test for every case, as `pytest.mark.parametrize` does, in one test. The case that fails is named.

    For tests of functions without state: the cases share whatever fixtures the test has.
    """
    table = list(cases)
    assert table, "a test without a case proves nothing"

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(test):

            @functools.wraps(test)
            async def run_async(**fixtures: Any) -> None:
                for case in table:
                    with _named(names, case):
                        await test(**fixtures, **_given(names, case))

            run: Callable[..., Any] = run_async
        else:

            @functools.wraps(test)
            def run_sync(**fixtures: Any) -> None:
                for case in table:
                    with _named(names, case):
                        test(**fixtures, **_given(names, case))

            run = run_sync
        whole = inspect.signature(test)
        taken = (names,) if isinstance(names, str) else names
        left = [one for name, one in whole.parameters.items() if name not in taken]
        vars(run)["__signature__"] = whole.replace(parameters=left)
        return run

    return decorate


def _given(names: str | tuple[str, ...], case: Any) -> dict[str, Any]:
    return {names: case} if isinstance(names, str) else dict(zip(names, case, strict=True))


@contextmanager
def _named(names: str | tuple[str, ...], case: Any) -> Generator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"where {names} is {case!r:.500}")
        raise
