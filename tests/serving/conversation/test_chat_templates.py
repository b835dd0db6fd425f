"""Prompts of the endpoint for the chat formats of several model families, against their templates in `transformers`."""

from __future__ import annotations

import dataclasses
import json

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.chat_template import Thoughts
from ragen_jax.serving.conversation.chat_format import Family, QwenFormat
from ragen_jax.serving.conversation.messages import Message, Role, TemplateOptions, from_chat, tools_from_chat
from ragen_jax.serving.errors import ApiError
from ragen_jax.utils.tool_calls import ToolCall
from tests.agent.test_chat_template import REAL, reference
from tests.support.chat_templates import KINDS, TOOL_KINDS, write_tokenizer
from tests.support.wire import TOOL, reader

OPEN = TemplateOptions(enable_thinking=True, add_generation_prompt=True, reply_prefix='')
CLOSED = dataclasses.replace(OPEN, add_generation_prompt=False)
SYSTEM, USER, ASSISTANT = Role.SYSTEM, Role.USER, Role.ASSISTANT
TALK = [(USER, 'one\n'), (ASSISTANT, ' two'), (USER, '\u65e5\u672c <x>'), (ASSISTANT, 'three\n\n'), (USER, '')]
THOUGHTS = [(USER, 'one'), (ASSISTANT, '<think>\nhm\n</think>\n\nA'), (USER, 'two'), (ASSISTANT, 'B'), (USER, 'three')]


@pytest.fixture(scope='module')
def made(tmp_path_factory):
  directories = {name: write_tokenizer(tmp_path_factory.mktemp(name), kind) for name, kind in KINDS.items()}
  return {name: (ChatTokenizer(path), reference(path)) for name, path in directories.items()}


@pytest.fixture(scope='module', params=[*KINDS, 'shared', *REAL])
def pair(request, made):
  """A tokenizer of ours and the same one of `transformers`."""
  if request.param in KINDS:
    return made[request.param]
  if request.param == 'shared':
    return request.getfixturevalue('qwen_tokenizer'), reference(request.getfixturevalue('qwen_tokenizer_dir'))
  directory = request.getfixturevalue('real_model')(request.param)
  return ChatTokenizer(directory), reference(directory)


def messages_of(talk) -> list[Message]:
  return [Message(role, text) for role, text in talk]


def ids_of(theirs, talk, *, opens=True) -> tuple[int, ...]:
  sent = [{'role': str(role), 'content': text} for role, text in talk]
  return tuple(theirs.apply_chat_template(sent, tokenize=True, add_generation_prompt=opens, return_dict=False))


@pytest.mark.parametrize('system', [[], [(SYSTEM, 'Be brief. ')]], ids=['default', 'system'])
@pytest.mark.parametrize('talk', [TALK, THOUGHTS], ids=['plain', 'thoughts'])
def test_prompts_have_the_ids_of_the_template(pair, system, talk):
  ours, theirs = pair
  form = QwenFormat(ours, keep_thoughts=False)
  for some in range(1, len(talk) + 1, 2):
    sent = [*system, *talk[:some]]
    for options in (OPEN, CLOSED):
      found = form.render(messages_of(sent), (), options)
      assert found == ids_of(theirs, sent, opens=options.add_generation_prompt)


@pytest.mark.parametrize('talk', [TALK[:4], THOUGHTS[:2]], ids=['plain', 'thoughts'])
def test_a_conversation_that_a_reply_ends_has_the_ids_of_the_template(pair, talk):
  ours, theirs = pair
  assert QwenFormat(ours, keep_thoughts=False).render(messages_of(talk), (), CLOSED) == ids_of(
    theirs, talk, opens=False
  )


def test_a_system_message_that_begins_a_question_needs_one(made):
  form = QwenFormat(made['gemma3'][0], keep_thoughts=True)
  for talk in ([(SYSTEM, 'x')], [(SYSTEM, 'x'), (ASSISTANT, 'y'), (USER, 'z')]):
    with pytest.raises(ApiError, match='a question must follow the system message'):
      form.render(messages_of(talk), (), OPEN)


