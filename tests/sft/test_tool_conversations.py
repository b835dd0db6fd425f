"""Conversations with tools have the tokens of the chat template, and their calls are read back by the server."""

from __future__ import annotations

import copy
import functools
import json
import pathlib
import shutil

import numpy as np
import pytest
import transformers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.chat_template import NO_THOUGHT, Thoughts
from ragen_jax.agent.tool_format import CallForm
from ragen_jax.models import presets
from ragen_jax.serving.conversation.chat_format import QwenFormat
from ragen_jax.serving.conversation.messages import TemplateOptions
from ragen_jax.sft import conversations
from ragen_jax.sft.data import from_file
from ragen_jax.sft.messages import read_line
from ragen_jax.utils.errors import UserError
from tests.support.chat_templates import CALL_TAGS, QWEN25_TOOLS, TOOL_KINDS, write_tokenizer
from tests.support.wire import reader

CLOSED = TemplateOptions(enable_thinking=True, add_generation_prompt=False, reply_prefix='')
LOOK = {
  'type': 'function',
  'function': {
    'name': 'look',
    'description': 'Looks "é".',
    'parameters': {'type': 'object', 'properties': {'x': {'type': 'string'}}, 'required': ['x']},
  },
}
ADD = {'type': 'function', 'function': {'name': 'add'}}


def said(role, content, **more):
  return {'role': role, 'content': content, **more}


def call(id_, name, arguments):
  return {'id': id_, 'type': 'function', 'function': {'name': name, 'arguments': arguments}}


def result(id_, content):
  return said('tool', content, tool_call_id=id_)


TALK = [
  said('user', 'Where is it?\n'),
  said('assistant', None, tool_calls=[call('a', 'look', {'x': 'ü "up"\n', 'y': [1, 2.5, None, {}]})]),
  result('a', '{"at": "<b>"}\n'),
  said('assistant', 'Here.'),
  said('user', 'And the sum?'),
  said('assistant', 'So', tool_calls=[call('a', 'add', {}), call('b', 'look', {'x': ''})]),
  result('b', ''),
  result('a', ' 3'),
  said('assistant', 'It is 3.'),
]


@pytest.fixture(scope='module')
def directories(tmp_path_factory):
  return {name: write_tokenizer(tmp_path_factory.mktemp(name), kind) for name, kind in TOOL_KINDS.items()}


@pytest.fixture(scope='module')
def shared(qwen_tokenizer_dir, tmp_path_factory):
  """Qwen2.5's tokenizer with a template that has the tools of the published one."""
  directory = tmp_path_factory.mktemp('qwen') / 'model'
  shutil.copytree(qwen_tokenizer_dir, directory)
  path = directory / 'tokenizer_config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | {'chat_template': QWEN25_TOOLS}))
  return directory


@pytest.fixture(scope='module', params=[*TOOL_KINDS, 'shared', 'qwen2.5-coder-0.5b-instruct'])
def pair(request, directories):
  """A tokenizer of ours and the same one of `transformers`."""
  if request.param in directories:
    directory = directories[request.param]
  elif request.param == 'shared':
    directory = request.getfixturevalue('shared')
  else:
    directory = request.getfixturevalue('real_model')(request.param)
  return ChatTokenizer(directory), transformers.AutoTokenizer.from_pretrained(str(directory))


def encode(tokenizer, messages, tools, prefix='<think>'):
  """The ids of a conversation, and whether each is trained."""
  line = json.dumps({'messages': messages, 'tools': tools})
  found, _ = conversations.tokenize([read_line(1, line)], tokenizer, prefix, 100_000, 'sft.data')
  n = int(found.length[0])
  return found.tokens[0, :n], found.loss_mask[0, :n]


def ids_of(theirs, messages, tools):
  """The ids of the template without what follows the last reply, which has no thought."""
  ids = theirs.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False)
  end = theirs.convert_tokens_to_ids('<|im_end|>')
  return list(ids[: len(ids) - list(reversed(ids)).index(end)])


def with_empty_thoughts(tokenizer, ids):
  """The ids with the empty thought that the template forces before replies also where it leaves it out later."""
  if not tokenizer.format.no_thought:
    return list(ids)
  opening = tokenizer.format.assistant.before
  parts = tokenizer.decode(ids).split(opening)
  forced = ['' if part.startswith('<think>') else tokenizer.format.no_thought for part in parts[1:]]
  replies = (opening + thought + part for thought, part in zip(forced, parts[1:], strict=True))
  return list(tokenizer.encode_once(parts[0] + ''.join(replies)))


