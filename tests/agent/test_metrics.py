"""Episode metrics against plain counting, and pass@k against all choices of k episodes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ragen_jax.agent.episode import Episode, Status, Turn
from ragen_jax.agent.metrics import METRICS, episode_metrics, is_share, k_values, metric_rows, pass_at_k


@pytest.mark.parametrize('n', [1, 3, 4, 6])
def test_pass_at_k_is_the_share_of_all_choices_of_k_episodes_that_have_a_success(n):
  for k in range(1, n + 1):
    counted = [
      np.mean([any(chosen) for chosen in itertools.combinations([True] * c + [False] * (n - c), k)])
      for c in range(n + 1)
    ]
    np.testing.assert_allclose(pass_at_k(np.arange(n + 1), n, k), counted, rtol=1e-12)


def test_k_goes_up_to_the_group():
  assert [k_values(g) for g in (1, 2, 4, 6)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 6]]


def _episodes(tag, count, seed=0, *, outside=False):
  rng = np.random.default_rng(seed)

  def turn():
    valid, actions = bool(rng.integers(2)), ['Up'] * int(rng.integers(3))
    effective = int(rng.integers(len(actions) + 1))
    return Turn(
      '', '', actions, (float(rng.normal()),), -0.1 * (not valid), valid, effective, tokens=int(rng.integers(9))
    )

  return [
    Episode(
      tag, i // 4, i, [turn() for _ in range(rng.integers(1, 5))], status=Status(rng.integers(1, 6)), outside=outside
    )
    for i in range(count)
  ]


def test_each_metric_is_what_counting_gives():
  episodes = _episodes('A', 24) + _episodes('B', 12, 1)
  found = episode_metrics(episodes, 4, 'train')
  assert {e.status for e in episodes} >= {Status.OUT_OF_TURNS, Status.OUT_OF_ACTIONS, Status.OUT_OF_CONTEXT}
  for tag in ('A', 'B'):
    own = [e for e in episodes if e.tag == tag]
    turns = [t for e in own for t in e.turns]
    success = np.asarray([e.status == Status.SUCCESS for e in own])
    actions = sum(len(t.actions) for t in turns)
    expected = {
      'success': success.mean(),
      'pass@4': success.reshape(-1, 4).any(axis=1).mean(),
      'score': np.mean([sum(t.reward + t.penalty for t in e.turns) for e in own]),
      'episodic_return': np.mean([sum(t.reward for t in e.turns) for e in own]),
      'num_actions': actions / len(own),
      'num_turns': len(turns) / len(own),
      'action_is_valid': np.mean([t.valid for t in turns]),
      'action_is_effective': sum(t.effective for t in turns) / actions,
      'truncated': np.mean([e.status.name in ('OUT_OF_TURNS', 'OUT_OF_ACTIONS', 'OUT_OF_CONTEXT') for e in own]),
    }
    assert {n.removeprefix(f'train/{tag}/') for n in found if n.startswith(f'train/{tag}/')} == set(expected)
    for name, value in expected.items():
      assert found[f'train/{tag}/{name}'] == pytest.approx(value, rel=1e-12), name


def test_a_ratio_of_nothing_is_zero():
  nothing = [Episode('A', 0, 0, [], status=Status.ENV_ERROR, outside=True) for _ in range(2)]
  found = episode_metrics(nothing, 2, 'x')
  assert found['x/A/action_is_valid'] == found['x/A/action_is_effective'] == 0.0 and found['x/A/env_errors'] == 1.0


@pytest.mark.parametrize('outside', [False, True])
def test_errors_are_listed_where_an_environment_may_fail(outside):
  assert ('x/A/env_errors' in episode_metrics(_episodes('A', 8, outside=outside), 4, 'x')) == outside


def test_rows_are_by_level_and_shares_lie_between_0_and_1():
  rows = metric_rows(_episodes('A', 24, outside=True), 4)
  assert set(rows) == {*METRICS, 'pass@1', 'pass@2', 'pass@4'}
  for name, (top, bottom) in rows.items():
    assert top.shape == bottom.shape == ((6, 1) if name.startswith('pass@') else (6, 4))
    if is_share(name):
      assert (top >= 0).all() and (top <= bottom).all()
