"""Chat formats that are found from templates, against what `transformers` writes with the same templates."""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.chat_template import CHATML, NO_THOUGHT, Thoughts, write
from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.segments import ImageSegment, as_text, join
from ragen_jax.agent.templates import SYSTEM
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.spec import Budget, EnvSpec
from ragen_jax.sft import conversations
from ragen_jax.utils.errors import UserError
from tests.support.chat_templates import CHATML_TOKENS, KINDS, QWEN3_8, QWEN25_SYSTEM, Kind, chatml, write_tokenizer
from tests.support.speakers import context_settings

# Published models, and the kinds of tokenizer that have the facts of their templates.
REAL = {
  'qwen2.5-coder-0.5b-instruct': 'qwen2.5',
  'smollm2-135m-instruct': 'smollm2',
  'r1-distill-qwen-random': 'r1-plain',
}


def reference(directory):
  """The tokenizer of `transformers`, whose template tells a fixed date."""
  theirs = transformers.AutoTokenizer.from_pretrained(str(directory))
  theirs.chat_template = theirs.chat_template.replace("strftime_now('%d %b %Y')", "'26 Jul 2024'")
  return theirs


@pytest.fixture(scope='module')
def made(tmp_path_factory):
  """The directory of a tokenizer of each kind."""
  return {name: write_tokenizer(tmp_path_factory.mktemp(name), kind) for name, kind in KINDS.items()}


@pytest.fixture(scope='module', params=[*KINDS, 'shared', *REAL])
def pair(request, made):
  """A tokenizer of ours and the same one of `transformers`."""
  name = request.param
  if name == 'shared':
    return request.getfixturevalue('qwen_tokenizer'), reference(request.getfixturevalue('qwen_tokenizer_dir'))
  directory = made[name] if name in KINDS else request.getfixturevalue('real_model')(name)
  return ChatTokenizer(directory), reference(directory)


def ids_of(theirs, messages, **options) -> tuple[int, ...]:
  found = theirs.apply_chat_template(
    [{'role': role, 'content': text} for role, text in messages],
    tokenize=True, add_generation_prompt=True, return_dict=False, **options,
  )  # fmt: skip
  return tuple(found)


TURNS = ['one\n\ntwo', '{{ x }} <b>', 'P_O_\n____']
REPLIES = ['Left  || Up', 'so <answer>é\nDown</answer>.']


@pytest.mark.slow_cases('shared')
def test_three_turns_have_the_ids_of_the_template(pair):
  ours, theirs = pair
  messages = [('system', SYSTEM), ('user', TURNS[0])]
  ids = ours.encode_segments(ours.opening(SYSTEM, TURNS[0], '')).ids
  assert ids == ids_of(theirs, messages)
  for reply, turn in zip(REPLIES, TURNS[1:], strict=True):
    sampled = ours.encode(reply)
    closed = (*ids, *sampled, ours.stop_ids[0], *ours.encode_segments(ours.following(turn, '', closed=True)).ids)
    ids = (*ids, *sampled, *ours.encode_segments(ours.following(turn, '', closed=False)).ids)
    messages += [('assistant', reply), ('user', turn)]
    assert ids == closed
    if ours.format.forced:  # the template does not write it again once the conversation goes on
      head, forced = ours.format.assistant.before, ours.format.forced
      text, last = ours.decode(ids).rsplit(head, 1)
      always = NO_THOUGHT if ours.format.thoughts is Thoughts.ALWAYS else ''
      assert text.replace(head + forced, head + always) + head + last == theirs.apply_chat_template(
        [{'role': role, 'content': text} for role, text in messages], tokenize=False, add_generation_prompt=True
      )
    else:
      assert ids == ids_of(theirs, messages)


