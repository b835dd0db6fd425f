"""Assumed lengths, and the shapes of a run beside those of a real rollout."""

from __future__ import annotations

import dataclasses
import itertools
import types

import jax
import numpy as np
import pytest

from ragen_jax.agent import sampler_speaker
from ragen_jax.agent.context_manager import Prompt
from ragen_jax.agent.episode import Limits, Status
from ragen_jax.agent.sampler_speaker import SamplerSpeaker
from ragen_jax.compilers import abstract, lengths
from ragen_jax.compilers.lengths import Call, Lengths
from ragen_jax.sampling.draw import PLAIN
from ragen_jax.sampling.sampler import Reply
from ragen_jax.training.batches import BatchingSettings, PackingSettings
from ragen_jax.training.packing import plan_batches
from tests.support.configs import small_config

FULL = Lengths(prompt=100, observation=20, reply=30, longest=50, turns=3, whole=True, limit=400)


def test_rows_hold_prompt_observations_and_replies():
  assert (FULL.row, FULL.sampled, FULL.rows) == (100 + 3 * 30 + 2 * 20, 90, 1)
  short = dataclasses.replace(FULL, limit=150)
  assert short.row == 150


def test_without_the_full_context_each_turn_is_a_row():
  window = dataclasses.replace(FULL, whole=False)
  assert (window.row, window.sampled, window.rows) == (130, 30, 3)


def test_assumptions_stay_within_the_limits_of_the_agent():
  config = small_config(agent__max_context=200, agent__max_response_tokens=40)
  config.update_from_flattened_dict({'plan.prompt_tokens': 500, 'plan.turns': 9, 'plan.reply_tokens': 60})
  found = lengths.from_config(config, max_turns=4)
  assert found == Lengths(prompt=160, observation=80, reply=40, longest=40, turns=4, whole=True, limit=200)
  config.plan.turns = 0
  assert lengths.from_config(config, max_turns=4).turns == 4
  config.plan.turns = 2
  assert lengths.from_config(config, max_turns=4).turns == 2


class _Log:
  """An `EpisodeLog` of episodes whose prompts and replies have given lengths."""

  def __init__(self, config, assumed, replies, turns):
    self.assumed, self.replies, self.turns, rows = assumed, replies, turns, len(turns)
    limits = {f.name: getattr(config.agent, f.name, None) for f in dataclasses.fields(Limits)}
    self.limits = Limits(**limits | {'length_step': config.length_step, 'max_turns': assumed.turns})
    self.envs = types.SimpleNamespace(rows=rows, first_row=0, has_images=False)
    self.status, self.turn = np.full(rows, Status.RUNNING), np.zeros(rows, int)
    self.timeline = self
    self.length = np.zeros(rows, int)
    self.row_steps = 0
    self.context = types.SimpleNamespace(
      tokenizer=types.SimpleNamespace(pad_id=0), reply_texts=lambda replies: [''] * len(replies)
    )

  @property
  def live(self):
    return np.flatnonzero(self.status == Status.RUNNING).tolist()

  def check_first_prompt(self, row):
    pass

  def past(self, row):
    return [None] * self.turn[row]

  def prompts(self, room, rows):
    fresh = {row: not self.assumed.whole or self.turn[row] == 0 for row in rows}
    size = {row: self.assumed.prompt if fresh[row] else self.assumed.observation for row in rows}
    return {row: Prompt(ids=(5,) * size[row], fresh=fresh[row]) for row in rows}

  def begin_row(self, row):
    self.length[row] = 0

  def append_context(self, row, ids, turn, images):
    self.length[row] += len(ids)

  def append_reply(self, row, ids, turn, **numbers):
    self.length[row] += len(ids)


