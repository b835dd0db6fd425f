"""FrozenLake: a slippery walk over random ice to a goal, as in Gymnasium's toy text game, with an exact solver.

The rules are those of `gymnasium.envs.toy_text.frozen_lake`; levels have a random start and goal, as RAGEN's do.
Squares are numbered row by row from the top left, `square = row * size + column`.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base

LEFT, DOWN, RIGHT, UP = range(4)

_OBSERVATIONS = ('grid', 'coord', 'grid_coord')
_MEANINGS = ('player', 'ice', 'hole', 'goal', 'player in a hole', 'player on the goal')
_DESC_LETTERS = 'SFHG'

# Tile, hole, goal and player colours of the picture; the player is an inset that leaves the tile's rim in sight.
_TILE = 16
_INSET = 4
_ICE_RGB = (214, 236, 250)
_HOLE_RGB = (27, 48, 87)
_GOAL_RGB = (72, 176, 98)
_PLAYER_RGB = (222, 110, 42)
_LINE_RGB = (168, 202, 224)

# Working memory of the solver, and the most that one level may take of it.
_CHUNK_BYTES = 8 * 2**20
_LEVEL_BYTES = 1 * 2**30
# A longer plan has to be better by more than float32 noise. Out of reach of the goal, where every plan is worth
# nothing, this share of a success says that nearer is better.
_TIE = 1e-6
_HOPE = 1e-4
_HOPE_DECAY = 0.8


@struct.dataclass
class State(base.State):
  """A lake and who stands on it.

  Attributes:
    holes: bool[size, size], True where the ice has a hole.
    start: i32[], the square of the first turn.
    goal: i32[], the square to reach.
    player: i32[], the square that the player is on.
  """

  holes: jax.Array
  start: jax.Array
  goal: jax.Array
  player: jax.Array


@dataclasses.dataclass(frozen=True)
class FrozenLake(base.Environment):
  """Walk over the ice to the goal; 1 for reaching it, 0 otherwise, and a hole ends the game.

  Actions: Left, Down, Right, Up are 0, 1, 2, 3, as in Gymnasium. An action is effective when it changed the player's
  square.

  Attributes:
    size: rows and columns of the lake, at least 2.
    p: probability that a square of a new level is ice; start and goal always are.
    is_slippery: whether a move can go sideways.
    success_rate: on slippery ice, the probability that a move goes where it was meant; the two directions at right
      angles to it share the rest. Without `is_slippery` it has no effect, as in Gymnasium.
    observation: 'grid' (symbols), 'coord' (a list of coordinates) or 'grid_coord' (both).
    symbols: six characters for player, ice, hole, goal, player in a hole, player on the goal.
  """

  name: ClassVar[str] = 'frozen_lake'
  action_names: ClassVar[tuple[str, ...]] = ('Left', 'Down', 'Right', 'Up')

  size: int = 4
  p: float = 0.8
  is_slippery: bool = True
  success_rate: float = 1 / 3
  observation: str = 'grid'
  symbols: str = 'P_OGX√'

  def __post_init__(self):
    if not isinstance(self.size, numbers.Integral) or isinstance(self.size, bool) or self.size < 2:
      raise ValueError(f'frozen_lake: size={self.size!r}; allowed: integers of at least 2')
    for field in ('p', 'success_rate'):
      value = getattr(self, field)
      if not isinstance(value, numbers.Real) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError(f'frozen_lake: {field}={value!r}; allowed: numbers from 0 to 1')
    if not isinstance(self.is_slippery, (bool, np.bool_)):
      raise ValueError(f'frozen_lake: is_slippery={self.is_slippery!r}; allowed: True, False')
    if self.observation not in _OBSERVATIONS:
      raise ValueError(f'frozen_lake: observation={self.observation!r}; allowed: {", ".join(_OBSERVATIONS)}')
    symbols = self.symbols
    different = isinstance(symbols, str) and len(symbols) == 6 == len(set(symbols))
    if not different or not symbols.isprintable() or re.search(r'[\s<|]', symbols):
      raise ValueError(
        f'frozen_lake: symbols={symbols!r}; allowed: 6 different characters that can be printed, none blank, < or |'
      )

  @property
  def slip(self) -> tuple[float, float, float]:
    """Probabilities of a move in direction action - 1, action, action + 1 (mod 4)."""
    if not self.is_slippery:
      return 0.0, 1.0, 0.0
    aside = (1 - self.success_rate) / 2
    return aside, float(self.success_rate), aside

  # -- traced, one instance ------------------------------------------------------------------------------------------

  def reset(self, key: jax.Array) -> State:
    """A level from a key: ice with probability p, start and goal anywhere, drawn again until a path joins them."""

    def draw(carry):
      key, _, _, _, _ = carry
      key, key_ice, key_start, key_goal = jax.random.split(key, 4)
      squares = self.size * self.size
      start = jax.random.randint(key_start, (), 0, squares, jnp.int32)
      goal = (start + jax.random.randint(key_goal, (), 1, squares, jnp.int32)) % squares
      ice = jax.random.bernoulli(key_ice, self.p, (squares,))
      ice = (ice | (jnp.arange(squares) == start) | (jnp.arange(squares) == goal)).reshape(self.size, self.size)
      return key, ice, start, goal, _reached(ice, start).reshape(-1)[goal]

    carry = key, jnp.zeros((self.size, self.size), bool), jnp.int32(0), jnp.int32(0), jnp.bool_(False)
    _, ice, start, goal, _ = jax.lax.while_loop(lambda carry: ~carry[-1], draw, carry)
    no = jnp.bool_(False)
    return State(done=no, success=no, holes=~ice, start=start, goal=goal, player=start)

  def _step(self, state: State, action: jax.Array, key: jax.Array) -> tuple[State, base.StepOutput]:
    direction = action
    if self.is_slippery:
      aside, ahead, _ = self.slip
      u = jax.random.uniform(key)
      direction = (action - 1 + (u >= aside) + (u >= aside + ahead)) % 4
    player = _neighbour(state.player, direction, self.size).astype(jnp.int32)
    success = player == state.goal
    done = success | jnp.asarray(state.holes).reshape(-1)[player]
    out = base.StepOutput(reward=success.astype(jnp.float32), effective=player != state.player)
    return state.replace(done=done, success=success, player=player), out

  # -- text ----------------------------------------------------------------------------------------------------------

  def rules(self) -> str:
    """The game in a few sentences, with the odds of slipping where there are any."""
    text = (
      f'You are on a frozen lake of {self.size} by {self.size} squares. Walk to the goal and avoid the holes. '
      'Reaching the goal earns 1 point and ends the game; falling into a hole ends it with 0 points. '
      'A move goes one square in its direction; at the edge you stay in place.'
    )
    aside, ahead, _ = self.slip
    if aside > 0:
      text += (
        f' The ice is slippery: a move goes in its direction with probability {ahead:.3g}, '
        f'and in each of the two directions at right angles with probability {aside:.3g}.'
      )
    if self.observation != 'grid':
      last = self.size - 1
      text += (
        f' A square is written (row, column), from (0, 0) at the top left to ({last}, {last}) at the bottom right.'
      )
    return text

  def legend(self) -> dict[str, str]:
    """Symbol to meaning; empty when the observation has no symbols."""
    return {} if self.observation == 'coord' else dict(zip(self.symbols, _MEANINGS, strict=True))

  # -- host, batched ---------------------------------------------------------------------------------------------------

  def render(self, states: State) -> list[str]:
    """The observation as text, for states with leaves [N, ...]."""
    if self.observation == 'grid':
      return self._grids(states)
    coordinates = self._coordinates(states)
    if self.observation == 'coord':
      return coordinates
    grids = self._grids(states)
    return [f'Coordinates:\n{c}\nGrid Map:\n{g}' for c, g in zip(coordinates, grids, strict=True)]

  def _grids(self, states: State) -> list[str]:
    holes = np.asarray(states.holes)  # [N, size, size]
    goal, player = np.asarray(states.goal), np.asarray(states.player)
    n, size = len(holes), self.size
    code = np.array([ord(symbol) for symbol in self.symbols], np.uint32)
    # A text is a row of code points: `size` symbols and a line break, `size` times, without the last break.
    text = np.full((n, size, size + 1), ord('\n'), np.uint32)
    text[:, :, :size] = np.where(holes, code[2], code[1])
    text = text.reshape(n, size * (size + 1))
    rows = np.arange(n)
    text[rows, goal + goal // size] = code[3]
    in_hole = holes.reshape(n, size * size)[rows, player]
    text[rows, player + player // size] = np.where(player == goal, code[5], np.where(in_hole, code[4], code[0]))
    text = np.ascontiguousarray(text[:, :-1])
    return text.view(f'U{text.shape[1]}')[:, 0].tolist()

  def _coordinates(self, states: State) -> list[str]:
    holes = np.asarray(states.holes)
    n, size = len(holes), self.size
    names = [f'({row}, {column})' for row in range(size) for column in range(size)]
    holes_of = [[] for _ in range(n)]
    for i, square in zip(*(x.tolist() for x in np.nonzero(holes.reshape(n, size * size))), strict=True):
      holes_of[i].append(names[square])
    squares = (np.asarray(x).tolist() for x in (states.start, states.goal, states.player))
    return [
      f'Board: {size} rows, {size} columns\nStart: {names[start]}\nGoal: {names[goal]}\nPlayer: {names[player]}\n'
      f'Holes: {", ".join(hole) or "none"}'
      for start, goal, player, hole in zip(*squares, holes_of, strict=True)
    ]

  def render_rgb(self, state: State) -> np.ndarray:
    """One state as flat tiles of 16 x 16 pixels, u8[16 size, 16 size, 3]."""
    size = self.size
    tiles = np.where(np.asarray(state.holes)[:, :, None], _HOLE_RGB, _ICE_RGB).astype(np.uint8)
    tiles[divmod(int(state.goal), size)] = _GOAL_RGB
    picture = tiles.repeat(_TILE, axis=0).repeat(_TILE, axis=1)
    picture[::_TILE], picture[:, ::_TILE] = _LINE_RGB, _LINE_RGB
    row, column = (_TILE * x for x in divmod(int(state.player), size))
    picture[row + _INSET : row + _TILE - _INSET, column + _INSET : column + _TILE - _INSET] = _PLAYER_RGB
    return picture

  def rationale(self, states: State) -> list[str]:
    """Where the player and the goal are, as (row, column), and on which sides of the player there is a hole."""
    player, goal = np.asarray(states.player), np.asarray(states.goal)
    holes = np.asarray(states.holes).reshape(len(player), -1)
    beside = np.stack([holes[np.arange(len(player)), _neighbour(player, a, self.size)] for a in range(4)], axis=1)
    thoughts = []
    for square, target, sides in zip(player.tolist(), goal.tolist(), beside, strict=True):
      names = ', '.join(name for name, hole in zip(self.action_names, sides, strict=True) if hole)
      danger = f'holes beside me: {names}.' if names else 'no hole beside me.'
      thoughts.append(f'I am at {divmod(square, self.size)}, the goal is at {divmod(target, self.size)}; {danger}')
    return thoughts

  # -- levels from text ------------------------------------------------------------------------------------------------

  def from_text(self, text: str) -> State:
    """One state (no batch axis) from an observation.

    A grid does not show the start, so the player's square is taken for it.

    Raises:
      ValueError: the text is not what `render` draws of any state.
    """
    text = '\n'.join(line.strip() for line in text.strip().splitlines())
    state = self._from_grid(text) if self.observation == 'grid' else self._from_coordinates(text)
    drawn = self.render(jax.tree.map(lambda leaf: leaf[None], state))[0]
    for i, (got, want) in enumerate(zip(text.splitlines(), drawn.splitlines(), strict=False), 1):
      if got != want:
        raise ValueError(f'frozen_lake: line {i} of the text is {got!r}, must be {want!r} by the other lines')
    if text != drawn:
      raise ValueError(f'frozen_lake: the text has {len(text.splitlines())} lines, must be {len(drawn.splitlines())}')
    return state

  def _from_grid(self, text: str) -> State:
    player, _, hole, goal, in_hole, on_goal = self.symbols
    board = self._board(text.splitlines(), self.symbols)
    players = np.flatnonzero(np.isin(board, (player, in_hole, on_goal)))
    goals = np.flatnonzero(np.isin(board, (goal, on_goal)))
    for what, found in (('player', players), ('goal', goals)):
      if len(found) != 1:
        raise ValueError(f'frozen_lake: the board has {len(found)} squares with a {what}, must be 1')
    return self._state(np.isin(board, (hole, in_hole)), players[0], goals[0], players[0])

  def _from_coordinates(self, text: str) -> State:
    squares = {}
    for field in ('Start', 'Goal', 'Player', 'Holes'):
      line = re.search(rf'^{field}: (.*)$', text, re.MULTILINE)
      if line is None:
        raise ValueError(f'frozen_lake: the text has no line that begins with {field + ": "!r}')
      pairs = [(int(row), int(column)) for row, column in re.findall(r'\((\d+), (\d+)\)', line[1])]
      if field != 'Holes' and len(pairs) != 1:
        raise ValueError(f'frozen_lake: {line[0]!r} has {len(pairs)} squares, must be 1')
      for pair in pairs:
        if max(pair) >= self.size:
          raise ValueError(f'frozen_lake: {line[0]!r} has {pair}, must be within ({self.size - 1}, {self.size - 1})')
      squares[field] = [row * self.size + column for row, column in pairs]
    holes = np.zeros(self.size * self.size, bool)
    holes[squares['Holes']] = True
    return self._state(holes, squares['Start'][0], squares['Goal'][0], squares['Player'][0])

  def from_desc(self, desc: list[str]) -> State:
    """A fresh level (no batch axis) from a map in Gymnasium's letters: S start, F ice, H hole, G goal.

    Raises:
      ValueError: not `size` rows of `size` of these letters, or not one start and one goal.
    """
    board = self._board(desc, _DESC_LETTERS)
    start, goal = np.flatnonzero(board == 'S'), np.flatnonzero(board == 'G')
    for what, found in (('S', start), ('G', goal)):
      if len(found) != 1:
        raise ValueError(f'frozen_lake: the board has {len(found)} squares {what!r}, must be 1')
    return self._state(board == 'H', start[0], goal[0], start[0])

  def _board(self, lines: list[str], letters: str) -> np.ndarray:
    """The characters of `size` lines of `size` letters, [size * size]."""
    if len(lines) != self.size:
      raise ValueError(f'frozen_lake: the board has {len(lines)} rows, must be {self.size}')
    for i, line in enumerate(lines, 1):
      if len(line) != self.size or not set(line) <= set(letters):
        raise ValueError(f'frozen_lake: row {i} of the board is {line!r}, must be {self.size} of {letters!r}')
    return np.array(list(''.join(lines)))

  def _state(self, holes: np.ndarray, start: int, goal: int, player: int) -> State:
    if holes[goal] or (holes[start] and start != player):
      raise ValueError('frozen_lake: the start or the goal is a hole, must be ice')
    return State(
      done=np.asarray(player == goal or holes[player]),
      success=np.asarray(player == goal),
      holes=holes.reshape(self.size, self.size),
      start=np.asarray(start, np.int32),
      goal=np.asarray(goal, np.int32),
      player=np.asarray(player, np.int32),
    )

  # -- solver ----------------------------------------------------------------------------------------------------------

  def transition_probabilities(self, states: State) -> np.ndarray:
    """Where an action leads, f32[..., S, 4, S], for states with any leading axes and S = size * size squares.

    Entry [s, a, t] is the probability that action a on square s ends on square t. Holes and the goal are never left.
    """
    squares = np.arange(self.size * self.size)
    actions = np.arange(4)
    moves = np.zeros((len(squares), 4, len(squares)))
    for offset, odds in zip((-1, 0, 1), self.slip, strict=True):
      target = _neighbour(squares[:, None], (actions + offset) % 4, self.size)  # [S, 4]
      np.add.at(moves, (squares[:, None], actions, target), odds)
    stay = np.broadcast_to(np.eye(len(squares))[:, None, :], moves.shape)
    return np.where(self._live(states)[..., None, None], moves, stay).astype(np.float32)

  def _live(self, states: State) -> np.ndarray:
    """bool[..., S], squares on which the game goes on."""
    holes = np.asarray(states.holes)
    holes = holes.reshape(*holes.shape[:-2], -1)
    return ~holes & (np.arange(self.size * self.size) != np.asarray(states.goal)[..., None])

  def as_a_beginner_sees_it(self) -> FrozenLake:
    """Ice that does not slip: the shortest way, however close to the holes it goes."""
    return dataclasses.replace(self, is_slippery=False)

  def solve(self, states: State, budget: base.Budget, discount: float = 1.0) -> Solution:
    """Dynamic programming over (turns left, actions left, square), with every sequence of actions that a turn may hold.

    A turn's sequence is chosen before its first action is seen to have acted, so the value of a sequence is the
    expectation over where it ends; a game that ends in mid-sequence ignores the rest of it. All 4 + 16 + ... sequences
    are tried, so the work grows with 4 ** max_actions_per_turn.

    Args:
      states: levels [N]; solved from the squares that their players are on.
      budget: turns and actions of an episode.
      discount: a success after k actions is worth discount ** k to the plans.

    Raises:
      ValueError: the budget or the discount is out of range, or one turn has too many sequences.
    """
    for field in dataclasses.fields(budget):
      if getattr(budget, field.name) < 1:
        raise ValueError(f'frozen_lake: budget.{field.name}={getattr(budget, field.name)!r}; allowed: at least 1')
    if not 0 < discount <= 1:
      raise ValueError(f'frozen_lake: discount={discount!r}; allowed: above 0, at most 1')
    if _level_bytes(self.size, budget) > _LEVEL_BYTES:
      length = budget.max_actions_per_turn
      raise ValueError(
        f'frozen_lake: budget.max_actions_per_turn={length}; allowed: less on {self.size} x {self.size} squares, '
        f'since the solver tries all 4**{length} sequences of a turn'
      )
    states = jax.tree.map(np.asarray, states)
    return Solution(env=self, states=states, budget=budget, discount=discount)


@dataclasses.dataclass(frozen=True, eq=False)
class Solution:
  """The best play on N lakes: `success` f32[N], and `plan`, whose tables are made when it is first asked.

  Where the goal is out of reach of what is left of the budget, every plan is worth the same; `plan` then goes nearer.
  """

  env: FrozenLake
  states: State
  budget: base.Budget
  discount: float

  @functools.cached_property
  def success(self) -> np.ndarray:
    """f32[N], the highest probability of success within the budget."""
    rows = np.arange(len(self._chances))
    chances = self._chances[rows, -1, -1, self.states.player]
    return np.where(self.states.done, self.states.success, chances).astype(np.float32)

  @functools.cached_property
  def _chances(self) -> np.ndarray:
    """f32[N, turns, actions, S], the highest probability of success; the entries are those of `_plans`."""
    return self._backward(discount=1.0, hope=0.0, with_plans=False)[0]

  @functools.cached_property
  def _plans(self) -> np.ndarray:
    """i32[N, turns, actions, S], numbers of the best sequences; entry [t, a] has t + 1 turns and a + 1 actions left."""
    return self._backward(discount=self.discount, hope=_HOPE, with_plans=True)[1]

  def plan(self, states: State, turns_left: np.ndarray, actions_left: np.ndarray) -> list[list[int]]:
    """The best next sequence of actions for each level; see `base.Solution`.

    Raises:
      ValueError: more turns or actions are left than the budget had.
    """
    number = self._look_up(self._plans, states, turns_left, actions_left, over=-1)
    return [_sequence(k) for k in number.tolist()]

  def value(self, states: State, turns_left: np.ndarray, actions_left: np.ndarray) -> np.ndarray:
    """f32[N], the highest probability of success from here on, which is what the goal's one point is worth.

    Raises:
      ValueError: see `plan`.
    """
    return self._look_up(self._chances, states, turns_left, actions_left, over=0.0)

  def _look_up(self, table: np.ndarray, states: State, turns_left, actions_left, over: float) -> np.ndarray:
    """Each level's entry of a table [N, turns, actions, S]; `over` where its episode is."""
    n = len(self.states.done)
    turns, actions = (np.broadcast_to(np.asarray(x), (n,)) for x in (turns_left, actions_left))
    for name, left, most in (
      ('turns_left', turns, self.budget.max_turns),
      ('actions_left', actions, self.budget.max_actions),
    ):
      if n and left.max() > most:
        raise ValueError(f'frozen_lake: {name}={left.max()}; allowed: at most {most}, the budget that was solved for')
    ended = np.asarray(states.done) | (turns < 1) | (actions < 1)
    # Levels that are over read some entry of the table, and do not use it.
    entry = table[np.arange(n), np.maximum(turns, 1) - 1, np.maximum(actions, 1) - 1, np.asarray(states.player)]
    return np.where(ended, table.dtype.type(over), entry)

  def _backward(self, *, discount: float, hope: float, with_plans: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """Runs the recursion on chunks of levels that fit the working memory; all chunks share one compiled program."""
    n = len(self.states.done)
    fit = max(1, _CHUNK_BYTES // _level_bytes(self.env.size, self.budget))
    # Powers of two, so that batches of many sizes share few programs.
    chunk = min(1 << max(0, n - 1).bit_length(), 1 << fit.bit_length() - 1)
    parts = []
    for first in range(0, n, chunk):
      rows = np.minimum(np.arange(first, first + chunk), n - 1)
      levels = jax.tree.map(lambda leaf, rows=rows: leaf[rows], self.states)
      live = self.env._live(levels)  # [n, S]
      goal = np.arange(live.shape[1]) == levels.goal[:, None]
      leaf = hope * _nearness(live, goal, self.env.size)
      step = self.env.transition_probabilities(levels)
      step = np.where(live[:, :, None, None], np.float32(discount) * step, step)
      part = _recursion(step, live, goal, leaf, budget=self.budget, with_plans=with_plans)
      parts.append(jax.tree.map(lambda x: np.asarray(x)[: n - first], part))  # noqa: B023
    if not parts:
      shape = (0, self.budget.max_turns, self.budget.max_actions, self.env.size**2)
      return np.zeros(shape, np.float32), np.zeros(shape, np.int32)
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


@functools.partial(jax.jit, static_argnames=('budget', 'with_plans'))
def _recursion(step, live, goal, leaf, *, budget: base.Budget, with_plans: bool):
  """Backward induction for n levels.

  Args:
    step: f32[n, S, 4, S], what an action does to values: value before = step @ value after.
    live: bool[n, S], squares on which the game goes on.
    goal: bool[n, S], the goal's square, worth 1.
    leaf: f32[n, S], what a live square is worth when turns or actions are used up.
    budget: turns and actions.
    with_plans: whether to return the plans.

  Returns:
    Values f32[n, turns, actions, S] and numbers of the best sequences i32[n, turns, actions, S] or None; entry
    [t, a] is for t + 1 turns and a + 1 actions left.
  """
  n, squares = live.shape
  actions = budget.max_actions
  step = step.reshape(n, squares * 4, squares)

  def turn(value, _):
    # value: f32[n, S, actions + 1], with one turn less, by actions left. The last column cannot be what a turn leaves.
    outcome = jnp.where(live[:, :, None], value, goal[:, :, None])[:, :, None, :-1]  # [n, S, 1, actions]
    best = jnp.full((n, squares, actions), -1.0)
    number = jnp.full((n, squares, actions), -1, jnp.int32)
    first = 0
    for length in range(1, min(budget.max_actions_per_turn, actions) + 1):
      # Prepends each action to each sequence. The rows of `step` are (square, action), so the product has the axes
      # (square, first action, later actions, actions left after), and reshaping joins the middle two.
      left = actions - length + 1
      outcome = outcome[..., :left].reshape(n, squares, -1)
      outcome = jnp.einsum('nij,njk->nik', step, outcome, precision='highest').reshape(n, squares, 4**length, left)
      # With `left` = k actions left after it, the sequence was begun with k + length: column k + length - 1.
      highest = outcome.max(axis=2)  # [n, S, left]
      value_here = _shift(highest, length - 1, -1.0)
      better = value_here > best + _TIE
      best = jnp.where(better, value_here, best)
      if with_plans:
        # The first of the best; XLA's own argmax is several times as slow on CPU.
        which = jnp.where(outcome == highest[:, :, None], jnp.arange(4**length)[:, None], 4**length).min(axis=2)
        number = jnp.where(better, _shift(first + which, length - 1, -1), number)
      first += 4**length
    value = jnp.concatenate([leaf[:, :, None], best], axis=2)
    return value, (best, number if with_plans else None)

  value = jnp.repeat(leaf[:, :, None], actions + 1, axis=2)
  _, tables = jax.lax.scan(turn, value, length=budget.max_turns)
  return jax.tree.map(lambda x: x.transpose(1, 0, 3, 2), tables)  # [turns, n, S, actions] to [n, turns, actions, S]


def _shift(x: jax.Array, by: int, fill: float) -> jax.Array:
  """Moves the last axis `by` columns to the right."""
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(by, 0)], constant_values=fill)