def test_images_stand_where_the_template_of_qwen3_5_puts_them(tmp_path):
  vision = ('<|vision_start|>', '<|image_pad|>', '<|vision_end|>', '<|video_pad|>')
  for name in ('qwen3.5', 'qwen3.5-small'):
    kind = dataclasses.replace(KINDS[name], specials=(*KINDS[name].specials, *vision))
    directory = write_tokenizer(tmp_path / name, kind)
    ours, theirs = ChatTokenizer(directory, images=True), reference(directory)
    images = [ImageSegment(np.full((8, 8, 3), i, np.uint8), 2 + i) for i in range(4)]
    shown = [['\n The board:\n', images[0], ' and ', images[1], ' now. \n'], [images[2], '  It was ', images[3]]]
    messages = [('system', [' Play. '])]
    encoded = [ours.opening(' Play. ', join(*_segments(shown[0])), '')]
    encoded += ['Left', ours.following(join(*_segments(shown[1])), '', closed=False)]
    messages += [('user', shown[0]), ('assistant', ['Left']), ('user', shown[1])]
    text = theirs.apply_chat_template(
      [{'role': role, 'content': [_part(x) for x in parts]} for role, parts in messages],
      tokenize=False, add_generation_prompt=True,
    )  # fmt: skip
    # What the template forces before a reply stays there, see `test_three_turns_have_the_ids_of_the_template`.
    expected = text.replace('assistant\nLeft', f'assistant\n{ours.format.forced}Left')
    for image in images:
      expected = expected.replace('t|><|image_pad|><|v', f't|>{"<|image_pad|>" * image.columns}<|v', 1)
    found = ours.encode_segments(join(*encoded))
    assert ours.decode(found.ids) == expected
    assert [span.segment for span in found.images] == images
    pads = [i for span in found.images for i in range(span.start, span.stop)]
    assert [i for i, token in enumerate(found.ids) if token == ours.placeholder] == pads
    assert ours.banned == tuple(sorted(ours.added[token] for token in vision))


def _segments(parts):
  return [(x,) if isinstance(x, ImageSegment) else x for x in parts]


def _part(x) -> dict:
  return {'type': 'image'} if isinstance(x, ImageSegment) else {'type': 'text', 'text': x}


def test_a_reply_ends_with_the_token_of_the_template(pair):
  ours, theirs = pair
  text = theirs.apply_chat_template(
    [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'Zq'}], tokenize=False
  )
  assert ours.encode(text.partition('Zq')[2])[0] == ours.stop_ids[0]
  assert ours.decode(ours.stop_ids[:1]) == ours.format.end
  assert theirs.eos_token_id in ours.stop_ids


def test_facts_of_the_templates(made):
  formats = {name: ChatTokenizer(directory).format for name, directory in made.items()}
  systems = {name: form.default_system for name, form in formats.items()}
  assert systems == dict.fromkeys(KINDS) | {'qwen2.5': QWEN25_SYSTEM, 'smollm2': 'You are a small model.'}
  assert formats['llama3'].no_system.endswith('\n\nToday Date: 26 Jul 2024\n\n<|eot_id|>')
  newer, newest = ('qwen3.5', 'qwen3.5-small'), ('qwen3.8', 'qwen3.8-quiet')
  stripped = {name: form.stripped for name, form in formats.items() if form.stripped}
  assert stripped.pop('gemma3') == {'user', 'assistant'}
  assert [name for name, form in formats.items() if form.joins_system] == ['gemma3']
  assert stripped.pop('llama3') == {'system', 'user', 'assistant'}
  assert stripped == dict.fromkeys((*newer, *newest), frozenset({'system', 'user', 'assistant', 'tool'}))
  thoughts = {name: form.thoughts for name, form in formats.items() if form.thoughts is not Thoughts.KEPT}
  assert thoughts == dict.fromkeys(('qwen3', *newer), Thoughts.PAST) | dict.fromkeys(
    ('r1', 'r1-forced', 'r1-plain'), Thoughts.CUT
  ) | dict.fromkeys(newest, Thoughts.ALWAYS)
  forced = {name: form.forced for name, form in formats.items() if form.forced}
  quiet = '<think>\n\n</think>\n\n'
  assert forced == dict.fromkeys(('r1-forced', 'qwen3.5', 'qwen3.8'), '<think>\n') | dict.fromkeys(
    ('qwen3.5-small', 'qwen3.8-quiet'), quiet
  )
  assert {formats[name].quiet for name in (*newer, *newest)} == {quiet}
  assert formats['qwen3'].quiet == '<think>\n\n</think>\n\n' and formats['qwen2.5'].quiet == ''
  assert all(formats[name].later_system is None for name in ('r1', 'r1-forced', 'r1-plain', 'gemma3', *newer, *newest))
  assert formats['qwen3'] == dataclasses.replace(CHATML, quiet=formats['qwen3'].quiet, thoughts=Thoughts.PAST)


