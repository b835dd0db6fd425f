"""The interface of environments.

An environment is a frozen dataclass whose fields are the options of a game: sizes, probabilities, symbols. It contains
no episode. `Game` is the interface for prompts, replies and evaluations. Its two kinds are `Environment`, a game in
pure JAX, whose episode is a `State`, a struct of arrays; and `TextEnvironment` (envs/outside/base.py), a game outside
JAX, which opens sessions that exchange text.

The methods of an `Environment` are of three sorts:

- traced, for one instance, under `jit` and `vmap`: `reset(key)`, `step(state, action, key)` and `pixels(state, tile)`;
- host, for a batch of states with NumPy leaves [N, ...]: `render`, `solve`, `optimal`, `legal_actions`, `rationale`,
  `scenes`; and for one state without a batch axis: `render_rgb`, `from_text`;
- text about the game, made from its options: `rules`, `legend`, `parse_action`, `format_action`, `action_words`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs.drawing.tiles import IMAGE_MARK, PICTURE_TILE, check_tile, compose
from ragen_jax.envs.scenes import BOARD, Scene, Vocabulary

# An environment outside JAX may report a ratio: the metric of its name has the numerator, and that of its name with
# this ending the denominator.
OF = '/of'


@struct.dataclass
class State:
  """The arrays that every state has; environments add their own.

  Attributes:
    done: bool[], whether the rules of the game have ended the episode. Limits of turns and actions are not included.
    success: bool[], whether the episode has ended and is won.
  """

  done: jax.Array
  success: jax.Array


@struct.dataclass
class StepOutput:
  """The outcome of one action: f32[] the environment's own reward, and bool[] whether the action changed the state."""

  reward: jax.Array
  effective: jax.Array


@dataclasses.dataclass(frozen=True)
class Budget:
  """The limits of one episode: its turns, of one reply each, its actions, and the actions of one turn."""

  max_turns: int = 5
  max_actions: int = 10
  max_actions_per_turn: int = 5

  @property
  def most_actions(self) -> int:
    """Maximum number of actions of an episode."""
    return min(self.max_actions, self.max_turns * self.max_actions_per_turn)


def check_max_steps(max_steps: int, budget: Budget) -> None:
  """Raises ValueError if a game ends after `max_steps` actions and the budget, which the prompt states, has more."""
  if max_steps < budget.max_actions:
    raise ValueError(
      f'max_steps={max_steps}; allowed: at least max_actions={budget.max_actions}, since the prompt states only that '
      'limit'
    )


class Solution(Protocol):
  """Best play on a batch of N levels, for one budget.

  The actions of a turn are chosen together, before the outcome of the first is known.

  Attributes:
    success: f32[N], the highest probability of success of any policy within the budget.
  """

  success: np.ndarray

  def plan(self, states: Any, turns_left: np.ndarray, actions_left: np.ndarray) -> list[list[Any]]:
    """For each level the best next turn: at most `max_actions_per_turn` actions, none if its episode is over.

    Args:
      states: batched states [N], in the order of the levels that were solved; their episodes may have begun.
      turns_left: i32[N], remaining turns, the next one included.
      actions_left: i32[N], remaining actions.

    Raises:
      ValueError: more turns or actions remain than the budget has.
    """


# Forms of boards as text: symbols; symbols with a blank between those of a row; coordinates; coordinates and symbols.
BOARD_FORMS = ('grid', 'spaced', 'coord', 'grid_coord')
GRID_HEADER = 'Grid Map:'


def board_texts(form: str, grids: Callable[[], list[str]], coordinates: Callable[[], list[str]]) -> list[str]:
  """Boards in one of `BOARD_FORMS`, from functions that write them.

  The tokenizers of pretrained models join symbols that stand together into one token. A symbol behind a blank is a
  token of its own.
  """
  if form == 'coord':
    return coordinates()
  if form == 'grid':
    return grids()
  if form == 'spaced':
    return ['\n'.join(map(' '.join, grid.split('\n'))) for grid in grids()]
  pairs = zip(coordinates(), grids(), strict=True)
  return [f'Coordinates:\n{listed}\n{GRID_HEADER}\n{grid}' for listed, grid in pairs]


