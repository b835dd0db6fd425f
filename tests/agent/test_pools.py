"""Pools of both kinds of environment: rows outside JAX against games played by hand, and faults of either kind."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import default
from ragen_jax import build
from ragen_jax import envs as registry
from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.episode import Episode, Status
from ragen_jax.agent.metrics import episode_metrics
from ragen_jax.agent.pools import JaxPool, OutsidePool, make_pool
from ragen_jax.envs import Fault, Session, TextEnvironment
from ragen_jax.envs.base import Budget, Environment, State, StepOutput
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.utils.errors import UserError
from tests.support.compilations import compiled
from tests.support.speakers import context_settings
from tests.support.stopped_clock import stop_clock


class Tally:
  """Counts what is added, up to 6; 'Bad' is a fault. Seeds from 1000 on cannot be reset, the odd ones of 500."""

  rules = 'Count.'
  action_names = ('One', 'Two', 'Bad', 'Stay')

  def reset(self, seed, member):
    if seed >= 1000 or (seed >= 500 and seed % 2):
      raise RuntimeError(f'seed {seed}')
    self.sum, self.luck = seed % 2, member
    return f'sum {self.sum}'

  def step(self, action):
    self.sum += {'One': 1, 'Two': 2, 'Bad': 0, 'Stay': 0}[action]
    reward = float('nan') if action == 'Bad' else self.sum + self.luck / 8
    return f'sum {self.sum}', reward, self.sum >= 6, self.sum == 6


BUDGET = Budget(max_turns=4, max_actions=5, max_actions_per_turn=3)


def outside(groups, tag='Tally', **options):
  env = registry.make('python', {'class_path': f'{__name__}:Tally', **options})
  return EnvSpec(tag, env, BUDGET, 50, groups)


@dataclasses.dataclass(frozen=True)
class Paid(FrozenLake):
  """FrozenLake whose rewards depend on what equality does not see."""

  scale: float = 0.0
  bonus: float = dataclasses.field(default=0.0, compare=False)
  known = 1.0

  def step(self, state, action, key):
    after, out = super().step(state, action, key)
    return after, out.replace(reward=out.reward * 0 + jnp.sign(1 / jnp.float32(self.scale)) * self.known + self.bonus)

  @functools.cached_property
  def table(self):
    return np.zeros(3)


@pytest.mark.slow
def test_environments_share_programs_only_if_they_are_alike():
  def reward(env):
    pool = make_pool(EnvSpec('Lake', env, BUDGET, 50, 1), 1, 1)
    pool.reset(np.array([3]), np.array([0]))
    return pool.step([[1]]).rewards[0][0], pool._step

  one, same, known = Paid(), Paid(), Paid()
  object.__setattr__(known, 'known', 3.0)
  assert same.table.size == 3 and one == known == Paid(scale=-0.0) == Paid(bonus=7.0)
  found = [reward(env) for env in (one, same, Paid(scale=-0.0), Paid(bonus=7.0), known)]
  assert [x for x, _ in found] == [1, 1, -1, 8, 3]
  assert found[0][1] is found[1][1]


def test_few_rows_and_many_share_programs_and_each_is_played_as_the_others():
  """Also with more rows than are played at least."""
  (spec,) = build.env_specs(default.get_config(), ('FrozenLake',), (1,))
  seeds, luck, found = np.arange(100, 140), np.arange(40) % 3, {}
  actions = [[i % 4, (i + 1) % 4][: i % 3] for i in range(40)]
  for rows in (40, 2, 5):
    with compiled() as names:
      pool = make_pool(spec, rows, 1)
      pool.reset(seeds[-rows:], luck[-rows:])
      after = pool.states_after(actions[-rows:])
      steps = [pool.step(actions[-rows:]) for _ in range(2)]
    assert rows != 5 or names == []
    assert {len(x) for x in jax.tree.leaves((pool.states, pool.fresh_states, after))} == {rows} == {len(pool.render())}
    assert {len(x) for step in steps for x in step} == {rows} and len(pool.levels()) == len(pool.optimal()) == rows
    found[rows] = pool.states, pool.fresh_states, after, steps, pool.used
  for rows in (2, 5):
    for a, b in zip(*(jax.tree.leaves(found[n][:3]) for n in (40, rows)), strict=True):
      np.testing.assert_array_equal(a[-rows:], b)
    for a, b in zip(found[40][3], found[rows][3], strict=True):
      assert list(a.rewards)[-rows:] == list(b.rewards)
      np.testing.assert_array_equal(a.executed[-rows:], b.executed)
    np.testing.assert_array_equal(found[40][4][-rows:], found[rows][4])


@pytest.fixture(scope='module')
def mixed():
  """Four rows of FrozenLake, then eight outside."""
  (lake,) = build.env_specs(default.get_config(), ('FrozenLake',), (1,))
  return EnvStateManager([lake, outside(2)], 4)


def test_rows_outside_equal_their_game_played_by_hand(mixed):
  texts = mixed.reset(20)
  assert texts[4:] == ['sum 1'] * 4 + ['sum 0'] * 4
  rng = np.random.default_rng(0)
  games = [Tally() for _ in range(8)]
  for i, game in enumerate(games):
    game.reset(21 + i // 4, i % 4)
  over, won, used = np.zeros(8, bool), np.zeros(8, bool), np.zeros(8, int)
  for _ in range(3):
    turns = [[Tally.action_names[a] for a in rng.choice([0, 1, 3], size=rng.integers(0, 5))] for _ in range(8)]
    result = mixed.step([[0]] * 4 + turns)
    for i, game in enumerate(games):
      reward, executed, effective = 0.0, 0, 0
      for action in turns[i][:3]:
        if over[i] or used[i] == 5:
          break
        _, r, over[i], won[i] = game.step(action)
        reward, executed, effective, used[i] = reward + r, executed + 1, effective + (action != 'Stay'), used[i] + 1
      assert (result.reward[4 + i], result.executed[4 + i]) == (reward, executed)
      assert result.effective[4 + i] == effective
    assert result.done[4:].tolist() == over.tolist() and result.success[4:].tolist() == won.tolist()
    assert mixed.render()[4:] == [f'sum {game.sum}' for game in games]
    assert mixed.actions_left()[4:].tolist() == (5 - used).tolist()
  assert over.any() and not over.all() and (used == 5).any()
  assert not mixed.faults
  mixed.reset(20)
  best = mixed.optimal()
  assert np.isnan(best[4:]).all() and not np.isnan(best[:4]).any()


def test_a_fault_ends_its_episode_alone_and_is_told_once(mixed, caplog):
  with caplog.at_level(logging.WARNING, 'ragen_jax.agent.pools'):
    mixed.reset(20)
    turn = [['One', 'Bad', 'One'], ['Two', 'Two'], ['Bad'], ['Stay']] * 2
    result = mixed.step([[0]] * 4 + turn)
    # What came before the fault counts; the fault and what comes after bring nothing.
    assert result.reward[4:6].tolist() == [2.0, 3 + 5 + 2 / 8]
    assert result.executed[4:].tolist() == [1, 2, 0, 1] * 2
    assert result.done[4:].tolist() == [True, False, True, False] * 2 and not result.success[4:].any()
    assert sorted(mixed.faults) == [4, 6, 8, 10]
    assert mixed.faults[6] == Fault('reward is not within 1e+15', 'nan')
    assert mixed.render()[4] == 'sum 2'
    result = mixed.step([[0]] * 4 + [['Two']] * 8)
    assert result.executed[4:].tolist() == [0, 1, 0, 1] * 2 and np.isfinite(result.reward).all()
    mixed.reset(20)
    assert not mixed.faults
    mixed.step([[]] * 4 + [['Bad']] * 8)
    assert sorted(mixed.faults) == list(range(4, 12))
  assert [r.message for r in caplog.records] == [
    'envs.Tally, level 21: reward is not within 1e+15: nan; the episode ends as an error.'
    ' Further ones are only counted, in Tally/env_errors'
  ]


def test_a_reset_that_fails_is_an_episode_without_a_turn(mixed, caplog):
  with caplog.at_level(logging.WARNING, 'ragen_jax.agent.pools'):
    texts = mixed.reset(500)  # levels 501 and 502
  assert sorted(mixed.faults) == [4, 5, 6, 7] and texts[4:] == [''] * 4 + ['sum 0'] * 4
  assert len(caplog.records) == 1 and 'level 501: reset raised RuntimeError: seed 501' in caplog.records[0].message
  result = mixed.step([[]] * 4 + [['One']] * 8)
  assert result.executed[4:].tolist() == [0] * 4 + [1] * 4
  assert result.done[4:].tolist() == [True] * 4 + [False] * 4


def test_shares_of_rows_outside_put_together_are_the_whole():
  specs, turn = [outside(3)], [['One', 'Two'], ['Bad'], ['Two'], []] * 3
  whole = EnvStateManager(specs, 4)
  parts = [EnvStateManager(specs, 4, share=i, shares=3) for i in range(3)]
  texts = whole.reset(6)
  assert [text for part in parts for text in part.reset(6)] == texts
  result = whole.step(turn)
  results = [part.step(turn[:4]) for part in parts]
  for name in ('reward', 'executed', 'effective', 'done', 'success'):
    np.testing.assert_array_equal(np.concatenate([getattr(r, name) for r in results]), getattr(result, name))
  assert {part.first_row + row for part in parts for row in part.faults} == set(whole.faults) == {1, 5, 9}


class Late:
  """Hangs where it is read; the hook `hang` is that of the test."""

  hang = staticmethod(lambda: None)

  def __repr__(self):
    assert threading.current_thread() is not threading.main_thread()  # which has no time limit
    self.hang()
    return 'late'


class LateError(Late, Exception):
  __str__ = Late.__repr__


class Tardy(Tally):
  """Returns or raises what hangs: at odd seeds of 500 at once, else at 'Bad'."""

  def reset(self, seed, member):
    return Late() if seed >= 500 and seed % 2 else super().reset(seed, member)

  def step(self, action):
    if action == 'Stay':
      raise LateError
    return (f'sum {self.sum}', Late(), False, False) if action == 'Bad' else super().step(action)


def test_results_that_hang_where_they_are_read_end_their_episodes_alone(monkeypatch, caplog):
  clock = stop_clock(monkeypatch, 'ragen_jax.utils.threads')
  monkeypatch.setattr(Late, 'hang', lambda self: clock.hang(1.0))
  envs = EnvStateManager([outside(2, 'Tardy', class_path=f'{__name__}:Tardy', step_timeout_s=0.1)], 2)
  try:
    with caplog.at_level(logging.WARNING, 'ragen_jax.agent.pools'):
      assert envs.reset(1) == ['sum 1'] * 2 + ['sum 0'] * 2
      result = envs.step([['One', 'Bad'], ['One'], ['Stay'], ['One', 'One']])
      assert result.reward.tolist() == [2.0, 2 + 1 / 8, 0.0, 3 + 2 / 8]
      assert result.done.tolist() == [True, False, True, False]
      assert envs.faults == dict.fromkeys((0, 2), Fault('step took longer than 0.1 s', hung=True))
      assert envs.reset(501) == [''] * 2 + ['sum 0'] * 2
      assert envs.faults == dict.fromkeys((0, 1), Fault('reset took longer than 0.1 s', hung=True))
      assert envs.step([[], [], ['One'], ['One']]).reward.tolist() == [0.0, 0.0, 1.0, 1 + 1 / 8]
  finally:
    clock.release.set()
  told = ['level 2: step took longer than 0.1 s', 'level 501: reset took longer than 0.1 s']
  assert [r.getMessage().split('; ')[0] for r in caplog.records] == [f'envs.Tardy, {text}' for text in told]


class Fickle(Tally):
  """Begins with the member's number."""

  def reset(self, seed, member):
    return super().reset(seed, member) + f', member {member}'


