"""Completions: prompts of text and ids, answers and streams."""

from __future__ import annotations

import json

import pytest

from ragen_jax.serving import errors
from ragen_jax.serving.errors import ApiError
from ragen_jax.serving.types import Finish
from ragen_jax.serving.wire import completions, sse
from ragen_jax.serving.wire.answers import ENDPOINTS
from ragen_jax.serving.wire.results import Choice
from ragen_jax.serving.wire.spec import Kind
from tests.support.chat_server import server
from tests.support.wire import context, generated, limits, pieces, tokenizer

FULL = {'model': 'policy', 'prompt': 'hi', 'logprobs': 2, 'return_token_ids': True}


@pytest.fixture(scope='module')
def tok(tmp_path_factory):
  return tokenizer(tmp_path_factory.mktemp('tokenizer'), ())


def _parse(**changes):
  return ENDPOINTS[Kind.COMPLETIONS].parse({'model': 'policy', 'prompt': 'hi'} | changes, limits())


def _choices(tok, replies):
  return [Choice(k, tok.encode(f'p{k}'), reply, None, f'p{k}') for k, reply in enumerate(replies)]


def _events(tok, spec, replies, seed=0):
  choices = _choices(tok, replies)
  stream = completions.CompletionStream(context(tok, None, spec, 'cmpl'))
  events = stream.start([choice.prompt for choice in choices])
  for choice in choices:
    for piece in pieces(tok, choice.generated, seed):
      events += stream.piece(choice.index, piece)
  return events + stream.end(choices)


def _answer(tok, replies):
  def answer(body):
    spec = ENDPOINTS[Kind.COMPLETIONS].parse(body, limits())
    if spec.stream:
      return 200, {'content-type': sse.CONTENT_TYPE}, b''.join(_events(tok, spec, replies))
    made = completions.answer(context(tok, None, spec, 'cmpl'), _choices(tok, replies))
    return 200, {'content-type': 'application/json'}, sse.encode_json(made)

  return answer


@pytest.mark.parametrize(
  ('prompt', 'prompts'),
  [
    ('hi', ('hi',)),
    ([1, 2], ((1, 2),)),
    (['a', 'b'], ('a', 'b')),
    ([[1], [2, 3]], ((1,), (2, 3))),
  ],
)
def test_prompts_are_texts_or_ids(prompt, prompts):
  assert _parse(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
  ('changes', 'param'),
  [
    ({'prompt': None}, 'prompt'),
    ({'prompt': ''}, 'prompt'),
    ({'prompt': []}, 'prompt'),
    ({'prompt': 7}, 'prompt'),
    ({'prompt': [1, 300]}, 'prompt[1]'),
    ({'prompt': [1, True]}, 'prompt[1]'),
    ({'prompt': [[1], []]}, 'prompt[1]'),
    ({'prompt': ['a', '']}, 'prompt[1]'),
    ({'prompt': [['a']]}, 'prompt[0][0]'),
    ({'prompt': ['a'] * 51}, 'prompt'),
    ({'prompt': ['a'] * 5, 'n': 2}, 'n'),
    ({'logprobs': 21}, 'logprobs'),
    ({'echo': True, 'logprobs': 0}, 'echo'),
  ],
)
def test_wrong_requests_are_refused(changes, param):
  with pytest.raises(ApiError) as e:
    _parse(**changes)
  assert (e.value.status, e.value.param) == (400, param)


def test_zero_alternatives_are_log_probabilities_all_the_same():
  assert (_parse(logprobs=0).logprobs, _parse(logprobs=0).top_logprobs) == (True, 0)
  assert not _parse().logprobs


def test_an_answer_has_what_was_asked_for(tok):
  reply = generated(tok, 'aé')
  answer = _answer(tok, [reply])
  (plain,) = json.loads(answer({'model': 'policy', 'prompt': 'hi'})[2])['choices']
  assert plain == {'index': 0, 'text': 'aé', 'logprobs': None, 'finish_reason': 'stop', 'stop_reason': None}
  (echoed,) = json.loads(answer({'model': 'policy', 'prompt': 'hi', 'echo': True})[2])['choices']
  assert echoed['text'] == 'p0aé'
  (full,) = json.loads(answer(FULL)[2])['choices']
  assert (full['prompt_token_ids'], full['token_ids']) == (list(tok.encode('p0')), list(reply.ids))
  assert full['logprobs'] == {
    'tokens': ['a', '\ufffd', '\ufffd', '<|im_end|>'],
    'token_logprobs': [-0.125, -0.25, -0.375, -0.5],
    'top_logprobs': [
      {'a': -0.5, tok.decode([65]): -1.5},
      {'\ufffd': -0.5, tok.decode([65]): -1.5},
      {'\ufffd': -0.5, tok.decode([65]): -1.5},
      {'<|im_end|>': -0.5, tok.decode([65]): -1.5},
    ],
    'text_offset': [0, 1, 1, 2],  # the second and third token are one character
  }
  assert json.loads(answer(FULL | {'logprobs': 0})[2])['choices'][0]['logprobs']['top_logprobs'] is None


