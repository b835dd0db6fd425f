"""Keys of rows are those of the built-in rollout where they can be, and different everywhere else."""

from __future__ import annotations

import itertools

import jax
import numpy as np

from ragen_jax.serving.engine import keys

KEY = (123, 4_000_000_000)


def test_the_first_row_of_the_first_attempt_has_the_rollouts_key():
  assert keys.row_key(KEY, attempt=1, row=0, aborted=0) == KEY


def test_every_other_row_attempt_and_aborted_reply_has_a_key_of_its_own():
  places = itertools.product((1, 2, 3), range(4), range(3))
  found = [keys.row_key(KEY, attempt=a, row=r, aborted=x) for a, r, x in places]
  assert len(set(found)) == len(found) == 36 and all(0 <= w < 2**32 for words in found for w in words)
  assert keys.row_key(KEY, attempt=2, row=1, aborted=1) == found[12 + 3 + 1]


def test_a_row_folds_a_number_that_no_position_has():
  folded = jax.random.fold_in(jax.random.wrap_key_data(np.asarray(KEY, np.uint32)), 1_000_000_002)
  assert keys.row_key(KEY, attempt=1, row=2, aborted=0) == tuple(jax.random.key_data(folded).tolist())


def test_seeds():
  plain = tuple(jax.random.key_data(jax.random.key(7)).tolist())
  assert keys.seed_key(7, 0) == plain
  seeds = (0, 7, -1, 2**32 + 7, 2**63 - 1, -(2**63))
  found = {keys.seed_key(seed, choice) for seed in seeds for choice in range(3)}
  assert len(found) == 18 and all(0 <= w < 2**32 for words in found for w in words)


def test_the_keys_of_rollouts_are_those_of_rows():
  key = jax.random.key(5)
  assert keys.split_key(key, 3) == [tuple(w) for w in jax.random.key_data(jax.random.split(key, 3)).tolist()]


def test_keys_with_folded_numbers_are_others():
  key = jax.random.key(5)
  assert keys.folded_keys(key, (), 2) == keys.split_key(key, 2)
  folded = jax.random.fold_in(jax.random.fold_in(key, 3), 4)
  assert keys.folded_keys(key, (3, 4), 2) == keys.split_key(folded, 2)


def test_no_two_draws_of_a_prompt_search_or_of_seeds_have_one_key():
  """Whatever row, attempt or aborted reply they belong to."""
  begun = [keys.task_key(seed, number, member) for seed in (0, 1) for number in (0, 1, 7) for member in range(4)]
  begun += [keys.seed_key(keys.critic_seed(seed), 0) for seed in (0, 1)]
  found = [keys.row_key(key, attempt=a, row=r, aborted=0) for key in begun for a in (1, 2) for r in range(4)]
  assert len(set(found)) == len(found)
  # A choice of a request with a seed is no row of another one.
  rows = {keys.row_key(keys.seed_key(7, 0), attempt=1, row=r, aborted=0) for r in range(9)}
  assert not rows & {keys.seed_key(7, choice) for choice in range(1, 9)}
  assert keys.task_key(3, 5, 0) == (3, 5)
