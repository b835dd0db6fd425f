"""The environment of type 'svg': the policy sees a picture and writes an SVG program that draws it again."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ragen_jax.envs.dataset import selection
from ragen_jax.envs.drawing.tiles import IMAGE_MARK
from ragen_jax.envs.options import (
  check_choice,
  check_flag,
  check_integer,
  check_mapping,
  check_share,
  check_text,
  is_integer,
  is_number,
)
from ragen_jax.envs.outside.base import LARGEST_REWARD, Session, TextEnvironment, floored
from ragen_jax.envs.outside.images import ImageForm
from ragen_jax.envs.svg import drawings, targets
from ragen_jax.envs.svg.dino import DINO, Dino, load_dino
from ragen_jax.envs.svg.program import MOST_CHARS, MOST_ELEMENTS, SHAPES, find_program, read_program
from ragen_jax.envs.svg.raster import draw
from ragen_jax.envs.svg.scores import PARTS, score_parts, weighted
from ragen_jax.envs.svg.targets import Target
from ragen_jax.envs.svg.values import ProgramError
from ragen_jax.utils.errors import one_line

PAYS = ('best', 'each')
LEAST_SIDE, LARGEST_SIDE = 16, 512
_RANDOM_PROGRAMS = 4  # that random play chooses from


@dataclasses.dataclass(frozen=True, eq=False)
class SvgEnvironment(TextEnvironment):
  """Pictures to reproduce. An action is an SVG document. docs/svg.md describes the options for users.

  Making it checks its options and reads no files. Files are read by `check`, or when they are first needed.

  Attributes:
    path: drawings of the user, see `drawings.load_drawings`; '' for targets made from seeds.
    field: of the rows of a data file, with the text of a drawing.
    bad_drawings: 'drop' or 'refuse' drawings that cannot be drawn here.
    min_shapes, max_shapes: number of shapes of a target that is made.
    kinds: its shapes, of `targets.KINDS`.
    colours: names of its colours.
    overlap: whether shapes may overlap.
    outlines: whether a third of the shapes are outlines.
    grid: its coordinates are multiples of this, on a canvas of 100 x 100.
    split: 'all' targets, or the 'train' or 'test' part of them.
    test_share: share of the targets in the test part.
    images: 2 shows target and drawing in every turn; 1 shows the target in the first turn, then the drawing alone.
    image_size: (height, width) of a picture in pixels, which are equal.
    weights: name of a part of the score -> its weight.
    dino_path: folder with the model of the part 'dino' of the score, see `dino.load_dino`; '' for no such part.
    pay: 'best' pays what a drawing adds to the best score of the episode, 'each' pays the score of each drawing.
    score_reward: reward of a score of 1.
    success_score: score from which the episode is won; with pay='best' it is over then, with pay='each' it goes on, so
      that a drawing that wins is paid in all turns like one that nearly does.
  """

  name: ClassVar[str] = 'svg'
  system: ClassVar[str] = 'You draw pictures by writing SVG programs.'
  state_label: ClassVar[str] = ''
  shown_as: ClassVar[str] = 'picture'
  whole_answer: ClassVar[bool] = True
  has_expert: ClassVar[bool] = True
  has_legal_actions: ClassVar[bool] = True
  any_thread: ClassVar[bool] = True
  action_help: ClassVar[str] = 'An answer is one SVG document, <svg viewBox="0 0 100 100">...</svg>.'

  path: str = ''
  field: str = 'svg'
  bad_drawings: str = 'drop'
  min_shapes: int = 1
  max_shapes: int = 3
  kinds: tuple[str, ...] = ('rect', 'circle', 'ellipse', 'line', 'polygon')
  colours: tuple[str, ...] = targets.COLOURS
  overlap: bool = True
  outlines: bool = False
  grid: int = 5
  split: str = 'all'
  test_share: float = 0.1
  images: int = 2
  image_size: tuple[int, int] = (256, 256)
  weights: Mapping[str, float] = dataclasses.field(
    default_factory=lambda: {'pixels': 0.5, 'edges': 0.3, 'colours': 0.2}
  )
  dino_path: str = ''
  pay: str = 'best'
  score_reward: float = 1.0
  success_score: float = 0.95

  def __post_init__(self):
    check_text('svg', 'path', self.path)
    check_text('svg', 'field', self.field, blank=False)
    check_choice('svg', 'bad_drawings', self.bad_drawings, drawings.BAD_DRAWINGS)
    check_integer('svg', 'max_shapes', self.max_shapes, 1, targets.MOST_SHAPES)
    check_integer('svg', 'min_shapes', self.min_shapes, 1, self.max_shapes)
    object.__setattr__(self, 'kinds', _check_names('kinds', self.kinds, targets.KINDS))
    object.__setattr__(self, 'colours', _check_names('colours', self.colours, None))
    check_flag('svg', 'overlap', self.overlap)
    check_flag('svg', 'outlines', self.outlines)
    if self.grid not in targets.GRIDS or not is_integer(self.grid):
      raise ValueError(f'svg: grid={self.grid!r}; allowed: {", ".join(map(str, targets.GRIDS))}')
    check_choice('svg', 'split', self.split, selection.SPLITS)
    check_share('svg', 'test_share', self.test_share)
    check_integer('svg', 'images', self.images, 1, 2)
    object.__setattr__(self, 'image_size', _check_size(self.image_size))
    check_text('svg', 'dino_path', self.dino_path)
    object.__setattr__(self, 'weights', _check_weights(self.weights, self.dino_path, self.parts))
    check_choice('svg', 'pay', self.pay, PAYS)
    if not is_number(self.score_reward) or not 0 < self.score_reward <= LARGEST_REWARD:
      raise ValueError(f'svg: score_reward={one_line(self.score_reward)}; allowed: numbers above 0')
    if not is_number(self.success_score) or not 0 < self.success_score <= 1:
      raise ValueError(f'svg: success_score={one_line(self.success_score)}; allowed: numbers above 0, up to 1')

  # -- text ------------------------------------------------------------------------------------------------------------

  def rules(self) -> str:
    shown = {
      2: 'You see the target and your drawing.',
      1: 'You see the target in the first turn, and only your drawing later.',
    }[self.images]
    parts = ', '.join(f'{name} {self.weights[name]:g}' for name in self.parts if self.weights[name] > 0)
    paid = {
      'best': 'A drawing pays what it adds to your best score.', 'each': 'Each drawing pays its score.'
    }[self.pay]  # fmt: skip
    ending = ', and you may go on drawing' if self.success_stands else ''
    scale = '' if self.score_reward == 1 else f' A score of 1 pays {self.score_reward:g}.'
    return (
      f'Write an SVG program that draws the target again, on a white canvas. {shown} The score is from 0 to 1, and '
      f'compares what is drawn, with these weights: {parts}. {paid}{scale} A score of '
      f'{self.success_score:g} wins{ending}.\n'
      f'You may use {", ".join(SHAPES)}, and g with transform; fill, stroke, stroke-width and opacity; and colours by '
      f'name or as #rrggbb. A program has at most {MOST_ELEMENTS} elements and {MOST_CHARS} characters.'
    )

  def parse_action(self, text: str) -> str | None:
    """The first SVG document of a text; None if there is none, or it is not one that can be drawn."""
    program = find_program(text)
    if program is None:
      return None
    try:
      read_program(program)
    except ProgramError:
      return None
    return program

  @property
  def success_stands(self) -> bool:
    return self.pay == 'each'

  # -- the targets -----------------------------------------------------------------------------------------------------

  @property
  def image_form(self) -> ImageForm:
    return ImageForm(self.images, *self.image_size)

  @property
  def side(self) -> int:
    """Pixels of a side of a picture."""
    return self.image_size[0]

  @property
  def parts(self) -> tuple[str, ...]:
    """The names of the parts of the score."""
    return (*PARTS, DINO) if self.dino_path else PARTS

  @functools.cached_property
  def _dino(self) -> Dino:
    return load_dino(self.dino_path)

  @functools.cached_property
  def _recipe(self) -> targets.Recipe:
    return targets.Recipe(**{field.name: getattr(self, field.name) for field in dataclasses.fields(targets.Recipe)})

  @functools.cached_property
  def drawings(self) -> tuple[Target, ...]:
    """The drawings of the user's files, of the part that is played; ValueError if they cannot be read."""
    part = (self.split, self.test_share, self.side)
    return drawings.load_drawings(self.path, self.field, self.bad_drawings, *part, drawings.stamp_of(self.path))

  def _place(self, seed: int) -> int:
    """The place in `drawings` of the target of a seed."""
    return selection.select(seed, len(self.drawings), 'shuffled')

  def target(self, seed: int) -> Target:
    """The target of a seed."""
    if self.path:
      return self.drawings[self._place(seed)]
    return targets.make_target(self._recipe, seed, self.split, self.test_share, self.side)

  def random_program(self, seed: int, number: int) -> str:
    """A program that does not depend on the target of a seed: of another drawing, or if there is none, of the recipe.

    Other numbers give others.
    """
    rng = random.Random(f'{seed} {number}')
    others = len(self.drawings) - 1 if self.path else 0
    if not others:
      return targets.make_program(self._recipe, rng)
    place = min(int(rng.random() * others), others - 1)
    return self.drawings[place + (place >= self._place(seed))].program

  def level_id(self, seed: int) -> str:
    """The identity of the target's picture: equal for equal pictures of any tag or file."""
    return f'svg {self.target(seed).id}'

  def check(self) -> None:
    """Reads the drawings, or makes the first target, and reads the model; ValueError, with one line, if that fails."""
    self.target(0)
    if self.dino_path:
      load_dino(self.dino_path)

  def score(self, target: np.ndarray, drawing: np.ndarray) -> tuple[float, dict[str, float]]:
    """The score of a drawing, and of each of `parts`, from pictures u8[side, side, 3]."""
    parts = score_parts(target, drawing)
    if self.dino_path:
      parts[DINO] = self._dino.score(target, drawing)
    return weighted(parts, self.weights), parts

  def open(self, rows: int) -> SvgSession:
    return SvgSession(self, rows)


