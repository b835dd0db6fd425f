"""A Python class as an environment; docs/add_environment.md has a complete example."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from ragen_jax.envs.options import check_action_names, check_legend, check_mapping, check_text, check_wording
from ragen_jax.envs.outside.base import FREE_TEXT, TextEnvironment
from ragen_jax.envs.outside.games import WORDING, PythonGames
from ragen_jax.envs.outside.objects import ObjectEnvironment


@dataclasses.dataclass(frozen=True, eq=False)
class PythonEnvironment(ObjectEnvironment):
  """A Python class as an environment. One object of the class plays one episode at a time.

  Methods of the class:

    reset(seed) -> str                  starts an episode and returns the first observation; equal seeds give equal
                                        levels. An optional second argument, `member`, is the number of the episode in
                                        its group; it can seed randomness that is not part of the level.
    step(action) -> (str, float, bool, success)
                                        executes one action: observation, reward, whether the game is over, and
                                        whether it is won. `success` can be a dict with 'success' and optionally
                                        'effective': whether the action changed anything. Without 'effective', an action
                                        is effective if the observation changed. Optional 'metrics' are numbers by name.
                                        With `images` observations are mappings {'text': str, 'images': [arrays]}.
    close()                             optional; called when the object is no longer needed.
    level_id(seed) -> str               optional: which item the level of a seed is, see `TextEnvironment.level_id`. An
                                        object that plays no episode is asked.
    expert() -> list[str]               optional: reference actions for the next turn, from the present state.
    rationale() -> str                  optional: the thought behind them, for demonstrations.

  Attributes of the class or of its objects, which may also be methods without arguments:

    rules                               the game and its aim.
    action_names                        optional: the words that are actions; without them every text is an action.
    action_help                         optional: how an action is written.
    legend                              optional: symbol to meaning.
    whole_answer                        optional: whether the whole text of an answer is one action.
    system, state_label, counts_turns   optional: the wording of the prompts, see `Game`.

  The constructor makes one object to read these. With `processes`, all code of the class runs in worker processes;
  also its module is not loaded in this one.

  Attributes:
    class_path: 'package.module:ClassName'.
    options: keyword arguments of the class.
    workers: number of threads; 0 plays in the caller's thread, without a time limit. More than 1 helps if steps wait
      for a network or a process. Only one thread at a time then uses an object, but not always the same thread.
    step_timeout_s: time limit of a step, a reset or a close, in seconds.
    processes: number of processes that the objects of the rows are spread over; 0 plays in threads of this process. For
      code that breaks in threads, holds the interpreter's lock, hangs, crashes, or takes much memory.
    memory_mib: limit of the memory that each process may write to; 0 for no limit.
    images: number of images in each observation, see envs/outside/images.py; 0 for text alone.
    image_size: (height, width) of every image, in pixels.
  """

  name: ClassVar[str] = 'python'

  class_path: str = ''
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  workers: int = 1
  step_timeout_s: float = 60.0
  processes: int = 0
  memory_mib: int = 0
  images: int = 0
  image_size: tuple[int, int] = (0, 0)

  def __post_init__(self):
    object.__setattr__(self, 'options', check_mapping('python', 'options', self.options))
    self._check_play()
    settings = {'class_path': self.class_path, 'options': self.options}
    about = self._load_games(PythonGames, settings, f'class_path={self.class_path!r}')
    where = f'python: {self.class_path}'
    names = check_action_names(where, about['action_names'])
    values = {
      '_rules': check_text(where, 'rules', about['rules'], blank=False),
      '_legend': check_legend(where, 'legend', about['legend']),
      'action_names': names,
      'action_help': check_text(where, 'action_help', about['action_help']) or ('' if names else FREE_TEXT),
      **check_wording(where, **{x: about['wording'].get(x, getattr(TextEnvironment, x)) for x in WORDING}),
      'has_expert': about['has_expert'],
      '_has_level_id': about['has_level_id'],
    }
    for field, value in values.items():
      object.__setattr__(self, field, value)

  def level_id(self, seed: int) -> str | None:
    return self._games.level_id(seed) if self._has_level_id else None

  def rules(self) -> str:
    return self._rules

  def legend(self) -> dict[str, str]:
    return self._legend