def spans(tokenizer, ids, mask):
  """The text of each run of trained tokens."""
  edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
  return [tokenizer.decode(ids[a:b]) for a, b in edges.reshape(-1, 2)]


def with_thoughts(messages):
  """The messages with a thought in each reply after the last question, because Qwen3's template keeps only these."""
  messages = copy.deepcopy(messages)
  last = max(i for i, m in enumerate(messages) if m['role'] == 'user')
  for message in messages[last:]:
    if message['role'] == 'assistant':
      message['reasoning_content'] = 'hm é\n\nso'
  return messages


@pytest.mark.parametrize('name', ['qwen3.5', 'qwen3.6'])
def test_calls_are_read_back_with_the_types_of_the_tools(directories, name):
  tokenizer = ChatTokenizer(directories[name])
  talk = [said('user', 'q'), said('assistant', '', tool_calls=[call('a', 'look', {'x': '[1,2]'})])]
  ids, _ = encode(tokenizer, talk, [LOOK])
  assert '<parameter=x>\n[1,2]\n</parameter>' in tokenizer.decode(ids)


@pytest.mark.parametrize('system', [[], [said('system', 'Be brief. ')]], ids=['default', 'system'])
@pytest.mark.parametrize('tools', [[LOOK, ADD], [ADD, LOOK, {**ADD, 'function': {'name': 'f'}}]], ids=['two', 'three'])
@pytest.mark.slow_cases('shared-two-default')
def test_tokens_are_those_of_the_template(pair, system, tools):
  ours, theirs = pair
  messages = with_thoughts([*system, *TALK])
  ids, mask = encode(ours, messages, tools)
  assert list(ids) == with_empty_thoughts(ours, ids_of(theirs, messages, tools))
  # Arguments may be JSON texts, in any spacing.
  texts = copy.deepcopy(messages)
  for message in texts:
    for one in message.get('tool_calls', ()):
      one['function']['arguments'] = json.dumps(one['function']['arguments'], indent=1)
  again, same = encode(ours, texts, tools)
  np.testing.assert_array_equal(again, ids)
  np.testing.assert_array_equal(same, mask)


def test_the_rows_are_those_of_an_agent_program(pair):
  ours, _ = pair
  form = QwenFormat(ours, keep_thoughts=True)
  found = read_line(1, json.dumps({'messages': with_thoughts(TALK), 'tools': [LOOK, ADD]}))
  ids = [i for before, reply in form.turns(found.messages, found.tools) for i in (*before, *reply)]
  whole = with_empty_thoughts(ours, form.render(found.messages, found.tools, CLOSED))
  assert ids == list(whole[: len(ids)])
  assert ours.decode(whole[len(ids) :]) == ours.format.separator


def test_the_loss_is_on_replies_with_calls_and_stop_tokens(pair):
  ours, _ = pair
  forced = '' if ours.format.no_thought else ours.format.forced  # the last reply thinks
  messages = [said('system', 'S'), *TALK, said('user', 'q'), said('assistant', '<think>x', weight=0)]
  messages[6]['weight'] = 0
  messages.append(said('user', 'behind the last reply'))
  ids, mask = encode(ours, messages, [LOOK, ADD])
  called = '{"name": "look", "arguments": {"x": "ü \\"up\\"\\n", "y": [1, 2.5, null, {}]}}'
  if ours.tools.call_form is not CallForm.JSON:
    called = '<function=look>\n<parameter=x>\nü "up"\n\n</parameter>\n<parameter=y>\n[1, 2.5, null, {}]\n</parameter>'
    called += '\n</function>'
  empty = NO_THOUGHT.removeprefix(ours.format.forced) if ours.format.thoughts is Thoughts.ALWAYS else ''
  called = f'{empty}<tool_call>\n{called}\n</tool_call>'
  assert spans(ours, ids, mask) == [f'{called}<|im_end|>', f'{empty}Here.<|im_end|>', f'{empty}It is 3.<|im_end|>']
  assert 'behind' not in ours.decode(ids)
  # What the template forces at the beginning of a reply has no loss; no other prefix is forced on agent programs.
  thinks = [said('user', 'q'), said('assistant', '<think>\nhm\n</think>\n\nA')]
  ids, mask = encode(ours, thinks, [ADD])
  assert spans(ours, ids, mask) == ['<think>\nhm\n</think>\n\nA<|im_end|>'.removeprefix(forced)]
  assert ours.decode(ids[~mask]).endswith(f'<|im_start|>assistant\n{forced}')