def test_members_that_begin_differently_are_told_of_once(caplog):
  specs = [outside(2, 'Fickle', class_path=f'{__name__}:Fickle')]
  with caplog.at_level(logging.WARNING, 'ragen_jax.agent.pools'):
    for _ in range(2):
      EnvStateManager([outside(2)], 4).reset(1)
      assert not caplog.records
    envs = EnvStateManager(specs, 4)
    envs.reset(1)
    envs.reset(9)
  assert len(caplog.records) == 1 and 'first observations differ within a group' in caplog.records[0].message


@dataclasses.dataclass(frozen=True, eq=False)
class Careless(TextEnvironment):
  """Its session itself is at fault."""

  name = 'careless'
  at: str

  def rules(self):
    return 'x'

  def open(self, rows):
    if self.at == 'open':
      raise OSError('closed')
    return _CarelessSession(self.at)


class _CarelessSession(Session):
  def __init__(self, at):
    self.at = at

  def reset(self, rows, seeds, members):
    return ['x'] * (len(rows) - (self.at == 'reset'))

  def step(self, rows, actions):
    return [('x', 1.0, False, False)] * len(rows) if self.at == 'end' else None

  def end(self):
    raise OSError('gone')


@pytest.mark.parametrize(
  ('at', 'kind'),
  [
    ('open', 'reset raised OSError'),
    ('reset', 'reset did not answer for every row'),
    ('step', 'step did not answer for every row'),
    ('end', None),
  ],
)
def test_a_session_at_fault_is_contained_too(at, kind, caplog):
  env = registry.make(f'{__name__}:Careless', {'at': at})
  envs = EnvStateManager([EnvSpec('Careless', env, BUDGET, 50, 1)], 4)
  envs.reset(1)
  result = envs.step([['a']] * 4)
  caplog.clear()
  for _ in range(2):
    envs.end()
  told = ['envs.Careless: end raised OSError: gone; its episodes may not be released']
  assert [r.getMessage() for r in caplog.records] == (told if at != 'open' else [told[0].replace('gone', 'closed')])
  assert [envs.faults[row].kind for row in envs.faults] == [kind] * (0 if kind is None else 4)
  assert result.done.tolist() == [kind is not None] * 4 and result.reward.sum() == (4 if kind is None else 0)


