"""Formats of tools that are found from templates."""

from __future__ import annotations

import dataclasses
import json

import pytest
from transformers import AutoTokenizer

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.segments import as_text
from ragen_jax.agent.tool_format import CallForm, qwen_tools
from ragen_jax.serving.conversation.chat_format import QwenFormat
from ragen_jax.serving.conversation.messages import TemplateOptions, from_chat, tools_from_chat
from tests.support.chat_templates import (
  APART_TOOLS,
  JOINED_TOOLS,
  KINDS,
  OTHER_TOOLS,
  QWEN25_TOOLS,
  TOOL_KINDS,
  write_tokenizer,
)


def found(path, template):
  kind = dataclasses.replace(TOOL_KINDS['qwen2.5-tools'], template=template)
  return ChatTokenizer(write_tokenizer(path, kind))


@pytest.mark.parametrize('name', ['qwen2.5-tools', 'qwen3-tools', 'qwen3-thinking'])
def test_qwen_s_templates_have_the_words_that_stand_in_for_others(tmp_path, name):
  tokenizer = ChatTokenizer(write_tokenizer(tmp_path, TOOL_KINDS[name]))
  assert tokenizer.tools_refused == ''
  assert tokenizer.tools == qwen_tools(tokenizer.format)


def test_the_published_template_of_qwen_2_5_has_the_same(real_model):
  tokenizer = ChatTokenizer(real_model('qwen2.5-coder-0.5b-instruct'))
  assert tokenizer.tools_refused == '' and tokenizer.tools == qwen_tools(tokenizer.format)


@pytest.mark.parametrize(
  'name', [*(name for name in KINDS if name not in TOOL_KINDS), 'smollm2-135m-instruct', 'r1-distill-qwen-random']
)
def test_templates_without_tools_say_so_and_get_qwen_s(tmp_path, name, request):
  directory = write_tokenizer(tmp_path, KINDS[name]) if name in KINDS else request.getfixturevalue('real_model')(name)
  tokenizer = ChatTokenizer(directory)
  assert (
    tokenizer.tools_refused == f'model.path={directory}: its chat template cannot be followed: it does not write tools'
  )
  assert tokenizer.tools == qwen_tools(tokenizer.format)


@pytest.mark.parametrize('template', [JOINED_TOOLS, APART_TOOLS])
def test_tools_of_templates_whose_system_message_joins_the_first_question(tmp_path, template):
  tokenizer = found(tmp_path, template)
  assert tokenizer.tools_refused == '' and tokenizer.format.joins_system
  theirs, fmt = AutoTokenizer.from_pretrained(tmp_path), QwenFormat(tokenizer, keep_thoughts=True)
  tools = [{'type': 'function', 'function': {'name': name, 'parameters': {}}} for name in ('look', 'go')]
  asks, goes_on = ('user', 'Hi'), [('user', 'a'), ('assistant', 'b'), ('user', 'c')]
  for talk in ([('system', 'Be.'), asks], [asks], goes_on):
    sent = [{'role': role, 'content': content} for role, content in talk]
    expected = theirs.apply_chat_template(sent, tools=tools, return_dict=False, add_generation_prompt=True)
    assert list(fmt.render(from_chat(sent), tools_from_chat(tools), TemplateOptions(True, True, ''))) == expected
    if len(talk) == 2:
      ours = as_text(tokenizer.opening('Be.', 'Hi', '', [json.dumps(tool) for tool in tools]))
      assert ours == theirs.decode(expected)


def test_a_tokenizer_without_a_template_says_so(tmp_path):
  assert found(tmp_path, None).tools_refused == f'model.path={tmp_path}: its chat template is missing'


@pytest.mark.parametrize(
  ('old', 'new', 'message'),
  [
    ('t | tojson }}', 't | tojson(indent=2) }}', 'it does not write tools as their JSON'),
    ('t | tojson }}', 't.function.name }}', 'it does not write tools as their JSON'),
    ('{% for t in tools %}', '{% for t in tools[1:] %}', 'it does not write tools'),
    ('{% for t in tools %}', '{% for t in tools + tools %}', 'it does not write tools as their JSON'),
    ('messages[0].content + "\n\n"', 'messages[0].content | upper', 'it drops or repeats tools or the system message'),
    ('"arguments":', '"parameters":', 'of the calls of a reply it writes'),
    ('<tool_call>\n{"name": "{{', '<call>\n{"name": "{{', 'of the calls of a reply it writes'),
    ('+ m.content + "\n</tool_response>"', '+ "\n</tool_response>"', 'it drops or moves the results of calls'),
    # What a conversation of marks does not show.
    ('c.function.arguments | tojson', 'c.function.arguments | tojson | lower', ''),
    ('c.function.arguments | tojson', 'c.function.arguments | string | replace("\'", \'"\')', ''),
    ('+ m.content + "\n</tool_response>"', '+ m.content | upper + "\n</tool_response>"', ''),
    ('{% if loop.last or messages', '{% if messages', ''),
    ('{% if text or not loop.first %}', '{% if text %}', 'of user, assistant, tool, assistant, user, '),
    ('{% for t in tools %}', '{% for t in tools[:2] | sort(attribute="function.name") %}', ''),
    ('messages[0].content + "\n\n"', '(messages[0].content or "Help.") + "\n\n"', 'of system, user it writes'),
  ],
)
def test_templates_that_write_tools_in_another_way_are_not_followed(tmp_path, old, new, message):
  assert old in QWEN25_TOOLS
  tokenizer = found(tmp_path, QWEN25_TOOLS.replace(old, new))
  assert tokenizer.tools_refused.startswith(f'model.path={tmp_path}: its chat template cannot be followed: {message}')
  assert '\n' not in tokenizer.tools_refused and tokenizer.tools == qwen_tools(tokenizer.format)