def test_offsets_are_places_in_the_text(tok):
  (choice,) = json.loads(_answer(tok, [generated(tok, 'Hi 🙂 there 100 € ok')])(FULL)[2])['choices']
  told, text = choice['logprobs'], choice['text']
  whole = [(at, token) for at, token in zip(told['text_offset'], told['tokens'], strict=True) if '\ufffd' not in token]
  assert all(text[at : at + len(token)] == token for at, token in whole[:-1])
  assert whole[-1] == (len(text), '<|im_end|>')


@pytest.mark.parametrize('seed', range(5))
def test_streams_say_what_whole_answers_say(tok, seed):
  replies = [generated(tok, 'hé 🙂'), generated(tok, '', finish=Finish.LENGTH), generated(tok, 'a', stop_text='b')]
  body = FULL | {'prompt': ['a', 'b', 'c'], 'stream_options': {'include_usage': True}, 'stream': True}
  whole = json.loads(_answer(tok, replies)(body | {'stream': False})[2])
  raw = b''.join(_events(tok, ENDPOINTS[Kind.COMPLETIONS].parse(body, limits()), replies, seed)).decode().split('\n\n')
  assert raw[-2:] == ['data: [DONE]', '']
  chunks = [json.loads(part.removeprefix('data: ')) for part in raw[:-2]]
  assert chunks[-1]['usage'] == whole['usage'] and not chunks[-1]['choices']
  for expected in whole['choices']:
    parts = [c['choices'][0] for c in chunks[:-1] if c['choices'][0]['index'] == expected['index']]
    assert ''.join(p['text'] for p in parts) == expected['text']
    assert [p['finish_reason'] for p in parts[-1:]] == [expected['finish_reason']]
    assert not any(p['finish_reason'] for p in parts[:-1])
    assert parts[-1]['stop_reason'] == expected['stop_reason']
    assert parts[0]['prompt_token_ids'] == expected['prompt_token_ids']
    assert [i for p in parts for i in p.get('token_ids', [])] == expected['token_ids']
    for name, values in expected['logprobs'].items():
      assert [x for p in parts if p['logprobs'] for x in p['logprobs'][name]] == values


def test_openai_reads_answers_and_streams(tok):
  openai = pytest.importorskip('openai', reason='answers are read with the openai package')
  replies = [generated(tok, 'héllo'), generated(tok, 'b')]
  with server([_answer(tok, replies)] * 2) as (url, _):
    client = openai.OpenAI(base_url=url, api_key='key', max_retries=0, timeout=60)
    made = client.completions.create(model='policy', prompt=[1, 2], n=2, logprobs=1)
    chunks = list(client.completions.create(model='policy', prompt=[1, 2], n=2, echo=True, stream=True))
  type(made).model_validate(made.model_dump())
  assert [c.text for c in made.choices] == ['héllo', 'b']
  assert made.choices[1].logprobs.token_logprobs == [-0.125, -0.25]
  assert made.usage.completion_tokens == 7 + 2
  type(chunks[-1]).model_validate(chunks[-1].model_dump())
  assert [''.join(c.choices[0].text for c in chunks if c.choices[0].index == k) for k in (0, 1)] == ['p0héllo', 'p1b']
  assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ['stop', 'stop']


def test_aborted_replies_have_no_answer(tok):
  with pytest.raises(ValueError):
    _answer(tok, [generated(tok, 'a', finish=Finish.ABORTED)])({'model': 'policy', 'prompt': 'hi'})


def test_a_broken_stream_ends_with_its_error(tok):
  stream = completions.CompletionStream(context(tok, None, _parse(stream=True), 'cmpl'))
  (raw,) = stream.error(errors.internal('it broke', retry=False))
  assert json.loads(raw.removeprefix(b'data: '))['error']['message'] == 'it broke'
