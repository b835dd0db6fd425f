"""Rollouts: records of the store, rollouts and their attempts."""

from __future__ import annotations

import dataclasses
from typing import Any

from ragen_jax.serving.client import Task
from ragen_jax.serving.types import AttemptState, RolloutState

# States in which a rollout is over.
OVER = frozenset({RolloutState.SUCCEEDED, RolloutState.FAILED, RolloutState.CANCELLED})
# States in which a training iteration may take a rollout; one that failed is part of its group but trains no token.
TRAINABLE = frozenset({RolloutState.SUCCEEDED, RolloutState.FAILED})
# How an attempt may end that a new attempt may replace.
RETRIED = frozenset({AttemptState.FAILED, AttemptState.TIMEOUT, AttemptState.UNRESPONSIVE})


@dataclasses.dataclass(frozen=True)
class AttemptLimits:
  """How long an attempt may take and how often a rollout is tried.

  Attributes:
    timeout_s: longest time of an attempt; positive.
    heartbeat_s: longest time between two signs of life of an attempt; 0 asks for none.
    max_attempts: the most attempts; at least 1. An attempt that ended because the server stopped is not counted.
    retry_on: the ends of an attempt that a new attempt follows; of 'failed', 'timeout' and 'unresponsive'.
  """

  timeout_s: float
  heartbeat_s: float
  max_attempts: int
  retry_on: tuple[AttemptState, ...]


@dataclasses.dataclass(frozen=True)
class NewRollout:
  """A rollout to create.

  Attributes:
    rollout_id: the caller's id, 1 to 128 letters, digits and '_.-'; '' for an id of the store's choice.
    input: the task, a JSON value.
    group: the prompt group; '' for a group of its own.
    mode: 'train' or 'val'.
    metadata: a JSON value that is kept for the caller.
    key: u32[2], data of the PRNG key of the rollout.
  """

  rollout_id: str
  input: Any
  group: str
  mode: str
  limits: AttemptLimits
  metadata: Any
  key: tuple[int, int]


def metadata_with_prompt(metadata: dict[str, Any], prompt: str) -> dict[str, Any]:
  """Metadata of a rollout whose program gets a prompt; '' leaves them as they are."""
  return metadata | {'prompt': prompt} if prompt else metadata


def with_default_prompt(metadata: Any, prompt: str) -> Any:
  """Metadata with a prompt, if they are an object without one, or None; others stay as they are, and so for ''."""
  if metadata is None or (isinstance(metadata, dict) and 'prompt' not in metadata):
    return metadata_with_prompt(metadata or {}, prompt) or metadata
  return metadata


def prompt_of(metadata: Any) -> str:
  """The prompt in the metadata of a rollout; '' if there is none."""
  prompt = metadata.get('prompt', '') if isinstance(metadata, dict) else ''
  return prompt if isinstance(prompt, str) else ''


@dataclasses.dataclass(frozen=True)
class RolloutRecord:
  """A rollout as it is stored, with the values of `NewRollout`. Times are in seconds since 1970.

  Attributes:
    seq: place in the order of creation, from 1.
    ordinal: place in the group in order of creation, from 0.
    attempt_id: the latest attempt, the only one whose calls may be trained; '' before the first.
    attempts: number of attempts so far.
    error: why the latest attempt failed, one line; '' if it did not.
    completed: place in the order in which rollouts were over, from 1; None before.
    iteration: the training iteration that took it; None if none did.
    closed: time at which it was taken or closed, after which it gets no reward; None before.
  """

  seq: int
  rollout_id: str
  input: Any
  group: str
  ordinal: int
  mode: str
  state: RolloutState
  limits: AttemptLimits
  metadata: Any
  key: tuple[int, int]
  attempt_id: str
  attempts: int
  error: str
  created: float
  ended: float | None
  completed: int | None
  iteration: int | None
  closed: float | None


@dataclasses.dataclass(frozen=True)
class AttemptRecord:
  """An attempt as it is stored. Times are in seconds since 1970.

  Attributes:
    attempt_id: the rollout's id, '.' and the attempt's number.
    number: 1 for the rollout's first attempt.
    key_digest: SHA-256 of its API key, hexadecimal; the key itself is not stored.
    error: why it failed, one line; '' if it did not.
    lost: whether it ended because the server or its worker stopped; such an attempt does not count as a try.
  """

  attempt_id: str
  rollout_id: str
  number: int
  state: AttemptState
  worker: str
  started: float
  last_heartbeat: float
  ended: float | None
  key_digest: str
  error: str
  lost: bool


@dataclasses.dataclass(frozen=True)
class Claim:
  """A running rollout, its new attempt that a worker got, and the attempt's key in clear, which cannot be had later."""

  rollout: RolloutRecord
  attempt: AttemptRecord
  api_key: str


def task_of(claim: Claim, server_url: str) -> Task:
  """What an agent needs to play a claimed rollout."""
  rollout, attempt_record = claim.rollout, claim.attempt
  return Task(
    rollout_id=rollout.rollout_id, attempt_id=attempt_record.attempt_id, number=attempt_record.number,
    mode=rollout.mode, group=rollout.group, input=rollout.input, timeout_s=rollout.limits.timeout_s,
    heartbeat_s=rollout.limits.heartbeat_s, server_url=server_url.rstrip('/'), api_key=claim.api_key,
    prompt=prompt_of(rollout.metadata),
  )  # fmt: skip
