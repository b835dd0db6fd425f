"""The loop: the same replies make the same episodes, whoever says them, and every way to an end is recorded."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from ragen_jax.agent.agent_proxy import AgentProxy
from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.episode import Status, TextReply
from ragen_jax.agent.rollout import concatenate
from ragen_jax.envs import make
from ragen_jax.envs.base import Budget
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.utils import heartbeat
from ragen_jax.utils.errors import UserError
from tests.support.speakers import REPLIES, ScriptedText, context_settings, limits, make_proxy, scripted_tokens


def _facts(episode):
  """What is equal whoever speaks: all but tokens and the conversation."""
  turns = [
    (t.observation, t.reply, t.actions, t.reward, t.penalty, t.valid, t.effective, t.actions_left)
    for t in episode.turns
  ]
  return turns, episode.status, episode.final_observation, episode.level_seed, episode.group, episode.error


@pytest.mark.parametrize('context', ['full', 'limited_multi_turn', 'single_turn'])
def test_the_same_replies_are_the_same_episodes_in_tokens_and_in_text(tiny, context):
  proxy = make_proxy(tiny, ('FrozenLake', 'SimpleSokoban'), 3, 2, {'context': context, 'context_turns': 2})
  in_tokens = proxy.rollout(scripted_tokens(tiny, [REPLIES] * 12), 500)
  in_text = proxy.rollout(ScriptedText(['<think>' + reply for reply in REPLIES]), 500, pictured=[0, 5])
  assert [_facts(e) for e in in_text.episodes] == [_facts(e) for e in in_tokens.episodes]
  np.testing.assert_array_equal(in_text.episode_scores, in_tokens.episode_scores)
  assert all(t.tokens > 0 for e in in_text.episodes + in_tokens.episodes for t in e.turns)
  statuses = {e.status for e in in_tokens.episodes}
  assert {Status.FAILURE, Status.OUT_OF_ACTIONS} <= statuses
  # Boards are drawn and conversations kept of the rows that were asked for, and of speakers in text.
  assert [e.final_picture is not None for e in in_text.episodes] == [row in (0, 5) for row in range(12)]
  assert [e.turns[0].chat is not None for e in in_text.episodes] == [row in (0, 5) for row in range(12)]
  # The rewards and penalties of an episode stand on its rows.
  t = in_tokens.trajectory
  np.testing.assert_allclose(np.bincount(t.episode, t.rewards.sum(axis=1)), in_tokens.episode_scores, atol=1e-5)


def test_a_heartbeat_is_told_of_the_episodes_that_are_over(tiny, monkeypatch, caplog):
  monkeypatch.setattr(heartbeat, 'SECONDS', 0.0)
  proxy = make_proxy(tiny, ('FrozenLake', 'SimpleSokoban'), 3, 2)
  script = ['<think>' + reply for reply in REPLIES]
  with caplog.at_level(logging.INFO):
    proxy.rollout(ScriptedText(script), 500)
    assert not caplog.records  # a person who plays is not told
    played = proxy.rollout(ScriptedText(script), 500, heartbeat=heartbeat.Heartbeat('%d of %d episodes', 12))
  told = [r.getMessage().partition(' episodes')[0] for r in caplog.records if r.name == heartbeat.__name__]
  turns = np.asarray([len(e.turns) for e in played.episodes])
  over = [np.sum(turns <= n) for n in range(1, turns.max() + 1)]
  assert len(set(over)) > 1 and told == [f'{n} of 12' for n in over]


def test_shares_of_a_rollout_put_together_are_the_whole(tiny):
  whole = make_proxy(tiny, ('FrozenLake', 'SimpleSokoban'), 3, 2)
  script = ['<think>' + reply for reply in REPLIES]
  expected = whole.rollout(ScriptedText(script), 500, pictured=[1, 5, 6])
  parts = []
  for share in range(3):
    envs = EnvStateManager(whole.envs.specs, 2, share=share, shares=3)
    parts.append(AgentProxy(envs, whole.context, whole.limits).rollout(ScriptedText(script), 500, pictured=[1, 5, 6]))
  joined = concatenate(parts, renumber=False)
  assert [_facts(e) for e in joined.episodes] == [_facts(e) for e in expected.episodes]
  assert [e.final_picture is not None for e in joined.episodes] == [row in (1, 5, 6) for row in range(12)]
  assert joined.trajectory.episode.tolist() == list(range(12))
  np.testing.assert_array_equal(joined.trajectory.group, expected.trajectory.group)
  # Anchors are numbered by each part, but equal where the whole's are.
  np.testing.assert_array_equal(
    joined.anchors[:, None, :, None] == joined.anchors[None, :, None, :],
    expected.anchors[:, None, :, None] == expected.anchors[None, :, None, :],
  )


def test_a_first_prompt_that_does_not_fit_is_an_error(tiny):
  proxy = make_proxy(tiny, ('SimpleSokoban',), 1, 1, max_context=96)
  message = r'agent\.max_context=96: a first prompt of SimpleSokoban and its reply need \d+ \+ 64 tokens'
  with pytest.raises(UserError, match=message):
    proxy.rollout(scripted_tokens(tiny, [['Up'] * 5]), 70)
  with pytest.raises(UserError, match=r'agent\.max_context=96'):
    proxy.check_first_prompts(70)
  assert proxy.rollout(ScriptedText(['Up'] * 5), 70).episodes[0].turns


class Fragile:
  """Fails at its reset for seeds that 3 divides, and at 'Break'."""

  rules = 'Do not break it.'
  action_names = ('Push', 'Break')

  def reset(self, seed):
    if seed % 3 == 0:
      raise RuntimeError('no such level')
    self.pushed = 0
    return f'level {seed}'

  def step(self, action):
    if action == 'Break':
      raise ValueError('broken')
    self.pushed += 1
    return f'pushed {self.pushed}', 0.5, self.pushed == 3, self.pushed == 3


@pytest.fixture
def outside(tiny):
  """Levels 30 to 33, one episode each."""
  env = make('python', {'class_path': f'{__name__}:Fragile'})
  specs = [EnvSpec('Fragile', env, Budget(4, 6, 3), 50, 4)]

  def proxy(**changes):
    context = ContextManager(tiny, specs, context_settings())
    return AgentProxy(EnvStateManager(specs, 1), context, limits(**changes))

  return proxy


def _say(*turns):
  return ['</think><answer>' + turn + '</answer>' for turn in turns]


@pytest.mark.parametrize('form', ['tokens', 'text'])
def test_faults_of_an_environment_end_its_episodes_alone(outside, tiny, form):
  proxy = outside()
  if form == 'tokens':
    rows = [_say('Push', 'Push || Push')] * 4
    rows[1] = _say('Push', 'Push || Break || Push')
    rollout = proxy.rollout(scripted_tokens(tiny, rows), 30)
  else:

    class Script:
      writes_tokens = False

      def reply(self, log):
        turns = {0: 'Push', 1: 'Push || Push'}
        broken = {row: 'Push || Break || Push' if (row, log.turn) == (1, 1) else turns[log.turn] for row in log.live}
        return {row: TextReply(f'<think></think><answer>{x}</answer>') for row, x in broken.items()} or None

    rollout = proxy.rollout(Script(), 30)
  first, second, third, fourth = rollout.episodes
  assert (first.status, first.turns, first.outside) == (Status.ENV_ERROR, [], True)
  assert first.error.startswith('reset raised RuntimeError: no such level (test_agent_proxy.py:')
  assert (second.status, [t.reward for t in second.turns]) == (Status.ENV_ERROR, [0.5, 0.5])
  assert second.turns[1].actions == ['Push'] and 'broken' in second.error
  assert third.success and third.env_return == 1.5 and third.error == ''
  assert fourth.status == Status.ENV_ERROR and not fourth.turns
  assert rollout.anchors[:, 0].tolist() == [-1, 0, 1, -1]
  # An environment outside may say anything: a first prompt that does not fit is no error of the config.
  proxy = outside(max_context=80)
  proxy.check_first_prompts(30)
  rollout = proxy.rollout(scripted_tokens(tiny, [_say('Push')] * 4), 30)
  assert [e.status for e in rollout.episodes] == [
    Status.ENV_ERROR, Status.OUT_OF_CONTEXT, Status.OUT_OF_CONTEXT, Status.ENV_ERROR
  ]  # fmt: skip
