"""Types that the rooms of serving share: sampling parameters, replies, calls, attempts, counts."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence

import numpy as np

from ragen_jax.agent.segments import ImageSpan

# A reward with a name that begins so is a measurement.
METRIC_PREFIX = 'metrics/'


class Finish(enum.StrEnum):
  """Why a reply ended."""

  STOP = 'stop'  # the policy sampled a stop token, or the text reached a stop string
  LENGTH = 'length'  # the budget of tokens or the context is used up
  ABORTED = 'aborted'  # the client went away or the server stopped; never trained


@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """How the tokens of one reply are drawn.

  Attributes:
    temperature: divides the logits; 0 takes the most likely token.
    top_p: keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all.
    top_k: keep this many most likely tokens; 0 keeps all.
    max_tokens: the most tokens of the reply, stop token included; at least 1.
    stop: texts that end the reply; the text is cut before them, the ids are not.
    top_logprobs: number of likeliest alternatives to report for each token; 0 for none.
  """

  temperature: float
  top_p: float
  top_k: int
  max_tokens: int
  stop: tuple[str, ...]
  top_logprobs: int


@dataclasses.dataclass(frozen=True)
class PlacedImage:
  """An image in ids: its placeholders are the columns from `start` to `stop`, and `digest` identifies its pixels."""

  start: int
  stop: int
  digest: bytes

  @classmethod
  def of(cls, span: ImageSpan, offset: int = 0) -> PlacedImage:
    """The image without its pixels, in ids that begin `offset` columns later."""
    return cls(span.start - offset, span.stop - offset, span.segment.digest)


def marked(ids: Sequence[int], images: Iterable[PlacedImage]) -> np.ndarray:
  """i64[n]: the ids, with negative numbers in place of the placeholders, which are equal for equal images.

  The columns of an image have the two halves of its digest in turn, so rows that are equal here show the same.
  """
  found = np.asarray(ids, np.int64)
  for image in images:
    halves = np.frombuffer(image.digest, np.int64) | np.iinfo(np.int64).min
    found[image.start : image.stop] = np.resize(halves, image.stop - image.start)
  return found


@dataclasses.dataclass(frozen=True)
class GenerateRequest:
  """A reply that the engine is asked for: to the whole prompt, of which the engine feeds only what no slot holds yet.

  `key` is u32[2], data of the PRNG key of the row; see the engine's module for the draws. `images` are those whose
  placeholders the prompt has.
  """

  prompt: tuple[int, ...]
  key: tuple[int, int]
  params: SamplingParams
  images: tuple[ImageSpan, ...] = ()


@dataclasses.dataclass(frozen=True)
class Piece:
  """A part of a reply, in the order of the parts. The ids and the texts of all parts are those of the reply.

  `logprobs` and `top` are as in `Generated`. `text` is new text that will not change. It may belong to earlier ids: a
  character whose bytes are incomplete and text that may begin a stop string come later than their ids.
  """

  ids: tuple[int, ...]
  logprobs: np.ndarray
  top: tuple[tuple[tuple[int, float], ...], ...]
  text: str


@dataclasses.dataclass(frozen=True)
class Generated:
  """A reply of the engine.

  Attributes:
    ids: the sampled ids, stop token included.
    logprobs: f32[n], log-probabilities under the sampling distribution (divided by the temperature).
    values: f32[n], the critic's values; 0 if the sampler records none.
    entropies: f32[n], entropies of the distributions before top-k and top-p, in nats.
    versions: i32[n], the policy version that sampled each token.
    top: for each token the likeliest alternatives as (id, log-probability); empty unless asked for.
    text: without the stop token, and cut before a stop string.
    cached_tokens: prompt tokens that were not fed again.
    stop_text: the stop string that ended the reply; '' if none did.
  """

  ids: tuple[int, ...]
  logprobs: np.ndarray
  values: np.ndarray
  entropies: np.ndarray
  versions: np.ndarray
  top: tuple[tuple[tuple[int, float], ...], ...]
  text: str
  finish: Finish
  cached_tokens: int
  stop_text: str


@dataclasses.dataclass(frozen=True)
class StoredCall:
  """A call as it is stored, enough to rebuild its row without encoding anything again.

  Attributes:
    call_id: the id that the client sees, such as 'chatcmpl-…'; unique in the store.
    index: order in which the attempt's calls were stored, from 0.
    row: ordinal of the token row in the attempt; calls of one row follow one another.
    agent: name of the agent that made it; '' for the default agent.
    trained: whether its tokens may be trained.
    context: ids between the row's previous reply (or its beginning) and this reply.
    images: those in the context; the store has their pixels by attempt and digest.
    request_digest: digest of the request's body, to recognise a client's retry.
    messages: the conversation with the reply, canonical JSON, for matching later calls and for people.
    new_row_cause: why the call began a new row; '' if it extends one or is the attempt's first.
  """

  call_id: str
  attempt_id: str
  index: int
  row: int
  agent: str
  trained: bool
  context: tuple[int, ...]
  generated: Generated
  params: SamplingParams
  request_digest: str
  messages: str
  new_row_cause: str
  images: tuple[PlacedImage, ...] = ()


@dataclasses.dataclass(frozen=True)
class Reward:
  """A reward that was posted. A `call_id` of '' stands for the whole episode, an `agent` of '' for all agents."""

  attempt_id: str
  call_id: str
  agent: str
  name: str
  value: float

  @property
  def metric(self) -> str:
    """The name of the measurement that it is, which pays nothing; '' for a reward."""
    return self.name.removeprefix(METRIC_PREFIX) if self.name.startswith(METRIC_PREFIX) else ''


class RolloutState(enum.StrEnum):
  """Where a rollout stands."""

  QUEUED = 'queued'
  RUNNING = 'running'
  SUCCEEDED = 'succeeded'  # an attempt finished
  FAILED = 'failed'  # all attempts failed
  CANCELLED = 'cancelled'


class AttemptState(enum.StrEnum):
  """Where an attempt stands; all but the first are final."""

  RUNNING = 'running'
  SUCCEEDED = 'succeeded'
  FAILED = 'failed'
  TIMEOUT = 'timeout'
  UNRESPONSIVE = 'unresponsive'
  CANCELLED = 'cancelled'


@dataclasses.dataclass(frozen=True)
class Progress:
  """Counts of a pool.

  Attributes:
    cancelled: attempts that were cancelled, or released when the pool stopped.
    abandoned: threads of agents that were told to stop and still run.
    error: the last error of the queue, one line; '' if its last answer was good.
    oldest: name of the thread that was abandoned first; '' if none is left.
    full: whether no attempt runs and none can begin before an abandoned thread ends.
    fault: why no task is claimed any more though the pool was not stopped, one line; '' if tasks are claimed.
  """

  running: int
  succeeded: int
  failed: int
  timed_out: int
  cancelled: int
  abandoned: int
  error: str
  oldest: str
  full: bool
  fault: str
