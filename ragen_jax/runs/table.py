"""Plain tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(rows: Sequence[Sequence[Any]], title: str, header: Sequence[str] | None = None) -> str:
  """A plain table without a newline at its end: a title, a rule, and rows with aligned columns.

  Cells have any type; floats are shown with three decimals. Columns of numbers are aligned to the right.
  """
  cells = [[f'{cell:.3f}' if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
  lines = [list(header), *cells] if header else cells
  width = max((len(line) for line in lines), default=0)
  lines = [line + [''] * (width - len(line)) for line in lines]
  widths = [max(len(line[i]) for line in lines) for i in range(width)]
  right = [all(isinstance(row[i], int | float) for row in rows if i < len(row)) for i in range(width)]
  texts = [
    '  '.join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right, strict=True)).rstrip()
    for line in lines
  ]
  rule = '-' * max(len(text) for text in [title, *texts])
  if header:
    texts.insert(1, rule)
  return '\n'.join([title, rule, *texts])
