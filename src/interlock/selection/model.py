"""A model behind an OpenAI-compatible endpoint that chooses a tool and its parameters.

The request and the declarations of the candidates are sent to it. Its answer is bounded and typed here, and checked
against the candidates by `stages.checked_choice` before anything else looks at it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import orjson

from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.net.outgoing import Outgoing, Unanswered

MOST_ANSWER: Final = 256 * 1024
TIMEOUT_S: Final = 30.0
_WORDS: Final = (
    "Choose the one tool that does what the user asks, and call it. Take parameters from the request alone. If no tool"
    " fits, answer without calling one."
)

Key = Callable[[], Awaitable[str | None]]


class ModelSelector:
    """Chooses by `POST /v1/chat/completions` with the candidates as tools."""

    def __init__(self, setting: str, key: Key) -> None:
        model, _, url = setting.removeprefix("openai:").rpartition("@")
        base = url.rstrip("/")
        self._model, self._key = model, key
        self._url = f"{base}/chat/completions" if base.endswith("/v1") else f"{base}/v1/chat/completions"
        self._client = Outgoing("any" if url.startswith("https:") else "private", connections=4)

    async def __call__(self, request: str, tools: Sequence[Json]) -> Json:
        """The choice of the model: {"tool": NAME or None, "parameters": {…}}; E3502 where there is none."""
        headers = {"content-type": "application/json", "accept": "application/json"}
        key = await self._key()
        if key:
            headers["authorization"] = f"Bearer {key}"
        # Names of tools have no dots there.
        names = {f"t{place}_{one['name'].replace('.', '_')}"[:64]: str(one["name"]) for place, one in enumerate(tools)}
        declared = [
            {
                "type": "function",
                "function": {"name": name, "description": one["description"], "parameters": one["parameters"]},
            }
            for name, one in zip(names, tools, strict=True)
        ]
        messages = [{"role": "system", "content": _WORDS}, {"role": "user", "content": request}]
        body = orjson.dumps({"model": self._model, "messages": messages, "tools": declared, "temperature": 0})
        try:
            answer = await self._client.ask(
                "POST", self._url, headers=headers, body=body, most=MOST_ANSWER, timeout_s=TIMEOUT_S
            )
        except Unanswered as silence:
            raise Failure("E3502", f"the model that selects tools does not answer ({silence.why})") from None
        if answer.status != 200:
            raise Failure("E3502", f"the model that selects tools answered with status {answer.status}")
        return _choice(answer.body, names)


def _choice(body: bytes, names: dict[str, str]) -> Json:
    """The first call of a tool in an answer; None as the tool where there is no call. E3004 for another form."""
    try:
        message: Any = orjson.loads(body)["choices"][0]["message"]
        called: Any = message.get("tool_calls")
        if not called:
            return {"tool": None, "parameters": {}}
        function: Any = called[0]["function"]
        name, parameters = function["name"], orjson.loads(function["arguments"] or "{}")
    except (orjson.JSONDecodeError, AttributeError, KeyError, IndexError, TypeError):
        raise Failure("E3004", "the answer of the model does not have the form of a chat completion") from None
    # A name that was not offered stays as it is, and is refused with the answer.
    return {"tool": names.get(name, name) if isinstance(name, str) else name, "parameters": parameters}
