"""Tools of MCP servers (Model Context Protocol): programs that speak over stdin and stdout, or servers behind HTTP.

A server is asked once for its tools, when the run checks what it needs. Each becomes an `McpTool`. All environments of
a process share one connection to a server, and one program: it is started in the process of an `McpClient`
(mcp_client.py), which ends with the run.

That a server dies, hangs or answers nothing that can be read is a `Fault`. A result that the server marks as an error
is a mistake of the policy, which reads it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import logging
import os
import pathlib
import re
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any

from ragen_jax.envs.dataset.mcp_calls import Connection, McpCalls, Outcome
from ragen_jax.envs.dataset.tools import Tool, WrongArguments, cut
from ragen_jax.envs.options import LEAST_MEMORY_MIB, check_integer, check_seconds, check_text, check_whole_number
from ragen_jax.envs.outside.images import read_text
from ragen_jax.utils.errors import did_you_mean, one_line, short
from ragen_jax.utils.retry import pause_s
from ragen_jax.utils.threads import Fault
from ragen_jax.utils.workers import Worker

_log = logging.getLogger(__name__)

PREFIX = 'mcp:'  # of servers in `tools`
SECTION = 'mcp'  # of `tool_options`
MOST_TOOLS = 32  # of all servers of an environment; each takes a line of the prompt and a metric
_PACKAGE = 'mcp'
_INSTALL = 'pip install -r requirements-data.txt'
_FACTORY = f'{pathlib.Path(__file__).with_name("mcp_client.py")}:McpClient'
_ALLOWED = f"'{PREFIX}COMMAND' or '{PREFIX}http://HOST:PORT/mcp'"
_LONGEST_NAME = 50  # characters; it is part of a metric
_LONGEST_HELP = 1000  # characters
_LARGEST_SCHEMA = 1 << 16  # characters
_LONGEST_WAIT_S = 30.0
_MOST_LATE = 3  # calls of a batch
_MOST_MEMORY_MIB = (1 << 30) - 1


@dataclasses.dataclass(frozen=True)
class McpSettings:
  """Options of MCP servers, the section `mcp` of `tool_options`.

  Attributes:
    names: the tools that the policy gets, by their names in calls; () for all.
    budget, timeout_s, max_chars: of each tool, see `Tool`; the tool's own section goes before.
    start_timeout_s: time limit of the start of a server and of the connection to it, in seconds.
    retries: repetitions of a call whose server has gone; it is started again before each.
    backoff_s: seconds before the first repetition, doubled before each further one, at most 30.
    workers: simultaneous calls of a server.
    memory_mib: memory that the program, and the client beside it, may each write to (on Linux); 0 for no limit.
    environment: names of variables that a program gets from the environment of the run, such as one with a key; it
      always gets HOME, PATH, TMPDIR and the like.
  """

  names: tuple[str, ...] = ()
  budget: int = 0
  timeout_s: float = 10.0
  max_chars: int = 4000
  start_timeout_s: float = 60.0
  retries: int = 2
  backoff_s: float = 0.5
  workers: int = 8
  memory_mib: int = 4096
  environment: tuple[str, ...] = ()

  def __post_init__(self):
    where = f'tool_options.{SECTION}'
    for option in ('names', 'environment'):
      values = getattr(self, option)
      if not isinstance(values, tuple | list) or not all(isinstance(x, str) and x for x in values):
        raise ValueError(f'{where}: {option}={one_line(values)}; allowed: a tuple of names')
      object.__setattr__(self, option, tuple(values))
    for option, least in (('retries', 0), ('workers', 1)):
      check_whole_number(where, option, getattr(self, option), least)
    for option in ('start_timeout_s', 'backoff_s'):
      check_seconds(where, option, getattr(self, option))
    if self.memory_mib != 0 or isinstance(self.memory_mib, bool):
      check_integer(where, 'memory_mib', self.memory_mib, LEAST_MEMORY_MIB, _MOST_MEMORY_MIB)
    _Limits(self.budget, self.timeout_s, self.max_chars)


class _Limits(Tool):
  """Checks the limits of all tools, where no tool is known yet."""

  name, help, schema = SECTION, '', {}

  def call(self, batch: Sequence[Mapping[str, Any]]) -> list[str | WrongArguments | Fault]:
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Listed:
  """A tool as a server lists it.

  Attributes:
    name: in calls: the server's name in snake case.
    sent: the server's name.
    help: one line: the description of the tool and of its arguments.
    schema: see `Tool`; not more of the server's schema than that.
  """

  name: str
  sent: str
  help: str
  schema: Mapping[str, Any]


class McpServer:
  """A connection to a server, which is made when it is needed, and again after the server has gone."""

  def __init__(self, spec: str, settings: McpSettings, worker: Connection | None = None):
    """Starts nothing.

    Args:
      spec: 'mcp:COMMAND' or 'mcp:ADDRESS'.
      worker: in place of a `Worker` with an `McpClient`.

    Raises:
      ValueError: `spec` is neither, or its address has a password.
    """
    self.spec, self._settings = spec, settings
    target = spec.removeprefix(PREFIX).strip()
    try:
      words = shlex.split(target)
    except ValueError as e:
      raise ValueError(f'tools={spec!r} is no command ({e}); allowed: {_ALLOWED}') from e
    if not words:
      raise ValueError(f'tools={spec!r}; allowed: {_ALLOWED}')
    self._is_address = target.startswith(('http://', 'https://'))
    if self._is_address and '@' in target.split('/')[2]:
      raise ValueError('tools: an MCP server has a user name or a password, which configs would show; allowed: none')
    self._target: str | list[str] = target if self._is_address else words
    how = (self._target, list(settings.environment))
    limits = {'memory_mib': settings.memory_mib, 'start_timeout_s': settings.start_timeout_s}
    self._is_given = worker is not None
    self._worker = worker if worker is not None else Worker(_FACTORY, how, name=spec, **limits)
    self._calls = McpCalls(self._worker, settings.workers)

  @functools.cached_property
  def tools(self) -> tuple[Listed, ...]:
    """The tools of the server, in its order; it is asked once.

    Raises:
      ValueError: a package, a program, a variable or the server is missing, or what it lists cannot be used.
    """
    if not self._is_given:
      self._check()
    raw, fault = self._worker.call('tools', timeout_s=self._settings.start_timeout_s)
    if fault is not None:
      raise ValueError(f'tools={self.spec!r}: the server does not list its tools ({fault}); allowed: an MCP server')
    if not isinstance(raw, list) or not raw:
      raise ValueError(f'tools={self.spec!r}: the server lists no tool ({short(raw)}); allowed: a server with tools')
    tools = tuple(_read_listed(self.spec, tool) for tool in raw)
    names = [tool.name for tool in tools]
    _log.info('%s has the tools %s', self.spec, ', '.join(names))
    return tools

  def _check(self) -> None:
    """Raises ValueError if what the connection needs on this machine is missing."""
    if importlib.util.find_spec(_PACKAGE) is None:
      raise ValueError(f'tools={self.spec!r} needs the package {_PACKAGE}, which is not installed: {_INSTALL}')
    if not self._is_address and shutil.which(self._target[0]) is None:
      raise ValueError(f'tools={self.spec!r}: there is no program {self._target[0]!r}; allowed: {_ALLOWED}')
    missing = [name for name in self._settings.environment if name not in os.environ]
    if missing and not self._is_address:
      raise ValueError(f'tool_options.{SECTION}: environment={missing[0]!r} is not set; allowed: variables of the run')

  def call(
    self, tool: Listed, batch: Sequence[Mapping[str, Any]], timeout_s: float
  ) -> list[str | WrongArguments | Fault]:
    """The results of calls of a tool, in order; the text of an error of the server is `WrongArguments`.

    Any thread may call; up to `workers` calls run at a time. A call that the server could not answer because it has
    gone is repeated, after a new start. A call that exceeded its limit is not: it is a fault, and the server is started
    again for the next call, because it may hang. After three such calls of a batch, its others are not made.
    """
    late: list[int] = []

    def result(arguments: Mapping[str, Any]) -> str | WrongArguments | Fault:
      if len(late) >= _MOST_LATE:
        return Fault(f'{tool.name} took longer than {timeout_s:g} s', 'not tried, because earlier calls took too long')
      outcome = self._outcome(tool.sent, arguments, timeout_s)
      late.extend([1] * (outcome.kind == 'late'))
      return _result_of(tool.name, outcome, timeout_s)

    if len(batch) < 2:
      return [result(arguments) for arguments in batch]
    with futures.ThreadPoolExecutor(min(len(batch), self._settings.workers), 'ragen_jax-mcp') as threads:
      return list(threads.map(result, batch))

  def _outcome(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> Outcome:
    """What a call comes to, after its repetitions."""
    s = self._settings
    for tried in range(s.retries + 1):
      if tried:
        time.sleep(pause_s(tried, s.backoff_s, _LONGEST_WAIT_S))
      outcome = self._calls.call(name, arguments, timeout_s)
      if outcome.kind != 'away':
        break
    return outcome

  def close(self) -> None:
    """Ends the connection, and the program; later calls are faults."""
    self._worker.close()


@functools.lru_cache(maxsize=16)
def shared_server(spec: str, settings: McpSettings) -> McpServer:
  """The server of a spec for all environments of this process whose settings are the same."""
  return McpServer(spec, settings)


@dataclasses.dataclass(frozen=True, eq=False)
class McpTool(Tool):
  """A tool of an MCP server.

  Attributes:
    server: the connection.
    listed: the tool.
    help: one line about the tool; '' for what the server says.
  """

  server: McpServer | None = None
  listed: Listed | None = None
  help: str = ''

  def __post_init__(self):
    super().__post_init__()
    text = check_text(self.where, 'help', self.help)
    object.__setattr__(self, 'help', ' '.join(text.split()) or self.listed.help)

  @property
  def name(self) -> str:
    """See `Listed`."""
    return self.listed.name

  @property
  def schema(self) -> Mapping[str, Any]:
    """See `Listed`."""
    return self.listed.schema

  def call(self, batch: Sequence[Mapping[str, Any]]) -> list[str | WrongArguments | Fault]:
    return self.server.call(self.listed, batch, self.timeout_s)


def select_tools(servers: Sequence[McpServer], names: Sequence[str]) -> list[tuple[McpServer, Listed]]:
  """The tools of servers, or those with the given names, in this order.

  Raises ValueError if a name is not listed, two servers list it, or there are too many tools.
  """
  found = [(server, tool) for server in servers for tool in server.tools]
  known = [tool.name for _, tool in found]
  for name in names:
    if name not in known:
      hint = did_you_mean(name, known)
      raise ValueError(f'tool_options.{SECTION}: names={one_line(name)}; {hint}allowed: {", ".join(known)}')
  chosen = [(server, tool) for server, tool in found if not names or tool.name in names]
  if len(chosen) > MOST_TOOLS:
    raise ValueError(
      f'tool_options.{SECTION}: names={tuple(names)!r} leaves {len(chosen)} tools; allowed: at most {MOST_TOOLS}, '
      f'chosen by their names, such as {known[0]!r}'
    )
  return sorted(chosen, key=lambda pair: list(names).index(pair[1].name)) if names else chosen


# -- what servers send -------------------------------------------------------------------------------------------------


def _read_listed(spec: str, raw: Any) -> Listed:
  """A tool from what a server lists; raises ValueError if that is no tool."""
  sent, description, schema = (
    (raw.get('name'), raw.get('description'), raw.get('schema')) if isinstance(raw, dict) else (None, None, None)
  )
  if not isinstance(sent, str) or not isinstance(description, str) or not isinstance(schema, dict):
    raise ValueError(f'tools={spec!r}: the server lists what is no tool: {short(raw)}')
  name = re.sub(r'[^a-z0-9]+', '_', re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', sent).lower()).strip('_')
  if not re.fullmatch(rf'[a-z][a-z0-9_]{{0,{_LONGEST_NAME - 1}}}', name) or name == SECTION:
    raise ValueError(
      f'tools={spec!r}: the server lists the tool {short(sent)}; allowed: names that begin with a letter, of at most '
      f'{_LONGEST_NAME} characters, and not {SECTION!r}'
    )
  size = len(json.dumps(schema, default=repr))
  if size > _LARGEST_SCHEMA:
    raise ValueError(f'tools={spec!r}: the schema of {name} has {size} characters; allowed: at most {_LARGEST_SCHEMA}')
  properties = schema.get('properties', {})
  if not isinstance(properties, dict) or not all(isinstance(x, dict | bool) for x in properties.values()):
    raise ValueError(f'tools={spec!r}: the schema of {name} has no properties that can be read: {short(properties)}')
  required = schema.get('required', [])
  reduced = {
    'type': 'object',
    'properties': {field: _kind_of(kind) for field, kind in properties.items()},
    'required': [field for field in required if field in properties] if isinstance(required, list) else [],
    'additionalProperties': False,
  }
  told = description.strip().split('\n\n')[0]
  about = [(field, kind.get('description')) for field, kind in properties.items() if isinstance(kind, dict)]
  about = [f'{field}: {text.strip().rstrip(".")}' for field, text in about if isinstance(text, str) and text.strip()]
  text = (told or f'calls {sent}') + (f' ({"; ".join(about)})' if about else '')
  checked = read_text(text)
  if isinstance(checked, Fault):
    raise ValueError(f'tools={spec!r}: the description of {name}: {checked}')
  return Listed(name, sent, cut(' '.join(checked.split()), _LONGEST_HELP), reduced)


def _kind_of(kind: Any) -> dict[str, Any]:
  """What a call must meet of the schema of a property: a type and an `enum` if it has them, else nothing."""
  if not isinstance(kind, dict):
    return {}
  for words in ('anyOf', 'oneOf'):
    others = [x for x in kind[words] if x != {'type': 'null'}] if isinstance(kind.get(words), list) else []
    if len(others) == 1:  # a property that may be left out
      return _kind_of(others[0])
  name, choices = kind.get('type'), kind.get('enum')
  if isinstance(name, list):
    names = [x for x in name if x != 'null']
    name = names[0] if len(names) == 1 else None
  found = {'type': name} if name in ('string', 'integer', 'number', 'boolean', 'array', 'object') else {}
  return found | ({'enum': choices} if isinstance(choices, list) and choices else {})


def _result_of(name: str, outcome: Outcome, timeout_s: float) -> str | WrongArguments | Fault:
  """What a call came to."""
  kind, text = outcome
  if kind in ('text', 'mistake'):
    checked = read_text(text)
    if isinstance(checked, Fault):
      return Fault(f'{name} returned no usable text', str(checked))
    if kind == 'mistake':
      return WrongArguments(checked if checked.strip() else f'{name} answers that this call is wrong.')
    return f'{name}: {checked}' if checked.strip() else f'{name} returned an empty text.'
  if kind == 'late':
    return Fault(f'{name} took longer than {timeout_s:g} s', hung=True)
  return Fault(f'{name} got no answer' if kind == 'away' else f'{name} returned no usable result', text)
