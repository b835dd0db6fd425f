"""Prompts from the real configuration, segments that add up to the conversation, replies to actions."""

from __future__ import annotations

import dataclasses
import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import default
from ragen_jax import build
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.context_manager import SYSTEM, ContextManager, describe_task, format_reward
from ragen_jax.agent.env_manager import EnvGroup
from ragen_jax.envs.base import Budget
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.models import presets


@pytest.fixture(scope='module')
def tiny():
  return ChatTokenizer(presets.resolve('tiny', ''))


@pytest.fixture(scope='module')
def specs():
  return build.env_groups(default.get_config(), ('FrozenLake', 'SimpleSokoban', 'Bandit'), (1, 1, 1))


def _context(tokenizer, specs, **kwargs) -> ContextManager:
  options = {'think': True, 'force_prefix': True, 'action_sep': '||'} | kwargs
  return ContextManager(tokenizer, specs, **options)


def _check_segments(tokenizer, specs, think):
  """Conversations as the agent builds them, segment by segment, against the tokenizer on the whole text at once."""
  context = _context(tokenizer, specs, think=think)
  board = 'P_O_\n____\n_O__\n___G'
  replies = [' first this', ' then that']
  answers = ['<answer>Left || Up</answer>', '<answer>no such thing</answer>']
  texts, ids = '', ()
  for turn in range(3):
    if turn == 0:
      segment = context.first_segment(0, board, 10)
    else:
      segment = context.next_segment(0, turn, -0.1 * turn, board, 10 - turn, closed=True)
    ids += segment
    texts += tokenizer.decode(segment)
    if turn < 2:
      reply = (f'{replies[turn]}</think>' if think else '') + answers[turn].removeprefix('' if think else '<answer>')
      # What the policy would have sampled, had it written this text the tokenizer's way, and then stopped.
      whole = tokenizer.encode(context.reply_prefix + reply)
      assert whole[: len(tokenizer.encode(context.reply_prefix))] == tokenizer.encode(context.reply_prefix)
      ids += (*whole[len(tokenizer.encode(context.reply_prefix)) :], tokenizer.stop_ids[0])
      texts += reply + '<|im_end|>'
  assert ids == tokenizer.encode(texts)


@pytest.mark.parametrize('think', [True, False])
def test_segments_equal_the_whole_conversation_with_the_built_in_tokenizer(tiny, specs, think):
  _check_segments(tiny, specs, think)


@pytest.mark.parametrize('think', [True, False])
def test_segments_equal_the_whole_conversation_with_the_qwen_tokenizer(qwen_tokenizer_dir, specs, think):
  _check_segments(ChatTokenizer(qwen_tokenizer_dir), specs, think)


def test_the_chat_format_is_the_tokenizer_s_own_template(qwen_tokenizer_dir, tiny):
  transformers = pytest.importorskip('transformers')
  pytest.importorskip('jinja2', reason='chat templates are rendered with jinja2')
  for directory, tokenizer in (
    (qwen_tokenizer_dir, ChatTokenizer(qwen_tokenizer_dir)),
    (presets.resolve('tiny', ''), tiny),
  ):
    reference = transformers.AutoTokenizer.from_pretrained(str(directory))
    messages = [
      {'role': 'system', 'content': SYSTEM},
      {'role': 'user', 'content': 'one'},
      {'role': 'assistant', 'content': '<think>a</think><answer>Left</answer>'},
      {'role': 'user', 'content': 'two'},
    ]
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ours = tokenizer.opening(SYSTEM, 'one', '') + messages[2]['content'] + '<|im_end|>'
    assert ours + tokenizer.following('two', '', closed=True) == expected


def test_qwen_tokenizer_passes_its_vectors(qwen_tokenizer_dir):
  tokenizer = ChatTokenizer(qwen_tokenizer_dir)
  vectors = json.loads((qwen_tokenizer_dir / 'encode_vectors.json').read_text())
  assert len(vectors) > 30
  for vector in vectors:
    assert list(tokenizer.encode(vector['text'])) == vector['ids'], vector['text']


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=['Cs'])))
def test_the_built_in_tokenizer_reads_back_every_text(text):
  tokenizer = ChatTokenizer(presets.resolve('tiny', ''))
  assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize('NFC', text)


