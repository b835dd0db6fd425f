"""Environments behind servers of OpenEnv (the package `openenv`), over its WebSocket protocol; docs/openenv.md.

A connection to /ws is a session, with an environment object of its own on the server. Messages are JSON, and the server
answers each with one:

    {"type": "reset", "data": {"seed": 10003, ...}}   {"type": "observation", "data": {"observation": {...},
    {"type": "step", "data": {"message": "..."}}         "reward": 0.5, "done": false, "metadata": {...}}}
    {"type": "state"}                                 {"type": "state", "data": {...}}
    {"type": "close"}                                 the server closes the connection
                                                      {"type": "error", "data": {"message": "...", "code": "..."}}

A server that has no session left sends an error unasked. GET /health, /schema and /metadata describe the server. Each
POST to /reset and /step plays an environment of its own, so they cannot play episodes of several turns, and are not
used.

All connections live in one thread with an event loop, which also answers the pings of the server while the policy
writes. They are open from the beginning of a rollout to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import http.client
import json
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ClassVar

from ragen_jax.envs.json_schema import describe, fits, read_json, resolve
from ragen_jax.envs.options import (
  check_action_names,
  check_json,
  check_seconds,
  check_text,
  check_url,
  check_whole_number,
  check_wording,
)
from ragen_jax.envs.outside.base import FREE_TEXT, Session, TextEnvironment
from ragen_jax.envs.outside.openenv_link import FULL, Failed, Link, Loop, websockets_client
from ragen_jax.envs.outside.timed_http import make_opener
from ragen_jax.utils.errors import describe_error, one_line, short
from ragen_jax.utils.retry import pause_s
from ragen_jax.utils.threads import Fault

EVERYTHING = '*'
_LONGEST_WAIT_S = 30.0
_LARGEST_DESCRIPTION = 1 << 20
_GIVE_UP_AFTER = 3  # messages that took too long, one after another
# Of an action or observation: what is not part of the game.
_BESIDES = ('metadata', 'done', 'reward')


@dataclasses.dataclass(frozen=True, eq=False)
class OpenEnvEnvironment(TextEnvironment):
  """A game on a server of OpenEnv. docs/openenv.md has a table of the options."""

  name: ClassVar[str] = 'openenv'
  any_thread: ClassVar[bool] = True

  url: str = ''
  task: str = ''
  action_field: str = ''
  action_names: tuple[str, ...] = ()
  action_help: str = ''
  observation_field: str = ''
  success: str = ''
  metrics: tuple[str, ...] = ()
  state_metrics: tuple[str, ...] = ()
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  whole_answer: bool = True
  system: str = ''
  state_label: str = 'State'
  counts_turns: bool = True
  timeout_s: float = 60.0
  retries: int = 3
  backoff_s: float = 0.5
  workers: int = 64

  def __post_init__(self):
    check_url('openenv', 'url', self.url)
    for field in ('task', 'action_field', 'action_help', 'observation_field', 'success'):
      check_text('openenv', field, getattr(self, field))
    check_wording('openenv', self.system, self.state_label, self.counts_turns, self.whole_answer)
    for field in ('timeout_s', 'backoff_s'):
      check_seconds('openenv', field, getattr(self, field))
    check_whole_number('openenv', 'retries', self.retries, 0)
    check_whole_number('openenv', 'workers', self.workers, 1)
    values = {
      'action_names': check_action_names('openenv', self.action_names),
      'options': check_json('openenv', 'options', self.options),
      'metrics': _check_paths('metrics', self.metrics),
      'state_metrics': _check_paths('state_metrics', self.state_metrics),
    }
    logged = [_last(path) for path in (*values['metrics'], *values['state_metrics'])]
    if len(set(logged)) < len(logged):
      told = f'metrics={self.metrics!r}, state_metrics={self.state_metrics!r}'
      raise ValueError(f'openenv: {told}; allowed: paths whose last names differ')
    if 'seed' in values['options']:
      raise ValueError('openenv: options has seed, which is the number of the level; allowed: other arguments')
    for field, value in values.items():
      object.__setattr__(self, field, value)
    websockets_client()

  @property
  def server(self) -> str:
    """The address, at which all tags share the sessions."""
    return self.url.rstrip('/')

  # -- the server's description --------------------------------------------------------------------------------------

  def check(self) -> None:
    """Asks the server whether it is healthy and which actions and observations it has."""
    self._action_form  # noqa: B018, raises if something is missing or does not fit
    known = self._about['observation'].get('properties')
    seen = [name for name in known or () if name not in _BESIDES]
    paths = [('observation_field', self.observation_field), ('success', self.success)]
    for option, path in [*paths, *(('metrics', path) for path in self.metrics)]:
      field = path.partition('.')[0]
      if field and known and field not in (*seen, 'metadata'):  # reward and done lie beside the observation
        allowed = ', '.join(seen if option == 'observation_field' else (*seen, 'metadata'))
        raise ValueError(f'openenv: {option}={path!r}; allowed: fields of the observation, {allowed}')
    wrong = [name for name in self.action_names if self._data(name) is None]
    if wrong:
      raise ValueError(
        f'openenv: action_names: {wrong[0]!r} does not fit the schema of the server, {self._action_words}'
      )
    if not self._task.strip():
      raise ValueError("openenv: task=''; allowed: text, as the server has no description")

  def check_episodes(self, count: int) -> None:
    """Opens so many sessions at a time, and ends them."""
    with contextlib.closing(OpenEnvSession(self, count)) as session:
      session.try_out()

  @functools.cached_property
  def _about(self) -> dict[str, Any]:
    """What the server says of itself: 'description', and the schemas 'action' and 'observation'."""
    status = self._get('health').get('status')
    if status != 'healthy':
      raise ValueError(f'openenv: url={self.url!r}: the server is not healthy, its status is {short(status)}')
    schemas = self._get('schema')
    for name in ('action', 'observation'):
      if not isinstance(schemas.get(name), Mapping):
        raise ValueError(f'openenv: url={self.url!r}: /schema has no {name}; allowed: servers of OpenEnv')
    description = '' if self.task.strip() else self._get('metadata').get('description')
    return schemas | {'description': description if isinstance(description, str) else ''}

  def _get(self, path: str) -> Mapping[str, Any]:
    """The JSON object at a path of the server."""
    where = f'{self.url.rstrip("/")}/{path}'
    try:
      with make_opener().open(where, timeout=self.timeout_s) as response:
        text = response.read(_LARGEST_DESCRIPTION + 1)
      if len(text) > _LARGEST_DESCRIPTION:
        raise ValueError(f'more than {_LARGEST_DESCRIPTION >> 20} MiB')
      found = json.loads(text)
      if not isinstance(found, dict):
        raise ValueError('no JSON object')
      return found
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as e:
      raise ValueError(
        f'openenv: url={self.url!r}: no server of OpenEnv answers at {where} ({describe_error(e)})'
      ) from e

  @functools.cached_property
  def _action_form(self) -> str:
    """The field that an answer fills, or '*'."""
    schema = self._about['action']
    known = schema.get('properties')
    known = {name: x for name, x in known.items() if name not in _BESIDES} if isinstance(known, Mapping) else {}
    if self.action_field == EVERYTHING:
      return EVERYTHING
    if self.action_field:
      if self.action_field not in known:
        raise ValueError(
          f'openenv: action_field={self.action_field!r}; allowed: * or a field of the action, {", ".join(known)}'
        )
      return self.action_field
    needed = [name for name in known if name in schema.get('required', ())]
    return needed[0] if len(needed) == 1 and self._is_text(needed[0]) else EVERYTHING

  def _field_schema(self, field: str) -> Any:
    return self._about['action']['properties'][field]

  def _is_text(self, field: str) -> bool:
    """Whether texts are values of a field of the action, so that they are not written as JSON."""
    root, parts = self._about['action'], [self._field_schema(field)]
    parts += resolve(parts[0], root).get('anyOf', [])
    return any(resolve(part, root).get('type') == 'string' for part in parts)

  @functools.cached_property
  def _action_words(self) -> str:
    """How an action is written, from the server's schema."""
    schema, field = self._about['action'], self._action_form
    if field == EVERYTHING:
      names = [name for name in schema.get('properties', {}) if name not in _BESIDES]
      parts = [
        f'"{name}": {describe(self._field_schema(name), schema)}' + self._told(name)
        + ('' if name in schema.get('required', ()) else ' (optional)') for name in names
      ]  # fmt: skip
      return f'An action is a JSON object, {{{", ".join(parts)}}}.'
    if not self._is_text(field):
      return f'An action is one value: {describe(self._field_schema(field), schema)}{self._told(field)}.'
    words = resolve(self._field_schema(field), schema).get('enum')
    return f'An action is one of: {", ".join(words)}.' if words else f'{FREE_TEXT[:-1]}{self._told(field)}.'

  def _told(self, field: str) -> str:
    """The server's description of a field, in brackets."""
    told = resolve(self._field_schema(field), self._about['action']).get('description')
    told = one_line(told, str)[:200] if isinstance(told, str) else ''
    return f' ({told})' if told else ''

  def rules(self) -> str:
    """The task, and the form of an action if no other option tells it."""
    task = self._task
    return task if self.action_help or self.action_names else f'{task}\n{self._action_words}'

  @property
  def _task(self) -> str:
    return self.task if self.task.strip() else self._about['description']

  # -- actions -------------------------------------------------------------------------------------------------------

  def parse_action(self, text: str) -> str | None:
    """The text, if it is a word of `action_names` or an action that fits the schema of the server; else None."""
    action = super().parse_action(text)
    return None if action is None or self._data(action) is None else action

  def _data(self, action: str) -> dict[str, Any] | None:
    """The action that a text writes, as the server reads it; None if it writes none."""
    schema, field = self._about['action'], self._action_form
    if field != EVERYTHING and self._is_text(field) and fits(action, self._field_schema(field), schema):
      return {field: action}
    try:
      value = read_json(action)
    except ValueError:
      return None
    if field != EVERYTHING:
      return {field: value} if fits(value, self._field_schema(field), schema) else None
    return value if isinstance(value, dict) and fits(value, schema) else None

  def open(self, rows: int) -> OpenEnvSession:
    """A session for so many rows. Nothing is sent before the first reset."""
    return OpenEnvSession(self, rows)