def _sequence(number: int) -> list[int]:
  """The actions of a numbered sequence: 0..3 are single actions, 4..19 pairs, and so on, the first action leading.

  Sequence 4 is [0, 0], 5 is [0, 1], 19 is [3, 3], 20 is [0, 0, 0]; -1 is [].
  """
  if number < 0:
    return []
  length = 1
  while number >= 4**length:
    number -= 4**length
    length += 1
  return [number >> 2 * i & 3 for i in reversed(range(length))]


def _level_bytes(size: int, budget: base.Budget) -> int:
  """Bytes of one level's largest array in the recursion."""
  longest = min(budget.max_actions_per_turn, budget.max_actions)
  return 4 * size**2 * 4**longest * (budget.max_actions - longest + 1)


def _nearness(live: np.ndarray, goal: np.ndarray, size: int) -> np.ndarray:
  """f32[n, S], 0.8 ** (steps to the goal over live squares), 0 on squares that are not live or are cut off."""
  targets = _neighbour(np.arange(size * size)[:, None], np.arange(4), size)  # [S, 4]
  near = goal.astype(np.float32)
  while True:
    further = np.where(live, _HOPE_DECAY * near[:, targets].max(axis=2), near)
    if np.array_equal(further, near):
      return np.where(live, near, 0).astype(np.float32)
    near = further


def _neighbour(square, direction, size: int):
  """The square one step away in a direction (Left, Down, Right, Up), itself at an edge; for NumPy and JAX arrays."""
  row = square // size + (direction == DOWN) * 1 - (direction == UP) * 1
  column = square % size + (direction == RIGHT) * 1 - (direction == LEFT) * 1
  return row.clip(0, size - 1) * size + column.clip(0, size - 1)


def _reached(ice: jax.Array, start: jax.Array) -> jax.Array:
  """bool[size, size], the squares that can be walked to from `start` over ice: a flood fill."""

  def spread(carry):
    reached, _ = carry
    around = jnp.pad(reached, 1)
    wider = ice & (reached | around[:-2, 1:-1] | around[2:, 1:-1] | around[1:-1, :-2] | around[1:-1, 2:])
    return wider, (wider != reached).any()

  first = (jnp.arange(ice.size) == start).reshape(ice.shape)
  return jax.lax.while_loop(lambda carry: carry[1], spread, (first, jnp.bool_(True)))[0]
