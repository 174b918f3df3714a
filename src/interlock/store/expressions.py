"""SQL expressions that databases write in different ways. These are SQLite's.

Repositories take such expressions from here; everything else in their statements is common to SQLite and PostgreSQL.
For PostgreSQL they are translated (`postgres.dialect`), or functions of its schema have their names. The arguments are
names of columns and constants of the program, never values of a caller.
"""

from __future__ import annotations


def member(column: str, path: str) -> str:
    """A member of the JSON object in a binary column. `path` is one name, or several with dots between."""
    return f"json_extract(CAST({column} AS TEXT), '$.{path}')"


def amount(column: str, path: str) -> str:
    """The same for a number, to reckon with."""
    return f"({member(column, path)} + 0)"


def last_element(column: str, name: str) -> str:
    """The last element of a list, which is a member of the JSON object in a binary column."""
    return f"json_extract(CAST({column} AS TEXT), '$.{name}[#-1]')"


def contains(column: str, text: str = "?") -> str:
    """A condition: a binary column contains a text; by default, a binary parameter."""
    return f"instr({column}, {text if text == '?' else _binary(text)}) > 0"


def text_contains(column: str, text: str) -> str:
    """A condition: a column of text contains a text."""
    return f"instr({column}, {_quoted(text)}) > 0"


def after_dot(column: str) -> str:
    """The part of a text behind its first dot. The indexes on bare names of tools are on this expression."""
    return f"substr({column}, instr({column}, '.') + 1)"


def hex_digits(expression: str) -> str:
    """A binary value as hexadecimal digits in lower case."""
    return f"lower(hex({expression}))"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _binary(text: str) -> str:
    return f"CAST({_quoted(text)} AS BLOB)"
