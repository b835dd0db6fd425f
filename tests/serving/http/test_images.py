"""Images in calls, from OpenAI's client to the engine and the store, through a restart."""

from __future__ import annotations

import base64
import dataclasses
import json
import threading
import urllib.request

import numpy as np
import openai
import pytest

from ragen_jax.serving.play.episodes import EpisodeSettings, FinishedAttempt, TaskAttempts, build_rollout
from ragen_jax.serving.rollouts.tables import Tables
from ragen_jax.serving.types import AttemptState
from ragen_jax.serving.wire.images import ImageLimits
from tests.support.images import data_url
from tests.support.scripted import ScriptedEngine, chat, said, serve
from tests.support.serving import PATIENCE
from tests.support.vision import image_of
from tests.support.wire import CALL_TAGS, IMAGES, limits, tokenizer

LIMITS = limits(context=4000, vocabulary=1000, images=dataclasses.replace(IMAGES, count=4))
PICTURES = [image_of(16, 24, seed) for seed in range(3)]


@pytest.fixture(scope='module')
def seeing(tmp_path_factory):
  return tokenizer(tmp_path_factory.mktemp('seeing'), CALL_TAGS, images=True)


@pytest.fixture
def engine(seeing):
  return ScriptedEngine(seeing, lambda prompt, number: f'answer {number}')


@pytest.fixture
def server(tmp_path, engine):
  with serve(tmp_path, engine, limits=LIMITS) as opened:
    yield opened


def part(number: int, **options):
  return {'type': 'image_url', 'image_url': {'url': data_url(PICTURES[number]), **options}}


def asks(*content):
  return [{'role': 'user', 'content': [x if isinstance(x, dict) else {'type': 'text', 'text': x} for x in content]}]


def shown(request) -> list[int]:
  """The pictures of a request of the engine, in order."""
  return [next(i for i, p in enumerate(PICTURES) if np.array_equal(p, s.segment.image)) for s in request.images]


def rollout_of(server, task, seeing):
  """What training gets of an attempt."""
  settings = EpisodeSettings(
    group_size=1, incomplete='keep', off_policy='error', temperature=1.0, top_p=1.0, top_k=0, success_reward='',
    success_score=1.0, max_calls=9, stop_id=seeing.stop_ids[0], pad_id=seeing.pad_id,
  )  # fmt: skip
  pixels = server.store.ask(Tables.images, task.attempt_id)
  done = FinishedAttempt(task.attempt_id, AttemptState.SUCCEEDED, '', tuple(server.calls(task)), (), pixels)
  rollout, _ = build_rollout([TaskAttempts('Agent', 0, (done,))], settings, seeing.decode)
  return rollout


def test_a_conversation_with_images_is_one_row_through_a_restart(tmp_path, engine, seeing):
  with serve(tmp_path, engine, limits=LIMITS) as server:
    task = server.attempt()
    talk = asks('Look: ', part(0, detail='high'), part(1))
    answer = chat(server.client(task), messages=talk)
    assert answer.usage.prompt_tokens == len(engine.requests[0].prompt)
    talk += [*said(answer, 'And?')[:1], {'role': 'tool', 'tool_call_id': 'c', 'content': [part(0), part(2)]}]
  with serve(tmp_path, engine, limits=LIMITS) as server:
    task = dataclasses.replace(task, server_url=server.url)
    chat(server.client(task), messages=talk)
    assert [(c.row, c.new_row_cause) for c in server.calls(task)] == [(0, '')] * 2
    assert [shown(r) for r in engine.requests] == [[0, 1], [0, 1, 0, 2]]
    assert len(server.store.ask(Tables.images, task.attempt_id)) == 3, 'each picture once'
    rollout = rollout_of(server, task, seeing)
  t = rollout.trajectory
  (row,) = np.flatnonzero(t.length)
  np.testing.assert_array_equal(t.image[row] >= 0, t.tokens[row] == seeing.placeholder)
  assert [len(rollout.images), *t.image[row][t.image[row] >= 0]] == [3, *np.repeat([0, 1, 0, 2], 6)]
  for number, picture in enumerate(PICTURES):
    np.testing.assert_array_equal(rollout.images[number], picture)
  assert tuple(t.tokens[row, : len(engine.requests[1].prompt)]) == engine.requests[1].prompt
  first, second = (turn.observation for turn in rollout.episodes[0].turns)
  assert [s.text if hasattr(s, 'text') else s.columns for s in first][1:4] == [
    6,
    6,
    '<|im_end|>\n<|im_start|>assistant\n',
  ]
  assert first[0].text.endswith('Look: ') and [getattr(s, 'columns', 0) for s in second] == [0, 6, 6, 0]