@pytest.mark.parametrize('name', ['qwen3.5-small', 'qwen3.5', 'qwen3-tools'])
@pytest.mark.parametrize('tools', [[LOOK], []], ids=['tools', 'game'])
def test_an_empty_thought_that_the_template_forces_is_context(directories, name, tools):
  ours = ChatTokenizer(directories[name])
  theirs = transformers.AutoTokenizer.from_pretrained(directories[name])
  forced = ours.format.no_thought
  assert (forced == '') == (name != 'qwen3.5-small')
  talk = [said('user', 'q'), said('assistant', 'A'), said('user', 'r'), said('assistant', 'B\nb')]
  ids, mask = encode(ours, talk, tools, ours.format.forced)
  assert spans(ours, ids, mask) == ['A<|im_end|>', 'B\nb<|im_end|>']
  assert ours.decode(ids).count(f'<|im_start|>assistant\n{forced}') == 2
  if forced:  # as the template writes the last reply
    ids, _ = encode(ours, talk[:2], tools, forced)
    assert list(ids) == ids_of(theirs, talk[:2], tools or None)
  # A reply that thinks has its own thought in place of the empty one.
  ids, mask = encode(ours, [talk[0], said('assistant', '<think>\nhm\n</think>\n\nA')], tools, ours.format.forced)
  assert spans(ours, ids, mask)[0].startswith('hm' if name == 'qwen3.5' else '<think>')
  assert '<think>\n\n</think>' not in ours.decode(ids)


def test_the_tag_of_a_game_is_forced_behind_the_template_s_empty_thought(directories):
  ours = ChatTokenizer(directories['qwen3.5-small'])
  prefix = ours.format.reply_prefix('<answer>')
  ids, mask = encode(ours, [said('user', 'q'), said('assistant', '<answer>Up</answer>')], [], prefix)
  assert spans(ours, ids, mask) == ['Up</answer><|im_end|>']
  assert ours.decode(ids[~mask]).endswith('<|im_start|>assistant\n<think>\n\n</think>\n\n<answer>')


_TEXTS = st.lists(
  st.one_of(
    st.text(max_size=4),
    st.sampled_from(['"', '\\', '\n', "'", '{', '}', '\u00e9', '\U0001f600', '<', '\u2028', '\x00', '{{ x }}']),
  ),
  max_size=4,
).map(''.join)
_TAGS = st.sampled_from(
  [*CALL_TAGS, '<|im_end|>', '<|im_start|>', '<think>', '</think>', '</tool_response>', 'e\u0301']
)


def arguments(texts):
  leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), texts)
  nested = st.recursive(
    leaves, lambda x: st.one_of(st.lists(x, max_size=3), st.dictionaries(texts, x, max_size=3)), max_leaves=6
  )
  return st.dictionaries(texts, nested, max_size=3)


def can_be_read(tokenizer, sent):
  """Whether the names of arguments end where their tags do."""
  return tokenizer.tools.call_form is CallForm.JSON or not any(set('>\n') & set(name) for name in sent)


