"""The text of a reply in pieces against the text of all of its ids."""

from __future__ import annotations

import random

import pytest
import tokenizers

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.models import presets
from ragen_jax.serving.engine.text import ReplyText
from tests.support.chat_templates import KINDS, write_tokenizer


@pytest.fixture(scope='module')
def tokenizer():
  return ChatTokenizer(presets.resolve('tiny', ''))


def play(reply, ids, sizes):
  """Adds ids in parts; returns the ids that belong to the reply and the texts that were released."""
  kept, texts = [], []
  while ids and not reply.stop:
    part, ids = ids[: sizes[0]], ids[sizes[0] :]
    sizes = [*sizes[1:], sizes[0]]
    kept += part[: reply.add(part)]
    texts.append(reply.release(final=False))
  reply.finish()
  return kept, [*texts, reply.release(final=True)]


def characters(ids):
  """A decoder whose tokens are characters."""
  return ''.join(map(chr, ids))


@pytest.mark.parametrize('sizes', [[1], [2], [3, 1], [100]])
def test_characters_of_several_bytes_are_released_whole(tokenizer, sizes):
  text = 'naïve 🙂🙂 日本語, ü'
  ids = list(tokenizer.encode(text))
  assert len(ids) > len(text)  # some characters take several tokens
  kept, texts = play(ReplyText(tokenizer.decode, ()), ids, sizes)
  assert kept == ids and ''.join(texts) == text
  assert not any('\ufffd' in t for t in texts)


def test_bytes_that_are_no_characters_are_shown_as_the_decoder_shows_all_of_them(tokenizer):
  rng = random.Random(0)
  for _ in range(200):
    ids = [rng.randrange(3, tokenizer.size) for _ in range(rng.randrange(1, 30))]
    kept, texts = play(ReplyText(tokenizer.decode, ()), ids, [rng.randrange(1, 5) for _ in range(3)])
    assert kept == ids and ''.join(texts) == tokenizer.decode(ids)


def test_an_incomplete_character_at_the_end_is_in_the_text(tokenizer):
  ids = list(tokenizer.encode('a🙂'))[:-1]
  reply = ReplyText(tokenizer.decode, ())
  reply.add(ids)
  assert reply.release(final=False) == 'a'
  assert reply.finish() == 'a\ufffd' and reply.release(final=True) == '\ufffd'


def test_a_stop_string_cuts_the_text_and_the_ids_behind_the_token_that_completed_it():
  reply = ReplyText(characters, ('END',))
  kept, texts = play(reply, [ord(c) for c in 'some ENDless'], [4])
  assert characters(kept) == 'some END' and ''.join(texts) == reply.finish() == 'some '
  assert reply.stop == 'END'


def test_text_that_may_begin_a_stop_string_is_held_back_until_it_is_decided():
  reply = ReplyText(characters, ('abac', 'xyz'))
  released = []
  for c in 'qabab, xyq':
    assert reply.add([ord(c)]) == 1
    released.append(reply.release(final=False))
  #                    q    a   b   a   b     ,      ' '  x   y   q
  assert released == ['q', '', '', '', 'ab', 'ab,', ' ', '', '', 'xyq']
  reply.add([ord('a')])
  assert reply.release(final=False) == ''
  assert reply.finish() == 'qabab, xyqa' and reply.release(final=True) == 'a'


def test_the_first_of_several_stop_strings_counts():
  for stops in (('wo', 'lo, w'), ('lo, w', 'wo')):
    reply = ReplyText(characters, stops)
    kept, texts = play(reply, [ord(c) for c in 'hello, world'], [5])
    assert characters(kept) == 'hello, w' and ''.join(texts) == 'hel' and reply.stop == 'lo, w'
  # A token that completes two: the one that begins first.
  words = {0: 'one ', 1: 'two three'}
  reply = ReplyText(lambda ids: ''.join(words[i] for i in ids), ('three', 'two'))
  assert reply.add([0, 1]) == 2 and reply.stop == 'two' and reply.finish() == 'one '


@pytest.mark.parametrize('kind', ['qwen2.5', 'gemma3'])
def test_text_in_tokens_of_bytes_does_not_depend_on_where_the_chunks_end(tmp_path, kind):
  write_tokenizer(tmp_path, KINDS[kind])
  tok = ChatTokenizer(str(tmp_path))
  texts = ['a 日 b', 'hi 😀 there', '日本語', '😀😀x']
  for text in texts:
    ids = list(tok.encode(text))
    for size in (1, 2, 3, 4, len(ids)):
      reply = ReplyText(tok.decode, ())
      _, sent = play(reply, ids, [size])
      assert ''.join(sent) == reply.finish() == text
  assert tok.decode_batch([tok.encode(text) for text in texts]) == texts
  assert tok.decode(tok.encode('日')[:-1]).strip('\ufffd') == ''


def test_runs_of_spaces_that_were_added_as_tokens_are_spaces(tmp_path):
  write_tokenizer(tmp_path, KINDS['gemma3'])
  backend = tokenizers.Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
  backend.add_tokens([tokenizers.AddedToken('\u2581\u2581', special=False)])
  backend.save(str(tmp_path / 'tokenizer.json'))
  tok = ChatTokenizer(str(tmp_path))
  ids = [backend.token_to_id(token) for token in ('a', '\u2581\u2581', 'b', '\u2581', '<end_of_turn>')]
  assert tok.decode(ids) == backend.decode(ids, skip_special_tokens=False) == 'a  b <end_of_turn>'


def test_the_reply_does_not_depend_on_where_the_chunks_end(tokenizer):
  """Stop strings of one to six characters, some of several bytes, in random texts."""
  rng = random.Random(1)
  ended = 0
  for _ in range(300):
    text = ''.join(rng.choice('ab🙂é ') for _ in range(40))
    stops = tuple(''.join(rng.choice('ab🙂é ') for _ in range(rng.randrange(2, 7))) for _ in range(2))
    ids = list(tokenizer.encode(text))
    outcomes = set()
    for sizes in ([1], [2, 3], [7], [500]):
      reply = ReplyText(tokenizer.decode, stops)
      kept, texts = play(reply, ids, sizes)
      assert ''.join(texts) == reply.finish()
      outcomes.add((tuple(kept), reply.finish(), reply.stop))
    ((kept, shown, stop),) = outcomes
    if stop:
      ended += 1
      assert shown + stop == tokenizer.decode(kept)[: len(shown + stop)]
      assert all(s not in tokenizer.decode(kept[:-1]) for s in stops)
    else:
      assert shown == text and all(s not in text for s in stops)
  assert 50 < ended < 250


def test_no_character_is_divided_where_an_incomplete_one_follows(tokenizer):
  smile = list(tokenizer.encode('🙂'))
  reply = ReplyText(tokenizer.decode, ())
  reply.add([*smile, smile[0]])
  reply.add(smile[1:])
  assert reply.finish() == '🙂🙂'
  lost = ReplyText(tokenizer.decode, ())
  lost.add([*smile, smile[0]])
  assert lost.finish() == '🙂\ufffd'
