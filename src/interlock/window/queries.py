"""JMESPath over results, with a bound on the work.

An expression of a few characters can ask for more than memory holds: `[@,@]` repeated fifty times has 2^50 values when
it is written. So every step is counted, and so is the size of what a function, a comparison or the end looks at.
"""

from __future__ import annotations

from typing import Any, Final, cast

from jmespath import exceptions, parser, visitor

from interlock.core.errors import Failure

LONGEST: Final = 1000
MOST_STEPS: Final = 1_000_000
# Characters of text that count as one step.
_CHARACTERS: Final = 16
_Interpreter: Any = cast("Any", visitor).TreeInterpreter
_COSTLY: Final = frozenset({"flatten", "projection", "filter_projection", "value_projection", "slice"})


def search(expression: str, value: Any) -> Any:
    """Evaluate an expression on a value; E3004 if it is malformed, does not fit the value or asks for too much."""
    if len(expression) > LONGEST:
        raise Failure("E3004", f"a JMESPath expression has at most {LONGEST:,} characters")
    try:
        tree: Any = cast("Any", parser).Parser().parse(expression).parsed
        interpreter = _Bounded()
        found = interpreter.visit(tree, value)
        interpreter.charge(found)
    except Failure:
        raise
    except cast("type[Exception]", cast("Any", exceptions).JMESPathError) as error:
        words = " ".join(str(error).split())[:300]
        raise Failure("E3004", f"the JMESPath expression cannot be used: {words}", resolution=_HELP) from None
    except (RecursionError, TypeError, ValueError, ArithmeticError):
        raise Failure("E3004", "the JMESPath expression cannot be used on this value", resolution=_HELP) from None
    return found


_HELP: Final = "see jmespath.org; for example: items[?price > `10`].name"


class _Bounded(_Interpreter):
    """An interpreter that stops after so many steps."""

    def __init__(self) -> None:
        _Interpreter.__init__(self)
        self._left = MOST_STEPS

    def visit(self, node: Any, *args: Any, **named: Any) -> Any:
        self._spend(1)
        made: Any = _Interpreter.visit(self, node, *args, **named)
        costly: object = made if node["type"] in _COSTLY else None
        if isinstance(costly, list):
            self._spend(len(cast("list[Any]", costly)))
        return made

    def visit_function_expression(self, node: Any, value: Any) -> Any:
        given = [self.visit(child, value) for child in node["children"]]
        self.charge(given)
        return cast("Any", self)._functions.call_function(node["value"], given)

    def visit_comparator(self, node: Any, value: Any) -> Any:
        sides = [self.visit(child, value) for child in node["children"]]
        self.charge(sides)
        compared = {"value": node["value"], "children": [{"type": "literal", "value": one} for one in sides]}
        return _Interpreter.visit_comparator(self, compared, value)

    def charge(self, value: Any) -> None:
        """Count every value inside a value, as often as it occurs."""
        waiting: list[Any] = [value]
        while waiting:
            one = waiting.pop()
            if isinstance(one, str):
                self._spend(1 + len(one) // _CHARACTERS)
            elif isinstance(one, dict | list):
                inner: Any = cast("dict[str, Any]", one).values() if isinstance(one, dict) else cast("list[Any]", one)
                self._spend(1 + len(inner))
                waiting.extend(inner)

    def _spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            words = "ask for less: a part of the result (at), or a narrower expression"
            raise Failure("E3004", "the JMESPath expression takes too many steps on this value", resolution=words)
