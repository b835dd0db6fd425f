"""Plays tasks with a prompt: by agent programs, with the same store, queue and runners as training."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.episode import Episode, Status
from ragen_jax.agent.segments import written
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.prompt_search.tasks import Task
from ragen_jax.prompt_search.wording import Failure
from ragen_jax.serving.agent_server import AgentServer
from ragen_jax.serving.engine import keys
from ragen_jax.serving.play.agent_player import AgentPlayer, AgentSettings, created
from ragen_jax.serving.play.episodes import FinishedAttempt, TaskAttempts, build_rollout
from ragen_jax.serving.rollouts.records import NewRollout, RolloutRecord, metadata_with_prompt


@dataclasses.dataclass(frozen=True)
class Attempt:
  """An attempt at a task with a prompt."""

  score: float  # sum of its rewards; the score of failures for one without
  failed: bool  # whether the program failed, or posted no reward
  success: bool  # see `EpisodeSettings.success_score`
  shown: Failure  # what a critic sees of it


class PromptPlayer(AgentPlayer):
  """Plays tasks with prompts. What the store holds already, from before a restart, is not played again."""

  def __init__(
    self, settings: AgentSettings, server: AgentServer, specs: list[EnvSpec], tokenizer: ChatTokenizer, seed: int,
    failed_score: float,
  ):  # fmt: skip
    """Plays nothing.

    Args:
      settings: how tasks are played; `settings.episodes.group_size` is the number of attempts at each task.
      specs: where the tasks come from; whether this process plays them follows from their runners.
      seed: of the draws, with the number of the task and of the attempt; all prompts have the same draws.
      failed_score: the score of an attempt that failed or got no reward.
    """
    super().__init__(settings, server, specs, settings.episodes.group_size, tokenizer)
    self._seed, self._failed_score = seed, failed_score

  def try_prompts(self, trials: Sequence[tuple[str, Sequence[Task]]]) -> list[list[list[Attempt]]]:
    """Plays all tasks of all prompts together; for each prompt and each of its tasks the attempts."""
    queued = [[self._create(prompt, task) for task in tasks] for prompt, tasks in trials]
    created = {record.rollout_id: record for trial in queued for records in trial for record in records}
    over = self._wait(list(created.values()))
    return [
      [self._read(task, [over[r.rollout_id] for r in records]) for task, records in zip(tasks, trial, strict=True)]
      for (_, tasks), trial in zip(trials, queued, strict=True)
    ]

  def _create(self, prompt: str, task: Task) -> list[RolloutRecord]:
    """Creates the rollouts of a task, unless they are there."""
    digest = hashlib.sha256(json.dumps([prompt, task.tag]).encode()).hexdigest()[:20]
    group, records = f'{digest}-{task.number}', []
    for member in range(self.group_size):
      new = NewRollout(
        rollout_id=f'{group}-{member}', input=task.env.task(task.number, member), group=group,
        mode=self._settings.mode, limits=self._settings.limits,
        metadata=metadata_with_prompt({'tag': task.tag}, prompt),
        key=keys.task_key(self._seed, task.number, member),
      )  # fmt: skip
      records.append(created(self.server.lifecycle, new))
    return records

  def _read(self, task: Task, records: Sequence[RolloutRecord]) -> list[Attempt]:
    """The attempts of a task whose rollouts are over."""
    ended = tuple(self._finished(record) for record in records)
    played = TaskAttempts(task.tag, task.number, ended)
    rollout, _ = build_rollout([played], self._settings.episodes, self._tokenizer.decode)
    # There is no rollout if no attempt has called the policy.
    episodes = rollout.episodes if rollout is not None else [None] * len(ended)
    return [self._attempt(r.input, own, e) for r, own, e in zip(records, ended, episodes, strict=True)]

  def _attempt(self, given: Any, own: FinishedAttempt, episode: Episode | None) -> Attempt:
    """An attempt at the task `given`, with its episode if it has called the policy."""
    failed = episode is None or episode.status == Status.ENV_ERROR
    score = self._failed_score if failed else episode.score
    error = (own.error or (episode and episode.error) or 'the attempt ended without a call') if failed else ''
    turns = tuple((written(turn.observation), turn.reply) for turn in episode.turns) if episode else ()
    return Attempt(
      score=score,
      failed=failed,
      success=not failed and episode.success,
      shown=Failure(json.dumps(given, ensure_ascii=False), score, error, turns),
    )
