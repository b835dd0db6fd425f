"""Solutions of Countdown against brute force."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest

from ragen_jax.envs import countdown
from tests.support.environments import make_levels
from tests.support.games.countdown import BLOCK, BUDGET, ENV, OPERATIONS, WIDE, level_of, play, reachable, stack


def test_solutions_are_what_brute_force_finds():
  """Random numbers with targets that can and cannot be reached."""
  rng, states, want = np.random.default_rng(1), [], []
  for _ in range(40):
    numbers = rng.integers(1, 14, size=rng.integers(3, 5)).tolist()
    values = reachable(tuple(sorted(numbers)))
    targets = rng.permutation(99)[:4] + 1
    states += [level_of(ENV, numbers, target) for target in targets]
    want += [target in values for target in targets]
  for numbers, target in (((3, 3, 8, 8), 24), ((1, 5, 5, 5), 24), ((1, 3, 4, 6), 24), ((1, 1, 1), 9)):
    states.append(level_of(ENV, numbers, target))
    want.append(target in reachable(numbers))
  assert want[-4:] == [True, True, True, False] and 0.2 < np.mean(want) < 0.8
  want += [want[0]] * (BLOCK - len(want))
  levels = stack(states)
  solution = ENV.solve(levels, BUDGET)
  np.testing.assert_array_equal(solution.success, np.float32(want))

  ones = np.ones(BLOCK, np.int32)
  plans = solution.plan(levels, ones, ones)
  after, out = play(ENV, levels, [plan[0] for plan in plans])
  np.testing.assert_array_equal(after.success, want)
  # 1 or the reward for the numbers.
  np.testing.assert_array_equal(out.reward, np.where(want, np.float32(1), np.float32(0.1)))
  # The thoughts are true, and know when there is nothing to be found.
  for thought, possible, target in zip(ENV.rationale(levels), want, levels.target.tolist(), strict=True):
    assert thought.startswith(f'I need {target}')
    steps = re.findall(r'([-\d/]+) ([-+*/]) ([-\d/]+) = ([-\d/]+)', thought)
    assert bool(steps) == possible and ('no way' in thought) != possible
    signs = dict(zip('+-*/', OPERATIONS.values(), strict=True))
    assert all(signs[sign](Fraction(a), Fraction(b)) == Fraction(c) for a, sign, b, c in steps)
    assert not steps or Fraction(steps[-1][-1]) == target

  assert solution.plan(after, ones, ones) == [[]] * BLOCK
  for turns, actions in ((0, 1), (1, 0)):
    assert solution.plan(levels, turns * ones, actions * ones) == [[]] * BLOCK
  np.testing.assert_array_equal(ENV.optimal(after, BUDGET), after.success)


@pytest.mark.slow
def test_largest_levels():
  levels = make_levels(WIDE)
  assert set((levels.numbers > 0).sum(1)) == {2, 3, 4, 5}
  solution = WIDE.solve(levels, BUDGET)
  after, out = play(WIDE, levels, solution.actions)
  assert after.success.all() and (out.reward == 1).all() and (solution.success == 1).all()
  # What a level is made of is a solution in positive integers, and such are found first.
  assert not any(re.search(r'\d/\d|-\d', thought) for thought in WIDE.rationale(levels))
  few = [level for level in countdown._levels(levels) if len(level[0]) < 4]
  assert all(target in reachable(tuple(sorted(numbers)), '+-*') for numbers, target in few) and len(few) > 50
