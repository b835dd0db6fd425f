"""Token, turn-wise and bi-level GAE: against loops, on the worked example, and in their consequences."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.algorithms import gae as module
from ragen_jax.algorithms.masks import whiten

ROWS, TURNS = 8, 4  # of the fixture's batches

gae = jax.jit(module.gae)
turn_wise_gae = jax.jit(module.turn_wise_gae)
bi_level_gae = jax.jit(module.bi_level_gae)


# --- the same by loops, in float64, over lists of the sampled slots of one episode ------------------------------------


def loop_gae(r, v, gamma, lam, end=0.0):
  advantages, following, accumulator = [], end, 0.0
  for reward, value in zip(reversed(r), reversed(v), strict=True):
    accumulator = reward + gamma * following - value + gamma * lam * accumulator
    following = value
    advantages.append(accumulator)
  return advantages[::-1]


def loop_turns(r, v, turns, gamma, lam, end=0.0):
  """A^H for each turn: {turn: advantage}. `turns` is the turn of each sampled slot."""
  last = {k: i for i, k in enumerate(turns)}  # the last slot of each turn
  order = sorted(last)
  chain = loop_gae([r[last[k]] for k in order], [v[last[k]] for k in order], gamma, lam, end)
  return dict(zip(order, chain, strict=True))


def loop_bi_level(r, v, turns, gamma, lam, high_gamma, high_lam, end=0.0):
  high = loop_turns(r, v, turns, high_gamma, high_lam, end)
  out = []
  for k in sorted(high):
    slots = [i for i, of in enumerate(turns) if of == k]
    rewards = [r[i] for i in slots]
    rewards[-1] = high[k] + v[slots[-1]]
    out += loop_gae(rewards, [v[i] for i in slots], gamma, lam)
  return out


def loop_bi_level_of_any_rewards(r, v, turns, gamma, lam, high_gamma, high_lam, end=0.0):
  """Rewards inside turn k + 1 are earned on the way from the end of turn k to that of turn k + 1."""
  order = sorted(set(turns))
  slots = {k: [i for i, of in enumerate(turns) if of == k] for k in order}
  advantages, following, accumulator = {}, end, 0.0
  for k in reversed(order):
    last = slots[k][-1]
    accumulator = r[last] + high_gamma * following - v[last] + high_gamma * high_lam * accumulator
    advantages[k], following = accumulator, sum(r[i] for i in slots[k][:-1]) + v[last]
  out = []
  for k in order:
    rewards = [r[i] for i in slots[k]]
    rewards[-1] = advantages[k] + v[slots[k][-1]]
    out += loop_gae(rewards, [v[i] for i in slots[k]], gamma, lam)
  return out


def on_rows(b, f, bootstrap):
  """Applies f(r, v, turns, end) to the sampled slots of every row."""
  out = np.zeros(b.loss_mask.shape)
  for row in np.flatnonzero(b.valid):
    m = b.loss_mask[row]
    r, v = b.rewards[row, m].astype(float), b.values[row, m].astype(float)
    out[row, m] = f(r, v, list(b.turn[row, m]), float(bootstrap[row]))
  return out


PARAMETERS = [(1.0, 1.0, 0.95, 1.0), (0.99, 0.9, 0.95, 0.9), (0.9, 0.0, 0.8, 0.7), (1.0, 0.95, 1.0, 1.0)]


@pytest.mark.parametrize(('gamma', 'lam', 'high_gamma', 'high_lam'), PARAMETERS)
@pytest.mark.parametrize('truncated', [False, True])
def test_against_loops(batch, gamma, lam, high_gamma, high_lam, truncated):
  for seed in range(3):
    b = batch(seed)
    bootstrap = b.bootstrap if truncated else np.zeros_like(b.bootstrap)
    given_bootstrap = bootstrap if truncated else None
    value = np.where(b.loss_mask, b.values, 0.0)

    expected = on_rows(b, lambda r, v, turns, end: loop_gae(r, v, gamma, lam, end), bootstrap)
    advantages, returns = gae(b.rewards, b.values, b.loss_mask, gamma, lam, given_bootstrap)
    np.testing.assert_allclose(advantages, expected, atol=2e-6)
    np.testing.assert_allclose(returns, expected + value, atol=2e-6)

    def spread(r, v, turns, end):
      high = loop_turns(r, v, turns, high_gamma, high_lam, end)
      return [high[k] for k in turns]

    expected = on_rows(b, spread, bootstrap)
    advantages, returns = turn_wise_gae(b.rewards, b.values, b.loss_mask, b.turn, high_gamma, high_lam, given_bootstrap)
    np.testing.assert_allclose(advantages, expected, atol=2e-6)
    np.testing.assert_allclose(returns, np.where(b.ends, expected + value, 0.0), atol=2e-6)

    expected = on_rows(
      b, lambda r, v, turns, end: loop_bi_level(r, v, turns, gamma, lam, high_gamma, high_lam, end), bootstrap
    )
    advantages, returns = bi_level_gae(
      b.rewards, b.values, b.loss_mask, b.turn, gamma, lam, high_gamma, high_lam, given_bootstrap
    )
    np.testing.assert_allclose(advantages, expected, atol=2e-6)
    np.testing.assert_allclose(returns, expected + value, atol=2e-6)


# --- the worked example of the reference ------------------------------------------------------------------------------

MASK = np.array([[1, 1, 1, 0, 0, 1, 1, 0, 1]], bool)
TURN = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2]])
REWARDS = np.array([[0, 0, 0.5, 0, 0, 0, -0.1, 0, 1]], np.float32)
VALUES = np.array([[0.2, 0.3, 0.4, 9, 9, 0.5, 0.6, 9, 0.8]], np.float32)

WORKED = [
  # gamma, lam, high gamma; bi-level advantages, returns, whitened; token GAE; turn-wise
  (
    (1.0, 1.0, 0.95),
    [1.1075, 1.0075, 0.9075, 0, 0, 0.35, 0.25, 0, 0.2],
    [1.3075, 1.3075, 1.3075, 0, 0, 0.85, 0.85, 0, 1.0],
    [1.137642, 0.895805, 0.653968, 0, 0, -0.694274, -0.936111, 0, -1.057029],
    [1.2, 1.1, 1.0, 0, 0, 0.4, 0.3, 0, 0.2],
    [0.9075, 0.9075, 0.9075, 0, 0, 0.25, 0.25, 0, 0.2],
  ),
  (
    (1.0, 1.0, 1.0),
    [1.2, 1.1, 1.0, 0, 0, 0.4, 0.3, 0, 0.2],
    [1.4, 1.4, 1.4, 0, 0, 0.9, 0.9, 0, 1.0],
    [1.118034, 0.894427, 0.670820, 0, 0, -0.670820, -0.894427, 0, -1.118034],
    [1.2, 1.1, 1.0, 0, 0, 0.4, 0.3, 0, 0.2],
    [1.0, 1.0, 1.0, 0, 0, 0.3, 0.3, 0, 0.2],
  ),
  (
    (0.99, 0.9, 0.95),
    [0.871232, 0.868947, 0.867505, 0, 0, 0.299821, 0.231, 0, 0.2],
    [1.071232, 1.168947, 1.267505, 0, 0, 0.799821, 0.831, 0, 1.0],
    [0.914656, 0.908017, 0.903828, 0, 0, -0.745511, -0.945462, 0, -1.035529],
    [0.891679, 0.891895, 0.893261, 0, 0, 0.334748, 0.270200, 0, 0.2],
    [0.867505, 0.867505, 0.867505, 0, 0, 0.231, 0.231, 0, 0.2],
  ),
]


@pytest.mark.parametrize(('parameters', 'bi_level', 'returns', 'whitened', 'token', 'turn_wise'), WORKED)
def test_worked_example(parameters, bi_level, returns, whitened, token, turn_wise):
  gamma, lam, high_gamma = parameters
  got, got_returns = bi_level_gae(REWARDS, VALUES, MASK, TURN, gamma, lam, high_gamma)
  np.testing.assert_allclose(got[0], bi_level, atol=1e-5)
  np.testing.assert_allclose(got_returns[0], returns, atol=1e-5)
  np.testing.assert_allclose(jax.jit(whiten)(got, MASK)[0], whitened, atol=1e-5)
  np.testing.assert_allclose(gae(REWARDS, VALUES, MASK, gamma, lam)[0][0], token, atol=1e-5)
  np.testing.assert_allclose(turn_wise_gae(REWARDS, VALUES, MASK, TURN, high_gamma, lam)[0][0], turn_wise, atol=1e-5)


# --- the eight consequences -------------------------------------------------------------------------------------------


def test_1_advantage_at_a_turns_end_is_the_turns(batch):
  for seed in range(5):
    b = batch(seed)
    bi_level, _ = bi_level_gae(b.rewards, b.values, b.loss_mask, b.turn, 0.99, 0.9, 0.95, 0.8, b.bootstrap)
    turns, _ = turn_wise_gae(b.rewards, b.values, b.loss_mask, b.turn, 0.95, 0.8, b.bootstrap)
    np.testing.assert_allclose(np.asarray(bi_level)[b.ends], np.asarray(turns)[b.ends], atol=2e-6)


def test_2_turns_meet_at_their_last_tokens_only():
  """The first token of the next turn has no say in this turn; the last one has, by high_level_gamma."""
  before, _ = bi_level_gae(REWARDS, VALUES, MASK, TURN, 0.9, 0.8, 0.5)
  first = VALUES.copy()
  first[0, 5] += 3.0  # first token of turn 1
  after, _ = bi_level_gae(REWARDS, first, MASK, TURN, 0.9, 0.8, 0.5)
  np.testing.assert_array_equal(before[0, :3], after[0, :3])
  assert abs(float(after[0, 5] - before[0, 5]) + 3.0) < 1e-5
  last = VALUES.copy()
  last[0, 6] += 3.0  # last token of turn 1; at lam_H = 0 all that turn 0 sees of it is gamma_H V
  before, _ = bi_level_gae(REWARDS, VALUES, MASK, TURN, 0.9, 0.8, 0.5, 0.0)
  after, _ = bi_level_gae(REWARDS, last, MASK, TURN, 0.9, 0.8, 0.5, 0.0)
  assert abs(float(after[0, 2] - before[0, 2]) - 0.5 * 3.0) < 1e-5


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), truncated=st.booleans())
def test_3_equal_to_token_gae_without_discount(batch, seed, truncated):
  b = batch(seed)
  bootstrap = b.bootstrap * truncated
  bi_level, _ = bi_level_gae(b.rewards, b.values, b.loss_mask, b.turn, 1.0, 1.0, 1.0, 1.0, bootstrap)
  token, _ = gae(b.rewards, b.values, b.loss_mask, 1.0, 1.0, bootstrap)
  np.testing.assert_allclose(bi_level, token, atol=1e-5)


def with_rewards_inside(b):
  """The batch, with rewards on half of all sampled tokens."""
  paid = np.where(b.rng.random(b.rewards.shape) < 0.5, b.rng.normal(size=b.rewards.shape), 0.0)
  rewards = np.where(b.loss_mask, np.where(b.ends, b.rewards, paid), np.nan).astype(np.float32)
  return SimpleNamespace(**vars(b) | {'rewards': rewards})


@pytest.mark.parametrize('parameters', PARAMETERS)
def test_rewards_inside_turns_against_a_loop(batch, parameters):
  for seed in range(3):
    b = with_rewards_inside(batch(seed))
    expected = on_rows(b, lambda r, v, k, end: loop_bi_level_of_any_rewards(r, v, k, *parameters, end), b.bootstrap)
    got, _ = bi_level_gae(b.rewards, b.values, b.loss_mask, b.turn, *parameters, b.bootstrap)
    np.testing.assert_allclose(got, expected, atol=3e-6)


def test_rewards_inside_turns_are_equal_to_token_gae_without_discount(batch):
  for seed in range(10):
    b = with_rewards_inside(batch(seed))
    bi_level, _ = bi_level_gae(b.rewards, b.values, b.loss_mask, b.turn, 1.0, 1.0, 1.0, 1.0, b.bootstrap)
    token, _ = gae(b.rewards, b.values, b.loss_mask, 1.0, 1.0, b.bootstrap)
    np.testing.assert_allclose(bi_level, token, atol=1e-5)


def test_rewards_inside_turns_do_not_depend_on_the_rows_of_an_episode():
  """Two turns in one row, and in a row each, the second first."""
  rng = np.random.default_rng(0)
  one = {'rewards': rng.normal(size=(1, 8)), 'values': rng.normal(size=(1, 8))}
  one = {name: x.astype(np.float32) for name, x in one.items()} | {'mask': np.ones((1, 8), bool)}
  one['turn'] = np.repeat([[0, 1]], 4, axis=1).astype(np.int32)
  two = {name: x.reshape(2, 4)[::-1] for name, x in one.items()}
  expected, _ = bi_level_gae(**one, gamma=0.97, lam=0.9, high_level_gamma=0.8, high_level_lam=0.7)
  got, _ = bi_level_gae(
    **two, gamma=0.97, lam=0.9, high_level_gamma=0.8, high_level_lam=0.7, episode=np.zeros(2, np.int32)
  )
  np.testing.assert_allclose(np.asarray(got)[::-1].reshape(1, 8), expected, atol=1e-6)


def test_4_not_equal_with_equal_discounts_below_one(batch):
  largest = 0.0
  for seed in range(5):
    b = batch(seed)
    bi_level, _ = bi_level_gae(b.rewards, b.values, b.loss_mask, b.turn, 0.9, 1.0, 0.9)
    token, _ = gae(b.rewards, b.values, b.loss_mask, 0.9, 1.0)
    largest = max(largest, float(np.abs(bi_level - token).max()))
  assert largest > 0.1


def first_anchored(r, v, turns, gamma, lam, high_gamma, high_lam):
  """The variant whose pass 1 reads V at the first token of a turn; written back at its end."""
  order = sorted(set(turns))
  slots = {k: [i for i, of in enumerate(turns) if of == k] for k in order}
  chain = loop_gae([r[slots[k][-1]] for k in order], [v[slots[k][0]] for k in order], high_gamma, high_lam)
  out = []
  for k, high in zip(order, chain, strict=True):
    rewards = [r[i] for i in slots[k]]
    rewards[-1] = high + v[slots[k][0]]  # the turn's target replaces its reward
    out += loop_gae(rewards, [v[i] for i in slots[k]], gamma, lam)
  return out


def test_5_anchor_matters_only_below_lambda_one():
  m = MASK[0]
  arguments = (REWARDS[0, m].astype(float), VALUES[0, m].astype(float), list(TURN[0, m]))
  at_one, _ = bi_level_gae(REWARDS, VALUES, MASK, TURN, 1.0, 1.0, 0.95)
  np.testing.assert_allclose(at_one[0, m], first_anchored(*arguments, 1.0, 1.0, 0.95, 1.0), atol=1e-5)
  below, _ = bi_level_gae(REWARDS, VALUES, MASK, TURN, 0.99, 0.9, 0.95)
  variant = first_anchored(*arguments, 0.99, 0.9, 0.95, 0.9)
  np.testing.assert_allclose(variant, [0.863690, 0.860482, 0.858005, 0.299821, 0.231, 0.2], atol=1e-5)
  assert np.abs(np.asarray(below)[0, m] - variant).max() > 5e-3


def test_6_one_token_turns_are_token_gae():
  rng = np.random.default_rng(0)
  mask = rng.random((6, 12)) < 0.6
  turn = np.where(mask, np.cumsum(mask, axis=-1) - 1, -1).astype(np.int32)
  rewards, values = rng.normal(size=(2, 6, 12)).astype(np.float32)
  for gamma, lam in ((0.9, 0.7), (0.5, 1.0)):
    bi_level, _ = bi_level_gae(rewards, values, mask, turn, gamma, lam, gamma)
    np.testing.assert_allclose(bi_level, gae(rewards, values, mask, gamma, lam)[0], atol=2e-6)


def test_7_what_lies_on_observations_changes_nothing(batch):
  for seed in range(3):
    clean, poisoned = batch(seed, poison=0.0), batch(seed)
    assert np.isnan(poisoned.values[~poisoned.loss_mask]).all()
    for f, high in ((bi_level_gae, (0.95,)), (turn_wise_gae, ())):
      for x, y in zip(
        f(clean.rewards, clean.values, clean.loss_mask, clean.turn, 0.99, 0.9, *high),
        f(poisoned.rewards, poisoned.values, poisoned.loss_mask, poisoned.turn, 0.99, 0.9, *high),
        strict=True,
      ):
        np.testing.assert_array_equal(x, y)


def test_8_padding_batching_and_a_single_turn(batch):
  b = batch(3)
  whole, _ = bi_level_gae(b.rewards, b.values, b.loss_mask, b.turn, 0.99, 0.9, 0.95)
  for row in range(len(b.valid)):
    one = slice(row, row + 1)
    alone, _ = bi_level_gae(b.rewards[one], b.values[one], b.loss_mask[one], b.turn[one], 0.99, 0.9, 0.95)
    np.testing.assert_allclose(alone, whole[one], atol=1e-6)
  wide = functools.partial(np.pad, pad_width=((2, 3), (0, 9)))
  padded, _ = bi_level_gae(wide(b.rewards), wide(b.values), wide(b.loss_mask), wide(b.turn), 0.99, 0.9, 0.95)
  np.testing.assert_allclose(padded, wide(np.asarray(whole)), atol=1e-6)
  assert not np.asarray(whole)[b.padding].any()

  one_turn = np.zeros_like(b.turn)
  single, _ = bi_level_gae(b.rewards, b.values, b.loss_mask, one_turn, 0.99, 0.9, 0.5)
  np.testing.assert_allclose(single, gae(b.rewards, b.values, b.loss_mask, 0.99, 0.9)[0], atol=2e-6)


def test_turns_of_zero_reward_still_end():
  rewards = np.zeros_like(REWARDS)
  high = loop_turns([0.0] * 6, list(VALUES[0, MASK[0]].astype(float)), list(TURN[0, MASK[0]]), 0.95, 1.0)
  got, _ = bi_level_gae(rewards, VALUES, MASK, TURN, 1.0, 1.0, 0.95)
  np.testing.assert_allclose(got[0, [2, 6, 8]], [high[0], high[1], high[2]], atol=1e-6)


# --- the mask of advantages, several rows -----------------------------------------------------------------------------


def test_advantage_mask_wider_than_the_loss_mask():
  """M_adv off: observation tokens take part, and turns still end where the policy's tokens do."""
  every = np.ones_like(MASK)
  got, _ = bi_level_gae(REWARDS, VALUES, every, TURN, 0.99, 0.9, 0.95, loss_mask=MASK)
  high = loop_turns(
    list(REWARDS[0, MASK[0]].astype(float)), list(VALUES[0, MASK[0]]), list(TURN[0, MASK[0]]), 0.95, 0.9
  )
  values = VALUES[0].astype(float)
  expected = []
  for k, (start, end) in enumerate(((0, 3), (3, 7), (7, 9))):
    rewards = list(REWARDS[0, start:end].astype(float))
    rewards[-1] = high[k] + values[end - 1]
    expected += loop_gae(rewards, list(values[start:end]), 0.99, 0.9)
  np.testing.assert_allclose(got[0], expected, atol=2e-6)


