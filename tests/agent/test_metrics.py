"""Episode metrics against plain counting, and pass@k against all choices of k episodes."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from ragen_jax.agent.episode import Episode, Status, Turn
from ragen_jax.agent.metrics import METRICS, episode_metrics, is_share, k_values, metric_rows, pass_at_k
from ragen_jax.agent.world_model.state_reward import NO_REWARD, ReplyReward


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


def _described(rng):
  """Scores and rewards of none, one or both sections."""
  scores = {name: float(rng.random()) for name in ('observation', 'prediction') if rng.random() < 0.7}
  return scores, {name: 0.25 * score for name, score in scores.items()}


def test_metrics_of_descriptions_are_what_counting_gives():
  rng = np.random.default_rng(0)
  episodes = _episodes('A', 8) + _episodes('B', 8, 1)
  for e in episodes:
    e.form, e.graded = 'world_modeling', ('observation', 'prediction')
    for turn in e.turns:
      turn.sections = {'answer': ''} if rng.random() < 0.8 else {}
      turn.reply_reward = ReplyReward(0.5, *_described(rng)) if turn.sections else NO_REWARD
  found = episode_metrics(episodes, 4, 'train')
  for tag in ('A', 'B'):
    own = [e for e in episodes if e.tag == tag]
    turns = [t for e in own for t in e.turns]
    assert found[f'train/{tag}/format_correct'] == pytest.approx(np.mean([bool(t.sections) for t in turns]))
    for name in ('observation', 'prediction'):
      scores = [t.reply_reward.scores[name] for t in turns if name in t.reply_reward.scores]
      assert found[f'train/{tag}/{name}_score'] == pytest.approx(np.mean(scores))
    paid = sum(sum(t.reply_reward.rewards.values()) for t in turns)
    assert paid and found[f'train/{tag}/state_reward'] == pytest.approx(paid / len(own))
    # None of it is part of the scores.
    assert found[f'train/{tag}/score'] == pytest.approx(
      np.mean([sum(t.reward + t.penalty for t in e.turns) for e in own])
    )


@pytest.mark.parametrize(
  ('form', 'graded', 'names'),
  [
    ('', (), set()),
    ('free_think', (), {'format_correct'}),
    ('world_modeling', (), {'format_correct'}),
    ('state_estimation', ('observation',), {'format_correct', 'observation_score', 'state_reward'}),
    ('transition_modeling', ('prediction',), {'format_correct', 'prediction_score', 'state_reward'}),
  ],
)
def test_metrics_of_replies_are_listed_where_replies_have_them(form, graded, names):
  episodes = [dataclasses.replace(e, form=form, graded=graded) for e in _episodes('A', 8)]
  of_replies = {'format_correct', 'observation_score', 'prediction_score', 'state_reward'}
  assert of_replies & {name.rpartition('/')[2] for name in episode_metrics(episodes, 4, 'x')} == names


@pytest.mark.parametrize('outside', [False, True])
def test_errors_are_listed_where_an_environment_may_fail(outside):
  assert ('x/A/env_errors' in episode_metrics(_episodes('A', 8, outside=outside), 4, 'x')) == outside


def test_rows_are_by_level_and_shares_lie_between_0_and_1():
  rng, graded = np.random.default_rng(1), ('observation', 'prediction')
  episodes = [
    dataclasses.replace(
      e, form='world_modeling', graded=graded,
      turns=[dataclasses.replace(t, reply_reward=ReplyReward(0.5, *_described(rng))) for t in e.turns],
    )
    for e in _episodes('A', 24, outside=True)
  ]  # fmt: skip
  rows = metric_rows(episodes, 4)
  assert set(rows) == {*METRICS, 'pass@1', 'pass@2', 'pass@4'}
  for name, (top, bottom) in rows.items():
    assert top.shape == bottom.shape == ((6, 1) if name.startswith('pass@') else (6, 4))
    if is_share(name):
      assert (top >= 0).all() and (top <= bottom).all()