@dataclasses.dataclass(frozen=True)
class Leaky(Environment):
  """In JAX; one of its actions pays 1, the others what no game should, and one of those wins."""

  name = 'leaky'
  action_names = ('One', 'Nan', 'Inf', 'Much', 'Win')
  has_solver = False

  def reset(self, key):
    return State(done=jnp.bool_(False), success=jnp.bool_(False))

  def _step(self, state, action, key):
    reward = jnp.asarray([1.0, jnp.nan, -jnp.inf, 1e20, jnp.nan])[action]
    won = action == 4
    return state.replace(done=won, success=won), StepOutput(reward=reward, effective=jnp.bool_(True))

  def rules(self):
    return 'Leak.'

  def legend(self):
    return {}

  def render(self, states):
    return ['x'] * len(states.done)

  def render_rgb(self, state):
    return np.zeros((1, 1, 3), np.uint8)


@dataclasses.dataclass(frozen=True)
class Mute(Leaky):
  """It renders something else than a text of each state."""

  texts: tuple = ()

  def render(self, states):
    return list(self.texts)


@pytest.mark.parametrize('texts', [(), ('a',), ('a', 'b', 'c'), ('a', None)])
def test_a_board_in_jax_without_its_text_is_told_with_its_tag(texts):
  envs = EnvStateManager([EnvSpec('Mute', Mute(texts=texts), Budget(9, 9, 3), 50, 1)], 2)
  with pytest.raises(UserError, match=r'^envs\.Mute: render returned .*; allowed: a list of 2 texts$'):
    envs.reset(70)


