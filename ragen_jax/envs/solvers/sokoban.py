"""Exact Sokoban on the host: breadth-first search backwards from the solved positions, for 64 rooms at a time.

A position is a set of box cells and the player's cell, all inside the border. For boards of one size, `PositionTable`
lists all positions and the position that each move leads to, whatever the walls; the walls of a room determine which
positions are legal. With one bit for each room and one word for each position, one more move of the search costs a few
array operations for 64 rooms. The result is the distance of *every* position from a solved one, so that plans can start
from any position that a policy has reached.

Boards with too many positions for a table are searched forward, one level at a time, within the moves that are left.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import numpy as np

from ragen_jax.envs.base import Budget

# Up, Down, Left, Right: (rows, columns). The opposite of direction d is d ^ 1.
DIRECTIONS = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)], np.int32)
# Boards with more positions are searched one level at a time; 8x8 with 3 boxes (257,040) still has a table.
MAX_TABLE = 2**18
# The forward search of one level gives up after this many positions.
MAX_SEARCH = 300_000

_WORD = 64


@dataclasses.dataclass(frozen=True, eq=False)
class PositionTable:
  """All positions of K boxes and a player on the n cells inside a border, and where each move leads.

  Position `m * n + p` has its boxes on `box_sets[m]` and the player on cell p. The last position stands for none: moves
  that no room allows lead there.

  Attributes:
    box_sets: i32[M, K], the cells of the boxes, each row ascending.
    rank: i32[n ** K], the row of `box_sets` for the cells of boxes in any order, read as digits in base n.
    occupied: bool[M, n], the cells of each box set as a mask.
    successors: i32[4, M * n + 1], the position after each action.
  """

  box_sets: np.ndarray
  rank: np.ndarray
  occupied: np.ndarray
  successors: np.ndarray

  @property
  def cells(self) -> int:
    """n."""
    return self.occupied.shape[1]

  def index(self, boxes: np.ndarray, player: np.ndarray) -> np.ndarray:
    """i32[N], the positions with the boxes on cells [N, K] and the player on cells [N]."""
    return self.rank[boxes @ _digits(self.cells, boxes.shape[1])] * self.cells + player


def table_size(dim: tuple[int, int], num_boxes: int) -> int:
  """Number of positions of a board."""
  cells = (dim[0] - 2) * (dim[1] - 2)
  return math.comb(cells, num_boxes) * cells


@functools.lru_cache(maxsize=8)
def position_table(dim: tuple[int, int], num_boxes: int) -> PositionTable:
  """The table for boards of `dim` rows and columns, including the border. Tables are cached."""
  rows, cols = dim[0] - 2, dim[1] - 2
  n = rows * cols
  box_sets = np.array(list(itertools.combinations(range(n), num_boxes)), np.int32)
  digits = _digits(n, num_boxes)
  rank = np.zeros(n**num_boxes, np.int32)
  for order in itertools.permutations(range(num_boxes)):
    rank[box_sets[:, order] @ digits] = np.arange(len(box_sets))
  occupied = np.zeros((len(box_sets), n), bool)
  np.put_along_axis(occupied, box_sets, True, axis=1)

  nowhere = len(box_sets) * n
  successors = np.full((4, nowhere + 1), nowhere, np.int32)
  here = np.stack(np.divmod(np.arange(n), cols), axis=-1)
  for direction, move in enumerate(DIRECTIONS):
    inside, ahead = _cell(here + move, rows, cols)
    inside2, beyond = _cell(here + 2 * move, rows, cols)
    walk = inside & ~occupied & ~occupied[:, ahead]
    push = inside & inside2 & ~occupied & occupied[:, ahead] & ~occupied[:, beyond]
    after = successors[direction, :-1].reshape(len(box_sets), n)
    m, p = np.nonzero(walk)
    after[m, p] = m * n + ahead[p]
    m, p = np.nonzero(push)
    pushed = np.where(box_sets[m] == ahead[p, None], beyond[p, None], box_sets[m])
    after[m, p] = rank[pushed @ digits] * n + ahead[p]
  return PositionTable(box_sets, rank, occupied, successors)


def _digits(cells: int, num_boxes: int) -> np.ndarray:
  return cells ** np.arange(num_boxes - 1, -1, -1)


def _cell(at: np.ndarray, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
  """Whether (row, column) pairs [n, 2] are on the board, and their cells (0 for those that are not)."""
  inside = (at >= 0).all(-1) & (at < (rows, cols)).all(-1)
  return inside, np.where(inside, at[:, 0] * cols + at[:, 1], 0)


class RoomDistances:
  """Moves to a solved position from every position of some rooms, as bits: room g is bit g % 64 of word g // 64.

  Attributes:
    reached: u64[W, positions], whether the position can be solved.
    planes: u64[W, bits, positions], the binary digits of the distance.
  """

  def __init__(self, table: PositionTable, floor: np.ndarray, targets: np.ndarray):
    """Searches rooms with the floor bool[G, n] and the target cells i32[G, K]."""
    self.table = table
    words = [_search_rooms(table, floor[i : i + _WORD], targets[i : i + _WORD]) for i in range(0, len(floor), _WORD)]
    bits = max(len(planes) for _, planes in words)
    self.reached = np.stack([reached for reached, _ in words])
    self.planes = np.zeros((len(words), bits, self.reached.shape[1]), np.uint64)
    for word, (_, planes) in enumerate(words):
      self.planes[word, : len(planes)] = planes

  def distance(self, room: np.ndarray, position: np.ndarray) -> np.ndarray:
    """i32, moves to a solved position, for rooms and positions of one shape; -1 if there is none."""
    total = np.zeros(np.broadcast(room, position).shape, np.int32)
    for bit in range(self.planes.shape[1]):
      total |= self._bit(self.planes[:, bit], room, position).astype(np.int32) << bit
    return np.where(self._bit(self.reached, room, position), total, -1)

  def _bit(self, words: np.ndarray, room: np.ndarray, position: np.ndarray) -> np.ndarray:
    return (words[room // _WORD, position] >> (room % _WORD).astype(np.uint64)) & np.uint64(1)


def _search_rooms(table: PositionTable, floor: np.ndarray, targets: np.ndarray):
  """The solvable positions of up to 64 rooms, u64[positions], and the binary digits of their distances."""
  room_bit = np.uint64(1) << np.arange(len(floor), dtype=np.uint64)
  open_cells = np.bitwise_or.reduce(np.where(floor, room_bit[:, None], np.uint64(0)), axis=0)  # [n]
  open_sets = np.bitwise_and.reduce(open_cells[table.box_sets], axis=1)  # [M]
  legal = np.where(table.occupied, np.uint64(0), open_sets[:, None] & open_cells)
  legal = np.append(legal.reshape(-1), np.uint64(0))

  solved = np.zeros(len(table.box_sets), np.uint64)
  np.bitwise_or.at(solved, table.rank[targets @ _digits(table.cells, targets.shape[1])], room_bit)
  newest = legal & np.append(np.repeat(solved, table.cells), np.uint64(0))
  reached = newest.copy()
  planes = []
  before, one_move = np.empty_like(legal), np.empty_like(legal)
  for moves in itertools.count(1):
    before[:] = 0
    for successor in table.successors:
      np.take(newest, successor, out=one_move, mode='clip')
      before |= one_move
    newest = before & legal & ~reached
    if not newest.any():
      return reached, planes
    reached |= newest
    while moves >> len(planes):
      planes.append(np.zeros_like(legal))
    for bit, plane in enumerate(planes):
      if moves >> bit & 1:
        plane |= newest


class _TableSearch:
  """Lengths and plans for boards that have a table."""

  def __init__(self, walls: np.ndarray, targets: np.ndarray, num_boxes: int):
    # The members of a group play in one room, which is searched once.
    both = np.stack([walls, targets], axis=1)  # [N, 2, rows, columns]
    rooms, self.room = np.unique(both.reshape(len(both), -1), axis=0, return_inverse=True)
    floor, goals = _inside(rooms.reshape(-1, *both.shape[1:])).reshape(len(rooms), 2, -1).swapaxes(0, 1)
    self.table = position_table(walls.shape[1:], num_boxes)
    self.rooms = RoomDistances(self.table, ~floor, _cells_of(goals, num_boxes))

  def _position(self, states: Any) -> np.ndarray:
    boxes = _inside(np.asarray(states.boxes))
    player = np.asarray(states.player, np.int64) - 1
    cells = _cells_of(boxes.reshape(len(boxes), -1), self.table.box_sets.shape[1])
    return self.table.index(cells, player[:, 0] * boxes.shape[2] + player[:, 1])

  def lengths(self, states: Any, most: np.ndarray) -> np.ndarray:
    """i32[N], moves to a solved position, -1 if there is none. `most` is not used."""
    del most
    return self.rooms.distance(self.room, self._position(states))

  def plan(self, states: Any, most: np.ndarray, turn: int) -> list[list[int]]:
    """At most `turn` actions for each level."""
    position = self._position(states)
    left = self.rooms.distance(self.room, position)
    plans: list[list[int]] = [[] for _ in range(len(left))]
    most = np.minimum(most, turn)
    for move in range(int(most.max(initial=0))):
      successors = self.table.successors[:, position]  # [4, N]
      distances = self.rooms.distance(np.broadcast_to(self.room, successors.shape), successors)
      action = np.where(distances < 0, np.iinfo(np.int32).max, distances).argmin(axis=0)
      live = (left > 0) & (move < most)
      for row in np.flatnonzero(live):
        plans[row].append(int(action[row]))
      position = np.where(live, successors[action, np.arange(len(action))], position)
      left = np.where(live, left - 1, left)
    for row in np.flatnonzero((left < 0) & (most > 0)):
      plans[row] = [_any_move(states.walls[row], states.boxes[row], states.player[row])]
    return plans


class _ForwardSearch:
  """Lengths and plans for boards that are too big for a table: one level at a time, within the moves left."""

  def lengths(self, states: Any, most: np.ndarray) -> np.ndarray:
    """i32[N], moves to a solved position if they are at most `most`, else -1; -2 if the search gave up."""
    known: dict[tuple, int] = {}
    lengths = []
    for row in range(len(most)):
      level = (states.walls[row], states.targets[row], states.boxes[row], states.player[row])
      key = (*(np.asarray(part).tobytes() for part in level), int(most[row]))
      if key not in known:
        actions, solved, complete = search_level(*level, int(most[row]))
        known[key] = len(actions) if solved else -1 if complete else -2
      lengths.append(known[key])
    return np.array(lengths, np.int32)

  def plan(self, states: Any, most: np.ndarray, turn: int) -> list[list[int]]:
    """At most `turn` actions for each level."""
    plans: list[list[int]] = []
    for row in range(len(most)):
      level = (states.walls[row], states.targets[row], states.boxes[row], states.player[row])
      actions = search_level(*level, int(most[row]))[0] if most[row] > 0 else []
      if most[row] > 0 and not actions:
        actions = [_any_move(states.walls[row], states.boxes[row], states.player[row])]
      plans.append(actions[:turn])
    return plans


def search_level(
  walls: np.ndarray, targets: np.ndarray, boxes: np.ndarray, player: np.ndarray, most: int
) -> tuple[list[int], bool, bool]:
  """Breadth-first search forward from one level, for at most `most` moves. The border has to be wall.

  Returns:
    The actions, whether they solve the level, and whether the search was complete (it stops at `MAX_SEARCH` positions).
    If there is no solution, the actions lead to a position with the most boxes on targets.
  """
  cols = walls.shape[1]
  moves = [int(row) * cols + int(col) for row, col in DIRECTIONS]
  floor = (~walls).reshape(-1).tolist()
  live = _live_cells(floor, np.flatnonzero(targets).tolist(), moves)
  goal = sum(1 << int(cell) for cell in np.flatnonzero(targets))
  start = (sum(1 << int(cell) for cell in np.flatnonzero(boxes)), int(player[0]) * cols + int(player[1]))
  came_from: dict[tuple[int, int], tuple[tuple[int, int], int] | None] = {start: None}
  best, most_placed = start, (start[0] & goal).bit_count()
  frontier, complete = [start], True
  for _ in range(most):
    if best[0] == goal or not complete:
      break
    reached = []
    for position in frontier:
      at_boxes, at = position
      for action, move in enumerate(moves):
        ahead = at + move
        if not floor[ahead]:
          continue
        now = at_boxes
        if at_boxes >> ahead & 1:
          beyond = ahead + move
          # A box on a cell that is not live cannot reach a target any more.
          if not live[beyond] or at_boxes >> beyond & 1:
            continue
          now ^= 1 << ahead | 1 << beyond
        after = (now, ahead)
        if after not in came_from:
          came_from[after] = (position, action)
          reached.append(after)
          if (now & goal).bit_count() > most_placed:
            best, most_placed = after, (now & goal).bit_count()
    frontier = reached
    complete = len(came_from) < MAX_SEARCH
  actions = []
  step = came_from[best]
  while step is not None:
    actions.append(step[1])
    step = came_from[step[0]]
  solved = best[0] == goal
  return actions[::-1], solved, solved or complete or not frontier


def _live_cells(floor: list[bool], targets: list[int], moves: list[int]) -> list[bool]:
  """The cells from which a single box can be pushed to a target: those that pulls from a target reach."""
  live = [False] * len(floor)
  for cell in targets:
    live[cell] = True
  stack = list(targets)
  while stack:
    cell = stack.pop()
    for move in moves:
      before = cell + move
      if floor[before] and not live[before] and floor[before + move]:
        live[before] = True
        stack.append(before)
  return live


def _any_move(walls: np.ndarray, boxes: np.ndarray, player: np.ndarray) -> int:
  """The first action that changes the state; 0 if none does."""
  for action, move in enumerate(DIRECTIONS):
    ahead, beyond = tuple(player + move), tuple(player + 2 * move)
    if not walls[ahead] and not (boxes[ahead] and (walls[beyond] or boxes[beyond])):
      return action
  return 0


def _inside(boards: np.ndarray) -> np.ndarray:
  return boards[..., 1:-1, 1:-1]


def _cells_of(boards: np.ndarray, count: int) -> np.ndarray:
  """i32[N, count], the cells that are True in bool[N, n], ascending."""
  return np.nonzero(boards)[1].reshape(len(boards), count)


class SokobanSolution:
  """Shortest play on a batch of levels.

  Attributes:
    length: i32[N], moves of the shortest solution; -1 if there is none. On boards that are too big for a table, also -1
      if it takes more moves than the budget has, and -2 if the search gave up.
    success: f32[N], 1.0 if the shortest solution fits into the budget, else 0.0; NaN if the search gave up.
  """

  def __init__(self, states: Any, budget: Budget, max_steps: int):
    walls, targets = np.asarray(states.walls), np.asarray(states.targets)
    num_boxes = int(targets[0].sum()) if len(targets) else 1
    if table_size(walls.shape[1:], num_boxes) <= MAX_TABLE and len(walls):
      self._search = _TableSearch(walls, targets, num_boxes)
    else:
      self._search = _ForwardSearch()
    self._per_turn = budget.max_actions_per_turn
    self._max_steps = max_steps
    steps_left = max_steps - np.asarray(states.steps)
    most = np.minimum(steps_left, budget.most_actions)
    self.length = self._search.lengths(states, most)
    self.success = ((self.length >= 0) & (self.length <= most)).astype(np.float32)
    self.success[self.length == -2] = np.nan

  def plan(self, states: Any, turns_left: np.ndarray, actions_left: np.ndarray) -> list[list[int]]:
    """The next turn's actions of a shortest solution; see `base.Solution`.

    If no solution can be reached, the plan is one move that changes the state, or moves that put as many boxes as
    possible on targets.
    """
    return self._search.plan(states, self._most(states, turns_left, actions_left), self._per_turn)

  def _most(self, states: Any, turns_left: np.ndarray, actions_left: np.ndarray) -> np.ndarray:
    """i32[N], the moves that can still be made."""
    most = np.minimum(np.asarray(actions_left), np.asarray(turns_left) * self._per_turn)
    most = np.minimum(most, self._max_steps - np.asarray(states.steps))
    return np.where(np.asarray(states.done), 0, most)