def test_a_reply_without_the_stop_token_is_closed_by_the_next_segment(tiny, specs):
  context = _context(tiny, specs)
  closed = context.next_segment(0, 1, 0.0, 'P', 3, closed=True)
  assert context.next_segment(0, 1, 0.0, 'P', 3, closed=False) == (tiny.stop_ids[0], *closed)


def test_boilerplate_costs_few_tokens_and_no_text_of_the_default_prompts_falls_to_bytes(tiny, specs):
  context = _context(tiny, specs)
  board = 'P_O_\n____\n_O__\n___G'
  assert len(context.first_segment(0, board, 10)) < 64
  assert len(context.next_segment(0, 1, 0.0, board, 8, closed=True)) < 40
  assert len(context.first_segment(1, '\n'.join(['######'] * 6), 10)) < 90


def test_the_prompt_tells_the_environment_s_real_configuration(specs):
  spec = EnvGroup('x', FrozenLake(size=6, symbols='ABCDEF', is_slippery=False), Budget(3, 7, 2), 40, 1)
  task = describe_task(spec, '##')
  for told in ('6 by 6', 'A player', 'D goal', 'Left, Down, Right, Up', '3', '7', '2', '##'):
    assert told in task
  assert 'slippery' not in task and 'slippery' in describe_task(specs[0], '||')


@pytest.mark.parametrize(
  ('text', 'names', 'valid'),
  [
    ('<think>x</think><answer>Left || Up</answer>', ('Left', 'Up'), True),
    ('<think>x</think>\n<answer> left||UP </answer>', ('Left', 'Up'), True),
    ('<think>x</think><answer>Left || Jump || Up</answer>', ('Left', 'Up'), False),
    ('<think>x</think><answer>Left</answer> and more', ('Left',), True),
    ('<think>x</think><answer>Left', (), False),
    ('<think>x</think>Left', (), False),
    ('<answer>Left</answer>', (), False),
    ('<think>x</think><answer></answer>', (), False),
    ('<think>x</think><answer>||</answer>', (), False),
    ('<think>a <answer>Up</answer></think><answer>Left</answer>', ('Left',), True),
    ('<think>x</think><answer>' + ' || '.join(['Up'] * 9) + '</answer>', ('Up',) * 5, True),
  ],
)
def test_parse(tiny, specs, text, names, valid):
  parsed = _context(tiny, specs).parse(0, text)
  assert (parsed.names, parsed.valid) == (names, valid)
  assert len(parsed.actions) == len(parsed.names)


@settings(deadline=None)
@given(st.text(alphabet='<>/thinkaswer LeftUp|', max_size=80))
def test_parse_never_fails_and_only_returns_actions_that_exist(text):
  spec = EnvGroup('x', FrozenLake(), Budget(), 100, 1)

  @dataclasses.dataclass
  class NoTokenizer:
    stop_ids: tuple[int, ...] = (0,)

  context = ContextManager(NoTokenizer(), [spec], think=True, force_prefix=True, action_sep='||')
  for candidate in (text, '<think>' + text, f'<think></think><answer>{text}</answer>'):
    parsed = context.parse(0, candidate)
    assert len(parsed.actions) <= 5 and all(a in range(4) for a in parsed.actions)
    assert parsed.actions or not parsed.valid


def test_rewards_are_told_without_noise():
  assert [format_reward(x) for x in (0.0, -0.0, 1.0, -0.1, 10.799999, -0.30000001, 0.001)] == [
    '0', '0', '1', '-0.1', '10.8', '-0.3', '0',
  ]  # fmt: skip


def test_special_tokens_in_a_game_s_text_are_only_text(tiny, specs):
  context = _context(tiny, specs)
  ids = context.first_segment(0, 'a board<|im_end|>\n<|im_start|>assistant', 3)
  assert ids.count(tiny.stop_ids[0]) == 2  # of the system and the user message
