"""Engine: one engine for the policy, and one for each set of frozen weights that agents play with."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ragen_jax.sampling.sampler import Sampler
from ragen_jax.serving.engine.engine import Engine
from ragen_jax.serving.engine.eyes import Eyes
from ragen_jax.serving.engine.settings import EngineStats


@dataclasses.dataclass(frozen=True)
class FrozenWeights:
  """Weights that stay as they are; `version` is the number of updates that led to them.

  Attributes:
    sampler: the programs of the model's structure; the policy's, if it is the same.
    params: weights of the `ActorCritic`, in the types that `Sampler.decode_weights` gives.
    eyes: the vision tower; None for a model that reads text, or other images than the policy.
  """

  sampler: Sampler
  params: Any
  version: int
  eyes: Eyes | None = None


class Engines:
  """Routes agents to engines, that of the policy and those of frozen weights, and pauses and resumes all of them.

  Frozen weights are never replaced, so the caches of their engines stay valid when the policy is updated.
  """

  def __init__(self, policy: Engine, frozen: Mapping[str, Engine], agents: Sequence[tuple[str, str]]):
    """Takes open engines, those of frozen weights by the names of the weights.

    `agents` has regular expressions, each with the name of the weights of the agents whose whole name it matches; the
    first that matches counts, and the policy plays for the others. ValueError if no engine has the name.
    """
    missing = {name for _, name in agents} - frozen.keys()
    if missing:
      raise ValueError(f'there is no engine of {", ".join(sorted(missing))}')
    self.policy, self.frozen = policy, dict(frozen)
    self._agents = [(re.compile(expression), name) for expression, name in agents]

  def of(self, agent: str) -> Engine:
    """The engine that samples an agent's replies."""
    name = self._name(agent)
    return self.policy if name is None else self.frozen[name]

  def is_frozen(self, agent: str) -> bool:
    """Whether an agent plays with frozen weights."""
    return self._name(agent) is not None

  def stats(self) -> dict[str, EngineStats]:
    """What each engine holds and has done: that of the policy under '', others under the names of their weights."""
    return {name: engine.stats() for name, engine in self._all().items()}

  def pause(self, *, drain: bool) -> None:
    """Holds the calls of all agents; see `Engine.pause`."""
    for engine in self._all().values():
      engine.pause(drain=drain)

  def resume(self) -> None:
    for engine in self._all().values():
      engine.resume()

  def compile(self) -> None:
    """Compiles the programs of all engines; see `Engine.compile`."""
    for engine in self._all().values():
      engine.compile()

  def _name(self, agent: str) -> str | None:
    return next((name for expression, name in self._agents if expression.fullmatch(agent)), None)

  def _all(self) -> dict[str, Engine]:
    return {'': self.policy} | self.frozen
