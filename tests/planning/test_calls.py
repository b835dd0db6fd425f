"""The calls of a rollout with assumed lengths, beside those of the speaker."""

from __future__ import annotations

import dataclasses
import types

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks.aot_compiled import simulated
from benchmarks.aot_details import steps_of
from ragen_jax.agent import sampler_speaker
from ragen_jax.agent.context_manager import Prompt
from ragen_jax.agent.episode import Limits, Status
from ragen_jax.agent.sampler_speaker import SamplerSpeaker
from ragen_jax.planning import lengths
from ragen_jax.planning.calls import Call, rollout_calls
from ragen_jax.sampling.draw import PLAIN
from ragen_jax.sampling.sampler import Reply
from tests.planning.test_lengths import FULL
from tests.support.configs import small_config


class _Log:
  """An `EpisodeLog` of episodes whose prompts and replies have given lengths."""

  def __init__(self, config, assumed, replies, turns):
    self.assumed, self.replies, self.turns, rows = assumed, replies, turns, len(turns)
    self.group_size = config.train.group_size
    limits = {f.name: getattr(config.agent, f.name, None) for f in dataclasses.fields(Limits)}
    self.limits = Limits(**limits | {'length_step': config.length_step, 'max_turns': assumed.turns})
    self.envs = types.SimpleNamespace(rows=rows, all_rows=rows, first_row=0, has_images=False)
    self.status, self.turn = np.full(rows, Status.RUNNING), np.zeros(rows, int)
    self.timeline = self
    self.length = np.zeros(rows, int)
    self.row_steps = 0
    self.context = types.SimpleNamespace(
      tokenizer=types.SimpleNamespace(pad_id=0), reply_texts=lambda replies: [''] * len(replies)
    )

  away = ()

  @property
  def live(self):
    return np.flatnonzero(self.status == Status.RUNNING).tolist()

  def check_first_prompt(self, row):
    pass

  def past(self, row):
    return [None] * self.turn[row]

  def limits_of(self, row):
    return self.limits

  def prompts(self, rows):
    fresh = {row: not self.assumed.whole or self.turn[row] == 0 for row in rows}
    return {row: Prompt(ids=self._ids(row, fresh[row]), fresh=fresh[row]) for row in rows}

  def _ids(self, row, fresh):
    """Groups have the same first prompt; all prompts that begin a row begin alike."""
    if not fresh:
      return (5,) * self.assumed.observation
    own = 100 * (row + 1) + self.turn[row] if self.turn[row] else row // self.group_size + 10
    return (*(5,) * self.assumed.common, own, *(5,) * (self.assumed.prompt - self.assumed.common - 1))

  def begin_row(self, row):
    self.length[row] = 0

  def append_context(self, row, ids, turn, images):
    self.length[row] += len(ids)

  def append_reply(self, row, ids, turn, **numbers):
    self.length[row] += len(ids)


class _Sampler:
  """Writes calls down, and ends each reply at its length."""

  stop_ids, experts = (1,), False

  def __init__(self, shards):
    self.share, self.calls = types.SimpleNamespace(own=shards, shards=shards, parts=1), []
    self.first = False

  def decode_weights(self, params):
    del params
    return nnx.State({})

  def init(self, rows, size):
    return rows, size

  def resize(self, state, size):
    self.calls.append(Call('resize', *state, size))
    return state[0], size

  def extend(self, params, state, tokens, count, begins, *, rows, images):
    assert len(count) == (state[0] if rows is None else len(rows))
    self.calls.append(Call('extend', len(count), state[1], tokens.shape[1], self.first))
    return state

  def share_rows(self, state, source, columns):
    return state

  def observe(self, fed):
    """Whether the next call feeds prompts that begin rows; rows that are given none do not tell."""
    fed = fed.rows[fed.count > 0]
    if len(fed):
      self.first = not self.log.assumed.whole or not self.log.turn[fed[0]]

  def decode(self, params, state, keys, budget, *, columns, sampling, rows, enough):
    shards = self.share.own
    at = np.arange(state[0]).reshape(shards, -1)
    if rows is not None:
      at = np.take_along_axis(at, rows.reshape(shards, -1), axis=1)
    left = np.zeros(at.size, int)
    for i, row in enumerate(self.speaker._schedule.slots.reshape(-1)[at.reshape(-1)].tolist()):
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
  speaker = SamplerSpeaker(sampler, None, jax.random.key(0), PLAIN, observer=sampler.observe)
  sampler.speaker, sampler.log = speaker, log
  while (complete := speaker.reply(log)) is not None:
    for row in complete:
      log.turn[row] += 1
      if log.turn[row] >= turns[row]:
        log.status[row] = Status.SUCCESS
  return sampler.calls, log


