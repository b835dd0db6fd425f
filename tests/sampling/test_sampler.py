"""The sampler over several turns against full forward passes over the same timeline."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragen_jax.models.layer_cache import LayerCache
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.planning.lowering import abstract_rows, lower_sampler
from ragen_jax.sampling.draw import GREEDY, PLAIN, RowSampling, Sampling
from ragen_jax.sampling.sampler import Sampler
from tests.support.models import EXPERTS, HYBRID, WINDOWS, random_model

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


def _run_turns(sampler, params, keys, rng, *, turns, sampling, rows=4, max_new=6, order=None, drop=None):
  """Plays `turns` turns of random observations of ragged length; returns each row's timeline and records.

  `order` is the episode of each row of the state. Episodes other than those of `drop` end after the first turn.
  """
  state = sampler.init(rows, 32)
  order = np.arange(rows) if order is None else np.asarray(order)
  batch, selected = order, None
  timelines = {r: [] for r in range(rows)}
  records = {r: [] for r in range(rows)}  # (column, logprob, value, entropy) of sampled tokens
  observations = {(t, r): rng.integers(8, VOCAB, size=rng.integers(1, 9)) for t in range(turns) for r in range(rows)}
  stopped = []
  for turn in range(turns):
    if turn == 1:
      state = sampler.resize(state, 96)
      if drop is not None:
        selected = np.flatnonzero(np.isin(order, drop)).astype(np.int32)
        batch = order[selected]
    tokens, count = np.zeros((len(batch), 8), np.int32), np.zeros(len(batch), np.int32)
    for i, r in enumerate(batch):
      obs = observations[turn, int(r)]
      tokens[i, : len(obs)], count[i] = obs, len(obs)
      timelines[int(r)].extend(obs.tolist())
    state = sampler.extend(params, state, jnp.asarray(tokens), jnp.asarray(count), rows=selected)
    state, reply, goes_on = sampler.decode(
      params, state, keys[jnp.asarray(batch)], np.full(len(batch), max_new), columns=max_new, sampling=sampling,
      rows=selected,
    )  # fmt: skip
    reply = jax.device_get(reply)
    assert not goes_on and not reply.open.any()
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


@pytest.fixture(
  scope='module',
  params=[
    'qwen2',
    pytest.param('qwen3_5', marks=pytest.mark.slow),
    *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ('experts', 'gemma3')),
  ],
)
def model(request):
  if request.param == 'qwen2':
    return random_model(VOCAB)
  if request.param == 'experts':
    return random_model(VOCAB, **EXPERTS)
  if request.param == 'gemma3':
    return random_model(VOCAB, **WINDOWS)
  model = random_model(VOCAB, **HYBRID)
  # Its hidden states have more rounding; values of the size of log-probs have as much as these.
  model.value_head.kernel.set_value(0.1 * model.value_head.kernel[...])
  return model


def _full_attention(cache):
  """The layers with keys and values."""
  return [layer for layer in cache if isinstance(layer, LayerCache)]


def test_logprobs_values_and_entropies_equal_a_full_forward_pass_over_the_timeline(model):
  sampler, params = Sampler(model, stop_ids=(STOP,)), nnx.split(model)[1]
  keys = jax.random.split(jax.random.key(3), 4)
  timelines, records, stopped = _run_turns(sampler, params, keys, np.random.default_rng(0), turns=6, sampling=PLAIN)
  assert stopped.any() and not stopped.all()  # both ways to end a reply occur
  for r, timeline in timelines.items():
    logprobs, values, logp = _full_logprobs(model, np.asarray(timeline))
    for column, lp, value, entropy in records[r]:
      np.testing.assert_allclose(lp, logprobs[column - 1], atol=1e-4)
      np.testing.assert_allclose(value, values[column - 1], atol=1e-4)
      np.testing.assert_allclose(entropy, -np.sum(np.exp(logp[column - 1]) * logp[column - 1]), atol=1e-4)


@pytest.mark.slow_cases('qwen2')
def test_a_reply_does_not_depend_on_the_order_of_rows_nor_on_which_others_are_there(model):
  sampler, params = Sampler(model, stop_ids=(STOP,)), nnx.split(model)[1]
  keys = jax.random.split(jax.random.key(5), 4)
  runs = [
    _run_turns(sampler, params, keys, np.random.default_rng(1), turns=3, sampling=PLAIN, **kwargs)[0]
    for kwargs in ({}, {'order': [2, 0, 3, 1]}, {'drop': [1, 3]})
  ]
  assert runs[0] == runs[1]
  for row in (1, 3):
    assert runs[2][row] == runs[0][row]


def test_greedy_takes_the_likeliest_token(model):
  sampler, params = Sampler(model, stop_ids=(STOP,)), nnx.split(model)[1]
  keys = jax.random.split(jax.random.key(5), 4)
  timelines, records, _ = _run_turns(sampler, params, keys, np.random.default_rng(2), turns=2, sampling=GREEDY)
  for r, timeline in timelines.items():
    _, _, logp = _full_logprobs(model, np.asarray(timeline))
    assert records[r]
    for column, *_ in records[r]:
      assert timeline[column] == int(np.argmax(logp[column - 1]))


def test_temperature_scales_the_logprobs(model):
  sampler, params = Sampler(model, stop_ids=(STOP,)), nnx.split(model)[1]
  keys = jax.random.split(jax.random.key(6), 4)
  sampling = Sampling(0.5, 1.0, 0)
  timelines, records, _ = _run_turns(sampler, params, keys, np.random.default_rng(2), turns=1, sampling=sampling)
  for r, timeline in timelines.items():
    _, _, logp = _full_logprobs(model, np.asarray(timeline))
    for column, lp, *_ in records[r]:
      sharper = np.asarray(jax.nn.log_softmax(2 * logp[column - 1]))
      np.testing.assert_allclose(lp, sharper[timeline[column]], atol=1e-4)


@pytest.mark.slow_cases('qwen2')
@pytest.mark.exhaustive_cases('experts', 'gemma3')
def test_rows_with_numbers_of_their_own_sample_what_batches_with_these_numbers_do(model):
  """One program for all rows; with the likeliest tokens of each distribution."""
  sampler, params = Sampler(model, stop_ids=(STOP,)), nnx.split(model)[1]
  every = (PLAIN, GREEDY, Sampling(0.5, 1.0, 0), Sampling(1.0, 0.8, 6))
  keys, budget = jax.random.split(jax.random.key(8), 4), np.full(4, 12)
  tokens = np.random.default_rng(0).integers(8, VOCAB, size=(4, 5)).astype(np.int32)

  def sample(**options):
    state = sampler.extend(params, sampler.init(4, 32), tokens, np.full(4, 5, np.int32))
    return jax.device_get(sampler.decode(params, state, keys, budget, columns=12, **options)[1])

  by_row = RowSampling(
    temperature=np.asarray([x.temperature for x in every], np.float32),
    top_p=np.asarray([x.top_p for x in every], np.float32),
    top_k=np.asarray([x.top_k for x in every], np.int32),
  )
  mixed, plain = sample(sampling=by_row, alternatives=5), sample(sampling=by_row)
  assert plain.top_tokens is None and mixed.top_tokens.shape == (4, 12, 5)
  for i, sampling in enumerate(every):
    alone, n = sample(sampling=sampling), int(mixed.count[i])
    assert n == alone.count[i] and mixed.open[i] == alone.open[i]
    for name in ('tokens', 'logprobs', 'values', 'entropies'):
      got = [getattr(reply, name)[i, :n] for reply in (mixed, plain)]
      np.testing.assert_array_equal(*got, err_msg=name)
      np.testing.assert_allclose(got[0], getattr(alone, name)[i, :n], atol=1e-5, err_msg=name)
    likeliest = mixed.top_logprobs[i, :n]
    assert (likeliest[:, 1:] <= likeliest[:, :-1]).all()
    found = mixed.top_tokens[i, :n] == mixed.tokens[i, :n, None]
    assert found.any()
    np.testing.assert_allclose(
      likeliest[found], np.broadcast_to(mixed.logprobs[i, :n, None], found.shape)[found], atol=1e-6
    )
  with pytest.raises(ValueError, match=r'^alternatives=5: needs a RowSampling'):
    sample(sampling=PLAIN, alternatives=5)


@pytest.mark.slow_cases('qwen2')
def test_a_copied_row_goes_on_as_the_row_that_it_was_copied_from(model):
  sampler, params = Sampler(model, stop_ids=(STOP,)), nnx.split(model)[1]
  tokens = np.random.default_rng(0).integers(8, VOCAB, size=(3, 6)).astype(np.int32)
  state = sampler.extend(params, sampler.init(3, 32), tokens, np.asarray([6, 4, 2], np.int32))
  state = sampler.copy_rows(state, np.asarray([[0, 2, 32]], np.int32))
  assert np.asarray(state.count).tolist() == [6, 4, 6]
  keys = jax.random.wrap_key_data(np.asarray([[0, 1], [0, 2], [0, 1]], np.uint32))
  state, reply, _ = sampler.decode(params, state, keys, np.full(3, 8), columns=8, sampling=PLAIN)
  n = int(reply.count[0])
  assert n > 1 and reply.tokens[0].tolist() == reply.tokens[2].tolist()
  # Cut to the prompt's first four tokens and fed the others again, the row gives the same reply.
  kept = 4 if model.policy.cfg.linear is None else 0  # a memory cannot be cut, so that the row reads all again
  state = sampler.copy_rows(state, np.asarray([[2, 2, kept]], np.int32))
  state = sampler.extend(params, state, tokens[[0, 0, 0], kept:], np.asarray([0, 0, 6 - kept], np.int32))
  _, again, _ = sampler.decode(params, state, keys, np.asarray([0, 0, 8]), columns=8, sampling=PLAIN)
  assert again.tokens[2].tolist() == reply.tokens[0].tolist()
  np.testing.assert_allclose(again.logprobs[2], reply.logprobs[0], atol=1e-5)


@pytest.mark.usefixtures('new_programs')
@pytest.mark.slow_cases('qwen2')
def test_rows_that_share_a_prompt_go_on_as_if_each_had_read_it(model):
  """Rows 1 and 3 get the prompt of row 0, row 4 that of row 2; row 5 stays at its own, longer one."""
  sampler, params = Sampler(model, stop_ids=(STOP,)), nnx.split(model)[1]
  rng = np.random.default_rng(0)
  tokens = rng.integers(8, VOCAB, size=(6, 12)).astype(np.int32)
  count, source = np.asarray([6, 6, 4, 6, 4, 12], np.int32), np.asarray([0, 0, 2, 0, 2, 5], np.int32)
  old = sampler.extend(params, sampler.init(6, 32), rng.integers(8, VOCAB, size=(6, 8)).astype(np.int32), np.full(6, 8))
  every, own = np.ones(6, bool), np.isin(np.arange(6), source)
  keep = jax.tree.map(lambda x: x.copy(), old)
  expected = sampler.extend(params, old, tokens[source], count, every)
  state = sampler.extend(params, keep, tokens, count * own, every & own)
  state = sampler.share_rows(state, source, 8)
  for name in ('count', 'draw_position', 'rotary'):
    np.testing.assert_array_equal(getattr(state, name), getattr(expected, name), err_msg=name)
  keys, replies = jax.random.split(jax.random.key(1), 6), []
  for x in (state, expected):
    x = sampler.extend(params, x, tokens[:, :3], np.full(6, 3))
    replies.append(sampler.decode(params, x, keys, np.full(6, 8), columns=8, sampling=PLAIN)[1])
  np.testing.assert_array_equal(replies[0].tokens, replies[1].tokens)
  np.testing.assert_allclose(replies[0].logprobs, replies[1].logprobs, atol=1e-5)
  kinds = {type(layer) for layer in state.cache}
  assert sampler.traces['share'] == len(kinds), 'one program for all layers of a kind'


def test_programs_that_write_the_cache_do_not_copy_it(model):
  """Those that also read it do so before; otherwise the compiler copies all rows of it first."""
  sampler, params = Sampler(model, stop_ids=(STOP,)), nnx.split(model)[1]
  rows, size = 16, 64
  state = abstract_rows(sampler, rows, size)
  lowered = lower_sampler(sampler, params, state, width=8, columns=8, sampling=PLAIN, rows=4)
  source = jax.ShapeDtypeStruct((rows,), np.int32)
  layer = _full_attention(state.cache)[0]
  lowered['share'] = sampler.programs['share'].lower(layer=layer, source=source, columns=16)
  whole = ','.join(map(str, layer.k.shape))
  for name, program in lowered.items():
    text = program.compile().as_text()
    assert f'f32[{whole}]' in text, name
    assert not re.search(rf'= f32\[{whole}\]\S* copy\(', text), name


@pytest.mark.slow_cases('qwen2')
def test_padding_of_the_embedding_is_never_drawn(model):
  sampler, params = Sampler(model, stop_ids=(STOP,), vocab_limit=12), nnx.split(model)[1]
  state = sampler.init(64, 32)
  state = sampler.extend(params, state, jnp.full((64, 2), 9, jnp.int32), jnp.full((64,), 2))
  keys = jax.random.split(jax.random.key(0), 64)
  _, reply, _ = sampler.decode(params, state, keys, np.full(64, 20), columns=20, sampling=Sampling(3.0, 1.0, 0))
  assert int(reply.tokens.max()) == 11


@pytest.mark.slow_cases('qwen2')
def test_some_rows_are_fed_while_the_others_are_left_alone(model):
  """Rows 3 and 1 of four get their second observation; the state of the others is the same to the bit."""
  sampler, params = Sampler(model, stop_ids=(STOP,)), nnx.split(model)[1]
  rng = np.random.default_rng(0)
  first, second = rng.integers(8, VOCAB, size=(4, 6)).astype(np.int32), rng.integers(8, VOCAB, size=(2, 5))
  count, more = np.asarray([6, 2, 5, 4], np.int32), np.asarray([3, 5], np.int32)
  state = sampler.extend(params, sampler.init(4, 24), first, count)
  before = jax.device_get(state)
  state = sampler.extend(params, state, second.astype(np.int32), more, rows=np.asarray([3, 1], np.int32))
  after = jax.device_get(state)
  assert after.count.tolist() == [6, 7, 5, 7]
  for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
    np.testing.assert_array_equal(got[[0, 2]], want[[0, 2]])
  keys = jax.random.split(jax.random.key(0), 4)
  _, reply, _ = sampler.decode(params, state, keys, np.full(4, 5), columns=9, sampling=PLAIN)
  for row, own in ((3, second[0, :3]), (1, second[1])):
    n = int(reply.count[row])
    timeline = np.concatenate([first[row, : count[row]], own, np.asarray(reply.tokens[row, :n])])
    logprobs, _, _ = _full_logprobs(model, timeline)
    np.testing.assert_allclose(reply.logprobs[row, :n], logprobs[-n:], atol=1e-4)


def test_some_rows_sample_while_the_others_are_left_alone(model):
  """Rows 3 and 0 of four sample what they do among all."""
  sampler, params = Sampler(model, stop_ids=(STOP,)), nnx.split(model)[1]
  first = np.random.default_rng(0).integers(8, VOCAB, size=(4, 6)).astype(np.int32)
  state = sampler.extend(params, sampler.init(4, 24), first, np.asarray([6, 2, 5, 4], np.int32))
  before, keys, rows = jax.device_get(state), jax.random.split(jax.random.key(0), 4), np.asarray([3, 0], np.int32)
  state, part, _ = sampler.decode(params, state, keys[rows], np.full(2, 5), columns=9, sampling=PLAIN, rows=rows)
  after = jax.device_get(state)
  assert after.count.tolist() == [6 + part.count[1], 2, 5, 4 + part.count[0]]
  for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
    np.testing.assert_array_equal(got[[1, 2]], want[[1, 2]])
  again = sampler.extend(params, sampler.init(4, 24), first, np.asarray([6, 2, 5, 4], np.int32))
  whole, reply, _ = sampler.decode(params, again, keys, np.full(4, 5), columns=9, sampling=PLAIN)
  np.testing.assert_array_equal(part.tokens, reply.tokens[rows])
  np.testing.assert_allclose(part.logprobs, reply.logprobs[rows], atol=1e-5)
  np.testing.assert_allclose(after.hidden[rows], whole.hidden[rows], atol=1e-5)
  for got, want in zip(jax.tree.leaves(after.cache), jax.tree.leaves(whole.cache), strict=True):
    for row in rows.tolist():
      columns = slice(after.count[row] if got.shape[1] == 24 else None)
      np.testing.assert_allclose(got[row, columns], want[row, columns], atol=1e-5)


def test_a_call_ends_with_enough_complete_replies_and_the_next_goes_on(model):
  """Budgets of 2, 3, 9 and 9 tokens, of which some end with a stop token before."""
  sampler, params = Sampler(model, stop_ids=(STOP,)), nnx.split(model)[1]
  first = np.random.default_rng(1).integers(8, VOCAB, size=(4, 6)).astype(np.int32)
  keys, budget = jax.random.split(jax.random.key(2), 4), np.asarray([2, 3, 9, 9])
  options = dict(columns=9, sampling=PLAIN)

  def fed():
    return sampler.extend(params, sampler.init(4, 24), first, np.full(4, 6, np.int32))

  _, whole, goes_on = sampler.decode(params, fed(), keys, budget, **options)
  complete = np.sort(np.asarray(whole.count))
  assert not goes_on and complete[1] < complete[3]
  for enough in (1, 2, 3):
    state, begun, goes_on = sampler.decode(params, fed(), keys, budget, **options, enough=enough)
    assert int(begun.count.max()) == complete[enough - 1]
    assert bool(goes_on) == bool(begun.open.any()) == bool(complete[enough - 1] < complete[3])
    left = np.where(begun.open, budget - begun.count, 0)
    _, rest, _ = sampler.decode(params, state, keys, left, **options)
    for row in range(4):
      parts = [np.asarray(x.tokens)[row, : x.count[row]] for x in (begun, rest)]
      np.testing.assert_array_equal(np.concatenate(parts), whole.tokens[row, : whole.count[row]])


def test_the_cache_is_resized(model):
  sampler, params = Sampler(model, stop_ids=(STOP,)), nnx.split(model)[1]
  state = sampler.init(3, 16)
  state = sampler.extend(params, state, np.arange(8, 20, dtype=np.int32).reshape(3, 4), np.asarray([4, 2, 0]))
  before = jax.device_get(state)
  after = jax.device_get(sampler.resize(state, 24))
  for new, old in zip(*(_full_attention(x.cache) for x in (after, before)), strict=True):
    assert new.k.shape[1] == 24
    np.testing.assert_array_equal(new.k[:, :16], old.k)
    np.testing.assert_array_equal(new.v[:, :16], old.v)
  assert after.count.tolist() == [4, 2, 0]


def test_weights_for_decoding_are_cast_once_and_nothing_else_changes(model):
  """Matrices of the policy take the type of computations; norms and the value head keep theirs."""
  cfg = model.policy.cfg
  low = ActorCritic(Qwen(cfg, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
  sampler, params = Sampler(low, stop_ids=(STOP,)), nnx.split(low)[1]
  cast = sampler.decode_weights(params)
  types = {'/'.join(map(str, path)): x.get_value().dtype for path, x in nnx.to_flat_state(cast)}
  assert {t for path, t in types.items() if path.endswith(('kernel', 'embed_tokens')) and 'value' not in path} == {
    jnp.dtype(jnp.bfloat16)
  }
  assert {t for path, t in types.items() if path.endswith('weight') or 'value' in path} == {jnp.dtype(jnp.float32)}
  tokens, count = np.full((2, 4), 9, np.int32), np.asarray([4, 3], np.int32)
  states = [sampler.extend(w, sampler.init(2, 16), tokens, count) for w in (params, cast)]
  np.testing.assert_array_equal(*(np.asarray(x.hidden, np.float32) for x in states))
  full = Sampler(model, stop_ids=(STOP,))
  weights = nnx.split(model)[1]
  assert full.decode_weights(weights) is weights, 'nothing to change, nothing copied'


@pytest.mark.usefixtures('new_programs')
@pytest.mark.slow_cases('qwen2')
@pytest.mark.exhaustive_cases('experts', 'gemma3')
def test_each_program_is_traced_once_per_shape(model):
  sampler, params = Sampler(model, stop_ids=(STOP,)), nnx.split(model)[1]
  keys = jax.random.split(jax.random.key(5), 4)
  run = functools.partial(_run_turns, sampler, params, keys, turns=3)
  run(np.random.default_rng(1), sampling=PLAIN)
  # The cache has 32 columns in the first turn and 96 in the others, so every program has two shapes.
  assert sampler.traces == {'resize': 1, 'copy': 0, 'share': 0, 'extend': 2, 'decode': 2}
  run(np.random.default_rng(2), sampling=Sampling(0.5, 1.0, 0))  # all temperatures share a program
  assert sampler.traces == {'resize': 1, 'copy': 0, 'share': 0, 'extend': 2, 'decode': 2}
  run(np.random.default_rng(3), sampling=GREEDY)
  assert sampler.traces == {'resize': 1, 'copy': 0, 'share': 0, 'extend': 2, 'decode': 2}
  run(np.random.default_rng(3), sampling=Sampling(0.5, 0.9, 0))
  assert sampler.traces == {'resize': 1, 'copy': 0, 'share': 0, 'extend': 2, 'decode': 4}


@pytest.mark.slow_cases('qwen2')
@pytest.mark.exhaustive_cases('gemma3', 'qwen3_5')
def test_rows_of_zeros_beside_the_few_rows_of_a_device_change_nothing(model, monkeypatch):
  """TPUs compute products of few rows with rows of zeros added; the tokens and what is recorded stay as they are."""
  found = []
  for least in (1, 8):
    monkeypatch.setattr('ragen_jax.sampling.sampler._LEAST_ROWS', {'cpu': least})
    sampler, params = Sampler(model, stop_ids=(STOP,)), nnx.split(model)[1]
    keys = jax.random.split(jax.random.key(5), 4)
    found.append(_run_turns(sampler, params, keys, np.random.default_rng(1), turns=2, sampling=PLAIN, drop=[1, 3]))
    state = jax.eval_shape(lambda s=sampler: s.init(2, 32))
    products = str(
      jax.make_jaxpr(lambda p, s, w=sampler: w.programs['decode'](
        params=p, state=s, key_data=jnp.zeros((2, 2), jnp.uint32), budget=jnp.ones(2, jnp.int32), temperature=1.0,
        enough=1, rows=None, columns=2, sampling=PLAIN,
      ))(params, state)
    )  # fmt: skip
    width = model.policy.cfg.intermediate_size
    assert f'f32[{max(least, 2)},{2 * width}] = dot_general' in products  # of gate and up
  (timelines, records, _), (padded, padded_records, _) = found
  assert timelines == padded
  for row, expected in records.items():
    np.testing.assert_allclose(padded_records[row], expected, atol=1e-5)
