"""Long observations are cut before they enter a prompt, with a mark that tells how much is missing."""

from __future__ import annotations

from ragen_jax.agent import templates
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.segments import Observation, Segment, TextSegment, join

# The mark needs at most so many tokens, one for each of its bytes.
LEAST_TOKENS = 32


def cut(observation: Observation, most: int, tokenizer: ChatTokenizer) -> Observation:
  """The observation with at most `most` tokens of text, at least `LEAST_TOKENS`, the mark of the cut included.

  The beginning is kept. Images are kept whole, also those behind the cut, and their tokens do not count. Texts between
  images are counted one by one, and as prompts write them, without special tokens. An observation that is short enough
  is returned unchanged.
  """
  parts = join(observation)
  if sum(len(p.text.encode()) for p in parts if isinstance(p, TextSegment)) <= most:  # a token has at least one byte
    return observation
  texts = {i: tokenizer.harmless(templates.plain(p.text)) for i, p in enumerate(parts) if isinstance(p, TextSegment)}
  counts = {i: len(tokenizer.encode_once(text)) for i, text in texts.items()}
  total = sum(counts.values())
  if total <= most:
    return observation
  kept: list[Segment] = []
  left = most
  for i, part in enumerate(parts):
    if i not in texts:
      kept.append(part)
    elif left and counts[i] <= left - LEAST_TOKENS:
      kept.append(TextSegment(texts[i]))
      left -= counts[i]
    elif left:  # the texts behind it are left out
      kept.append(TextSegment(_cut_text(texts[i], left, total - (most - left), tokenizer)))
      left = 0
  return kept[0].text if isinstance(observation, str) else join(kept)


def _cut_text(text: str, most: int, total: int, tokenizer: ChatTokenizer) -> str:
  """The beginning of a text, with a mark that tells how many of `total` tokens are missing; at most `most` tokens."""
  ends = tokenizer.ends(text)
  keep = min(most, len(ends))
  while True:
    shown = text[: ends[keep - 1]] if keep else ''
    marked = f'{shown}\n[... {total - keep} more tokens]'
    if not keep or len(tokenizer.encode_once(marked)) <= most:
      return marked
    keep -= 1