def test_a_special_token_beyond_the_rows_of_the_model_is_no_id(made, tmp_path):
  kind = dataclasses.replace(KINDS['gemma3'], specials=(*KINDS['gemma3'].specials, '<image_soft_token>'), others=())
  directory = pathlib.Path(write_tokenizer(tmp_path, kind))
  whole = ChatTokenizer(directory)
  assert whole.added['<image_soft_token>'] == whole.size - 1
  (directory / 'config.json').write_text(json.dumps({'vocab_size': whole.size - 1}))
  assert ChatTokenizer(directory).size == whole.size - 1
  assert '<image_soft_token>' not in ChatTokenizer(directory).harmless('<image_soft_token>')
  for rows in (whole.size - 2, whole.size + 8):  # a token of the format has no row; a padded model
    (directory / 'config.json').write_text(json.dumps({'vocab_size': rows}))
    assert ChatTokenizer(directory).size == whole.size


def test_the_bytes_of_tokens_that_are_text_or_bytes(made):
  tok = ChatTokenizer(made['gemma3'])
  ids = tok.encode('a b\né\n\n')
  assert b''.join(map(tok.token_bytes, ids)).decode() == 'a b\né\n\n'
  assert [tok.token_bytes(i) for i in ids][:3] == [b'a', b' ', b'b'] and len(ids) == 7


def test_the_date_of_a_template_is_written_as_asked(tmp_path):
  """What a clock that stands still at one time would write, in every way that templates ask for."""
  asked = '%d %b %Y; %B %-d, %y; %A %a; %Y-%m-%d; %F %T; %-m/%e; %H:%M:%S; %I %p'
  template = KINDS['llama3'].template.replace('%d %b %Y', asked)
  tok = ChatTokenizer(write_tokenizer(tmp_path, dataclasses.replace(KINDS['llama3'], template=template)))
  assert f'Today Date: {datetime.datetime(2024, 7, 26).strftime(asked)}\n' in tok.format.no_system


# -- text of a game ----------------------------------------------------------------------------------------------------

_PIECES = [
  *{t for kind in KINDS.values() for t in (*kind.specials, *kind.others)},
  '<',
  '|',
  '\n',
  ' ',
  '<\uff5c',
  'User\uff5c>',
]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.one_of(st.sampled_from(_PIECES), st.text(max_size=2)), max_size=6).map(''.join))
def test_text_of_a_game_opens_and_ends_no_message(made, text):
  text = text.encode('utf-8', 'replace').decode()
  for name, directory in made.items():
    tok = _loaded(directory)
    special = [i for t, i in tok.added.items() if t in tok.specials]
    plain, hostile = (tok.encode_segments(tok.opening(SYSTEM, x, '')).ids for x in ('a', f'x{text}x'))
    assert [i for i in hostile if i in special] == [i for i in plain if i in special], name
    # Where a mark has no token, its text comes as often as before.
    for mark in tok.marks:
      assert tok.decode(hostile).count(mark) == tok.decode(plain).count(mark)


_TOKENIZERS: dict[str, ChatTokenizer] = {}


def _loaded(directory: str) -> ChatTokenizer:
  if directory not in _TOKENIZERS:
    _TOKENIZERS[directory] = ChatTokenizer(directory)
  return _TOKENIZERS[directory]


def test_marks_without_tokens_are_broken_by_a_space(made):
  tok = ChatTokenizer(made['r1-plain'])
  user, reply = tok.marks
  assert tok.format.user.before == user and tok.format.assistant.before == reply
  written = as_text(tok.opening(SYSTEM, f'a{user}b{reply}', ''))
  assert f'a< {user[1:]}b< {reply[1:]}' in written and written.count(user) == written.count(reply) == 1


def test_white_space_around_messages_goes_where_the_template_strips_it(made):
  llama, qwen = ChatTokenizer(made['llama3']), ChatTokenizer(made['qwen3'])
  assert '\n\nu<|eot_id|>' in as_text(llama.opening(' s ', ' \nu\n', ''))
  assert ' \nu\n<|im_end|>' in as_text(qwen.opening(' s ', ' \nu\n', ''))


