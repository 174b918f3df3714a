"""Compiles src/interlock/data/_walk.c when the package is built or installed for development.

Interlock is whole without it, and slower with large inputs. So where there is no compiler the build goes on and says
so, unless INTERLOCK_COMPILED=required asks for it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = [
    "-O2",
    "-fPIC",
    "-fno-strict-aliasing",
    "-fstack-protector-strong",
    "-Wall",
    "-Wextra",
    "-Wno-cast-function-type",
]


class CompileWalk(BuildHookInterface[Any]):
    """Puts the compiled module beside its source, and into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        source = Path(self.root, "src", "interlock", "data", "_walk.c")
        module = source.with_suffix(sysconfig.get_config_var("EXT_SUFFIX"))
        why = compile_module(source, module)
        if why is not None:
            if os.environ.get("INTERLOCK_COMPILED") == "required":
                raise SystemExit(f"{source.name} could not be compiled: {why}")
            self.app.display_warning(f"going on without {source.name}: {why}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"].append(str(module.relative_to(self.root)))


def compile_module(source: Path, module: Path) -> str | None:
    """Compile a module; why that could not be done, if it could not."""
    new = module.with_name(f"{module.name}.{os.getpid()}.so")
    # Python knows with which compiler it was built; the machine may have another.
    built_with = shlex.split(sysconfig.get_config_var("LDSHARED") or "cc -shared")
    words = "nothing was tried"
    for compiler in (built_with, ["cc", *built_with[1:]]):
        try:
            include = sysconfig.get_path("include")
            command = [*compiler, *FLAGS, f"-I{include}", str(source), "-o", str(new), "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")  # noqa: S603 - the machine's own
        except OSError as error:
            words = f"`{compiler[0]}`: {error.strerror}"
        except subprocess.CalledProcessError as error:
            words = error.stderr.strip().splitlines()[0] if error.stderr.strip() else f"`{compiler[0]}` failed"
        else:
            # A process may have the old one loaded.
            new.replace(module)
            return None
    for old in (new, module):  # one compiled from another source would be worse than none
        with contextlib.suppress(OSError):
            old.unlink()
    return words
