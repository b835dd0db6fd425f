r"""Passages in a file, and their ranking by BM25.

A corpus is a JSONL file with one passage in a line:

    {"id": "0", "title": "Analytical Engine", "contents": "The Analytical Engine was ..."}
    {"id": "1", "contents": "\"Ada Lovelace\"\nAda Lovelace was ..."}

Without `title`, the first of several lines of `contents` is the title, in quotation marks or not, as in Search-R1's
corpora.
"""

from __future__ import annotations

import json
import logging
import pathlib
import re
import unicodedata

import numpy as np

from ragen_jax.utils.errors import one_line, short

_K1, _B = 1.5, 0.75


def as_passage(contents: str, title: str = '') -> str:
  """A passage with its title in the first line, without the quotation marks that Search-R1's corpora put around it."""
  contents = contents.strip()
  if title.strip():
    return f'{title.strip()}\n{contents}'
  first, line_end, rest = contents.partition('\n')
  first = first.strip()
  quoted = line_end and len(first) > 2 and first.startswith('"') and first.endswith('"')
  return f'{first[1:-1]}\n{rest.strip()}' if quoted else contents


def read_corpus(path: pathlib.Path) -> list[str]:
  """The passages of a JSONL file, each with its title in the first line; blank lines are skipped.

  Raises:
    OSError: the file cannot be read.
    UnicodeDecodeError: the file is not UTF-8.
    ValueError: a line is no passage, or there is none; the message is one line with the number of the line.
  """
  passages = []
  allowed = '{"title": text, "contents": text} with or without a title'
  with path.open(encoding='utf-8-sig', newline='\n') as lines:
    for number, line in enumerate(lines, 1):
      if not line.strip():
        continue
      try:
        row = json.loads(line)
      except (ValueError, RecursionError) as e:
        raise ValueError(f'line {number} is no JSON ({one_line(e, str)}); allowed: {allowed}') from e
      values = (row.get('contents'), row.get('title', '')) if isinstance(row, dict) else ('', '')
      if not all(isinstance(value, str) for value in values) or not values[0].strip():
        raise ValueError(f'line {number} is {short(row)}; allowed: {allowed}')
      passages.append(as_passage(*values))
  if not passages:
    raise ValueError(f'has no passage; allowed: lines with {allowed}')
  return passages


def words_of(text: str) -> list[str]:
  """The words of a text, in lower case: runs of letters and digits."""
  return re.findall(r'\w+', unicodedata.normalize('NFKC', text).casefold())


class Bm25Index:
  """Passages and the BM25 score of each of their words, Lucene's variant with k1 = 1.5 and b = 0.75.

  The score of a passage of |d| words is the sum over the different words of the query of

      ln(1 + (N - n + 0.5) / (n + 0.5)) * f / (f + k1 * (1 - b + b * |d| / mean))

  where n of the N passages, which have `mean` words on average, contain the word, and this one contains it f times.
  """

  def __init__(self, passages: list[str]):
    """Raises ImportError without the package bm25s."""
    # The import calls JAX once, and lets the package log its steps at every level. None of that is needed here.
    import bm25s

    logging.getLogger('bm25s').setLevel(logging.WARNING)
    self._passages, self._vocabulary = passages, {}
    number = lambda word: self._vocabulary.setdefault(word, len(self._vocabulary))  # noqa: E731
    ids = [[number(word) for word in words_of(passage)] for passage in passages]
    if not self._vocabulary:
      raise ValueError('has no word in any passage')
    self._index = bm25s.BM25(method='lucene', k1=_K1, b=_B)
    self._index.index((ids, self._vocabulary), create_empty_token=False, show_progress=False)

  def search(self, query: str, top_k: int) -> list[str]:
    """The passages with the highest scores above 0; equal scores in the order of the corpus."""
    ids = [self._vocabulary[word] for word in dict.fromkeys(words_of(query)) if word in self._vocabulary]
    if not ids:
      return []
    scores = self._index.get_scores_from_ids(ids)  # f32[passages]
    top_k = min(top_k, len(scores))
    least = np.partition(scores, -top_k)[-top_k]
    able = np.flatnonzero((scores >= least) & (scores > 0))
    return [self._passages[i] for i in able[np.argsort(-scores[able], kind='stable')][:top_k]]
