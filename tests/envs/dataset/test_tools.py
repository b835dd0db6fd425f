"""Functions of users as tools: how the policy reads of them, the arguments that they take, and all that they break."""

from __future__ import annotations

import json
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.envs.dataset.tools import CUT_MARK, FunctionTool, WrongArguments, cut
from ragen_jax.utils.threads import Fault
from tests.support import user_tools
from tests.support.environments import raises_one_line
from tests.support.stopped_clock import stop_clock
from tests.support.user_tools import TOOLS


def tool(name, **options):
  return FunctionTool(function=f'{TOOLS}:{name}', **options)


def mistake(name, argument):
  """What the policy reads about an argument that its tool does not take."""
  with pytest.raises(WrongArguments) as error:
    tool(name).read(argument)
  return str(error.value)


# -- what is read from a function --------------------------------------------------------------------------------------


def test_a_function_describes_itself():
  shout = tool('shout')
  assert (shout.name, shout.help, shout.usage) == ('shout', 'Writes a text in capitals.', 'shout[text]')
  assert (shout.budget, shout.timeout_s, shout.max_chars, shout.workers) == (0, 10.0, 4000, 1)
  assert tool('shout', help=' Of my\n own ').help == 'Of my own'
  assert tool('untyped').schema == shout.schema
  assert tool('clock').usage == 'clock[]'
  assert tool('zone').usage == 'zone[name]'
  book = tool('book')
  assert book.usage == (
    'book[{"city": text, "nights": whole number, "price": number (optional), "breakfast": true or false (optional), '
    '"room": "small" or "large" (optional)}]'
  )
  assert book.schema == {
    'type': 'object',
    'properties': {
      'city': {'type': 'string'},
      'nights': {'type': 'integer'},
      'price': {'type': 'number'},
      'breakfast': {'type': 'boolean'},
      'room': {'type': 'string', 'enum': ['small', 'large']},
    },
    'required': ['city', 'nights'],
    'additionalProperties': False,
  }
  json.dumps(book.schema)


@pytest.mark.parametrize(
  ('name', 'options', 'message'),
  [
    ('missing', {}, r"tools='tests.*:missing' cannot be imported .*; allowed: what Python can import"),
    ('constant', {}, r"tools='.*:constant' is int; allowed: a function"),
    ('silent', {}, r"tool_options.silent: help=''; allowed: a line about the tool, or a docstring of tests.*:silent"),
    ('positional', {}, r"tools='.*': parameter text: 'str'; allowed: a function with parameters that are text, int"),
    ('several', {}, r"tools='.*': parameter \*texts: 'str'; allowed: "),
    ('listed', {}, r"tools='.*': parameter texts: 'list\[str\]'; allowed: "),
    ('unknown', {}, r"tools='.*': parameters cannot be read \(NameError: .*\); allowed: "),
    ('Loud', {}, r"tools='.*:Loud'; allowed: functions with a name in snake case"),
    ('shout', {'budget': -1}, 'tool_options.shout: budget=-1; allowed: whole numbers from 0'),
    ('shout', {'timeout_s': 0}, 'tool_options.shout: timeout_s=0; allowed: seconds, above 0'),
    ('shout', {'max_chars': 99}, 'tool_options.shout: max_chars=99; allowed: whole numbers from 100'),
    ('shout', {'workers': 0}, 'tool_options.shout: workers=0; allowed: whole numbers from 1'),
    ('shout', {'help': 7}, 'tool_options.shout: help=7; allowed: text'),
  ],
)
def test_what_is_no_tool_is_refused_in_one_line(name, options, message):
  with raises_one_line(f'^{message}'):
    tool(name, **options)


def test_a_function_in_a_file_is_a_tool(tmp_path):
  path = tmp_path / 'my_tools.py'
  path.write_text('def twice(text):\n  """Says it twice."""\n  return text * 2\n', encoding='utf-8')
  twice = FunctionTool(function=f'{path}:twice')
  assert (twice.name, twice.call([twice.read('ab')])) == ('twice', ['twice: abab'])


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_a_text_is_taken_as_it_is_and_several_arguments_are_json():
  assert tool('shout').read('{"text": "a"}') == {'text': '{"text": "a"}'}
  assert tool('zone').read('') == {} and tool('zone').read('CET') == {'name': 'CET'}
  assert tool('clock').read('') == tool('clock').read('{}') == {}
  arguments = {'city': 'Turin [TO]', 'nights': 2, 'price': 80, 'breakfast': True, 'room': 'large'}
  book = tool('book')
  assert book.read(json.dumps(arguments)) == arguments
  assert book.call([book.read('{"city": "Turin", "nights": 2, "price": 1.5}')]) == [
    "book: ('Turin', 2, 1.5, False, 'small')"
  ]


