"""`phalanx mcp`: the questions as tools of a Model Context Protocol server, over stdio or HTTP on loopback."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

from phalanx.cli.command import command_with_progress
from phalanx.cli.terminal import announce

_SIDE_BY_SIDE = 2
"""The most calls that run at once; others wait."""
_INSTRUCTIONS = """Phalanx computes how to train a model, and what that takes: the fastest layout, time, memory.
Ask `plan` for a layout, `predict` for a given one or a training script (a file in this server's folder), `lint` and
`improve` for what is wrong with a script. Name models and clusters as `models` and `clusters` list them, or by a
config.json or TOML file. Times have an interval (step_time_low_s, step_time_high_s), prices caveats: repeat them. An
error names the field and the remedy: correct the argument and call again."""


@command_with_progress
def mcp(folder: Path = Path(), limit: float = 60.0, http: int | None = None) -> None:
    """Serve the questions as tools for agents (Model Context Protocol), until the client leaves.

    --folder DIR: The only folder whose files tools read.
    --limit SECONDS: Longest that a call may take.
    --http PORT: Serve HTTP on 127.0.0.1, not stdio.
    """
    from phalanx.spec.errors import InputError

    if not folder.is_dir():
        raise InputError("folder", str(folder), "is no folder", "name the one with your configurations")
    if not 0 < limit < float("inf"):
        raise InputError("limit", limit, "is not a time", "write seconds, e.g. 60")
    if http is not None and not 0 < http < 65536:
        raise InputError("http", http, "is no port", "e.g. 8765")
    from phalanx.cli.agents.tool_calls import warm

    threading.Thread(target=warm, daemon=True).start()  # while the SDK is imported
    try:
        from mcp.server.stdio import stdio_server
    except ModuleNotFoundError as error:
        if error.name != "mcp":
            raise
        raise InputError("mcp", None, "the SDK is not installed", 'pip install "phalanx[mcp]"') from None
    served = server(folder.resolve(), limit)
    if http is not None:
        import uvicorn

        announce(f"tools at http://127.0.0.1:{http}/mcp, files of {folder.resolve()}")
        uvicorn.run(served.streamable_http_app(), host="127.0.0.1", port=http, log_level="warning")
        return

    async def over_stdio() -> None:
        async with stdio_server() as (incoming, outgoing):
            await served.run(incoming, outgoing, served.create_initialization_options())

    asyncio.run(over_stdio())


def server(folder: Path, limit_s: float) -> Any:
    """Return the server whose tools read the files of a folder."""
    import mcp_types as types
    from mcp.server.lowlevel import Server

    from phalanx import __version__
    from phalanx.cli.agents import tool_calls
    from phalanx.spec.errors import InputError, nearest

    turns = asyncio.Semaphore(_SIDE_BY_SIDE)

    def failed(line: str) -> types.CallToolResult:
        return types.CallToolResult(
            content=[types.TextContent(text=line)], structured_content={"error": line}, is_error=True
        )

    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        read_only = types.ToolAnnotations(read_only_hint=True)
        return types.ListToolsResult(
            tools=[
                types.Tool(name=t.name, description=t.about, input_schema=tool_calls.schema(t), annotations=read_only)
                for t in tool_calls.TOOLS.values()
            ]
        )

    async def call_tool(context: Any, params: Any) -> types.CallToolResult:
        tool = tool_calls.TOOLS.get(params.name)
        try:
            if tool is None:
                remedy = nearest(params.name, tool_calls.TOOLS)
                raise InputError("tool", params.name, "is no tool of this server", remedy)
            words = tool_calls.words_of(tool, params.arguments or {})
        except InputError as error:
            return failed(f"error: {error}")

        async def on_note(count: int, line: str) -> None:
            if context.meta and "progress_token" in context.meta:
                await context.session.report_progress(float(count), None, line)

        async with turns:
            answer = await _called(words, folder, limit_s, on_note)
        if answer.error:
            return failed(answer.error)
        data = answer.data if isinstance(answer.data, dict) else {"rows": answer.data}
        if answer.notes:
            data = {"notes": list(answer.notes), **data}
        return types.CallToolResult(content=[types.TextContent(text=json.dumps(data))], structured_content=data)

    async def list_resources(context: Any, params: Any) -> types.ListResourcesResult:
        return types.ListResourcesResult(
            resources=[
                types.Resource(name=name, uri=f"phalanx://{name}", description=tool_calls.TOOLS[name].about)
                for name in ("models", "clusters")
            ]
        )

    async def read_resource(context: Any, params: Any) -> types.ReadResourceResult:
        name = str(params.uri).removeprefix("phalanx://")
        if name not in ("models", "clusters"):
            raise ValueError(f"{params.uri} is no resource of this server")
        async with turns:
            answer = await _called(tool_calls.words_of(tool_calls.TOOLS[name], {}), folder, limit_s, None)
        text = json.dumps(answer.data)
        whole = types.TextResourceContents(uri=str(params.uri), mime_type="application/json", text=text)
        return types.ReadResourceResult(contents=[whole])

    return Server(
        "phalanx",
        version=__version__,
        instructions=_INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_read_resource=read_resource,
    )


async def _called(words: list[str], folder: Path, limit_s: float, on_note: Any) -> Any:
    """Run a command line in a process of its own; it ends with the call's cancellation, or after `limit_s`."""
    from phalanx.cli.agents.tool_calls import Reply, ToolCall, reply

    loop = asyncio.get_running_loop()
    notes: list[str] = []
    call = await asyncio.to_thread(ToolCall, words, folder)
    try:
        ends = loop.time() + limit_s
        while True:
            if not call.pipe.poll():
                if loop.time() > ends:
                    remedy = "ask for fewer GPUs, or narrow it with `where`"
                    return Reply(None, f"error: the question takes more than {limit_s:g} s; {remedy}", tuple(notes))
                await asyncio.sleep(0.02)
                continue
            try:
                kind, value = call.pipe.recv()
            except EOFError:
                return Reply(None, "error: the call ended without an answer; ask a smaller question", tuple(notes))
            if kind == "answer":
                code, printed = value
                return reply(code, printed, notes)
            notes.append(value)
            if on_note is not None and not value.startswith("error:"):
                await on_note(len(notes), value)
    finally:
        await asyncio.to_thread(call.stop)
