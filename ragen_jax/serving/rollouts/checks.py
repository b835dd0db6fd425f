"""Rollouts: checks of the values of a request; one that is not allowed raises `errors.Invalid` with one line."""

from __future__ import annotations

import math
import re
from typing import Any

from ragen_jax.agent.metrics import is_reported
from ragen_jax.envs.outside.base import LARGEST_REWARD, METRIC_NAME, read_reward
from ragen_jax.serving.errors import Invalid
from ragen_jax.serving.rollouts.records import RETRIED, AttemptLimits, NewRollout
from ragen_jax.serving.rollouts.tables import to_json
from ragen_jax.serving.types import METRIC_PREFIX
from ragen_jax.utils.errors import one_line, short

_ID = re.compile(r'[A-Za-z0-9_.-]{1,128}')
_LONGEST_NAME = 200  # characters


def check_new(new: NewRollout) -> None:
  """Checks all fields of a rollout."""
  if new.rollout_id != '' and not (isinstance(new.rollout_id, str) and _ID.fullmatch(new.rollout_id)):
    raise Invalid(f"rollout_id={_cut(new.rollout_id)}; allowed: 1 to 128 letters, digits and '_.-'")
  check_name('group', new.group)
  if new.mode not in ('train', 'val'):
    raise Invalid(f"mode={_cut(new.mode)}; allowed: 'train', 'val'")
  for name, value in (('input', new.input), ('metadata', new.metadata)):
    try:
      to_json(value)
    except (ValueError, TypeError, RecursionError) as e:
      raise Invalid(f'{name} is not JSON: {one_line(e, str)}') from e
  if len(new.key) != 2 or not all(0 <= x < 2**32 for x in new.key):
    raise Invalid(f'key={_cut(new.key)}; allowed: two integers from 0 to 2**32 - 1')
  _check_limits(new.limits)


def _check_limits(limits: AttemptLimits) -> None:
  if not (_is_number(limits.timeout_s) and limits.timeout_s > 0):
    raise Invalid(f'timeout_s={_cut(limits.timeout_s)}; allowed: positive numbers')
  if not (_is_number(limits.heartbeat_s) and limits.heartbeat_s >= 0):
    raise Invalid(f'heartbeat_s={_cut(limits.heartbeat_s)}; allowed: positive numbers, 0 for no heartbeats')
  if not isinstance(limits.max_attempts, int) or isinstance(limits.max_attempts, bool) or limits.max_attempts < 1:
    raise Invalid(f'max_attempts={_cut(limits.max_attempts)}; allowed: integers from 1')
  if not all(isinstance(state, str) and state in RETRIED for state in limits.retry_on):
    raise Invalid(f'retry_on={_cut(list(limits.retry_on))}; allowed: {", ".join(sorted(RETRIED))}')


def check_value(value: Any) -> float:
  """A reward as a float."""
  reward = read_reward(value) if _is_number(value) else None
  if not isinstance(reward, float):
    raise Invalid(f'value={_cut(value)}; allowed: numbers within {LARGEST_REWARD:g}')
  return reward


def check_name(field: str, name: Any) -> None:
  """Checks the name of a group, worker, agent or label; '' is allowed."""
  if not isinstance(name, str) or len(name) > _LONGEST_NAME or not (name == '' or name.isprintable()):
    raise Invalid(f'{field}={_cut(name)}; allowed: at most {_LONGEST_NAME} printable characters')


def check_reward_name(name: str) -> None:
  """Checks the name of a measurement, see `Reward.metric`; other names are not looked at."""
  metric = name.removeprefix(METRIC_PREFIX)
  if metric != name and not (METRIC_NAME.fullmatch(metric) and is_reported(metric)):
    raise Invalid(
      f'name={_cut(name)}; allowed: {METRIC_PREFIX} and a name in snake case of at most 64 characters that is none of '
      "the run's own metrics, such as success"
    )


def _is_number(value: Any) -> bool:
  """Whether a value is a finite number that a float can hold."""
  try:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
  except OverflowError:
    return False


def _cut(value: Any) -> str:
  return short(value)[:_LONGEST_NAME]
