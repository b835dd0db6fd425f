"""Random play and solvers on the levels of an evaluation."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax import build
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.evaluation.baselines import evaluation_levels, play_baseline
from ragen_jax.models import presets
from tests.support.configs import small_config

TAGS = ('FrozenLake', 'Bandit')


@pytest.fixture(scope='module')
def parts():
  """(config, settings, levels of each environment, a context for each)."""
  config = small_config(
    eval__tags=TAGS, eval__groups=8, eval__group_size=2, envs__FrozenLake__max_turns=2, logging__episodes=3
  )
  specs = build.env_specs(config, TAGS, (4, 4))
  tokenizer = ChatTokenizer(presets.resolve('tiny', ''))
  settings = build.evaluation_settings(config)
  contexts = [build.context_manager(config, tokenizer, [spec]) for spec in specs]
  return config, settings, evaluation_levels(specs, settings), contexts


def _play(parts, kind, index):
  config, settings, levels, contexts = parts
  limits = build.episode_limits(config, [levels[index].spec])
  return play_baseline(kind, levels[index], contexts[index], settings, limits=limits, step=5)


def test_each_environment_has_the_levels_of_the_batch_of_all(parts):
  config, _, levels, _ = parts
  first = config.eval.first_level
  assert [(part.spec.tag, part.first) for part in levels] == [('FrozenLake', first), ('Bandit', first + 4)]
  assert all(part.best.shape == (4,) and (part.best > 0).all() for part in levels)


@pytest.mark.parametrize('kind', ['random', 'solver'])
def test_baselines_play_every_level_and_some_are_recorded(parts, kind):
  for index, part in enumerate(parts[2]):
    episodes, records = _play(parts, kind, index)
    assert [e.level_seed for e in episodes] == [part.first + i // 2 for i in range(8)]
    assert [(r['step'], r['split'], r['level']) for r in records] == [(5, kind, part.first + i) for i in range(3)]
    assert all(turn.valid for e in episodes for turn in e.turns)
  if kind == 'solver':
    assert np.mean([e.success for e in episodes]) == 1  # the bandit's better arm


def test_random_play_is_the_same_again(parts):
  again = [[[t.reply for t in e.turns] for e in _play(parts, 'random', 0)[0]] for _ in range(2)]
  assert again[0] == again[1]


def test_what_a_solver_cannot_play_is_left_out_with_a_line(caplog):
  config = small_config(envs__FrozenLake__max_actions=16, envs__FrozenLake__max_actions_per_turn=16)
  specs = build.env_specs(config, ('FrozenLake', 'Game2048'), (2, 2))  # too large a budget, and no solver
  settings = build.evaluation_settings(config)
  tokenizer = ChatTokenizer(presets.resolve('tiny', ''))
  for part in evaluation_levels(specs, settings):
    context, limits = build.context_manager(config, tokenizer, [part.spec]), build.episode_limits(config, [part.spec])
    with caplog.at_level('INFO', 'ragen_jax'):
      assert play_baseline('solver', part, context, settings, limits=limits, step=0) == ([], [])
    assert part.best is None
  assert 'FrozenLake: the solver is left out (' in caplog.text and 'Game2048: has no solver' in caplog.text
