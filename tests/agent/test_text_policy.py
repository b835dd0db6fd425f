"""Text policies: they are treated as a policy in training is, and play as well as they should."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from ragen_jax import build
from ragen_jax.agent.agent_proxy import AgentProxy, Limits
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.context_manager import PastTurn
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.text_policy import NO_REPLY, RandomPolicy, Said, SolverPolicy, play
from ragen_jax.agent.trajectory import Status
from ragen_jax.models import presets
from ragen_jax.sampling.sampler import Sampling
from tests.modes.test_play import ScriptedSampler
from tests.support import builders

# Of the right form and not; too many actions; unknown ones.
REPLIES = [
  'hm</think><answer>Down</answer>',
  'Left',
  '</think><answer>Right || Jump || Left || Up || Left</answer>',
  '</think><answer>Down || Down || Right || Right || Down || Right</answer>',
  '</think><answer>Up</answer>',
]


def _tokenizer():
  return ChatTokenizer(presets.resolve('tiny', ''))


def _parts(tag, groups, size, **fields):
  config = builders.small_config(**{'train__tags': (tag,), 'envs__FrozenLake__max_turns': 5} | fields)
  specs = build.env_groups(config, (tag,), (groups,))
  return EnvStateManager(specs, size), build.context_manager(config, _tokenizer(), specs)


class Script:
  """Says what was written before; `lost` turns have no reply."""

  def __init__(self, replies, lost=()):
    self.replies, self.lost = replies, lost

  def speak(self, envs, rows, chats, turn):
    return [Said('' if turn in self.lost else self.replies[turn], answered=turn not in self.lost) for _ in rows]


def test_replies_bring_what_the_same_replies_bring_in_a_rollout():
  envs, context = _parts('FrozenLake', 6, 2)
  limits = Limits(
    max_turns=5, max_response_tokens=64, max_context=1024, format_penalty=-0.1, size_step=256, drop_finished=False
  )
  sampler = ScriptedSampler(context.tokenizer, [REPLIES] * 12)
  there = AgentProxy(envs, context, sampler, limits).rollout(None, 500, jax.random.key(0), Sampling()).episodes
  script = Script([context.reply_prefix + reply for reply in REPLIES])
  here = play(envs, context, script, 500, format_penalty=-0.1, pictured=[0, 5])
  for a, b in zip(here.episodes, there, strict=True):
    # Boards are drawn of those that were asked for only.
    told = [(t.observation, t.reply, t.actions, t.reward, t.penalty, t.valid, t.effective) for t in a.turns]
    assert told == [(t.observation, t.reply, t.actions, t.reward, t.penalty, t.valid, t.effective) for t in b.turns]
    assert (a.status, a.final_observation, a.level_seed, a.group) == (
      b.status, b.final_observation, b.level_seed, b.group
    )  # fmt: skip
    assert all(t.tokens > 0 for t in a.turns + b.turns)
  assert {Status.FAILURE, Status.OUT_OF_ACTIONS} <= {e.status for e in there}
  assert [bool(e.final_picture is not None) for e in here.episodes] == [row in (0, 5) for row in range(12)]
  assert {row: len(chats) for row, chats in here.chats.items()} == {0: len(there[0].turns), 5: len(there[5].turns)}


@pytest.mark.parametrize('mode', ['full', 'limited_multi_turn', 'single_turn'])
@pytest.mark.parametrize('think', [True, False])
def test_messages_in_the_chat_format_are_the_prompt_that_a_model_is_fed(mode, think):
  _, context = _parts('FrozenLake', 1, 1, agent__context=mode, agent__context_turns=3, agent__think=think)
  tokenizer = context.tokenizer
  past, replies, fed = [], [], ''
  for turn in range(5):
    ids, fresh = context.prompt(0, past, f'board {turn}', 10 - turn, used=0, room=10_000)
    fed = ('' if fresh else fed) + tokenizer.decode(ids)
    chat = context.messages(0, past, replies, f'board {turn}', 10 - turn)
    written = ''.join(f'<|im_start|>{m["role"]}\n{m["content"]}<|im_end|>\n' for m in chat)
    assert written + '<|im_start|>assistant\n' + context.reply_prefix == fed
    after = f'number {turn}</think><answer>Up</answer>'
    replies.append(context.reply_prefix + after)
    sampled = (*tokenizer.encode(after), tokenizer.stop_ids[0])
    past.append(PastTurn(f'board {turn}', 10 - turn, ('Up',), 0.5 * turn, sampled, True))
    fed += tokenizer.decode(sampled)


def test_a_reply_that_never_came_is_a_turn_that_is_not_valid():
  envs, context = _parts('FrozenLake', 2, 1)
  script = Script(['<think></think><answer>Up</answer>'] * 5, lost=(1,))
  played = play(envs, context, script, 500, format_penalty=-0.25, pictured=[0])
  lost = played.episodes[0].turns[1]
  assert (lost.valid, lost.actions, lost.penalty, lost.answered) == (False, [], -0.25, False)
  assert played.episodes[0].turns[2].answered
  assert [m['content'] for m in played.chats[0][2] if m['role'] == 'assistant'][-1] == NO_REPLY


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
  return _parts('FrozenLake', 48, 8)


def test_random_play_wins_as_often_as_a_markov_chain_says(lake):
  envs, context = lake
  boards = [text.split('\n') for text in envs.reset(123)[::8]]
  chances = np.asarray([_chance_of_random_play(board) for board in boards])
  played = play(envs, context, RandomPolicy(context, np.random.default_rng(0)), 123, format_penalty=-0.1)
  won = np.asarray([e.success for e in played.episodes]).reshape(48, 8).mean(axis=1)
  deviation = np.sqrt((chances * (1 - chances) / 8).sum()) / 48
  assert 0.02 < chances.mean() < 0.4
  assert abs(won.mean() - chances.mean()) < 4 * deviation
  turns = [t for e in played.episodes for t in e.turns]
  assert all(t.valid and not t.penalty for t in turns)
  first = np.bincount([len(played.episodes[i].turns[0].reply.split('||')) for i in range(384)], minlength=6)
  assert first[0] == 0 and (np.abs(first[1:] / 384 - 0.2) < 4 * np.sqrt(0.16 / 384)).all()


def test_random_play_is_the_same_every_time_and_needs_words_outside_jax(lake):
  envs, context = lake
  first, second = (
    play(envs, context, RandomPolicy(context, np.random.default_rng(3)), 123, format_penalty=0.0).episodes
    for _ in range(2)
  )
  assert first == second
  config = builders.small_config()
  for words, can in (((), False), (('Up', 'Down'), True)):
    with config.unlocked():
      config.envs.Mine = {
        'type': 'http', 'url': 'http://127.0.0.1:9', 'task': 'Guess.', 'action_names': words,
        'max_turns': 1, 'max_actions': 1, 'max_actions_per_turn': 1, 'max_words': 9,
      }  # fmt: skip
    assert RandomPolicy.can_play(build.env_groups(config, ('Mine',), (1,))[0].env) == can


@pytest.mark.parametrize('tag', ['FrozenLake', 'Countdown'])
def test_the_solver_reaches_about_the_best_possible(tag, lake):
  groups, size = (48, 8) if tag == 'FrozenLake' else (6, 2)
  envs, context = lake if tag == 'FrozenLake' else _parts(tag, groups, size)
  envs.reset(123)
  best = envs.optimal()[::size].astype(float)
  played = play(envs, context, SolverPolicy(context), 123, format_penalty=-0.1)
  won = np.asarray([e.success for e in played.episodes]).reshape(groups, size).mean(axis=1)
  deviation = np.sqrt((best * (1 - best) / size).sum()) / groups
  assert abs(won.mean() - best.mean()) <= 4 * deviation + 1e-6
  assert all(t.valid for e in played.episodes for t in e.turns)