@pytest.mark.parametrize('stream', [False, True])
def test_responses_with_images_go_on_from_an_earlier_one(server, engine, stream):
  task = server.attempt()
  client = server.client(task)
  picture = {'type': 'input_image', 'image_url': data_url(PICTURES[0]), 'detail': 'auto'}
  talk = [{'role': 'user', 'content': [{'type': 'input_text', 'text': 'Look: '}, picture]}]

  def ask(content, **options):
    answer = client.responses.create(model='policy', input=content, stream=stream, **options)
    return list(answer)[-1].response if stream else answer

  first = ask(talk)
  result = {'type': 'function_call_output', 'call_id': 'c', 'output': [picture | {'image_url': data_url(PICTURES[1])}]}
  second = ask([result], previous_response_id=first.id)
  ask('And?', previous_response_id=second.id)
  assert [shown(r) for r in engine.requests] == [[0], [0, 1], [0, 1]]
  assert [(c.row, c.new_row_cause, len(c.images)) for c in server.calls(task)] == [(0, '', 1), (0, '', 1), (0, '', 0)]


def test_another_picture_is_another_conversation(server, engine):
  task = server.attempt()
  answer = chat(server.client(task), messages=asks('Look: ', part(0)))
  chat(server.client(task), messages=asks('Look: ', part(1)) + said(answer, 'And?'))
  assert [c.row for c in server.calls(task)] == [0, 1] and server.calls(task)[1].new_row_cause == 'edited_history'
  assert shown(engine.requests[1]) == [1]


def test_calls_of_nobody_see_too(server, engine):
  chat(server.client(), messages=asks(part(2)), n=2)
  assert [shown(r) for r in engine.requests] == [[2], [2]]


@pytest.mark.parametrize(
  ('messages', 'code', 'told'),
  [
    (asks({'type': 'image_url', 'image_url': {'url': 'https://example.org/a.png'}}), 'invalid_value', 'not fetched'),
    (asks({'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,aGk='}}), 'invalid_value', 'no picture'),
    (asks({'type': 'image_url', 'image_url': {}}), 'invalid_value', 'must be a data URL'),
    (asks(part(0, detail='low')), 'invalid_value', "detail='low': must be 'auto' or 'high'"),
    (asks(*[part(0)] * 5), 'invalid_value', 'must have at most 4'),
    ([{'role': 'system', 'content': [part(0)]}], 'invalid_value', 'of the user and of tools only'),
    (asks({'type': 'input_audio', 'input_audio': {}}), 'unsupported_content', 'must be text or an image'),
    (asks('x' * 3985, part(0)), 'context_length_exceeded', 'the context has 4000'),
  ],
)
def test_wrong_images(server, messages, code, told):
  with pytest.raises(openai.BadRequestError, match=told) as e:
    chat(server.client(server.attempt(), max_retries=3), messages=messages)
  assert e.value.code == code and e.value.body['message'].count('\n') == 0 and not server.engine.requests


def _completes(server, task, prompt, numbers, **options):
  body = {'images': [data_url(PICTURES[i]) for i in numbers]}
  return server.client(task).completions.create(model='policy', prompt=prompt, extra_body=body, **options)


def test_ids_with_their_images_are_one_row(server, engine, seeing):
  task, pads = server.attempt(), [seeing.placeholder] * 6
  first = [5, *pads, 6, *pads, 7]
  _completes(server, task, first, [0, 1])
  reply = list(server.calls(task)[0].generated.ids)
  _completes(server, task, [*first, *reply, 8, *pads], [0, 1, 0])
  # Another picture in the same columns begins another row.
  _completes(server, task, [*first, *reply, 8], [0, 2])
  _completes(server, task, [*first, *reply, 9], [0, 1])
  assert [shown(r) for r in engine.requests] == [[0, 1], [0, 1, 0], [0, 2], [0, 1]]
  assert [[(s.start, s.stop) for s in r.images] for r in engine.requests[:2]] == [
    [(1, 7), (8, 14)],
    [(1, 7), (8, 14), (16 + len(reply), 22 + len(reply))],
  ]
  assert [(c.row, c.new_row_cause, len(c.images)) for c in server.calls(task)] == [
    (0, '', 2),
    (0, '', 1),
    (1, 'conversation', 2),
    (2, 'fork', 2),
  ]
  t = rollout_of(server, task, seeing).trajectory
  np.testing.assert_array_equal(t.image >= 0, t.tokens == seeing.placeholder)
  _completes(server, None, first, [2, 2], n=2)
  assert [shown(r) for r in engine.requests[4:]] == [[2, 2], [2, 2]]


