"""Play: the runner of tasks of packages of `verifiers`, whose own rollouts call the policy over HTTP."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ragen_jax.agent.metrics import is_reported
from ragen_jax.envs.outside.verifiers import Package
from ragen_jax.serving import client
from ragen_jax.serving.play.runners import Ending, Outcome, RunWatch, faulty
from ragen_jax.serving.types import METRIC_PREFIX, AttemptState
from ragen_jax.utils.threads import Fault


class VerifiersRunner:
  """Posts the rewards and the metrics of a rollout by their names, when it has ended; see `Runner`."""

  def __init__(self, packages: Mapping[str, Package], model: str, max_turns: int):
    """`packages` by the `settings` of tasks; `model` names the policy, `max_turns` is the most calls of a task."""
    self._packages, self._model, self._max_turns = packages, model, max_turns

  def run(self, task: client.Task, watch: RunWatch) -> Outcome:
    """See `Runner`."""
    package = self._packages[task.input['settings']]
    rollout = package.play(task.input['index'], task.base_url, task.api_key, self._model, self._max_turns)
    rollout.add_done_callback(lambda _: watch.end())
    ending = watch.wait()
    if ending != Ending.ENDED:
      rollout.cancel()
      return Outcome.stopped(ending, task)
    outcome = rollout.result()
    if isinstance(outcome, Fault):
      return faulty(outcome, task)
    for name, value in outcome['rewards'].items():
      client.reward(value, name=name, of=task)
    for name, value in outcome['metrics'].items():
      client.reward(value, name=METRIC_PREFIX + metric_name(name), of=task)
    return Outcome(AttemptState.SUCCEEDED, None, '', None)


def metric_name(name: str) -> str:
  """A name of the package in the form of a metric, in snake case; 'own_...' if the run has a metric of this name."""
  own = re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_')[:60]
  return own if re.match('[a-z]', own) and is_reported(own) else f'own_{own}'
