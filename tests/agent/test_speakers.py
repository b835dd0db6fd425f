"""Speakers in text: random play, exact solvers, and models behind a client."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ragen_jax import build
from ragen_jax.agent.agent_proxy import AgentProxy
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.context_manager import NO_REPLY
from ragen_jax.agent.endpoint_client import EndpointSettings
from ragen_jax.agent.endpoint_speaker import EndpointSpeaker
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.episode import TextReply
from ragen_jax.agent.speakers import RandomSpeaker, SolverSpeaker
from ragen_jax.models import presets
from ragen_jax.sampling.draw import PLAIN
from tests.support.configs import small_config
from tests.support.speakers import ScriptedText


def _proxy(tag, groups, size, **fields):
  config = small_config(**{'train__tags': (tag,), 'envs__FrozenLake__max_turns': 5} | fields)
  specs = build.env_specs(config, (tag,), (groups,))
  context = build.context_manager(config, ChatTokenizer(presets.resolve('tiny', '')), specs)
  return AgentProxy(EnvStateManager(specs, size), context, build.episode_limits(config, specs))


def test_a_reply_that_never_came_is_a_turn_that_is_not_valid():
  proxy = _proxy('FrozenLake', 2, 1, agent__format_penalty=-0.25)
  script = ScriptedText(['<think></think><answer>Up</answer>'] * 5, lost=(1,))
  episode = proxy.rollout(script, 500, pictured=[0]).episodes[0]
  lost = episode.turns[1]
  assert (lost.valid, lost.actions, lost.penalty, lost.answered) == (False, [], -0.25, False)
  assert episode.turns[2].answered
  assert [m['content'] for m in episode.turns[2].chat if m['role'] == 'assistant'][-1] == NO_REPLY


class Client(EndpointSpeaker):
  """Replies with the number of the conversation in the order in which they come; notes the conversations."""

  def __init__(self):
    super().__init__(EndpointSettings('http://localhost:1/v1', 'some-model', 0, 1.0, 1, 1), PLAIN)
    self.asked = []

  def replies(self, chats, most):
    self.asked.append(chats)
    assert most == [0] * len(chats)  # the tag has no limit of its own
    return [TextReply(f'reply {i}', tokens=i) for i in range(len(chats))]


def test_a_client_is_sent_the_conversations_of_live_rows_and_replies_go_to_their_rows():
  proxy, client = _proxy('FrozenLake', 3, 2), Client()
  rollout = proxy.rollout(client, 500, pictured=range(6))
  assert [len(chats) for chats in client.asked] == [6] * 5
  for row, episode in enumerate(rollout.episodes):
    assert [(t.reply, t.tokens) for t in episode.turns] == [(f'reply {row}', row)] * 5
    assert [t.chat for t in episode.turns] == [chats[row] for chats in client.asked]
    last = episode.turns[-1].chat
    assert [m['role'] for m in last] == ['system', *['user', 'assistant'] * 4, 'user']
    assert all(turn.observation in last[-1]['content'] for turn in episode.turns[-1:])
  # No tokens, so no rows for an update.
  assert not rollout.trajectory.length.any() and rollout.tokens_sampled == 0


def _chance_of_random_play(board: list[str], turns=5, actions=10, per_turn=5) -> float:
  """On ice that slips to three sides alike, a random action moves to each of the four sides alike."""
  size = len(board)
  (start,) = ((r, c) for r in range(size) for c in range(size) if board[r][c] == 'P')
  where, arrived, won = {start: 1.0}, 0.0, [0.0]
  for _ in range(actions):
    after: dict = {}
    for (r, c), p in where.items():
      for dr, dc in ((0, 1), (1, 0), (0, -1), (-1, 0)):
        at = (min(max(r + dr, 0), size - 1), min(max(c + dc, 0), size - 1))
        if board[at[0]][at[1]] == 'G':
          arrived += p / 4
        elif board[at[0]][at[1]] != 'O':
          after[at] = after.get(at, 0.0) + p / 4
    where = after
    won.append(arrived)
  lengths = [min(sum(x), actions) for x in itertools.product(range(1, per_turn + 1), repeat=turns)]
  return float(np.mean([won[n] for n in lengths]))


@pytest.fixture(scope='module')
def lake():
  """48 levels, 8 episodes each."""
  return _proxy('FrozenLake', 48, 8)


def test_random_play_wins_as_often_as_a_markov_chain_says(lake):
  boards = [text.split('\n') for text in lake.envs.reset(123)[::8]]
  chances = np.asarray([_chance_of_random_play(board) for board in boards])
  episodes = lake.rollout(RandomSpeaker(np.random.default_rng(0)), 123).episodes
  won = np.asarray([e.success for e in episodes]).reshape(48, 8).mean(axis=1)
  deviation = np.sqrt((chances * (1 - chances) / 8).sum()) / 48
  assert 0.02 < chances.mean() < 0.4
  assert abs(won.mean() - chances.mean()) < 4 * deviation
  turns = [t for e in episodes for t in e.turns]
  assert all(t.valid and not t.penalty for t in turns)
  first = np.bincount([len(episodes[i].turns[0].reply.split('||')) for i in range(384)], minlength=6)
  assert first[0] == 0 and (np.abs(first[1:] / 384 - 0.2) < 4 * np.sqrt(0.16 / 384)).all()


def test_random_play_is_the_same_every_time_and_needs_words_outside_jax(lake):
  first, second = (lake.rollout(RandomSpeaker(np.random.default_rng(3)), 123).episodes for _ in range(2))
  assert first == second
  config = small_config()
  for words, can in (((), False), (('Up', 'Down'), True)):
    with config.unlocked():
      config.envs.Mine = {
        'type': 'http', 'url': 'http://127.0.0.1:9', 'task': 'Guess.', 'action_names': words,
        'max_turns': 1, 'max_actions': 1, 'max_actions_per_turn': 1, 'max_words': 9,
      }  # fmt: skip
    assert RandomSpeaker.can_play(EnvStateManager(build.env_specs(config, ('Mine',), (1,)), 1)) == can


@pytest.mark.parametrize('tag', ['FrozenLake', 'Countdown'])
@pytest.mark.slow_cases('Countdown')
def test_the_solver_reaches_about_the_best_possible(tag, lake):
  groups, size = (48, 8) if tag == 'FrozenLake' else (6, 2)
  proxy = lake if tag == 'FrozenLake' else _proxy(tag, groups, size)
  episodes = proxy.rollout(SolverSpeaker(), 123).episodes
  best = proxy.envs.optimal()[::size].astype(float)
  won = np.asarray([e.success for e in episodes]).reshape(groups, size).mean(axis=1)
  deviation = np.sqrt((best * (1 - best) / size).sum()) / groups
  assert abs(won.mean() - best.mean()) <= 4 * deviation + 1e-6
  assert all(t.valid for e in episodes for t in e.turns)


def test_random_play_and_solvers_play_batches_of_several_environments():
  config = small_config()
  tags = ('SimpleSokoban', 'Bandit')
  specs = build.env_specs(config, tags, (2, 3))
  context = build.context_manager(config, ChatTokenizer(presets.resolve('tiny', '')), specs)
  proxy = AgentProxy(EnvStateManager(specs, 2), context, build.episode_limits(config, specs))
  solved = proxy.rollout(SolverSpeaker(), 7).episodes
  assert [e.tag for e in solved] == ['SimpleSokoban'] * 4 + ['Bandit'] * 6
  assert all(e.success for e in solved[:4])
  played = proxy.rollout(RandomSpeaker(np.random.default_rng(0)), 7).episodes
  assert all(t.valid for e in played for t in e.turns)
