"""Items of environments outside JAX that an evaluation plays: training and demonstrations play others."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from ragen_jax import build
from ragen_jax import envs as registry
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.envs.base import Budget
from ragen_jax.envs.spec import EnvSpec
from tests.support.configs import small_config

ITEMS = 40


class Quiz:
  """The seed selects an item, and each reset is counted."""

  rules = 'Answer.'
  resets: list[int] = []  # noqa: RUF012

  def __init__(self, items: int = ITEMS, shift: int = 0):
    self.items, self.shift = items, shift

  def item(self, seed):
    return (seed + self.shift) % self.items

  def level_id(self, seed):
    return f'question {self.item(seed)}'

  def reset(self, seed):
    self.resets.append(seed)
    return f'question {self.item(seed)}'

  def step(self, action):
    return 'over', 1.0, True, True


class Careless(Quiz):
  """Its ids are not text, or raise."""

  def level_id(self, seed):
    if seed % 2:
      raise KeyError(seed)
    return seed


class Failing(Quiz):
  """Some seeds have no id."""

  def level_id(self, seed):
    if seed % 5 == 0:
      raise KeyError(seed)
    return super().level_id(seed)


class Unknown(Quiz):
  """Has no ids."""

  level_id = None


def _spec(groups, tag='Quiz', name='Quiz', **options) -> EnvSpec:
  env = registry.make('python', {'class_path': f'{__name__}:{name}', 'options': options})
  return EnvSpec(tag, env, Budget(2, 2, 1), 30, groups)


def _held_out(items: range) -> frozenset[bytes]:
  manager = EnvStateManager([_spec(len(items))], 1)
  return frozenset(manager.levels_from(items.start))


def test_ids_are_found_without_a_reset_and_are_equal_over_tags_and_environments():
  Quiz.resets.clear()
  here = EnvStateManager([_spec(5), _spec(5, tag='Other', shift=5)], 2).levels_from(3)
  assert not Quiz.resets
  assert here == _held_out(range(3, 8)) | _held_out(range(13, 18)) and len(here) == 10
  assert here == EnvStateManager([_spec(20, tag='Third')], 3).levels_from(3) & here
  assert not EnvStateManager([_spec(5, name='Unknown')], 2).levels_from(3)


@pytest.mark.parametrize('group_size', [1, 3])
def test_training_plays_no_item_of_the_evaluation_and_resets_once(group_size):
  held_out = _held_out(range(10, 20))
  plain = EnvStateManager([_spec(30)], group_size)
  usual = plain.reset(1000)
  Quiz.resets.clear()
  careful = EnvStateManager([_spec(30)], group_size, held_out=held_out)
  texts = careful.reset(1000)
  assert len(Quiz.resets) == 30 * group_size  # one reset a row
  assert sorted(Quiz.resets) == sorted(careful.level_seeds.tolist())
  items = [int(text.split()[1]) for text in texts]
  assert not set(items) & set(range(10, 20)) and not careful.levels() & held_out
  changed = np.asarray([a != b for a, b in zip(usual, texts, strict=True)])
  known = np.asarray([10 <= int(text.split()[1]) < 20 for text in usual])
  assert known.any() and (changed == known).all()
  assert (careful.level_seeds == plain.level_seeds).tolist() == (~known).tolist()
  groups = np.asarray(items).reshape(-1, group_size)
  assert (groups == groups[:, :1]).all()


def test_a_tag_whose_items_are_all_held_out_keeps_them_and_says_so(caplog):
  manager = EnvStateManager([_spec(8, items=4)], 2, held_out=_held_out(range(ITEMS)))
  with caplog.at_level(logging.INFO, 'ragen_jax'):
    manager.reset(100)
    manager.reset(108)
  assert manager.level_seeds.tolist() == [108 + g for g in range(8) for _ in range(2)]
  told = [r.getMessage() for r in caplog.records if 'training levels' in r.getMessage()]
  assert told == ['Quiz: 100 % of the training levels are levels of the evaluation too; nothing is held out']


def test_few_items_that_are_not_held_out_are_enough(caplog):
  """Four items of forty are left, and every group finds one of them."""
  manager = EnvStateManager([_spec(64, items=40)], 2, held_out=_held_out(range(4, 40)))
  with caplog.at_level(logging.INFO, 'ragen_jax'):
    texts = manager.reset(100)
  left = sum(int(text.split()[1]) < 4 for text in texts)
  assert left >= 0.97 * len(texts)  # 0.9**65 of the groups find none
  told = [r for r in caplog.records if 'of the training levels' in r.getMessage()]
  assert [r.levelno for r in told] == [logging.WARNING] * bool(left < len(texts))


def test_ids_that_cannot_be_read_are_told_of_once_and_nothing_is_lost(caplog):
  manager = EnvStateManager([_spec(4, name='Careless')], 2, held_out=_held_out(range(10)))
  with caplog.at_level(logging.WARNING, 'ragen_jax.agent.outside_pool'):
    assert len(manager.reset(0)) == 8 and not manager.faults
    manager.reset(4)
  assert manager.level_seeds.tolist() == [4, 4, 5, 5, 6, 6, 7, 7]
  told = [r.getMessage() for r in caplog.records]
  assert told == [
    'envs.Quiz: level_id raised TypeError: 0 is not text; held-out items are not recognised',
    'envs.Quiz: level_id raised KeyError: 1; held-out items are not recognised',
  ]


def test_the_levels_that_a_config_holds_out_have_the_ids():
  config = small_config(eval__groups=6, eval__first_level=7, eval__tags=('Quiz',))
  with config.unlocked():
    config.envs.Quiz = {
      'type': 'python', 'class_path': f'{__name__}:Quiz', 'max_turns': 2, 'max_actions': 2, 'max_actions_per_turn': 1,
      'max_words': 30,
    }  # fmt: skip
  assert build.held_out_levels(config) == _held_out(range(7, 13))


def test_a_seed_whose_id_fails_hides_no_other(caplog):
  manager = EnvStateManager([_spec(20, name='Failing')], 2, held_out=_held_out(range(10, 20)))
  with caplog.at_level(logging.WARNING, 'ragen_jax'):
    texts = manager.reset(100)
  told = [int(text.split()[1]) for text, seed in zip(texts, manager.level_seeds, strict=True) if seed % 5]
  assert told and not set(told) & set(range(10, 20))
  assert sum('held-out items are not recognised' in r.getMessage() for r in caplog.records) == 1
