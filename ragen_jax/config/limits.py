"""The largest value of each number of the config: numbers that fit their type, and sizes that a machine can hold.

Sizes have a bound because they are allocated before anything else could report them: rows of a board, columns of a
cache, threads. The bounds are far above what runs use.
"""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from ragen_jax.config import rules

# The range of float32.
_LARGEST, _SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)

_MILLION = 2**20
# Field, or pattern of fields -> its largest value.
AT_MOST: dict[str, float] = {
  # Columns of a row.
  'agent.max_context': _MILLION,
  'agent.max_response_tokens': _MILLION,
  'agent.decode_chunk': _MILLION,
  'length_step': _MILLION,
  'plan.prompt_tokens': _MILLION,
  'plan.observation_tokens': _MILLION,
  'plan.reply_tokens': _MILLION,
  'plan.longest_reply': _MILLION,
  'eval.endpoint_max_tokens': _MILLION,
  'prompt.critic_max_tokens': _MILLION,
  # Rows.
  '*.groups': _MILLION,
  '*.group_size': _MILLION,
  'agent.rows_in_flight': _MILLION,
  'serve.slots': _MILLION,
  'sft.batch_size': _MILLION,
  # Turns and actions of an episode.
  'envs.*.max_turns': 65536,
  'envs.*.max_actions': 65536,
  'envs.*.max_actions_per_turn': 65536,
  'envs.*.max_words': _MILLION,
  'envs.*.max_response_tokens': _MILLION,
  'envs.*.max_observation_tokens': _MILLION,
  'sft.actions_per_turn': 65536,
  'plan.turns': 65536,
  # Threads and connections.
  'compile_ahead': 256,
  'agent.env_threads': 4096,
  'eval.endpoint_workers': 4096,
  'prompt.critic_workers': 4096,
  'serve.max_concurrency': 65536,
  'serve.max_connections': 65536,
  'serve.max_queue': _MILLION,
  'serve.max_body': 2**30,
  'serve.max_images': 4096,
  'serve.image_tokens': _MILLION,
  # Devices.
  'plan.devices': 65536,
  'plan.memory_gb': 2**20,
  'mesh.*': 65536,
  'agent.decode_shards': 65536,
  # Widths of matrices, and parts of a rollout.
  'lora.rank': 16384,
  'monitor.gradient_buckets': 1024,
  'monitor.information_samples': _MILLION,
  # Factors of the logits.
  'train.temperature': 100.0,
  'eval.temperature': 100.0,
  'prompt.critic_temperature': 100.0,
}


def check_numbers(config: ConfigDict) -> None:
  """Raises UserError for the first field that is None, not finite, out of its type's range, or above its `AT_MOST`.

  The types are float32 and int32, those of the compiled programs; seeds of levels are unsigned. Options that
  environments outside JAX pass to foreign code (`envs.TAG.kwargs.NAME`) are not checked.
  """
  for field, value in _leaves(config):
    rules.check(config, field, value is not None or field.startswith('envs.'), 'must have a value')
    for x in value if isinstance(value, tuple | list) else (value,):
      if isinstance(x, bool) or not isinstance(x, int | float):
        continue
      if isinstance(x, float):
        rules.check(config, field, math.isfinite(x), 'must be a finite number')
        rules.check(
          config, field, abs(x) <= _LARGEST, f'must be at most {_LARGEST:.2g} in magnitude, the range of float32'
        )
        rules.check(
          config, field, x == 0 or abs(x) >= _SMALLEST, f'must be 0 or at least {_SMALLEST:.2g}; float32 rounds it to 0'
        )
      elif field.endswith('.first_level'):
        rules.check(config, field, 0 <= x < 2**32, f'must be from 0 to {2**32 - 1}')
      else:
        rules.check(config, field, abs(x) < 2**31, f'must be at most {2**31 - 1} in magnitude')
      most = _bound(field)
      rules.check(config, field, x <= most, f'must be at most {most:,}')


@functools.lru_cache(maxsize=4096)
def _bound(field: str) -> float:
  """The largest value of a field."""
  found = [most for pattern, most in AT_MOST.items() if fnmatch.fnmatchcase(field, pattern)]
  return min(found, default=math.inf)


def _leaves(config: ConfigDict, prefix: str = '') -> Iterator[tuple[str, Any]]:
  for name, value in config.items():
    if not isinstance(value, ConfigDict):
      yield f'{prefix}{name}', value
    elif not (prefix.startswith('envs.') and prefix.count('.') == 2):
      yield from _leaves(value, f'{prefix}{name}.')