@pytest.mark.parametrize(
  ('rows', 'shards', 'context', 'schedule', 'drop', 'common'),
  [
    # Each pair of values at least once.
    (32, 1, 'full', 'lockstep', True, 0),
    (32, 1, 'limited_multi_turn', 'lockstep', False, 80),
    (32, 1, 'full', 'continuous', True, 80),
    (32, 2, 'limited_multi_turn', 'lockstep', True, 80),
    (32, 2, 'full', 'lockstep', False, 0),
    (32, 2, 'limited_multi_turn', 'continuous', True, 0),
    (16, 4, 'full', 'lockstep', True, 80),
    (16, 4, 'limited_multi_turn', 'lockstep', False, 0),
    (16, 4, 'limited_multi_turn', 'continuous', True, 0),
    (16, 4, 'full', 'continuous', True, 80),
  ],
)
def test_calls_are_those_of_the_speaker(monkeypatch, schedule, drop, context, rows, shards, common):
  config = small_config(agent__schedule=schedule, agent__context=context, agent__decode_chunk=16, length_step=32)
  config.agent.drop_finished = drop
  config.train.groups = 8
  config.update_from_flattened_dict({'agent.max_context': 900, 'agent.max_response_tokens': 120})
  assumed = dataclasses.replace(FULL, turns=4, whole=context == 'full', limit=900, common=common)
  replies, turns = simulated(np.random.default_rng(3), assumed, config, 32, 40)
  found = list(rollout_calls(config, assumed, replies, turns, rows=rows, shards=shards, group_size=4))
  calls, log = _of_the_speaker(monkeypatch, config, assumed, replies, turns, rows, shards)
  assert found == calls
  assert {c.kind for c in found} == {'extend', 'decode', *(['resize'] if context == 'full' else [])}
  told, sampled = steps_of(found), sum(row[:n].sum() for row, n in zip(replies, turns, strict=True))
  assert told.decode == sum(c.steps for c in calls) and told.extend == sum(c.kind == 'extend' for c in calls)
  assert told.idle == pytest.approx(1 - sampled / log.row_steps)


def test_rows_have_the_room_that_short_replies_of_their_tag_leave():
  config = small_config(agent__schedule='lockstep', agent__context='full', agent__decode_chunk=16, length_step=8)
  config.update_from_flattened_dict({'agent.max_context': 200, 'agent.max_response_tokens': 120})
  assumed = dataclasses.replace(FULL, prompt=150, reply=20, longest=20, turns=2, limit=200)
  replies, turns = np.full((4, 2), 20), np.full(4, 2)

  def fed() -> int:
    calls = rollout_calls(config, assumed, replies, turns, rows=4, shards=1, group_size=4)
    return sum(call.width for call in calls if call.kind == 'extend')

  assert fed() == 80 + 20, 'the prompt is cut'
  with config.unlocked():
    for tag in {*config.train.tags, *config.eval.tags}:
      config.envs[tag].max_response_tokens = 20
  assert fed() == 150 + 20


def test_a_continuous_rollout_decodes_little_more_than_its_longest_row():
  config = small_config(agent__schedule='continuous', agent__decode_chunk=32, length_step=64)
  config.update_from_flattened_dict({'agent.max_context': 2000, 'agent.max_response_tokens': 300})
  long = dataclasses.replace(FULL, reply=150, longest=300, turns=5, limit=2000)
  replies, turns = lengths.assumed(long, 128)
  assert (replies.max(axis=0) == 300).all() and replies[0].sum() < 1500
  steps = {}
  for schedule in ('lockstep', 'continuous'):
    config.agent.schedule = schedule
    steps[schedule] = steps_of(rollout_calls(config, long, replies, turns, rows=128, shards=8, group_size=16))
  assert steps['lockstep'].decode == 1500 and 0.2 < steps['lockstep'].idle < 0.3
  longest = replies.sum(axis=1).max()
  assert longest <= steps['continuous'].decode < 1.05 * longest and steps['continuous'].idle < 0.15