def test_a_thought_ends_with_its_message(made):
  for name in ('qwen3', 'r1'):
    ours, _ = made[name]
    form = QwenFormat(ours, keep_thoughts=True)
    cut = (*form.render([Message(USER, 'hi')], (), OPEN), ours.added['<think>'], *ours.encode('hm'))
    assert form.in_thought(cut)
    for closed in (True, False):
      end = (form.stop_id,) if closed else ()
      assert not form.in_thought((*cut, *end, *form.following([Message(USER, 'q')], (), OPEN, closed=closed)))
    # A prompt of ids may leave out the token that ends the reply.
    opening = ours.encode(ours.format.assistant.before)
    assert not form.in_thought((*cut, *opening, *ours.encode('x')))


def test_a_conversation_goes_on_with_the_ids_of_the_template(pair):
  ours, theirs = pair
  form, talk = QwenFormat(ours, keep_thoughts=True), [(USER, 'one'), (ASSISTANT, 'so 2'), (USER, 'three')]
  first = form.render(messages_of(talk[:1]), (), OPEN)
  sampled = ours.encode('so 2')
  whole = (*first, *sampled, form.stop_id, *form.following(messages_of(talk[2:]), (), OPEN, closed=True))
  assert whole == (*first, *sampled, *form.following(messages_of(talk[2:]), (), OPEN, closed=False))
  if not ours.format.forced:
    assert whole == ids_of(theirs, talk)


def test_thoughts_begin_a_new_row_only_where_the_template_drops_them(made):
  for name, (ours, _) in made.items():
    forgets, keeps = (QwenFormat(ours, keep_thoughts=keep) for keep in (False, True))
    drops = ours.format.thoughts not in (Thoughts.KEPT, Thoughts.ALWAYS)
    question = [Message(USER, 'q')]
    assert (forgets.following(question, (), OPEN, closed=True) is None) == drops, name
    assert keeps.following(question, (), OPEN, closed=True) is not None
    text = ours.decode(keeps.render(messages_of(THOUGHTS), (), OPEN))
    assert '<think>\nhm\n</think>\n\nA' in text


def test_families_are_those_of_token_and_template(made):
  families = {name: QwenFormat(ours, keep_thoughts=True).family for name, (ours, _) in made.items()}
  tagged = [name for name in KINDS if name.startswith(('qwen3', 'r1'))]
  thinks = dict.fromkeys(tagged, Family.QWEN3)
  assert families == dict.fromkeys(KINDS, Family.PLAIN) | {'qwen2.5': Family.QWEN25} | thinks


@pytest.mark.parametrize('prefix', ['', '<think>', '<think>\n', '<think>hm', '<think>hm</think>so', 'so'])
@pytest.mark.parametrize('thinking', [True, False])
def test_a_forced_thought_is_not_opened_twice(made, prefix, thinking):
  ours, _ = made['r1-forced']
  form = QwenFormat(ours, keep_thoughts=True)
  options = TemplateOptions(enable_thinking=thinking, add_generation_prompt=True, reply_prefix=prefix)
  ids = form.render([Message(USER, 'hi')], (), options)
  rest = prefix.removeprefix('<think>').removeprefix('\n')
  text = ours.decode(ids)
  assert text.endswith(ours.format.assistant.before + '<think>\n' + rest)
  assert ids.count(ours.added['<think>']) == 1
  assert form.in_thought(ids) == ('</think>' not in prefix)


@pytest.mark.parametrize(
  ('name', 'prefix', 'thinking', 'shown'),
  [
    ('qwen3.5', '', True, '<think>\n'),
    ('qwen3.5', '', False, '<think>\n\n</think>\n\n'),
    ('qwen3.5', 'so', False, '<think>\n\n</think>\n\nso'),
    ('qwen3.5', '<think>hm', True, '<think>\nhm'),
    ('qwen3.5-small', '', True, '<think>\n\n</think>\n\n'),
    ('qwen3.5-small', '<think>', True, '<think>\n'),
  ],
)
def test_a_template_thinks_or_not_as_it_is_asked(made, name, prefix, thinking, shown):
  ours, _ = made[name]
  form = QwenFormat(ours, keep_thoughts=True)
  options = TemplateOptions(enable_thinking=thinking, add_generation_prompt=True, reply_prefix=prefix)
  ids = form.render([Message(USER, 'hi')], (), options)
  assert ours.decode(ids).endswith(ours.format.assistant.before + shown)
  assert form.in_thought(ids) == ('</think>' not in shown)


