"""Plays tasks of a package of `verifiers`, in a process of its own that `Package` (verifiers.py) starts.

The rollouts run in an event loop beside the main thread, which takes orders and gives results. The package's model is
the policy behind the server of the run: each rollout has an address and a key of its own.

This file is loaded by its path and imports only the package's `utils`, so that the process needs no JAX.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import hashlib
import itertools
import json
import os
import sys
import threading
import time
import urllib.parse
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import openai
import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import is_context_overflow
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.utils.loaders import default_harness_id, harness_class, load_environment, resolve_env_config

from ragen_jax.utils.errors import one_line

__all__ = ['ChatHarness']

_CHAT = 'ragen_chat'  # the name under which the package finds `ChatHarness`
_SHELL = 'bash'  # the package's harness for tasksets without one: it gives the policy a shell
_SECRETS = ('RAGEN_ADMIN_KEY',)
_CLOSE_S = 3.0
_BEAT_S = 1.0  # between two signs of life of the event loop


class ChatHarness(vf.Harness[vf.HarnessConfig]):
  """A conversation in this process: the policy writes and its calls of tools are made, until a reply calls none."""

  APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
  EXECUTES_CODE = NEEDS_CONTAINER = False

  async def launch(
    self, ctx: vf.ModelContext, trace: vf.Trace, runtime: vf.Runtime, endpoint: str, secret: str,
    mcp_urls: dict[str, str], data: vf.TaskData,
  ) -> vf.ProgramResult:  # fmt: skip
    """See `verifiers.v1.Harness`. Ends with the conversation so far if the next prompt does not fit.

    A call of a tool may take `config.tool_timeout`, with the repetitions of the library, which would go on for minutes
    if the server of the tool has ended.
    """
    limit = self.config.tool_timeout
    system, prompt = self.resolve_prompt(data)
    messages = [{'role': 'system', 'content': system}] if system else []
    if isinstance(prompt, str):
      messages.append({'role': 'user', 'content': prompt})
    else:
      messages += [message_to_wire(message) for message in prompt or ()]
    servers = {name: {'url': url, 'timeout': limit} for name, url in mcp_urls.items()}
    async with contextlib.AsyncExitStack() as stack:
      policy = await stack.enter_async_context(openai.AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None))
      async with _at_most(limit, 'the list of tools', mcp_urls.values()):
        tools, origins, connections = await connect_mcp({'mcpServers': servers}, stack)
      with contextlib.suppress(_NoRoom):
        while calls := await _reply(policy, ctx.model, messages, tools):
          for call in calls:
            name = call.function.name
            async with _at_most(limit, f'the tool {name}', [mcp_urls[origins[name][0]]] if name in origins else ()):
              content = await _called(call, origins, connections)
            messages.append({'role': 'tool', 'tool_call_id': call.id, 'content': content})
    return vf.ProgramResult(exit_code=0, stdout='', stderr='')


@contextlib.asynccontextmanager
async def _at_most(limit_s: float, what: str, urls: Iterable[str]) -> AsyncIterator[None]:
  """Context manager: raises RuntimeError, which names `what`, if its block takes longer, or a server has ended.

  The library says of a TimeoutError that the whole conversation took too long, and calls servers that have ended for
  minutes.
  """
  gone = False

  async def watch(timer: asyncio.Timeout) -> None:
    nonlocal gone
    while not gone:
      await asyncio.sleep(_BEAT_S)
      gone = await _has_ended(urls)
    timer.reschedule(0.0)

  try:
    async with asyncio.timeout(limit_s) as timer:
      watcher = asyncio.create_task(watch(timer))
      try:
        yield
      finally:
        watcher.cancel()
  except TimeoutError as e:
    if not timer.expired():
      raise
    raise RuntimeError(f'{what}: its server has ended' if gone else f'{what} took longer than {limit_s:g} s') from e


async def _has_ended(urls: Iterable[str]) -> bool:
  """Whether a server does not listen any more."""
  for url in urls:
    address = urllib.parse.urlsplit(url)
    try:
      port = address.port or (80 if address.scheme == 'http' else 443)
      _, writer = await asyncio.open_connection(address.hostname, port)
    except ConnectionRefusedError:
      return True
    except OSError:  # it is far away, and the way to it may be broken
      continue
    writer.close()
  return False


class _NoRoom(Exception):
  """The conversation is as long as the policy's context."""


async def _reply(policy: openai.AsyncOpenAI, model: str, messages: list[dict], tools: list[dict]) -> Sequence[Any]:
  """Appends the policy's reply to the messages, and returns the calls in it."""
  try:
    answer = await policy.chat.completions.create(model=model, messages=messages, **({'tools': tools} if tools else {}))
  except openai.APIStatusError as e:
    if is_context_overflow(e):
      raise _NoRoom from e
    raise
  message = answer.choices[0].message
  messages.append(message.model_dump(exclude_none=True))
  return message.tool_calls or ()


