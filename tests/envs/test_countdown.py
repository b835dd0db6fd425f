"""Countdown: rewards by the published rule, levels against brute force, text and pictures."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ragen_jax.envs.countdown import Countdown
from tests.support.environments import batch, check_text_round_trip, make_levels, one, raises_one_line
from tests.support.games.countdown import (
  BLOCK,
  BUDGET,
  ENV,
  joined,
  level_of,
  play,
  reachable,
  read,
  reward_of,
  stack,
  value_of,
)

# -- rewards -----------------------------------------------------------------------------------------------------------


# Not shrunk: an example is a dozen levels, and smaller ones would say no more.
@settings(max_examples=10, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data())
def test_rewards(data):
  """Random expressions over the level's numbers, or nearly, are paid by the published rule."""
  states, texts = [], []
  for _ in range(12):
    numbers = data.draw(st.lists(st.integers(1, 12), min_size=3, max_size=4))
    used = data.draw(st.permutations(numbers))
    if data.draw(st.integers(0, 3)) == 0:
      first, second, *rest = used
      nearly = [*used, 1], used[1:], [first + 1, *used[1:]], [first + 1, second - 1, *rest], [*used, *used[:2], 3]
      used = nearly[data.draw(st.integers(0, len(nearly) - 1))]
    text = joined(used, data.draw)
    value = value_of(read(text))
    target = data.draw(st.integers(1, 99))
    if data.draw(st.booleans()) and value is not None and 1 <= value <= 99:
      target = int(value)  # The value, or just below it.
    states.append(level_of(ENV, numbers, target))
    texts.append(text)
  levels = stack(states)
  actions = np.stack([ENV.parse_action(text) for text in texts + [texts[0]] * (BLOCK - len(texts))])
  after, out = play(ENV, levels, actions)
  for i, text in enumerate(texts):
    level = one(levels, i)
    want = reward_of(text, [v for v in level.numbers.tolist() if v], int(level.target))
    assert out.reward[i] == np.float32(want)
    assert after.success[i] == (want == 1)
  assert after.done.all() and out.effective.all()
  np.testing.assert_array_equal(after.points, out.reward)
  np.testing.assert_array_equal(after.answer, actions)


@pytest.mark.parametrize(
  ('text', 'want'),
  [
    ('8 / (3 - 8 / 3)', 1),  # Needs a fraction on the way.
    ('3 + 3 + 8 + 8', 0.1),
    ('8 / (8 - 8) + 3', 0),
    ('(8 + 8) / (3 - 3)', 0.1),  # No value, but the right numbers.
    ('3 * 8', 0),
    ('24', 0),
    ('3 * 8 + 3 - 3', 0),
    ('8 * 3 + 3 / 8', 0.1),  # Three eighths too much.
    ('(4 - 2) * 8 + 8', 0),  # Four numbers with the same sum.
    ('(8 - 3) * 8 / 3', 0.1),
    ('999999 * 999999 * 999999', 0),  # Overflows, where it does not matter.
  ],
)
def test_known_rewards(text, want):
  levels = stack([level_of(ENV, (3, 3, 8, 8), 24)])
  after, out = play(ENV, levels, ENV.parse_action(text))
  np.testing.assert_array_equal(out.reward, np.float32(want))
  assert (after.success == (want == 1)).all() and after.done.all()


def test_a_division_by_zero_is_never_on_target():
  levels = stack([level_of(ENV, (24, 1, 1), 24)])
  after, out = play(ENV, levels, ENV.parse_action('24 / (1 - 1)'))
  assert (out.reward == np.float32(0.1)).all() and not after.success.any()


def test_tokens_that_are_no_expression_earn_nothing():
  levels = stack([level_of(ENV, (24, 1, 1), 24)])
  actions = np.zeros((BLOCK, *ENV.action_shape), np.int32)
  actions[0::2, :3] = [25, 2, 2]
  actions[1::2, :5] = [25, -3, 2, 2, -3]
  after, out = play(ENV, levels, actions)
  assert not out.reward.any() and not after.success.any() and after.done.all()


