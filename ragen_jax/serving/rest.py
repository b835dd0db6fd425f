"""JSON bodies of the API of rollouts, attempts and rewards, which `client` sends.

  POST /rollouts                  parse_rollout        GET /rollouts/{id}            rollout_json
  POST /rollouts/claim            parse_claim          answers with claim_json
  POST /attempts/{id}/rewards     parse_reward
  POST /attempts/{id}/finish      parse_finish

A body that is not allowed raises `records.Invalid` with one line. `Lifecycle` checks the values that it gets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ragen_jax.serving.client import Task
from ragen_jax.serving.records import Invalid, Limits, NewRollout, RolloutRecord
from ragen_jax.serving.types import AttemptState
from ragen_jax.utils.errors import one_line

_LONGEST_VALUE = 200  # characters of a value in an error


def parse_rollout(body: Any, defaults: Limits, key: tuple[int, int]) -> NewRollout:
  """The rollout of `{input, rollout_id?, group?, mode?, config?, metadata?}`.

  Args:
    body: JSON; `config` holds any of the fields of `Limits`; `mode` is 'train' if it is left out.
    defaults: limits that `config` leaves out.
    key: u32[2], data of the PRNG key of the rollout.
  """
  fields = _fields('body', body, ('input', 'rollout_id', 'group', 'mode', 'config', 'metadata'))
  if 'input' not in fields:
    raise Invalid('input is missing; allowed: any JSON value')
  limits = _fields('config', fields.get('config', {}), [field.name for field in dataclasses.fields(Limits)])
  if 'retry_on' in limits:
    limits['retry_on'] = tuple(_state('retry_on', state) for state in _list('retry_on', limits['retry_on']))
  return NewRollout(
    rollout_id=fields.get('rollout_id', ''), input=fields['input'], group=fields.get('group', ''),
    mode=fields.get('mode', 'train'), limits=dataclasses.replace(defaults, **limits),
    metadata=fields.get('metadata'), key=key,
  )  # fmt: skip


def parse_claim(body: Any, longest_wait_s: float) -> tuple[str, float]:
  """Worker and waiting time of `{worker?, wait_s?}`; the time is cut at `longest_wait_s` seconds."""
  fields = _fields('body', body, ('worker', 'wait_s'))
  wait_s = fields.get('wait_s', 0.0)
  if not isinstance(wait_s, int | float) or isinstance(wait_s, bool) or not wait_s >= 0:
    raise Invalid(f'wait_s={_cut(wait_s)}; allowed: seconds from 0')
  return fields.get('worker', ''), min(wait_s, longest_wait_s)


def parse_reward(body: Any) -> dict[str, Any]:
  """Arguments of `Lifecycle.post_reward` of `{value, call?, agent?, name?, id?}`."""
  fields = _fields('body', body, ('value', 'call', 'agent', 'name', 'id'))
  reward_id = fields.pop('id', '')
  return {'value': None, 'call': None, 'agent': '', 'name': ''} | fields | {'reward_id': reward_id}


def parse_finish(body: Any) -> tuple[AttemptState, str]:
  """State and error of `{state, error?}`."""
  fields = _fields('body', body, ('state', 'error'))
  if not isinstance(error := fields.get('error', ''), str):
    raise Invalid(f'error={_cut(error)}; allowed: a text')
  return _state('state', fields.get('state')), error


def claim_json(task: Task) -> dict[str, Any]:
  """What a worker gets: the task with its key and the base URL of its calls."""
  return task.to_json() | {'base_url': task.base_url, 'api_key': task.api_key}


def rollout_json(record: RolloutRecord) -> dict[str, Any]:
  """A rollout for clients: all but its random key."""
  fields = dataclasses.asdict(record)
  del fields['key']
  return fields | {'config': fields.pop('limits')}


def _fields(name: str, value: Any, allowed: list[str] | tuple[str, ...]) -> dict[str, Any]:
  """A JSON object as a new dict; Invalid if it is none or has other fields than the allowed ones."""
  if not isinstance(value, Mapping):
    raise Invalid(f'{name}={_cut(value)}; allowed: an object with {", ".join(allowed)}')
  if unknown := [key for key in value if key not in allowed]:
    raise Invalid(f'{name} has the field {_cut(unknown[0])}; allowed: {", ".join(allowed)}')
  return dict(value)


def _list(name: str, value: Any) -> list[Any]:
  if not isinstance(value, list):
    raise Invalid(f'{name}={_cut(value)}; allowed: a list')
  return value


def _state(name: str, value: Any) -> AttemptState:
  try:
    return AttemptState(value)
  except ValueError as e:
    raise Invalid(f'{name}={_cut(value)}; allowed: {", ".join(AttemptState)}') from e


def _cut(value: Any) -> str:
  return one_line(value)[:_LONGEST_VALUE]
