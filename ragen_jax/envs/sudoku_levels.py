"""Sudoku levels from a key, in pure JAX: a shuffled full board whose cells are emptied while one solution remains."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

# Random numbers of a full board: for 2 sets of bands, the lines within them, the digits, and the transposition.
_FULL_BOARD_BITS = {4: 2 * 2 + 2 * 4 + 4 + 1, 9: 2 * 3 + 2 * 9 + 9 + 1}

# Limits of one proof of uniqueness: steps of the search, and choices that are open at a time. A cell whose proof needs
# more stays given.
_MAX_STEPS = 400
_MAX_DEPTH = 24


def generate(key: jax.Array, side: int, empty_cells: int) -> tuple[jax.Array, jax.Array]:
  """A level with exactly one solution, traced: the solution, i32[S, S], digits from 1, and the given cells, bool[S, S].

  Of the `side` * `side` cells, fewer than `empty_cells` are emptied if the board would have a second solution.
  """
  # One draw for all random numbers of a level compiles several times faster than one draw for each use.
  bits = jax.random.bits(key, (_FULL_BOARD_BITS[side] + side**2,))
  bits_full, bits_order = jnp.split(bits, [_FULL_BOARD_BITS[side]])
  solution, order = _full_board(bits_full, side), ranks(bits_order)
  return solution, remove_cells(solution, order, empty_cells)


def _full_board(bits: jax.Array, side: int) -> jax.Array:
  """A full board i32[S, S], digits from 1: a cyclic pattern, shuffled by operations that keep it a valid board.

  The pattern of side 4 is 1234 / 3412 / 2341 / 4123. `bits` are random u32[_FULL_BOARD_BITS[side]].
  """
  box = math.isqrt(side)
  bands, within, digits, transpose = jnp.split(bits, np.cumsum([2 * box, 2 * side, side]))
  # The rows and columns of the pattern, permuted: bands, and the lines within each band.
  lines = ranks(bands.reshape(2, box, 1), axis=1) * box + ranks(within.reshape(2, box, box))
  row, col = lines.reshape(2, side, 1)[0], lines.reshape(2, side)[1]
  pattern = (box * (row % box) + row // box + col) % side
  pattern = jnp.where(transpose % 2, pattern, pattern.T)
  return ranks(digits)[pattern] + 1


def ranks(numbers: jax.Array, axis: int = -1) -> jax.Array:
  """Ranks from 0 along an axis, i32; of random numbers, a random permutation. Equal numbers rank in their order.

  All pairs are compared, since sorts compile slowly.
  """
  numbers = jnp.moveaxis(numbers, axis, -1)
  mine, other, place = numbers[..., :, None], numbers[..., None, :], jnp.arange(numbers.shape[-1])
  before = (other < mine) | ((other == mine) & (place < place[:, None]))
  return jnp.moveaxis(before.sum(axis=-1, dtype=jnp.int32), -1, axis)


@struct.dataclass
class _Search:
  """The state of `remove_cells`: the cells of a full board are tried in order, each by a search for a second solution.

  Attributes:
    board: i32[S, S], the digit of a cell as a bit, 1 << (digit - 1); 0 for empty cells.
    depth_of: i32[S, S], the number of open choices when the search filled the cell; 0 for other cells.
    depth: i32[], number of open choices; 0 between searches.
    cell: i32[D], the cell of each open choice; entry 0 is not used.
    rest: i32[D], the untried digits (bits) of that cell; entry 0 is 0.
    tried: i32[], number of cells that were tried.
    removed: i32[], number of cells that were emptied.
    steps: i32[], steps of the current search.
  """

  board: jax.Array
  depth_of: jax.Array
  depth: jax.Array
  cell: jax.Array
  rest: jax.Array
  tried: jax.Array
  removed: jax.Array
  steps: jax.Array


def remove_cells(solution: jax.Array, order: jax.Array, empty_cells: int) -> jax.Array:
  """Empties cells one by one, each only if the board keeps exactly one solution. Returns bool[S, S], the filled cells.

  With the cell empty, a second solution exists exactly if there is one with another digit in that cell, which a search
  by propagation and backtracking decides. All searches are one flat loop, so that under vmap no level waits for the
  search of another.

  Args:
    solution: i32[S, S], a full board.
    order: i32[S * S], the cells in the order in which they are tried.
    empty_cells: number of cells to empty; fewer are emptied if that is not possible.
  """
  side = solution.shape[0]
  zero = jnp.int32(0)
  start = _Search(
    board=(1 << (solution - 1)).astype(jnp.int32),
    depth_of=jnp.zeros((side, side), jnp.int32),
    depth=zero,
    cell=jnp.zeros((_MAX_DEPTH,), jnp.int32),
    rest=jnp.zeros((_MAX_DEPTH,), jnp.int32),
    tried=zero,
    removed=zero,
    steps=zero,
  )
  end = jax.lax.while_loop(
    lambda s: (s.removed < empty_cells) & (s.tried < side * side),
    functools.partial(_search_step, digits=start.board, order=order),
    start,
  )
  return end.board != 0


def _search_step(s: _Search, digits: jax.Array, order: jax.Array) -> _Search:
  """One step of `remove_cells`: begins a search, fills forced cells, makes a choice, or goes back to an earlier one.

  `digits` are the solution as bits, i32[S, S].
  """
  side = digits.shape[0]
  cells = jnp.arange(side * side).reshape(side, side)
  here = cells == order[s.tried]
  begins = s.depth == 0
  board = jnp.where(begins & here, 0, s.board)
  options, forced, contradiction = _propagate(board)
  contradiction &= ~begins

  # No other digit fits the cell by propagation alone: no search is needed.
  certain = begins & (here & (forced != 0)).any()
  second_solution = ~begins & ~contradiction & (board != 0).all()
  gives_up = ~begins & ((s.steps >= _MAX_STEPS) | (s.depth == _MAX_DEPTH - 1))

  # A new choice: first a digit other than the solution's for the tried cell, then cells with the fewest options.
  chooses = jnp.where(begins, ~certain, ~contradiction & ~second_solution & ~(forced != 0).any())
  fewest = jnp.where(board == 0, jax.lax.population_count(options) * side**2 + cells, 16 * side**2).min() % side**2
  chosen = jnp.where(begins, order[s.tried], fewest)
  choice = jnp.where(cells == chosen, options, 0).sum()
  choice &= jnp.where(begins, ~jnp.where(here, digits, 0).sum(), -1)
  depths = jnp.arange(_MAX_DEPTH)
  opened = chooses & (depths == s.depth + 1)
  cell, rest = jnp.where(opened, chosen, s.cell), jnp.where(opened, choice, s.rest)

  # The next digit of the latest choice that has an untried one; cells that were filled since then are emptied. If no
  # choice has an untried digit, there is no second solution.
  depth = jnp.where((rest != 0) & (depths <= s.depth + chooses), depths, 0).max()
  tries = chooses | contradiction
  latest = depths == depth
  digit = jnp.where(latest, rest & -rest, 0).sum()
  rest = jnp.where(tries & latest, rest & ~digit, rest)
  tried_cell = cells == jnp.where(latest, cell, 0).sum()
  undone = jnp.where((s.depth_of > 0) & (s.depth_of >= depth), 0, board)

  ends_unique = certain | (contradiction & (depth == 0))
  ends = ends_unique | second_solution | gives_up
  restored = jnp.where(here, jnp.where(ends_unique, 0, digits), jnp.where(s.depth_of > 0, 0, board))
  return _Search(
    board=jnp.where(
      ends, restored, jnp.where(tries, jnp.where(tried_cell, digit, undone), jnp.where(forced != 0, forced, board))
    ),
    depth_of=jnp.where(
      ends,
      0,
      jnp.where(
        tries,
        jnp.where(tried_cell, depth, jnp.where(s.depth_of >= depth, 0, s.depth_of)),
        jnp.where(forced != 0, s.depth, s.depth_of),
      ),
    ),
    depth=jnp.where(ends, 0, jnp.where(tries, depth, s.depth)),
    cell=cell,
    rest=rest,
    tried=s.tried + ends,
    removed=s.removed + ends_unique,
    steps=jnp.where(ends, 0, s.steps + 1),
  )


def _propagate(board: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Constraint propagation on a board of bits i32[S, S].

  Returns:
    i32[S, S], the possible digits of a cell (of a filled cell, its own); i32[S, S], the forced digit of an empty cell:
    its only option, or a digit without another place in a row, column or box, else 0; bool[], the board has no
    solution: a cell has no option, or a digit no place in a row, column or box. On a full board that finds every error.
  """
  side = board.shape[0]
  box = math.isqrt(side)
  every = (1 << side) - 1
  zero = jnp.int32(0)

  def units(x):
    """i32[3 * S, S], the cells of all rows, columns and boxes."""
    return jnp.concatenate([x, x.T, x.reshape(box, box, box, box).swapaxes(1, 2).reshape(side, side)])

  def union_of_units(x):
    """i32[S, S], the union of the bits of each cell's row, column and box, from i32[3 * S]."""
    row, col, block = x.reshape(3, side)
    block = jnp.repeat(jnp.repeat(block.reshape(box, box), box, axis=0), box, axis=1)
    return row[:, None] | col | block

  def count(a, b):
    """Joins two pairs of (bits that are set at least once, bits that are set at least twice)."""
    return a[0] | b[0], a[1] | b[1] | (a[0] & b[0])

  used = jax.lax.reduce(units(board), zero, jax.lax.bitwise_or, (1,))
  options = jnp.where(board == 0, every & ~union_of_units(used), board)
  in_units = units(options)
  once, twice = jax.lax.reduce((in_units, jnp.zeros_like(in_units)), (zero, zero), count, (1,))
  contradiction = (options == 0).any() | (once != every).any()
  only_place = options & union_of_units(once & ~twice)
  forced = jnp.where(options & (options - 1) == 0, options, only_place & -only_place)
  return options, jnp.where(board == 0, forced, 0), contradiction