@pytest.mark.parametrize(
  ('name', 'argument', 'told'),
  [
    ('shout', '', 'The text is empty.'),
    ('clock', 'now', 'The argument is not a JSON object; write clock[].'),
    ('clock', '{"a": 1}', "'a' is no argument; write clock[]."),
    ('book', '', 'The argument is not a JSON object; write book[{"city": text, '),
    ('book', '["Turin", 2]', 'The argument is not a JSON object; write '),
    ('book', '{"city": "Turin"', 'The argument is not a JSON object; write '),
    ('book', '[' * 100_000, 'The argument is not a JSON object; write '),
    ('book', '{"city": "Turin"}', 'The argument "nights" is missing; write book['),
    ('book', '{"city": "Turin", "nights": 2, "stars": 5}', "'stars' is no argument; write book["),
    ('book', '{"city": 3, "nights": 2}', '"city" must be: text.'),
    ('book', '{"city": "Turin", "nights": 2.0}', '"nights" must be: whole number.'),
    ('book', '{"city": "Turin", "nights": true}', '"nights" must be: whole number.'),
    ('book', '{"city": "Turin", "nights": 2, "price": NaN}', 'The argument is not a JSON object; write '),
    ('book', '{"city": "Turin", "nights": 2, "price": 1e999}', 'The argument is not a JSON object; write '),
    ('book', '{"city": "Turin", "nights": 2, "price": false}', '"price" must be: number.'),
    ('book', '{"city": "Turin", "nights": 2, "price": "80"}', '"price" must be: number.'),
    ('book', '{"city": "Turin", "nights": 2, "breakfast": 1}', '"breakfast" must be: true or false.'),
    ('book', '{"city": "Turin", "nights": 2, "room": "huge"}', '"room" must be: "small" or "large".'),
    ('book', '{"city": "Turin", "nights": 2, "room": ["small"]}', '"room" must be: "small" or "large".'),
  ],
)
def test_arguments_that_a_tool_does_not_take_are_told_to_the_policy(name, argument, told):
  assert mistake(name, argument).startswith(told)


VALUES = [None, True, False, 0, -1, 2, 10**400, 2.0, 1.5, float('nan'), float('inf'), -float('inf'), '', 'Turin', '2']
FIELDS = ('city', 'nights', 'price', 'breakfast', 'room', 'x')
ARGUMENTS = {field: st.sampled_from([*VALUES, 'small', 'large', [], ['small'], {}, {'small': 1}]) for field in FIELDS}


@settings(deadline=None, max_examples=100)
@given(st.fixed_dictionaries({}, optional=ARGUMENTS))
def test_what_is_read_fits_the_annotations_and_what_is_not_read_does_not(arguments):
  """Against the annotations of the function, by hand."""
  fits = {'city', 'nights'} <= set(arguments) and 'x' not in arguments
  for field, kinds in (('city', [str]), ('nights', [int]), ('price', [int, float]), ('breakfast', [bool])):
    fits &= type(arguments.get(field, kinds[0]())) in kinds
  fits &= str(arguments.get('price')) not in ('nan', 'inf', '-inf')
  fits &= arguments.get('room', 'small') in ('small', 'large')
  try:
    read = tool('book').read(json.dumps(arguments))
  except WrongArguments:
    assert not fits
  else:
    assert fits and read == arguments


# -- calls -------------------------------------------------------------------------------------------------------------


def test_a_batch_is_called_in_order_and_wrong_arguments_are_no_faults():
  results = tool('shout').call([{'text': 'a'}, {'text': 'no'}, {'text': 'b\nc'}])
  assert results[0] == 'shout: A' and results[2] == 'shout: B\nC'
  assert isinstance(results[1], WrongArguments) and str(results[1]) == 'No capitals for "no".'


@pytest.mark.parametrize(
  ('text', 'kind', 'detail'),
  [
    ('raise', 'broken raised KeyError', "'secret of the server' (user_tools.py:"),
    ('exit', 'broken raised SystemExit', '3 ('),
    ('number', 'broken returned no usable text', 'observation is not a string: 7'),
    ('nothing', 'broken returned no usable text', 'observation is not a string: None'),
    ('bytes', 'broken returned no usable text', "observation is not a string: b'text'"),
    ('long', 'broken returned no usable text', 'observation is longer than 1048576 characters'),
  ],
)
def test_a_function_that_fails_is_a_fault_of_its_row_alone(text, kind, detail):
  first, result, last = tool('broken').call([{'text': 'a'}, {'text': text}, {'text': 'z'}])
  assert (first, last) == ('broken: a', 'broken: z')
  assert isinstance(result, Fault) and result.kind == kind and result.detail.startswith(detail)


def test_texts_of_foreign_types_become_plain_ones():
  results = tool('broken').call([{'text': name} for name in ('text', 'half', 'empty')])
  assert results == ['broken: fine', 'broken: half ? of it', 'broken returned an empty text.']
  assert {type(result) for result in results} == {str}


def test_a_function_that_hangs_is_a_fault_and_the_others_are_called(monkeypatch):
  clock = stop_clock(monkeypatch, 'ragen_jax.utils.threads')
  monkeypatch.setattr('tests.support.user_tools.time', types.SimpleNamespace(sleep=lambda s: clock.hang(5.0)))
  try:
    results = tool('broken', timeout_s=4.0).call([{'text': 'a'}, {'text': 'hang'}, {'text': 'z'}])
  finally:
    clock.release.set()
  assert results == ['broken: a', Fault('broken took longer than 4 s', hung=True), 'broken: z']


def test_several_workers_call_a_function_at_a_time(monkeypatch):
  monkeypatch.setattr(user_tools, 'CALLED', [])
  assert tool('pairs', workers=2).call([{'text': 'a'}, {'text': 'b'}]) == ['pairs: a', 'pairs: b']
  assert len(set(user_tools.CALLED)) == 2


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=60), st.integers(len(CUT_MARK), 40))
def test_a_text_is_cut_with_a_mark_if_it_is_too_long(text, most):
  result = cut(text, most)
  assert len(result) <= most
  if len(text) <= most:
    assert result == text
  else:
    assert len(result) == most and result.endswith(' [cut]') and text.startswith(result.removesuffix(' [cut]'))
