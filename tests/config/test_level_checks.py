"""Training, warm starts and evaluation play different levels, or are refused."""

from __future__ import annotations

import functools

import pytest

from ragen_jax.config.checks import check_config, check_sft
from ragen_jax.config.level_checks import check_levels
from ragen_jax.utils.errors import UserError
from tests.support.configs import assert_refused, small_config

_check = functools.partial(check_config, weights=False)
_MOST = {'num_iterations': 2_500_000}  # of four groups: all levels that a seed has


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    (
      {'num_iterations': 2_500_001},
      r'^num_iterations=2500001: times train\.groups and filter\.max_rollouts must be at',
    ),
    (_MOST | {'filter.max_rollouts': 2}, r'^num_iterations=2500000: times train\.groups .* must be at most 10000000$'),
    ({'seed': 500}, r'^seed=500: at most 428; the last training level would be 50000\d+, past 2\*\*32$'),
    (_MOST | {'seed': 429}, r'^seed=429: at most 428; the last training level would be'),
    (
      {'eval.first_level': 2**32 - 15},
      r'^eval\.first_level=4294967281: the last held-out level would be past 2\*\*32$',
    ),
    (
      {'train.first_level': 120},
      r'^eval\.first_level=123: held-out levels 123\.\.138 overlap with training levels 120\.\.131$',
    ),
    (
      {'eval.first_level': 30_010_000, 'seed': 3, 'train.groups': 8, 'filter.max_rollouts': 2},
      r'^eval\.first_level=30010000: held-out .* overlap with training levels 30010000\.\.30010047$',
    ),
  ],
)
def test_seeds_of_levels_that_overlap_or_do_not_exist_are_refused(fields, message):
  assert_refused(_check, small_config(fields), message)


@pytest.mark.parametrize('fields', [_MOST | {'seed': 428}, {'eval.first_level': 2**32 - 16}])
def test_the_last_seeds_are_allowed(fields):
  _check(small_config(fields))


def test_levels_are_refused_where_training_and_evaluation_have_one_in_common():
  training, refused = set(range(10_000, 10_012)), []
  for first in range(9_980, 10_020):
    try:
      check_levels(small_config(eval__first_level=first))
    except UserError:
      refused.append(first)
  assert refused == [first for first in range(9_980, 10_020) if training & set(range(first, first + 16))]


def test_held_out_levels_of_a_file_are_not_trained_on(tmp_path):
  board = '######\n#@   #\n# $  #\n#  . #\n#    #\n######\n'
  for name in ('train', 'eval'):
    (tmp_path / f'{name}.txt').write_text(f'; 0\n{board}')
  config = small_config(
    train__tags=('SimpleSokoban',), eval__tags=('CoordSokoban',),
    envs__SimpleSokoban__levels=str(tmp_path / 'train.txt'), envs__CoordSokoban__levels=str(tmp_path / 'eval.txt'),
  )  # fmt: skip
  check_config(config)
  config.envs.CoordSokoban.levels = str(tmp_path / '..' / tmp_path.name / 'train.txt')
  message = r'envs\.CoordSokoban\.levels=.*train\.tags, and SimpleSokoban plays it'
  assert_refused(check_config, config, message)
  config.sft.tags, config.sft.levels, config.sft.batch_size = ('CoordSokoban',), (8,), 8
  assert_refused(check_sft, config, r'must not be a file of sft\.tags, and CoordSokoban plays it')
  config.envs.SimpleSokoban.levels = str(tmp_path / 'none.txt')
  assert_refused(check_config, config, r"envs\.SimpleSokoban: levels='.*none\.txt'; allowed: a file")
