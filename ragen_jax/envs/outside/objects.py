"""Environments whose games are Python objects, in threads of this process or in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ragen_jax.envs.options import check_processes, check_workers
from ragen_jax.envs.outside.base import Session, TextEnvironment
from ragen_jax.envs.outside.images import check_image_options
from ragen_jax.envs.outside.local import LocalSession, close_all
from ragen_jax.envs.outside.processes import game_processes


class ObjectEnvironment(TextEnvironment):
  """Games that are objects. Subclasses have the options that are declared here."""

  workers: int
  step_timeout_s: float
  processes: int
  memory_mib: int
  images: int
  image_size: tuple[int, int]

  def _check_play(self) -> None:
    """Checks the options of this class, and sets the form of images."""
    check_workers(self.name, self.workers, self.step_timeout_s)
    check_processes(self.name, self.processes, self.memory_mib, self.workers)
    object.__setattr__(self, 'image_form', check_image_options(self.name, self.images, self.image_size))

  def _load_games(self, make: Callable[..., Any], settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Sets what makes the games, a class of `games`, and returns its description; `where` names it in errors."""
    if self.processes:
      limits = {'memory_mib': self.memory_mib, 'step_timeout_s': self.step_timeout_s}
      games = game_processes(self.name, settings, count=self.processes, **limits)
      about = games.describe(f'{self.name}: {where}')
    else:
      limits = {'workers': self.workers, 'timeout_s': self.step_timeout_s}
      games = make(**settings, close=lambda game: close_all([game], **limits))
      about = games.describe()
    object.__setattr__(self, '_games', games)
    return about

  @property
  def any_thread(self) -> bool:
    return self.workers > 0

  def open(self, rows: int) -> Session:
    if self.processes:
      return self._games.open(rows)
    limits = {'workers': self.workers, 'step_timeout_s': self.step_timeout_s}
    return LocalSession(self._games.make, rows, **limits, owner=self, form=self.image_form)