def test_numbers_reward():
  env = Countdown(numbers_reward=0.5)
  level = level_of(env, (1, 2, 3), 50)
  _, out = jax.jit(env.step)(level, np.array(env.parse_action('1 + 2 + 3'), np.int32), jax.random.key(0))
  assert out.reward == 0.5
  assert 'right numbers 0.5' in env.rules() and 'right numbers' not in Countdown(numbers_reward=0.0).rules()


def test_one_answer_ends_the_game():
  levels = make_levels(ENV)
  actions = np.array([chains[0] for chains in ENV.legal_actions(levels)])
  after, _ = play(ENV, levels, actions)
  again, out = play(ENV, after, ENV.parse_action('1 + 1'), seed=1)
  jax.tree.map(np.testing.assert_array_equal, again, after)
  assert after.done.all() and not out.reward.any() and not out.effective.any()


@pytest.mark.slow
def test_jit_and_vmap_change_nothing():
  levels = make_levels(ENV)
  actions = np.array([chains[-1] for chains in ENV.legal_actions(levels)], np.int32)
  after, out = play(ENV, levels, actions)
  alone = ENV.reset(jax.random.key(250))
  jax.tree.map(np.testing.assert_array_equal, alone, one(levels, 250))
  got = ENV.step(alone, jax.numpy.asarray(actions[250]), jax.random.key(0))
  jax.tree.map(np.testing.assert_array_equal, got, (one(after, 250), one(out, 250)))


def test_random_answers_are_worse():
  rng, levels = np.random.default_rng(0), make_levels(ENV)
  legal = ENV.legal_actions(levels)
  assert {len(chains) for chains in legal} == {16, 64} and all(len(set(chains)) == len(chains) for chains in legal)
  after, out = play(ENV, levels, [chains[rng.integers(len(chains))] for chains in legal])
  assert (out.reward >= np.float32(0.1)).all() and after.success.mean() < 0.5
  assert ENV.format_action(legal[0][1]).count('+') == len(levels.numbers[0].nonzero()[0]) - 2


# -- levels ------------------------------------------------------------------------------------------------------------


LEVELS = (
  Countdown(largest_number=9, largest_target=30),
  Countdown(min_numbers=2, max_numbers=3, largest_number=20, largest_target=40, level_operators='+-'),
)


@pytest.mark.parametrize('env', LEVELS)
@pytest.mark.slow_cases('env1')
def test_levels_can_be_won(env):
  levels = make_levels(env)
  counts = (levels.numbers > 0).sum(1)
  assert set(counts) == set(range(env.min_numbers, env.max_numbers + 1))
  assert levels.numbers.max() == env.largest_number and levels.target.min() >= 1
  assert levels.target.max() <= env.largest_target
  for numbers, target in list(zip(levels.numbers.tolist(), levels.target.tolist(), strict=True))[:60]:
    assert target in reachable(tuple(sorted(v for v in numbers if v)), env.level_operators)
  assert (env.optimal(levels, BUDGET) == 1).all()
  assert not levels.done.any() and not levels.success.any() and not levels.answer.any()


def test_the_level_operators_matter():
  """Levels of signs alone are won by signs alone; not all of the others are."""
  levels = make_levels(LEVELS[0])
  by_signs = [
    target in reachable(tuple(sorted(v for v in numbers if v)), '+-')
    for numbers, target in zip(levels.numbers.tolist(), levels.target.tolist(), strict=True)
  ]
  assert 0.2 < np.mean(by_signs) < 0.95


