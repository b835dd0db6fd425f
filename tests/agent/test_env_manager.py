"""The batch of environments against each environment stepped by hand."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from configs import default
from ragen_jax import experiment
from ragen_jax.agent.env_manager import EnvStateManager


@pytest.fixture(scope='module')
def manager():
  specs = experiment.env_groups(default.get_config(), ('FrozenLake', 'SimpleSokoban', 'Bandit'), (3, 2, 1))
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