# -- tokens that end a reply -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('files', 'stops'),
  [
    (
      {'generation_config.json': {'eos_token_id': ['<|end_of_text|>', '<|eot_id|>']}},
      ['<|eot_id|>', '<|end_of_text|>'],
    ),
    ({'config.json': {'eos_token_id': '<|end_of_text|>'}}, ['<|eot_id|>', '<|end_of_text|>']),
    ({'config.json': {'text_config': {'eos_token_id': '<|end_of_text|>'}}}, ['<|eot_id|>', '<|end_of_text|>']),
    # The first file that is there counts; ids that no token has are left out.
    (
      {'generation_config.json': {'eos_token_id': '<|eot_id|>'}, 'config.json': {'eos_token_id': '<|end_of_text|>'}},
      ['<|eot_id|>'],
    ),
    ({'generation_config.json': {'eos_token_id': 10**6}}, ['<|eot_id|>']),
    ({'generation_config.json': {'eos_token_id': None}}, ['<|eot_id|>']),
    ({'generation_config.json': []}, ['<|eot_id|>']),
    ({}, ['<|eot_id|>']),
  ],
)
def test_all_end_tokens_of_the_checkpoint_end_a_reply_and_the_template_s_is_the_first(tmp_path, files, stops):
  directory = pathlib.Path(write_tokenizer(tmp_path, KINDS['llama3']))
  added = ChatTokenizer(directory).added
  for name, content in files.items():
    text = json.dumps(content)
    for token, id_ in added.items():
      text = text.replace(json.dumps(token), str(id_))
    (directory / name).write_text(text)
  tok = ChatTokenizer(directory)
  assert tok.stop_ids == tuple(added[text] for text in stops)
  assert tok.pad_id == added['<pad>'] not in tok.stop_ids


# -- forced thoughts ---------------------------------------------------------------------------------------------------


_EMPTY = '<think>\n\n</think>\n\n'


@pytest.mark.parametrize(
  ('name', 'opens'),
  [('r1', ''), ('r1-forced', '<think>\n'), ('qwen3', ''), ('qwen3.5', '<think>\n'), ('qwen3.5-small', _EMPTY)],
)
@pytest.mark.parametrize('force', [True, False])
@pytest.mark.parametrize('form', ['free_think', 'world_modeling'])
def test_a_forced_thought_stands_once_and_where_the_template_puts_it(made, name, opens, force, form):
  tok = ChatTokenizer(made[name])
  spec = EnvSpec('x', FrozenLake(), Budget(), 100, 1)
  context = ContextManager(tok, [spec], context_settings(format=form, force_prefix=force))
  tags = {'free_think': '<think>', 'world_modeling': '<think><observation>'}[form] if force else ''
  opens = '<think>\n' if opens == _EMPTY and force else opens  # tags that think take the place of an empty thought
  expected = opens + tags.removeprefix('<think>') if opens else tags
  assert context.reply_prefix == expected
  head = tok.format.assistant.before
  assert tok.decode(context.first_prompt(0, 'P', 3).ids).endswith(head + expected)
  # A demonstration goes on where the prompt ends, and the whole reply is of its form.
  texts = {'think': 'so', 'observation': 'o', 'reasoning': 'so', 'prediction': 'p'}
  said = context.format_reply(['Up'], texts)
  assert '<think>' not in said or expected in ('', _EMPTY)
  whole = context.reply_texts([list(tok.encode(said))])[0]
  assert whole.count('<think>') == 1 and context.parse(0, whole).valid
  assert context.count_reply(context.reply_prefix + said) == len(tok.encode(said)) + 1


# -- conversations of files --------------------------------------------------------------------------------------------


