"""The engine: the same replies whatever is sampled beside them, and an end for every call."""

from __future__ import annotations

import collections
import concurrent.futures
import json
import random

import jax
import numpy as np
import pytest
from flax import nnx

from ragen_jax import build
from ragen_jax.agent.sampler_speaker import SamplerSpeaker
from ragen_jax.sampling.draw import PLAIN
from ragen_jax.serving.engine.engine import Engine
from ragen_jax.serving.engine.settings import EngineSettings
from ragen_jax.serving.errors import EngineStopped, QueueFull
from ragen_jax.serving.types import Finish
from tests.support.configs import small_config
from tests.support.models import WIDE_HYBRID
from tests.support.processes import copy_python
from tests.support.serving import (
  PATIENCE,
  STOP,
  VOCAB,
  Gate,
  Listener,
  ask,
  expected_logprobs,
  forward,
  prompts,
  request,
  small_sampler,
  start,
  submit,
  until,
  weights,
)


@pytest.fixture(scope='module')
def sampler_and_params():
  return small_sampler()


@pytest.fixture(scope='module')
def shared(sampler_and_params):
  """An engine for tests that leave it as they found it, but for its warm slots."""
  with start(*sampler_and_params) as engine:
    yield engine


@pytest.fixture(scope='module')
def endless():
  """A sampler whose replies end by their lengths only, and its weights."""
  return small_sampler(stop=VOCAB)


@pytest.fixture
def gated(endless):
  """An engine of two slots that samples a chunk when the test says so, and its gate."""
  gate = Gate(endless[0])
  with start(gate, endless[1], slots=2) as engine:
    yield engine, gate
    gate.open()


@pytest.fixture(scope='module')
def background():
  """Runs calls that wait."""
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    yield pool


def mixed_requests():
  """Requests that differ in all that they can differ in; some share beginnings."""
  rng, found = random.Random(0), []
  bases = prompts(4, 40, seed=1)
  for i in range(32):
    params = {
      'temperature': rng.choice([0.0, 0.7, 1.0, 1.0, 2.0]),
      'top_p': rng.choice([1.0, 1.0, 0.8]),
      'top_k': rng.choice([0, 0, 6]),
      'max_tokens': rng.randrange(1, 30),
      'top_logprobs': rng.choice([0, 0, 3]),
      'stop': rng.choice([(), (), (), ('q', 'ja'), ('k', 'mz')]),
    }
    found.append(request(rng.choice(bases)[: rng.randrange(1, 40)], seed=i, **params))
  return found


def same(a, b):
  assert (a.ids, a.text, a.finish, a.stop_text) == (b.ids, b.text, b.finish, b.stop_text)
  for name in ('logprobs', 'values', 'entropies'):
    np.testing.assert_allclose(getattr(a, name), getattr(b, name), atol=1e-4, err_msg=name)
  assert [[i for i, _ in t] for t in a.top] == [[i for i, _ in t] for t in b.top]


@pytest.mark.slow
def test_a_reply_does_not_depend_on_what_is_sampled_beside_it_nor_on_what_was_before(sampler_and_params):
  """One at a time, all at once, in another order, on warm slots, and with chunks and widths of other sizes."""
  requests = mixed_requests()
  with start(*sampler_and_params) as engine:
    alone = [ask(engine, r)[0] for r in requests]
    together = ask(engine, *requests)
    warm = ask(engine, *requests)
    assert sum(r.cached_tokens for r in warm) > sum(len(r.prompt) for r in requests) / 4
  with start(*sampler_and_params, slots=3, chunk=7, widths=(5, 23)) as engine:
    order = random.Random(1).sample(range(len(requests)), len(requests))
    shuffled = dict(zip(order, ask(engine, *(requests[i] for i in order)), strict=True))
  for i, reply in enumerate(alone):
    same(together[i], reply)
    same(warm[i], reply)
    same(shuffled[i], reply)
  assert {r.finish for r in alone} == {Finish.STOP, Finish.LENGTH}
  assert any(r.stop_text for r in alone) and any(r.ids[-1] == STOP for r in alone)