def test_ids_and_images_that_do_not_match(server, engine, seeing):
  pads = [seeing.placeholder] * 6
  for prompt, numbers, told in (
    ([5, *pads], [0, 1], 'prompt: has 6 placeholders of images: must have the 12 of images'),
    ([5, *pads, 6, *pads], [0], 'prompt: has 12 placeholders of images: must have the 6 of images'),
    ([*pads[:3], 5, *pads[3:]], [0], r'prompt: the 6 placeholders of images\[0\] are not adjacent'),
    ([*pads, *pads[:4], 5, *pads[4:]], [0, 1], r'prompt: the 6 placeholders of images\[1\] are not adjacent'),
    ('Look', [0], 'images: must be empty unless prompt is one list of ids'),
    ([[5, *pads], [6]], [0], 'images: must be empty unless prompt is one list of ids'),
    ([5, *pads * 5], [0] * 5, r'images\[4\]: is image 5 of the request: must have at most 4'),
  ):
    with pytest.raises(openai.BadRequestError, match=told):
      _completes(server, server.attempt(), prompt, numbers)
  assert not engine.requests


def test_ids_of_images_are_no_prompt(server, seeing):
  with pytest.raises(openai.BadRequestError, match='stands for an image'):
    server.client(server.attempt()).completions.create(model='policy', prompt=[5, seeing.placeholder])


def test_a_policy_without_a_tower_refuses_images_in_one_line(tmp_path, engine):
  with serve(tmp_path, engine) as server:
    for ask in (
      lambda c: chat(c, messages=asks(part(0))),
      lambda c: c.responses.create(
        model='policy', input=[{'role': 'user', 'content': [{'type': 'input_image', 'image_url': 'data:'}]}]
      ),
      lambda c: c.completions.create(model='policy', prompt=[5], extra_body={'images': ['data:']}),
    ):
      with pytest.raises(openai.BadRequestError, match='the policy reads no images') as e:
        ask(server.client(server.attempt()))
      assert e.value.code == 'unsupported_content' and '\n' not in e.value.body['message']


def test_a_damaged_picture_of_the_store_is_an_error_of_the_store(tmp_path, engine):
  with serve(tmp_path, engine, limits=LIMITS) as server:
    task = server.attempt()
    answer = server.client(task).responses.create(
      model='policy', input=[{'role': 'user', 'content': [{'type': 'input_image', 'image_url': data_url(PICTURES[0])}]}]
    )
    other = data_url(PICTURES[1]).partition(',')[2]
    with server.store.write() as tables:
      tables._sql('UPDATE images SET png = ?', (base64.b64decode(other),))
    with pytest.raises(openai.InternalServerError, match='its log says why'):
      server.client(task).responses.create(model='policy', input='And?', previous_response_id=answer.id)


def test_a_response_whose_pictures_are_still_being_stored_can_be_continued(server, engine, monkeypatch):
  client, add = server.client(server.attempt(), max_retries=0), server.store.add_calls
  begun, asked = threading.Event(), threading.Event()

  def slowly(*args):
    begun.set()
    asked.wait(2)
    add(*args)

  monkeypatch.setattr(server.store, 'add_calls', slowly)
  picture = {'type': 'input_image', 'image_url': data_url(PICTURES[0])}
  first = client.responses.create(model='policy', input=[{'role': 'user', 'content': [picture]}], stream=True)
  id_ = next(event.response.id for event in first if event.type == 'response.created')
  assert begun.wait(PATIENCE)
  threading.Timer(0.5, asked.set).start()
  client.responses.create(model='policy', input='And?', previous_response_id=id_)
  assert [shown(r) for r in engine.requests] == [[0], [0]]


def test_a_name_spelled_with_escapes_is_read_in_a_thread_too(server, monkeypatch):
  names, size = [], ImageLimits.size
  monkeypatch.setattr(ImageLimits, 'size', lambda *args: names.append(threading.current_thread().name) or size(*args))
  task = server.attempt()
  for old, new in (('', ''), ('image', r'\u0069mage')):
    body = json.dumps({'model': 'policy', 'messages': asks(part(0))})
    body = body.replace(old, new) if old else body
    request = urllib.request.Request(
      f'{task.base_url}/chat/completions', body.encode(),
      {'Authorization': f'Bearer {task.api_key}', 'Content-Type': 'application/json'},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
      assert response.status == 200
  assert len(names) == 2 and all(name.startswith('asyncio_') for name in names)
