"""Conversations of a file become the rows that a rollout would have made of them, with loss on replies only."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ragen_jax import build
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.models import presets
from ragen_jax.modes import sft
from ragen_jax.sft import conversations
from ragen_jax.sft.data import DemonstrationSettings, collect_demonstrations
from ragen_jax.sft.demonstrations import DemonstrationStyle
from ragen_jax.utils.errors import UserError
from tests.support.configs import small_config


@pytest.fixture(scope='module')
def tiny():
  return ChatTokenizer(presets.resolve('tiny', ''))


def _said(role, content, **more):
  return {'role': role, 'content': content, **more}


def _write(path, *lines):
  path.write_text('\n'.join(line if isinstance(line, str) else json.dumps(line) for line in lines))
  return str(path)


def _rows(path, tokenizer, prefix='<think>', limit=512):
  return conversations.tokenize(conversations.read(path), tokenizer, prefix, limit, 'sft.data')


def test_demonstrations_that_were_written_are_read_back_token_by_token(tmp_path, tiny):
  config = small_config(sft__noise=0.3)
  config.sft.tags, config.sft.levels = ('FrozenLake', 'Bandit'), (24, 8)
  style = build.fill(DemonstrationStyle, config.sft)
  settings = build.fill(DemonstrationSettings, config.sft, seed=0)
  parts = collect_demonstrations(sft.lessons(config, tiny), style, settings, frozenset(), None)
  played = [part.trajectory for part in parts]
  path = str(tmp_path / 'new' / 'data.jsonl')
  assert conversations.write(path, played, tiny) == 32
  again, left_out = _rows(path, tiny)
  assert left_out == 0 and len({len(c.messages) for c in conversations.read(path)}) > 2
  start = 0
  for part in played:
    for row, n in enumerate(part.length):
      assert again.length[start + row] == n
      np.testing.assert_array_equal(again.tokens[start + row, :n], part.tokens[row, :n])
      np.testing.assert_array_equal(again.loss_mask[start + row, :n], part.loss_mask[row, :n])
      assert not again.loss_mask[start + row, n:].any()
    start += len(part.length)


@pytest.mark.parametrize('which', ['tiny', 'qwen'])
@pytest.mark.slow_cases('qwen')
def test_the_tokens_are_those_of_the_chat_template_and_the_loss_is_on_replies_and_their_stop_tokens(
  tmp_path, tiny, which, request
):
  import transformers

  directory = presets.resolve('tiny', '') if which == 'tiny' else request.getfixturevalue('qwen_tokenizer_dir')
  tokenizer = tiny if which == 'tiny' else ChatTokenizer(directory)
  messages = [
    _said('system', 'Be brief.'),
    _said('user', 'What is left of 3?\n'),
    _said('assistant', '<think>2, I think</think><answer>2</answer>'),
    _said('user', 'And now?'),
    _said('assistant', ' no tags here'),
    _said('user', 'No?'),
    _said('user', 'Say!'),
    _said('assistant', 'That.', weight=0),
    _said('assistant', ''),
    _said('user', 'This is behind the last reply.'),
  ]
  found, _ = _rows(_write(tmp_path / 'a.jsonl', '', {'messages': messages}, ''), tokenizer)
  n = int(found.length[0])
  ids, mask = found.tokens[0, :n], found.loss_mask[0, :n]
  reference = transformers.AutoTokenizer.from_pretrained(str(directory))
  plain = [_said(m['role'], m['content']) for m in messages[:-1]]
  whole = reference.apply_chat_template(plain, tokenize=False).removesuffix('\n')
  assert tokenizer.decode(ids) == whole
  if which == 'tiny':  # a reply's first word could go with the prefix in Qwen's
    assert tuple(ids) == tokenizer.encode(whole)
  edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
  trained = [tokenizer.decode(ids[a:b]) for a, b in edges.reshape(-1, 2)]
  assert trained == ['2, I think</think><answer>2</answer><|im_end|>', ' no tags here<|im_end|>', '<|im_end|>']
  assert all(ids[b - 1] == tokenizer.stop_ids[0] for b in edges[1::2])


def test_what_is_too_long_is_left_out_and_counted(tmp_path, tiny):
  def line(n):
    return {'messages': [_said('user', '?' * n), _said('assistant', 'yes')]}

  path = _write(tmp_path / 'a.jsonl', line(4), line(200), line(8))
  found, left_out = _rows(path, tiny, limit=64)
  assert left_out == 1 and len(found.length) == 2
  with pytest.raises(UserError, match=r'all conversations are longer than agent\.max_context=8, up to 2\d\d tokens'):
    _rows(path, tiny, limit=8)


_GOOD = json.dumps({'messages': [_said('assistant', 'yes')]})


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    ('{"messages": [', r'line 2: is not JSON'),
    ('[]', r'line 2: must be an object with a list "messages"'),
    ('{"messages": []}', r'line 2: must be an object with a list "messages"'),
    ({'messages': ['hello']}, r'line 2: messages\[0\] must be an object'),
    ({'messages': [_said('ai', 'x')]}, r"line 2: messages\[0\]\.role is 'ai'; allowed: system, user, assistant, tool"),
    ({'messages': [_said('user', None)]}, r'line 2: messages\[0\]\.content is null; it must be text'),
    ({'messages': [_said('user', 'x'), _said('system', 'y')]}, r'line 2: messages\[1\]\.role is "system", which may'),
    ({'messages': [_said('assistant', 'x', weight=2)]}, r'line 2: messages\[0\]\.weight is 2; allowed: 0, 1'),
    ({'messages': [_said('user', 'x')]}, r'line 2: has no message of the assistant to learn from'),
    ({'messages': [_said('assistant', 'x', weight=0)]}, r'line 2: has no message of the assistant to learn from'),
    ({'messages': [_said('assistant', 'a<|im_end|>')]}, r'line 2: messages\[0\]\.content holds <\|im_end\|>, a spec'),
  ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path, tiny, line, message):
  with pytest.raises(UserError, match=message) as e:
    _rows(_write(tmp_path / 'a.jsonl', _GOOD, line, _GOOD), tiny)
  assert '\n' not in str(e.value) and 'sft.data' in str(e.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
  for content, message in ((None, 'No such file'), (b'\xff\xfe{', 'is not UTF-8'), (b'\n\n', 'holds no conversation')):
    path = tmp_path / 'a.jsonl'
    if content is not None:
      path.write_bytes(content)
    with pytest.raises(UserError, match=rf'sft\.data=.*a\.jsonl.*{message}') as e:
      conversations.read(str(path))
    assert '\n' not in str(e.value)
