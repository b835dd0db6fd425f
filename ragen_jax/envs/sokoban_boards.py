"""Boards of Sokoban with a code for each cell: from states, from text, and from Boxoban's level files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# The codes of cells, in RAGEN's order; `Sokoban.symbols` has one symbol for each.
WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)
MEANINGS = ('wall', 'empty floor', 'target', 'box on target', 'box', 'player', 'player on target')
# The same cells in Boxoban's level files (and most other collections).
BOXOBAN = ('#', ' ', '.', '*', '$', '@', '+')


def encode_boards(walls: np.ndarray, targets: np.ndarray, boxes: np.ndarray, player: np.ndarray) -> np.ndarray:
  """The codes of cells, i8[N, R, C], from bool[N, R, C] each and the player's rows and columns, i32[N, 2]."""
  contents = np.where(targets, np.int8(TARGET), np.int8(FLOOR))
  contents[boxes] = BOX
  contents[boxes & targets] = BOX_ON_TARGET
  contents[walls] = WALL
  rows, cols = player.T
  rank = np.arange(len(contents))
  contents[rank, rows, cols] = np.where(targets[rank, rows, cols], PLAYER_ON_TARGET, PLAYER)
  return contents


def parse_board(
  lines: Sequence[str], size: tuple[int, int], dim: tuple[int, int], num_boxes: int, symbols: Sequence[str], title: str
) -> dict[str, np.ndarray]:
  """Reads the rows of a board: `walls`, `targets`, `boxes`, bool[R, C] each, and `player`, i32[2].

  Args:
    size: the rows and columns that the board must have.
    dim: rows and columns of the result, filled up with wall on the right and below.
    num_boxes: the number of boxes, and of targets, that the board must have.
    symbols: one character for each code.
    title: name of the level in errors.

  Raises:
    ValueError: the text is not such a board; the message gives the place.
  """
  rows, cols = size
  if len(lines) != rows:
    raise ValueError(f'sokoban: {title} has {len(lines)} rows; dim={dim} has {rows}')
  contents = np.full(dim, WALL, np.int8)
  for r, line in enumerate(lines):
    if len(line) != cols:
      wanted = f'dim={dim}' if cols == dim[1] else 'row 0'
      raise ValueError(f'sokoban: {title}, row {r} has {len(line)} columns; {wanted} has {cols}')
    for c, symbol in enumerate(line):
      if symbol not in symbols:
        raise ValueError(f'sokoban: {title}, row {r}, column {c} is {symbol!r}; allowed: {" ".join(symbols)}')
      contents[r, c] = symbols.index(symbol)
      if contents[r, c] != WALL and (r in (0, rows - 1) or c in (0, cols - 1)):
        raise ValueError(f'sokoban: {title}, row {r}, column {c} is {symbol!r}; the border has to be wall')
  targets = np.isin(contents, (TARGET, BOX_ON_TARGET, PLAYER_ON_TARGET))
  boxes = np.isin(contents, (BOX, BOX_ON_TARGET))
  players = np.argwhere(np.isin(contents, (PLAYER, PLAYER_ON_TARGET)))
  for what, count, wanted in (
    ('players', len(players), 1),
    ('boxes', int(boxes.sum()), num_boxes),
    ('targets', int(targets.sum()), num_boxes),
  ):
    if count != wanted:
      raise ValueError(f'sokoban: {title} has {count} {what}; there have to be {wanted}')
  return {'walls': contents == WALL, 'targets': targets, 'boxes': boxes, 'player': players[0].astype(np.int32)}


def parse_boxoban(text: str, dim: tuple[int, int], num_boxes: int) -> list[dict[str, np.ndarray]]:
  """`parse_board` of each level of a Boxoban file: a header line `; number` and at most `dim` rows and columns.

  Raises:
    ValueError: there is no level, or a board is wrong; the message gives the level and the place.
  """
  boards: list[tuple[str, list[str]]] = []
  for line in text.splitlines():
    if line.startswith(';'):
      boards.append((f'level {line[1:].strip()}', []))
    elif line.strip():
      if not boards:
        raise ValueError(f'sokoban: a board before the first header line "; number": {line!r}')
      boards[-1][1].append(line)
  if not boards:
    raise ValueError('sokoban: the text holds no level; each begins with a line "; number"')
  levels = []
  for title, lines in boards:
    if not lines:
      raise ValueError(f'sokoban: {title} has no board')
    size = (min(len(lines), dim[0]), min(len(lines[0]), dim[1]))
    levels.append(parse_board(lines, size, dim, num_boxes, BOXOBAN, title))
  return levels