async def _called(call: Any, origins: Mapping[str, Any], connections: Mapping[str, Any]) -> Any:
  """The result of a call of a tool; a text about the mistake if the policy made one."""
  if call.function.name not in origins:
    return f'error: there is no tool {call.function.name}'
  try:
    arguments = json.loads(call.function.arguments or '{}')
  except ValueError as e:
    return f'error: the arguments are no JSON ({e})'
  if not isinstance(arguments, dict):
    return 'error: the arguments are no JSON object'
  return await call_mcp(connections, origins, call.function.name, arguments)


class VerifiersWorker:
  """A package, whose tasks are loaded, and its rollouts."""

  def __init__(
    self, package: str, options: Mapping[str, Any], environment: Mapping[str, Any], limit: int, allow_commands: bool,
    tool_timeout_s: float,
  ):  # fmt: skip
    """Loads the package and its tasks; see `VerifiersTasks` for the arguments.

    Raises:
      ValueError: the package cannot be used so; one line.
    """
    for name in _SECRETS:
      os.environ.pop(name, None)
    # Programs of the package, such as those of its tools, find modules where this process does.
    own = [os.path.abspath(entry) for entry in sys.path]
    own = [entry for entry in own if not entry.startswith((sys.prefix, sys.base_prefix))]
    os.environ['PYTHONPATH'] = os.pathsep.join(own)
    sys.modules[_CHAT] = sys.modules[__name__]
    self._env = _loaded(package, options, environment, allow_commands, tool_timeout_s)
    if not self._env.taskset.bounded and not limit:
      raise ValueError('the package has tasks without end; limit must be above 0')
    self._tasks = list(itertools.islice(self._env.taskset, limit or None))
    if not self._tasks:
      raise ValueError('the package has no task')
    self._rollouts: dict[int, concurrent.futures.Future] = {}
    self._loop, self._served = asyncio.new_event_loop(), list[_Served]()
    self._last_beat = time.monotonic()
    threading.Thread(target=self._run, daemon=True, name='rollouts').start()

  def tasks(self) -> list[str]:
    """The identity of each task: equal tasks have equal ones, whatever their places are."""
    return [_identity(task) for task in self._tasks]

  def exchange(
    self, begin: Sequence[tuple], cancel: Sequence[int], wait_s: float
  ) -> tuple[list[tuple[int, dict[str, Any]]], float]:
    """Begins and cancels rollouts, and waits a little for one to end.

    Args:
      begin: (number, index of the task, address, key, name of the policy, most turns) of each.
      cancel: numbers of rollouts.

    Returns:
      (number, what became of it) of the rollouts that have ended: {'error': ...}, or 'rewards' and 'metrics' by name.
      And the seconds for which the event loop has been held by code of the package.
    """
    for number, *order in begin:
      self._rollouts[number] = asyncio.run_coroutine_threadsafe(self._play(number, *order), self._loop)
    for number in cancel:
      if number in self._rollouts:
        self._rollouts[number].cancel()
    concurrent.futures.wait(self._rollouts.values(), wait_s, concurrent.futures.FIRST_COMPLETED)
    ended = [(number, self._rollouts.pop(number)) for number in list(self._rollouts) if self._rollouts[number].done()]
    held_s = max(time.monotonic() - self._last_beat - _BEAT_S, 0.0)
    return [(number, _result_of(rollout)) for number, rollout in ended], held_s

  def close(self) -> None:
    """Ends what the package serves, such as programs of tools."""
    with contextlib.suppress(Exception):
      asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_CLOSE_S)

  async def _end(self) -> None:
    await asyncio.gather(*(served.end() for served in self._served), return_exceptions=True)

  def _run(self) -> None:
    def beat() -> None:
      self._last_beat = time.monotonic()
      self._loop.call_later(_BEAT_S, beat)

    asyncio.set_event_loop(self._loop)
    self._loop.call_soon(beat)
    self._loop.run_forever()

  async def _play(
    self, number: int, index: int, base_url: str, api_key: str, model: str, max_turns: int
  ) -> dict[str, Any]:
    served = await self._serve()
    variable = f'RAGEN_POLICY_API_KEY_{number}'  # programs do not inherit names with API_KEY
    os.environ[variable] = api_key
    served.enter()
    try:
      await served.ready()
      client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable, timeout={'connect': None})
      env = _with_most_turns(served.env, max_turns)
      (slot,) = env.slots(self._tasks[index])
      return _outcome(await env.run_slot(slot, vf.ModelContext(model=model, client=client)))
    finally:
      os.environ.pop(variable, None)
      served.leave()

  async def _serve(self) -> _Served:
    """What a rollout shares with others; if a server of the last ones has ended, it is started again."""
    last = self._served[-1:]
    is_over = not last or last[0].task.done() or await _has_ended(last[0].urls)
    if is_over and last == self._served[-1:]:  # else another rollout was faster
      self._served = [served for served in self._served if not served.task.done()] + [_Served(self._env)]
      for old in last:
        old.end_when_unused()
    return self._served[-1]


