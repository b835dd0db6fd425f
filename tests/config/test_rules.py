"""Rules for single fields: the values at each bound, and the line that tells of a value beyond it."""

from __future__ import annotations

import functools
import math
import re

import pytest
from ml_collections import ConfigDict

from ragen_jax.config import rules
from ragen_jax.config.checks import check_config
from tests.support.configs import assert_refused, leaves, small_config

_check = functools.partial(check_config, weights=False)


@pytest.mark.parametrize(
  ('rule', 'allowed', 'refused', 'message'),
  [
    (lambda c: rules.at_least(c, 1, 'a.x'), (1, 2, 1.0), (0, 0.99, -1), 'must be at least 1'),
    (lambda c: rules.above(c, 0, 'a.x'), (1, 1e-9), (0, 0.0, -1), 'must be above 0'),
    (lambda c: rules.fraction(c, 'a.x'), (0, 0.5, 1.0), (-0.01, 1.01), 'must be between 0 and 1'),
    (lambda c: rules.below_one(c, 'a.x'), (0.0, 0.999), (-0.01, 1.0), 'must be at least 0 and below 1'),
    (lambda c: rules.positive_fraction(c, 'a.x'), (1e-9, 1.0), (0.0, 1.01), 'must be above 0 and at most 1'),
    (lambda c: rules.one_of(c, 'a.x', ('one', 'two')), ('one', 'two'), ('On', '', 'one,'), 'allowed: one, two'),
    (lambda c: rules.check(c, 'a.x', rules.get(c, 'a.x') != 3, 'must not be 3'), (2,), (3,), 'must not be 3'),
  ],
)
def test_a_rule_allows_its_bounds_and_names_the_field_and_the_value_beyond_them(rule, allowed, refused, message):
  for x in allowed:
    rule(ConfigDict({'a': {'x': x}}))
  for x in refused:
    assert_refused(rule, ConfigDict({'a': {'x': x}}), rf'^a\.x={re.escape(repr(x))}: {message}$')


def test_rules_for_several_fields_name_the_first_that_breaks_them():
  config = ConfigDict({'a': {'x': 0.5, 'y': -1, 'z': -2}})
  for rule, bound in (
    (rules.at_least, (0,)), (rules.above, (0,)), (rules.fraction, ()), (rules.below_one, ()),
    (rules.positive_fraction, ()),
  ):  # fmt: skip
    assert_refused(lambda c, rule=rule, bound=bound: rule(c, *bound, 'a.x', 'a.y', 'a.z'), config, r'^a\.y=-1: ')


# -- numbers that the programs can hold --------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('train.temperature', math.inf, r'^train\.temperature=inf: must be a finite number$'),
    ('algorithm.entropy_coef', math.nan, r'^algorithm\.entropy_coef=nan: must be a finite number$'),
    ('optimizer.critic_lr', math.inf, r'^optimizer\.critic_lr=inf: must be a finite number$'),
    ('agent.format_penalty', -math.inf, r'^agent\.format_penalty=-inf: must be a finite number$'),
    ('optimizer.weight_decay', 1e39, r'optimizer\.weight_decay=1e\+39: must be at most 3\.4e\+38 in magnitude'),
    ('agent.format_penalty', -1e39, r'agent\.format_penalty=-1e\+39: must be at most 3\.4e\+38 in magnitude'),
    ('train.temperature', 1e-45, r'train\.temperature=1e-45: must be 0 or at least 1\.2e-38'),
    ('optimizer.warmup_steps', 2**31, r'optimizer\.warmup_steps=2147483648: must be at most 2147483647'),
    ('seed', -(2**31), r'seed=-2147483648: must be at most 2147483647 in magnitude'),
    ('train.tag_groups', (4, 2**31), r'train\.tag_groups=\(4, 2147483648\): must be at most 2147483647'),
    ('sft.shape', (64, math.nan), r'sft\.shape=\(64, nan\): must be a finite number'),
  ],
)
def test_numbers_that_float32_or_int32_cannot_hold_are_refused(field, value, message):
  config = small_config()
  with config.unlocked(), config.ignore_type():
    config.update_from_flattened_dict({field: value})
  assert_refused(_check, config, message)


def test_the_largest_and_smallest_numbers_are_allowed():
  rules.plain_numbers(
    ConfigDict({'a': 3.4e38, 'b': -3.4e38, 'c': 1.2e-38, 'd': 0.0, 'e': 2**31 - 1, 'f': (1 - 2**31, 0.5), 'g': 'inf'})
  )


def test_no_number_of_the_config_may_be_infinite_or_nan():
  names = [name for name, value in leaves(small_config()) if isinstance(value, float)]
  assert len(names) > 60 and any(name.startswith('envs.') for name in names)
  for name in names:
    for x in (math.inf, -math.inf, math.nan):
      assert_refused(_check, small_config({name: x}), rf'^{re.escape(name)}={x}: must be a finite number$')


def test_what_is_handed_to_foreign_code_and_seeds_of_levels_have_ranges_of_their_own():
  config = ConfigDict(
    {'envs': {'Own': {'kwargs': {'far': math.inf, 'big': 2**40}}}, 'eval': {'first_level': 2**32 - 1}}
  )
  rules.plain_numbers(config)
  config.envs.Own.size = 2**40
  assert_refused(rules.plain_numbers, config, r'^envs\.Own\.size=1099511627776: must be at most 2147483647')
