"""The client of an MCP server, in a process of its own: connects, lists tools and calls them.

`McpServer` (mcp_tools.py) starts the process. A server that is a program is a child of it and belongs to its process
group, so that both end together, and with the run. `Client` of the package `mcp` speaks with the server. Requests of
the server (sampling, elicitation, roots) are refused, as this client does by default.

This file is loaded by its path and imports only the package's `utils`, so that the process starts without JAX.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import anyio
import anyio.from_thread
import httpx2
import mcp
import mcp_types
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from ragen_jax.utils.errors import describe_error, one_line
from ragen_jax.utils.worker_link import last_words

# What `McpClient.exchange` says of a call. After `LATE` or `AWAY` the connection is of no use any more.
TEXT, MISTAKE, UNREADABLE, LATE, AWAY = 'text', 'mistake', 'unreadable', 'late', 'away'

_INHERITED = ('HOME', 'LANG', 'LOGNAME', 'PATH', 'PYTHONPATH', 'SHELL', 'TERM', 'TMPDIR', 'USER', 'VIRTUAL_ENV')
_LARGEST_LINE = 16 << 20  # bytes of a message of a program
_KEPT_OUTPUT = 1 << 14  # characters of the end of stderr
_GRACE_S = 1.0  # for a program to end after one of its pipes has been closed
_MOST_PAGES = 50  # of a list of tools
_CONNECT_S = 30.0  # also for sending a request
# Codes of JSON-RPC with which a server, or the client in its name, says that it is not in a state to answer. The last
# one stands for a session that has ended, where the server has an address; a program refuses a request with it.
_AWAY_CODES = (mcp_types.CONNECTION_CLOSED, mcp_types.INTERNAL_ERROR)
_AWAY_CODES_OF_ADDRESSES = (*_AWAY_CODES, mcp_types.INVALID_REQUEST)


class McpClient:
  """A connection to a server."""

  def __init__(self, server: str | Sequence[str], environment: Sequence[str]):
    """Connects, and starts the server first if it is a program.

    Args:
      server: address of the server, or the words of the command that starts it.
      environment: names of variables that the program gets from this process, beside the usual ones.

    Raises:
      ConnectionError: there is no connection; the message says why.
    """
    self._output = ''
    self._calls: dict[int, concurrent.futures.Future] = {}
    self._away_codes = _AWAY_CODES_OF_ADDRESSES if isinstance(server, str) else _AWAY_CODES
    if isinstance(server, str):
      transport = _http(server)
    else:
      names = (*_INHERITED, *environment)
      transport = self._program(list(server), {name: os.environ[name] for name in names if name in os.environ})
    with contextlib.ExitStack() as stack:
      self._portal = stack.enter_context(anyio.from_thread.start_blocking_portal())
      try:
        client = mcp.Client(transport, cache=None, client_info=mcp_types.Implementation(name='ragen-jax', version='0'))
        self._client = stack.enter_context(self._portal.wrap_async_context_manager(client))
      except Exception as e:
        raise ConnectionError(self._told(_reason(e))) from e
      self._open = stack.pop_all()

  def tools(self) -> list[dict[str, Any]]:
    """The tools of the server: name, description and schema of each, as the server gives them."""
    return self._portal.call(self._tools)

  def exchange(self, begin: Sequence[tuple], wait_s: float) -> list[tuple[int, str, str]]:
    """Begins calls, and waits a little for one to end.

    Args:
      begin: (number, name of the tool, arguments, time limit in seconds) of each call.

    Returns:
      For each call that has ended its number, its outcome and a text: the result, `TEXT`; an error that the arguments
      caused, `MISTAKE`; or why there is no result.
    """
    for number, *call in begin:
      self._calls[number] = self._portal.start_task_soon(self._call, *call)
    concurrent.futures.wait(self._calls.values(), wait_s, concurrent.futures.FIRST_COMPLETED)
    ended = [number for number, call in self._calls.items() if call.done()]
    return [(number, *self._calls.pop(number).result()) for number in ended]

  def close(self) -> None:
    """Ends the connection, and the server if it is a program."""
    self._open.close()

  async def _tools(self) -> list[dict[str, Any]]:
    found, cursor = [], None
    for _ in range(_MOST_PAGES):
      page = await self._client.list_tools(cursor=cursor)
      found += [{'name': t.name, 'description': t.description or '', 'schema': t.input_schema} for t in page.tools]
      cursor = page.next_cursor
      if cursor is None:
        return found
    raise ValueError(f'the list of tools has more than {_MOST_PAGES} pages')

  async def _call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> tuple[str, str]:
    try:
      with anyio.fail_after(timeout_s):
        result = await self._client.call_tool(name, dict(arguments))
    except TimeoutError:
      return LATE, ''
    except mcp.MCPError as e:
      if e.code == mcp_types.INVALID_PARAMS:
        return MISTAKE, e.message
      return (AWAY if e.code in self._away_codes else UNREADABLE), self._told(
        f'error {e.code}, {one_line(e.message, str)}'
      )
    except (OSError, anyio.ClosedResourceError, anyio.BrokenResourceError, httpx2.HTTPError) as e:
      return AWAY, self._told(_reason(e))
    except Exception as e:  # noqa: BLE001, a result that is not of the protocol, or not of the tool's own schema
      return UNREADABLE, _reason(e)
    return (MISTAKE if result.is_error else TEXT), _text_of(result)

  def _told(self, reason: str) -> str:
    """The reason, with the last words of the program."""
    return '; '.join(filter(None, [reason, last_words(self._output)]))

  @contextlib.asynccontextmanager
  async def _program(self, command: list[str], environment: Mapping[str, str]) -> AsyncIterator[tuple[Any, Any]]:
    """Starts a program, and exchanges messages with it: one in each line of its stdin and stdout.

    As `mcp.stdio_client`, but the program stays in the process group of this process.
    """
    process = await anyio.open_process(command, env=environment)
    received, incoming = anyio.create_memory_object_stream[Any](0)
    outgoing, sent = anyio.create_memory_object_stream[Any](0)
    all_heard = anyio.Event()

    async def read() -> None:
      line = bytearray()
      async with received:
        with contextlib.suppress(anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
          while len(line) <= _LARGEST_LINE:
            *ends, rest = (await process.stdout.receive()).split(b'\n')
            for end in ends:
              whole, line = bytes(line + end), bytearray()
              if whole.strip():
                await received.send(_message_of(whole))
            line += rest
        with anyio.move_on_after(_GRACE_S):  # before calls hear of the end: it may have said why
          await all_heard.wait()
          self._output += f'\nexit status {await process.wait()}'
      with contextlib.suppress(anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
        while True:  # a full pipe would hold the program
          await process.stdout.receive()

    async def write() -> None:
      async with sent:
        with contextlib.suppress(OSError, anyio.ClosedResourceError, anyio.BrokenResourceError):
          async for message in sent:
            await process.stdin.send(
              message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b'\n'
            )

    async def listen() -> None:
      with contextlib.suppress(anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
        while True:
          part = (await process.stderr.receive()).decode(errors='replace')
          self._output = (self._output + part)[-_KEPT_OUTPUT:]
      all_heard.set()

    async with anyio.create_task_group() as tasks:
      for task in (read, write, listen):
        tasks.start_soon(task)
      try:
        yield incoming, outgoing
      finally:
        with anyio.CancelScope(shield=True):
          await process.stdin.aclose()
          with anyio.move_on_after(_GRACE_S):
            await process.wait()
          if process.returncode is None:
            process.kill()
            with anyio.move_on_after(_GRACE_S):  # a child of it may hold its pipes
              await process.wait()
        tasks.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def _http(url: str) -> AsyncIterator[tuple[Any, Any]]:
  """A connection to a server behind an address, without the proxies of the environment."""
  limits = httpx2.Timeout(_CONNECT_S, read=None)  # a call has its own limit
  async with (
    httpx2.AsyncClient(trust_env=False, timeout=limits) as client,
    streamable_http_client(url, http_client=client) as streams,
  ):
    yield streams


def _message_of(line: bytes) -> SessionMessage | Exception:
  """The message in a line; an exception, which the client ignores, for a line that has none, such as a greeting."""
  try:
    return SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False))
  except ValueError as e:
    return e


def _text_of(result: mcp_types.CallToolResult) -> str:
  """The texts of a result in order, with a mark for each part that is none; '' if the result is empty."""
  parts = list(map(_text_of_part, result.content))
  if not parts and result.structured_content is not None:
    return json.dumps(result.structured_content, ensure_ascii=False)
  return '\n'.join(parts)


def _text_of_part(part: Any) -> str:
  if isinstance(part, mcp_types.TextContent):
    return part.text
  text = getattr(getattr(part, 'resource', None), 'text', None)
  return text if isinstance(text, str) else f'[{re.sub("_", " ", part.type)}]'


def _reason(error: BaseException) -> str:
  """What went wrong, in one line: the first errors of a group, which tasks raise together."""
  return '; '.join(dict.fromkeys(map(describe_error, list(_errors(error))[:3])))


def _errors(error: BaseException) -> Iterator[BaseException]:
  if isinstance(error, BaseExceptionGroup):
    for inner in error.exceptions:
      yield from _errors(inner)
  else:
    yield error