class _Served:
  """What rollouts share: an environment, and the servers that it has started.

  Attributes:
    env: the environment.
    task: holds the servers, until they are ended.
  """

  def __init__(self, env: vf.Env):
    """Begins the start."""
    self.env, self._ready, self._over = copy.copy(env), asyncio.Event(), asyncio.Event()
    self._rollouts, self._is_old = 0, False
    self.task = asyncio.create_task(self._hold())

  @property
  def urls(self) -> list[str]:
    """The addresses of its servers of tools."""
    return [server.url for server in self.env._shared_tools.values()]

  async def ready(self) -> None:
    """Waits for the start; raises what it raises."""
    started = asyncio.ensure_future(self._ready.wait())
    await asyncio.wait([started, self.task], return_when=asyncio.FIRST_COMPLETED)
    started.cancel()
    if self.task.done():
      self.task.result()

  def enter(self) -> None:
    """Counts a rollout that begins."""
    self._rollouts += 1

  def leave(self) -> None:
    """Counts a rollout that has ended."""
    self._rollouts -= 1
    if self._is_old:
      self.end_when_unused()

  def end_when_unused(self) -> None:
    """Ends the servers after the rollouts that use them."""
    self._is_old = True
    if not self._rollouts:
      self._over.set()

  async def end(self) -> None:
    """Ends the servers."""
    self._over.set()
    await self.task

  async def _hold(self) -> None:
    async with self.env.serving():
      self._ready.set()
      await self._over.wait()


def _loaded(
  package: str, options: Mapping[str, Any], environment: Mapping[str, Any], allow_commands: bool, tool_timeout_s: float
) -> vf.Env:
  """The environment of a package; ValueError of one line if it cannot be made, or has parts that are not supported."""
  given = copy.deepcopy(dict(environment))
  try:
    config = resolve_env_config({**given, 'taskset': {**options, 'id': package}})
    roles = [name for name, value in config if isinstance(value, vf.AgentConfig)]
    if len(roles) == 1:
      seat = given.setdefault(roles[0], {})
      seat.setdefault('runtime', {'type': 'subprocess'})
      if seat.get('harness') is None and default_harness_id(package) == _SHELL:
        seat['harness'] = {'id': _CHAT, 'tool_timeout': tool_timeout_s}
      config = resolve_env_config({**given, 'taskset': {**options, 'id': package}})
    env = load_environment(config)
  except ValidationError as e:
    first = e.errors()[0]
    raise ValueError(f'{".".join(map(str, first["loc"]))}: {one_line(first["msg"], str)}') from e
  if len(roles) != 1:
    raise ValueError(f'the environment has the agents {", ".join(roles)}; allowed: environments with one agent')
  seat = getattr(config, roles[0])
  harness = config.agent_harnesses()[roles[0]].id
  if harness_class(harness).EXECUTES_CODE and isinstance(seat.runtime, vf.SubprocessConfig) and not allow_commands:
    raise ValueError(
      f'the harness {harness!r} executes what the policy writes on this machine; allowed: another one in '
      f"environment.{roles[0]}.harness.id, another environment.{roles[0]}.runtime.type such as 'docker', or "
      'allow_commands=True'
    )
  return env


def _with_most_turns(env: vf.Env, most: int) -> vf.Env:
  """The environment, whose agent has so many turns at most. What it serves is shared."""
  limited, changes = copy.copy(env), {}
  for name, value in env.config:
    if isinstance(value, vf.AgentConfig):
      changes[name] = value.model_copy(update={'max_turns': min(value.max_turns or most, most)})
  limited.config = env.config.model_copy(update=changes)
  return limited


def _identity(task: vf.Task) -> str:
  """The package's own key of a task, or else a digest of its data without its place in the list."""
  if type(task).key is not vf.Task.key:
    return task.key
  data = task.data.model_dump(mode='json', exclude_none=True, exclude={'idx'})
  return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _outcome(episode: vf.Episode) -> dict[str, Any]:
  """Rewards, with their weights, and metrics of an episode; or why it failed."""
  if not episode.ok or len(episode.traces) != 1:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not errors:
      return {'error': f'the episode has {len(episode.traces)} traces; allowed: 1'}
    return {'error': f'{errors[-1].type}: {one_line(errors[-1].message, str)}'}
  (trace,) = episode.traces
  return {
    'rewards': {name: reward.value for name, reward in trace.rewards.items() if reward is not None},
    'metrics': {name: value for name, value in trace.metrics.items() if value is not None},
  }


def _result_of(rollout: concurrent.futures.Future) -> dict[str, Any]:
  if rollout.cancelled():
    return {'error': 'was cancelled'}
  error = rollout.exception()
  return rollout.result() if error is None else {'error': f'{type(error).__name__}: {one_line(error, str)}'}