@pytest.mark.parametrize('name', ['r1', 'r1-forced', 'r1-plain'])
def test_replies_of_r1_are_read_by_their_tags(made, name):
  ours, _ = made[name]
  form = QwenFormat(ours, keep_thoughts=True)
  prompt = form.render([Message(USER, 'hi')], (), OPEN)
  text = ('' if ours.format.forced else '<think>\n') + 'hm\n</think>\n\nA'
  read = reader(form, prompt)
  read.feed(ours.encode(text), text)
  read.finish()
  assert (read.reply().thought, read.reply().content) == ('hm', 'A')
  assert read.reply().thought_tokens == len(ours.encode(text.partition('\n\n')[0]))


def test_a_prompt_that_cannot_be_quiet_is_refused(made):
  ours, _ = made['qwen2.5']
  ours = copy_of(ours, quiet=None)
  form = QwenFormat(ours, keep_thoughts=True)
  with pytest.raises(ApiError, match='enable_thinking'):
    form.render([Message(USER, 'hi')], (), dataclasses.replace(OPEN, enable_thinking=False))
  assert form.render([Message(USER, 'hi')], (), OPEN)


def copy_of(tokenizer: ChatTokenizer, **changes) -> ChatTokenizer:
  again = ChatTokenizer(tokenizer._directory)
  again.format = dataclasses.replace(tokenizer.format, **changes)
  return again


def test_a_later_system_message_stands_where_the_template_puts_it_or_nowhere(made):
  talk = [(USER, 'a'), (ASSISTANT, 'b'), (SYSTEM, ' c '), (USER, 'd')]
  for name, (ours, theirs) in made.items():
    form = QwenFormat(ours, keep_thoughts=True)
    if ours.format.later_system is None:
      with pytest.raises(ApiError, match='system message at the beginning only'):
        form.render(messages_of(talk), (), OPEN)
    else:
      assert form.render(messages_of(talk), (), OPEN) == ids_of(theirs, talk), name


def test_tools_stand_in_the_system_message_of_any_format(made):
  tools = tools_from_chat([TOOL])
  calls = [
    Message(USER, 'hi'), Message(ASSISTANT, 'so', (ToolCall('a', 'look', '{}'),)), Message(Role.TOOL, 'r', call_id='a')
  ]  # fmt: skip
  for name, (ours, _) in made.items():
    form = QwenFormat(ours, keep_thoughts=True)
    ids, around = form.render(calls, tools, OPEN), ours.format
    text = ours.decode(ids)
    default = f'{around.default_system}\n\n' if around.default_system else ''
    assert text.startswith(f'{around.system.before}{default}# Tools\n\n'), name
    called = 'so\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    if name.startswith('qwen3.'):
      thought = '<think>\n\n</think>\n\n' if 'qwen3.8' in name else ''
      called = thought + 'so\n\n<tool_call>\n<function=look>\n</function>\n</tool_call>'
    result = f'{around.user.before}<tool_response>\nr\n</tool_response>{around.user.after}'
    assert text.endswith(
      f'{around.assistant.before}{called}{around.assistant.after}{result}{around.assistant.before}{around.forced}'
    )
    listed = 1 if name.startswith('qwen3.') else 2
    assert ids.count(ours.added.get('<tool_call>')) == (listed + 1 if '<tool_call>' in ours.added else 0)


