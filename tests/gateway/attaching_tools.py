"""A sandboxed tool that hands out more than its value."""

from __future__ import annotations

from typing import Annotated

from interlock import Context, Field, tool


@tool(version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=True, timeout_s=60)
async def traced(ctx: Context) -> dict[str, str]:
    """Tell under which trace it runs."""
    return {**ctx.trace_headers, "trace_id": ctx.trace_id}


@tool(version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=True, timeout_s=60, scopes=["cases:read"])
async def attaches(ctx: Context, how: Annotated[str, Field(description="how", examples=["well"])]) -> str:
    """Add content, views and a handoff; or try what is not allowed, behind the back of the context."""
    if how == "scope":
        ctx.attaching().handoffs.append(
            {"what": {"a": 1}, "to": {"tool": "x.y"}, "authority": {"scopes": ["tools:admin"]}, "expires_s": 5}
        )
    elif how == "forged":
        ctx.attaching().content.append({"type": "persisted_ref", "ref": "payload:of-somebody-else"})
    elif how == "base64":
        ctx.attaching().content.append({"type": "image", "mime_type": "image/png", "data": "no!"})
    elif how == "confidence":
        ctx.attaching().provenance["confidence"] = 7
    elif how == "version":
        ctx.attaching().provenance["data_version"] = {"a": 1}
    elif how == "fact":
        ctx.attaching().provenance["other"] = 1
    else:
        ctx.provenance(data_version="rows-7", confidence=0.25)
        ctx.attach("image", mime_type="image/png", data=b"a picture")
        ctx.attach("log", text="made it")
        ctx.show(model="short")
        ctx.handoff({"case": 1}, tool="x.y", scopes=["cases:read"])
    return "the value"