def test_a_reward_in_jax_that_is_no_number_ends_its_episode(caplog):
  envs = EnvStateManager([EnvSpec('Leaky', Leaky(), Budget(9, 9, 3), 50, 2), outside(1)], 3)
  envs.reset(70)
  with caplog.at_level(logging.WARNING, 'ragen_jax.agent.pools'):
    result = envs.step([[0], [0, 1, 0], [2], [3], [4], []] + [['One']] * 3)
    assert result.reward[:6].tolist() == [1, 0, 0, 0, 0, 0] and np.isfinite(result.reward).all()
    assert result.done[:6].tolist() == [False, True, True, True, True, False] and not result.success.any()
    assert sorted(envs.faults) == [1, 2, 3, 4]
    assert envs.faults[1] == Fault('reward is not within 1e+15', 'nan')
    # They stay so, whatever is asked of them.
    result = envs.step([[0]] * 6 + [[]] * 3)
    assert result.reward[:6].tolist() == [1, 0, 0, 0, 0, 1] and result.executed[:6].tolist() == [1, 0, 0, 0, 0, 1]
    assert result.done[:6].tolist() == [False, True, True, True, True, False] and not result.success.any()
  assert [r.getMessage() for r in caplog.records] == [
    'envs.Leaky, level 70: reward is not within 1e+15: nan; the episode ends as an error.'
    ' Further ones are only counted, in Leaky/env_errors'
  ]
  envs.reset(70)
  assert not envs.faults and not envs.step([[0]] * 6 + [[]] * 3).done.any()
  failed = [Episode('In', 0, 7, [], 'x', status) for status in (Status.ENV_ERROR, Status.FAILURE)]
  assert episode_metrics(failed, 2, 'train')['train/In/env_errors'] == 0.5