def test_targets_are_distributed_as_a_plain_rejection_sampler_draws_them():
  env, n, rng = LEVELS[0], 12 * BLOCK, np.random.default_rng(0)
  blocks = [make_levels(env, first=first) for first in range(0, n, BLOCK)]
  ours = np.array([[*numbers, target] for b in blocks for numbers, target in zip(b.numbers, b.target, strict=True)])

  def draw():
    values = rng.integers(1, 10, size=rng.integers(3, 5)).tolist()
    shown = values + [0] * (4 - len(values))
    while len(values) > 1:
      i, j = sorted(rng.choice(len(values), 2, replace=False))
      b, a = sorted([values.pop(j), values.pop(i)])
      possible = [a + b, a * b] + [a - b] * (a > b) + [a // b] * (a % b == 0)
      values.append(possible[rng.integers(len(possible))])
    return [*shown, values[0]]

  reference = []
  while len(reference) < n:
    level = draw()
    if level[-1] <= env.largest_target:
      reference.append(level)
  reference = np.array(reference)
  # The targets' whole distribution, and the numbers that were kept with them.
  for ours_hit, reference_hit in (
    (ours[:, 4:] == np.arange(1, 31), reference[:, 4:] == np.arange(1, 31)),
    (ours[:, 0:1] == np.arange(1, 10), reference[:, 0:1] == np.arange(1, 10)),
    (ours[:, 3:4] == np.arange(10), reference[:, 3:4] == np.arange(10)),
  ):
    error = np.sqrt((ours_hit.var(0) + reference_hit.var(0)) / n)
    assert (np.abs(ours_hit.mean(0) - reference_hit.mean(0)) < 4.5 * error).all()


def test_same_key_same_level():
  levels, again, others = make_levels(ENV), make_levels(ENV), make_levels(ENV, first=BLOCK)
  jax.tree.map(np.testing.assert_array_equal, levels, again)
  assert len(set(ENV.render(levels) + ENV.render(others))) > 500


# -- text and pictures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('answer', 'result'),
  [
    ('3*(8-1)', '3 * (8 - 1) = 21\nPoints: 0.1'),
    ('3*8*1', '3 * 8 * 1 = 24\nPoints: 1'),
    ('8/3-1', '8 / 3 - 1 = 5/3\nPoints: 0.1'),
    ('3/(1-1)', '3 / (1 - 1) = undefined\nPoints: 0'),
    ('24', '24 = 24\nPoints: 0'),
  ],
)
def test_text(answer, result):
  level = level_of(ENV, (3, 8, 1), 24)
  assert ENV.render(batch(level)) == ['Numbers: 3, 8, 1\nTarget: 24']
  after, _ = play(ENV, stack([level]), ENV.parse_action(answer))
  text = f'Numbers: 3, 8, 1\nTarget: 24\nAnswer: {result}'
  assert ENV.render(after)[0] == text
  assert ENV.render(batch(ENV.from_text(text))) == [text]


def test_text_round_trip():
  levels, rng = make_levels(ENV), np.random.default_rng(0)
  after, _ = play(ENV, levels, [chains[rng.integers(len(chains))] for chains in ENV.legal_actions(levels)])
  check_text_round_trip(ENV, levels)
  check_text_round_trip(ENV, one(after, np.s_[:3]))


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('Numbers: 1, 2, 3', '1 lines, must be 2'),
    ('Numbers: 1, 2\nTarget: 3', 'must be 3 to 4 numbers from 1 to 99'),
    ('Numbers: 1, 2, 100\nTarget: 3', 'must be 3 to 4 numbers from 1 to 99'),
    ('Numbers: 1, 0, 2\nTarget: 3', 'must be 3 to 4 numbers from 1 to 99'),
    ('Numbers: 1, 2, x\nTarget: 3', "line 1 is .* must begin with 'Numbers:'"),
    ('Numbers: 1, 2, 3\nTarget: 100', 'must be a target from 1 to 99'),
    ('Numbers: 1, 2, 3\nGoal: 6', "line 2 is 'Goal: 6', must begin with 'Target:'"),
    ('Numbers: 1, 2, 3\nTarget: 6\nAnswer: 1 + = 1\nPoints: 0', 'line 3 is .* must be an expression'),
    ('Numbers: 1, 2, 3\nTarget: 6\nAnswer: 1 + 2 + 3 = 7\nPoints: 1', "line 3 is .* must be 'Answer: 1 .* = 6'"),
    ('Numbers: 1, 2, 3\nTarget: 6\nAnswer: 1 + 2 + 3 = 6\nPoints: 2', "line 4 is 'Points: 2', must be 'Points: 1'"),
  ],
)
def test_bad_text(text, message):
  with raises_one_line(message):
    ENV.from_text(text)