@pytest.mark.slow
def test_replies_of_a_model_with_memories_are_those_of_forward_passes_whatever_the_rows_held():
  """Equal prompts, other endings of a prompt, conversations that go on in their row, stop strings in a chunk."""
  sampler, params = small_sampler(**WIDE_HYBRID)
  first = [
    request(base[:n], seed=i, stop=stop)
    for i, (base, n, stop) in enumerate(
      (base, n, stop) for base in prompts(2, 20) for n, stop in ((20, ()), (20, ('q', 'm', 'a')), (11, ()))
    )
  ]
  with start(sampler, params, slots=3) as engine:
    for asked in (first, first[::-1]):
      replies = ask(engine, *asked)
      following = [
        request((*r.prompt, *x.ids, 9, 11), seed=i) for i, (r, x) in enumerate(zip(asked, replies, strict=True))
      ]
      for r, x in zip([*asked, *following], [*replies, *ask(engine, *following)], strict=True):
        expected = expected_logprobs(sampler, params, r.prompt, x.ids)
        np.testing.assert_allclose(x.logprobs, expected, atol=1e-4)
    alone = request(prompts(1, 20, seed=1)[0], seed=9)
    (reply,) = ask(engine, alone)
    following = request((*alone.prompt, *reply.ids, 9), seed=3)
    (more,) = ask(engine, following)
    assert more.cached_tokens == len(following.prompt) - 1
    np.testing.assert_allclose(more.logprobs, expected_logprobs(sampler, params, following.prompt, more.ids), atol=1e-4)


@pytest.mark.slow
def test_mixed_traffic_traces_nothing_new(sampler_and_params):
  sampler, params = small_sampler()
  with start(sampler, params) as engine:
    engine.compile()
    compiled, traces = [], dict(sampler.traces)
    jax.monitoring.register_event_duration_secs_listener(
      lambda name, *_, **__: compiled.append(name) if name.endswith('backend_compile_duration') else None
    )
    ask(engine, *mixed_requests())
    engine.set_weights(weights(3), version=1, keep_cache=False)
    ask(engine, *mixed_requests())
    assert sampler.traces == traces
    assert compiled == []
    stats = engine.stats()
  assert stats.copies > 0 and stats.cached_tokens > 0
  # One more shape is noticed.
  sampler.copy_rows(sampler.init(3, 8), np.zeros((1, 3), np.int32))
  assert sampler.traces != traces and compiled


def test_logprobs_values_and_entropies_are_those_of_a_forward_pass(shared, sampler_and_params):
  requests = [
    request(p, seed=i, temperature=t)
    for i, (p, t) in enumerate(zip(prompts(6, 20, seed=2), [1.0, 1.0, 0.5, 0.5, 2.0, 2.0], strict=True))
  ]
  for asked, reply in zip(requests, ask(shared, *requests), strict=True):
    logits, values = forward(*sampler_and_params, (*asked.prompt, *reply.ids))
    logp = np.asarray(jax.nn.log_softmax(logits[19:-1] / asked.params.temperature))
    np.testing.assert_allclose(reply.logprobs, logp[np.arange(len(reply.ids)), list(reply.ids)], atol=1e-4)
    np.testing.assert_allclose(reply.values, values[19:-1], atol=1e-4)
    np.testing.assert_allclose(reply.entropies, -np.sum(np.exp(logp) * logp, axis=1), atol=1e-4)