class _Sampler:
  """Writes calls down, and ends each reply at its length."""

  stop_ids = (1,)

  def __init__(self, shards):
    self.share, self.calls = types.SimpleNamespace(own=shards, shards=shards, parts=1), []

  def decode_weights(self, params):
    return params

  def init(self, rows, size):
    return rows, size

  def resize(self, state, size):
    self.calls.append(Call('resize', *state, size))
    return state[0], size

  def extend(self, params, state, tokens, count, begins, *, rows, all_begin, images):
    assert len(count) == (state[0] if rows is None else len(rows))
    self.calls.append(Call('extend', len(count), state[1], tokens.shape[1], all_begin))
    return state

  def decode(self, params, state, keys, budget, *, columns, sampling, rows, enough):
    shards = self.share.own
    at = np.arange(state[0]).reshape(shards, -1)
    if rows is not None:
      at = np.take_along_axis(at, rows.reshape(shards, -1), axis=1)
    left = np.zeros(at.size, int)
    for i, row in enumerate(self.speaker._slots[at.reshape(-1)].tolist()):
      if row in self.speaker._open:
        left[i] = self.log.replies[row, self.log.turn[row]] - len(self.speaker._open[row])
    steps = 0
    while steps < min(columns, left.max()):
      steps += 1
      complete = ((left > 0) & (left <= steps)).reshape(shards, -1).sum(axis=1)
      if enough is not None and complete.max() >= enough:
        break
    count = np.minimum(left, steps)
    self.calls.append(Call('decode', len(budget), state[1], steps=steps, used=count.sum()))
    zeros = np.zeros((len(budget), columns))
    reply = Reply(np.full(zeros.shape, 7), *[zeros] * 3, count=count, open=left > steps)
    return state, reply, (left > steps).any()


def _of_the_speaker(monkeypatch, config, assumed, replies, turns, rows, shards):
  """The calls that `SamplerSpeaker` makes."""
  monkeypatch.setattr(sampler_speaker.processes, 'own_rows', lambda x: x)
  log, sampler = _Log(config, assumed, replies, turns), _Sampler(shards)
  sampler.rows_that_fit = lambda size, columns, image_tokens: rows // shards
  speaker = SamplerSpeaker(sampler, None, jax.random.key(0), PLAIN)
  sampler.speaker, sampler.log = speaker, log
  while (complete := speaker.reply(log)) is not None:
    for row in complete:
      log.turn[row] += 1
      if log.turn[row] >= turns[row]:
        log.status[row] = Status.SUCCESS
  return sampler.calls, log


@pytest.mark.parametrize(('schedule', 'drop'), [('lockstep', True), ('lockstep', False), ('continuous', True)])
@pytest.mark.parametrize('context', ['full', 'limited_multi_turn'])
@pytest.mark.parametrize(('rows', 'shards'), [(32, 1), (32, 2), (16, 4)])
def test_calls_are_those_of_the_speaker(monkeypatch, schedule, drop, context, rows, shards):
  config = small_config(agent__schedule=schedule, agent__context=context, agent__decode_chunk=16, length_step=32)
  config.agent.drop_finished = drop
  config.update_from_flattened_dict({'agent.max_context': 900, 'agent.max_response_tokens': 120})
  assumed = dataclasses.replace(FULL, turns=4, whole=context == 'full', limit=900)
  replies, turns = lengths.simulated(np.random.default_rng(3), assumed, config, 32, 40)
  found = list(lengths.rollout_calls(config, assumed, replies, turns, rows=rows, shards=shards))
  calls, log = _of_the_speaker(monkeypatch, config, assumed, replies, turns, rows, shards)
  assert found == calls
  assert {c.kind for c in found} == {'extend', 'decode', *(['resize'] if context == 'full' else [])}
  told, sampled = lengths.steps_of(found), sum(row[:n].sum() for row, n in zip(replies, turns, strict=True))
  assert told.decode == sum(c.steps for c in calls) and told.extend == sum(c.kind == 'extend' for c in calls)
  assert told.idle == pytest.approx(1 - sampled / log.row_steps)


def test_a_continuous_rollout_decodes_little_more_than_its_longest_row():
  config = small_config(agent__schedule='continuous', agent__decode_chunk=32, length_step=64)
  config.update_from_flattened_dict({'agent.max_context': 2000, 'agent.max_response_tokens': 300})
  long = dataclasses.replace(FULL, reply=150, longest=300, turns=5, limit=2000)
  replies, turns = lengths.assumed(long, 128)
  assert (replies.max(axis=0) == 300).all() and replies[0].sum() < 1500
  steps = {}
  for schedule in ('lockstep', 'continuous'):
    config.agent.schedule = schedule
    steps[schedule] = lengths.steps_of(lengths.rollout_calls(config, long, replies, turns, rows=128, shards=8))
  assert steps['lockstep'].decode == 1500 and 0.2 < steps['lockstep'].idle < 0.3
  longest = replies.sum(axis=1).max()
  assert longest <= steps['continuous'].decode < 1.05 * longest and steps['continuous'].idle < 0.15


