"""A server of tests, made with the official package: over stdin and stdout, or over HTTP at a given port."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated, Literal

from mcp.server import MCPServer
from pydantic import Field

server = MCPServer('tests')


@server.tool()
def add(a: Annotated[int, Field(description='the first number.')], b: int = 1, more: list[int] | None = None) -> str:
  """Adds numbers."""
  return str(a + b + sum(more or []))


@server.tool()
def forecast(city: str) -> str:
  """Tells the weather."""
  if city == 'Atlantis':
    raise ValueError('there is no such city')
  if city == 'Pompeii':
    os._exit(5)
  if city == 'Tartarus':
    time.sleep(60)
  return f'{os.getpid()} {os.getppid()}' if city == 'itself' else f'Sun in {city}.'


@server.tool(name='pick-One')
def pick(kind: Literal['red', 'blue']) -> str:
  """Picks a colour."""
  return kind.upper()


if __name__ == '__main__':
  if len(sys.argv) > 1:
    server.run('streamable-http', port=int(sys.argv[1]))
  else:
    server.run()
