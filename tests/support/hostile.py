"""Text that is made to mislead a parser: what policies, environments and users can write or send."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

from hypothesis import strategies as st

SPECIALS = ('<|im_start|>', '<|im_end|>', '<|endoftext|>')
TAGS = tuple(
  f'<{slash}{name}>'
  for name in ('think', 'answer', 'observation', 'reasoning', 'prediction', 'tool_call', 'tool_response', 'prompt')
  for slash in ('', '/')
)
# Pieces of hostile texts. Without lone surrogates: no decoder writes them, and borders replace them.
PIECES = (
  *SPECIALS, *TAGS, *TAGS,
  # Special tokens in halves, doubled, with other letters, and with the marks of other scripts.
  '<|', '|>', '<|im_', 'im_start|>', '<<|im_end|>|im_end|>', '<|im_end|', '<|IM_END|>', '<\uff5cim_end\uff5c>',
  '<|im_start|>system\n', '<|im_end|>\n<|im_start|>user\n', '<|im_start|>assistant\n', '\nuser\n', 'system',
  '<|vision_start|>', '<|image_pad|>', '<image>', '<|fim_prefix|>', '<|object_ref_start|>',
  # Tags in halves and nested.
  '<thi', 'nk>', '</', '<', '>', '<think', '<<think>>', '<answer ', '</answer', '<tool_c', 'all>', '</tool_call',
  # Calls of tools.
  '{"name": "f", "arguments": {"a": 1}}', '{"name": "', '"arguments": ', '{', '}', '[', ']', '"', ':', ',', '\\', '\\"',
  '\\ud800', '\\udc00', '\\u0000', 'NaN', '-Infinity', '1e999', '9' * 40, 'null', 'true',
  '{"name": "\\ud83d", "arguments": "{\\"a\\": \\"\\\\ud800\\"}"}', '{"name": "f", "arguments": "\\udfff"}',
  # Actions and descriptions.
  'Up', 'Left', 'up ', '||', ' || ', 'U', "R'", 'place 5 at row 2 col 3', '2,3,5', '(1,1,1)', '(1 + 2) * 3',
  '((', '1/0', 'the box is above and to the left', 'box is', ' and ', 'to the left',
  'in  the same\trow', '\u00b2', '\u0663', '\u0130',
  # Control characters, ends of lines, blanks, directions, combining marks, other scripts.
  '\x00', '\x02', '\x03', '\x1b[31m', '\x7f', '\x85', '\r', '\n', '\r\n', '\v', '\f', '\t', ' ', '\u00a0',
  '\u2028', '\u2029', '\u202e', '\u200b', '\ufeff', '\ufffd', '\ufffe', 'e\u0301', '\u0338', '\u212a', '\u1100\u1161',
  '\u65e5\u672c', '\u0627\u0644', '\U0001f642',
  '\U0001f468\u200d\U0001f469', '\U0010ffff',
  # Markup.
  '</script>', '<!--', '-->', '<![CDATA[', '<script>', '<pre>', '</pre>', '&lt;', '&#0;',
  '<img src=x onerror=alert(1)>',
  '![a](http://example.invalid/a)', '[a](javascript:alert(1))', '```', '    ', '# ', '* ', '| a |\n|---|\n', '{{data}}',
)  # fmt: skip


def random_text(rng: random.Random) -> str:
  """A few pieces, some of them repeated, and other characters."""
  parts = []
  for _ in range(rng.randrange(12)):
    kind = rng.random()
    if kind < 0.8:
      parts.append(rng.choice(PIECES))
    elif kind < 0.9:
      parts.append(rng.choice(PIECES) * rng.randrange(2, 8))
    else:
      parts.append(chr(rng.choice((rng.randrange(0x80), rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)))))
  return ''.join(parts)


def random_texts(seed: int, count: int) -> Iterator[str]:
  """Texts, the same for each call."""
  rng = random.Random(seed)
  return (random_text(rng) for _ in range(count))


def texts() -> st.SearchStrategy[str]:
  """The texts of `random_text` for Hypothesis, which shows the shortest one that fails."""
  other = st.text(st.characters(exclude_categories=['Cs']), max_size=3)
  return st.lists(st.one_of(st.sampled_from(PIECES), other), max_size=12).map(''.join)


def rng_of(text: str) -> random.Random:
  """Random numbers that depend on the text only."""
  return random.Random(zlib.crc32(text.encode()))


def cut(text: str, rng: random.Random) -> list[str]:
  """The text in random pieces."""
  parts, at = [], 0
  while at < len(text):
    end = at + rng.choice((1, 1, 2, 3, 7, 50))
    parts.append(text[at:end])
    at = end
  return parts
