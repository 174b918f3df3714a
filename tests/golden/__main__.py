"""Write the golden files anew: `python -m tests.golden`."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from tests.golden.record import FILES, played


async def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        made = await played(Path(home))
    for old in FILES.glob("*.json"):
        old.unlink()
    for name, text in made.items():
        (FILES / f"{name}.json").write_text(text)
    print(f"{len(made)} files in {FILES}")


asyncio.run(main())