def split_rows(b, *, interleaved, count=ROWS * TURNS + 1):
  """The turns of every row on rows of their own, in random order, then padding: where each is from, and its mask.

  Each new row holds one turn, or, interleaved, any of the turns, between which turns of other rows may lie.
  """
  pieces = []
  for row in np.flatnonzero(b.valid):
    turns = range(b.turn[row].max() + 1)
    owner = b.rng.integers(0, 2, len(turns)) if interleaved else turns
    pieces += [(row, [k for k in turns if owner[k] == o]) for o in set(owner)]
  b.rng.shuffle(pieces)
  masks = [b.loss_mask[row] & np.isin(b.turn[row], turns) for row, turns in pieces]
  masks += [np.zeros_like(masks[0])] * (count - len(masks))
  # padding rows claim to belong to the first episode
  source = np.array([row for row, _ in pieces] + [pieces[0][0]] * (count - len(pieces)))
  return source, np.stack(masks)


@pytest.mark.parametrize('interleaved', [False, True])
@pytest.mark.parametrize('estimator', ['gae', 'turn_wise_gae', 'bi_level_gae', 'discounted_returns'])
@pytest.mark.slow_cases('gae-False', 'turn_wise_gae-False', 'bi_level_gae-False', 'discounted_returns-False')
def test_an_episode_on_several_rows_is_one_episode(batch, estimator, interleaved):
  f = {
    'gae': lambda r, v, m, turn, end, **rows: module.gae(r, v, m, 0.9, 0.8, end, **(rows and rows | {'turn': turn})),
    'turn_wise_gae': lambda r, v, m, turn, end, **rows: module.turn_wise_gae(r, v, m, turn, 0.9, 0.8, end, **rows),
    'bi_level_gae': lambda r, v, m, turn, end, **rows: module.bi_level_gae(
      r, v, m, turn, 0.9, 0.8, 0.7, 0.6, end, **rows
    ),
    'discounted_returns': lambda r, v, m, turn, end, **rows: [
      module.discounted_returns(r, m, 0.9, **(rows and rows | {'turn': turn}))
    ],
  }[estimator]
  f = jax.jit(f)
  for seed in range(3):
    b = batch(seed)
    source, mask = split_rows(b, interleaved=interleaved)
    whole = f(b.rewards, b.values, b.loss_mask, b.turn, b.bootstrap)[0]
    episode = (1000 - 13 * source).astype(np.int32)
    parts = f(b.rewards[source], b.values[source], mask, b.turn[source], b.bootstrap[source], episode=episode)[0]
    parts = np.asarray(parts)
    assert not parts[~mask].any()
    together = np.zeros_like(b.values)
    np.add.at(together, source, parts)
    np.testing.assert_allclose(together, whole, atol=5e-6)


def test_rows_of_one_episode_need_turns(batch):
  b = batch(0)
  with pytest.raises(ValueError, match='turn'):
    module.gae(b.rewards, b.values, b.loss_mask, 0.9, 0.8, episode=b.group)


def test_discounted_returns_skip_holes():
  mask = np.array([[1, 0, 0, 1, 1]], bool)
  rewards = np.array([[1.0, 7.0, 7.0, 2.0, 4.0]], np.float32)
  got = jax.jit(module.discounted_returns)(rewards, mask, 0.5)
  np.testing.assert_allclose(got[0], [1 + 1 + 1, 0, 0, 4, 4], atol=1e-6)