def _config(**fields):
  return small_config(
    train__groups=4, train__group_size=4, optimizer__mini_batch_size=8, optimizer__micro_batch_size=4, length_step=64,
    agent__max_context=1024, agent__max_response_tokens=100, **fields,
  )  # fmt: skip


def _batching(config, packing=None):
  return BatchingSettings(config.optimizer.micro_batch_size, config.length_step, whole_rows=False, packing=packing)


def _shapes(config, assumed, iterations, packing=None):
  return lengths.shapes_of_run(config, assumed, _batching(config, packing), iterations, rows=16, shards=1, ahead=False)


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


def test_a_run_that_compiles_ahead_waits_for_no_program_after_the_first_iterations():
  """Replies become half as long again over the run, so that rows and caches grow."""
  long = dataclasses.replace(FULL, reply=60, longest=100, limit=1024, turns=5)
  packing = PackingSettings(step=64, width=1024, columns=8192, shards=1, reply_step=64)
  waits = {}
  for ahead in (False, True):
    config = _config(agent__schedule='continuous')
    config.update_from_flattened_dict({'train.group_size': 16, 'optimizer.mini_batch_size': 32})
    found = lengths.shapes_of_run(config, long, _batching(config, packing), 25, rows=64, shards=1, ahead=ahead)
    waits[ahead] = [c.awaited for c in found]
    assert all(c.programs[kind] >= n for c in found for kind, n in c.awaited.items())
  for kind in ('extend', 'decode', 'resize', 'gradient'):
    assert waits[False][0][kind] == waits[True][0][kind] > 0
    assert waits[True][9][kind] == waits[True][-1][kind] <= waits[False][-1][kind]
  assert sum(waits[True][-1].values()) < sum(waits[False][9].values()) < sum(waits[False][-1].values())


def test_a_row_of_an_update_has_an_observation_before_each_turn_but_the_first():
  batching = types.SimpleNamespace(whole_rows=False)
  replies, turns = np.asarray([[10, 20, 30], [11, 21, 31]]), np.asarray([3, 1])
  length, scored = lengths._rows(FULL, batching, replies, turns)
  assert (length.tolist(), scored.tolist()) == ([100 + 60 + 2 * 20, 111], [60, 11])
  each = lengths._rows(dataclasses.replace(FULL, whole=False), batching, replies, turns)
  assert [x.tolist() for x in each] == [[110, 120, 130, 111], [10, 20, 30, 11]]
  whole = lengths._rows(dataclasses.replace(FULL, limit=150), types.SimpleNamespace(whole_rows=True), replies, turns)
  assert [x.tolist() for x in whole] == [[150, 111]] * 2


@pytest.mark.parametrize('packing', [None, PackingSettings(step=64, width=512, columns=1024, shards=1, reply_step=64)])
def test_gradient_shapes_are_those_of_the_planner(packing):
  """One iteration, counted again from the same episodes with NumPy."""
  config, assumed = _config(), dataclasses.replace(FULL, limit=1024)
  found = _shapes(config, assumed, 1, packing)[0]
  rng = np.random.default_rng(0)
  replies, turns = lengths.simulated(rng, assumed, config, 16, 30 * lengths._FROM)
  sampled = np.asarray([row[:n].sum() for row, n in zip(replies, turns, strict=True)])
  length = 100 + sampled + (turns - 1) * 20
  order = rng.permutation(16)
  steps = plan_batches([order[:8], order[8:]], length, sampled, _batching(config, packing))
  assert found.awaited['gradient'] == len({abstract.shape_of(plan) for plans in steps for plan in plans})
  if packing:
    assert found.awaited['gradient'] == 1  # all mini-batches of an iteration have one shape
