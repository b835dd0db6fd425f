"""What the tests of the serving engine share: a small model, requests, listeners, and a sampler that waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from ragen_jax.sampling.sampler import Sampler
from ragen_jax.serving.engine.engine import Engine
from ragen_jax.serving.engine.settings import EngineSettings
from ragen_jax.serving.types import Generated, GenerateRequest, SamplingParams
from tests.support.models import random_model

VOCAB, STOP = 40, 7
# Waiting for another thread ends after so many seconds, which no test takes.
PATIENCE = 120.0
# The bytes of each id: letters, and the bytes of a few longer characters, so that replies hold parts of them.
_BYTES = [bytes([97 + i % 26]) for i in range(28)] + [bytes([b]) for b in 'é🙂日'.encode()] + [b'ab', b' ', b'\n']


class ByteTokenizer:
  """Decodes ids as bytes; cut characters become U+FFFD."""

  def decode(self, ids) -> str:
    return b''.join(_BYTES[i] for i in ids).decode('utf-8', 'replace')


def small_sampler(stop: int = STOP, **fields) -> tuple[Sampler, nnx.State]:
  """A sampler for a random model with these fields of its config, and its weights."""
  model = random_model(VOCAB, **fields)
  return Sampler(model, stop_ids=(stop,)), nnx.split(model)[1]


def weights(seed: int) -> nnx.State:
  """Weights of another random model."""
  return nnx.split(random_model(VOCAB, seed=seed))[1]


def settings(**changes) -> EngineSettings:
  """Few rows and short programs."""
  return EngineSettings(**dict(slots=4, max_context=96, chunk=4, widths=(4, 16), max_queue=64) | changes)


def start(sampler, params, **changes) -> Engine:
  """An engine with these changes of `settings`."""
  return Engine(sampler, ByteTokenizer(), settings(**changes), params=params, version=0)


def request(prompt, seed: int = 0, **params) -> GenerateRequest:
  """A request for up to 12 tokens of the model's own distribution, with changes of its parameters."""
  defaults = dict(temperature=1.0, top_p=1.0, top_k=0, max_tokens=12, stop=(), top_logprobs=0)
  key = tuple(np.asarray(jax.random.key_data(jax.random.key(seed))).tolist())
  return GenerateRequest(tuple(int(i) for i in prompt), key, SamplingParams(**defaults | params))


def prompts(number: int, length: int, seed: int = 0) -> list[tuple[int, ...]]:
  """Random prompts."""
  return [tuple(row) for row in np.random.default_rng(seed).integers(8, VOCAB, size=(number, length)).tolist()]


class Listener:
  """Collects what a call is told.

  Attributes:
    pieces: the parts so far.
    outcomes: what `on_done` got, once.
  """

  def __init__(self):
    self.pieces, self.outcomes = [], []
    self._done, self._began = threading.Event(), threading.Event()

  def on_piece(self, piece):
    self.pieces.append(piece)
    self._began.set()

  def on_done(self, outcome):
    self.outcomes.append(outcome)
    self._done.set()

  def wait_for_piece(self) -> None:
    assert self._began.wait(PATIENCE)

  def outcome(self):
    """What the call ended with."""
    assert self._done.wait(PATIENCE), 'the call did not end'
    assert len(self.outcomes) == 1
    return self.outcomes[0]

  def reply(self) -> Generated:
    """The reply, whose parts agree with the whole."""
    reply = self.outcome()
    if isinstance(reply, BaseException):
      raise AssertionError('the call failed') from reply
    assert sum((p.ids for p in self.pieces), ()) == reply.ids
    assert ''.join(p.text for p in self.pieces) == reply.text or reply.finish == 'aborted'
    logprobs = np.concatenate([p.logprobs for p in self.pieces] or [np.zeros(0)])
    np.testing.assert_array_equal(logprobs, reply.logprobs)
    assert sum((p.top for p in self.pieces), ()) == reply.top
    for name in ('logprobs', 'values', 'entropies', 'versions'):
      assert len(getattr(reply, name)) == len(reply.ids)
    return reply


def until(condition: Callable[[], object]) -> None:
  """Waits until another thread has made a condition true."""
  end = time.monotonic() + PATIENCE
  while not condition():
    assert time.monotonic() < end, 'nothing happened'
    time.sleep(0.002)


def submit(engine: Engine, asked: GenerateRequest) -> Listener:
  """Submits a request with a new listener."""
  listener = Listener()
  listener.ticket = engine.submit(asked, listener.on_piece, listener.on_done)
  return listener


def ask(engine: Engine, *asked: GenerateRequest) -> list[Generated]:
  """The replies to requests that are submitted together."""
  engine.pause(drain=False)
  listeners = [submit(engine, r) for r in asked]
  engine.resume()
  return [listener.reply() for listener in listeners]


class Gate:
  """A sampler whose `decode` waits until the test lets it: chunk by chunk, or for good.

  Attributes:
    entered: set while `decode` waits or has waited.
  """

  def __init__(self, sampler: Sampler):
    self.entered = threading.Semaphore(0)
    self._sampler = sampler
    self._permits = threading.Semaphore(0)
    self._open = threading.Event()

  def __getattr__(self, name):
    return getattr(self._sampler, name)

  def allow(self, chunks: int) -> None:
    """Lets so many further chunks be sampled."""
    self._permits.release(chunks)

  def open(self) -> None:
    """Lets everything pass from now on."""
    self._open.set()
    self._permits.release()

  def wait(self) -> None:
    """Waits until a chunk is about to be sampled."""
    assert self.entered.acquire(timeout=PATIENCE)

  def decode(self, *arguments, **options):
    if not self._open.is_set():
      self.entered.release()
      assert self._permits.acquire(timeout=PATIENCE)
    return self._sampler.decode(*arguments, **options)


@nnx.jit
def _forward(model, tokens):
  hidden, _ = model.policy(model.policy.embed(tokens[None]))
  return model.policy.logits(hidden)[0], model.value_head(hidden)[0]


def forward(sampler: Sampler, params: nnx.State, tokens) -> tuple[np.ndarray, np.ndarray]:
  """Logits [n, V] and values [n] of one forward pass over a row of at most 96 tokens."""
  padded = np.pad(np.asarray(tokens, np.int32), (0, 96 - len(tokens)))
  logits, values = jax.device_get(_forward(nnx.merge(sampler.graphdef, params), padded))
  return logits[: len(tokens)], values[: len(tokens)]


def expected_logprobs(sampler: Sampler, params: nnx.State, prompt, ids, temperature: float = 1.0) -> np.ndarray:
  """log p of each id of a reply by one forward pass over prompt and reply."""
  logits, _ = forward(sampler, params, (*prompt, *ids))
  logp = np.asarray(jax.nn.log_softmax(logits[len(prompt) - 1 : -1] / temperature))
  return logp[np.arange(len(ids)), list(ids)]
