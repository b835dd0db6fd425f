"""Checks of the options of environments: each returns the value, or raises ValueError with one line.

The line names the environment, the option, its value and the values that are allowed.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from ragen_jax.utils.errors import one_line
from ragen_jax.utils.workers import MOST_WORKERS

LEAST_MEMORY_MIB = 64  # a process of Python with NumPy needs less


def is_integer(value: Any) -> bool:
  """Whether a value is an integer of Python or NumPy; booleans are not."""
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
  """Whether a value is a real number of Python or NumPy; booleans are not, NaN and infinity are."""
  return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_integer(env: str, option: str, value: Any, low: int, high: int) -> None:
  """Raises ValueError if a value is not an integer from `low` to `high`."""
  if not is_integer(value) or not low <= value <= high:
    raise ValueError(f'{env}: {option}={value!r}; allowed: integers from {low} to {high}')


def check_flag(env: str, option: str, value: Any) -> None:
  """Raises ValueError if a value is neither True nor False."""
  if not isinstance(value, bool | np.bool_):
    raise ValueError(f'{env}: {option}={value!r}; allowed: True, False')


def check_choice(env: str, option: str, value: Any, allowed: tuple[str, ...]) -> None:
  """Raises ValueError if a value is not one of the allowed words."""
  if value not in allowed:
    raise ValueError(f'{env}: {option}={value!r}; allowed: {", ".join(allowed)}')


def check_whole_number(env: str, option: str, value: Any, least: int) -> None:
  """Raises ValueError if a value is not a Python int of at least `least`."""
  if not isinstance(value, int) or isinstance(value, bool) or value < least:
    raise ValueError(f'{env}: {option}={value!r}; allowed: whole numbers from {least}')


def check_seconds(env: str, option: str, value: Any) -> None:
  """Raises ValueError if a duration is not a finite number above 0."""
  if not is_number(value) or not math.isfinite(value) or not value > 0:
    raise ValueError(f'{env}: {option}={value!r}; allowed: seconds, above 0')


def check_share(env: str, option: str, value: Any) -> None:
  """Raises ValueError if a share is not a number between 0 and 1, both excluded."""
  if not is_number(value) or not 0 < value < 1:
    raise ValueError(f'{env}: {option}={one_line(value)}; allowed: numbers between 0 and 1')


def check_workers(env: str, workers: Any, step_timeout_s: Any) -> None:
  """Raises ValueError if the number of threads or the time limit of `utils.threads.run_calls` is out of range."""
  check_whole_number(env, 'workers', workers, 0)
  check_seconds(env, 'step_timeout_s', step_timeout_s)


def check_processes(env: str, processes: Any, memory_mib: Any, workers: Any) -> None:
  """Raises ValueError if the number of processes or their limit of memory is out of range.

  Args:
    workers: the number of threads, which a process that plays its rows one after another does not have.
  """
  check_integer(env, 'processes', processes, 0, MOST_WORKERS)
  if not is_integer(memory_mib) or (memory_mib and not LEAST_MEMORY_MIB <= memory_mib < 1 << 30):
    allowed = f'0 for no limit, or MiB of a process, from {LEAST_MEMORY_MIB}'
    raise ValueError(f'{env}: memory_mib={memory_mib!r}; allowed: {allowed}')
  if memory_mib and not processes:
    raise ValueError(f'{env}: memory_mib={memory_mib} with processes=0; allowed: 0, or a limit with processes from 1')
  if processes and workers != 1:
    raise ValueError(
      f'{env}: workers={workers} with processes={processes}; allowed: 1, as each process plays by itself'
    )


def check_text(env: str, option: str, value: Any, *, blank: bool = True) -> str:
  """A string; ValueError if the value is not a string, or is blank although `blank` is False."""
  if not isinstance(value, str) or not (blank or value.strip()):
    raise ValueError(f'{env}: {option}={one_line(value)}; allowed: text' + ('' if blank else ' that is not blank'))
  return value


def check_url(env: str, option: str, value: Any) -> None:
  """Raises ValueError if a value is not an address of http or https, or has a user name or a password."""
  if not isinstance(value, str) or not value.startswith(('http://', 'https://')):
    raise ValueError(f"{env}: {option}={value!r}; allowed: 'http://host:port/path' or https")
  if '@' in value.split('/')[2]:
    raise ValueError(f'{env}: {option} has a user name or a password, which configs and logs would show; allowed: none')


def check_wording(env: str, system: Any, state_label: Any, counts_turns: Any, whole_answer: Any) -> dict[str, Any]:
  """These attributes of a `Game` by name; ValueError if one is not text, or neither True nor False."""
  check_text(env, 'system', system)
  check_text(env, 'state_label', state_label)
  check_flag(env, 'counts_turns', counts_turns)
  check_flag(env, 'whole_answer', whole_answer)
  return {
    'system': system, 'state_label': state_label, 'counts_turns': bool(counts_turns), 'whole_answer': bool(whole_answer)
  }  # fmt: skip


def check_mapping(env: str, option: str, value: Any) -> dict[str, Any]:
  """A dict with string keys, from a mapping or a section of a config at any depth; ValueError for anything else."""
  value = _as_dicts(value)
  if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
    raise ValueError(f'{env}: {option}={one_line(value)}; allowed: a section of options by name')
  return value


def check_json(env: str, option: str, value: Any) -> dict[str, Any]:
  """A section of options that JSON can say, with lists for tuples; ValueError for anything else."""
  value = check_mapping(env, option, value)
  try:
    return json.loads(json.dumps(value, allow_nan=False))
  except (TypeError, ValueError) as e:
    raise ValueError(f'{env}: {option}={one_line(value)}; allowed: what JSON can say ({one_line(e, str)})') from e


def _as_dicts(value: Any) -> Any:
  """Sections of a config as dicts, at any depth; other values unchanged."""
  value = value.to_dict() if hasattr(value, 'to_dict') else value
  if isinstance(value, Mapping):
    return {key: _as_dicts(x) for key, x in value.items()}
  return value


def check_action_names(env: str, value: Any) -> tuple[str, ...]:
  """Names of actions as a tuple; ValueError if they are not words that differ, letter case aside."""
  names = tuple(value) if isinstance(value, tuple | list) else (None,)
  words = all(isinstance(n, str) and n and n == n.strip() for n in names)
  if not words or len({n.lower() for n in names}) < len(names):
    raise ValueError(f'{env}: action_names={one_line(value)}; allowed: names that differ, letter case aside')
  return names


def check_legend(env: str, option: str, value: Any) -> dict[str, str]:
  """Symbol to meaning, as a dict of strings; ValueError for anything else."""
  value = check_mapping(env, option, value)
  if not all(isinstance(meaning, str) for meaning in value.values()):
    raise ValueError(f'{env}: {option}={one_line(value)}; allowed: texts by symbol')
  return value
