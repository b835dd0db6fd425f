"""Turns in threads: rows go on while others wait for their environments, and the episodes are the same."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types

import jax
import numpy as np
import pytest

from ragen_jax import build
from ragen_jax import envs as registry
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.episode import Status
from ragen_jax.agent.language_model import param_state
from ragen_jax.agent.sampler_speaker import SamplerSpeaker
from ragen_jax.agent.speakers import RandomSpeaker
from ragen_jax.agent.turns import Turns
from ragen_jax.config.checks import check_config
from ragen_jax.envs.base import Budget
from ragen_jax.envs.outside import local
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.sampling.draw import Sampling
from ragen_jax.sft.demonstrations import DemonstrationStyle, Demonstrator
from ragen_jax.utils.errors import UserError
from tests.agent.test_schedules import assert_same
from tests.support import light_games
from tests.support.configs import small_config

_LADDER = 'tests.support.light_games:Climb'
_SMALL = dict(
  agent__max_response_tokens=24, length_step=256, agent__drop_finished=False, agent__schedule='continuous',
  agent__decode_chunk=5,
)  # fmt: skip

# Of `Patient`: how many other episodes are over, and when that changes.
_over = 0
_changed = threading.Condition()


class Patient:
  """Every step ends an episode but those of the first member, whose first step waits until all others are over."""

  rules = 'Say anything.'
  action_names = ('Up', 'Down', 'Left', 'Right')

  def __init__(self, others: int, fails: bool = False):
    self.others, self.fails = others, fails

  def reset(self, seed, member):
    self.first, self.steps = member == 0, 0
    return f'level {seed}'

  def step(self, action):
    global _over
    self.steps += 1
    if self.first and self.steps == 1:
      with _changed:
        assert _changed.wait_for(lambda: _over >= self.others, timeout=30), 'the others have waited, too'
      if self.fails:
        raise OSError('broken')
    if not self.first:
      with _changed:
        _over += 1
        _changed.notify_all()
    done = not self.first or self.steps == 2
    return f'{action} {self.steps}', 1.0, done, {'success': done} if done else {}


class Endless:
  """Goes on whatever is said, and moves a clock."""

  rules = 'Say anything.'
  action_names = ('Up', 'Down', 'Left', 'Right')
  seconds = 0.0

  def reset(self, seed):
    return f'level {seed}'

  def step(self, action):
    Endless.seconds += 10.0
    return f'after {action}', 0.25, False, {}


@pytest.fixture(scope='module')
def policy():
  return build.load_policy(small_config(**_SMALL))


def _python(tag, class_path, groups, *, per_turn=2, **options):
  """The spec of a class outside JAX."""
  env = registry.make('python', {'class_path': class_path, 'step_timeout_s': 60.0, **options})
  return EnvSpec(tag, env, Budget(4, 6, per_turn), 30, groups)


def _play(policy, *specs, **changes):
  """A rollout of groups of four."""
  config = small_config(**_SMALL | changes)
  proxy = build.agent_proxy(config, policy.tokenizer, policy.sampler, list(specs), 4)
  assert proxy.limits.env_threads == config.agent.env_threads
  speaker = SamplerSpeaker(policy.sampler, param_state(policy.model), jax.random.key(3), Sampling(0.9, 1.0, 0))
  return proxy.rollout(speaker, 10_000)


@pytest.mark.slow
@pytest.mark.parametrize('processes', [0, 2])
def test_the_episodes_are_those_of_rows_that_play_together(policy, processes):
  ladder = _python('Ladder', _LADDER, 2, workers=1 if processes else 3, processes=processes)
  (lake,) = build.env_specs(small_config(), ('FrozenLake',), (1,))
  for in_flight in (0, 4):
    together, apart = (
      _play(policy, ladder, lake, agent__rows_in_flight=in_flight, agent__env_threads=n) for n in (0, 3)
    )
    assert len({len(e.turns) for e in together.episodes}) > 1
    assert any(len(t.rewards) > 1 for e in together.episodes for t in e.turns if e.tag == 'Ladder')
    assert not any(e.error for e in together.episodes)
    assert_same(apart, together)
    for e, other in zip(apart.episodes, together.episodes, strict=True):
      assert [(t.rewards, t.effective, t.actions_left) for t in e.turns] == [
        (t.rewards, t.effective, t.actions_left) for t in other.turns
      ]
      assert (e.status, e.final_observation) == (other.status, other.final_observation)


@pytest.mark.parametrize('fails', [False, True])
def test_rows_go_on_while_one_waits_for_its_environment(policy, monkeypatch, fails):
  """The first row's step ends only after the whole episodes of the others, which the device samples meanwhile."""
  monkeypatch.setattr(sys.modules[Patient.__module__], '_over', 0)
  spec = _python('Patient', f'{__name__}:Patient', 1, per_turn=1, workers=2, options={'others': 3, 'fails': fails})
  # Fewer rows than episodes: what waits for its environment keeps its row of the device.
  first, *others = _play(policy, spec, agent__env_threads=2, agent__rows_in_flight=2).episodes
  assert all(e.status == Status.SUCCESS for e in others), [e.error for e in others]
  if fails:
    assert first.status == Status.ENV_ERROR and first.error.startswith('step raised OSError: broken')
  else:
    assert first.status == Status.SUCCESS and len(first.turns) > len(others[0].turns)


