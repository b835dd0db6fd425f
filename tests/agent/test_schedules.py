"""Schedules of a rollout, rows in step or not, all at once or some at a time: they play the same episodes."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ragen_jax import build
from ragen_jax.agent.episode import Status
from ragen_jax.agent.language_model import param_state
from ragen_jax.agent.sampler_speaker import SamplerSpeaker
from ragen_jax.config.checks import check_config
from ragen_jax.sampling.draw import Sampling
from ragen_jax.utils.errors import UserError
from tests.support.configs import small_config

# Few actions, so that episodes end after different numbers of turns; few columns and buckets, so few programs.
SMALL = dict(
  train__groups=4, train__group_size=8, agent__max_response_tokens=24, length_step=256, agent__drop_finished=False,
  envs__FrozenLake__max_actions=5, envs__FrozenLake__max_turns=4, envs__FrozenLake__max_actions_per_turn=2,
)  # fmt: skip


@pytest.fixture(scope='module')
def policy():
  return build.load_policy(small_config(**SMALL))


def play(policy, **changes):
  """(rollout, prompts as they were fed) of the built-in model."""
  config = small_config(**SMALL | changes)
  check_config(config)
  specs = build.env_specs(config, ('FrozenLake',), (4,))
  proxy = build.agent_proxy(config, policy.tokenizer, policy.sampler, specs, 8)
  fed = []
  speaker = SamplerSpeaker(
    policy.sampler, param_state(policy.model), jax.random.key(3), Sampling(0.9, 1.0, 0), observer=fed.append
  )
  return proxy.rollout(speaker, 10_000), fed


def assert_same(got, expected):
  """The same episodes and token rows; log-probs of other programs differ in their last digits."""
  for name in ('tokens', 'loss_mask', 'turn', 'length', 'status', 'episode'):
    np.testing.assert_array_equal(getattr(got.trajectory, name), getattr(expected.trajectory, name), err_msg=name)
  for name in ('logprobs', 'values', 'entropies', 'rewards'):
    np.testing.assert_allclose(
      getattr(got.trajectory, name), getattr(expected.trajectory, name), rtol=0, atol=1e-4, err_msg=name
    )
  assert [[t.reply for t in e.turns] for e in got.episodes] == [[t.reply for t in e.turns] for e in expected.episodes]
  # Anchors are numbered in the order in which they come; what matters is which are equal.
  same = [x.anchors.ravel()[:, None] == x.anchors.ravel()[None, :] for x in (got, expected)]
  np.testing.assert_array_equal(*same)


@pytest.fixture(scope='module')
def lockstep(policy):
  rollout, fed = play(policy)
  turns = {len(e.turns) for e in rollout.episodes}
  assert len(turns) > 2, 'episodes of different lengths'
  assert len(fed) >= max(turns)
  assert rollout.tokens_sampled == sum(t.tokens for e in rollout.episodes for t in e.turns) <= rollout.row_steps
  return rollout


@pytest.mark.parametrize(
  'changes',
  [
    pytest.param({'agent__decode_chunk': 5, 'length_step': 16}, marks=pytest.mark.slow),
    pytest.param({'agent__schedule': 'continuous', 'agent__decode_chunk': 5}, marks=pytest.mark.slow),
    pytest.param(
      {'agent__schedule': 'continuous', 'agent__decode_chunk': 5, 'agent__rows_in_flight': 8}, marks=pytest.mark.slow
    ),
    pytest.param({'agent__rows_in_flight': 8}, marks=pytest.mark.slow),
    {'agent__schedule': 'continuous', 'agent__decode_chunk': 5, 'agent__drop_finished': True},
    {'agent__decode_chunk': 5, 'agent__drop_finished': True},
  ],
  ids=[
    'in parts',
    'continuous',
    'continuous, some at a time',
    'lockstep, some at a time',
    'continuous, dropping rows',
    'lockstep in parts, dropping rows',
  ],
)
@pytest.mark.slow_cases('lockstep in parts, dropping rows', 'continuous, dropping rows')
@pytest.mark.exhaustive_cases('in parts', 'continuous, some at a time', 'lockstep, some at a time')
def test_every_schedule_plays_the_same_episodes(policy, lockstep, changes):
  rollout, fed = play(policy, **changes)
  assert_same(rollout, lockstep)
  assert rollout.tokens_sampled == lockstep.tokens_sampled <= rollout.row_steps
  if 'agent__rows_in_flight' in changes:
    assert {len(x.slots) for x in fed} == {8}
  if changes == {'agent__decode_chunk': 5, 'agent__drop_finished': True}:
    in_one_part = play(policy, agent__drop_finished=True)[0]
    assert rollout.row_steps < in_one_part.row_steps < lockstep.row_steps, 'fewer idle rows'
  if 'agent__schedule' in changes:
    mixed = [x for x in fed if 0 < np.sum(x.count > 0) < np.sum(x.slots >= 0)]
    assert mixed, 'some rows were fed while others were in the middle of a reply'
    if 'agent__rows_in_flight' in changes:
      assert rollout.row_steps < lockstep.row_steps, 'fewer idle rows'


@pytest.mark.slow
def test_a_reply_in_parts_ends_at_its_most_tokens(policy):
  """Replies need 9 to 13 tokens and may have 8: a part of 5 and one of 3."""
  expected = play(policy, agent__max_response_tokens=8)[0]
  assert {t.tokens for e in expected.episodes for t in e.turns} == {8}
  assert_same(play(policy, agent__max_response_tokens=8, agent__decode_chunk=5)[0], expected)


@pytest.mark.slow
def test_episodes_wait_for_a_slot_also_if_all_that_have_one_run_out_of_context(policy):
  """Two slots for eight episodes, whose second prompt does not fit."""
  for schedule in ('lockstep', 'continuous'):
    small = {'agent__max_context': 170, 'agent__rows_in_flight': 2, 'agent__schedule': schedule}
    rollout = play(policy, **small, envs__FrozenLake__max_actions=8)[0]
    status = rollout.trajectory.status
    assert (status == Status.OUT_OF_CONTEXT).sum() > 2 and not (status == Status.RUNNING).any()
    assert all(episode.turns for episode in rollout.episodes)


@pytest.mark.slow
def test_rows_that_begin_anew_each_turn_play_the_same_episodes(policy):
  window = {'agent__context': 'single_turn', 'agent__context_turns': 2}
  expected = play(policy, **window)[0]
  got = play(policy, **window, agent__schedule='continuous', agent__decode_chunk=5, agent__rows_in_flight=16)[0]
  assert len(got.trajectory.length) > 32
  assert_same(got, expected)


@pytest.mark.parametrize(
  ('field', 'value', 'said'),
  [
    ('agent__schedule', 'parallel', "agent.schedule='parallel'"),
    ('agent__decode_chunk', 0, 'agent.decode_chunk=0'),
    ('agent__rows_in_flight', -1, 'agent.rows_in_flight=-1'),
  ],
)
def test_impossible_schedules_are_refused(field, value, said):
  with pytest.raises(UserError, match=said):
    check_config(small_config(**{field: value}))
