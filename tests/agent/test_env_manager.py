"""The batch of environments against each environment stepped by hand."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from configs import default
from ragen_jax import build
from ragen_jax import envs as registry
from ragen_jax.agent.env_manager import EnvStateManager, first_training_level
from ragen_jax.agent.episode import Episode, Status
from ragen_jax.agent.metrics import episode_metrics
from ragen_jax.envs.bandit import RAGEN2_TEST, RAGEN2_TRAIN, Bandit
from ragen_jax.envs.base import Budget
from ragen_jax.envs.countdown import Countdown
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.viewer.tensorboard import transcript
from tests.support.compilations import compiled
from tests.support.text_games import GAMES


@pytest.fixture(scope='module')
def manager():
  specs = build.env_specs(default.get_config(), ('FrozenLake', 'SimpleSokoban', 'Bandit'), (3, 2, 1))
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


@pytest.mark.parametrize('first', [2**31 - 3, 2**31, 2**32 - 6])
def test_levels_beyond_the_signed_integers_are_levels_as_others(manager, first):
  assert len(manager.levels_from(first)) == 6
  manager.reset(first)
  assert manager.level_seeds.tolist() == [first + g for g in range(6) for _ in range(4)]


@pytest.mark.slow
def test_a_batch_equals_its_environments_stepped_by_hand(manager):
  manager.reset(900)
  rng = np.random.default_rng(0)
  states, used = {}, np.zeros(24, int)
  by_hand = [(jax.jit(spec.env.reset), jax.jit(spec.env.step)) for spec in manager.specs]
  for row in range(24):
    states[row] = by_hand[manager.row_env[row]][0](jax.random.key(900 + row // 4))
  for _ in range(4):
    actions = [rng.integers(0, 4 if row < 20 else 2, size=rng.integers(0, 5)).tolist() for row in range(24)]
    result = manager.step(actions)
    for row in (0, 1, 5, 11, 12, 13, 19, 20, 23):
      spec, (_, step) = manager.specs[manager.row_env[row]], by_hand[manager.row_env[row]]
      luck = jax.random.fold_in(jax.random.fold_in(jax.random.key(900 + row // 4), 1), row % 4)
      reward, executed, effective = 0.0, 0, 0
      for action in actions[row][: spec.budget.max_actions_per_turn]:
        if bool(states[row].done) or used[row] >= spec.budget.max_actions:
          break
        states[row], out = step(states[row], np.int32(action), jax.random.fold_in(luck, int(used[row])))
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


def _few(max_numbers: int) -> Countdown:
  return Countdown(min_numbers=2, max_numbers=max_numbers, largest_number=4, largest_target=20)


@pytest.mark.parametrize(
  ('evaluated', 'trained'),
  [
    (Bandit(arms=RAGEN2_TEST), Bandit(arms=RAGEN2_TRAIN)),  # pair 3 of one tag is not pair 3 of the other
    (_few(max_numbers=2), _few(max_numbers=3)),  # the arrays of equal boards have other lengths
  ],
  ids=['bandit', 'countdown'],
)
def test_equal_levels_of_other_tags_are_those_that_look_equal(evaluated, trained):
  budget = Budget(1, 1, 1)
  tests = EnvStateManager([EnvSpec('Test', evaluated, budget, 50, 64)], 1)
  held_out, boards = frozenset(tests.levels_from(0)), set(tests.reset(0))
  plain, careful = (
    EnvStateManager([EnvSpec('Train', trained, budget, 50, 256)], 1, held_out=x) for x in ((), held_out)
  )
  before, after = plain.reset(5000), careful.reset(5000)
  overlap = np.asarray([board in boards for board in before])
  assert not any(board in boards for board in after)
  assert [a != b for a, b in zip(before, after, strict=True)] == overlap.tolist()
  assert overlap.any() == isinstance(trained, Countdown)


def test_a_game_of_few_levels_keeps_them_and_says_so(caplog):
  spec = EnvSpec('Bandit', Bandit(), Budget(1, 1, 1), 100, 8)  # two orders of two names
  plain = EnvStateManager([spec], 1)
  boards = plain.reset(0)
  with caplog.at_level('INFO', 'ragen_jax'):
    careful = EnvStateManager([spec], 1, held_out=frozenset(plain.levels()))
    assert careful.reset(0) == boards and (careful.level_seeds == plain.level_seeds).all()
    careful.reset(0)
  assert [r.getMessage() for r in caplog.records if 'of the training levels' in r.getMessage()] == [
    'Bandit: 100 % of the training levels are levels of the evaluation too; nothing is held out'
  ]


def test_a_best_possible_that_no_solver_can_find_is_unknown_and_told_of_once(caplog):
  lake = EnvSpec('Wide', FrozenLake(), Budget(5, 16, 16), 100, 2)  # too many plans of 16 actions
  bandit = EnvSpec('Bandit', Bandit(), Budget(1, 1, 1), 100, 2)
  envs = EnvStateManager([lake, bandit], 2)
  envs.reset(5)
  with caplog.at_level('WARNING', 'ragen_jax'):
    best = [envs.optimal() for _ in range(2)]
  for x in best:
    assert np.isnan(x[:4]).all() and x[4:].tolist() == [1.0] * 4
  assert len(caplog.records) == 1
  assert caplog.records[0].getMessage().startswith('envs.Wide: the best possible success is unknown (')


def test_training_levels_of_seeds_and_rollouts_follow_one_another():
  assert first_training_level(10_000, 0) == 10_000
  assert first_training_level(10_000, 2) == 20_010_000
  assert [first_training_level(500, 1, rollout=i, groups=64) for i in range(3)] == [10_000_500, 10_000_564, 10_000_628]


def test_a_copy_plays_for_itself_and_compiles_nothing(manager):
  manager.reset(7)
  other = manager.fresh_copy()
  before = manager.render()
  assert other.reset(9) != before and manager.render() == before
  manager.step([[0]] * manager.rows)
  with compiled() as names:
    other.step([[0]] * other.rows)
  assert names == []
  assert (manager.level_seeds != other.level_seeds).all()


def test_sessions_outside_are_not_copied():
  env = registry.make('python', {'class_path': f'{GAMES}:Climb', 'workers': 0})
  manager = EnvStateManager([EnvSpec('Climb', env, Budget(5, 5, 1), 10, 1)], 1)
  first, second = manager.fresh_copy(), manager.fresh_copy()
  assert first.reset(0) != second.reset(1) and first.render() != second.render()
  with pytest.raises(RuntimeError, match='this batch was reset'):
    first.fresh_copy()


def test_the_luck_of_a_member_does_not_depend_on_its_row():
  specs = [EnvSpec('FrozenLake', FrozenLake(), Budget(5, 10, 5), 10, 1)]
  whole, single = EnvStateManager(specs, 3), EnvStateManager(specs, 1)
  whole.reset(4)
  actions = [1, 2, 1, 2]
  whole.step([actions] * 3)
  for member in range(3):
    single.reset(4, first_member=member)
    single.step([actions])
    assert single.render() == whole.render()[member : member + 1]
