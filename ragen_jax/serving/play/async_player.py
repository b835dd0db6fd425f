"""Play: rollouts of asynchronous training; programs go on while the trainer learns, see `group_queue`.

Sampling and learning use the devices in turns. The devices sample until enough groups are complete; then the trainer
uses them until its next rollout. Meanwhile programs go on, and their calls of the model wait. Replies that have begun
go on with the new weights.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.rollout import Rollout
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.runs.interrupt import Interrupt
from ragen_jax.sampling.sampler import Sampling
from ragen_jax.serving.agent_server import AgentServer
from ragen_jax.serving.play.agent_player import LOOK_S, MOST_PRUNED, REPORT_S, AgentPlayer, AgentSettings
from ragen_jax.serving.play.group_queue import GroupQueue, QueueSettings, Taken
from ragen_jax.utils.errors import UserError

# Metrics of an iteration that only asynchronous training has.
METRICS = ('serving/groups_ahead', 'serving/groups_ready', 'serving/groups_stale', 'serving/wait_s')


class AsyncAgentPlayer(AgentPlayer):
  """Agent programs play the tasks of the specs ahead of the iterations; see `AgentPlayer`.

  The metrics include `METRICS`: tasks that are queued or played, and tasks that are over, when the iteration has its
  groups; tasks that were given up since they were too old; seconds that the trainer waited.
  """

  def __init__(
    self,
    settings: AgentSettings,
    queue: QueueSettings,
    server: AgentServer,
    specs: list[EnvSpec],
    tokenizer: ChatTokenizer,
    repeatable: int,
    interrupt: Interrupt | None = None,
  ):
    """Goes on with the tasks of the store. The rollouts of the last `repeatable` iterations are not deleted: they may
    be repeated from their checkpoints."""
    super().__init__(settings, server, specs, queue.group_size, tokenizer, interrupt)
    self._repeatable = repeatable
    self._groups = GroupQueue(server.lifecycle, queue, specs, time.time)

  def play(
    self,
    params: Any,
    key: jax.Array,
    sampling: Sampling,
    first_seed: int,
    *,
    policy_version: int = 0,
    pictured: Collection[int] = (),
    level_seeds: np.ndarray | None = None,
  ) -> Rollout:
    """See `Player`. An iteration that is repeated after a restart gets the groups that it had before.

    The iteration is `policy_version`, and its first task has the number `first_seed`; further iterations follow it.
    `key` is for the tasks that are queued now. Nothing is drawn for `pictured`.

    Raises:
      UserError: see `_collect`. The tasks of the groups are queued again.
      Stopped: a signal was received before the iteration had its groups.
    """
    del pictured, level_seeds
    server, start, renewed = self.server, time.monotonic(), 0
    server.service.use_sampling(self._settings.mode, sampling)
    groups = self._groups.taken(policy_version)
    if not groups:
      server.use_weights(params, policy_version)
      server.resume()
      try:
        groups, renewed = self._take(policy_version, first_seed, key)
      finally:
        server.pause(drain=False)
    waited = time.monotonic() - start
    self._groups.fill(policy_version, first_seed, key)  # for the time of the update
    try:
      rollout = self._collect([(g.tag, g.seed, g.rollouts) for g in groups], sampling)
    except UserError:
      # The same command, perhaps with a better program, plays the tasks again.
      self._groups.give_back(policy_version, key)
      raise
    self.metrics |= dict(zip(METRICS, map(float, (*self._groups.counts(), renewed, waited)), strict=True))
    before = time.time() - self._settings.keep_s
    server.lifecycle.store.prune(policy_version - self._repeatable, before, MOST_PRUNED)
    return rollout

  def _take(self, iteration: int, first_seed: int, key: jax.Array) -> tuple[list[Taken], int]:
    """Waits until an iteration has its groups. Returns them, and how many others were too old. Raises as `_wait`."""
    queue, changes = self._groups, self.server.lifecycle.changes
    renewed, told = queue.renew_stale(iteration, key, running=True), time.monotonic()
    stall = self._stall()
    while True:
      seen = changes.count
      queue.look()
      renewed += queue.renew_stale(iteration, key, running=False)
      queue.fill(iteration, first_seed, key)
      if groups := queue.take(iteration, key):
        return groups, renewed
      self._interrupt.check()
      self.server.sweep()
      stall.check()
      if time.monotonic() - told > REPORT_S:
        told = time.monotonic()
        playing, over = queue.counts()
        self._report(f'{over} of {playing + over}')
      changes.wait(seen, LOOK_S)
