"""Engine: keys of the draws of an attempt's rows, computed on the host while the device is busy."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np

# Row r > 0 of an attempt folds _ROW + r into the attempt's key, a later attempt at a rollout _ATTEMPT + its number, and
# a prompt whose reply was aborted before _ABORTED + the number of aborted replies. A further reply of a request with a
# seed folds _CHOICE + its number, and a further rollout of a prompt search's task _MEMBER + its number. Positions of
# tokens are folded in afterwards, and stay below all of them.
_ROW, _ATTEMPT, _ABORTED = 1_000_000_000, 2_000_000_000, 3_000_000_000
_CHOICE, _MEMBER = 4_000_000_000, 4_100_000_000


def _on_host() -> jax.Device:
  return jax.local_devices(backend='cpu')[0]


@functools.lru_cache(maxsize=65536)
def row_key(key: tuple[int, int], *, attempt: int, row: int, aborted: int) -> tuple[int, int]:
  """The key of a row's draws, u32[2]; that of the first row of the first attempt is `key`, the rollout's own.

  Attempts count from 1, rows from 0. `aborted` is the number of aborted replies to the same prompt.
  """
  folds = [_ATTEMPT + attempt] if attempt > 1 else []
  folds += [_ROW + row] if row else []
  folds += [_ABORTED + aborted] if aborted else []
  if not folds:
    return key
  with jax.default_device(_on_host()):
    folded = jax.random.wrap_key_data(np.asarray(key, np.uint32))
    for number in folds:
      folded = jax.random.fold_in(folded, number)
    return _words(folded)


def seed_key(seed: int, choice: int) -> tuple[int, int]:
  """The key of a request with a seed; each of its replies has its own."""
  return _folded((seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF, _CHOICE + choice if choice else None)


def task_key(seed: int, number: int, member: int) -> tuple[int, int]:
  """The key of a rollout of a prompt search: that of a task and a member of its group (from 0), for all prompts."""
  return _folded(seed & 0xFFFFFFFF, number & 0xFFFFFFFF, _MEMBER + member if member else None)


def critic_seed(seed: int) -> int:
  """The seed of the requests of a search to its critic, if that is the policy; its key is no `task_key`."""
  return 0x7FFFFFFF << 32 | seed & 0xFFFFFFFF


def _folded(first: int, second: int, number: int | None) -> tuple[int, int]:
  """The key of two words into which a number was folded."""
  with jax.default_device(_on_host()):
    key = jax.random.wrap_key_data(np.asarray([first, second], np.uint32))
    return _words(key if number is None else jax.random.fold_in(key, number))


def split_key(key: jax.Array, rows: int) -> list[tuple[int, int]]:
  """The keys of rollouts, which are those of the rows of a rollout in our environments."""
  return [tuple(words) for words in np.asarray(jax.random.key_data(jax.random.split(key, rows))).tolist()]


def folded_keys(key: jax.Array, folds: Sequence[int], rows: int) -> list[tuple[int, int]]:
  """`split_key` of a key into which numbers were folded, computed on the host."""
  words = np.asarray(jax.random.key_data(key))
  with jax.default_device(_on_host()):
    folded = jax.random.wrap_key_data(words)
    for number in folds:
      folded = jax.random.fold_in(folded, number)
    return split_key(folded, rows)


def _words(key: jax.Array) -> tuple[int, int]:
  first, second = np.asarray(jax.random.key_data(key)).tolist()
  return first, second
