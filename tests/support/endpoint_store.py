"""Rollouts and calls for tests of the endpoint's store."""

from __future__ import annotations

import numpy as np

from ragen_jax.serving.rollouts.records import AttemptLimits, NewRollout
from ragen_jax.serving.types import AttemptState, Finish, Generated, SamplingParams, StoredCall

RETRY = (AttemptState.FAILED, AttemptState.TIMEOUT, AttemptState.UNRESPONSIVE)


class Clock:
  """A clock that stands still until a test moves it."""

  def __init__(self, now: float = 1000.0):
    self.now = now

  def __call__(self) -> float:
    return self.now


def limits(timeout_s=60.0, heartbeat_s=10.0, max_attempts=1, retry_on=RETRY):
  return AttemptLimits(timeout_s, heartbeat_s, max_attempts, retry_on)


def new_rollout(rollout_id='', task=None, group='', mode='train', metadata=None, key=(1, 2), **limit):
  return NewRollout(rollout_id, {'question': 1} if task is None else task, group, mode, limits(**limit), metadata, key)


def make_call(attempt_id, index=0, seed=0, call_id='', agent='', finish=Finish.STOP, n=3, **fields):
  """A call with `n` tokens that depend on the seed."""
  rng = np.random.default_rng([seed, index])
  generated = Generated(
    ids=tuple(rng.integers(0, 2**31 - 1, n).tolist()),
    logprobs=rng.normal(size=n).astype('<f4'),
    values=rng.normal(size=n).astype('<f4'),
    entropies=rng.normal(size=n).astype('<f4'),
    versions=rng.integers(0, 9, n).astype('<i4'),
    top=fields.pop('top', ()),
    text=fields.pop('text', f'reply {seed}'),
    finish=finish,
    cached_tokens=int(rng.integers(0, 9)),
    stop_text='',
  )
  params = SamplingParams(temperature=0.7, top_p=1.0, top_k=0, max_tokens=n, stop=('END',), top_logprobs=0)
  return StoredCall(
    call_id=call_id or f'chatcmpl-{attempt_id}-{index}', attempt_id=attempt_id, index=index, row=0, agent=agent,
    trained=True, context=tuple(rng.integers(0, 99, 4).tolist()), generated=generated, params=params,
    request_digest=f'd{seed}', messages='[]', new_row_cause='', **fields,
  )  # fmt: skip


def bits(call):
  """A call with arrays as bytes and their types, so that equal means equal to the bit."""
  generated = {
    name: (value.tobytes(), str(value.dtype)) if isinstance(value, np.ndarray) else value
    for name, value in vars(call.generated).items()
  }
  return {**vars(call), 'generated': generated}