def test_rules():
  assert '+ - * /' in ENV.rules() and '0.1' in ENV.rules() and 'expression' in ENV.action_help
  assert ENV.parse_action(re.search(r'\(.*\d', ENV.action_help)[0]) is not None
  # A leading minus is no action, and the player is told.
  assert 'without a leading minus' in ENV.action_help
  assert [ENV.parse_action(text) for text in ('-1 + 2', '3 * (-1 + 2)', '2 * -3')] == [None] * 3
  assert ENV.legend() == {} and ENV.action_words == ()


def test_picture():
  level = level_of(ENV, (3, 10, 7), 24)
  picture = ENV.render_rgb(level)
  assert picture.shape == (60, 180, 3) and picture.dtype == np.uint8
  paper = tuple(picture[0, 0])
  ink = (picture != paper).any(-1)[::4, ::4]
  # A 3 above, a 2 and a 4 below, dot by dot.
  assert [''.join('.#'[int(dot)] for dot in row) for row in ink[2:7, 1:4]] == ['###', '..#', '###', '..#', '###']
  below = [''.join('.#'[int(dot)] for dot in row) for row in ink[9:14, 1:8]]
  assert below == ['###.#.#', '..#.#.#', '###.###', '#.....#', '###...#']
  assert not ink[7:9].any()
  # The target's colour tells how it went.
  colours = set()
  for answer in (None, '10 + 7 * 3', '3 + 10 + 7', '(10 - 7) * 8'):
    state = level
    if answer:
      state = one(play(ENV, stack([level_of(ENV, (3, 10, 7), 31)]), ENV.parse_action(answer))[0])
    shown = ENV.render_rgb(state)
    np.testing.assert_array_equal(shown[:32], picture[:32])
    colours.add(tuple(shown[9 * 4, 4]))
  assert len(colours) == 4 and paper not in colours
  shapes = {ENV.render_rgb(one(make_levels(ENV), i)).shape for i in range(20)}
  assert shapes == {picture.shape}


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'max_numbers': 6}, 'max_numbers=6; allowed: integers from 2 to 5'),
    ({'min_numbers': 5}, 'min_numbers=5; allowed: integers from 2 to 4'),
    ({'min_numbers': 1}, 'min_numbers=1; allowed: integers from 2 to 4'),
    ({'largest_number': 128}, 'largest_number=128; allowed: integers from 2 to 127'),
    ({'max_numbers': 5}, 'largest_number=99; allowed: integers from 2 to 42'),
    ({'max_numbers': 3, 'largest_number': 813}, 'integers from 2 to 812'),
    ({'min_numbers': 2, 'max_numbers': 2, 'largest_number': 1000}, 'integers from 2 to 999'),
    ({'largest_target': 0}, 'largest_target=0; allowed: integers from 1 to 999999'),
    ({'largest_target': 10.0}, 'largest_target=10.0; allowed: integers'),
    ({'min_numbers': True}, 'min_numbers=True; allowed: integers'),
    ({'level_operators': '*/'}, r"level_operators='\*/'; allowed: "),
    ({'numbers_reward': 1.0}, 'numbers_reward=1.0; allowed: numbers from 0 to below 1'),
    ({'numbers_reward': float('nan')}, 'numbers_reward=nan; allowed: '),
  ],
)
def test_bad_options_are_named(options, message):
  with raises_one_line(message) as error:
    Countdown(**options)
  assert str(error.value).startswith('countdown: ')
