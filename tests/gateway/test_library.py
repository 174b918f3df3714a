"""The library as a Python program meets it: what may be called and added, and what a slip is answered with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest

from interlock import Field, Interlock, tool


@tool(version="1.0.0", mutation_class="read_only", namespace="lib")
def double(number: Annotated[int, Field(description="a number", examples=[2])]) -> int:
    """Give twice the number."""
    return number * 2


@tool(version="2.0.0", mutation_class="read_only", namespace="lib", name="double")
def double_again(number: Annotated[int, Field(description="a number", examples=[2])]) -> int:
    """Give twice the number, and twice that."""
    return number * 4


@pytest.mark.shows("Python function", "discovery", "call")
async def test_a_declared_tool_is_called_as_itself_in_its_very_version(home: Path) -> None:
    async with Interlock.open(home) as app:
        await app.add(double, double_again)
        assert (await app.call("lib.double", number=1)).unwrap() == 4
        assert (await app.call(double, number=1)).unwrap() == 2
        assert (await app.call(double, {"number": 1}, version="^2")).unwrap() == 4
        assert (await app.call_with_retries(double, {"number": 1})).unwrap() == 2
        [first, second] = await app.batch([app.request(double, {"number": 1}), app.request("lib.double@^2")])
        assert first.unwrap() == 2
        assert second.error is not None


async def test_what_is_no_tool_is_refused_with_the_line_to_write(home: Path) -> None:
    def plain() -> int:
        return 1

    no_tools: list[Any] = [plain, lambda: 1, 3]
    async with Interlock.open(home) as app:
        for given in no_tools:
            with pytest.raises(TypeError, match=r"put @tool\(version="):
                await app.add(given)
            with pytest.raises(TypeError, match=r"put @tool\(version="):
                await app.call(given)
            with pytest.raises(TypeError, match=r"put @tool\(version="):
                app.request(given)
        place: Any = "my_tools.py"
        with pytest.raises(TypeError, match=r"write add_from\('my_tools.py'\)"):
            await app.add(place)


async def test_arguments_that_are_no_mapping_are_refused_with_the_line_to_write(home: Path) -> None:
    text: Any = "cash"
    async with Interlock.open(home) as app:
        await app.add(double)
        with pytest.raises(TypeError, match=r"one mapping: app.call"):
            await app.call("lib.double", text)


async def test_an_option_that_was_taken_for_an_argument_is_named(home: Path) -> None:
    async with Interlock.open(home) as app:
        await app.add(double)
        result = await app.call("lib.double", number=1, timeout=0.5)
        assert result.error is not None
        assert result.error.code == "E3301"
        assert "`timeout` was sent to the tool; the option is `timeout_s`" in result.error.message
        plain = await app.call("lib.double", number=1, colour="red")
        assert plain.error is not None
        assert "option" not in plain.error.message


async def test_a_range_that_says_nothing_is_refused(home: Path) -> None:
    async with Interlock.open(home) as app:
        await app.add(double)
        for answered in (
            await app.call("lib.double@", number=1),
            (await app.batch([app.request("lib.double@", {"number": 1})]))[0],
        ):
            assert answered.error is not None
            assert answered.error.code == "E3004"
            assert "is not a version or range" in answered.error.message
