"""The closed list of a run's programs, beside the calls of simulated runs and what the config says."""

from __future__ import annotations

import dataclasses
import types

import numpy as np
import pytest

from benchmarks.aot_compiled import simulated
from ragen_jax.planning import program_list, programs
from ragen_jax.planning.abstract import chunk_columns, sampler_shapes, shape_of
from ragen_jax.planning.calls import rollout_calls
from ragen_jax.planning.lengths import Lengths
from ragen_jax.sampling.draw import GREEDY, PLAIN
from ragen_jax.training.batches import BatchingSettings, PackingSettings
from ragen_jax.training.packing import bin_shapes, plan_batches
from tests.support.configs import small_config

_PACKING = PackingSettings(step=64, width=960, columns=2048, shards=2, reply_step=64)
_CONFIGS = {
  'lockstep': {},
  'continuous': {'agent__schedule': 'continuous'},
  'all rows': {'agent__drop_finished': False},
  'window': {'agent__context': 'limited_multi_turn', 'agent__schedule': 'continuous'},
  'one turn a row': {'agent__context': 'single_turn'},
  'small steps': {'length_step': 4, 'agent__decode_chunk': 7},
}  # fmt: skip


def _config(**fields):
  sizes = {'agent__max_context': 900, 'agent__max_response_tokens': 60, 'agent__decode_chunk': 16, 'length_step': 64}
  return small_config(**sizes | fields)


def _trainer(config, packing, whole_rows=False, **estimate):
  batching = BatchingSettings(4, config.length_step, whole_rows=whole_rows, packing=packing)
  estimate = dict(
    batching=batching, old_logprobs='sampler', bootstrap_truncated=False, needs_critic=True, records_values=True
  ) | estimate  # fmt: skip
  reference = estimate.pop('reference', False)
  settings = types.SimpleNamespace(estimate=types.SimpleNamespace(**estimate), reference=reference)
  return types.SimpleNamespace(settings=settings, player=types.SimpleNamespace(max_turns=6))