def test_conversations_of_a_file_have_the_ids_of_the_template_and_come_back(pair, tmp_path):
  ours, theirs = pair
  talks = [
    [('user', 'hi'), ('assistant', 'A'), ('user', 'two'), ('assistant', 'B.')],
    [('system', 'Be brief.'), ('user', 'hi\n\nyou'), ('assistant', 'A'), ('user', 'two'), ('assistant', 'B.')],
  ]
  path = tmp_path / 'talks.jsonl'
  path.write_text('\n'.join(json.dumps({'messages': [{'role': r, 'content': c} for r, c in talk]}) for talk in talks))
  rows, _ = conversations.tokenize(conversations.read(str(path)), ours, ours.format.forced, 1000, 'sft.data')
  for row, talk in enumerate(talks):
    ids = rows.tokens[row, : rows.length[row]].tolist()
    sent = [{'role': r, 'content': c} for r, c in talk]
    if ours.format.thoughts is not Thoughts.PAST:  # Qwen3's gives the last reply an empty thought
      whole = theirs.apply_chat_template(sent, tokenize=True, return_dict=False)
      assert whole[: len(ids)] == ids and whole[len(ids) - 1] == ours.stop_ids[0]
    found = ours.messages(ours.decode(ids))
    default = ours.format.default_system
    if ours.format.joins_system and talk[0][0] == 'system':
      talk = [('user', f'{talk[0][1]}\n\n{talk[1][1]}'), *talk[2:]]  # they are one message
    found = [(role, text.removeprefix(NO_THOUGHT)) for role, text in found]
    assert found == ([('system', default)] if default and talk[0][0] == 'user' else []) + talk


# -- templates that are refused ----------------------------------------------------------------------------------------

_LOOP = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + CONTENT + '<|im_end|>\n' }}{% endfor %}"
_SPOKEN = '{% for m in messages %}{{ m.role + ": " + m.content + "\n" }}{% endfor %}'
_OPENING = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


@pytest.mark.parametrize(
  ('template', 'words'),
  [
    (_LOOP.replace('CONTENT', "('' if m.role == 'system' else m.content)") + _OPENING, 'drops, repeats or moves'),
    (
      _LOOP.replace('messages', 'messages|reverse').replace('CONTENT', 'm.content') + _OPENING,
      'drops, repeats or moves',
    ),
    (_LOOP.replace('CONTENT', 'm.content|upper') + _OPENING, 'drops, repeats or moves'),
    (_LOOP.replace('CONTENT', 'm.content + m.content') + _OPENING, 'drops, repeats or moves'),
    (_LOOP.replace('CONTENT', 'm.content.rstrip()') + _OPENING, "white space in the system's messages"),
    (_LOOP.replace('CONTENT', "m.content.lstrip('\n')") + _OPENING, 'shorter conversation'),
    (_LOOP.replace('CONTENT', "m.content.rstrip('\n')") + _OPENING, 'white space in'),
    (_LOOP.replace('CONTENT', "m.content|replace('  ', ' ')") + _OPENING, 'stands in a shorter conversation'),
    (_LOOP.replace('CONTENT', 'loop.index|string + m.content') + _OPENING, 'should'),
    (_LOOP.replace('CONTENT', "(m.content if loop.last else m.content|replace('A', 'B'))") + _OPENING, 'moves'),
    (_LOOP.replace('CONTENT', "m.content.split('</think>')[0]") + _OPENING, 'drops, repeats or moves'),
    (_LOOP.replace('CONTENT', "m.content|replace('<think>', '[')") + _OPENING, 'of the thought of an earlier reply'),
    (_LOOP.replace('CONTENT', "m.content + ('!' if messages|length > 6 else '')") + _OPENING, 'shorter conversation'),
    # Of templates that keep all thoughts, blanks in the thought and behind it.
    (QWEN3_8.replace('[-1] | trim %}', "[-1].strip('\n') %}"), 'shorter conversation'),
    (QWEN3_8.replace(".lstrip('\n') %}", ' | trim %}'), 'shorter conversation'),
    (_LOOP.replace('CONTENT', 'm.content') + "{{ '<|im_start|>assistant\n' }}", 'should'),
    ("{{ raise_exception('no system') }}", 'no system'),
    ("{% if messages[0].role == 'system' %}{{ raise_exception('System role') }}{% endif %}" + _LOOP, 'System role'),
    (_SPOKEN, "the opening of a reply is '' and should begin with 'assistant: '"),
    (_SPOKEN + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}", 'begins with no token'),
    ('{% if', 'TemplateSyntaxError'),
  ],
)
def test_a_template_that_moves_or_rewrites_messages_is_refused_in_one_line(tmp_path, template, words):
  write_tokenizer(tmp_path, Kind(template, CHATML_TOKENS, eos='<|im_end|>'))
  with pytest.raises(UserError) as error:
    ChatTokenizer(tmp_path)
  message = str(error.value)
  assert message.startswith(f'model.path={tmp_path}: its chat template cannot be continued token by token: ')
  assert words in message and '\n' not in message and len(message) < 500