class Game(abc.ABC):
  """The interface of environments, in JAX or outside it, for prompts, replies and evaluations.

  Class attributes, which may be properties:
    name: prefix of the environment's metrics, in snake case.
    action_names: the words that are actions, in the order of the action ids 0, 1, ...; empty for free-text actions.
    action_help: for free-text actions, one line about the form of an action; otherwise empty.
    has_solver: whether `solve` exists. Without a solver `optimal` is NaN, and there are no demonstrations.
    has_expert: whether sessions of a game outside JAX give reference actions, for demonstrations and as a baseline.
    any_thread: whether sessions of a game outside JAX may be used in any thread, one at a time, and `step` in several
      for different rows. Such games of several tags are played at the same time; others are played in the main thread.
    is_outside: whether the game is outside JAX. Its state is then not visible, and it may fail at any time.
    played_by_programs: whether programs play it over HTTP, and not the policy turn by turn.
    server: the address of a server that plays only so many episodes at a time, for all tags together; '' for none.
    scene_kinds: the kinds of things in its `scenes`; empty for a game without scenes.
    shown_as: the noun for what an image shows, and what a reply describes, such as 'board'.
    whole_answer: whether the whole text of an answer is one action; otherwise actions are separated in it.
    system: the system message of its prompts; '' for the usual sentence.
    functions: the tools that the chat template lists, {'type': 'function', 'function': ...} each. A call of one is an
      action, its JSON between tags (`utils.tool_calls.tagged`). () if there are none, or the rules describe them.
    typing_help: what a person reads besides the rules; '' for nothing.
    state_label: the word above an observation in prompts; '' for none.
    success_stands: whether a success of a game outside JAX that goes on counts, also if a limit ends the episode.
    counts_turns: whether prompts tell the limits of turns and actions, the number of a turn, and the actions left.
  """

  name: ClassVar[str]
  action_names: ClassVar[tuple[str, ...]] = ()
  action_help: ClassVar[str] = ''
  has_solver: ClassVar[bool] = True
  has_expert: ClassVar[bool] = False
  any_thread: ClassVar[bool] = False
  is_outside: ClassVar[bool] = False
  played_by_programs: ClassVar[bool] = False
  server: ClassVar[str] = ''
  scene_kinds: ClassVar[tuple[str, ...]] = ()
  shown_as: ClassVar[str] = 'board'
  whole_answer: ClassVar[bool] = False
  system: ClassVar[str] = ''
  functions: ClassVar[tuple[Mapping[str, Any], ...]] = ()
  typing_help: ClassVar[str] = ''
  state_label: ClassVar[str] = 'State'
  success_stands: ClassVar[bool] = False
  counts_turns: ClassVar[bool] = True

  # -- text about the game -------------------------------------------------------------------------------------------

  @abc.abstractmethod
  def rules(self) -> str:
    """The game and its aim, in one or a few lines."""

  def legend(self) -> dict[str, str]:
    """Symbol to meaning, for boards made of symbols; otherwise empty."""
    return {}

  @abc.abstractmethod
  def parse_action(self, text: str) -> Any | None:
    """The action that one piece of an answer names, or None if it names none."""

  @abc.abstractmethod
  def format_action(self, action: Any) -> str:
    """The text of an action in an answer, the inverse of `parse_action`."""

  def typed(self, text: str) -> str:
    """The action that a person means by a piece of a line. The default is the piece itself."""
    return text

  def read_action(self, text: str) -> tuple[Any, str] | None:
    """The action that a text names and the text of `format_action` for it, or None if it names none."""
    action = self.parse_action(text)
    return None if action is None else (action, self.format_action(action))

  @property
  def action_words(self) -> tuple[str, ...]:
    """Every word that is an action on some level; empty for free-text actions."""
    return self.action_names

  def example_actions(self, observation: str) -> tuple[str, ...]:
    """One or more actions for the example of an answer in a prompt with this observation; each is shown equally often.

    The default has the names of all actions; for free text it has a placeholder.
    """
    del observation
    return self.action_names or ('your answer' if self.whole_answer else 'your action',)

  def example_key(self, observation: str) -> str:
    """What chooses among `example_actions`: observations with the same key show those at the same places.

    The default is the observation. A game that shows the same actions in several orders returns one text for all of
    them, so that each action is shown as often as the others.
    """
    return observation

  # -- host, batched -------------------------------------------------------------------------------------------------

  def check(self) -> None:
    """Raises ValueError, with one line, if something that the game needs, such as a server, is not there.

    It is called before anything is compiled. The default needs nothing.
    """
    return

  def check_episodes(self, count: int) -> None:
    """Raises ValueError, with one line, if so many episodes cannot be played at a time; called after `check`.

    The default plays any number.
    """
    del count

  def check_budget(self, budget: Budget) -> None:
    """Raises ValueError if no level can be solved within the budget. The default accepts every budget."""
    del budget

  @property
  def has_legal_actions(self) -> bool:
    """Whether `legal_actions` lists actions, which random play needs."""
    return True

  def legal_actions(self, states: Any) -> list[list[Any]]:
    """For each of N states, the actions that random play chooses from. The default lists all of `action_names`."""
    return [list(range(len(self.action_names)))] * len(np.asarray(states.done))

  def solve(self, states: Any, budget: Budget, discount: float = 1.0) -> Solution:
    """The exact best play on a batch of fresh levels [N] within a budget.

    Args:
      discount: factor on the value of a success for each further action; below 1 the plans prefer short play. The
        reported `success` is always the undiscounted optimum.

    Raises:
      ValueError: the game has no exact solver, or none for this size or budget.
    """
    raise ValueError(f'{self.name} has no solver')

  def optimal(self, states: Any, budget: Budget) -> np.ndarray:
    """f32[N], the highest success probability of any policy on these levels within the budget; NaN if unknown.

    Raises:
      ValueError: the solver cannot solve levels of this size or with this budget.
    """
    if not self.has_solver:
      return np.full((len(np.asarray(states.done)),), np.nan, np.float32)
    return self.solve(states, budget).success

  def naive_view(self) -> Game:
    """The game as a naive player believes it to be, for demonstrations of weak play. The default is the game itself."""
    return self

  def rationale(self, states: Any) -> list[str]:
    """For each of N states, a short true sentence: the thought in demonstrations. The default is empty."""
    return [''] * len(np.asarray(states.done))

  @property
  def scene_words(self) -> Vocabulary:
    """The words of claims about its `scenes`; those of boards by default."""
    return dataclasses.replace(BOARD, kinds=self.scene_kinds)

  def scenes(self, states: Any) -> list[Scene]:
    """For each of N states, the places of the player and the other things, which replies may describe.

    Raises:
      NotImplementedError: the game has no board with a player.
    """
    raise NotImplementedError(f'{self.name} has no scenes')

  def from_text(self, text: str) -> Any:
    """Reads one state (no batch axis, NumPy leaves) from a text that `render` writes.

    `render` of the state gives the text back. Parts of the state that the text does not show have their initial values.

    Raises:
      ValueError: the environment has no reader, or the text is not a state of it; one line gives the place and reason.
    """
    raise ValueError(f'{self.name}: levels cannot be read from text')


