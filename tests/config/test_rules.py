"""Rules for single fields: the values at each bound, and the line that tells of a value beyond it."""

from __future__ import annotations

import re

import pytest
from ml_collections import ConfigDict

from ragen_jax.config import rules
from tests.support.configs import assert_refused


@pytest.mark.parametrize(
  ('rule', 'allowed', 'refused', 'message'),
  [
    (lambda c: rules.at_least(c, 1, 'a.x'), (1, 2, 1.0), (0, 0.99, -1), 'must be at least 1'),
    (lambda c: rules.above(c, 0, 'a.x'), (1, 1e-9), (0, 0.0, -1), 'must be above 0'),
    (lambda c: rules.fraction(c, 'a.x'), (0, 0.5, 1.0), (-0.01, 1.01), 'must be between 0 and 1'),
    (lambda c: rules.below_one(c, 'a.x'), (0.0, 0.999), (-0.01, 1.0), 'must be at least 0 and below 1'),
    (lambda c: rules.positive_fraction(c, 'a.x'), (1e-9, 1.0), (0.0, 1.01), 'must be above 0 and at most 1'),
    (lambda c: rules.one_of(c, 'a.x', ('one', 'two')), ('one', 'two'), ('On', '', 'one,'), 'allowed: one, two'),
    (lambda c: rules.one_of(c, 'a.x', ('', 'one')), ('', 'one'), ('two',), "allowed: '', one"),
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