def _check_paths(option: str, value: Any) -> tuple[str, ...]:
  if not isinstance(value, tuple | list) or not all(isinstance(path, str) and path.strip() for path in value):
    raise ValueError(f'openenv: {option}={one_line(value)}; allowed: names of fields, or paths with dots')
  return tuple(value)


def _last(path: str) -> str:
  return path.rpartition('.')[2]


# -- reading answers ---------------------------------------------------------------------------------------------------


_MISSING = object()


def _find(values: Any, path: str) -> Any:
  """The value at a path of names and numbers of list items, separated by dots; `_MISSING` if there is none."""
  for name in path.split('.'):
    if isinstance(values, Mapping) and name in values:
      values = values[name]
    elif isinstance(values, list) and name.lstrip('-').isdecimal() and -len(values) <= int(name) < len(values):
      values = values[int(name)]
    else:
      return _MISSING
  return values


def _observed(data: Any) -> dict[str, Any] | Fault:
  """The observation of an answer, with its metadata, which some versions of the server put beside it."""
  seen = data.get('observation') if isinstance(data, Mapping) else None
  if not isinstance(seen, Mapping):
    return Fault('server answered no observation', short(data))
  return {'metadata': data.get('metadata') or {}, **seen}


def _text(seen: Mapping[str, Any], path: str) -> str | Fault:
  """What the policy reads of an observation."""
  value = _find(seen, path) if path else {name: x for name, x in seen.items() if name not in _BESIDES}
  if value is _MISSING or value is None:
    return Fault(f'observation has no {path}', short(seen))
  return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# -- sessions ----------------------------------------------------------------------------------------------------------


