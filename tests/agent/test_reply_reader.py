"""Replies: tags, tool calls, thoughts; a streamed reply has the parts of the whole reply."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.reply_reader import BadCalls, CallDone, ContentDelta, ParsedReply, ThoughtDelta
from ragen_jax.serving.conversation.chat_format import Family, QwenFormat
from ragen_jax.serving.conversation.matching import said_again
from ragen_jax.serving.conversation.messages import Role, tools_from_chat
from ragen_jax.serving.types import Finish
from ragen_jax.utils.tool_calls import Problem, ToolCall, read_call
from tests.support.chat_templates import TOOL_KINDS, write_tokenizer
from tests.support.wire import CALL_TAGS, QWEN3_TAGS, generated, pieces, reader, tokenizer

GOOD = '<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>'
BAD = '<tool_call>\n{"name": "f", "arguments": {"a": False}}\n</tool_call>'


@pytest.fixture(scope='module')
def formats(tmp_path_factory):
  """A tokenizer and a format of each family."""
  tags = {Family.PLAIN: (), Family.QWEN25: CALL_TAGS, Family.QWEN3: QWEN3_TAGS}
  tokenizers = {family: tokenizer(tmp_path_factory.mktemp('tokenizer'), tags[family]) for family in tags}
  return {family: (tok, QwenFormat(tok, keep_thoughts=True)) for family, tok in tokenizers.items()}


def _read(family, text, **changes):
  """The reply in one piece."""
  tok, fmt = family
  whole = reader(fmt, **changes)
  whole.feed((*tok.encode(text), fmt.stop_id), text)
  whole.finish()
  return whole.reply()


def _call(arguments, k=0, name='f'):
  return ToolCall(f'call_{k}', name, arguments)


@pytest.mark.parametrize('family', list(Family))
@pytest.mark.parametrize(
  ('text', 'content', 'calls'),
  [
    ('hello', 'hello', []),
    ('', '', []),
    (' \n a\n\n', ' \n a\n\n', []),
    ('\n', '\n', []),
    (GOOD, '', [_call('{"a":1}')]),
    (f'Look.\n{GOOD}\n{GOOD}', 'Look.', [_call('{"a":1}'), _call('{"a":1}', 1)]),
    (f'Look.\n\n{GOOD}\n', 'Look.\n', [_call('{"a":1}')]),
    (f'\n {GOOD}\n\nthen', '\nthen', [_call('{"a":1}')]),
    ('<tool_call>{"arguments": {"x": "</tool"}, "name": "f"}</tool_call>', '', [_call('{"x": "</tool"}')]),
    ('<tool_call>{"name": "f"}</tool_call>', '', [_call('{}')]),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', '', [_call('{}')]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', '', [_call('{"a": 1}')]),
    ('a </tool_call> b', 'a </tool_call> b', []),
    ('<tool_cal', '<tool_cal', []),
  ],
)
def test_content_and_calls(formats, family, text, content, calls):
  read = _read(formats[family], text)
  assert (read.content, list(read.calls), read.problems) == (content, calls, ())


@pytest.mark.parametrize('family', list(Family))
@pytest.mark.parametrize(
  ('text', 'problem', 'as_arguments'),
  [
    (BAD, Problem.INVALID_JSON, '{"a": False}'),
    ('<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>', Problem.INVALID_JSON, '[1]'),
    ('<tool_call>\n{"name": "f", "arguments": "x"}\n</tool_call>', Problem.INVALID_JSON, 'x'),
    ('<tool_call>\n{"name": "f", "arguments": {}} x\n</tool_call>', Problem.INVALID_JSON, '{}'),
    ('<tool_call>\n{"name": "f", "arguments": {}', Problem.UNCLOSED_BLOCK, '{}'),
    ('<tool_call>\n{"name": "f", "argum', Problem.UNCLOSED_BLOCK, '{}'),
    ('<tool_call>\n{"arguments": {}}\n</tool_call>', Problem.MISSING_NAME, None),
    ('<tool_call>\n{"name": 3}\n</tool_call>', Problem.MISSING_NAME, None),
    ('<tool_call>\nlook(1)\n</tool_call>', Problem.INVALID_JSON, None),
    ('<tool_call></tool_call>', Problem.INVALID_JSON, None),
    ('<tool_call>', Problem.UNCLOSED_BLOCK, None),
    (f'<tool_call>{GOOD}', Problem.INVALID_JSON, None),
  ],
)
def test_bad_calls_are_content_or_calls_with_raw_arguments(formats, family, text, problem, as_arguments):
  as_content = _read(formats[family], f'So.\n{text}')
  assert as_content == ParsedReply(f'So.\n{text}', '', (), (problem,), 0)
  read = _read(formats[family], f'So.\n{text}', bad_calls=BadCalls.ARGUMENTS)
  assert read.problems == (problem,)
  if as_arguments is None:
    assert (read.content, read.calls) == (f'So.\n{text}', ())
  else:
    assert (read.content, read.calls) == ('So.', (_call(as_arguments),))


CITY = (
  '<tool_call>\n<function=look>\n<parameter=at>\n5\n</parameter>\n<parameter=n>\n5\n</parameter>\n'
  '</function>\n</tool_call>'
)


@pytest.mark.parametrize(
  ('text', 'content', 'calls', 'problem'),
  [
    (f'Look.\n\n{CITY}\n{CITY}', 'Look.', [0, 1], None),
    (f'Look.\n{CITY}', 'Look.\n', [0], None),
    (GOOD, GOOD, [], Problem.INVALID_PARAMETERS),
    (CITY.replace('</function>\n', ''), None, [], Problem.INVALID_PARAMETERS),
    (CITY.removesuffix('</tool_call>'), None, [], Problem.UNCLOSED_BLOCK),
  ],
)
def test_calls_with_parameters_whole_and_in_pieces(tmp_path, text, content, calls, problem):
  tok = ChatTokenizer(write_tokenizer(tmp_path, TOOL_KINDS['qwen3.5']))
  properties = {'at': {'type': 'string'}, 'n': {'type': 'integer'}}
  tool = {'type': 'function', 'function': {'name': 'look', 'parameters': {'type': 'object', 'properties': properties}}}
  family, tools = (tok, QwenFormat(tok, keep_thoughts=True)), tools_from_chat([tool])
  read = _read(family, text, tools=tools)
  assert read.content == (text if content is None else content)
  assert list(read.calls) == [_call('{"at": "5", "n": 5}', k, 'look') for k in calls]
  assert read.problems == (() if problem is None else (problem,))
  reply = generated(tok, text)
  for seed in range(20):
    streamed = reader(family[1], tools=tools)
    for piece in pieces(tok, reply, seed):
      streamed.feed(piece.ids, piece.text)
    streamed.finish()
    if ''.join(piece.text for piece in pieces(tok, reply, seed)) == text:
      assert streamed.reply() == read


def test_a_good_call_beside_a_bad_one_is_a_call(formats):
  read = _read(formats[Family.QWEN25], f'{GOOD}\n{BAD}\n{GOOD}')
  assert read.calls == (_call('{"a":1}'), _call('{"a":1}', 1))
  assert (read.content, read.problems) == (BAD, (Problem.INVALID_JSON,))


def test_only_the_first_call_is_kept_without_parallel_calls(formats):
  read = _read(formats[Family.QWEN3], f'{GOOD}\n{GOOD}', parallel=False)
  assert (read.content, read.calls) == ('', (_call('{"a":1}'),))


def test_calls_that_are_not_asked_for_are_content(formats):
  for family in formats.values():
    assert _read(family, f'a\n{GOOD}', parse_calls=False) == ParsedReply(f'a\n{GOOD}', '', (), (), 0)


# -- thoughts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('text', 'in_thought', 'expected'),
  [
    ('<think>\nhm\n</think>\n\nso', False, ParsedReply('so', 'hm', (), (), 6)),
    ('\n<think>\n\n</think>\n\n so', False, ParsedReply(' so', '', (), (), 4)),
    ('<think>hm</think>\n\n', False, ParsedReply('', 'hm', (), (), 4)),
    ('hm\n</think>so', True, ParsedReply('so', 'hm', (), (), 4)),
    ('<think>hm', False, ParsedReply('', 'hm', (), (), 4)),
    ('hm<tool_call>', True, ParsedReply('', 'hm<tool_call>', (), (), 4)),
    ('<think></think>', False, ParsedReply('', '', (), (), 2)),
    ('so <think>x</think>', False, ParsedReply('so <think>x</think>', '', (), (), 0)),
    ('a</think>b', False, ParsedReply('a</think>b', '', (), (), 0)),
    ('<think>a<think></think>\n\nb</think>', False, ParsedReply('b</think>', 'a<think>', (), (), 4)),
    (f'<think>hm</think>\n\n{GOOD}', False, ParsedReply('', 'hm', (_call('{"a":1}'),), (), 4)),
  ],
)
def test_thoughts_of_qwen_3(formats, text, in_thought, expected):
  tok, fmt = formats[Family.QWEN3]
  prompt = (tok.added['<think>'],) if in_thought else ()
  read = _read((tok, fmt), text, prompt=prompt)
  assert read.content == expected.content
  assert (read.thought, read.calls, read.problems) == (expected.thought, expected.calls, ())
  # The stop token belongs to a thought that never ends.
  assert read.thought_tokens == expected.thought_tokens


def test_other_families_know_no_thoughts(formats):
  for family in (Family.PLAIN, Family.QWEN25):
    text = '<think>a</think><answer>b</answer>'
    assert _read(formats[family], text) == ParsedReply(text, '', (), (), 0)


def test_clients_may_send_the_thought_and_the_prefix_back(formats):
  read = _read(formats[Family.QWEN3], '<think>\nhm\n</think>\n\nso')
  assert [m.text for m in said_again(read, 'P')] == [
    'so',
    'Pso',
    '<think>\nhm\n</think>\n\nso',
    '<think>hm</think>so',
  ]
  assert all(m.role is Role.ASSISTANT and m.reasoning == 'hm' for m in said_again(read, 'P'))
  assert [m.text for m in said_again(ParsedReply('so', '', (), (), 0), '')] == ['so']


# -- tags by id and by text --------------------------------------------------------------------------------------------


def test_a_tag_counts_by_its_token_where_there_is_one(formats):
  """The same text in other tokens is content."""
  for family in (Family.QWEN25, Family.QWEN3):
    tok, fmt = formats[family]
    spelled = reader(fmt)
    assert spelled.feed(fmt.encode_untrusted(GOOD), GOOD) == [ContentDelta(GOOD)]
    # A spelling before the token does not shift it.
    ids = (*fmt.encode_untrusted('<tool_call>'), *tok.encode(GOOD))
    both = reader(fmt)
    both.feed(ids, tok.decode(ids))
    assert both.reply().content == '<tool_call>'
    assert len(both.reply().calls) == 1


def test_a_text_that_is_not_that_of_the_ids_is_content(formats):
  tok, fmt = formats[Family.QWEN25]
  odd = reader(fmt)
  odd.feed(tok.encode(f'a{GOOD}'), 'other text, ' * 20)
  odd.finish()
  assert odd.reply() == ParsedReply('other text, ' * 20, '', (), (), 0)


def test_a_stop_text_can_cut_a_tag(formats):
  """The ids go on behind the text."""
  tok, fmt = formats[Family.QWEN25]
  cut = reader(fmt)
  cut.feed(tok.encode(f'a{GOOD}'), 'a<tool')
  assert cut.finish() == [ContentDelta('<tool')]
  assert cut.reply() == ParsedReply('a<tool', '', (), (), 0)


def test_text_is_held_back_until_it_is_decided(formats):
  _, fmt = formats[Family.PLAIN]
  one = reader(fmt)
  sent = [one.feed((0,), character) for character in f'ab\n\nc <t\n{GOOD}d']
  shown = [events for events in sent if events]
  assert shown[:2] == [[ContentDelta('a')], [ContentDelta('b')]]
  assert shown[2:4] == [[ContentDelta('\n\nc')], [ContentDelta(' ')]]
  # '<t' is held until the next character, and the newline until the call is known to be one.
  assert shown[4:] == [[ContentDelta('<t')], [CallDone(_call('{"a":1}'))], [ContentDelta('d')]]
  assert one.finish() == []


# -- streams -----------------------------------------------------------------------------------------------------------

_PARTS = st.sampled_from(
  [GOOD, BAD, *QWEN3_TAGS, 'a', ' ', '\n', '\n\n', 'é', '🙂', '<', '</', '<tool', '{"name": "f"', '}', '"', '\\', '[']
)


@settings(deadline=None, max_examples=150)
@given(
  st.lists(_PARTS, max_size=14).map(''.join),
  st.sampled_from(list(Family)),
  st.booleans(),
  st.sampled_from(list(BadCalls)),
  st.integers(0, 2**20),
  st.integers(0, 40),
  st.sampled_from([Finish.STOP, Finish.LENGTH]),
)
def test_a_streamed_reply_is_the_whole_reply(formats, text, family, in_thought, bad_calls, seed, cut, finish):
  tok, fmt = formats[family]
  prompt = (tok.added['<think>'],) if in_thought and family is Family.QWEN3 else ()
  reply = generated(tok, text, finish=finish)
  if cut < len(text):  # a stop text ended the reply
    reply = generated(tok, text[:cut], ids=reply.ids, finish=Finish.STOP)
  whole = reader(fmt, prompt, bad_calls=bad_calls)
  whole.feed(reply.ids, reply.text)
  whole.finish()
  streamed = reader(fmt, prompt, bad_calls=bad_calls)
  events, ids, shown = [], 0, 0
  for piece in pieces(tok, reply, seed):
    events += streamed.feed(piece.ids, piece.text)
    ids, shown = ids + len(piece.ids), shown + len(piece.text)
  events += streamed.feed(reply.ids[ids:], reply.text[shown:])
  events += streamed.finish()
  read = streamed.reply()
  assert read == whole.reply()
  assert ''.join(e.text for e in events if isinstance(e, ContentDelta)) == read.content
  assert ''.join(e.text for e in events if isinstance(e, ThoughtDelta)) == read.thought
  assert tuple(e.call for e in events if isinstance(e, CallDone)) == read.calls


@settings(deadline=None)
@given(st.text(alphabet='ab<>/{}":,\n \\toolcan_', max_size=60))
def test_without_tags_the_content_is_the_text(formats, text):
  for family in formats.values():
    if not any(tag in text for tag in QWEN3_TAGS):
      assert _read(family, text).content == text


# -- calls -------------------------------------------------------------------------------------------------------------

_JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
  max_leaves=8,
)


@given(st.text(min_size=1, max_size=5), st.dictionaries(st.text(max_size=3), _JSON, max_size=3), st.booleans(), _JSON)
def test_arguments_come_back_as_they_were_written(name, arguments, compact, other):
  separators = (',', ':') if compact else (', ', ': ')
  written = json.dumps(arguments, separators=separators)
  block = f'\n {{"other": {json.dumps(other)} , "name" : {json.dumps(name)}, "arguments" :\t{written} }}\n'
  assert read_call(block) == (name, written, None)


@given(st.text(alphabet='{}[]":,\\ \nnameargutsf1.-', max_size=40))
def test_every_text_is_a_call_or_a_problem(text):
  try:
    value = json.loads(text)
  except ValueError:
    value = None
  name, arguments, problem = read_call(text)
  if problem is None:
    assert value['name'] == name and isinstance(json.loads(arguments), dict)
  else:
    fine = isinstance(value, dict) and isinstance(value.get('name'), str) and value['name']
    given = value.get('arguments') if fine else None
    assert not fine or not (given is None or isinstance(given, dict))


def _steps(function):
  """The number of lines of Python that a call runs."""
  count = 0

  def trace(*_):
    nonlocal count
    count += 1
    return trace

  sys.settrace(trace)
  try:
    function()
  finally:
    sys.settrace(None)
  return count


@pytest.mark.parametrize('unit', ['<tool_call>', '\n', '<', '<tool_call></tool_call>', '{"a":', '[', '"', 'a\n', '</t'])
@pytest.mark.parametrize('family', [Family.PLAIN, Family.QWEN3])
def test_the_work_grows_with_the_length(formats, family, unit):
  """Lines of Python and characters that are scanned; a quadratic reader would do a hundred times as much."""
  tok, fmt = formats[family]

  def feed(n):
    one = reader(fmt, bad_calls=BadCalls.ARGUMENTS)
    ids = tok.encode(unit)
    for _ in range(n):
      one.feed(ids, unit)
    one.finish()

  feed(10)
  assert _steps(lambda: feed(1000)) < 20 * _steps(lambda: feed(100))
