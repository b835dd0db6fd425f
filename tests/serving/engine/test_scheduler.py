"""The steps of the scheduler, one by one and without a thread."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ragen_jax.serving.engine.calls import Call
from ragen_jax.serving.engine.scheduler import Scheduler
from ragen_jax.serving.types import Finish
from tests.support.serving import (
  VOCAB,
  ByteTokenizer,
  Listener,
  expected_logprobs,
  prompts,
  request,
  settings,
  small_sampler,
  weights,
)


@pytest.fixture(scope='module')
def sampler_and_params():
  """Replies end by their lengths and stop strings only."""
  return small_sampler(stop=VOCAB)


@pytest.fixture
def scheduler(sampler_and_params):
  return Scheduler(sampler_and_params[0], settings(), sampler_and_params[1], 0)


def call(prompt, seed=0, **params):
  """A call that its listener hangs on."""
  listener, asked = Listener(), request(prompt, seed, **params)
  budget = min(asked.params.max_tokens, 96 - len(prompt))
  made = Call(asked, budget, ByteTokenizer().decode, listener.on_piece, listener.on_done)
  made.listener = listener
  return made


def step(scheduler, *waiting):
  """The calls that got a slot."""
  admitted = []
  scheduler.prepare(waiting, admitted.append)
  scheduler.sample()
  return admitted


def play(scheduler, *calls):
  """Steps until no call is left."""
  waiting = list(calls)
  while waiting or scheduler.calls:
    admitted = step(scheduler, *waiting)
    waiting = [c for c in waiting if c not in admitted]
  return [c.listener.reply() for c in calls]


def test_a_long_prompt_is_fed_in_pieces_while_others_are_sampled(scheduler):
  short, long = call(prompts(1, 4)[0], max_tokens=90, temperature=3.0), call(prompts(1, 60, seed=1)[0])
  step(scheduler, short)
  assert step(scheduler, long) == [long]
  lengths = []
  while not long.ids:
    lengths.append(len(short.ids))
    step(scheduler)
  # 60 ids are three pieces of 16 columns and one of 12, with four tokens of the other reply after each but the last.
  assert lengths == [8, 12, 16]
  assert scheduler.counts['fed_tokens'] == 64
  play(scheduler)
  assert long.listener.reply().finish and short.listener.reply().ids


def test_equal_prompts_are_fed_once_and_copied(scheduler):
  prompt = prompts(1, 14, seed=2)[0]
  calls = [call(prompt, seed) for seed in range(4)]
  replies = play(scheduler, *calls)
  assert scheduler.counts['fed_tokens'] == 14 and scheduler.counts['copies'] == 3
  assert sorted(r.cached_tokens for r in replies) == [0, 14, 14, 14]
  assert len({r.ids for r in replies}) > 1


def test_a_conversation_feeds_only_what_is_new(scheduler, sampler_and_params):
  row, fed = list(prompts(1, 10, seed=3)[0]), 0
  for turn in range(3):
    c = call(row, seed=4)
    (reply,) = play(scheduler, c)
    fed += 10 if turn == 0 else 5
    assert reply.cached_tokens == len(row) - (10 if turn == 0 else 5)
    assert scheduler.counts['fed_tokens'] == fed
    np.testing.assert_allclose(reply.logprobs, expected_logprobs(*sampler_and_params, row, reply.ids), atol=1e-4)
    row += [*reply.ids, *prompts(1, 5, seed=turn)[0]]
  assert scheduler.counts['copies'] == 0


def test_a_reply_ends_where_the_context_ends(scheduler):
  (reply,) = play(scheduler, call(prompts(1, 93, seed=5)[0], max_tokens=50, temperature=3.0))
  assert len(reply.ids) == 3 and reply.finish is Finish.LENGTH
  (reply,) = play(scheduler, call(prompts(1, 95, seed=6)[0], max_tokens=50))
  assert len(reply.ids) == 1


def test_a_call_that_is_cancelled_while_its_last_token_is_sampled_is_aborted(scheduler):
  c = call(prompts(1, 4, seed=8)[0], max_tokens=3)
  scheduler.prepare([c], lambda _: None)
  c.cancelled = True
  scheduler.sample()
  assert len(c.ids) == 3 and c.listener.reply().finish is Finish.ABORTED
  assert scheduler.counts['aborted'] == 1 and scheduler.counts['finished'] == 0


def test_a_cancelled_call_frees_its_slot_also_while_its_prompt_is_fed(scheduler):
  calls = [call(p, max_tokens=90) for p in prompts(4, 60, seed=7)]
  step(scheduler, *calls)
  assert len(scheduler.calls) == 4
  following = call(prompts(1, 60, seed=7)[0], seed=1)
  assert step(scheduler, following) == []
  calls[0].cancelled = True
  scheduler.drop_cancelled()
  assert calls[0].listener.reply().finish is Finish.ABORTED and len(scheduler.calls) == 3
  assert step(scheduler, following) == [following]
  assert following.cached == 32  # two pieces were fed


def test_new_weights_in_mid_reply(scheduler, sampler_and_params):
  """With the old cache, or with all tokens fed again."""
  sampler, params = sampler_and_params
  other = weights(9)
  for keep_cache in (True, False):
    scheduler.set_weights(params, 0, keep_cache=False)
    c = call(prompts(1, 10, seed=8)[0], seed=3, max_tokens=16, temperature=2.0)
    step(scheduler, c)
    before = len(c.ids)
    assert before == 4
    fed = scheduler.counts['fed_tokens']
    scheduler.set_weights(other, 1, keep_cache=keep_cache)
    play(scheduler)
    reply = c.listener.reply()
    assert scheduler.counts['fed_tokens'] - fed == (0 if keep_cache else 14)
    assert reply.versions.tolist() == [0] * 4 + [1] * (len(reply.ids) - 4) and len(reply.ids) > 6
    old, new = (expected_logprobs(sampler, w, c.prompt, reply.ids, 2.0) for w in (params, other))
    np.testing.assert_allclose(reply.logprobs[:4], old[:4], atol=1e-4)
    gap = np.abs(reply.logprobs[4:] - new[4:]).max()
    assert gap > 1e-3 if keep_cache else gap < 1e-4


def test_without_the_old_cache_nothing_of_it_is_reused(scheduler, sampler_and_params):
  prompt = prompts(1, 10, seed=9)[0]
  play(scheduler, call(prompt))
  scheduler.set_weights(sampler_and_params[1], 1, keep_cache=True)
  (reply,) = play(scheduler, call(prompt))
  assert reply.cached_tokens == 9
  scheduler.set_weights(sampler_and_params[1], 2, keep_cache=False)
  (reply,) = play(scheduler, call(prompt))
  assert reply.cached_tokens == 0 and set(reply.versions.tolist()) == {2}


def test_a_row_behind_a_stop_string_is_cut_before_it_goes_on(scheduler, sampler_and_params):
  """The next prompt holds the ids up to the stop string; what was sampled behind it leaves no trace."""
  prompt = prompts(1, 10, seed=10)[0]
  (whole,) = play(scheduler, call(prompt, seed=5, temperature=2.0))
  assert len(whole.text) >= 6
  (cut,) = play(scheduler, call(prompt, seed=5, temperature=2.0, stop=(whole.text[2:4],)))
  assert cut.stop_text == whole.text[2:4] and cut.ids == whole.ids[: len(cut.ids)]
  assert len(cut.ids) < len(whole.ids) and cut.text == whole.text[: whole.text.index(cut.stop_text)]
  row = (*prompt, *cut.ids, 11, 12)
  (reply,) = play(scheduler, call(row, seed=6))
  assert reply.cached_tokens == len(row) - 2
  np.testing.assert_allclose(reply.logprobs, expected_logprobs(*sampler_and_params, row, reply.ids), atol=1e-4)


def test_numbers_that_are_not_finite_are_told_once_for_each_version(scheduler, sampler_and_params, caplog):
  caplog.set_level('ERROR', logger='ragen_jax.serving.engine.scheduler')
  good = sampler_and_params[1]
  for version, params in ((1, good), (2, jax.tree.map(lambda x: x * np.nan, good)), (3, good)):
    scheduler.set_weights(params, version, keep_cache=False)
    for seed in range(2):
      play(scheduler, call(prompts(3, 9)[seed], seed, max_tokens=4))
  (record,) = caplog.records
  assert record.getMessage() == 'policy version 2: not finite: 4 sampled log-probs; its replies mean nothing'


def spoil(scheduler, row):
  """Makes the values of a row's first column NaN."""
  state = scheduler.rows._state
  cache = tuple(layer.replace(v=layer.v.at[row, 0].set(np.nan)) for layer in state.cache)
  scheduler.rows._state = state.replace(cache=cache)


