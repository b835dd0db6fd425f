"""A call: what it makes of sampled tokens, and which requests it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax.sampling.decode import Reply
from ragen_jax.serving.engine.calls import Call, check_request
from ragen_jax.serving.types import Finish
from tests.support.serving import VOCAB, Listener, request

STOP = 0


def characters(ids):
  return ''.join(map(chr, ids))


def reply(text, *, open_, row=1):
  """A chunk of eight columns with a text's characters in one of three rows."""
  n = len(text)
  tokens, zeros = np.zeros((3, 8), np.int32), np.zeros((3, 8), np.float32)
  tokens[row, :n] = [ord(c) if c != '.' else STOP for c in text]
  numbers = zeros + np.arange(8, dtype=np.float32)
  top = np.broadcast_to(np.arange(4), (3, 8, 4))
  top_logprobs = np.broadcast_to(np.asarray([-1, -2, -3, -np.inf], np.float32), (3, 8, 4))
  return Reply(
    tokens, -numbers, numbers, 2 * numbers, np.full(3, n), np.full(3, open_), top_tokens=top, top_logprobs=top_logprobs
  )


def call(listener, **params):
  return Call(request((1, 2), **params), 20, characters, listener.on_piece, listener.on_done)


def test_chunks_become_pieces_and_a_reply():
  listener = Listener()
  c = call(listener, top_logprobs=3)
  assert c.take(reply('abc', open_=True), 1, 5, (STOP,)) is None
  assert c.take(reply('de.', open_=False), 1, 6, (STOP,)) is Finish.STOP
  c.end(Finish.STOP)
  got = listener.reply()
  assert got.text == 'abcde' and got.ids == (*map(ord, 'abcde'), STOP) and got.finish is Finish.STOP
  assert got.logprobs.tolist() == [0, -1, -2, 0, -1, -2] and got.entropies.tolist() == [0, 2, 4, 0, 2, 4]
  assert got.values.tolist() == [0, 1, 2, 0, 1, 2] and got.versions.tolist() == [5, 5, 5, 6, 6, 6]
  assert got.top == (((0, -1.0), (1, -2.0), (2, -3.0)),) * 6
  assert [p.text for p in listener.pieces] == ['abc', 'de']


def test_alternatives_that_cannot_be_drawn_are_left_out():
  listener = Listener()
  c = call(listener, top_logprobs=4)
  c.take(reply('a', open_=False), 1, 0, (STOP,))
  c.end(Finish.LENGTH)
  assert [i for i, _ in listener.reply().top[0]] == [0, 1, 2]


def test_a_stop_string_counts_before_a_stop_token_behind_it():
  listener = Listener()
  c = call(listener, stop=('cd',))
  assert c.take(reply('abcde.', open_=False), 1, 0, (STOP,)) is Finish.STOP
  c.end(Finish.STOP)
  got = listener.reply()
  assert got.text == 'ab' and got.ids == tuple(map(ord, 'abcd')) and got.stop_text == 'cd'


def test_a_reply_without_tokens_left_ends_by_its_length_and_shows_text_that_was_held_back():
  listener = Listener()
  c = call(listener, stop=('cd',))
  assert c.take(reply('abc', open_=False), 1, 0, (STOP,)) is Finish.LENGTH
  c.end(Finish.LENGTH)
  assert listener.reply().text == 'abc' and listener.pieces[0].text == 'abc'


def test_a_listener_that_raises_makes_its_call_cancelled(caplog):
  def broken(_):
    raise RuntimeError('the loop is closed')

  c = Call(request((1,)), 20, characters, broken, broken)
  assert c.take(reply('abc', open_=True), 1, 0, (STOP,)) is None
  assert c.cancelled and 'the loop is closed' in caplog.text
  c.end(Finish.ABORTED)


@pytest.mark.parametrize(
  ('prompt', 'params', 'message'),
  [
    ((), {}, 'prompt: has no tokens; needs at least 1'),
    ((9,) * 10, {}, 'prompt: has 10 tokens; at most 9 fit into a context of 10'),
    ((9, VOCAB), {}, f'prompt: has the id {VOCAB}; ids are from 0 to {VOCAB - 1}'),
    ((9, -1), {}, f'prompt: has the id -1; ids are from 0 to {VOCAB - 1}'),
    ((9,), {'temperature': -1.0}, 'temperature=-1.0: must be 0 or at least 0.001'),
    ((9,), {'temperature': 1e-9}, 'temperature=1e-09: must be 0 or at least 0.001'),
    ((9,), {'temperature': float('nan')}, 'temperature=nan: must be 0 or at least 0.001'),
    ((9,), {'max_tokens': 0}, 'max_tokens=0: must be at least 1'),
  ],
)
def test_requests_that_cannot_be_served_are_refused(prompt, params, message):
  with pytest.raises(ValueError) as e:
    check_request(request(prompt, **params), max_context=10, vocab_limit=VOCAB)
  assert str(e.value) == message


def test_a_prompt_may_leave_room_for_one_token():
  check_request(request((9,) * 9), max_context=10, vocab_limit=VOCAB)
