"""The programs that a run with assumed lengths has compiled."""

from __future__ import annotations

import dataclasses
import itertools
import types

import numpy as np
import pytest

from benchmarks import aot_compiled as compiled
from benchmarks.aot_compiled import shapes_of_run, simulated
from ragen_jax.planning import abstract
from ragen_jax.training.batches import BatchingSettings, PackingSettings
from ragen_jax.training.packing import plan_batches
from tests.planning.test_lengths import FULL
from tests.support.configs import small_config


def _config(**fields):
  return small_config(
    train__groups=4, train__group_size=4, optimizer__mini_batch_size=8, optimizer__micro_batch_size=4, length_step=64,
    agent__max_context=1024, agent__max_response_tokens=100, **fields,
  )  # fmt: skip


def _batching(config, packing=None):
  return BatchingSettings(config.optimizer.micro_batch_size, config.length_step, whole_rows=False, packing=packing)


def _shapes(config, assumed, iterations, packing=None):
  return shapes_of_run(config, assumed, _batching(config, packing), iterations, rows=16, shards=1, ahead=False)


def test_programs_of_a_run_only_grow_and_one_shape_needs_one_of_each():
  config = _config()
  counts = _shapes(config, dataclasses.replace(FULL, limit=1024), 30)
  assert len(counts) == 30 and all(c.programs == c.awaited for c in counts)
  for before, after in itertools.pairwise(counts):
    assert all(after.programs[kind] >= before.programs[kind] for kind in before.programs)
  assert counts[-1].programs['gradient'] > counts[0].programs['gradient'] >= 1
  config.length_step, config.agent.drop_finished = 1024, False
  short = dataclasses.replace(FULL, limit=1024, turns=1)
  once = _shapes(config, short, 30)[-1].programs
  assert once == {'extend': 1, 'decode': 1, 'resize': 0, 'gradient': 1, 'score': 1, 'apply': 1}


@pytest.mark.slow
def test_a_run_that_compiles_ahead_waits_for_no_program_after_the_first_iterations():
  """Replies become half as long again over the run, so that rows and caches grow."""
  long = dataclasses.replace(FULL, reply=60, longest=100, limit=1024, turns=5)
  packing = PackingSettings(step=64, width=1024, columns=8192, shards=1, reply_step=64)
  waits = {}
  for ahead in (False, True):
    config = _config(agent__schedule='continuous')
    config.update_from_flattened_dict({'train.group_size': 16, 'optimizer.mini_batch_size': 32})
    found = shapes_of_run(config, long, _batching(config, packing), 25, rows=64, shards=1, ahead=ahead)
    waits[ahead] = [c.awaited for c in found]
    assert all(c.programs[kind] >= n for c in found for kind, n in c.awaited.items())
  for kind in ('extend', 'decode', 'resize', 'gradient'):
    assert waits[False][0][kind] == waits[True][0][kind] > 0
    assert waits[True][9][kind] == waits[True][-1][kind] <= waits[False][-1][kind]
  assert sum(waits[True][-1].values()) < sum(waits[False][9].values()) < sum(waits[False][-1].values())


def test_a_row_of_an_update_has_an_observation_before_each_turn_but_the_first():
  batching = types.SimpleNamespace(whole_rows=False)
  replies, turns = np.asarray([[10, 20, 30], [11, 21, 31]]), np.asarray([3, 1])
  length, scored = compiled._rows(FULL, batching, replies, turns)
  assert (length.tolist(), scored.tolist()) == ([100 + 60 + 2 * 20, 111], [60, 11])
  each = compiled._rows(dataclasses.replace(FULL, whole=False), batching, replies, turns)
  assert [x.tolist() for x in each] == [[110, 120, 130, 111], [10, 20, 30, 11]]
  whole = compiled._rows(dataclasses.replace(FULL, limit=150), types.SimpleNamespace(whole_rows=True), replies, turns)
  assert [x.tolist() for x in whole] == [[150, 111]] * 2


@pytest.mark.parametrize('whole', [True, False])
def test_rows_of_a_group_begin_with_the_same_prompt_and_all_rows_with_the_same_rules(whole):
  assumed = dataclasses.replace(FULL, common=30, whole=whole)  # 100 columns of a prompt
  turns = np.asarray([2, 1, 1, 2])
  rows = 4 if whole else 6
  tokens = compiled._tokens(assumed, np.full(rows, 120), turns, 2)
  same = tokens[:, None] == tokens[None]
  shared = np.where(same.all(-1), 120, same.argmin(-1))
  # The rows of the second and of the last episode's turns are rows 1 and 5 if each prompt begins a row.
  group = [0, 0, 1, 1] if whole else [0, -1, 0, 1, 1, -2]
  expected = [[120 if i == j else 100 if group[i] == group[j] else 30 for j in range(rows)] for i in range(rows)]
  assert shared.tolist() == expected


@pytest.mark.parametrize('packing', [None, PackingSettings(step=64, width=512, columns=1024, shards=1, reply_step=64)])
def test_gradient_shapes_are_those_of_the_planner(packing):
  """One iteration, counted again from the same episodes with NumPy."""
  config, assumed = _config(), dataclasses.replace(FULL, limit=1024)
  found = _shapes(config, assumed, 1, packing)[0]
  rng = np.random.default_rng(0)
  replies, turns = simulated(rng, assumed, config, 16, 30 * compiled.MEAN_FROM)
  sampled = np.asarray([row[:n].sum() for row, n in zip(replies, turns, strict=True)])
  length = 100 + sampled + (turns - 1) * 20
  order = rng.permutation(16)
  steps = plan_batches([order[:8], order[8:]], length, sampled, _batching(config, packing))
  assert found.awaited['gradient'] == len({abstract.shape_of(plan) for plans in steps for plan in plans})
  if packing:
    assert found.awaited['gradient'] == 1  # all mini-batches of an iteration have one shape