@pytest.mark.parametrize('name', _CONFIGS)
def test_every_call_of_the_sampler_is_in_the_list(name):
  """Prompts of all lengths up to the limits; rows in flight are all, or wait for a place."""
  config = _config(**_CONFIGS[name])
  rng, seen = np.random.default_rng(0), set()
  for shards, per_shard in ((1, 16), (2, 8)):
    rows = shards * per_shard
    found = set(program_list.of_sampler(config, shards, {'rollout': rows, 'evaluation': rows}))
    for prompt, observation in ((20, 9), (150, 70), (700, 200), (840, 840)):
      assumed = Lengths(prompt, observation, 30, 60, 6, config.agent.context == 'full', 900, prompt // 2)
      replies, turns = simulated(rng, assumed, config, rows + 8, 40)
      # Rows that are full end, as `EpisodeLog` ends them.
      used = prompt + np.cumsum(replies + observation, axis=1)
      if assumed.whole:
        turns = np.minimum(turns, np.maximum((used <= 840).sum(axis=1), 1))
      for call in rollout_calls(config, assumed, replies, turns, rows=rows, shards=shards, group_size=per_shard // 4):
        program = call.program(rows, PLAIN)
        assert program in found, program
        seen.add(program)
  assert len(seen) > 10


@pytest.mark.parametrize('packing', [None, _PACKING])
@pytest.mark.parametrize('whole_rows', [False, True])
def test_every_micro_batch_is_in_the_list(packing, whole_rows):
  config = _config()
  trainer = _trainer(config, packing, whole_rows)
  batching, rng = trainer.settings.estimate.batching, np.random.default_rng(0)
  found, seen = set(program_list.batch_shapes(config, trainer)), set()
  for most in (1, 30, 200, 900):
    for _ in range(5):
      length = rng.integers(1, most + 1, size=16)
      scored = length if whole_rows else np.minimum(rng.integers(1, 361 // 1.16, size=16), length)
      for factor in program_list.FACTORS:
        shapes = program_list.shapes_after(config, batching, length, scored, 16, factor)
        seen |= {shape for own in shapes.values() for shape in own}
  assert seen <= found and len(seen) > 4


@pytest.mark.parametrize('packing', [None, _PACKING])
@pytest.mark.parametrize('whole_rows', [False, True])
def test_bootstrap_values_and_scores_of_full_rows_are_in_the_list(packing, whole_rows):
  """Rows of `max_context`, the widest bin: with a column more, the widths of all bins are others."""
  config = _config(agent__max_context=_PACKING.width)
  trainer = _trainer(config, packing, whole_rows, records_values=False, bootstrap_truncated=True)
  trainer.model = types.SimpleNamespace(mesh=types.SimpleNamespace(shape={'data': 2, 'fsdp': 1}))
  batching, rng, limit = trainer.settings.estimate.batching, np.random.default_rng(0), _PACKING.width

  def values():
    found = program_list.programs(config, trainer, {'rollout': 16, 'evaluation': 16})
    assert len(found) == len(set(found))
    return {shape for name, shape in found if name == 'values'}

  def planned(length, scored):
    (plans,) = plan_batches([np.arange(len(length))], length, scored, batching)
    return {shape_of(plan) for plan in plans}

  with_bootstrap, seen = values(), {}
  if packing is not None:  # rows that fit into the bins are packed into the usual ones
    assert set(bin_shapes(packing)) < set(program_list.bootstrap_shapes(config, trainer))
  for longest in (*range(64, limit, 64), limit - 1, limit):
    for rows in (1, 4, 16):
      length = rng.integers(1, longest + 1, size=rows)
      length[0] = longest
      assert planned(length, length if whole_rows else np.minimum(length, 360)) <= with_bootstrap
      seen[longest, rows] = planned(length + 1, np.ones_like(length))
      assert seen[longest, rows] <= with_bootstrap & set(program_list.bootstrap_shapes(config, trainer))
  trainer.settings.estimate.bootstrap_truncated = False
  without = values()
  assert any(seen[limit, rows] - without for rows in (1, 4, 16))
  assert max(width for _, width, _ in without) == limit


@pytest.mark.parametrize('tag', ['FrozenLake', 'Agent'])
def test_where_agents_play_the_sampler_has_no_programs(tag):
  config = _config(train__tags=(tag,), eval__tags=(tag,))
  trainer = _trainer(config, None)
  trainer.model = types.SimpleNamespace(mesh=types.SimpleNamespace(shape={'data': 1, 'fsdp': 1}))
  names = {name for name, _ in program_list.programs(config, trainer, {'rollout': 16, 'evaluation': 16})}
  assert 'gradient' in names and ({'extend', 'decode'} <= names) == (tag == 'FrozenLake') == bool(names & {'extend'})


def test_a_list_of_micro_batches_is_bounded():
  config = _config(length_step=1, agent__max_context=100_000, agent__max_response_tokens=20_000)
  assert len(program_list.batch_shapes(config, _trainer(config, None))) == program_list._MOST


def test_a_rollout_like_the_last_one_needs_the_programs_of_its_lengths():
  config = _config()
  batching = _trainer(config, _PACKING).settings.estimate.batching
  length = np.random.default_rng(0).integers(100, 500, size=16)
  same, longer = (program_list.shapes_after(config, batching, length, length // 2, 16, f) for f in (1.0, 1.8))
  assert len(same['gradient']) == len(same['score']) == 1
  assert np.prod(longer['gradient'][0][:2]) > np.prod(same['gradient'][0][:2])
  # Longer replies leave the other columns as they are.
  ((_, width, _),) = program_list.shapes_after(config, batching, np.full(16, 800), np.full(16, 10), 16, 0.9)['gradient']
  assert width >= 799
  # Of many episodes of an evaluation as many as a rollout has are taken, and few are repeated.
  for played in (np.full(40, 300), np.full(3, 300)):
    shapes = program_list.shapes_after(config, batching, played, played // 2, len(played), 1.0)
    assert shapes == program_list.shapes_after(config, batching, np.full(16, 300), np.full(16, 150), 16, 1.0)


@pytest.mark.parametrize('factor', [1.0, 1.8])
def test_rows_that_share_their_prompts_need_fewer_columns_but_repeated_rows_share_no_replies(factor):
  config = _config()
  batching = _trainer(config, dataclasses.replace(_PACKING, most_shared=_PACKING.width)).settings.estimate.batching
  length, scored = np.full(16, 200), np.full(16, 50)

  def columns(rows, shared):
    tokens = np.random.default_rng(1).integers(0, 1000, (16, 200), np.int32)
    tokens[:, :shared] = tokens[:1, :shared]
    shapes = program_list.shapes_after(config, batching, length[:rows], scored[:rows], rows, factor, tokens[:rows])
    ((bins, width, _),) = shapes['score']
    return bins * width

  alone, shared = columns(16, 0), columns(16, 150)
  assert shared < 0.6 * alone
  assert columns(4, 150) == shared  # each row four times
  assert columns(4, 0) < alone


def _caches(config):
  return sampler_shapes(config, 16, 2).caches, program_list.LikelyCaches(config, 2)


def _programs(found, name):
  """What a program of some name is for: rows and cache, or the caches before and after."""
  return {p[1][1:3] for _, p in found if p[0] == name}


def test_after_the_first_prompts_of_a_width_come_the_programs_of_their_cache_and_of_the_next():
  config = _config(eval__greedy_too=True, eval__top_p=0.9, train__top_p=0.9, length_step=128)
  filtered = dataclasses.replace(PLAIN, top_p=0.9)
  (small, middle, large), caches = _caches(config)
  listed = program_list.of_sampler(config, 2, {'rollout': 16, 'evaluation': 16})
  found = caches.called('extend', (16, 8, small, 96))
  urgency = {program: n for n, program in found}
  assert set(urgency) <= set(listed)
  assert {p[1][3] for p in urgency if p[0] == 'extend'} == {96}
  assert _programs(found, 'extend') == {(8, small), (8, middle), (2, small)}
  assert _programs(found, 'decode') == {(16, small), (16, middle)} and _programs(found, 'resize') == {(small, middle)}
  assert {p[1][3] for p in urgency if p[0] == 'decode'} == {PLAIN, filtered}
  for drawn in (PLAIN, filtered):
    assert urgency['decode', (16, 16, small, drawn)] == 1 < urgency['decode', (16, 16, middle, drawn)]
  # A known width tells nothing new, in whatever cache; others do, and other numbers of rows.
  assert not caches.called('extend', (16, 8, middle, 96))
  assert _programs(caches.called('extend', (16, 2, small, 96)), 'extend') == {(2, small), (2, middle), (8, small)}
  last = caches.called('extend', (16, 8, large, 64))
  assert _programs(last, 'extend') == {(8, large), (2, large)}
  assert {n for _, n in _programs(last, 'decode')} == {large}
  assert not _programs(last, 'resize')


def test_after_tokens_of_a_part_of_the_rows_come_the_other_parts():
  (_, middle, _), caches = _caches(_config(length_step=128, eval__greedy_too=True))
  assert not caches.called('decode', (32, 32, middle, PLAIN))
  for part in (24, 10):
    found = caches.called('decode', (32, part, middle, PLAIN))
    assert _programs(found, 'decode') == {(n, middle) for n in (24, 16, 10, 4)}
    assert {p[1][3] for _, p in found} == {PLAIN}


def test_an_enlarged_cache_gets_the_programs_that_the_smaller_one_had():
  (small, middle, large), caches = _caches(_config(length_step=128))
  assert caches.called('resize', (16, middle, large)) == []  # nothing is fed
  caches.called('extend', (16, 8, small, 96))
  caches.called('extend', (2, 2, small, 64))
  found = caches.called('resize', (16, middle, large))
  assert _programs(found, 'extend') == {(8, n) for n in (small, middle, large)} | {(2, small)}
  assert _programs(found, 'decode') == {(16, n) for n in (small, middle, large)}
  caches.called('decode', (16, 8, small, PLAIN))
  parts = _programs(caches.called('resize', (16, middle, large)), 'decode') - _programs(found, 'decode')
  assert parts and {n for _, n in parts} == {large} and all(rows < 16 for rows, _ in parts)


def test_after_a_rollout_come_the_caches_that_longer_replies_would_need():
  config = _config(length_step=128)
  (small, middle, large), caches = _caches(config)
  assert caches.ended(np.asarray([large]), np.asarray([1])) == []  # nothing is fed
  caches.called('extend', (16, 8, small, 96))
  chunk = chunk_columns(config)

  def found(length, scored):
    programs = caches.ended(np.asarray([9, length, 8]), np.asarray([1, scored, 1]))
    every = {n for rows, n in _programs(programs, 'decode') if rows == 16}
    assert every == {n for _, n in _programs(programs, 'extend')}
    return max(every), {n for rows, n in _programs(programs, 'decode') if rows < 16}

  assert found(small - chunk, 0) == (small, {small}) and found(small - chunk + 1, 0) == (middle, {middle})
  assert found(small - chunk - 10, 62) == (small, {small})
  assert found(small - chunk - 10, 70) == (middle, {small, middle})  # a sixth more
  assert found(small - chunk + 10, 200) == (middle, {small, middle})  # a twelfth less
  assert found(middle - chunk, 100) == (large, {middle, large}) and found(10 * large, 100) == (large, {large})


def test_before_the_first_update_only_near_lengths_are_compiled_for():
  assert program_list.factors(updated=True) == program_list.FACTORS
  assert program_list.factors(updated=False) == (1.0, 1.08, 0.92)


def test_samplings_are_those_that_programs_are_compiled_for():
  config = _config(train__temperature=0.7, eval__temperature=0.5, eval__top_p=0.9, eval__greedy_too=True)
  drawn = program_list.samplings(config)
  assert drawn == {'evaluation': (dataclasses.replace(PLAIN, top_p=0.9), PLAIN), 'rollout': (PLAIN,)}
  config.eval.greedy_too, config.eval.temperature, config.eval.top_p = True, 0.0, 1.0
  assert program_list.samplings(config)['evaluation'] == (PLAIN,) == (GREEDY.compiled,)


@pytest.mark.parametrize(
  ('fields', 'separate', 'names'),
  [
    ({}, False, ()),
    ({'old_logprobs': 'trainer', 'records_values': False}, False, ('score',)),
    ({'reference': True}, False, ('score',)),
    ({'reference': True}, True, ('logprobs',)),
    ({'records_values': False}, True, ('values',)),
    ({'bootstrap_truncated': True, 'old_logprobs': 'trainer'}, False, ('score', 'values')),
    ({'needs_critic': False, 'records_values': False}, False, ()),
  ],
)
def test_scoring_programs_follow_from_the_estimator(fields, separate, names):
  config = _config(model__separate_critic=separate)
  trainer = _trainer(config, _PACKING, **fields)
  assert program_list.scored(config, trainer) == names
  trainer.model = types.SimpleNamespace(mesh=types.SimpleNamespace(shape={'data': 2, 'fsdp': 1}))
  found = program_list.programs(config, trainer, {'rollout': 16, 'evaluation': 16})
  assert {name for name, _ in found} == {'extend', 'decode', 'resize', *names, 'gradient', 'apply'}
  assert len(found) == len(set(found))


def test_a_reference_without_replay_has_a_program_of_its_own():
  config, trainer = _config(algorithm__replay_experts=True), _trainer(_config(), _PACKING, reference=True)
  assert program_list.scored(config, trainer) == ('logprobs',)
  trainer.settings.estimate.old_logprobs = 'trainer'
  assert program_list.scored(config, trainer) == ('score', 'logprobs')


def test_warming_the_critic_up_has_programs_of_its_own():
  config = _config(optimizer__critic_warmup=2)
  assert program_list.updates(config) == {'gradient_critic': 'apply_critic', 'gradient': 'apply'}
  config.num_iterations = 2
  assert program_list.updates(config) == {'gradient_critic': 'apply_critic'}


def test_the_rows_of_the_list_are_those_of_the_plan():
  config = _config(agent__rows_in_flight=8, eval__groups=32)
  run = programs.make_run(config)
  assert program_list.rows(config, run.trainer.model.sampler) == run.sampling.rows == {'rollout': 8, 'evaluation': 8}


def test_what_is_not_counted_is_named(monkeypatch):
  monkeypatch.setattr(program_list, '_MOST', 3)
  found = [('extend', (1,)), ('extend', (2,)), ('gradient', (1,))]
  assert program_list.uncounted(found, images=False) == program_list.uncounted([], images=False) == ''
  assert program_list.uncounted(found, images=True) == 'other programs with images'
  found.append(('extend', (3,)))
  assert program_list.uncounted(found, images=False) == ''  # only micro-batches are cut
  found += [('gradient', (2,)), ('gradient', (3,))]
  told = 'shapes of micro-batches after the first 3'
  assert program_list.uncounted(found, images=False) == told
  assert program_list.uncounted(found, images=True) == f'other programs with images and {told}'


def test_the_number_of_programs_is_told_by_name():
  found = [('extend', (1,)), ('decode', (1,)), ('extend', (2,))]
  number = '3 (2 extend, 1 decode)'
  assert program_list.describe(found, images=False) == f'at most {number}, whatever the lengths of episodes'
  assert program_list.describe(found, images=True) == f'{number}, not counting other programs with images'
