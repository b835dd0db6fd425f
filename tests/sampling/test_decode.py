"""`extend` and `decode` against full forward passes, with given features of columns and given rotary positions."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragen_jax.models.vision.features import ImageColumns
from ragen_jax.models.vision.tower import Features
from ragen_jax.sampling import decode as programs
from ragen_jax.sampling.decode import rotary_positions
from ragen_jax.sampling.draw import PLAIN
from ragen_jax.sampling.kv_cache import append, init_state
from tests.support.models import random_model

VOCAB, STOP = 40, 7
# A prompt of 6 columns: two text columns, an image of 3 columns that takes two positions, a text column.
OFFSETS = np.array([0, 1, 2, 2, 3, 4])


@pytest.fixture(scope='module')
def model():
  return random_model(VOCAB)


@pytest.fixture(scope='module')
def run(model):
  """(extend, decode) of the model, compiled."""
  graphdef, params = nnx.split(model)

  @jax.jit
  def extend(state, tokens, count, begins=None, **options):
    begins = jnp.zeros(len(count), bool) if begins is None else begins
    return append(state, None, programs.extend(graphdef, params, state, tokens, count, begins, **options)[0])

  @functools.partial(jax.jit, static_argnames=('columns', 'sampling'))
  def decode(state, *arguments, **options):
    added, reply = programs.decode(
      graphdef, params, state, *arguments, stop_ids=(STOP,), vocab_limit=VOCAB, banned=(), **options
    )
    return append(state, None, added), reply

  return extend, decode


def columns(model, features, *, positions=None, shown=True) -> ImageColumns:
  """Columns that read features [B, O, D] where `shown`, bool[B, O], with the same rotary positions in all rows."""
  rows, width, size = features.shape
  index = np.where(shown, np.arange(rows * width).reshape(rows, width), -1)
  table = Features(jnp.asarray(features).reshape(-1, size), None)
  positions = np.arange(width) if positions is None else positions
  return ImageColumns(jnp.asarray(index), jnp.broadcast_to(jnp.asarray(positions), (rows, width)), table)


def offsets(model, rows: int) -> ImageColumns:
  """Columns of tokens at the positions `OFFSETS`."""
  return columns(model, np.zeros((rows, 6, model.policy.cfg.hidden_size)), positions=OFFSETS, shown=False)


def tokens_and_counts(rows: int = 3, width: int = 6, seed: int = 0):
  rng = np.random.default_rng(seed)
  tokens = rng.integers(8, VOCAB, size=(rows, width)).astype(np.int32)
  return jnp.asarray(tokens), jnp.asarray(rng.integers(1, width + 1, size=rows), jnp.int32)


def sample(decode, state, *, columns=5, seed=1, budget=100, keys=None):
  rows = len(state.count)
  keys = jax.random.split(jax.random.key(seed), rows) if keys is None else keys
  return decode(
    state, keys, jnp.broadcast_to(jnp.asarray(budget), rows), jnp.float32(1), jnp.int32(rows + 1), columns=columns,
    sampling=PLAIN,
  )  # fmt: skip


def test_extending_with_features_that_are_embeddings_is_extending_with_the_tokens(model, run):
  extend, _ = run
  tokens, count = tokens_and_counts()
  empty = init_state(model.policy, 3, 16)
  with_tokens = extend(empty, tokens, count)
  embeddings = model.policy.embed(tokens)
  with_features = extend(empty, jnp.zeros_like(tokens), count, images=columns(model, embeddings))
  chex.assert_trees_all_equal(with_features, with_tokens)


def test_marked_columns_take_the_features_and_the_others_the_tokens(model, run):
  extend, _ = run
  tokens, count = tokens_and_counts()
  others, _ = tokens_and_counts(seed=1)
  marked = jnp.asarray(np.random.default_rng(2).random(tokens.shape) < 0.5)
  empty = init_state(model.policy, 3, 16)
  mixed = extend(empty, tokens, count, images=columns(model, model.policy.embed(others), shown=marked))
  chex.assert_trees_all_equal(mixed, extend(empty, jnp.where(marked, others, tokens), count))


@nnx.jit
def _forward_of_14(policy, tokens, positions):
  hidden, _ = policy(policy.embed(tokens[None]), positions[None])
  return hidden[0], jax.nn.log_softmax(policy.logits(hidden))[0]


def _forward(policy, tokens, positions):
  """Hidden states [T, D] and log-probs [T, V] of one forward pass."""
  padded = (np.pad(x, (0, 14 - len(tokens))).astype(np.int32) for x in (tokens, positions))
  return tuple(np.asarray(x)[: len(tokens)] for x in _forward_of_14(policy, *padded))


@pytest.mark.slow
def test_given_rotary_offsets_are_a_full_forward_pass_with_these_positions(model, run):
  """An image in the first turn, a text turn, and a reply: one forward pass with the positions of all columns."""
  extend, decode = run
  first, _ = tokens_and_counts(rows=2)
  second, _ = tokens_and_counts(rows=2, width=3, seed=1)
  # Row 0 has the whole prompt and goes on at 5; row 1 ends inside of the image and goes on at 3.
  first_count, second_count = jnp.asarray([6, 4]), jnp.asarray([3, 2])
  state = extend(init_state(model.policy, 2, 32), first, first_count, images=offsets(model, 2))
  assert state.rotary.tolist() == [5, 3] and state.count.tolist() == [6, 4]
  state = extend(state, second, second_count)
  assert state.rotary.tolist() == [8, 5] and state.draw_position.tolist() == [9, 6]
  state, reply = sample(decode, state)
  for row in range(2):
    n = int(reply.count[row])
    assert int(state.rotary[row]) == [8, 5][row] + n and int(state.count[row]) == [9, 6][row] + n
    parts = [first[row, : first_count[row]], second[row, : second_count[row]], reply.tokens[row, :n]]
    timeline = np.concatenate(parts)
    start = [5, 3][row]
    positions = np.concatenate([OFFSETS[: first_count[row]], start + np.arange(second_count[row] + n)])
    hidden, logp = _forward(model.policy, timeline, positions)
    expected = logp[np.arange(-n - 1, -1), np.asarray(reply.tokens[row, :n])]
    np.testing.assert_allclose(reply.logprobs[row, :n], expected, rtol=0, atol=1e-4)
    plain, _ = _forward(model.policy, timeline, np.arange(len(timeline)))
    assert np.abs(plain - hidden).max() > 0.01, 'the positions did not matter'


def test_positions_with_several_axes_advance_by_the_largest_and_go_on_alike_on_all_axes():
  # Text, an image of 2 x 3 columns at position 1, text: axes are time, height and width.
  image = [(1, 1 + row, 1 + column) for row in range(2) for column in range(3)]
  own = np.array([(0, 0, 0), *image, (4, 4, 4)])[None].repeat(3, axis=0)
  rotary, count = jnp.asarray([10, 20, 30]), jnp.asarray([8, 7, 0])
  positions, after = rotary_positions(rotary, count, 8, jnp.asarray(own))
  np.testing.assert_array_equal(positions, own + np.array([10, 20, 30])[:, None, None])
  assert after.tolist() == [15, 24, 30]
  positions, after = rotary_positions(rotary, count, 8)
  np.testing.assert_array_equal(positions, np.array([[10], [20], [30]]) + np.arange(8))
  assert after.tolist() == [18, 27, 30]


@pytest.mark.slow
def test_a_draw_does_not_depend_on_the_rotary_position_but_on_the_draw_position(model, run):
  extend, decode = run
  tokens, count = tokens_and_counts(rows=8)
  state = extend(init_state(model.policy, 8, 32), tokens, count)
  _, expected = sample(decode, state, columns=1)
  _, moved = sample(decode, state.replace(rotary=state.rotary + 5), columns=1)
  chex.assert_trees_all_equal(moved, expected)
  _, redrawn = sample(decode, state.replace(draw_position=state.draw_position + 5), columns=1)
  assert (redrawn.tokens != expected.tokens).any()


def test_a_row_without_new_columns_stays_as_it_is(model, run):
  extend, _ = run
  tokens, _ = tokens_and_counts()
  state = extend(init_state(model.policy, 3, 32), tokens, jnp.asarray([2, 3, 1]))
  after = extend(state, tokens, jnp.asarray([0, 4, 0]), images=offsets(model, 3))
  for name in ('count', 'draw_position', 'rotary', 'hidden'):
    np.testing.assert_array_equal(getattr(after, name)[::2], getattr(state, name)[::2], err_msg=name)
  assert after.count.tolist() == [2, 7, 1]


def columns_of(state):
  """The columns of each row, of all layers: what the rows' next tokens can see."""
  own = np.arange(state.cache[0].k.shape[1]) < np.asarray(state.count)[:, None]
  return [np.where(own[:, :, None, None], x, 0) for layer in state.cache for x in (layer.k, layer.v)]


