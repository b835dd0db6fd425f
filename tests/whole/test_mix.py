"""Several environments in one batch: who plays which row, and metrics of each by itself."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from ragen_jax import build
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.sampler_speaker import SamplerSpeaker
from ragen_jax.sampling.draw import PLAIN
from ragen_jax.training.rollout_metrics import rollout_metrics
from ragen_jax.training.run_log import mean_success
from ragen_jax.utils.errors import UserError
from tests.support.configs import small_config
from tests.support.models import random_policy

TRAIN = ('SimpleSokoban', 'BanditPairs', 'FrozenLake')
# Trained on none of them but one.
EVAL = ('SimpleSokoban', 'SokobanDifferentGridVocab', 'LargerSokoban', 'FrozenLake')
SYMBOLS = {
  'SimpleSokoban': '#_O√XPS',
  'SokobanDifferentGridVocab': 'W.GCBA@',
  'LargerSokoban': '#_O√XPS',
  'FrozenLake': 'P_OGX√',
}


def mixed_config(**fields):
  return small_config(
    **{
      'train__tags': TRAIN, 'train__tag_groups': (1, 3, 2), 'train__groups': 6, 'train__group_size': 2,
      'eval__tags': EVAL, 'eval__tag_groups': (2, 5, 1, 4), 'eval__groups': 12, 'eval__greedy_too': False,
      'optimizer__mini_batch_size': 12, 'agent__max_response_tokens': 6, 'agent__max_context': 2048,
      'agent__drop_finished': False, 'eval__temperature': 1.0, 'length_step': 2048,
      'envs__FrozenLake__max_actions_per_turn': 2, **{f'envs__{tag}__max_turns': 2 for tag in EVAL},
    } | fields
  )  # fmt: skip


@pytest.fixture(scope='module')
def policy(tmp_path_factory):
  """Random weights; its tokenizer knows the words of some games and spells out the others."""
  config = mixed_config(train__tags=('FrozenLake', 'Bandit'), train__tag_groups=())
  return random_policy(config, tmp_path_factory.mktemp('policy'))


def alone(config, tag, groups, group_size, first_seed):
  """The first observations of one environment in a batch by itself."""
  return EnvStateManager(build.env_specs(config, (tag,), (groups,)), group_size).reset(first_seed)


def test_group_counts_are_those_given_or_equal():
  config = mixed_config()
  assert build.group_counts(config.train, 'train') == (1, 3, 2)
  config.train.tag_groups = ()
  assert build.group_counts(config.train, 'train') == (2, 2, 2)
  assert build.group_counts(config.eval, 'eval') == (2, 5, 1, 4)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'eval__tags': ()}, r'^eval\.tags=\(\): name at least one'),
    ({'eval__tag_groups': ()}, None),
    (
      {'eval__tag_groups': (), 'eval__groups': 6},
      r'^eval\.groups=6: must be a positive multiple of .* 4, .*tag_groups',
    ),
    ({'eval__tag_groups': (4, 4)}, r'^eval\.tag_groups=\(4, 4\): must be one positive number for each of eval\.tags='),
    ({'eval__tag_groups': (3, 3, 3, -1)}, r'^eval\.tag_groups=\(3, 3, 3, -1\): must be one positive number'),
    ({'eval__tag_groups': (2, 5, 1, 5)}, r'^eval\.tag_groups=\(2, 5, 1, 5\): must add up to eval\.groups=12, not 13'),
  ],
)
def test_wrong_counts_are_told_in_one_line(fields, message):
  section = mixed_config(**fields).eval
  if message is None:
    assert build.group_counts(section, 'eval') == (3, 3, 3, 3)
    return
  with pytest.raises(UserError, match=message) as error:
    build.group_counts(section, 'eval')
  assert '\n' not in str(error.value)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_mixed_rollout_keeps_the_order_of_tags_and_groups(policy):
  config = mixed_config()
  trainer = build.make_trainer(config, policy)
  params = nnx.split(policy.model)[1]
  rollout = trainer.player.proxy.rollout(SamplerSpeaker(policy.sampler, params, jax.random.key(0), PLAIN), 10_000)

  tags = ['SimpleSokoban'] * 2 + ['BanditPairs'] * 6 + ['FrozenLake'] * 4
  assert [e.tag for e in rollout.episodes] == tags
  assert [e.group for e in rollout.episodes] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
  assert [e.level_seed for e in rollout.episodes] == [10_000 + e.group for e in rollout.episodes]
  np.testing.assert_array_equal(rollout.trajectory.env, [TRAIN.index(tag) for tag in tags])
  np.testing.assert_array_equal(rollout.trajectory.group, [e.group for e in rollout.episodes])

  # Each group has its tag's level of its own seed, and its members see the same first observation.
  firsts = [e.turns[0].observation for e in rollout.episodes]
  assert firsts[::2] == firsts[1::2]
  assert firsts == [
    text
    for tag, groups, first in (('SimpleSokoban', 1, 0), ('BanditPairs', 3, 1), ('FrozenLake', 2, 4))
    for text in alone(config, tag, groups, 2, 10_000 + first)
  ]
  # And the prompt of its game.
  for episode, row in zip(rollout.episodes, range(12), strict=True):
    text = policy.tokenizer.decode(rollout.trajectory.tokens[row, : rollout.trajectory.length[row]].tolist())
    named = {'SimpleSokoban': 'Sokoban', 'BanditPairs': 'two arms', 'FrozenLake': 'frozen lake'}
    prompt = text.partition('<|im_start|>assistant')[0]  # a reply may say anything
    assert [tag for tag, words in named.items() if words in prompt] == [episode.tag]

  metrics = rollout_metrics(rollout, config.train.group_size)
  for tag in TRAIN:
    own = [e for e in rollout.episodes if e.tag == tag]
    assert metrics[f'train/{tag}/success'] == np.mean([e.success for e in own])
    assert metrics[f'train/{tag}/num_turns'] == np.mean([len(e.turns) for e in own])
    assert metrics[f'train/{tag}/score'] == pytest.approx(np.mean([e.score for e in own]))
  assert metrics['train/BanditPairs/num_turns'] == 1


@pytest.mark.slow  # other tests see the metrics of each tag
@pytest.mark.exhaustive
def test_an_evaluation_on_other_games_has_metrics_for_each(policy):
  config = mixed_config()
  evaluator = build.make_evaluator(config, policy)
  evaluation = evaluator(nnx.split(policy.model)[1])
  counts = dict(zip(EVAL, (2, 5, 1, 4), strict=True))
  assert [e.tag for e in evaluation.episodes] == [tag for tag, count in counts.items() for _ in range(count)]
  assert [e.level_seed for e in evaluation.episodes] == [123 + i for i in range(12)]
  metrics = evaluation.metrics
  assert {name.split('/')[1] for name in metrics} == set(EVAL)
  first = 0
  for tag, count in counts.items():
    own = [e for e in evaluation.episodes if e.tag == tag]
    shown = [e.turns[0].observation for e in own]
    assert shown == alone(config, tag, count, 1, 123 + first)
    assert set(''.join(shown)) - {'\n'} <= set(SYMBOLS[tag])
    assert metrics[f'val-env/{tag}/success'] == np.mean([e.success for e in own])
    assert metrics[f'val-env/{tag}/episodic_return'] == pytest.approx(np.mean([e.env_return for e in own]))
    assert metrics[f'val-env/{tag}/pass@1'] == metrics[f'val-env/{tag}/success']
    # The optimum is that of the tag's own levels.
    env = build.env_specs(config, (tag,), (1,))[0]
    states = [env.env.from_text(text) for text in shown]
    best = env.env.optimal(jax.tree.map(lambda *leaves: np.stack(leaves), *states), env.budget)
    assert metrics[f'val-env/{tag}/optimal'] == pytest.approx(best.mean())
    first += count
  successes = [metrics[f'val-env/{tag}/success'] for tag in EVAL]
  assert mean_success(metrics, EVAL) == pytest.approx(np.mean(successes))


@functools.lru_cache
def whole_batch():
  config = mixed_config(train__tags=('FrozenLake', 'Bandit', 'BanditPairs'), train__tag_groups=(3, 2, 1))
  specs = build.env_specs(config, tuple(config.train.tags), build.group_counts(config.train, 'train'))
  return specs, EnvStateManager(specs, 2).reset(7)


@pytest.mark.parametrize('shares', [2, 3, 6])
def test_shares_of_a_mix_are_its_rows(shares):
  """However the groups of a mix are divided over processes, every row has the level that it has in the whole."""
  specs, whole = whole_batch()
  parts = [EnvStateManager(specs, 2, share=i, shares=shares).reset(7) for i in range(shares)]
  assert [text for part in parts for text in part] == whole
  assert len(whole) == 12