def test_temperature_zero_takes_the_likeliest_token_of_a_forward_pass(shared, sampler_and_params):
  requests = [request(p, seed=i, temperature=0.0) for i, p in enumerate(prompts(4, 20, seed=3))]
  for asked, reply in zip(requests, ask(shared, *requests), strict=True):
    logits, _ = forward(*sampler_and_params, (*asked.prompt, *reply.ids))
    assert list(reply.ids) == np.argmax(logits[19:-1], axis=1).tolist()
    # Undivided, as for all that the sampler records.
    expected = expected_logprobs(*sampler_and_params, asked.prompt, reply.ids)
    np.testing.assert_allclose(reply.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize('room', [1, 5])
def test_a_reply_ends_where_the_context_ends(endless, room):
  with start(*endless) as engine:
    (prompt,) = prompts(1, engine.settings.max_context - room)
    (reply,) = ask(engine, request(prompt, max_tokens=50))
  assert (len(reply.ids), reply.finish) == (room, Finish.LENGTH)


def test_the_likeliest_tokens_are_reported_to_those_who_ask(shared, sampler_and_params):
  first, second = prompts(2, 20, seed=4)
  asked, plain = ask(shared, request(first, seed=1, top_logprobs=5), request(second, seed=1))
  assert plain.top == () and len(asked.top) == len(asked.ids)
  logits, _ = forward(*sampler_and_params, (*first, *asked.ids))
  logp = np.asarray(jax.nn.log_softmax(logits[19:-1]))
  for row, top in zip(logp, asked.top, strict=True):
    assert [i for i, _ in top] == np.argsort(-row)[:5].tolist()
    np.testing.assert_allclose([x for _, x in top], np.sort(row)[::-1][:5], atol=1e-4)


def test_top_k_and_top_p_limit_what_is_drawn(shared):
  (prompt,) = prompts(1, 20, seed=5)
  requests = [request(prompt, seed=s, temperature=3.0, top_k=2, top_logprobs=20) for s in range(3)]
  for reply in ask(shared, *requests):
    assert all(len(top) == 2 and token in dict(top) for token, top in zip(reply.ids, reply.top, strict=True))
    np.testing.assert_allclose([sum(np.exp(x) for _, x in top) for top in reply.top], 1, atol=1e-5)


def test_text_in_pieces_is_the_text_of_the_ids(shared):
  """Ids are bytes here, and replies of a random model cut characters; `Listener.reply` compares the pieces."""
  requests = [request(p, seed=i, temperature=3.0, max_tokens=40) for i, p in enumerate(prompts(8, 4, seed=6))]
  replies = ask(shared, *requests)
  assert any('\ufffd' in r.text for r in replies)
  for reply in replies:
    ids = [i for i in reply.ids if i != STOP]
    assert reply.text == shared._decode_text(ids)


@pytest.mark.slow
def test_a_rollout_over_the_engine_has_the_ids_of_the_built_in_rollout():
  """All turns of all episodes of FrozenLake, played by a speaker before, with the same keys."""
  config = small_config(agent__max_response_tokens=24, length_step=128, train__temperature=1.0)
  policy = build.load_policy(config)
  specs = build.env_specs(config, ('FrozenLake',), (4,))
  proxy = build.agent_proxy(config, policy.tokenizer, policy.sampler, specs, 4)
  params, key = nnx.split(policy.model)[1], jax.random.key(3)
  t = proxy.rollout(SamplerSpeaker(policy.sampler, params, key, PLAIN), 10_000).trajectory
  keys = jax.random.key_data(jax.random.split(key, len(t.tokens))).tolist()
  replies = []  # (turn, row, prompt, ids, log-probabilities)
  for row, mask in enumerate(t.loss_mask):
    for turn in np.unique(t.turn[row][mask]).tolist():
      own = np.flatnonzero(mask & (t.turn[row] == turn))
      replies.append((turn, row, t.tokens[row, : own[0]], t.tokens[row, own].tolist(), t.logprobs[row, own]))
  longest = int(t.length.max())
  size = EngineSettings(slots=16, max_context=longest + 24, chunk=8, widths=(16, 64), max_queue=64)
  turns = sorted({turn for turn, *_ in replies})
  assert len(turns) == 3
  with Engine(policy.sampler, policy.tokenizer, size, params=params, version=0) as engine:
    for turn in turns:
      before = engine.stats()
      those = [r for r in replies if r[0] == turn]
      requests = [request(prompt, max_tokens=24) for _, _, prompt, *_ in those]
      requests = [
        type(r)(r.prompt, tuple(keys[row]), r.params) for r, (_, row, *_) in zip(requests, those, strict=True)
      ]
      for reply, (*_, ids, logprobs) in zip(ask(engine, *requests), those, strict=True):
        assert list(reply.ids) == ids
        np.testing.assert_allclose(reply.logprobs, logprobs, atol=1e-4)
        assert reply.text == policy.tokenizer.decode([i for i in ids if i not in policy.tokenizer.stop_ids])
      fed = engine.stats().fed_tokens - before.fed_tokens
      if turn == 0:  # each group of four has one prompt, and all prompts begin alike
        groups = {tuple(prompt.tolist()) for _, _, prompt, *_ in those}
        assert len(groups) == 4 and max(map(len, groups)) <= fed < sum(map(len, groups))
      else:  # every row is continued; what rows of a group have in common may be fed once
        news = [len(p) - len(q) - len(ids) for _, row, p, *_ in those for u, s, q, ids, _ in replies
                if (u, s) == (turn - 1, row)]  # fmt: skip
        kept = [len(p) - n for (_, _, p, *_), n in zip(those, news, strict=True)]
        distinct = {tuple(r[2][:n]) for r, k in zip(those, kept, strict=True) for n in range(k + 1, len(r[2]) + 1)}
        assert len(distinct) <= fed <= sum(news)


# -- calls that end in other ways --------------------------------------------------------------------------------------


def long_request(prompt):
  """A request whose reply, with the sampler `endless`, has 15 chunks."""
  return request(prompt, max_tokens=60)


@pytest.mark.slow
def test_a_call_that_is_cancelled_ends_as_aborted_and_frees_its_slot(gated):
  engine, gate = gated
  first, second = (submit(engine, long_request(p)) for p in prompts(2, 20, seed=7))
  third = submit(engine, request(prompts(1, 8, seed=8)[0]))
  gate.wait()
  gate.allow(1)
  gate.wait()  # the first chunk was delivered
  first.wait_for_piece()
  assert engine.stats().used == 2 and engine.stats().alive
  first.ticket.cancel()
  gate.open()
  reply = first.reply()
  assert reply.finish is Finish.ABORTED and len(reply.ids) == 8  # of the second chunk, too
  assert third.reply().finish is not Finish.ABORTED
  second.reply()
  first.ticket.cancel()  # nothing to cancel
  assert engine.stats().aborted == 1


def test_a_call_that_is_cancelled_in_the_queue_ends_at_once(shared):
  shared.pause(drain=False)
  listener = submit(shared, request(prompts(1, 8)[0]))
  listener.ticket.cancel()
  reply = listener.reply()
  assert reply.finish is Finish.ABORTED and reply.ids == () and reply.text == ''
  assert shared.stats().queued == 0
  shared.resume()


def test_callers_in_many_threads_get_their_own_replies(shared, sampler_and_params):
  """Some cancel their calls; meanwhile the engine is paused and gets weights, the same as before."""
  requests = mixed_requests()[:16]
  expected = [reply.ids for reply in ask(shared, *requests)]
  aborted = []

  def caller(seed):
    rng = random.Random(seed)
    for _ in range(12):
      i = rng.randrange(16)
      listener = submit(shared, requests[i])
      if rng.random() < 0.3:
        listener.ticket.cancel()
      reply = listener.reply()
      if reply.finish is Finish.ABORTED:
        aborted.append(reply)
        assert reply.ids == expected[i][: len(reply.ids)]
      else:
        assert reply.ids == expected[i]

  with concurrent.futures.ThreadPoolExecutor(6) as pool:
    callers = [pool.submit(caller, seed) for seed in range(6)]
    for i in range(8):
      shared.pause(drain=i % 2 == 0)
      shared.set_weights(sampler_and_params[1], version=0, keep_cache=i % 3 > 0)
      shared.resume()
    for done in callers:
      done.result(PATIENCE)
  assert aborted and shared.stats().used == shared.stats().queued == 0


def test_calls_that_run_and_calls_that_wait_are_limited_together(endless):
  gate, texts = Gate(endless[0]), prompts(5, 8)
  with start(gate, endless[1], slots=2, max_queue=2) as engine:
    listeners = [submit(engine, request(texts[0]))]
    gate.wait()  # it has a slot
    listeners += [submit(engine, request(p)) for p in texts[1:4]]
    with pytest.raises(QueueFull, match=r'^max_queue=2: .* wait'):
      submit(engine, request(texts[4]))
    listeners[0].ticket.cancel()
    gate.open()
    listeners[0].reply()
    listeners[0] = submit(engine, request(texts[4]))
    for listener in listeners:
      assert listener.reply().ids


def test_a_request_that_does_not_fit_is_refused_at_once(shared):
  with pytest.raises(ValueError, match=r'^prompt: .*96 tokens; at most 95'):
    submit(shared, request(prompts(1, 96)[0]))
  with pytest.raises(ValueError, match=rf'^prompt: has the id {VOCAB}; '):
    submit(shared, request((VOCAB,)))


class Broken:
  """A sampler whose program fails once it has worked twice."""

  def __init__(self, sampler):
    self._sampler, self._left = sampler, 2

  def __getattr__(self, name):
    return getattr(self._sampler, name)

  def decode(self, *arguments, **options):
    if not self._left:
      raise FloatingPointError('the device is on fire')
    self._left -= 1
    return self._sampler.decode(*arguments, **options)


def test_an_exception_on_the_thread_reaches_every_call(endless, caplog):
  engine = start(Broken(endless[0]), endless[1], slots=2)
  engine.pause(drain=False)
  listeners = [submit(engine, long_request(p)) for p in prompts(5, 20, seed=9)]  # two run, three wait
  engine.resume()
  for listener in listeners:
    assert isinstance(listener.outcome(), FloatingPointError)
  message = r'^the engine has stopped: FloatingPointError: the device is on fire$'
  with pytest.raises(EngineStopped, match=message):
    submit(engine, request((9,)))
  for method in (
    lambda: engine.pause(drain=True),
    engine.compile,
    lambda: engine.set_weights(endless[1], version=1, keep_cache=True),
  ):
    with pytest.raises(EngineStopped, match=message):
      method()
  engine.resume()
  engine.close()
  assert 'the engine has stopped' in caplog.text


def test_calls_that_are_open_when_the_engine_closes_end_as_aborted(endless, background):
  gate = Gate(endless[0])
  engine = start(gate, endless[1], slots=2)
  listeners = [submit(engine, long_request(p)) for p in prompts(4, 20, seed=10)]
  gate.wait()
  closed = background.submit(engine.close)
  until(lambda: engine._closing)
  gate.open()
  closed.result(PATIENCE)
  assert collections.Counter(listener.reply().finish for listener in listeners) == {Finish.ABORTED: 4}
  engine.close()
  assert not engine.stats().alive
  with pytest.raises(EngineStopped, match='closed'):
    submit(engine, request((9,)))
  with pytest.raises(EngineStopped, match='closed'):
    engine.pause(drain=False)


def test_a_listener_that_raises_ends_its_own_call_only(shared, caplog):
  other = Listener()

  def broken(_):
    raise RuntimeError('the loop is closed')

  (prompt, following) = prompts(2, 20, seed=11)
  shared.submit(long_request(prompt), broken, other.on_done)
  reply = submit(shared, request(following)).reply()
  assert reply.ids and reply.finish is not Finish.ABORTED
  assert other.outcome().finish is Finish.ABORTED
  assert 'the loop is closed' in caplog.text


def test_a_listener_may_submit_and_cancel_but_not_wait_for_the_engine(shared):
  second, errors = Listener(), []

  def on_done(_):
    for method in (lambda: shared.pause(drain=False), shared.close, shared.compile):
      try:
        method()
      except RuntimeError as e:
        errors.append(str(e))
    submitted = shared.submit(request(prompts(1, 8, seed=12)[0]), second.on_piece, second.on_done)
    submitted.cancel()

  shared.submit(request(prompts(1, 8)[0]), lambda _: None, on_done)
  assert second.outcome().finish is Finish.ABORTED
  assert errors == [f'{m}: called by a listener, which the engine waits for' for m in ('pause', 'close', 'compile')]


# -- pauses and weights ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pause_holds_running_and_waiting_calls_and_changes_no_reply(gated, background, endless):
  engine, gate = gated
  asked = [long_request(p) for p in prompts(3, 20, seed=13)]
  listeners = [submit(engine, r) for r in asked]
  gate.wait()
  pausing = background.submit(engine.pause, drain=False)
  until(lambda: engine.stats().paused)
  gate.allow(1)
  pausing.result(PATIENCE)
  held = engine.stats()
  assert held.used >= 1 and not any(listener.outcomes for listener in listeners)
  late = submit(engine, request(prompts(1, 8)[0]))
  gate.open()  # the device would be free
  engine.set_weights(endless[1], version=0, keep_cache=True)  # the thread does this, and samples nothing
  assert engine.stats().chunks == held.chunks
  engine.resume()
  replies = [listener.reply() for listener in listeners]
  assert late.reply().ids
  for r, reply in zip(asked, replies, strict=True):
    same(reply, ask(engine, r)[0])


def test_a_pause_may_let_replies_end_first(gated, background):
  engine, gate = gated
  engine.pause(drain=False)
  running = [submit(engine, long_request(p)) for p in prompts(2, 20, seed=14)]
  engine.resume()
  gate.wait()
  pausing = background.submit(engine.pause, drain=True)
  until(lambda: engine.stats().paused)
  late = submit(engine, request(prompts(1, 8)[0]))
  gate.open()
  pausing.result(PATIENCE)
  assert [len(listener.reply().ids) for listener in running] == [60, 60]
  assert engine.stats().used == 0 and engine.stats().queued == 1 and not late.outcomes
  engine.resume()
  assert late.reply().ids


def test_a_resume_ends_a_pause_that_waits(gated, background):
  engine, gate = gated
  listener = submit(engine, long_request(prompts(1, 20)[0]))
  gate.wait()
  pausing = background.submit(engine.pause, drain=True)
  until(lambda: engine.stats().paused)
  engine.resume()
  pausing.result(PATIENCE)
  gate.open()
  assert len(listener.reply().ids) == 60


def test_weights_are_swapped_in_mid_reply_and_each_token_has_its_version(gated, background, endless):
  engine, gate = gated
  (prompt,) = prompts(1, 20, seed=15)
  listener, other = submit(engine, long_request(prompt)), weights(9)
  gate.wait()
  swapping = background.submit(engine.set_weights, other, version=7, keep_cache=False)
  until(lambda: engine._jobs)
  gate.open()
  swapping.result(PATIENCE)
  reply = listener.reply()
  assert reply.versions.tolist() == [0] * 4 + [7] * 56
  for part, params in ((slice(0, 4), endless[1]), (slice(4, None), other)):
    expected = expected_logprobs(endless[0], params, prompt, reply.ids)
    np.testing.assert_allclose(reply.logprobs[part], expected[part], atol=1e-4)
  assert engine.stats().version == 7


def test_weights_that_do_not_fit_are_refused_and_the_engine_goes_on(shared):
  with pytest.raises(ValueError, match=r'^params: has no weight '):
    shared.set_weights({}, version=1, keep_cache=True)
  assert ask(shared, request(prompts(1, 8)[0]))[0].ids


# -- several devices ---------------------------------------------------------------------------------------------------

_ON_TWO_DEVICES = """
import json
import jax
import numpy as np
from flax import nnx
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.sharding import place, row_sharding, tree_shardings
from ragen_jax.sampling.sampler import Sampler
from tests.serving.engine.test_engine import mixed_requests
from tests.support.models import random_model
from tests.support.serving import STOP, VOCAB, ask, start

mesh, model = make_mesh(2, 1, 1), random_model(VOCAB)
model.policy.activation_sharding = row_sharding(mesh)
params = nnx.split(model)[1]
params = place(params, tree_shardings(params, mesh))
sampler = Sampler(model, stop_ids=(STOP,), mesh=mesh)
with start(sampler, params, widths=(16,)) as engine:
  engine.compile()
  traces = dict(sampler.traces)
  replies = ask(engine, *mixed_requests()[:16])
  stats = engine.stats()
  engine.set_weights(jax.tree.map(lambda x: x * np.nan, params), version=1, keep_cache=False)
  spoilt = ask(engine, *mixed_requests()[:16])
  assert all(np.isnan(r.logprobs).all() for r in spoilt)
  engine.set_weights(params, version=2, keep_cache=False)
  again = ask(engine, *mixed_requests()[:16])
  assert [r.ids for r in again] == [r.ids for r in replies]
print(json.dumps([sampler.traces == traces, stats.copies, [r.ids for r in replies]]))
"""


@pytest.mark.slow
def test_rows_over_two_devices_have_the_same_replies(shared):
  found = copy_python(_ON_TWO_DEVICES, devices=2)
  assert found.returncode == 0, found.stderr[-3000:]
  nothing_new, copies, ids = json.loads(found.stdout.splitlines()[-1])
  assert nothing_new and copies > 0
  assert [tuple(i) for i in ids] == [r.ids for r in ask(shared, *mixed_requests()[:16])]
