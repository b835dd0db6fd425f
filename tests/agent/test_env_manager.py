"""The batch of environments against each environment stepped by hand."""

from __future__ import annotations

import dataclasses
import logging

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
from ragen_jax.envs import Fault, Session, TextEnvironment
from ragen_jax.envs.bandit import Bandit
from ragen_jax.envs.base import Budget, Environment, State, StepOutput
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.viewer.tensorboard import transcript
from tests.support.speakers import context_settings


@pytest.fixture(scope='module')
def manager():
  specs = build.env_groups(default.get_config(), ('FrozenLake', 'SimpleSokoban', 'Bandit'), (3, 2, 1))
  return EnvStateManager(specs, 4)


def test_members_of_a_group_share_the_level_and_have_their_own_luck(manager):
  texts = manager.reset(500)
  groups = [texts[g * 4 : (g + 1) * 4] for g in range(6)]
  assert all(len(set(g)) == 1 for g in groups)
  assert len({g[0] for g in groups[:3]}) == 3
  assert manager.row_env.tolist() == [0] * 12 + [1] * 8 + [2] * 4
  assert manager.level_seeds.tolist() == [500 + g for g in range(6) for _ in range(4)]
  for _ in range(6):
    manager.step([[0, 1, 2]] * 12 + [[]] * 12)
  after = manager.render()
  assert any(len(set(after[g * 4 : (g + 1) * 4])) > 1 for g in range(3))


def test_the_same_seed_gives_the_same_episode_and_another_seed_another(manager):
  def play(seed):
    texts = [manager.reset(seed)]
    for actions in ([0, 1], [2], [3, 3, 1]):
      manager.step([actions] * 20 + [[0]] * 4)
      texts.append(manager.render())
    return texts

  assert play(7) == play(7)
  assert play(7) != play(8)


