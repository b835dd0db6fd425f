"""The built-in runner plays an environment of the config. `test_agent_player.py` compares its rows with the loop's."""

from __future__ import annotations

import base64
import io
import types

import numpy as np
import pytest
from PIL import Image

from ragen_jax import build, build_agents
from ragen_jax import envs as registry
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.envs import Budget
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.models import presets
from ragen_jax.serving.client import Task
from ragen_jax.serving.play import env_program
from ragen_jax.serving.play.env_program import EnvironmentProgram, ServedSpeaker
from tests.support import text_games
from tests.support.configs import small_config

FIRST = 90_000


@pytest.fixture(scope='module')
def tokenizer():
  return ChatTokenizer(presets.resolve(presets.TINY, ''))


def _task(mode='train', **fields):
  given = dict(
    rollout_id='r', attempt_id='r.1', number=1, mode=mode, group='g', input={'seed': FIRST, 'member': 0},
    timeout_s=60.0, heartbeat_s=0.0, server_url='http://127.0.0.1:1', api_key='rk-key',
  )  # fmt: skip
  return Task(**given | fields)


class Answers:
  """Stands for the server: the answers to calls in order, and what was asked and posted."""

  def __init__(self, monkeypatch, tokenizer, *answers):
    self.asked, self.rewards, self._answers, self._tokenizer = [], [], list(answers), tokenizer
    monkeypatch.setattr(env_program, '_post', self._post)
    monkeypatch.setattr(env_program.client, 'reward', lambda value, **fields: self.rewards.append((value, fields)))
    monkeypatch.setattr(env_program.time, 'sleep', lambda _: None)

  def _post(self, url, key, body, timeout_s):
    self.asked.append(body)
    answer = self._answers.pop(0)
    if isinstance(answer, int):
      return answer, {'error': {'message': 'no room'}}
    ids = [*self._tokenizer.encode(answer), self._tokenizer.stop_ids[0]]
    return 200, {'id': f'call-{len(self.asked)}', 'choices': [{'token_ids': ids}]}


@pytest.fixture
def program(tokenizer):
  return make_program(tokenizer)


def make_program(tokenizer, game=f'{text_games.GAMES}:Climb', options=None, processor=None, **fields):
  def make(mode):
    made.append(mode)
    config = small_config(agent__max_context=512, agent__max_response_tokens=32, **fields)
    env = registry.make('python', {'class_path': game, 'workers': 0} | (options or {}))
    specs = [EnvSpec('Climb', env, Budget(20, 20, 1), 25, 1)]
    envs = build_agents.EnvStateManager(specs, 1, processor=processor).fresh_copy()
    limits = build.episode_limits(config, specs)
    return build_agents.AgentProxy(envs, build.context_manager(config, tokenizer, specs), limits)

  made = []
  return types.SimpleNamespace(play=EnvironmentProgram(make, 'policy'), made=made)


UP = '<think>go</think><answer>Up</answer>'.removeprefix('<think>')


def test_rewards_go_to_the_calls_that_earned_them(monkeypatch, tokenizer, program):
  # From rung 1 + 90000 % 3 = 1 of 5: two turns of luck 2 reach the top.
  server = Answers(monkeypatch, tokenizer, 'nonsense', 503, UP, UP)
  assert program.play(_task(input={'seed': FIRST, 'member': 1})) == 0.0
  assert [(value, f['call'], f['name']) for value, f in server.rewards] == [
    (-0.1, 'call-1', 'format'), (0.75, 'call-3', 'environment'), (1.25, 'call-4', 'environment'),
    (0.0, 'call-4', 'success'),
  ]  # fmt: skip
  first, *_, busy, again, last = [body['prompt'] for body in server.asked]
  assert busy == again and last[: len(again)] == again, 'a call is repeated, and the conversation grows'
  reply = [*tokenizer.encode('nonsense'), tokenizer.stop_ids[0]]
  assert again[: len(first) + len(reply)] == [*first, *reply]


def test_members_have_luck_of_their_own(monkeypatch, tokenizer, program):
  server = Answers(monkeypatch, tokenizer, *[UP] * 6)
  program.play(_task(input={'seed': FIRST, 'member': 0}))
  assert len(server.asked) == 4, 'one rung a turn'
  program.play(_task(input={'seed': FIRST, 'member': 3}))
  assert len(server.asked) == 6, 'two rungs a turn'
  assert program.made == ['train'], 'one loop plays one episode after the other'
  Answers(monkeypatch, tokenizer, *[UP] * 4)
  program.play(_task('val'))
  assert program.made == ['train', 'val']


def test_a_broken_environment_and_a_refused_call_fail_the_attempt(monkeypatch, tokenizer, program):
  server = Answers(monkeypatch, tokenizer, UP)
  monkeypatch.setattr(text_games.Climb, 'step', lambda *_: 1 / 0)
  with pytest.raises(RuntimeError, match='ZeroDivisionError'):
    program.play(_task())
  monkeypatch.undo()
  server = Answers(monkeypatch, tokenizer, UP, 410)
  with pytest.raises(RuntimeError, match='410: no room'):
    program.play(_task())
  assert server.rewards == []
  server = Answers(monkeypatch, tokenizer, *[UP] * 4)
  program.play(_task())
  assert len(server.rewards) == 5 and program.made == ['train'], 'the loop is used again'


def test_an_episode_ends_when_its_context_is_full(monkeypatch, tokenizer, program):
  server = Answers(monkeypatch, tokenizer, *['nonsense ' * 9] * 9)
  program.play(_task())
  assert 1 < len(server.asked) < 9
  assert len(server.asked[-1]['prompt']) <= 512 - 32 and {b['max_tokens'] for b in server.asked} == {32}


def test_a_context_of_single_turns_has_a_row_for_each_turn(monkeypatch, tokenizer):
  server = Answers(monkeypatch, tokenizer, *[UP] * 4)
  make_program(tokenizer, agent__context='single_turn', agent__context_turns=1).play(_task())
  prompts = [body['prompt'] for body in server.asked]
  assert len(prompts) == 4 and max(map(len, prompts)) - min(map(len, prompts)) < 10


def test_a_speaker_says_nothing_for_an_episode_that_is_over():
  assert ServedSpeaker(_task(), 'policy').reply(types.SimpleNamespace(live=[])) is None


@pytest.mark.parametrize('whole', [True, False], ids=['whole rows', 'single turns'])
def test_calls_have_the_images_of_their_row(monkeypatch, whole):
  tokenizer = ChatTokenizer(presets.resolve(presets.TINY_VL, ''), images=True)
  wait, toggle = (UP.replace('Up', action) for action in ('Wait', 'Toggle'))
  server = Answers(monkeypatch, tokenizer, wait, 503, toggle, toggle)
  fields = {} if whole else {'agent__context': 'single_turn', 'agent__context_turns': 1}
  processor, options = presets.processor(presets.TINY_VL, ''), {'images': 1, 'image_size': (4, 6)}
  make_program(tokenizer, 'tests.envs.outside.test_images:Lamp', options, processor, **fields).play(_task())
  shown = []
  for body in server.asked:
    found = [np.asarray(Image.open(io.BytesIO(base64.b64decode(x.partition(',')[2])))) for x in body['images']]
    assert body['prompt'].count(tokenizer.placeholder) == sum(x.size // 3 // processor.factor**2 for x in found)
    shown.append([int(x.max()) for x in found])
  # The second call is repeated, because the server was busy.
  assert shown == ([[0], [0, 0], [0, 0], [0, 0, 100]] if whole else [[0], [0], [0], [100]])
