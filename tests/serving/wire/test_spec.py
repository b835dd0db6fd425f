"""Fields that several endpoints share, and the parameters of the engine."""

from __future__ import annotations

import dataclasses

import pytest

from ragen_jax.serving.errors import ApiError
from ragen_jax.serving.types import SamplingParams
from ragen_jax.serving.wire.answers import ENDPOINTS
from ragen_jax.serving.wire.spec import Kind, header_warnings
from tests.support.wire import DEFAULTS, TOOL, limits


def _parse(changes, **of_limits):
  return ENDPOINTS[Kind.CHAT].parse(
    {'model': 'policy', 'messages': [{'role': 'user', 'content': 'hi'}]} | changes, limits(**of_limits)
  )


def test_what_is_not_asked_for_is_the_server_s():
  params, changed = _parse({}).sampling_params(DEFAULTS, fixed=False)
  assert (params, changed) == (DEFAULTS, ())


def test_what_is_asked_for_holds_unless_the_trainer_fixes_it():
  asked = {'temperature': 0.5, 'top_p': 0.9, 'top_k': 5, 'max_tokens': 7, 'stop': ['a', 'b', 'a']}
  spec = _parse(asked | {'logprobs': True, 'top_logprobs': 3})
  params, changed = spec.sampling_params(DEFAULTS, fixed=False)
  assert params == SamplingParams(0.5, 0.9, 5, 7, ('a', 'b'), 3)
  assert changed == ()
  params, changed = spec.sampling_params(DEFAULTS, fixed=True)
  assert params == SamplingParams(1.0, 1.0, 0, 7, ('a', 'b'), 3)
  assert changed == ('temperature', 'top_p', 'top_k')
  assert header_warnings(spec, changed) == {'x-ragen-changed': 'temperature, top_p, top_k'}
  same = dataclasses.replace(DEFAULTS, temperature=0.5, top_p=0.9, top_k=5)
  assert spec.sampling_params(same, fixed=True)[1] == ()
  assert header_warnings(spec, ()) == {}


def test_no_reply_is_longer_than_the_server_s():
  params, changed = _parse({'max_tokens': 900}).sampling_params(DEFAULTS, fixed=False)
  assert (params.max_tokens, changed) == (DEFAULTS.max_tokens, ('max_tokens',))


def test_tiny_temperatures_take_the_likeliest_token():
  assert [_parse({'temperature': t}).sampling.temperature for t in (0, 1e-8, 1e-3)] == [0.0, 0.0, 1e-3]
  assert _parse({'top_k': -1}).sampling.top_k == 0


def test_the_newer_name_of_the_budget_wins():
  assert _parse({'max_tokens': 5, 'max_completion_tokens': 6}).sampling.max_tokens == 6
  assert _parse({'max_tokens': 5}).sampling.max_tokens == 5


def test_the_model_names_the_agent():
  spec = _parse({'model': 'policy:writer'})
  assert (spec.model, spec.agent) == ('policy', 'writer')
  assert _parse({}).agent == ''


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('model', ''),
    ('temperature', 2.1),
    ('temperature', -1),
    ('top_p', 0),
    ('top_p', 1.5),
    ('top_k', -2),
    ('max_tokens', 0),
    ('max_tokens', 1001),
    ('n', 0),
    ('n', 9),
    ('seed', 2**63),
    ('stop', ['a'] * 5),
    ('stop', ''),
    ('stop', [1]),
    ('stop', {'a': 1}),
    ('stop', 'a' * 257),
    ('messages', [{'role': 'user', 'content': 'a'}] * 51),
    ('tools', [TOOL] * 9),
    ('tool_choice', 'sometimes'),
    ('response_format', 'json'),
    ('response_format', {'type': 'xml'}),
    ('chat_template_kwargs', {'enable_thinking': 'no'}),
    ('stream', 1),
    ('metadata', 'x'),
  ],
)
def test_wrong_values_are_refused(field, value):
  with pytest.raises(ApiError) as e:
    _parse({field: value})
  assert e.value.status == 400
  assert e.value.param.startswith(field)
  assert e.value.message.startswith(field)


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('tool_choice', 'required'),
    ('tool_choice', {'type': 'function', 'function': {'name': 'look'}}),
    ('response_format', {'type': 'json_object'}),
    ('response_format', {'type': 'json_schema', 'json_schema': {}}),
  ],
)
def test_constraints_are_refused_or_accepted_with_a_warning(field, value):
  with pytest.raises(ApiError, match='constrained decoding'):
    _parse({field: value, 'tools': [TOOL]}, lenient=False)
  spec = _parse({field: value, 'tools': [TOOL]})
  assert spec.parse_calls
  assert header_warnings(spec, ()) == {'x-ragen-warning': f'{field} is not enforced'}


def test_calls_are_read_if_there_are_tools():
  assert not _parse({}).parse_calls
  assert not _parse({'tools': []}).parse_calls
  assert _parse({'tools': [TOOL], 'tool_choice': 'auto'}).parse_calls
  spec = _parse({'tools': [TOOL], 'tool_choice': 'none'})
  assert not spec.parse_calls
  assert spec.tools  # they stay in the prompt, so that the conversation goes on
  assert spec.warnings == _parse({'response_format': {'type': 'text'}}).warnings == ()
