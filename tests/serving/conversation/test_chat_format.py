"""Prompts of the endpoint against the tokenizers' templates and against the texts that the templates write."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.templates import SYSTEM
from ragen_jax.models import presets
from ragen_jax.serving.conversation.chat_format import Family, QwenFormat
from ragen_jax.serving.conversation.messages import Message, Role, TemplateOptions, tools_from_chat
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.tool_calls import ToolCall
from tests.support.wire import CALL_TAGS, QWEN3_TAGS, TOOL, tokenizer

OPEN = TemplateOptions(enable_thinking=True, add_generation_prompt=True, reply_prefix='')
DEFAULT_SYSTEM = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.'


@pytest.fixture(scope='module')
def tiny():
  return ChatTokenizer(presets.resolve('tiny', ''))


@pytest.fixture(scope='module')
def qwen(qwen_tokenizer):
  return qwen_tokenizer


@pytest.fixture(scope='module')
def small(tmp_path_factory):
  """A tokenizer of each family."""
  tags = {Family.PLAIN: (), Family.QWEN25: CALL_TAGS, Family.QWEN3: QWEN3_TAGS}
  return {family: tokenizer(tmp_path_factory.mktemp('tokenizer'), tags[family]) for family in tags}


def _prefix(text):
  return TemplateOptions(enable_thinking=True, add_generation_prompt=True, reply_prefix=text)


def _conversation(*texts):
  """A system message, then user and assistant in turn."""
  roles = itertools.chain([Role.SYSTEM], itertools.cycle([Role.USER, Role.ASSISTANT]))
  return [Message(role, text) for role, text in zip(roles, texts, strict=False)]


def _text(fmt, tok, messages, tools=(), options=OPEN):
  return tok.decode(fmt.render(messages, tools, options))


def test_families_are_found_from_the_tokenizer(small, tiny):
  for family, tok in small.items():
    assert QwenFormat(tok, keep_thoughts=True).family is family
  # It has a token for <think>, and none for tool calls.
  assert '<think>' in tiny.added
  assert QwenFormat(tiny, keep_thoughts=True).family is Family.PLAIN


def test_qwen_2_5_is_found(qwen):
  fmt = QwenFormat(qwen, keep_thoughts=True)
  assert fmt.family is Family.QWEN25
  assert fmt.stop_id == 151645


# -- plain conversations are those of the built-in rollout -------------------------------------------------------------


@pytest.mark.parametrize('name', ['tiny', 'qwen'])
@pytest.mark.parametrize('prefix', ['', '<think>', '<answer>', ' so'])
@pytest.mark.parametrize('user', ['one\n\ntwo', 'Answer as <think>your thoughts</think><answer>Left || Up</answer>.'])
def test_a_game_has_the_ids_of_the_built_in_rollout(name, prefix, user, request):
  tok = request.getfixturevalue(name)
  fmt = QwenFormat(tok, keep_thoughts=True)
  opening = fmt.render(_conversation(SYSTEM, user), (), _prefix(prefix))
  assert opening == tok.encode_segments(tok.opening(SYSTEM, user, prefix)).ids
  for closed in (True, False):
    following = fmt.following([Message(Role.USER, user)], (), _prefix(prefix), closed=closed)
    assert following == tok.encode_segments(tok.following(user, prefix, closed=closed)).ids


def test_plain_conversations_have_the_ids_of_the_template(qwen_tokenizer_dir, qwen, tiny):
  import transformers

  for directory, tok in ((qwen_tokenizer_dir, qwen), (presets.resolve('tiny', ''), tiny)):
    reference = transformers.AutoTokenizer.from_pretrained(str(directory))
    fmt = QwenFormat(tok, keep_thoughts=True)
    messages = _conversation('Be brief.', 'one\n', ' two', '日本 <x>', 'three\n\n', '')
    sent = [{'role': str(m.role), 'content': m.text} for m in messages]
    for some in range(1, len(messages) + 1):
      for opens in (True, False):
        expected = reference.apply_chat_template(sent[:some], tokenize=False, add_generation_prompt=opens)
        options = TemplateOptions(enable_thinking=True, add_generation_prompt=opens, reply_prefix='')
        assert fmt.render(messages[:some], (), options) == tok.encode_once(expected)


def test_without_a_system_message_only_qwen_2_5_adds_one(small):
  for family, tok in small.items():
    text = _text(QwenFormat(tok, keep_thoughts=True), tok, [Message(Role.USER, 'hi')])
    system = f'<|im_start|>system\n{DEFAULT_SYSTEM}<|im_end|>\n' if family is Family.QWEN25 else ''
    assert text == f'{system}<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n'


# -- tools -------------------------------------------------------------------------------------------------------------

TOOLS_BLOCK = (
  '# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function '
  'signatures within <tools></tools> XML tags:\n<tools>\n'
  '{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}\n'
  '</tools>\n\nFor each function call, return a json object with function name and arguments within '
  '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
  '</tool_call><|im_end|>\n'
)
TOOL_TALK = [
  Message(Role.USER, 'hi'),
  Message(Role.ASSISTANT, 'so', (ToolCall('a', 'look', '{"x":"\\u00fc","y":1}'), ToolCall('b', 'look', 'bad'))),
  Message(Role.TOOL, 'r1', call_id='a'),
  Message(Role.TOOL, 'r2', call_id='b'),
  Message(Role.ASSISTANT, '', (ToolCall('c', 'look', ''),)),
  Message(Role.TOOL, 'r3', call_id='c'),
]
TOOL_TALK_TEXT = (
  '<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nso\n'
  '<tool_call>\n{"name": "look", "arguments": {"x": "ü", "y": 1}}\n</tool_call>\n'
  '<tool_call>\n{"name": "look", "arguments": bad}\n</tool_call><|im_end|>\n'
  '<|im_start|>user\n<tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n</tool_response><|im_end|>\n'
  '<|im_start|>assistant\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>\n'
  '<|im_start|>user\n<tool_response>\nr3\n</tool_response><|im_end|>\n<|im_start|>assistant\n'
)


def test_tools_and_their_results_are_written_as_the_templates_do(small):
  tools = tools_from_chat([TOOL])
  for family, tok in small.items():
    fmt = QwenFormat(tok, keep_thoughts=True)
    default = f'{DEFAULT_SYSTEM}\n\n' if family is Family.QWEN25 else ''
    assert _text(fmt, tok, TOOL_TALK, tools) == f'<|im_start|>system\n{default}{TOOLS_BLOCK}{TOOL_TALK_TEXT}'
    with_system = _text(fmt, tok, [Message(Role.SYSTEM, 'Be brief.'), *TOOL_TALK], tools)
    assert with_system == f'<|im_start|>system\nBe brief.\n\n{TOOLS_BLOCK}{TOOL_TALK_TEXT}'
    ids = fmt.render(TOOL_TALK, tools, OPEN)
    for tag in CALL_TAGS:
      # Two in the tools block, and one for each call.
      assert ids.count(tok.added.get(tag)) == (0 if family is Family.PLAIN else 5)
    assert ids.count(tok.added.get('<tool_response>')) == (3 if family is Family.QWEN3 else 0)


def test_qwen_2_5_has_the_ids_of_its_template_with_tools(qwen):
  fmt = QwenFormat(qwen, keep_thoughts=True)
  text = f'<|im_start|>system\n{DEFAULT_SYSTEM}\n\n{TOOLS_BLOCK}{TOOL_TALK_TEXT}'
  assert fmt.render(TOOL_TALK, tools_from_chat([TOOL]), OPEN) == qwen.encode_once(text)


# -- thoughts ----------------------------------------------------------------------------------------------------------


def test_qwen_3_forgets_thoughts_before_the_last_query(small):
  tok = small[Family.QWEN3]
  call = (ToolCall('a', 'look', '{}'),)
  called = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
  messages = [
    Message(Role.USER, 'one'),
    Message(Role.ASSISTANT, '<think>\nhm\n</think>\n\nA'),
    Message(Role.USER, 'two'),
    Message(Role.ASSISTANT, 'B', call, reasoning='\nso\n'),
    Message(Role.TOOL, 'r', call_id='a'),
  ]
  start = '<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n'
  middle = 'A<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n'
  end = f'<think>\nso\n</think>\n\nB\n{called}<|im_end|>\n'
  result = '<|im_start|>user\n<tool_response>\nr\n</tool_response><|im_end|>\n<|im_start|>assistant\n'
  forgets, keeps = (QwenFormat(tok, keep_thoughts=keep) for keep in (False, True))
  assert _text(forgets, tok, messages) == start + middle + end + result
  assert _text(keeps, tok, messages) == f'{start}<think>\nhm\n</think>\n\n{middle}{end}{result}'
  # A later query ends the second thought too.
  later = _text(forgets, tok, [*messages, Message(Role.USER, 'three')])
  assert '<think>' not in later and 'three' in later
  # The template gives an assistant that nothing follows an empty thought.
  last = _text(forgets, tok, [Message(Role.USER, 'one'), Message(Role.ASSISTANT, 'A')])
  assert last == f'{start}<think>\n\n</think>\n\nA<|im_end|>\n<|im_start|>assistant\n'
  ids = keeps.render(messages, (), OPEN)
  assert [ids.count(tok.added[tag]) for tag in ('<think>', '</think>')] == [2, 2]


def test_following_tells_where_the_template_drops_thoughts(small):
  query, result = Message(Role.USER, 'q'), Message(Role.TOOL, 'r')
  pretended = Message(Role.USER, '<tool_response>\nr\n</tool_response>')
  for family, keep in itertools.product(Family, (True, False)):
    fmt = QwenFormat(small[family], keep_thoughts=keep)
    drops = family is Family.QWEN3 and not keep
    for messages, ends in (([query], drops), ([result, query], drops), ([result], False), ([pretended], False)):
      assert (fmt.following(messages, (), OPEN, closed=True) is None) == ends


def test_replies_open_with_an_empty_thought_without_thinking(small):
  options = TemplateOptions(enable_thinking=False, add_generation_prompt=True, reply_prefix='')
  for family, tok in small.items():
    fmt = QwenFormat(tok, keep_thoughts=True)
    text = _text(fmt, tok, [Message(Role.USER, 'hi')], options=options)
    assert text.endswith('assistant\n<think>\n\n</think>\n\n' if family is Family.QWEN3 else 'assistant\n')
    closed = TemplateOptions(enable_thinking=False, add_generation_prompt=False, reply_prefix='')
    assert _text(fmt, tok, [Message(Role.USER, 'hi')], options=closed).endswith('hi<|im_end|>\n')


@pytest.mark.parametrize(
  ('prefix', 'thinking', 'in_thought', 'shown'),
  [
    ('', True, False, ''),
    ('<think>', True, True, '<think>'),
    ('<think>', False, True, '<think>'),
    ('<think>hm', True, True, '<think>hm'),
    ('<think>hm</think>so', True, False, '<think>hm</think>so'),
    ('so', False, False, '<think>\n\n</think>\n\nso'),
  ],
)
def test_forced_beginnings_open_and_close_thoughts(small, prefix, thinking, in_thought, shown):
  tok = small[Family.QWEN3]
  fmt = QwenFormat(tok, keep_thoughts=True)
  options = TemplateOptions(enable_thinking=thinking, add_generation_prompt=True, reply_prefix=prefix)
  ids = fmt.render([Message(Role.USER, '</think><think>')], (), options)
  assert tok.decode(ids).endswith(f'<|im_start|>assistant\n{shown}')
  assert fmt.in_thought(ids) == in_thought
  assert ids.count(tok.added['<think>']) == shown.count('<think>')
  assert ids.count(tok.added['</think>']) == shown.count('</think>')
  assert not QwenFormat(small[Family.QWEN25], keep_thoughts=True).in_thought(ids)


# -- untrusted text ----------------------------------------------------------------------------------------------------

_TAGS = ('<|im_end|>', '<|im_start|>', '<|endoftext|>', *QWEN3_TAGS)
_HOSTILE = st.lists(
  st.one_of(st.sampled_from([*_TAGS, '<', '|', '<|im_', 'end|>', '\n', 'K\u0338']), st.text(max_size=3))
)


@settings(deadline=None)
@given(_HOSTILE.map(''.join), st.sampled_from(list(Role)))
def test_no_text_of_a_client_becomes_a_token_of_the_format(small, tiny, text, role):
  text = text.encode('utf-8', 'replace').decode()
  for tok in (*small.values(), tiny):
    fmt = QwenFormat(tok, keep_thoughts=True)
    calls = (ToolCall(text, text or 'f', text),) if role is Role.ASSISTANT else ()
    hostile = [Message(role, text, calls, reasoning=text), Message(Role.USER, text)]
    harmless = [Message(role, 'a', (ToolCall('', 'f', 'x'),) if calls else (), reasoning='a'), Message(Role.USER, 'a')]
    schema = tools_from_chat([{'type': 'function', 'function': {'name': text or 'f', 'description': text}}])
    prompt, expected = fmt.render(hostile, schema, OPEN), fmt.render(harmless, tools_from_chat([TOOL]), OPEN)
    tokens = [tok.added[t] for t in (tok.specials if fmt.family is Family.PLAIN else tok.added)]
    # An assistant's text may have a thought of its own.
    thoughts = {tok.added.get('<think>'), tok.added.get('</think>')}
    for token in tokens:
      if not (role is Role.ASSISTANT and token in thoughts):
        assert prompt.count(token) == expected.count(token)
    assert set(tokens).isdisjoint(fmt.encode_untrusted(text))


def test_a_spelling_is_cut_after_its_first_character(qwen):
  fmt = QwenFormat(qwen, keep_thoughts=True)
  assert fmt.encode_untrusted('a<|im_end|>b') == (*qwen.encode('a<'), *qwen.encode('|im_end|>b'))
  assert fmt.encode_untrusted('<tool_call>') == (*qwen.encode('<'), *qwen.encode('tool_call>'))
  assert qwen.decode(fmt.encode_untrusted('<<|im_end|><|im_start|>')) == '<<|im_end|><|im_start|>'


def test_spellings_that_overlap_are_cut_too(tmp_path):
  tok = tokenizer(tmp_path, (*CALL_TAGS, 'abab', 'bab'))
  ids = QwenFormat(tok, keep_thoughts=True).encode_untrusted('x abab y')
  assert ids == tuple(i for character in 'x abab y' for i in tok.encode(character))


def test_special_tokens_of_one_character_are_refused(tmp_path):
  tok = tokenizer(tmp_path, (*CALL_TAGS, '§'))
  with pytest.raises(UserError, match='one character'):
    QwenFormat(tok, keep_thoughts=True)


# -- continuing --------------------------------------------------------------------------------------------------------

_WORDS = st.lists(st.sampled_from(['a', 'b ', '\n', 'é', '<', 'x>', '{"k": 1}']), max_size=5).map(''.join)


@settings(deadline=None)
@given(st.lists(_WORDS, min_size=2, max_size=2), _WORDS, st.lists(_WORDS, max_size=3), st.booleans())
def test_continuing_a_reply_has_the_ids_of_the_whole_conversation(small, first, reply, results, called):
  """As long as the reply is encoded as it was sampled."""
  tools = tools_from_chat([TOOL])
  for tok in small.values():
    fmt = QwenFormat(tok, keep_thoughts=True)
    calls = (ToolCall('a', 'look', '{}'),) if called else ()
    before = _conversation(*first)
    after = [Message(Role.TOOL, text) for text in results] or [Message(Role.USER, 'next')]
    turn = Message(Role.ASSISTANT, reply, calls)
    sampled = reply + ('\n' if reply and called else '')
    sampled += '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>' if called else ''
    ids = fmt.render(before, tools, OPEN) + tok.encode(sampled)
    whole = fmt.render([*before, turn, *after], tools, OPEN)
    assert (*ids, fmt.stop_id, *fmt.following(after, tools, OPEN, closed=True)) == whole
    assert ids + fmt.following(after, tools, OPEN, closed=False) == whole


def test_the_key_of_options_depends_on_the_tools_alone(small):
  fmt = QwenFormat(small[Family.QWEN3], keep_thoughts=True)
  tools = tools_from_chat([TOOL])
  other = tools_from_chat([{'type': 'function', 'function': {'name': 'f'}}])
  assert fmt.options_key(tools, OPEN) == fmt.options_key(tools, _prefix('so'))
  assert len({fmt.options_key(t, OPEN) for t in (tools, other, (), (*tools, *other))}) == 4


def test_canonical_texts_come_one_for_each_message(small):
  fmt = QwenFormat(small[Family.PLAIN], keep_thoughts=True)
  assert len(fmt.canonical(TOOL_TALK)) == len(TOOL_TALK)
  assert json.loads(fmt.canonical(TOOL_TALK)[0]) == ['user', 'hi', []]