@pytest.mark.parametrize(
  ('old', 'new', 'changes'),
  [
    ('+ m.content + "\n</tool_response>"', '+ m.content | trim + "\n</tool_response>"', {'strips_results': True}),
    ('{% if text or not loop.first %}', '{% if not loop.first %}', {'before_calls': ''}),
    (
      '{% if text or not loop.first %}{{ "\n" }}', '{{ "\n" if not loop.first else "\n\n" if text else "" }}{% if 0 %}',
      {'before_calls': '\n\n'},
    ),
  ],
)  # fmt: skip
def test_what_a_template_does_around_calls_and_results_is_followed(tmp_path, old, new, changes):
  assert old in QWEN25_TOOLS
  tokenizer = found(tmp_path, QWEN25_TOOLS.replace(old, new))
  assert tokenizer.tools_refused == ''
  assert tokenizer.tools == dataclasses.replace(qwen_tools(tokenizer.format), **changes)


@pytest.mark.parametrize(
  ('name', 'form'),
  [
    ('qwen3.5', CallForm.PARAMETERS), ('qwen3.5-small', CallForm.PARAMETERS), ('qwen3.6', CallForm.JSON_PARAMETERS),
    ('qwen3.8', CallForm.JSON_PARAMETERS), ('qwen3-tools', CallForm.JSON),
  ],
)  # fmt: skip
def test_the_form_of_calls_is_that_of_the_template(tmp_path, name, form):
  tokenizer = ChatTokenizer(write_tokenizer(tmp_path, TOOL_KINDS[name]))
  assert tokenizer.tools_refused == '' and tokenizer.tools.call_form is form
  assert tokenizer.tools.strips_results == tokenizer.tools.skips_empty_system == (form is not CallForm.JSON)
  assert tokenizer.tools.empty_thoughts == (form is not CallForm.JSON and name != 'qwen3.8')


@pytest.mark.parametrize(
  ('old', 'new'),
  [
    ("{{ '\n</parameter>\n' }}", "{{ '</parameter>\n' }}"),
    ("'<parameter=' + name", "'<argument=' + name"),
    ("{{ '</function>\n</tool_call>' }}{% endfor %}{{ '<|im_end|>", "{{ '</tool_call>' }}{% endfor %}{{ '<|im_end|>"),
    ('value | string }}', 'value | string | lower }}'),
    ("split('<think>')[-1] | trim", "split('<think>')[-1]"),
    ("+ text + '\n</tool_response>'", "+ text + '</tool_response>'"),
    ('{% if loop.index0 > ns.asked %}', '{% if loop.index0 > ns.asked and loop.last %}'),
    ('{% if loop.index0 > ns.asked %}', '{% if loop.index0 > ns.asked and (loop.last or thought) %}'),
  ],
)
def test_other_templates_with_parameters_are_followed_or_refused(tmp_path, old, new):
  template = KINDS['qwen3.5'].template
  assert template.count(old) == 1
  kind = dataclasses.replace(KINDS['qwen3.5'], template=template.replace(old, new))
  tokenizer = ChatTokenizer(write_tokenizer(tmp_path, kind))
  if 'tool_response' in old or 'or thought' in new:
    assert tokenizer.tools_refused == '' and tokenizer.tools.empty_thoughts == ('asked' not in old)
  else:
    assert 'it writes' in tokenizer.tools_refused


def test_the_template_for_tools_is_taken_if_there_are_several(tmp_path):
  plain = KINDS['qwen2.5'].template
  both = [{'name': 'default', 'template': plain}, {'name': 'tool_use', 'template': QWEN25_TOOLS}]
  assert found(tmp_path / 'both', both).tools_refused == ''
  assert found(tmp_path / 'one', both[:1]).tools_refused.endswith('it does not write tools')


def test_a_template_that_tells_the_date_of_tools_tells_a_fixed_one(tmp_path):
  dated = OTHER_TOOLS.replace('I have', "On {{ strftime_now('%d %b %Y') }} I have")
  assert dated != OTHER_TOOLS
  assert found(tmp_path, dated).tools.with_system[0].endswith('On 26 Jul 2024 I have ')