def test_rows_in_jax_are_neither_stepped_nor_drawn_while_only_others_play(monkeypatch):
  stepped, drawn = [], []
  step, render = JaxPool._stepped, FrozenLake.render
  monkeypatch.setattr(JaxPool, '_stepped', lambda *args: [stepped.append(1), step(*args)][1])
  monkeypatch.setattr(FrozenLake, 'render', lambda *args: [drawn.append(1), render(*args)][1])
  envs = EnvStateManager([EnvSpec('Lake', FrozenLake(), BUDGET, 50, 2), outside(1)], 2)
  first = envs.reset(4)
  for own in ([[], ['One']], [['Two'], []]):
    result = envs.step([[]] * 4 + own)
    assert result.executed.tolist() == [0] * 4 + [len(x) for x in own] and result.rewards[:4] == [()] * 4
    assert envs.render()[:4] == first[:4] and not result.done[:4].any()
  assert len(drawn) == 1 and not stepped
  envs.step([[], [2, 3], [], [], [], []])
  assert len(stepped) == 1 and envs.render()[1] != first[1] and len(drawn) == 2
  assert envs.reset(4)[:4] == first[:4]


@dataclasses.dataclass(frozen=True, eq=False)
class Unreadable(Careless):
  """Its reader of replies fails."""

  def parse_action(self, text):
    if text == 'boom':
      raise SystemExit(1)
    return text


def test_a_reader_of_replies_outside_that_fails_finds_no_action():
  specs = [EnvSpec('Out', Unreadable('end'), BUDGET, 50, 1), EnvSpec('In', Leaky(), BUDGET, 50, 1)]
  context = ContextManager(None, specs, context_settings(format='no_think'))
  reply = context.parse(0, '<answer>a || boom || b</answer>')
  assert (reply.actions, reply.names, reply.valid) == (('a', 'b'), ('a', 'b'), False)
  assert context.parse(0, '<answer>boom</answer>').actions == ()
  inside = context.parse(1, '<answer>nan || one</answer>')
  assert (inside.actions, inside.names, inside.valid) == ((1, 0), ('Nan', 'One'), True)


def test_the_kind_of_an_environment_decides_what_can_be_asked_of_it():
  lake, tally = FrozenLake(), outside(1).env
  words = dataclasses.replace(outside(1), env=Unreadable('end'))
  assert [env.is_outside for env in (lake, tally, words.env)] == [False, True, True]
  # Outside, actions can be listed where they are words; in JAX the environment lists them.
  assert [env.has_legal_actions for env in (lake, tally, words.env)] == [True, True, False]
  assert lake.read_action(' up ') == (3, 'Up') and lake.read_action('hop') is None
  assert tally.read_action('two') == ('Two', 'Two') and tally.read_action('three') is None
  inside = make_pool(EnvSpec('Lake', lake, BUDGET, 50, 2), 4, 2)
  out = make_pool(outside(2), 4, 2)
  assert isinstance(inside, JaxPool) and isinstance(out, OutsidePool)
  for pool in (inside, out):
    pool.reset(np.asarray([4, 4, 6, 6]), np.asarray([0, 1, 0, 1]))
  assert inside.legal_actions() == [['Left', 'Down', 'Right', 'Up']] * 4
  assert out.legal_actions() == [list(Tally.action_names)] * 4
  assert len(set(inside.levels())) == 2 and out.levels() == [None, None]
  assert inside.picture(0).shape == (64, 64, 3) and out.picture(0) is None


def test_the_optimum_is_that_of_the_fresh_level_in_the_middle_of_an_episode_too():
  pool = make_pool(EnvSpec('Lake', FrozenLake(), Budget(5, 10, 5), 50, 8), 8, 1)
  pool.reset(np.arange(8), np.zeros(8, int))
  best, levels = pool.optimal(), pool.levels()
  pool.step([[1, 1, 2]] * 8)
  np.testing.assert_array_equal(pool.optimal(), best)
  assert pool.levels() == levels and pool.render() != pool.spec.env.render(pool.fresh_states)