def test_an_environment_that_may_not_be_used_in_any_thread_plays_in_the_main_one(policy, monkeypatch):
  seen = []
  monkeypatch.setattr(light_games.Climb, 'step', _noting(seen))
  ladder = _python('Ladder', _LADDER, 1, workers=0)
  episodes = _play(policy, ladder, agent__env_threads=2, agent__rows_in_flight=2).episodes
  assert not any(e.error for e in episodes)
  assert seen and all(thread is threading.main_thread() for thread in seen)


def _noting(seen):
  step = light_games.Climb.step

  def noted(self, action):
    seen.append(threading.current_thread())
    return step(self, action)

  return noted


class Crowd:
  """Counts the steps that run at a time; each waits a moment for a third one."""

  rules = 'Say anything.'
  action_names = ('Up', 'Down', 'Left', 'Right')
  running = most = 0

  def reset(self, seed):
    return f'level {seed}'

  def step(self, action):
    with _changed:
      Crowd.running += 1
      Crowd.most = max(Crowd.most, Crowd.running)
      _changed.notify_all()
      _changed.wait_for(lambda: Crowd.running > 2, timeout=0.1)
      Crowd.running -= 1
    return action, 1.0, True, True


def test_no_more_rows_play_at_a_time_than_the_environment_s_workers(monkeypatch):
  monkeypatch.setattr(Crowd, 'most', 0)
  envs = EnvStateManager([_python('Crowd', f'{__name__}:Crowd', 16, workers=2)], 1)
  envs.reset(5)
  with contextlib.closing(Turns(envs, 8)) as turns:
    played, over = turns.play({row: ['Up'] for row in range(16)}, wait=False), []
    while True:
      over += played.rows if played else []
      if len(over) == 16:
        break
      played = turns.play({}, wait=True)
  assert sorted(over) == [*range(16)] and not envs.faults
  assert Crowd.most == 2


class Held:
  """Its steps wait until they are let go."""

  rules = 'Say anything.'
  action_names = ('Up', 'Down', 'Left', 'Right')
  begun, go = [], threading.Event()

  def reset(self, seed):
    return f'level {seed}'

  def step(self, action):
    Held.begun.append(action)
    with _changed:
      _changed.notify_all()
    assert Held.go.wait(60)
    return action, 0.0, False, False


def test_a_rollout_that_is_given_up_plays_no_further_action_and_the_next_one_is_its_own(monkeypatch):
  monkeypatch.setattr(Held, 'begun', [])
  monkeypatch.setattr(Held, 'go', threading.Event())
  before = {*threading.enumerate()}
  envs = EnvStateManager([_python('Held', f'{__name__}:Held', 4, workers=1)], 1)
  envs.reset(5)
  turns = Turns(envs, 2)
  assert turns.play({row: ['Up', 'Down'] for row in range(4)}, wait=False) is None
  with _changed:
    assert _changed.wait_for(lambda: Held.begun, timeout=60)
  turns.close()
  Held.go.set()
  for thread in {*threading.enumerate()} - before:
    if thread.name.startswith('ragen_jax-turn'):
      thread.join(60)
      assert not thread.is_alive()
  assert Held.begun == ['Up'], 'neither its second action nor the turns that waited'
  envs.reset(5)
  result = envs.step([['Left']] * 4)
  assert not envs.faults and Held.begun[1:] == ['Left'] * 4 and result.executed.tolist() == [1] * 4


def test_speakers_that_wait_for_all_rows_play_them_together(policy):
  """Random play and demonstrations."""
  config = small_config(**_SMALL, agent__env_threads=2)
  style = DemonstrationStyle(discount=1.0, noise=0.0, hurry=0.0, beginner=0.0, timid=0.0, actions_per_turn=0)
  (lake,) = build.env_specs(config, ('FrozenLake',), (2,))
  for spec, speaker in (
    (_python('Ladder', _LADDER, 2, workers=3), RandomSpeaker(np.random.default_rng(0))),
    (lake, Demonstrator(np.random.default_rng(0), style)),
  ):
    proxy = build.agent_proxy(config, policy.tokenizer, policy.sampler, [spec], 4)
    rollout = proxy.rollout(speaker, 10_000)
    assert all(e.turns and e.status not in (Status.RUNNING, Status.ENV_ERROR) for e in rollout.episodes)


