"""The `principals.toml` of a new data directory, apart from the models that read such files.

Commands that read a data directory without opening it compare the file with this text: while nobody has changed it, the
local user holds every scope in it.
"""

from __future__ import annotations

from pathlib import Path

DEFAULT = """\
# Who callers are: kind, trust (0 to 100), groups and scopes. Policy rules and approvals read them.
# Groups and scopes of all matching entries add up; the first that says kind or trust decides it.

[[principal]]
id = "local:*"
kind = "human"
trust = 100
groups = ["approvers", "managers", "admins"]
scopes = [
  "audit:read", "calls:reconcile", "tools:admin", "tokens:issue", "secrets:admin", "policy:admin", "pii:read",
]
"""


def unchanged(principals: Path) -> bool:
    """Whether a file is still the default one."""
    try:
        return principals.read_text(encoding="utf-8") == DEFAULT
    except (OSError, UnicodeDecodeError):
        return False
