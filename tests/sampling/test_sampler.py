"""The sampler over several turns against full forward passes over the same timeline."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragen_jax.sampling.draw import GREEDY, PLAIN, Sampling
from ragen_jax.sampling.sampler import Sampler
from tests.support.models import random_model

VOCAB, STOP = 40, 7


@nnx.jit
def _forward(model, tokens):
  hidden, _ = model.policy(model.policy.embed(tokens[None]))
  return jax.nn.log_softmax(model.policy.logits(hidden), axis=-1)[0], model.value_head(hidden)[0]


def _full_logprobs(model, tokens):
  """log p(tokens[t] | tokens[<t]) and the value there, by one forward pass over the whole row."""
  # As wide as any row, so that there is one program; nothing looks at what comes behind it.
  logp, values = jax.device_get(_forward(model, np.pad(tokens, (0, 96 - len(tokens)))))
  t = np.arange(1, len(tokens))
  return logp[t - 1, tokens[1:]], values[t - 1], logp[t - 1]


def _run_turns(sampler, params, keys, rng, *, turns, rows, max_new, sampling, order=None, drop=None):
  """Plays `turns` turns of random observations of ragged length; returns each row's timeline and records."""
  state = sampler.init(rows, 32)
  batch = np.arange(rows) if order is None else np.asarray(order)
  timelines = {r: [] for r in range(rows)}
  records = {r: [] for r in range(rows)}  # (column, logprob, value, entropy) of sampled tokens
  observations = {(t, r): rng.integers(8, VOCAB, size=rng.integers(1, 9)) for t in range(turns) for r in range(rows)}
  stopped = []
  for turn in range(turns):
    if turn and drop is not None:
      keep = np.flatnonzero(np.isin(batch, drop))
      state = sampler.arrange(state, jnp.asarray(keep), 96)
      batch, drop = batch[keep], None
    elif turn:
      state = sampler.arrange(state, jnp.arange(len(batch)), 96)
    tokens, count = np.zeros((len(batch), 8), np.int32), np.zeros(len(batch), np.int32)
    for i, r in enumerate(batch):
      obs = observations[turn, int(r)]
      tokens[i, : len(obs)], count[i] = obs, len(obs)
      timelines[int(r)].extend(obs.tolist())
    state = sampler.extend(params, state, jnp.asarray(tokens), jnp.asarray(count))
    state, reply = sampler.decode(
      params, state, keys[jnp.asarray(batch)], jnp.ones(len(batch), bool), max_new=max_new, sampling=sampling
    )
    reply = jax.device_get(reply)
    last = np.take_along_axis(reply.tokens, np.maximum(reply.count - 1, 0)[:, None], axis=1)[:, 0]
    stopped.append(last == STOP)
    for i, r in enumerate(batch):
      for j in range(reply.count[i]):
        records[int(r)].append(
          (len(timelines[int(r)]), reply.logprobs[i, j], reply.values[i, j], reply.entropies[i, j])
        )
        timelines[int(r)].append(int(reply.tokens[i, j]))
      ends = [t for t in reply.tokens[i, : reply.count[i]] if t == STOP]
      assert len(ends) == int(stopped[-1][i])  # the stop token is kept, and nothing is drawn after it
      assert stopped[-1][i] or reply.count[i] == max_new
  return timelines, records, np.concatenate(stopped)


@pytest.fixture(scope='module')
def model():
  return random_model(VOCAB)


def test_logprobs_values_and_entropies_equal_a_full_forward_pass_over_the_timeline(model):
  sampler, params = Sampler(model, stop_ids=(STOP,)), nnx.split(model)[1]
  keys = jax.random.split(jax.random.key(3), 6)
  timelines, records, stopped = _run_turns(
    sampler, params, keys, np.random.default_rng(0), turns=4, rows=6, max_new=9, sampling=PLAIN
  )
  assert stopped.any() and not stopped.all()  # both ways to end a reply occur
  for r, timeline in timelines.items():
    logprobs, values, logp = _full_logprobs(model, np.asarray(timeline))
    for column, lp, value, entropy in records[r]:
      np.testing.assert_allclose(lp, logprobs[column - 1], atol=1e-4)
      np.testing.assert_allclose(value, values[column - 1], atol=1e-4)
      np.testing.assert_allclose(entropy, -np.sum(np.exp(logp[column - 1]) * logp[column - 1]), atol=1e-4)


def test_a_reply_does_not_depend_on_the_order_of_rows_nor_on_which_others_are_there(model):
  sampler, params = Sampler(model, stop_ids=(STOP,)), nnx.split(model)[1]
  keys = jax.random.split(jax.random.key(5), 4)
  runs = [
    _run_turns(sampler, params, keys, np.random.default_rng(1), turns=3, rows=4, max_new=6, sampling=PLAIN, **kwargs)[0]
    for kwargs in ({}, {'order': [2, 0, 3, 1]}, {'drop': [1, 3]})
  ]
  assert runs[0] == runs[1]
  for row in (1, 3):
    assert runs[2][row] == runs[0][row]