class OpenEnvSession(Session):
  """The rows of one client. Each has a connection from its reset to the end of the rollout."""

  def __init__(self, env: OpenEnvEnvironment, rows: int):
    self._env, self._rows = env, rows
    self._links: dict[int, Link] = {}
    self._loop: Loop | None = None
    self._stop: Callable[[], Any] | None = None

  def reset(self, rows: Sequence[int], seeds: Sequence[int], members: Sequence[int]) -> list[Any]:
    """See `Session`. The server has one seed for the level and all other randomness, so `members` are not used."""
    del members
    self.end()
    env = self._env

    async def begin(row: int, seed: int, link: Link) -> Any:
      self._links[row] = link
      data = await link.ask('reset', {**env.options, 'seed': int(seed)})
      seen = _observed(data)
      if isinstance(seen, Fault):
        return seen
      return (
        Fault('reset began an episode that is over') if data.get('done') is True else _text(seen, env.observation_field)
      )

    seed_of = dict(zip(rows, seeds, strict=True))
    return self._side_by_side('reset', rows, lambda row: self._connected(lambda link: begin(row, seed_of[row], link)))

  def step(self, rows: Sequence[int], actions: Sequence[str]) -> list[Any]:
    chosen = dict(zip(rows, actions, strict=True))
    return self._side_by_side('step', rows, lambda row: self._step(row, chosen[row]))

  def try_out(self) -> None:
    """Opens a session for each row; raises ValueError if the server refuses one."""

    async def begin(row: int, link: Link) -> None:
      self._links[row] = link
      # What the state is does not matter, nor that some environments have none before their first reset.
      await link.ask('state', errors=(FULL, 'FACTORY_ERROR', 'SESSION_ERROR'))

    rows = range(self._rows)
    results = self._side_by_side('check', rows, lambda row: self._connected(lambda link: begin(row, link), tries=1))
    faults = [x for x in results if isinstance(x, Fault)]
    if not faults:
      return
    where = f'openenv: url={self._env.url!r}'
    full = [fault for fault in faults if FULL in fault.detail]
    if full and len(full) == len(faults):
      raise ValueError(
        f'{where}: the server has {self._rows - len(full)} sessions free, and {self._rows} episodes are played at a '
        f'time; allowed: a server with max_concurrent_envs={self._rows} or more, or fewer groups ({full[0].detail})'
      )
    raise ValueError(f'{where}: {len(faults)} of {self._rows} sessions cannot be opened ({faults[0]})')

  async def _step(self, row: int, action: str) -> Any:
    env, link = self._env, self._links.get(row)
    if link is None:
      return Fault('step has no session', 'it was lost')
    data = await link.ask('step', env._data(action))
    seen = _observed(data)
    if isinstance(seen, Fault):
      return seen
    text = _text(seen, env.observation_field)
    if isinstance(text, Fault):
      return text
    reward, done = data.get('reward'), data.get('done')
    reward = 0.0 if reward is None else reward  # no reward is due
    metrics = {_last(path): _find(seen, path) for path in env.metrics}
    if env.state_metrics:
      state = await link.ask('state')
      for name, value in ((_last(path), _find(state, path)) for path in env.state_metrics):
        # A metric is the sum over an episode's actions.
        is_number = isinstance(value, int | float)
        metrics[name] = value - link.told.get(name, 0) if is_number else value
        link.told[name] = value if is_number else 0
    info: dict[str, Any] = {'metrics': {name: x for name, x in metrics.items() if x is not _MISSING and x is not None}}
    if done is True:
      won = _find(seen, env.success) if env.success else isinstance(reward, int | float) and reward > 0
      if won is not _MISSING:
        info['success'] = won
    return text, reward, done, info

  async def _connected(self, play: Callable[[Link], Coroutine[Any, Any, Any]], tries: int | None = None) -> Any:
    """What `play` returns with a new connection, with several tries."""
    tries, tried = tries or self._env.retries + 1, 0
    while True:
      link, tried = None, tried + 1
      try:
        link = await Link.open(self._env.url)
        return await play(link)
      except Failed as e:
        if link is not None:
          link.drop()
        if not e.again or tried >= tries:
          raise
        await asyncio.sleep(pause_s(tried, self._env.backoff_s, _LONGEST_WAIT_S))
      except BaseException:
        if link is not None:
          link.drop()
        raise

  def _side_by_side(self, what: str, rows: Sequence[int], job: Callable[[int], Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of jobs of rows. A row whose job fails loses its connection, except that an error was answered."""
    env, late_in_a_row = self._env, 0
    if self._loop is None:
      self._loop = Loop()
      self._stop = weakref.finalize(self, self._loop.stop)
    room = asyncio.Semaphore(env.workers)
    waits = (
      sum(pause_s(i, env.backoff_s, _LONGEST_WAIT_S) for i in range(1, env.retries + 1)) if what == 'reset' else 0.0
    )

    async def limited(row: int) -> Any:
      nonlocal late_in_a_row
      late = f'{what} took longer than {env.timeout_s:g} s'
      async with room:
        if late_in_a_row >= _GIVE_UP_AFTER:
          return Fault(late, 'not tried, because earlier messages took too long')
        try:
          async with asyncio.timeout(env.timeout_s + waits):
            result = await job(row)
          late_in_a_row = 0
        except TimeoutError:
          late_in_a_row += 1
          result = Fault(late)
        except Failed as e:
          result = e.fault
      if isinstance(result, Fault) and (link := self._links.pop(row, None)) is not None:
        link.drop()
      return result

    return self._loop.results([limited(row) for row in rows])

  def end(self) -> None:
    """Ends the sessions on the server, and the thread."""
    links, loop = list(self._links.values()), self._loop
    self._links.clear()
    self._loop = None
    if loop is not None:
      loop.results([link.close() for link in links])
      self._stop()

  close = end