def check_good(sampler_and_params, *calls):
  for c in calls:
    reply = c.listener.reply()
    np.testing.assert_allclose(
      reply.logprobs, expected_logprobs(*sampler_and_params, c.prompt, reply.ids), atol=1e-4, err_msg=str(c.prompt)
    )


def test_weights_without_finite_numbers_spoil_nothing_that_is_sampled_later(scheduler, sampler_and_params):
  good = sampler_and_params[1]
  scheduler.set_weights(jax.tree.map(lambda x: x * np.nan, good), 1, keep_cache=False)
  bad = [call(p, max_tokens=8) for p in prompts(4, 20)]
  for reply in play(scheduler, *bad):  # ends as others do, since whoever trains has to see it
    assert np.isnan(reply.logprobs).all() and len(reply.ids) == 8 and reply.finish is Finish.LENGTH
  half = [call(p, seed, max_tokens=8) for seed, p in enumerate(prompts(4, 9))]
  step(scheduler, *half)
  scheduler.set_weights(good, 2, keep_cache=False)
  play(scheduler)
  for c in half:
    reply = c.listener.reply()
    assert reply.versions.tolist() == [1] * 4 + [2] * 4 and np.isnan(reply.logprobs[:4]).all()
    expected = expected_logprobs(*sampler_and_params, c.prompt, reply.ids)
    np.testing.assert_allclose(reply.logprobs[4:], expected[4:], atol=1e-4)
  after = [call(p, seed) for seed, p in enumerate(prompts(4, 5))]
  play(scheduler, *after)
  check_good(sampler_and_params, *after)


