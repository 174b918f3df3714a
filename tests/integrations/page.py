"""The functions that the how-to page defines, so that what people copy is what the tests run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "integrations.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def function(name: str) -> Any:
    """A function of the page. What it imports must be installed."""
    (block,) = [one for one in BLOCK.findall(PAGE.read_text()) if f"def {name}(" in one]
    names: dict[str, Any] = {}
    exec(f"from interlock.integrations import Toolkit\n{block}", names)
    return names[name]