@dataclasses.dataclass
class _Row:
  """An episode: its target, the last drawing, the best score with its parts, whether it is won, and its drawings."""

  seed: int
  target: Target
  wanted: np.ndarray
  drawing: np.ndarray
  best: float = 0.0
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)  # none before the first
  won: bool = False
  drawn: int = 0


class SvgSession(Session):
  """Rows that draw. Drawing is bounded by the limits of programs, so it needs no process or time limit of its own.

  Metrics add up over an episode to those of its best drawing.
  """

  def __init__(self, env: SvgEnvironment, rows: int):
    self._env = env
    self._rows: list[_Row | None] = [None] * rows

  def reset(self, rows: Sequence[int], seeds: Sequence[int], members: Sequence[int]) -> list[Any]:
    """See `Session`: the targets, beside a white canvas."""
    del members
    side, wanted = self._env.side, {}
    for row, seed in zip(rows, seeds, strict=True):
      if seed not in wanted:
        target = self._env.target(seed)
        wanted[seed] = target, draw(read_program(target.program), side)
      self._rows[row] = _Row(seed, *wanted[seed], np.full((side, side, 3), 255, np.uint8))
    return [self._shown(self._rows[row], '') for row in rows]

  def step(self, rows: Sequence[int], actions: Sequence[str]) -> list[Any]:
    """See `Session`: draws programs, and scores the drawings."""
    return [self._draw(self._rows[row], program) for row, program in zip(rows, actions, strict=True)]

  def expert(self, rows: Sequence[int]) -> list[Any]:
    """See `Session`: the target's own program."""
    return [[self._rows[row].target.program] for row in rows]

  def rationale(self, rows: Sequence[int]) -> list[Any]:
    """See `Session`: the shapes of a target that was made."""
    return ['' if self._env.path else targets.describe(self._rows[row].target.program) for row in rows]

  def legal_actions(self, rows: Sequence[int]) -> list[Any]:
    """See `Session`: programs of the same difficulty, or of other drawings."""
    found = []
    for row in rows:
      own = self._rows[row]
      numbers = range(own.drawn * _RANDOM_PROGRAMS, (own.drawn + 1) * _RANDOM_PROGRAMS)
      found.append([self._env.random_program(own.seed, number) for number in numbers])
    return found

  def _draw(self, row: _Row, program: str) -> tuple[Any, float, bool, dict[str, Any]]:
    drawing = draw(read_program(program), self._env.side)
    score, parts = self._env.score(row.wanted, drawing)
    effective = not np.array_equal(drawing, row.drawing)
    row.drawing, row.drawn = drawing, row.drawn + 1
    better = score > row.best
    paid = max(score - row.best, 0.0) if self._env.pay == 'best' else score
    metrics = dict.fromkeys(('similarity', *parts), 0.0)
    if better:
      metrics = {name: parts[name] - row.parts.get(name, 0.0) for name in parts} | {'similarity': score - row.best}
      row.best, row.parts = score, parts
    row.won = row.won or score >= self._env.success_score
    told = ', '.join(f'{name} {floored(parts[name])}' for name in parts)
    observation = self._shown(row, f'Score of this drawing: {floored(score)} ({told}).')
    info = {'success': row.won, 'effective': effective, 'metrics': metrics}
    return observation, self._env.score_reward * paid, row.won and not self._env.success_stands, info

  def _shown(self, row: _Row, told: str) -> dict[str, Any]:
    """An observation of the form of the environment; `told` is empty before the first drawing."""
    if self._env.images == 2:
      lines, images = [f'Target: {IMAGE_MARK}', f'Your drawing: {IMAGE_MARK}'], [row.wanted, row.drawing]
    elif told:
      lines, images = [f'Your drawing: {IMAGE_MARK}'], [row.drawing]
    else:
      lines, images = [f'Target: {IMAGE_MARK}'], [row.wanted]
    return {'text': '\n'.join([*lines, told or 'The canvas is still white.']), 'images': images}


