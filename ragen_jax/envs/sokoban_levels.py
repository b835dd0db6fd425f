"""Sokoban levels from a key, in pure JAX: rooms by a random walk, puzzles by reverse play.

A level is made backwards. A room is carved out of rock, the boxes are put on their targets, and a player who pulls
instead of pushing walks at random. A legal pull is a legal push in reversed time, so the reversed walk solves the level
that it has reached: every level can be solved by construction. Of the levels that the walks reach, the one with the
highest score is kept. The rooms and the score (displacement of the boxes times box swaps) are those of gym-sokoban's
generator, the source of RAGEN's levels. That generator searches depth first; here many random walkers run in parallel,
so the distribution of levels differs (benchmarks/sokoban_levels.py compares them). It is close on RAGEN's tags; in a
deep search on 8x8 cells with 2 boxes ours are easier, 9.9 moves to solve on average against 13.6.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs.solvers.sokoban import DIRECTIONS, position_table

# Maximum attempts at a level that meets all conditions. With 1 box almost no attempt fails, with 2 boxes one or two in
# ten, with 3 boxes on 6x6 or 4 on 10x10 six or seven in ten.
MAX_ATTEMPTS = 64
# Walkers times ticks in one room: few walkers with many ticks, or many with few.
_WALK_TICKS = 1280
# Rooms of one attempt; the first room in which a box can be pulled off every target is used.
_ROOMS = 4
# Maximum steps of the player after the end of the best walk.
_STROLL = 3
_TURN_PROBABILITY = 0.35
# The cells that one step of the room's walk carves, as (row, column) offsets: bars, corners, a square.
_STAMPS = (
  ((0, -1), (0, 0), (0, 1)),
  ((-1, 0), (0, 0), (1, 0)),
  ((0, -1), (0, 0), (1, 0)),
  ((0, 0), (0, 1), (1, 0)),
  ((0, -1), (0, 0), (1, -1), (1, 0)),
)


@struct.dataclass
class Level:
  """A level and one solution of it; the other fields are those of `sokoban.State`.

  Attributes:
    solution: i8[walk], action ids that solve the level; -1, before and between them, stands for no action.
  """

  walls: jax.Array
  targets: jax.Array
  boxes: jax.Array
  player: jax.Array
  solution: jax.Array


def _carve_room(bits, dim) -> jax.Array:
  """A room from u32[steps + 1, 3]: bool[R, C], True where there is floor.

  A walk turns with probability 0.35 before each step and carves a small shape at each cell that it reaches. The floor
  is connected, and the outer ring is wall.
  """
  rows, cols = dim
  start = 1 + (bits[-1, :2] % jnp.array([rows - 2, cols - 2], jnp.uint32)).astype(jnp.int32)
  turn = _happens(bits[:-1, 0], _TURN_PROBABILITY).at[0].set(True)
  directions = jnp.asarray(DIRECTIONS)[bits[:-1, 1] % 4]
  stamps = jnp.asarray(_stamps())[bits[:-1, 2] % len(_STAMPS)]  # [steps, 3]

  # A row of the room is a word and a column a bit, so that a step takes few operations.
  def walk(carry, step):
    at, heading, carved = carry
    turns, direction, stamp = step
    heading = jnp.where(turns, direction, heading)
    at = jnp.clip(at + heading, 1, jnp.array([rows - 2, cols - 2]))
    under = jnp.arange(rows)[:, None] == at[0] + jnp.arange(-1, 2)  # [R, 3]
    carved |= jnp.where(under, stamp << (at[1] - 1).astype(jnp.uint32), 0).sum(1, dtype=jnp.uint32)
    return (at, heading, carved), None

  carved = jax.lax.scan(walk, (start, directions[0], jnp.zeros(rows, jnp.uint32)), (turn, directions, stamps))[0][2]
  inside = np.zeros(dim, bool)
  inside[1:-1, 1:-1] = True
  return ((carved[:, None] >> jnp.arange(cols, dtype=jnp.uint32)) & 1).astype(bool) & inside


def _happens(bits: jax.Array, probability: float) -> jax.Array:
  """bool, True with a probability, from random u32 bits; an integer comparison, which is equal on every machine."""
  return bits < np.uint32(probability * 2**32)


def _stamps() -> np.ndarray:
  """u32[stamps, 3], the carved bits of each stamp in the row above, its own and the row below; bit 1 is the middle."""
  masks = np.zeros((len(_STAMPS), 3), np.uint32)
  for i, stamp in enumerate(_STAMPS):
    for row, col in stamp:
      masks[i, row + 1] |= 1 << (col + 1)
  return masks


def generate(
  key: jax.Array,
  dim: tuple[int, int],
  num_boxes: int,
  search_depth: int,
  min_solution: int = 0,
  max_solution: int = 0,
) -> Level:
  """A level from a key, traced; equal keys and options give equal levels on every machine.

  Rooms are tried until one gives a level with every box off the targets and a shortest solution within the bounds, at
  most `MAX_ATTEMPTS` times. The best level so far is kept, beginning with a fixed one, so the result is always a legal
  level that can be solved and is not solved yet.

  Args:
    dim: rows and columns, border included, at least 5 each.
    search_depth: the most moves of the reverse walk, so the most moves of `Level.solution`.
    min_solution: the fewest moves of the *shortest* solution, 0 for no bound. The bound is exact: all positions of the
      room are searched, which requires a board with a `position_table`.
    max_solution: the most moves of the shortest solution, 0 for no bound beyond `search_depth`.
  """

  def attempt(carry):
    tries, score, level = carry
    new_score, new_level = _attempt(
      jax.random.fold_in(key, tries), dim, num_boxes, search_depth, min_solution, max_solution
    )
    better = new_score > score
    level = jax.tree.map(lambda new, old: jnp.where(better, new, old), new_level, level)
    return tries + 1, jnp.maximum(new_score, score), level

  def unsatisfied(carry):
    tries, score, _ = carry
    return (tries < MAX_ATTEMPTS) & (score < _IN_BOUNDS + num_boxes * _PER_BOX)

  start = (jnp.int32(0), jnp.int32(0), fixed_level(dim, num_boxes, search_depth))
  return jax.lax.while_loop(unsatisfied, attempt, start)[2]


def fixed_level(dim: tuple[int, int], num_boxes: int, search_depth: int) -> Level:
  """The level for the case that no room gives one: an open room that one push to the left solves."""
  walls = np.ones(dim, bool)
  walls[1:-1, 1:-1] = False
  targets, boxes = np.zeros(dim, bool), np.zeros(dim, bool)
  # Further boxes from the last cell backwards, away from target, box and player in the first row.
  rest = np.argwhere(~walls)[::-1][: num_boxes - 1]
  for at in (targets, boxes):
    at[tuple(rest.T)] = True
  targets[1, 1] = boxes[1, 2] = True
  solution = np.full(_ticks(dim, num_boxes, search_depth) + _STROLL, -1, np.int8)
  solution[-1] = 2
  return jax.tree.map(jnp.asarray, Level(walls, targets, boxes, np.array([1, 3], np.int32), solution))


# The parts of a score, most important first: the bounds hold, boxes off all targets, displacement times swaps.
_IN_BOUNDS = 2**29
_PER_BOX = 2**22
_OFF = 2**16


def _ticks(dim: tuple[int, int], num_boxes: int, search_depth: int) -> int:
  """The ticks of each walker: a few more than its moves, since a tick at a wall is not a move.

  There are at most five ticks for each cell and box, because a walker can get stuck behind a box that it has pulled
  into a dead end; new walkers then find more positions.
  """
  return min(search_depth + 10, 5 * (dim[0] - 2) * (dim[1] - 2) * num_boxes)


def _attempt(key, dim, num_boxes, search_depth, min_solution, max_solution) -> tuple[jax.Array, Level]:
  """The best level that the walkers find in one room, with its score; 0 if they find none."""
  rows, cols = dim
  ticks = _ticks(dim, num_boxes, search_depth)
  shapes = (
    (_ROOMS, int(1.7 * (rows + cols)) + 1, 3),
    (_ROOMS, 1 + num_boxes, rows * cols),
    (-(-ticks // 16), max(1, _WALK_TICKS // ticks)),
    (_STROLL, 5),
  )
  # One draw for everything, since each draw costs half a second of compilation.
  sizes = [math.prod(shape) for shape in shapes]
  parts = jnp.split(jax.random.bits(key, (sum(sizes),), jnp.uint32), np.cumsum(sizes)[:-1])
  for_room, for_place, for_walk, for_stroll = (part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))

  floors = jax.vmap(lambda bits: _carve_room(bits, dim))(for_room)
  homes, player, possible = jax.vmap(_place)(for_place, floors)
  room = jnp.argmax(possible)
  floor, homes, player, possible = (x[room] for x in (floors, homes, player, possible))
  in_bounds = _bounds(floor, homes, min_solution, max_solution) if min_solution or max_solution else _no_bounds
  score, player, boxes, path, moves = _walk(
    for_walk, ticks, floor.reshape(-1), cols, homes, player, search_depth, in_bounds
  )
  player, strolled = _stroll(for_stroll, floor.reshape(-1), cols, homes, player, boxes, search_depth - moves, in_bounds)
  path = jnp.concatenate([path, strolled])
  level = Level(
    walls=~floor,
    targets=_board(homes, floor.size).reshape(dim),
    boxes=_board(boxes, floor.size).reshape(dim),
    player=jnp.stack([player // cols, player % cols]),
    # The reversed walk, with each move reversed.
    solution=jnp.where(path < 0, path, path ^ 1)[::-1],
  )
  return jnp.where(possible, score, 0), level


def _place(bits, floor):
  """Target cells i32[K], the player's cell i32[], and whether the boxes can be pulled; bits u32[1 + K, cells].

  Targets are any cells of the floor, as in RAGEN: rooms in which few cells are suitable are then used less often, and
  the levels are less cramped. The last push of a solution leaves the player beside its box, so the walk begins beside a
  box that can be pulled.
  """
  open_cells = floor.reshape(-1)
  moves = _moves(floor.shape[1])
  pulls = jnp.stack([open_cells & jnp.roll(open_cells, -m) & jnp.roll(open_cells, -2 * m) for m in moves])  # [4, cells]
  noise = bits | 1  # never 0, which marks cells that must not be chosen
  cells = jnp.arange(open_cells.size)
  free = open_cells
  homes = []
  for cell_noise in noise[1:]:
    homes.append(jnp.argmax(jnp.where(free, cell_noise, 0)).astype(jnp.int32))
    free &= cells != homes[-1]
  homes = jnp.stack(homes)
  move = jnp.asarray(moves)
  first = pulls[:, homes[0]] & free[homes[0] + move] & free[homes[0] + 2 * move]
  direction = jnp.argmax(jnp.where(first, noise[0, :4], 0))
  return homes, homes[0] + move[direction], pulls.any(0)[homes].all() & first.any()


def _moves(cols: int) -> np.ndarray:
  """i32[4], the offset of each direction in the index of a cell, for boards of `cols` columns."""
  return DIRECTIONS @ np.array([cols, 1], np.int32)


def _walk(bits, ticks, open_cells, cols, homes, player, search_depth, in_bounds):
  """Walks backwards from the solved room: each of W walkers pulls the box behind it, if any; bits u32[ticks / 16, W].

  Returns:
    For the best level of all walkers: its score i32[], the player's cell i32[], the boxes' cells i32[K], the walk to it
    as directions i8[ticks], with -1 for ticks without a move, and the number of its moves i32[].
  """
  walkers = bits.shape[1]
  num_boxes = homes.shape[0]
  displacement = _displacement(open_cells.size, cols, homes)
  # The worth of a box on a cell: its displacement, plus _OFF if the cell is not a target.
  worth = (displacement + jnp.where(_board(homes, open_cells.size), 0, _OFF)).reshape(-1)
  rank = jnp.arange(num_boxes)[:, None]

  def tick(carry, inputs):
    player, boxes, last, swaps, moves, best = carry
    now, move = inputs
    ahead = player + move
    free = open_cells[ahead] & (boxes != ahead).all(0) & (moves < search_depth)
    pulled = free & (boxes == player - move)  # [K, W]
    boxes = jnp.where(pulled, player, boxes)
    player = jnp.where(free, ahead, player)
    pulled_box = jnp.where(pulled.any(0), (pulled * rank).sum(0), last)
    swaps += pulled_box != last
    moves += free

    total = worth[rank * open_cells.size + boxes].sum(0)
    off = total // _OFF
    score = off * _PER_BOX + jnp.minimum(swaps * (total % _OFF), _PER_BOX - 1)
    score = jnp.where(off > 0, score + in_bounds(boxes, player) * _IN_BOUNDS, 0)
    better = score > best[0]
    found = (score, jnp.full(walkers, now), player, boxes, moves)
    best = jax.tree.map(lambda new, old: jnp.where(better, new, old), found, best)
    return (player, boxes, pulled_box, swaps, moves, best), free

  zeros = jnp.zeros(walkers, jnp.int32)
  player, boxes = jnp.full(walkers, player), jnp.repeat(homes[:, None], walkers, axis=1)
  start = (player, boxes, zeros - 1, zeros, zeros, (zeros, zeros - 1, player, boxes, zeros))
  direction = ((bits[:, None] >> np.arange(0, 32, 2, dtype=np.uint32)[:, None]) & 3).astype(jnp.int8)
  direction = direction.reshape(-1, walkers)[:ticks]
  (*_, best), moved = jax.lax.scan(tick, start, (jnp.arange(ticks), jnp.asarray(_moves(cols))[direction]))
  winner = jnp.argmax(best[0])
  score, until, player, boxes, moves = jax.tree.map(lambda x: x[..., winner], best)
  path = jnp.where(moved[:, winner] & (jnp.arange(ticks) <= until), direction[:, winner], jnp.int8(-1))
  return score, player, boxes, path, moves


def _board(at: jax.Array, cells: int) -> jax.Array:
  """bool[cells], True for the cells in i32[K]; a comparison, since a scatter is slow on CPUs."""
  return (at[:, None] == jnp.arange(cells)).any(0)


def _displacement(cells: int, cols: int, homes: jax.Array) -> jax.Array:
  """i32[K, cells], the Manhattan distance of each cell from each box's target."""
  at = np.arange(cells, dtype=np.int32)
  return jnp.abs(at // cols - homes[:, None] // cols) + jnp.abs(at % cols - homes[:, None] % cols)


def _stroll(bits, open_cells, cols, homes, player, boxes, moves_left, in_bounds):
  """A few random steps of the player away from the box, an addition of RAGEN.

  The player takes a step with probability 0.5, or 0.8 if the boxes are displaced by a single cell, and after each step
  another with probability 0.5, at most 3. The steps keep a level within the bounds if it is.

  Returns:
    The player's cell i32[] and the directions i8[3], -1 for no step.
  """
  displaced = _displacement(open_cells.size, cols, homes)[jnp.arange(len(homes)), boxes].sum()
  noise = bits | 1  # u32[3, 5]: four directions, and whether to go
  going = jnp.where(displaced == 1, _happens(noise[0, 4], 0.8), _happens(noise[0, 4], 0.5))
  bounded = in_bounds(boxes, player)
  taken = []
  for i in range(_STROLL):
    aheads = player + jnp.asarray(_moves(cols))  # [4]
    free = open_cells[aheads] & (boxes[:, None] != aheads).all(0)
    free &= ~bounded | in_bounds(jnp.repeat(boxes[:, None], 4, axis=1), aheads)
    direction = jnp.argmax(jnp.where(free, noise[i, :4], 0)).astype(jnp.int8)
    going &= free.any() & (i < moves_left)
    if i:
      going &= _happens(noise[i, 4], 0.5)
    player = jnp.where(going, aheads[direction], player)
    taken.append(jnp.where(going, direction, -1).astype(jnp.int8))
  return player, jnp.stack(taken)


def _no_bounds(boxes, player):
  return jnp.ones(player.shape, bool)


def _bounds(floor, homes, min_solution, max_solution):
  """Whether positions of a room are within the bounds: a function of cells of boxes i32[K, ...] and player i32[...].

  Breadth-first search backwards over all positions of the board, as in solvers/sokoban.py, for one room.
  """
  rows, cols = floor.shape
  num_boxes = homes.shape[0]
  table = position_table((rows, cols), num_boxes)
  successors = jnp.asarray(table.successors)
  rank = jnp.asarray(table.rank)
  digits = jnp.asarray(table.cells ** np.arange(num_boxes - 1, -1, -1), jnp.int32)

  def index(boxes, player):
    inner = [(cell // cols - 1) * (cols - 2) + cell % cols - 1 for cell in (boxes, player)]
    return rank[jnp.tensordot(digits, inner[0], axes=1)] * table.cells + inner[1]

  open_cells = floor[1:-1, 1:-1].reshape(-1)
  legal = open_cells[table.box_sets].all(-1)[:, None] & open_cells & ~table.occupied
  legal = jnp.append(legal.reshape(-1), False)
  solved = (jnp.arange(legal.size) // table.cells == index(homes, jnp.int32(cols + 1)) // table.cells) & legal

  def one_more_move(_, reached):
    return reached | (legal & reached[successors].any(0))

  nearer = jax.lax.fori_loop(0, max(min_solution - 1, 0), one_more_move, solved)
  kept = ~nearer
  if max_solution:
    kept &= jax.lax.fori_loop(0, max_solution - max(min_solution - 1, 0), one_more_move, nearer)
  return lambda boxes, player: kept[index(boxes, player)]