@pytest.mark.parametrize('name', ['qwen3.5', 'qwen3.5-small', 'qwen3.6', 'qwen3.8', 'qwen3.8-quiet', 'qwen3-tools'])
def test_histories_with_calls_have_the_ids_of_the_template(tmp_path, name):
  directory = write_tokenizer(tmp_path, TOOL_KINDS[name])
  theirs = transformers.AutoTokenizer.from_pretrained(directory)
  form = QwenFormat(ChatTokenizer(directory), keep_thoughts=False)
  arguments = {'a': ' x\n', 'b': [1, 'é', None], 'c': True, 'd': None, 'e': 2.5, 'f': {'g': False}, 'h': ''}
  first, second = (
    {'id': id_, 'type': 'function', 'function': {'name': 'look', 'arguments': given}}
    for id_, given in (('a', arguments), ('b', {}))
  )
  talk = [
    {'role': 'system', 'content': 'Be brief.'},
    {'role': 'user', 'content': 'Where?'},
    {'role': 'assistant', 'content': '', 'reasoning_content': 'earlier', 'tool_calls': [second]},
    {'role': 'tool', 'content': 'here', 'tool_call_id': 'b'},
    {'role': 'assistant', 'content': 'Here.'},
    {'role': 'user', 'content': 'And?'},
    {'role': 'assistant', 'content': 'So.', 'reasoning_content': '\n hm\n\nno ', 'tool_calls': [first, second]},
    {'role': 'tool', 'content': '{"x": 1}', 'tool_call_id': 'a'},
    {'role': 'tool', 'content': 'r', 'tool_call_id': 'b'},
    {'role': 'assistant', 'content': '', 'tool_calls': [second]},
    {'role': 'tool', 'content': '', 'tool_call_id': 'b'},
  ]
  if name == 'qwen3-tools':  # which keeps blanks at the ends of thoughts
    talk[6]['reasoning_content'] = 'hm'
  else:
    talk[7]['content'] = ' {"x": 1}\n'
  for end, system in [*((end, 'Be brief.') for end in (2, 4, 6, 9, 11)), (2, ''), (2, ' \n')]:
    talk[0]['content'] = system
    expected = theirs.apply_chat_template(talk[:end], tools=[TOOL], return_dict=False, add_generation_prompt=True)
    sent = json.loads(json.dumps(talk[:end]))
    for call in (call for message in sent for call in message.get('tool_calls', ())):
      call['function']['arguments'] = json.dumps(call['function']['arguments'])
    rendered = list(form.render(from_chat(sent), tools_from_chat([TOOL]), OPEN))
    assert rendered == list(expected), (end, system)


def test_a_user_s_message_that_is_a_result_is_no_question(tmp_path):
  directory = write_tokenizer(tmp_path, KINDS['qwen3.5'])
  theirs = transformers.AutoTokenizer.from_pretrained(directory)
  form = QwenFormat(ChatTokenizer(directory), keep_thoughts=False)
  thinks = '<think>\nhm\n</think>\n\nA'
  for result in ('<tool_response>r</tool_response>', '\n <tool_response>r</tool_response> \n'):
    talk = [(USER, 'q'), (ASSISTANT, thinks), (USER, result)]
    rendered = form.render(messages_of(talk), (), OPEN)
    assert theirs.decode(rendered) == theirs.decode(ids_of(theirs, talk))  # the client's tags are text


_PIECES = [
  *{t for kind in KINDS.values() for t in (*kind.specials, *kind.others)},
  '<',
  '|',
  '\n',
  '<\uff5c',
  'User\uff5c>',
]


@settings(deadline=None, max_examples=40)
@given(
  st.lists(st.one_of(st.sampled_from(_PIECES), st.text(max_size=2)), max_size=6).map(''.join),
  st.sampled_from(list(Role)),
)
def test_text_of_a_client_opens_and_ends_no_message(made, text, role):
  text = text.encode('utf-8', 'replace').decode()
  for name, (ours, _) in made.items():
    form = QwenFormat(ours, keep_thoughts=True)
    hostile, harmless = (form.render([Message(role, f'x{x}x'), Message(USER, f'x{x}x')], (), OPEN) for x in (text, 'a'))
    thoughts = ('<think>', '</think>') if role is ASSISTANT else ()
    special = [ours.added[t] for t in ours.specials if t in ours.added]
    forbidden = special if form.family is Family.PLAIN else [i for t, i in ours.added.items() if t not in thoughts]
    assert [i for i in hostile if i in forbidden] == [i for i in harmless if i in forbidden], name
    for mark in ours.marks:
      assert ours.decode(hostile).count(mark) == ours.decode(harmless).count(mark)
      assert mark not in ours.decode(form.encode_untrusted(text))