def test_rows_that_begin_forget_what_they_held(model, run):
  """In one program with rows that go on."""
  extend, _ = run
  tokens, count = tokens_and_counts()
  others, _ = tokens_and_counts(seed=1)
  new = init_state(model.policy, 3, 32)
  used = extend(new, others, jnp.asarray([6, 6, 6]))
  begins = jnp.asarray([True, False, True])
  mixed = extend(used, tokens, count, begins)
  fresh, continued = extend(new, tokens, count), extend(used, tokens, count)
  for name in ('count', 'draw_position', 'rotary'):
    expected = np.where(begins, getattr(fresh, name), getattr(continued, name))
    np.testing.assert_array_equal(getattr(mixed, name), expected, err_msg=name)
  np.testing.assert_allclose(mixed.hidden, np.where(begins[:, None], fresh.hidden, continued.hidden), atol=1e-6)
  all_begin = extend(used, tokens, count, jnp.ones(3, bool))
  assert all_begin.count.tolist() == fresh.count.tolist()
  np.testing.assert_allclose(all_begin.hidden, fresh.hidden, atol=1e-6)
  for got, want in zip(columns_of(all_begin), columns_of(fresh), strict=True):
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.slow
def test_a_reply_in_several_parts_is_the_reply_in_one(model, run):
  """Rows with budgets of their own; parts of 3 columns against one of 12."""
  extend, decode = run
  tokens, count = tokens_and_counts(rows=64)
  state = extend(init_state(model.policy, 64, 64), tokens, count)
  keys, budget = jax.random.split(jax.random.key(4), 64), np.arange(64) % 13
  _, whole = sample(decode, state, columns=12, budget=budget, keys=keys)
  parts, left = [], budget
  for _ in range(4):
    state, part = sample(decode, state, columns=3, budget=left, keys=keys)
    parts.append(part)
    left = np.where(part.open, left - part.count, 0)
  assert not left.any() and not np.asarray(whole.open).any()
  stopped = np.take_along_axis(whole.tokens, np.maximum(whole.count - 1, 0)[:, None], axis=1)[:, 0] == STOP
  assert stopped.any() and (np.asarray(whole.count) == budget).any(), 'both ways to end occur'
  for row in range(64):
    n = int(whole.count[row])
    assert n <= budget[row] and sum(int(p.count[row]) for p in parts) == n
    for name in ('tokens', 'logprobs', 'values', 'entropies'):
      got = np.concatenate([np.asarray(getattr(p, name))[row, : p.count[row]] for p in parts])
      np.testing.assert_allclose(got, getattr(whole, name)[row, :n], atol=1e-5, err_msg=name)
