"""The chat format against the tokenizers' own templates, and texts there and back."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.agent.chat import ChatTokenizer, _reader
from ragen_jax.agent.segments import as_text
from ragen_jax.agent.templates import SYSTEM
from ragen_jax.models import presets


@pytest.fixture(scope='module')
def tiny():
  return ChatTokenizer(presets.resolve('tiny', ''))


def test_the_chat_format_is_the_tokenizer_s_own_template(qwen_tokenizer_dir, qwen_tokenizer, tiny):
  import transformers

  for directory, tokenizer in ((qwen_tokenizer_dir, qwen_tokenizer), (presets.resolve('tiny', ''), tiny)):
    reference = transformers.AutoTokenizer.from_pretrained(str(directory))
    messages = [
      {'role': 'system', 'content': SYSTEM},
      {'role': 'user', 'content': 'one'},
      {'role': 'assistant', 'content': '<think>a</think><answer>Left</answer>'},
      {'role': 'user', 'content': 'two'},
    ]
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ours = as_text(tokenizer.opening(SYSTEM, 'one', '')) + messages[2]['content'] + '<|im_end|>'
    assert ours + as_text(tokenizer.following('two', '', closed=True)) == expected


def test_qwen_tokenizer_passes_its_vectors(qwen_tokenizer_dir, qwen_tokenizer):
  vectors = json.loads((qwen_tokenizer_dir / 'encode_vectors.json').read_text())
  assert len(vectors) > 30
  for vector in vectors:
    assert list(qwen_tokenizer.encode(vector['text'])) == vector['ids'], vector['text']


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=['Cs'])))
def test_the_built_in_tokenizer_reads_back_every_text(text):
  tokenizer = ChatTokenizer(presets.resolve('tiny', ''))
  assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize('NFC', text)


def test_the_bytes_of_tokens_are_those_of_the_text(qwen_tokenizer, tiny):
  text = 'a <tool_call> é🙂日本 <think>\n\n' + ''.join(map(chr, range(1, 0x250)))
  for tokenizer in (qwen_tokenizer, tiny):
    ids = tokenizer.encode_once(text)
    assert ids == tokenizer.encode(text)
    joined = b''.join(tokenizer.token_bytes(i) for i in ids)
    assert joined.decode() == unicodedata.normalize('NFC', text)
    assert tokenizer.token_bytes(tokenizer.stop_ids[0]) == b'<|im_end|>'
    assert tokenizer.token_bytes(tokenizer.size + 10**6) == b''


def test_the_tokens_up_to_a_tag_are_the_fewest_whose_text_has_it(qwen_tokenizer, tiny):
  text = 'è<think><observation>日本 </observation><reasoning></reasoning></think> </observation>🙂'
  for tokenizer in (qwen_tokenizer, tiny):
    ids = tokenizer.encode(text)
    for tag in ('<observation>', '</observation>', '</reasoning>', '</think>'):
      fewest = next(n for n in range(1, len(ids) + 1) if tag in tokenizer.decode(ids[:n]))
      assert tokenizer.count_until(ids, tag) == fewest
    assert tokenizer.count_until(tokenizer.encode('a'), 'a') == 1
    assert tokenizer.count_until(ids, '</prediction>') == tokenizer.count_until((), 'a') == 0


def test_added_tokens_are_listed_with_their_ids(qwen_tokenizer, tiny):
  for tokenizer in (qwen_tokenizer, tiny):
    assert set(tokenizer.specials) < set(tokenizer.added)
    for text, id_ in tokenizer.added.items():
      assert tokenizer.encode(text) == (id_,)


def test_the_ids_of_long_texts_are_not_kept(tiny):
  kept = lambda: tiny._cached.cache_info().currsize  # noqa: E731
  tiny.encode('short, and new here')
  before = kept()
  long = 'A board that no level has. ' * 1000
  assert tiny.encode(long) == tiny.encode_once(long) and kept() == before
  tiny.encode('short, new here too')
  assert kept() == before + 1


@pytest.mark.parametrize(
  'name',
  ['tiny', 'tiny-hybrid', 'tiny-vl', 'qwen2.5-coder-0.5b-instruct', 'smollm2-135m-instruct', 'r1-distill-qwen-random'],
)
def test_tokenizers_are_those_of_auto_tokenizer(name, real_model):
  import transformers

  directory = presets.resolve(name, '') if name.startswith('tiny') else real_model(name)
  expected = transformers.AutoTokenizer.from_pretrained(str(directory))
  ours = _reader(directory).from_pretrained(str(directory))
  assert ours.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
  assert ours.special_tokens_map == expected.special_tokens_map