# -- checks of the options ---------------------------------------------------------------------------------------------


def _check_names(option: str, value: Any, allowed: tuple[str, ...] | None) -> tuple[str, ...]:
  """A tuple of names that differ; of `allowed`, or of colours that can be seen on white."""
  names = tuple(value) if isinstance(value, tuple | list) else ()
  is_known = targets.is_visible if allowed is None else allowed.__contains__
  known = [name for name in names if isinstance(name, str) and is_known(name)]
  if not names or len(known) < len(names) or len(set(names)) < len(names):
    told = ', '.join(allowed) if allowed else f'names of colours that differ from white, such as {targets.COLOURS[0]}'
    raise ValueError(f'svg: {option}={one_line(value)}; allowed: one or more of {told}, each once')
  return names


def _check_size(value: Any) -> tuple[int, int]:
  size = tuple(value) if isinstance(value, tuple | list) else ()
  if len(size) != 2 or not all(is_integer(x) and LEAST_SIDE <= x <= LARGEST_SIDE for x in size) or size[0] != size[1]:
    allowed = f'(height, width), equal, {LEAST_SIDE} to {LARGEST_SIDE} pixels'
    raise ValueError(f'svg: image_size={one_line(value)}; allowed: {allowed}')
  return int(size[0]), int(size[1])


def _check_weights(value: Any, folder: str, parts: tuple[str, ...]) -> dict[str, float]:
  """The weights of all parts; that of the model, in a config, is 0 where there is no folder with a model."""
  weights = check_mapping('svg', 'weights', value)
  if not folder and (given := weights.pop(DINO, 0)) != 0:
    raise ValueError(f"svg: weights.{DINO}={one_line(given)} with dino_path=''; allowed: 0, or a folder with the model")
  right = all(is_number(x) and 0 <= x <= LARGEST_REWARD for x in weights.values())
  if not right or set(weights) - set(parts) or not sum(map(float, weights.values())) > 0:
    allowed = f'numbers from 0 by the names {", ".join(parts)}, not all 0'
    raise ValueError(f'svg: weights={one_line(value)}; allowed: {allowed}')
  return {name: float(weights.get(name, 0.0)) for name in parts}