def read_back(tokenizer, ids, mask):
  """The names and arguments of the calls that the server reads in the last trained reply, and its content."""
  start = int(np.flatnonzero(~mask)[-1]) + 1
  reply = [int(i) for i in ids[start:-1]]
  read = reader(QwenFormat(tokenizer, keep_thoughts=True), [int(i) for i in ids[:start]])
  read.feed(reply, tokenizer.decode(reply))
  read.finish()
  assert not read.reply().problems
  return [(c.name, c.arguments) for c in read.reply().calls], read.reply().content


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(arguments(_TEXTS), min_size=1, max_size=2), st.sampled_from(['', 'Let me see.']), st.booleans())
@pytest.mark.slow_cases('qwen2.5-tools', 'qwen3-thinking', 'other-tools')
def test_any_call_has_the_tokens_of_the_template_and_is_read_back(pair, sent, content, as_text):
  ours, theirs = pair
  # Qwen's tokenizers compose characters, which is no mistake of a call.
  sent = [json.loads(ours.decode(ours.encode_once(json.dumps(x, ensure_ascii=False)))) for x in sent]
  assume(all(map(functools.partial(can_be_read, ours), sent)))
  calls = [call(f'c{k}', 'look', x) for k, x in enumerate(sent)]
  thought = {'reasoning_content': 'hm'}
  messages = [said('user', 'q'), said('assistant', content, tool_calls=calls, **thought)]
  written = copy.deepcopy(messages)
  for one in written[1]['tool_calls'] if as_text else ():
    one['function']['arguments'] = json.dumps(one['function']['arguments'])
  ids, mask = encode(ours, written, [LOOK])
  assert list(ids) == ids_of(theirs, messages, [LOOK])
  read, text = read_back(ours, ids, mask)
  assert [name for name, _ in read] == ['look'] * len(sent)
  if ours.tools.call_form is CallForm.JSON:  # text compares 1 with 1.0, and True with 1
    assert [json.dumps(json.loads(x), sort_keys=True) for _, x in read] == [json.dumps(x, sort_keys=True) for x in sent]
  else:  # values of parameters without a type are texts
    as_sent = [json.dumps(x, ensure_ascii=False) for x in sent]
    assert [ours.tools.call_text('look', x) for _, x in read] == [ours.tools.call_text('look', x) for x in as_sent]
  assert text == content


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments(st.lists(st.one_of(_TEXTS, _TAGS), max_size=3).map(''.join)), st.lists(_TAGS, max_size=3).map(''.join))
@pytest.mark.slow_cases('qwen2.5-tools', 'other-tools')
def test_tags_in_texts_of_calls_and_results_never_become_tokens(pair, sent, hostile):
  ours, _ = pair
  assume(can_be_read(ours, sent))
  by_token = all(tag in ours.added for tag in CALL_TAGS)
  tool = {'type': 'function', 'function': {'name': 'look', 'description': hostile}}

  def line(arguments, text):
    calls = [call('a', 'look', arguments)]
    return [said('user', 'q'), said('assistant', '', tool_calls=calls), result('a', text), said('assistant', 'A')]

  text = json.dumps(sent, ensure_ascii=False)
  if not by_token and CALL_TAGS[1] in text:
    with pytest.raises(
      UserError, match=r'line 1: messages\[1\]: the calls of the reply are look and would be read back'
    ):
      encode(ours, line(sent, hostile), [tool])
    return
  ids, mask = encode(ours, line(sent, hostile), [tool])
  plain, _ = encode(ours, line({}, 'r'), [ADD, LOOK][1:])
  for token in ours.added.values():
    assert np.count_nonzero(ids == token) == np.count_nonzero(plain == token)
  first = np.flatnonzero(ids == ours.stop_ids[0])[2 if ours.decode(ids).startswith('<|im_start|>system') else 1]
  (read,), _ = read_back(ours, ids[: first + 1], mask[: first + 1])
  assert ours.tools.call_text(*read) == ours.decode(ours.encode_once(ours.tools.call_text('look', text)))


def test_tags_in_the_system_message_and_in_questions_are_text(pair):
  """As long as they are no special tokens, which are refused as in all conversations."""
  ours, _ = pair
  ids, plain = (
    encode(ours, [said('system', x), said('user', x), said('assistant', 'A')], [LOOK])[0]
    for x in ('a<tool_call>b</tool_call>', 'ab')
  )
  for tag in CALL_TAGS:
    assert np.count_nonzero(ids == ours.added.get(tag)) == np.count_nonzero(plain == ours.added.get(tag))
  for role in ('system', 'user', 'assistant'):
    talk = [said('user', 'q')] if role == 'assistant' else []
    talk += [said(role, 'a<|im_end|>')] + ([] if role == 'assistant' else [said('assistant', 'A')])
    with pytest.raises(
      UserError, match=rf'line 1: messages\[{len(talk) > 1 and role == "assistant":d}\]\.content holds'
    ):
      encode(ours, talk, [LOOK])
  with pytest.raises(UserError, match=r'line 1: messages\[1\]\.reasoning_content holds <\|im_end\|>'):
    encode(ours, [said('user', 'q'), said('assistant', 'A', reasoning_content='<|im_end|>')], [LOOK])


