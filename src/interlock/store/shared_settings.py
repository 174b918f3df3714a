"""Settings that all machines on a store share: which they are, their faults, and what a machine makes of them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any

import pydantic

from interlock.core.errors import Failure
from interlock.default_settings import Effective
from interlock.settings import Settings, credential_faults, fault_words, line_of

# Settings of one machine: where things are there, and what it logs. All others are the same on all machines of a store.
OF_A_MACHINE = frozenset(
    {
        "store", "store_admin", "shared_config", "backup_to", "policy_token_file", "vault_token_file", "otlp_endpoint",
        "log_format", "log_level", "housekeeping",
    }
)  # fmt: skip
_CORRECT = "remove it here, or change it for all machines: interlock config push"
_MOST = 5


def common_of(text: str) -> dict[str, Any]:
    """The settings of a text that all machines have to share."""
    return {name: one for name, one in tomllib.loads(text).items() if name not in OF_A_MACHINE}


def shared_faults(text: str) -> list[str]:
    """The faults of a text as the settings of all machines, each with its line."""
    try:
        common = common_of(text)
    except tomllib.TOMLDecodeError as error:
        return [str(error).splitlines()[0]]
    lines = text.splitlines()
    faults = [f"line {line_of(lines, loc)}: {words}" for loc, words in credential_faults(common)]
    try:
        Settings.model_validate_json(json.dumps(common, default=str), strict=True)
    except pydantic.ValidationError as error:
        faults += [
            f"line {line_of(lines, fault['loc'])}: {fault_words(fault['type'], fault['loc'], fault['msg'])}"
            for fault in error.errors(include_url=False, include_input=False, include_context=False)
        ]
    return faults


def with_shared(here: Effective, source: str, text: str, given: Mapping[str, Any]) -> Effective:
    """The settings that all machines share, with those of this machine, and what the program was given.

    E3108 for a setting that is stated here in another way.
    """
    common = common_of(text)
    own = {name: getattr(here.settings, name) for name in here.sources if name in OF_A_MACHINE}
    try:
        settings = Settings.model_validate({**common, **own, **given})
    except pydantic.ValidationError as error:
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        words = f"{source}: {fault_words(fault['type'], fault['loc'], fault['msg'])}"
        raise Failure("E3108", words, resolution=_CORRECT) from None
    faults = [
        f"{place}: `{name}` is not what all machines share ({source})"
        for name, place in here.sources.items()
        if name not in OF_A_MACHINE and name not in given and getattr(here.settings, name) != getattr(settings, name)
    ]
    if faults:
        raise Failure("E3108", "; ".join(faults[:_MOST]), details={"faults": faults}, resolution=_CORRECT)
    own_sources = {name: place for name, place in here.sources.items() if name in own or name in given}
    return Effective(settings, {**dict.fromkeys(common, source), **own_sources})