def test_nothing_is_sampled_while_all_rows_are_away_and_the_host_sleeps(policy, monkeypatch):
  asked, budgets = [], []
  reply, decode = SamplerSpeaker.reply, policy.sampler.decode

  def noted_reply(self, log):
    asked.append(1)
    return reply(self, log)

  def noted_decode(_, params, state, key, left, **options):
    budgets.append(left.max())
    return decode(params, state, key, left, **options)

  monkeypatch.setattr(SamplerSpeaker, 'reply', noted_reply)
  monkeypatch.setattr(type(policy.sampler), 'decode', noted_decode)
  crowd = _python('Crowd', f'{__name__}:Crowd', 1, workers=1)  # one after another, each for a moment
  episodes = _play(policy, crowd, agent__env_threads=4, agent__rows_in_flight=2).episodes
  assert budgets and min(budgets) > 0
  assert len(asked) <= len(budgets) + 2 * sum(len(e.turns) for e in episodes) + 2


def test_threads_need_one_process(monkeypatch):
  config = small_config(agent__env_threads=1, agent__schedule='continuous')
  check_config(config)
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  with pytest.raises(UserError, match=r'agent\.env_threads=1: .* 2 processes'):
    check_config(config)


def test_threads_need_a_schedule_in_which_rows_go_on():
  for value, message in ((1, 'must be 0 with agent.schedule='), (-1, 'agent.env_threads=-1')):
    with pytest.raises(UserError, match=message):
      check_config(small_config(agent__env_threads=value))


class Won(Endless):
  """Is won by the first step, and goes on."""

  def step(self, action):
    return (*super().step(action)[:3], {'success': True})


def test_a_won_episode_that_a_time_limit_ends_stays_a_success(policy, monkeypatch):
  monkeypatch.setattr('ragen_jax.agent.episode_log.time', types.SimpleNamespace(monotonic=lambda: Endless.seconds))
  monkeypatch.setattr(Endless, 'seconds', 0.0)
  won = _python('Won', f'{__name__}:Won', 4, workers=1)
  monkeypatch.setattr(type(won.env), 'success_stands', True)  # as in SVG
  monkeypatch.setattr(local, 'read_step', functools.partial(local.read_step, success_stands=True))
  episodes = _play(policy, won, agent__rows_in_flight=1, agent__episode_timeout=5.0).episodes
  stepped = [e for e in episodes if any(t.rewards for t in e.turns)]
  assert len(stepped) > 1 and any(len(e.turns) < 4 for e in stepped)
  for e in stepped:
    assert e.status == Status.SUCCESS and not e.error
    assert not any(t.rewards for t in e.turns[:-1]), 'it ends after the first turn beyond the limit'


@pytest.mark.parametrize('threads', [0, 2])
@pytest.mark.slow
def test_an_episode_or_a_rollout_that_takes_too_long_ends_after_its_turn(policy, monkeypatch, threads):
  """By a clock that only steps move on, by 10 s each; FrozenLake has no limit."""
  monkeypatch.setattr('ragen_jax.agent.episode_log.time', types.SimpleNamespace(monotonic=lambda: Endless.seconds))
  endless = _python('Endless', f'{__name__}:Endless', 1, workers=1)
  (lake,) = build.env_specs(small_config(), ('FrozenLake',), (1,))
  for field, most in (('episode', 15.0), ('rollout', 45.0)):
    monkeypatch.setattr(Endless, 'seconds', 0.0)
    limits = {f'agent__{field}_timeout': most, 'agent__env_threads': threads}
    # One row at a time: what has not begun takes no time of its own.
    episodes = _play(policy, endless, lake, agent__rows_in_flight=1, **limits).episodes
    begun, late = 0.0, 0
    if field == 'rollout':
      assert not episodes[3].turns and episodes[3].error, 'what has not begun samples nothing'
    for e in episodes[:4]:
      if field == 'rollout' and begun > most:
        assert (e.turns, e.status) == ([], Status.ENV_ERROR)
        assert e.error == 'the rollout took longer than agent.rollout_timeout=45'
        late += 1
        continue
      seconds = begun + 10.0 * np.cumsum([len(t.rewards) for t in e.turns])
      over = seconds - (begun if field == 'episode' else 0.0) > most
      assert not over[:-1].any(), 'it ends after the first turn beyond the limit'
      if len(e.turns) < 4 and sum(len(t.rewards) for t in e.turns) < 6:
        assert over[-1] and e.status == Status.ENV_ERROR
        assert e.error == f'the {field} took longer than agent.{field}_timeout={most:g}'
        late += 1
      begun = seconds[-1]
    assert late > 1 and not any(e.error for e in episodes[4:])
