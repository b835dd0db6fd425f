"""Who plays the rollouts of training and of evaluations: the policy in our environments, or programs outside."""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent import futures
from typing import Any, Protocol

import jax
import numpy as np

from ragen_jax.agent.agent_proxy import AgentProxy
from ragen_jax.agent.episode import Limits
from ragen_jax.agent.prompt_images import PromptImages
from ragen_jax.agent.rollout import Rollout, concatenate
from ragen_jax.agent.sampler_speaker import SamplerSpeaker
from ragen_jax.distributed import processes
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.models.layers import FUSE_BELOW_WIDTH
from ragen_jax.sampling.sampler import Sampler, Sampling
from ragen_jax.utils.heartbeat import Heartbeat


class Player(Protocol):
  """Plays rollouts with the weights that it is given.

  Attributes:
    specs: the environments, or the tasks, in the order of the rows.
    reply_prefix: the part of every reply that is forced.
    metrics: metrics of the last rollout that its episodes do not tell.
  """

  specs: list[EnvSpec]
  group_size: int
  max_turns: int
  reply_prefix: str
  metrics: dict[str, float]

  def check(self, first_seed: int) -> None:
    """Raises UserError if episodes cannot begin, as far as that shows before anything large is compiled."""

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
    """Plays one episode in each row.

    Args:
      first_seed: seed of the level, or the number of the task, of the first group; the next group has the next one.
      policy_version, pictured: see `AgentProxy.rollout`.
      level_seeds: i64[P], the seeds of the groups' levels in place of consecutive ones, see `Curriculum`. Programs play
        consecutive tasks.
    """

  def levels(self, first_seed: int) -> frozenset[bytes]:
    """The levels of a rollout, as `EnvStateManager(held_out=...)` takes them; none if they cannot be compared."""

  def optimal(self, first_seed: int) -> dict[str, float]:
    """Best possible success probability by tag, averaged over the levels of a rollout; NaN if unknown."""


# Threads play equal shares of a rollout that have at least so many rows. Calls with fewer rows take no less time, and
# more rows do not stay in the processor's caches.
_ROWS_OF_SHARE = 128


def shares_at_once(sampler: Sampler, limits: Limits, specs: list[EnvSpec], group_size: int) -> int:
  """How many equal shares of a rollout in some environments are played by threads, if observations are text.

  A call of a program of a small model keeps one core of a CPU busy, and the rows of a share stay in its caches. The
  number does not change the episodes. It is 1 for other models and devices, for environments outside JAX, and if
  `agent.rows_in_flight` limits the rows.
  """
  groups = sum(spec.num_groups for spec in specs)
  rows = groups * group_size
  limited = 0 < limits.rows_in_flight < rows or any(spec.env.is_outside for spec in specs)
  if rows < 2 * _ROWS_OF_SHARE or limited or jax.process_count() > 1:
    return 1
  mesh, small = sampler.mesh, sampler.cfg.hidden_size < FUSE_BELOW_WIDTH
  if not small or mesh is None or mesh.size > 1 or mesh.devices.flat[0].platform != 'cpu':
    return 1
  return max(n for n in range(1, rows // _ROWS_OF_SHARE + 1) if groups % n == 0)


def _processors() -> int:
  """Those that this process may use."""
  return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


class EnvironmentPlayer:
  """The policy plays the environments of an `AgentProxy`; see `Player` for the attributes and methods.

  All processes must call `levels` and `optimal`.
  """

  def __init__(self, proxy: AgentProxy, sampler: Sampler, eyes: PromptImages | None = None):
    """Plays nothing. `eyes` is the vision tower of the policy, which is needed if observations contain images."""
    self.proxy = proxy
    self._sampler = sampler
    self._eyes = eyes
    self.specs, self.group_size = proxy.envs.specs, proxy.envs.group_size
    self.metrics: dict[str, float] = {}
    self.max_turns, self.reply_prefix = proxy.limits.max_turns, proxy.context.reply_prefix
    shares = 1 if eyes is not None else shares_at_once(sampler, proxy.limits, self.specs, self.group_size)
    self._shares = proxy.divided(shares) if shares > 1 else [proxy]

  def check(self, first_seed: int) -> None:
    checked: set[int] = set()
    for share in self._shares:
      if not checked.issuperset(share.envs.pools):
        share.check_first_prompts(first_seed)
      checked.update(share.envs.pools)

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
    heartbeat = Heartbeat('playing: %d of %d episodes are over', sum(share.envs.rows for share in self._shares))

    def play_share(proxy: AgentProxy) -> Rollout:
      speaker = SamplerSpeaker(self._sampler, params, key, sampling, eyes=self._eyes)
      return proxy.rollout(
        speaker, first_seed, policy_version=policy_version, pictured=pictured, level_seeds=level_seeds,
        heartbeat=heartbeat,
      )  # fmt: skip

    if len(self._shares) == 1:
      return play_share(self.proxy)
    # More threads than processors: what one does on the host runs beside the programs of others.
    with futures.ThreadPoolExecutor(2 * _processors(), 'ragen_jax-share') as threads:
      try:
        return concatenate(list(threads.map(play_share, self._shares)), renumber=False)
      except BaseException:
        threads.shutdown(wait=False, cancel_futures=True)  # those that play are waited for at the end
        raise

  def levels(self, first_seed: int) -> frozenset[bytes]:
    own = frozenset().union(*(share.envs.levels_from(first_seed) for share in self._shares))
    return frozenset().union(*processes.gather_shares(own, self._sampler.share))

  def optimal(self, first_seed: int) -> dict[str, float]:
    found = []
    for share in self._shares:
      share.envs.reset(first_seed)
      found.append((share.envs.optimal(), share.envs.row_env))
    own = tuple(np.concatenate(x) for x in zip(*found, strict=True))
    parts = processes.gather_shares(own, self._sampler.share)
    best, env = (np.concatenate(x) for x in zip(*parts, strict=True))
    return {s.tag: float(np.mean(best[env == i])) for i, s in enumerate(self.proxy.envs.specs)}
