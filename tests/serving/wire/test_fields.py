"""The table of fields against the parsers and against the parameters of the openai package."""

from __future__ import annotations

import typing

import pytest

from ragen_jax.serving.errors import ApiError
from ragen_jax.serving.wire import chat, completions, fields, responses
from ragen_jax.serving.wire.body import Body
from ragen_jax.serving.wire.fields import Treatment
from tests.support.images import data_url
from tests.support.vision import image_of
from tests.support.wire import IMAGES, TOOL, limits

LEAST = {
  'chat': (fields.CHAT, chat.read, {'model': 'policy', 'messages': [{'role': 'user', 'content': 'hi'}]}),
  'completions': (fields.COMPLETIONS, completions.read, {'model': 'policy', 'prompt': 'hi'}),
  'responses': (fields.RESPONSES, responses.read, {'model': 'policy', 'input': 'hi'}),
}
each_endpoint = pytest.mark.parametrize('endpoint', LEAST)


@each_endpoint
def test_parsers_read_exactly_the_fields_that_the_table_honours(endpoint):
  table, read, least = LEAST[endpoint]
  body = Body(least, table)
  read(body, limits())
  assert body.unread == frozenset()


@each_endpoint
def test_each_field_has_one_treatment(endpoint):
  names = [field.name for field in LEAST[endpoint][0]]
  assert len(names) == len(set(names))


@each_endpoint
def test_refused_fields_are_refused(endpoint):
  table, read, least = LEAST[endpoint]
  refused = [field for field in table if field.treatment is Treatment.REFUSE]
  assert refused
  for field in refused:
    with pytest.raises(ApiError) as e:
      read(Body({**least, field.name: 'something'}, table), limits())
    assert (e.value.status, e.value.param) == (400, field.name)
    for value in (None, *field.neutral):
      read(Body({**least, field.name: value}, table), limits())


@each_endpoint
def test_ignored_and_unknown_fields_change_nothing(endpoint):
  table, read, least = LEAST[endpoint]
  ignored = [field.name for field in table if field.treatment is Treatment.IGNORE]
  assert ignored
  plain = read(Body(least, table), limits())
  assert read(Body({**least, **dict.fromkeys(ignored, 'x'), 'unknown': 3}, table), limits()) == plain


# A value of each honoured field that differs from its absence, and what else the request then needs.
_CHANGES = {
  'messages': [{'role': 'user', 'content': 'x'}],
  'prompt': [1, 2],
  'images': [data_url(image_of(16, 16))],
  'input': 'x',
  'instructions': 'x',
  'model': 'policy:writer',
  'temperature': 0.5,
  'top_p': 0.5,
  'top_k': 3,
  'stream': True,
  'user': 'x',
  'metadata': {'a': 'b'},
  'seed': 3,
  'return_token_ids': True,
  'n': 2,
  'stop': 'x',
  'stream_options': {'include_usage': True},
  'chat_template_kwargs': {'enable_thinking': False},
  'tools': [TOOL | {'name': 'look'}],
  'tool_choice': 'required',
  'parallel_tool_calls': False,
  'max_tokens': 3,
  'max_completion_tokens': 3,
  'max_output_tokens': 3,
  'logprobs': 1,
  'top_logprobs': 2,
  'add_generation_prompt': False,
  'continue_final_message': True,
  'response_format': {'type': 'json_object'},
  'text': {'format': {'type': 'json_schema'}},
  'previous_response_id': 'resp_1',
  'echo': True,
}
_NEEDED = {
  ('chat', 'continue_final_message'): {'messages': [{'role': 'assistant', 'content': 'x'}]},
  ('chat', 'top_logprobs'): {'logprobs': True},
  ('completions', 'images'): {'prompt': [1]},
}


@each_endpoint
def test_honoured_fields_have_an_effect(endpoint):
  table, read, least = LEAST[endpoint]
  for field in table:
    if field.treatment in (Treatment.HONOUR, Treatment.LENIENT):
      value = _CHANGES[field.name]
      value = True if (endpoint, field.name) == ('chat', 'logprobs') else value
      before = least | _NEEDED.get((endpoint, field.name), {})
      changed = read(Body(before | {field.name: value}, table), limits(images=IMAGES))
      assert changed != read(Body(before, table), limits(images=IMAGES)), field.name


@each_endpoint
def test_the_table_knows_the_parameters_of_the_openai_package(endpoint):
  pytest.importorskip('openai', reason='the parameters are those of the openai package')
  from openai.types import completion_create_params
  from openai.types.chat import completion_create_params as chat_create_params
  from openai.types.responses import response_create_params

  params = {
    'chat': chat_create_params.CompletionCreateParamsBase,
    'completions': completion_create_params.CompletionCreateParamsBase,
    'responses': response_create_params.ResponseCreateParamsBase,
  }[endpoint]
  known = {field.name for field in LEAST[endpoint][0]}
  # Parameters of hosted services only, which the endpoint does not know and ignores.
  hosted = {'access_programs', 'background_options', 'image'}
  assert set(typing.get_type_hints(params)) - hosted <= known