def test_greedy_takes_the_likeliest_token(model):
  sampler, params = Sampler(model, stop_ids=(STOP,)), nnx.split(model)[1]
  keys = jax.random.split(jax.random.key(5), 3)
  timelines, records, _ = _run_turns(
    sampler, params, keys, np.random.default_rng(2), turns=2, rows=3, max_new=5, sampling=GREEDY
  )
  for r, timeline in timelines.items():
    _, _, logp = _full_logprobs(model, np.asarray(timeline))
    assert records[r]
    for column, *_ in records[r]:
      assert timeline[column] == int(np.argmax(logp[column - 1]))


def test_temperature_scales_the_logprobs(model):
  sampler, params = Sampler(model, stop_ids=(STOP,)), nnx.split(model)[1]
  keys = jax.random.split(jax.random.key(6), 3)
  timelines, records, _ = _run_turns(
    sampler,
    params,
    keys,
    np.random.default_rng(2),
    turns=1,
    rows=3,
    max_new=5,
    sampling=Sampling(temperature=0.5, top_p=1.0, top_k=0),
  )
  for r, timeline in timelines.items():
    _, _, logp = _full_logprobs(model, np.asarray(timeline))
    for column, lp, *_ in records[r]:
      sharper = np.asarray(jax.nn.log_softmax(2 * logp[column - 1]))
      np.testing.assert_allclose(lp, sharper[timeline[column]], atol=1e-4)


def test_padding_of_the_embedding_is_never_drawn(model):
  sampler, params = Sampler(model, stop_ids=(STOP,), vocab_limit=12), nnx.split(model)[1]
  state = sampler.init(64, 32)
  state = sampler.extend(params, state, jnp.full((64, 2), 9, jnp.int32), jnp.full((64,), 2))
  keys = jax.random.split(jax.random.key(0), 64)
  _, reply = sampler.decode(
    params, state, keys, jnp.ones(64, bool), max_new=20, sampling=Sampling(temperature=3.0, top_p=1.0, top_k=0)
  )
  assert int(reply.tokens.max()) == 11


def test_arrange_closes_holes_and_keeps_the_order(model):
  sampler, params = Sampler(model, stop_ids=(STOP,)), nnx.split(model)[1]
  state = sampler.init(3, 16)
  state = sampler.extend(params, state, jnp.arange(8, 20, dtype=jnp.int32).reshape(3, 4), jnp.asarray([4, 2, 0]))
  state = sampler.extend(params, state, jnp.arange(20, 29, dtype=jnp.int32).reshape(3, 3), jnp.asarray([1, 3, 2]))
  before = jax.device_get(state)
  after = jax.device_get(sampler.arrange(state, jnp.asarray([2, 0]), 6))
  assert after.valid.sum(axis=1).tolist() == [2, 5] and after.column == 5
  for new, old in ((0, 2), (1, 0)):
    n = int(after.count[new])
    for new_layer, old_layer in zip(after.cache, before.cache, strict=True):
      np.testing.assert_array_equal(new_layer.k[new, :n], old_layer.k[old][before.valid[old]])
      np.testing.assert_array_equal(new_layer.v[new, :n], old_layer.v[old][before.valid[old]])


def test_a_long_row_that_is_over_does_not_move_the_write_column(model):
  """The longest row leaves; the others' next turn has the room that their own lengths ask for, and is right."""
  sampler, params = Sampler(model, stop_ids=(STOP,)), nnx.split(model)[1]
  rng = np.random.default_rng(0)
  first = rng.integers(8, VOCAB, size=(2, 24)).astype(np.int32)
  state = sampler.extend(params, sampler.init(2, 24), jnp.asarray(first), jnp.asarray([24, 3]))
  state = sampler.arrange(state, jnp.arange(2), 12, jnp.asarray([False, True]))
  assert int(state.column) == 3 and state.count.tolist() == [0, 3]
  second = rng.integers(8, VOCAB, size=(2, 4)).astype(np.int32)
  state = sampler.extend(params, state, jnp.asarray(second), jnp.asarray([0, 4]))
  keys = jax.random.split(jax.random.key(0), 2)
  _, reply = sampler.decode(params, state, keys, jnp.asarray([False, True]), max_new=5, sampling=PLAIN)
  count = int(reply.count[1])
  timeline = np.concatenate([first[1, :3], second[1], np.asarray(reply.tokens[1, :count])])
  logprobs, _, _ = _full_logprobs(model, timeline)
  np.testing.assert_allclose(reply.logprobs[1, :count], logprobs[6:], atol=1e-4)
  assert int(reply.count[0]) == 0


def test_each_program_is_traced_once_per_shape(model):
  sampler, params = Sampler(model, stop_ids=(STOP,)), nnx.split(model)[1]
  keys = jax.random.split(jax.random.key(5), 4)
  run = functools.partial(_run_turns, sampler, params, keys, turns=3, rows=4, max_new=6)
  run(np.random.default_rng(1), sampling=PLAIN)
  # The cache has 32 columns in the first turn and 96 in the others, so every program has two shapes.
  assert sampler.traces == {'arrange': 2, 'extend': 2, 'decode': 2}
  run(
    np.random.default_rng(2), sampling=Sampling(temperature=0.5, top_p=1.0, top_k=0)
  )  # temperatures above 0 share a program
  assert sampler.traces == {'arrange': 2, 'extend': 2, 'decode': 2}
  run(np.random.default_rng(3), sampling=GREEDY)
  assert sampler.traces == {'arrange': 2, 'extend': 2, 'decode': 4}
