"""Has a fresh interpreter open its stores where the run keeps them (`tests/support/postgres.py`).

Python loads this module when it starts, because its directory is in PYTHONPATH of a run with `--store postgres`.
Nothing else is loaded before the program looks for a store.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_LOOKS_FOR_STORES = "interlock.store.homes"
_ROOT = str(Path(__file__).parents[3])


class _Finder(MetaPathFinder):
    """Finds one module, and changes it once it has been loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _LOOKS_FOR_STORES:
            return None
        sys.meta_path.remove(self)
        found = PathFinder.find_spec(name, path)
        assert found is not None
        assert found.loader is not None
        load = found.loader.exec_module

        def loaded(module: ModuleType) -> None:
            load(module)
            if "tests" in sys.modules:
                return  # a process of the tests, which does so itself
            sys.path.append(_ROOT)
            from tests.support import postgres

            sys.path.remove(_ROOT)
            postgres.use(os.environ)

        found.loader.exec_module = loaded
        return found


sys.meta_path.insert(0, _Finder())
