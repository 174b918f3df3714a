"""A tool that makes requests from within the sandbox. A module of its own: its text is sent inside."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Annotated

from interlock import Field

Url = Annotated[str, Field(description="what to fetch", examples=["http://localhost/"])]
Times = Annotated[int, Field(description="how often", examples=[1])]
Password = Annotated[str, Field(description="a password", examples=["x"])]


def reach(url: Url, times: Times = 1, password: Password = "") -> list[int]:
    """Fetch something through whatever proxy there is; the statuses of the answers."""
    statuses: list[int] = []
    for _ in range(times):
        asked = urllib.request.Request(url, headers={"x-password": password, "authorization": f"Bearer {password}"})
        try:
            with urllib.request.urlopen(asked, timeout=300) as response:
                response.read()
                statuses.append(response.status)
        except urllib.error.HTTPError as error:
            statuses.append(error.code)
    return statuses
