"""The streamed and the whole answer of a request say the same, whichever endpoint it came to."""

from __future__ import annotations

import json

import pytest

from ragen_jax.serving import answers
from ragen_jax.serving.chat_format import QwenFormat
from ragen_jax.serving.wire.errors import internal
from ragen_jax.serving.wire.results import Choice
from ragen_jax.serving.wire.spec import Kind
from tests.support.wire import CALL_TAGS, DEFAULTS, generated, head, limits, pieces, reader, tokenizer

BODIES = {
  Kind.CHAT: {'messages': [{'role': 'user', 'content': 'a'}], 'n': 2},
  Kind.COMPLETIONS: {'prompt': ['a', 'b'], 'return_token_ids': True},
  Kind.RESPONSES: {'input': 'a'},
}


@pytest.fixture(scope='module')
def tok(tmp_path_factory):
  return tokenizer(tmp_path_factory.mktemp('tokenizer'), CALL_TAGS)


def _events(encoded):
  lines = [line for event in encoded for line in event.decode().splitlines() if line.startswith('data: {')]
  return [json.loads(line.removeprefix('data: ')) for line in lines]


def _texts(kind, events, n):
  texts = [''] * n
  for event in events:
    if kind is Kind.RESPONSES:
      texts[0] += event.get('delta', '')
    for c in event.get('choices', ()):
      texts[c['index']] += c['text'] if kind is Kind.COMPLETIONS else c['delta'].get('content') or ''
  return texts


@pytest.fixture(params=list(Kind))
def asked(request, tok):
  """The request, the prompts, the replies and a function that makes readers."""
  fmt = QwenFormat(tok, keep_thoughts=True)
  spec = answers.PARSERS[request.param]({'model': 'policy', **BODIES[request.param]}, limits())
  n = 1 if request.param is Kind.RESPONSES else 2
  replies = [generated(tok, f'reply é {k}') for k in range(n)]
  prompts = [tok.encode_once(letter) for letter in 'ab'[:n]]
  choices = []
  for k in range(n):
    read = reader(fmt)
    read.feed(replies[k].ids, replies[k].text)
    read.finish()
    reply = None if request.param is Kind.COMPLETIONS else read.reply()
    choices.append(Choice(k, prompts[k], replies[k], reply, ''))
  return request.param, spec, prompts, choices, lambda _: reader(fmt)


def test_the_stream_says_what_the_whole_answer_says(asked, tok):
  kind, spec, prompts, choices, new_reader = asked
  stream = answers.open_stream(spec, head('x'), DEFAULTS, prompts, new_reader, tok.decode, tok.token_bytes)
  encoded = stream.start()
  for k, choice in enumerate(choices):
    for piece in pieces(tok, choice.generated, seed=k):
      encoded += stream.piece(k, piece)
  encoded += stream.end(choices)
  whole = answers.whole_answer(spec, head('x'), DEFAULTS, choices, new_reader, tok.token_bytes)
  assert _texts(kind, _events(encoded), len(choices)) == [c.generated.text for c in choices]
  if kind is Kind.RESPONSES:
    assert _events(encoded)[-1]['response'] == whole
  else:
    assert encoded[-1] == b'data: [DONE]\n\n' and [c['index'] for c in whole['choices']] == [0, 1]
  assert whole['id'] == 'x_1'


def test_a_stream_that_fails_ends_with_the_error(asked, tok):
  _, spec, prompts, _, new_reader = asked
  stream = answers.open_stream(spec, head('x'), DEFAULTS, prompts, new_reader, tok.decode, tok.token_bytes)
  stream.start()
  last = _events(stream.error(internal('it broke', retry=False)))[-1]
  assert last['error']['message'] == 'it broke'


def test_ids_of_answers_have_their_endpoints_prefix():
  assert set(answers.ID_PREFIX) == set(answers.PARSERS) == set(Kind)
  assert len(set(answers.ID_PREFIX.values())) == 3
