"""The tokenizer of the built-in model: whole stretches of the prompts are one token, board squares one each.

A byte-level base makes every text representable and readable back (in NFC, like Qwen's); on top of it stand added
tokens for the fixed stretches of text between what varies, so that boilerplate costs a token where a word-piece
vocabulary would spend thirty.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

PAD, START, END = '<|endoftext|>', '<|im_start|>', '<|im_end|>'

_CHAT_TEMPLATE = (
  "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
  "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


def build(pieces: Iterable[str]) -> Tokenizer:
  """A tokenizer with one token for each piece, wherever it stands; the longest piece wins.

  Args:
    pieces: texts without the chat format's special tokens in them; order gives the ids.

  Returns:
    The tokenizer: special tokens first, then bytes, then pieces.
  """
  specials = [PAD, START, END]
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocab = {token: i for i, token in enumerate(specials + alphabet)}
  tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
  # As Qwen's own; `transformers` puts it there for every checkpoint of this architecture.
  tokenizer.normalizer = normalizers.NFC()
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
  # A piece of one byte is in the base already.
  wanted = [p for p in dict.fromkeys(pieces) if len(p.encode()) > 1]
  tokenizer.add_tokens([AddedToken(p, special=False, normalized=False) for p in wanted])
  return tokenizer


def save(tokenizer: Tokenizer, directory: str) -> None:
  """Writes tokenizer.json and tokenizer_config.json, as `transformers` reads them."""
  tokenizer.save(os.path.join(directory, 'tokenizer.json'), pretty=False)
  config = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'model_max_length': 32768,
    'eos_token': END,
    'pad_token': PAD,
    'clean_up_tokenization_spaces': False,
    'chat_template': _CHAT_TEMPLATE,
  }
  with open(os.path.join(directory, 'tokenizer_config.json'), 'w', encoding='utf-8') as f:
    json.dump(config, f, indent=2, ensure_ascii=False)
    f.write('\n')