class Environment(Game):
  """A game in pure JAX. Subclasses are frozen dataclasses whose fields are the options of the game."""

  # -- traced, one instance ------------------------------------------------------------------------------------------

  @abc.abstractmethod
  def reset(self, key: jax.Array) -> State:
    """A fresh level from a PRNG key; equal keys give equal levels on every machine."""

  @abc.abstractmethod
  def _step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, StepOutput]:
    """Executes one action in a state that is not done; `step` handles states that are done."""

  def step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, StepOutput]:
    """Executes one action, i32 of shape `action_shape`. Returns the state after it and its outcome.

    A state that is done absorbs the action: the state does not change, and the reward is 0.
    """
    after, out = self._step(state, action, key)
    after = jax.tree.map(lambda new, old: jnp.where(state.done, old, new), after, state)
    reward = jnp.where(state.done, 0.0, out.reward).astype(jnp.float32)
    return after, StepOutput(reward=reward, effective=out.effective & ~state.done)

  def identities(self, states: Any) -> list[bytes]:
    """For each of N fresh levels, what is equal for equal levels of any tag: the arrays of its state by default."""
    leaves = [np.asarray(x) for x in jax.tree.leaves(states)]
    return [b'|'.join(x[i].tobytes() for x in leaves) for i in range(len(leaves[0]))]

  # -- images, traced ------------------------------------------------------------------------------------------------

  @property
  def image_grid(self) -> tuple[int, int] | None:
    """Rows and columns of tiles of the images that `pixels` draws; None if the environment draws none.

    A game whose picture is no board overrides `pixels` instead of `cells` and `tiles`.
    """
    return None

  @property
  def image_count(self) -> int:
    """Number of images of an observation; `captions` has as many marks."""
    return 1

  def cells(self, state: Any) -> jax.Array:
    """i32 of shape `image_grid`, the index into `tiles` at each place of a state's image."""
    raise NotImplementedError(f'{self.name} draws no images')

  def tiles(self, tile: int) -> np.ndarray:
    """The tiles of images, u8[K, tile, tile, 3]; one tile for each symbol of the board."""
    raise NotImplementedError(f'{self.name} draws no images')

  def pixels(self, state: Any, tile: int) -> jax.Array:
    """An image of the board of one state, u8[rows * tile, columns * tile, 3]. Equal boards have equal images.

    Several images of a state (`image_count`) are below one another.

    An image shows what `render` writes with symbols of the board, and nothing of the lines around the board.

    Args:
      tile: side of a tile in pixels. With the pixels of a visual token of the model, 28 for Qwen2.5-VL or 32 for
        Qwen3-VL and Qwen3.5, a tile is one token; the processor must not enlarge the image, see docs/vision.md.

    Raises:
      NotImplementedError: the environment draws no images.
      ValueError: the size is not allowed.
    """
    check_tile(tile)
    return compose(self.tiles(tile), self.cells(state))

  # -- text about the game -------------------------------------------------------------------------------------------

  @property
  def action_shape(self) -> tuple[int, ...]:
    """Shape of one parsed action: () for named actions."""
    return ()

  def parse_action(self, text: str) -> Any | None:
    """The id of the named action, or None. Letter case and surrounding blanks are ignored."""
    wanted = text.strip().lower()
    for i, name in enumerate(self.action_names):
      if name.lower() == wanted:
        return i
    return None

  def format_action(self, action: Any) -> str:
    """The name of an action id."""
    return self.action_names[int(action)]

  # -- host ----------------------------------------------------------------------------------------------------------

  @abc.abstractmethod
  def render(self, states: Any) -> list[str]:
    """The observations as text, for a batch of states with NumPy leaves [N, ...]."""

  def captions(self, states: Any) -> list[str]:
    """`render` for observations whose board is an image: a mark (`IMAGE_MARK`) and the lines around the board."""
    return [IMAGE_MARK] * len(np.asarray(states.done))

  def render_rgb(self, state: Any) -> np.ndarray:
    """A picture of one state (no batch axis) for people, u8[height, width, 3]; by default a small image of `pixels`.

    It depends on the state and the options alone. Raises NotImplementedError if the environment draws no pictures.
    """
    return np.asarray(self.pixels(state, PICTURE_TILE))