def test_ids_without_a_token_are_never_sampled(tmp_path):
  directory = pathlib.Path(write_tokenizer(tmp_path, KINDS['llama3']))
  before = ChatTokenizer(directory)
  file = directory / 'tokenizer.json'
  raw = json.loads(file.read_text())
  for token in raw['added_tokens']:  # 20 ids behind the others, as in a vocabulary that was cut
    token['id'] += 20
    raw['model']['vocab'][token['content']] = token['id']
  file.write_text(json.dumps(raw))
  after = ChatTokenizer(directory)
  assert after.size == before.size + 20 and max(after.stop_ids) < after.size and not before.banned
  first = before.size - len(raw['added_tokens'])
  assert after.banned == tuple(range(first, first + 20))


def test_without_a_template_there_is_chatml_or_an_error(tmp_path):
  write_tokenizer(tmp_path / 'base', Kind(None, CHATML_TOKENS, eos='<|endoftext|>'))
  base = ChatTokenizer(tmp_path / 'base')
  assert base.format == CHATML
  assert base.stop_ids == (base.added['<|im_end|>'], base.added['<|endoftext|>'])
  write_tokenizer(tmp_path / 'other', Kind(None, ('<pad>', '<|im_start|>')))
  with pytest.raises(
    UserError, match=r'model\.path=.*: the tokenizer has no chat template and lacks <\|im_end\|> of ChatML'
  ):
    ChatTokenizer(tmp_path / 'other')


def test_the_longest_token_ends_a_reply(tmp_path):
  tok = ChatTokenizer(write_tokenizer(tmp_path, dataclasses.replace(KINDS['smollm2'], others=('<|im', '<|'))))
  assert tok.format.end == '<|im_end|>' and tok.stop_ids == (tok.added['<|im_end|>'],)


def test_several_templates_need_a_default(tmp_path):
  directory = pathlib.Path(write_tokenizer(tmp_path, Kind(None, CHATML_TOKENS)))
  path = directory / 'tokenizer_config.json'
  raw = json.loads(path.read_text())
  templates = [{'name': 'rag', 'template': chatml('x')}, {'name': 'default', 'template': chatml('y')}]
  path.write_text(json.dumps(raw | {'chat_template': templates}))
  assert ChatTokenizer(directory).format.default_system == 'y'
  path.write_text(json.dumps(raw | {'chat_template': [templates[0], {'name': 'tool', 'template': chatml('z')}]}))
  with pytest.raises(UserError, match='none of them is the default'):
    ChatTokenizer(directory)


def test_tokens_that_reach_over_the_ends_of_pieces_are_refused(tmp_path):
  directory = pathlib.Path(write_tokenizer(tmp_path, KINDS['r1-plain']))
  raw = json.loads((directory / 'tokenizer.json').read_text())
  raw['pre_tokenizer']['add_prefix_space'] = True
  (directory / 'tokenizer.json').write_text(json.dumps(raw))
  with pytest.raises(UserError, match='piece by piece'):
    ChatTokenizer(directory)


def test_thoughts_are_written_as_the_template_does(made):
  for name in ('qwen3', 'r1', 'r1-plain', 'llama3', 'qwen2.5'):
    ours, theirs = ChatTokenizer(made[name]), reference(made[name])
    for reply in (
      '<think>\nhm\n</think>\n\nA',
      '<think>\nhm\n</think>\n\n  A',
      '<think>x</think>A<think>y</think>\nB',
      'x</think>\nA',
    ):
      messages = [('user', 'a'), ('assistant', reply), ('user', 'b')]
      assert write(ours.format, messages, opens=True) == theirs.apply_chat_template(
        [{'role': r, 'content': c} for r, c in messages], tokenize=False, add_generation_prompt=True
      )
