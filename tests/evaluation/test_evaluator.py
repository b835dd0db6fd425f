"""The evaluator plays the same levels each time, and measures against the best possible."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
import pytest

from ragen_jax import build
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.language_model import param_state
from ragen_jax.agent.metrics import episode_metrics
from ragen_jax.sampling.sampler import Sampling
from ragen_jax.training.run_log import mean_success, success_by_tag
from tests.support.configs import small_config
from tests.support.models import random_policy


@pytest.fixture(scope='module')
def evaluated():
  config = small_config(
    eval__tags=('FrozenLake', 'Bandit'), eval__groups=8, eval__group_size=2, eval__top_p=0.9, logging__episodes=2,
    agent__drop_finished=False, envs__FrozenLake__max_turns=2,
  )  # fmt: skip
  policy = build.load_policy(config)
  evaluator = build.make_evaluator(config, policy)
  return config, policy, evaluator, evaluator(param_state(policy.model), step=3)


def test_settings_are_the_configs(evaluated):
  config, *_ = evaluated
  settings = build.evaluation_settings(config)
  expected = config.eval.to_dict() | {'episodes': 2}
  assert dataclasses.asdict(settings) == {name: expected[name] for name in dataclasses.asdict(settings)}
  assert settings.sampling == Sampling(temperature=config.eval.temperature, top_p=0.9, top_k=0)


def test_a_second_call_gives_the_same(evaluated):
  _, policy, evaluator, evaluation = evaluated
  again = evaluator(param_state(policy.model), step=3)
  assert again.metrics == evaluation.metrics
  assert [e.turns[0].reply for e in again.episodes] == [e.turns[0].reply for e in evaluation.episodes]


def test_metrics_are_those_of_the_episodes_and_the_best_possible(evaluated):
  config, _, evaluator, evaluation = evaluated
  metrics = evaluation.metrics
  sampled = episode_metrics(evaluation.episodes, 2, 'val-env')
  assert {name: metrics[name] for name in sampled} == sampled
  assert len([name for name in metrics if name.startswith('val-greedy/')]) == len(sampled)
  for tag, best in evaluator.optimal().items():
    assert 0 < best <= 1 and metrics[f'val-env/{tag}/optimal'] == best
    assert metrics[f'val-env/{tag}/fraction_of_optimal'] == metrics[f'val-env/{tag}/success'] / best
  by_tag = success_by_tag(metrics, config.eval.tags)
  assert mean_success(metrics, config.eval.tags) == np.mean([by_tag['FrozenLake'], by_tag['Bandit']])


def test_records_are_of_the_first_episode_of_the_first_levels(evaluated):
  config, _, _, evaluation = evaluated
  first = config.eval.first_level
  levels = [('FrozenLake', first), ('FrozenLake', first + 1), ('Bandit', first + 4), ('Bandit', first + 5)]
  expected = [(3, split, tag, level, 0) for split in ('val', 'val-greedy') for tag, level in levels]
  assert [(r['step'], r['split'], r['tag'], r['level'], r['member']) for r in evaluation.records] == expected
  assert all('value' in turn for record in evaluation.records for turn in record['turns'])


def test_the_held_out_levels_are_the_ones_that_are_played(evaluated):
  config, _, evaluator, evaluation = evaluated
  envs = EnvStateManager(build.env_specs(config, config.eval.tags, (4, 4)), 2)
  boards = envs.reset(config.eval.first_level)
  assert [e.turns[0].observation for e in evaluation.episodes] == boards
  assert evaluator.held_out() == envs.levels()


@pytest.mark.slow
def test_a_budget_that_the_solver_refuses_leaves_the_optimum_unknown(tmp_path, caplog):
  tags = ('FrozenLake', 'CoordFrozenLake', 'Bandit')
  config = small_config(
    train__tags=tags, train__groups=6, eval__tags=tags, eval__groups=6, eval__group_size=2,
    envs__FrozenLake__max_actions=16, envs__FrozenLake__max_actions_per_turn=16,
  )  # fmt: skip
  evaluator = build.make_evaluator(config, random_policy(config, tmp_path))
  optimal = evaluator.optimal()
  assert math.isnan(optimal['FrozenLake']) and 0 < optimal['CoordFrozenLake'] < 1 and optimal['Bandit'] == 1
  messages = [record.getMessage() for record in caplog.records if record.name == 'ragen_jax.agent.env_manager']
  assert len(messages) == 1 and '\n' not in messages[0]
  assert messages[0].startswith('envs.FrozenLake: the best possible success is unknown (frozen_lake: budget.max_act')


@pytest.mark.parametrize(('part', 'words'), [('policy', 'sampled log-probs'), ('value_head', 'sampled values')])
def test_weights_whose_numbers_are_not_finite_are_named_sampled_and_greedy(evaluated, part, words):
  """Whatever they play: an environment's success says nothing of them."""
  _, policy, evaluator, evaluation = evaluated

  def poison(path, x):
    return x * np.nan if part in jax.tree_util.keystr(path[:1]) else x

  found = evaluator(jax.tree_util.tree_map_with_path(poison, param_state(policy.model)))
  sampled, greedy = found.not_finite.split('with greedy decoding ')
  for text in (sampled, greedy):
    assert words in text and '(all ' in text and ('log-probs' in text) == (part == 'policy')
  assert evaluation.not_finite == ''