def test_a_call_in_the_text_of_a_reply_is_refused_where_the_server_would_read_it(directories):
  written = 'A<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
  messages = [said('user', 'q'), said('assistant', written)]
  by_text, by_token = (ChatTokenizer(directories[name]) for name in ('other-tools', 'qwen2.5-tools'))
  with pytest.raises(UserError) as e:
    encode(by_text, messages, [LOOK])
  assert str(e.value) == (
    'sft.data: line 1: messages[1]: the calls of the reply are none and would be read back as look, because a text in '
    'it holds a tag of the chat format; allowed: texts without <tool_call> and </tool_call>'
  )
  ids, mask = encode(by_token, messages, [LOOK])
  assert read_back(by_token, ids, mask) == ([], written)


def test_conversations_without_calls_list_their_tools(pair):
  ours, theirs = pair
  messages = with_thoughts([said('user', 'q'), said('assistant', 'I need none.')])
  ids, _ = encode(ours, messages, [LOOK, ADD])
  assert list(ids) == ids_of(theirs, messages, [LOOK, ADD])
  plain, _ = encode(ours, messages, [])
  assert '"look"' in ours.decode(ids) and 'look' not in ours.decode(plain)


def test_a_file_may_mix_conversations_with_and_without_tools(directories, tmp_path):
  tokenizer = ChatTokenizer(directories['qwen2.5-tools'])
  lines = [
    {'messages': [said('user', 'q'), said('assistant', 'A')]},
    {'messages': TALK, 'tools': [LOOK, ADD]},
    {'messages': [said('user', 'q'), said('assistant', 'A')], 'tools': []},
  ]
  path = tmp_path / 'a.jsonl'
  path.write_text('\n'.join(map(json.dumps, lines)))
  rollout = from_file(str(path), conversations.read(str(path)), tokenizer, '<think>', 2000)
  rows = rollout.trajectory
  ids, mask = encode(tokenizer, TALK, [LOOK, ADD])
  np.testing.assert_array_equal(rows.tokens[1, : rows.length[1]], ids)
  np.testing.assert_array_equal(rows.loss_mask[1, : rows.length[1]], mask)
  np.testing.assert_array_equal(rows.tokens[0], rows.tokens[2])
  assert rows.loss_mask[0].sum() == 2


@pytest.mark.parametrize('name', ['tiny', 'shared'])
def test_a_template_without_tools_is_refused_in_one_line(name, request, tmp_path):
  directory = presets.resolve('tiny', '') if name == 'tiny' else request.getfixturevalue('qwen_tokenizer_dir')
  tokenizer = ChatTokenizer(directory) if name == 'tiny' else request.getfixturevalue('qwen_tokenizer')
  path = tmp_path / 'a.jsonl'
  lines = [{'messages': [said('user', 'q'), said('assistant', 'A')]}, {'messages': TALK, 'tools': [LOOK, ADD]}]
  path.write_text('\n'.join(map(json.dumps, lines)))
  with pytest.raises(UserError) as e:
    from_file(str(path), conversations.read(str(path)), tokenizer, '', 2000)
  assert str(e.value) == (
    f'sft.data={str(path)!r}: line 2: tools are look, add; allowed: none with this model. model.path={directory}: its '
    'chat template cannot be followed: it does not write tools; a template must write tools as JSON, and calls '
    'between <tool_call> and </tool_call> as that of Qwen2.5 (JSON) or that of Qwen3.5 (a tag for each argument)'
  )


def test_the_example_of_the_page_can_be_learnt_from(directories):
  page = (pathlib.Path(__file__).parents[2] / 'docs' / 'warm_start.md').read_text(encoding='utf-8')
  lines = [line for line in page.splitlines() if line.startswith('{"messages"') and '"tools"' in line]
  assert len(lines) == 3
  tokenizer = ChatTokenizer(directories['qwen2.5-tools'])
  found = [read_line(n, line) for n, line in enumerate(lines, start=1)]
  rows, left_out = conversations.tokenize(found, tokenizer, '<think>', 4000, 'sft.data')
  assert left_out == 0 and rows.loss_mask.any(axis=1).all()
