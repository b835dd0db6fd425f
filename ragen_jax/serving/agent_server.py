"""The server of agents as the other modules see it: its open parts. `open_server` opens one."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

import jax

from ragen_jax.serving.engine.engine import Engine
from ragen_jax.serving.engine.engines import Engines
from ragen_jax.serving.http.service import Service
from ragen_jax.serving.rollouts.lifecycle import Lifecycle
from ragen_jax.serving.types import Progress
from ragen_jax.utils.errors import describe_error

_log = logging.getLogger(__name__)

ADMIN_KEY = 'RAGEN_ADMIN_KEY'
# Name under which the trainer's own runners claim rollouts.
LOCAL_WORKER = 'local'
LOOPBACK = ('127.0.0.1', 'localhost', '::1')


class AgentServer:
  """The open parts of a server.

  `progress` gives the counts of the runner that plays the tasks in this process, see `agent_player.run_agents`; it is
  None while outside workers play.
  """

  def __init__(self, engines: Engines, lifecycle: Lifecycle, service: Service, url: str, admin_key: str):
    self.engines, self.lifecycle, self.service = engines, lifecycle, service
    self.url, self.admin_key = url, admin_key
    self.progress: Callable[[], Progress] | None = None
    self._weights: tuple[int, list[weakref.ref]] | None = None  # version and arrays of the last `use_weights`

  def use_weights(self, params: Any, version: int) -> None:
    """Has the engine sample with these weights, between two chunks; nothing happens if they are the last ones.

    Replies in flight go on. What older weights have computed is computed again, so that each log-probability is that of
    its token's version given the whole row.
    """
    leaves = jax.tree.leaves(params)
    if self._weights is not None:
      known, arrays = self._weights
      if known == version and len(arrays) == len(leaves) and all(a() is x for a, x in zip(arrays, leaves, strict=True)):
        return
    self.engine.set_weights(params, version=version, keep_cache=False)
    self._weights = version, [weakref.ref(x) for x in leaves]

  @property
  def engine(self) -> Engine:
    return self.engines.policy

  def pause(self, *, drain: bool) -> None:
    """Holds the calls of all agents, see `Engine.pause`. Until `resume`, the time does not count for attempts.

    While an exception is handled, an error of the store is logged and not raised: it would hide the exception.
    """
    try:
      self.engines.pause(drain=drain)
    finally:
      raised = sys.exception()
      try:
        self.lifecycle.pause()
      except Exception as e:
        if raised is None:
          raise
        _log.error('the pause is not stored, so its time counts for attempts: %s', describe_error(e))

  def resume(self) -> None:
    """Goes on after `pause`."""
    self.lifecycle.resume()
    self.engines.resume()

  def sweep(self) -> None:
    """Ends attempts that are late or give no sign of life."""
    while self.lifecycle.sweep():
      pass
