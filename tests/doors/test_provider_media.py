"""Images and files in what a model is told, its mistakes, and the model providers' own libraries on both ends."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp.server import MCPServer

from interlock import Context, tool
from interlock.upstreams.formats import Provider
from tests import sample
from tests.support.calls import admit
from tests.support.mcp import serving
from tests.support.mcp_servers.real import environment
from tests.support.providers import PROVIDERS, asked, declared, name_of
from tests.support.rest import World, refused
from tests.support.rest import world as world

Json = dict[str, Any]
EXEC_12 = pytest.mark.proves("EXEC-12")
SDKS = Path(__file__).with_name("provider_sdks.py")
# A picture of one pixel, and a document without pages.
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)
PDF = b"%PDF-1.4\n%%EOF\n"
IMAGE, PAPER, SOUND = (base64.b64encode(one).decode() for one in (PNG, PDF, b"RIFF"))


@tool(version="1.0.0", mutation_class="read_only", namespace="demo")
async def gallery(ctx: Context) -> int:
    """Show a picture, a document, a recording and a table."""
    ctx.attach("image", mime_type="image/png", data=PNG)
    ctx.attach("embedded_resource", uri="file:///paper.pdf", mime_type="application/pdf", blob=PDF)
    ctx.attach("audio", mime_type="audio/wav", data=b"RIFF")
    ctx.attach("embedded_resource", uri="file:///table.csv", mime_type="text/csv", blob=b"a,b\n1,2\n")
    return 4


@pytest.fixture(scope="module")
def sdks() -> str:
    return str(environment("providers") / "bin" / "python")


async def told(world: World, call: Json, **more: Any) -> Json:
    answer = await world.post("/v1/tools/calls", {"call": call, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def shown(answer: Json) -> tuple[str, list[Json]]:
    """The texts of an answer, and its native content."""
    message, parts = answer["message"], []
    if message.get("role") == "tool":
        parts = [
            {"type": "text", "text": message["content"]},
            *(one for m in answer["follow_up"] for one in m["content"]),
        ]
    elif "functionResponse" in message:
        response = message["functionResponse"]
        texts = [response["response"].get("error") or response["response"].get("output")]
        parts = [{"text": str(one)} for one in (*texts, *response["response"].get("content", ()))]
        parts += response.get("parts", [])
    else:
        said = message.get("output", message.get("content"))
        parts = [{"text": said}] if isinstance(said, str) else said
    return "\n".join(one["text"] for one in parts if "text" in one), [one for one in parts if "text" not in one]


@EXEC_12
@pytest.mark.parametrize("provider", PROVIDERS)
async def test_images_and_documents_are_native_content_and_other_media_are_named(
    world: World, provider: Provider
) -> None:
    await admit(world.app, gallery)
    text, media = shown(await told(world, asked(provider, "demo__gallery", {})))
    assert "4" in text
    assert "audio/wav" in text
    assert "a,b\n1,2" in text
    assert SOUND not in text
    assert (
        media
        == {
            "openai-chat": [
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}},
                {
                    "type": "file",
                    "file": {"filename": "paper.pdf", "file_data": f"data:application/pdf;base64,{PAPER}"},
                },
            ],
            "openai-responses": [
                {"type": "input_image", "image_url": f"data:image/png;base64,{IMAGE}", "detail": "auto"},
                {"type": "input_file", "filename": "paper.pdf", "file_data": f"data:application/pdf;base64,{PAPER}"},
            ],
            "anthropic": [
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}},
                {
                    "type": "document",
                    "source": {"type": "base64", "media_type": "application/pdf", "data": PAPER},
                    "title": "paper.pdf",
                },
            ],
            "gemini": [
                {"inlineData": {"mimeType": "image/png", "data": IMAGE}},
                {"inlineData": {"mimeType": "application/pdf", "data": PAPER}},
            ],
        }[provider]
    )


@EXEC_12
async def test_an_image_of_an_mcp_server_is_shown_however_large_and_its_text_is_read_as_text(world: World) -> None:
    server = MCPServer("camera")
    large = base64.b64encode(PNG * 1000).decode()

    @server.tool(annotations=types.ToolAnnotations(read_only_hint=True))
    def take() -> list[types.ContentBlock]:
        """Take a picture."""
        return [types.TextContent(text="a garden"), types.ImageContent(data=large, mime_type="image/png")]

    app = server.streamable_http_app()
    async with server.session_manager.run(), serving(app) as port:
        config = {"url": f"http://127.0.0.1:{port}/mcp", "allow_private": True, "accept_hints": True}
        report = await world.app.upstreams.add("camera", "mcp", config, by=world.app.caller)
        assert report.count("admitted") == 1, report
        answer = await told(world, asked("anthropic", "camera__take", {}))
    text, (image,) = shown(answer)
    assert text.startswith("a garden")
    assert image["source"]["data"] == large


@EXEC_12
@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_model_is_told_its_mistakes_and_they_are_on_record(world: World, provider: Provider) -> None:
    answer = await told(world, asked(provider, "demo__ad", {}))
    text, _ = shown(answer)
    assert (answer["state"], "no tool is called `demo__ad`; did you mean `demo__add`?" in text) == ("failed", True)
    record = world.records("closed")[-1]
    assert (record["call"], record["error_code"]) == (answer["invocation_id"], "E3101")
    assert record["native"]["function_name"] == "demo__ad"
    if provider.startswith("openai"):  # the others parse what the model wrote
        for written, why in (('{"a": 2,', "not JSON"), ("[2, 3]", "a list"), ('"2"', "a text")):
            call = asked(provider, "demo__add", {})
            call.get("function", call)["arguments"] = written
            text, _ = shown(await told(world, call))
            assert why in text, text
            assert "send one JSON object" in text
            assert world.records("closed")[-1]["error_code"] == "E3301"
    assert sample.world.runs == 0


@EXEC_12
async def test_a_call_of_gemini_without_an_id_is_made_and_a_write_takes_the_key_of_its_sender(world: World) -> None:
    read = {"functionCall": {"name": "demo__add", "args": {"a": 2, "b": 3}}}
    response = (await told(world, read))["message"]["functionResponse"]
    assert response == {"name": "demo__add", "response": {"output": 5}}
    write = {"functionCall": {"name": "demo__increment", "args": {"name": "gemini"}}}
    without = await told(world, write)
    assert "key" in without["message"]["functionResponse"]["response"]["error"]
    for _ in range(2):
        made = await told(world, write, idempotency_key="turn-3/0")
        assert made["state"] == "succeeded", made
    assert sample.world.counters["gemini"] == 1
    refused(await world.post("/v1/tools/calls", {"call": {"functionCall": {"args": {}}}}), 400, "E3004")


@EXEC_12
async def test_the_providers_own_libraries_make_the_calls_and_take_the_tools_and_messages(
    world: World, sdks: str
) -> None:
    await admit(world.app, gallery)
    config: Json = {
        "declarations": [declared("anthropic", "get-user", {"type": "object"})],
        "urls": ["http://192.0.2.1"],
    }
    overlay: Json = {"tools": {"get-user": {"result_schema": {}}}}
    await world.app.upstreams.add("fns", "functions", config, by=world.app.caller, overlay=overlay)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sdks, str(SDKS), stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    calls = json.loads(await process.stdout.readline())
    made: Json = {}
    for provider in PROVIDERS:
        messages: list[Json] = []
        wrong = asked(provider, "demo__add", {"a": "many"})
        for call in (*calls[provider], asked(provider, "demo__gallery", {}), asked(provider, "nothing", {}), wrong):
            answer = await told(world, call)
            messages += [answer["message"], *answer["follow_up"]]
        assert "5" in json.dumps(messages[0])
        tools: list[Json] = []
        for strict in ("true", "false"):
            tools += (await world.get("/v1/tools/declarations", provider=provider, strict=strict)).json()["tools"]
        assert "fns__get-user" in {name_of(one) for one in tools}, "a name that is legal everywhere is kept"
        made[provider] = {"tools": tools, "messages": messages}
    _, err = await process.communicate(json.dumps(made).encode())
    assert process.returncode == 0, err.decode()