def test_a_row_without_finite_numbers_is_cleared_when_its_reply_ends(scheduler, sampler_and_params):
  prompt = prompts(1, 20)[0]
  others = [call(p, max_tokens=40) for p in prompts(3, 9, seed=1)]
  bad = call(prompt, max_tokens=12)
  step(scheduler, bad, *others)
  spoil(scheduler, 0)
  step(scheduler)
  assert np.isnan(bad._records['logprobs'][4:]).all() and scheduler.calls[0] is bad
  others[0].cancelled = True
  scheduler.drop_cancelled()
  same = call(prompt, seed=1, max_tokens=30)
  assert step(scheduler, same) == [same] and same.cached == 0  # nothing of the row is shared
  step(scheduler)
  assert bad.listener.reply().finish is Finish.LENGTH
  short = call(prompts(1, 3, seed=2)[0])
  assert step(scheduler, short) == [short] and scheduler.calls[0] is short
  play(scheduler)
  check_good(sampler_and_params, *others[1:], same, short)


def test_a_beginning_without_finite_numbers_is_not_shared_again(scheduler, sampler_and_params):
  prompt = prompts(1, 20)[0]
  play(scheduler, call(prompt))
  spoil(scheduler, 0)  # as if nothing had been sampled in the row
  first, second = (call((*prompt, token), seed=1) for token in (11, 12))
  play(scheduler, first, second)
  assert scheduler.counts['copies'] and first.cached and second.cached
  assert all(np.isnan(c.listener.reply().logprobs).all() for c in (first, second))
  again = [call((*prompt, token), seed=2) for token in (11, 12, 13, 14)]
  play(scheduler, *again)
  assert again[0].cached == 0
  check_good(sampler_and_params, *again)
