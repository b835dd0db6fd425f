"""Writes a corpus for the tool 'search' from the passages that the rows of a data set carry, such as HotpotQA's.

python tools/make_search_corpus.py corpus.jsonl hotpot_train_v1.1.json hotpot_dev_distractor_v1.json

Reads .json (a list of rows), .jsonl and .parquet files (the latter need pyarrow). The field `context` of a row is a
list of [title, [sentence, ...]], or {'title': [...], 'sentences': [[...], ...]}. A passage that several rows carry is
written once. docs/search.md explains what for.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any


def passages(row: Any) -> list[tuple[str, str]]:
  """The passages of a row, title and text; raises ValueError if its `context` has another form."""
  context = row.get('context') if isinstance(row, dict) else None
  if isinstance(context, dict):
    titles, sentences = context.get('title'), context.get('sentences')
    same = isinstance(titles, list) and isinstance(sentences, list) and len(titles) == len(sentences)
    context = list(zip(titles, sentences, strict=True)) if same else None
  if not isinstance(context, list) or not all(map(_is_passage, context)):
    raise ValueError('context is no list of [title, [sentence, ...]]')
  return [(title.strip(), ' '.join(' '.join(sentences).split())) for title, sentences in context]


def _is_passage(part: Any) -> bool:
  if not isinstance(part, list | tuple) or len(part) != 2 or not isinstance(part[1], list):
    return False
  return all(isinstance(text, str) for text in (part[0], *part[1]))


def rows(path: pathlib.Path) -> Iterator[Any]:
  """The rows of a file; raises ValueError if it has none."""
  if path.suffix == '.parquet':
    import pyarrow.parquet

    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(columns=['context']):
      yield from batch.to_pylist()
  elif path.suffix == '.jsonl':
    with path.open(encoding='utf-8') as lines:
      yield from (json.loads(line) for line in lines if line.strip())
  elif path.suffix == '.json':
    found = json.loads(path.read_text(encoding='utf-8'))
    if not isinstance(found, list):
      raise ValueError('is no list of rows')
    yield from found
  else:
    raise ValueError('is no .json, .jsonl or .parquet file')


def write(out: pathlib.Path, sources: list[pathlib.Path]) -> tuple[int, int]:
  """Writes the corpus; the numbers of rows that were read and of passages that were written."""
  found: dict[tuple[str, str], None] = {}
  count = 0
  for path in sources:
    number = 0
    try:
      for row in rows(path):
        number += 1
        found.update(dict.fromkeys(part for part in passages(row) if part[1]))
    except ValueError as e:
      raise ValueError(f'{path}: in or after row {number}: {e}') from e
    count += number
  partial = out.with_name(out.name + '.partial')
  with partial.open('w', encoding='utf-8') as file:
    for i, (title, text) in enumerate(found):
      file.write(json.dumps({'id': str(i), 'title': title, 'contents': text}, ensure_ascii=False) + '\n')
  partial.replace(out)
  return count, len(found)


def main(arguments: list[str]) -> str:
  """Runs the command; the line that it prints."""
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('corpus', type=pathlib.Path, help='the file to write')
  parser.add_argument('sources', type=pathlib.Path, nargs='+', help='files with rows')
  parsed = parser.parse_args(arguments)
  try:
    count, written = write(parsed.corpus, parsed.sources)
  except (OSError, ImportError, ValueError) as e:
    raise SystemExit(f'make_search_corpus: {e}') from e
  return f'{parsed.corpus}: {written} passages of {count} rows'


if __name__ == '__main__':
  print(main(sys.argv[1:]))