def test_a_batch_equals_its_environments_stepped_by_hand(manager):
  manager.reset(900)
  rng = np.random.default_rng(0)
  states, used = {}, np.zeros(24, int)
  for row in range(24):
    env = manager.specs[manager.row_env[row]].env
    states[row] = env.reset(jax.random.key(900 + row // 4))
  for _ in range(4):
    actions = [rng.integers(0, 4 if row < 20 else 2, size=rng.integers(0, 5)).tolist() for row in range(24)]
    result = manager.step(actions)
    for row in (0, 1, 5, 11, 12, 13, 19, 20, 23):
      spec = manager.specs[manager.row_env[row]]
      luck = jax.random.fold_in(jax.random.fold_in(jax.random.key(900 + row // 4), 1), row % 4)
      reward, executed, effective = 0.0, 0, 0
      for action in actions[row][: spec.budget.max_actions_per_turn]:
        if bool(states[row].done) or used[row] >= spec.budget.max_actions:
          break
        states[row], out = spec.env.step(states[row], np.int32(action), jax.random.fold_in(luck, int(used[row])))
        reward, executed, effective = reward + float(out.reward), executed + 1, effective + int(out.effective)
        used[row] += 1
      assert result.reward[row] == pytest.approx(reward, abs=1e-5)
      assert (result.executed[row], result.effective[row]) == (executed, effective)
      assert (bool(result.done[row]), bool(result.success[row])) == (
        bool(states[row].done),
        bool(states[row].success),
      )
      assert manager.actions_left()[row] == spec.budget.max_actions - used[row]


def test_the_optimum_is_one_number_a_level(manager):
  manager.reset(40)
  best = manager.optimal()
  assert best.shape == (24,) and ((best >= 0) & (best <= 1)).all()
  assert all(len(set(best[g * 4 : (g + 1) * 4].tolist())) == 1 for g in range(6))
  assert best[20:].tolist() == [1.0] * 4
  assert 0 < best[:12].min() < best[:12].max() < 1


@pytest.mark.parametrize('shares', [2, 3, 6])
def test_shares_put_together_are_the_whole(manager, shares):
  parts = [EnvStateManager(manager.specs, 4, share=i, shares=shares) for i in range(shares)]
  actions = np.random.default_rng(1).integers(0, 4, size=(3, 24, 2))
  actions[:, 20:] %= 2
  texts = manager.reset(70)
  assert [text for part in parts for text in part.reset(70)] == texts
  for name in ('row_env', 'row_group', 'level_seeds'):
    np.testing.assert_array_equal(np.concatenate([getattr(p, name) for p in parts]), getattr(manager, name))
  np.testing.assert_array_equal(np.concatenate([p.optimal() for p in parts]), manager.optimal())
  for turn in actions.tolist():
    whole = manager.step(turn)
    results = [p.step(turn[p.first_row : p.first_row + p.rows]) for p in parts]
    for name in ('reward', 'executed', 'effective', 'done', 'success'):
      np.testing.assert_array_equal(np.concatenate([getattr(r, name) for r in results]), getattr(whole, name))
    assert [text for part in parts for text in part.render()] == manager.render()
  np.testing.assert_array_equal(np.concatenate([p.actions_left() for p in parts]), manager.actions_left())


# -- environments outside JAX ------------------------------------------------------------------------------------------


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


@pytest.fixture(scope='module')
def mixed(manager):
  """Four rows of FrozenLake, then eight outside."""
  return EnvStateManager([dataclasses.replace(manager.specs[0], num_groups=1), outside(2)], 4)


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
    ' Others like it are only counted, in Tally/env_errors'
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
  assert len(caplog.records) == 1 and 'the members of a group begin differently' in caplog.records[0].message


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
  told = ['envs.Careless: end raised OSError: gone; the episodes are over, but may not be let go of']
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
    ' Others like it are only counted, in Leaky/env_errors'
  ]
  envs.reset(70)
  assert not envs.faults and not envs.step([[0]] * 6 + [[]] * 3).done.any()
  failed = [Episode('In', 0, 7, [], 'x', status) for status in (Status.ENV_ERROR, Status.FAILURE)]
  assert episode_metrics(failed, 2, 'train')['train/In/env_errors'] == 0.5


@dataclasses.dataclass(frozen=True, eq=False)
class Unreadable(Careless):
  """Its reader of replies fails."""

  def parse_action(self, text):
    if text == 'boom':
      raise SystemExit(1)
    return text


def test_a_reader_of_replies_outside_that_fails_finds_no_action():
  specs = [EnvSpec('Out', Unreadable('end'), BUDGET, 50, 1), EnvSpec('In', Leaky(), BUDGET, 50, 1)]
  context = ContextManager(None, specs, context_settings(think=False))
  reply = context.parse(0, '<answer>a || boom || b</answer>')
  assert (reply.actions, reply.names, reply.valid) == (('a', 'b'), ('a', 'b'), False)
  assert context.parse(0, '<answer>boom</answer>').actions == ()
  inside = context.parse(1, '<answer>nan || one</answer>')
  assert (inside.actions, inside.names, inside.valid) == ((1, 0), ('Nan', 'One'), True)


def test_env_errors_are_always_counted_for_environments_outside():
  def episodes(tag, statuses, **fields):
    return [Episode(tag, 0, 7, [], 'the end', status, **fields) for status in statuses]

  ways = [Status.SUCCESS, Status.FAILURE, Status.OUT_OF_TURNS, Status.OUT_OF_ACTIONS, Status.OUT_OF_CONTEXT]
  inside = episode_metrics(episodes('In', [*ways, Status.OUT_OF_TURNS]), 2, 'train')
  assert inside['train/In/truncated'] == 4 / 6 and 'train/In/env_errors' not in inside
  failed = episodes('Out', [*ways, Status.ENV_ERROR], outside=True, error='step raised KeyError')
  metrics = episode_metrics(failed, 2, 'train')
  assert metrics['train/Out/env_errors'] == 1 / 6
  assert metrics['train/Out/truncated'] == 3 / 6 and metrics['train/Out/success'] == 1 / 6
  assert set(metrics) - {name.replace('In', 'Out') for name in inside} == {'train/Out/env_errors'}
  assert transcript(failed[-1]).startswith('**Out**, level 7: env error (step raised KeyError)')
  won = episodes('Out', [Status.SUCCESS], outside=True)[0]
  assert transcript(won).startswith('**Out**, level 7: success\n')


def test_held_out_boards_are_drawn_again_for_whole_groups_and_only_they():
  spec = EnvSpec('FrozenLake', FrozenLake(), Budget(), 100, 64)
  plain = EnvStateManager([spec], 2)
  boards = plain.reset(1000)
  held_out = frozenset(list(plain.levels())[:5])
  careful = EnvStateManager([spec], 2, held_out=held_out)
  other = careful.reset(1000)
  changed = np.asarray([a != b for a, b in zip(boards, other, strict=True)])
  known = np.repeat([level in held_out for level in plain.pools[0].levels()], 2)
  assert known.sum() >= 10 and (changed == known).all()
  assert not careful.levels() & held_out
  assert other[::2] == other[1::2]  # members still share their level
  assert (careful.level_seeds[~known] == plain.level_seeds[~known]).all()
  assert (careful.level_seeds[known] != plain.level_seeds[known]).all()
  # Its seed gives the level again.
  seed = int(careful.level_seeds[np.flatnonzero(known)[0]])
  alone = EnvStateManager([dataclasses.replace(spec, num_groups=1)], 1)
  assert alone.reset(seed)[0] == other[np.flatnonzero(known)[0]]


def test_a_game_of_few_levels_keeps_them_and_says_so(caplog):
  spec = EnvSpec('Bandit', Bandit(), Budget(1, 1, 1), 100, 8)  # two orders of two names
  plain = EnvStateManager([spec], 1)
  boards = plain.reset(0)
  with caplog.at_level('INFO', 'ragen_jax'):
    careful = EnvStateManager([spec], 1, held_out=frozenset(plain.levels()))
    assert careful.reset(0) == boards and (careful.level_seeds == plain.level_seeds).all()
    careful.reset(0)
  assert [r.getMessage() for r in caplog.records if 'few different levels' in r.getMessage()] == [
    'Bandit has few different levels: 100 % of those to train on are held-out ones'
  ]
