"""Calls and tokens a second of the serving engine against the number of callers.

  python benchmarks/serving.py
  python benchmarks/serving.py --shape=0.5b --prompt=512 --reply=128      # random weights, for an accelerator

Each caller plays conversations: a first prompt, then in each turn a reply and an observation, as an agent does. Prompts
are random ids; the first half of each first prompt is the same for all. Replies have no stop token, so that all runs do
the same work. Two ways to compare with: `alone` is an engine with a single row, for one caller; `lockstep` calls the
sampler's programs directly, once for the prompts and once for the replies of a turn of all rows, as a rollout does.
Compilation is not timed: every run is played once before, and the fastest of several is reported. `useful` is the share
of computed rows and steps that became a token, `idle` the share of the time in which the engine's thread had no work.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learning_curves import hardware  # noqa: E402
from ragen_jax.agent.chat import ChatTokenizer  # noqa: E402
from ragen_jax.models import presets  # noqa: E402
from ragen_jax.models.checkpoint.load import load_model  # noqa: E402
from ragen_jax.models.qwen import Qwen, QwenConfig  # noqa: E402
from ragen_jax.models.value_head import ActorCritic  # noqa: E402
from ragen_jax.sampling.draw import PLAIN  # noqa: E402
from ragen_jax.sampling.sampler import Sampler  # noqa: E402
from ragen_jax.serving.engine import Engine  # noqa: E402
from ragen_jax.serving.settings import EngineSettings  # noqa: E402
from ragen_jax.serving.types import GenerateRequest, SamplingParams  # noqa: E402

# A reply that takes longer has hung.
_PATIENCE = 600.0


def make_model(shape: str) -> ActorCritic:
  """The built-in model, or a random one with the shape of Qwen2.5-0.5B."""
  if shape == 'tiny':
    return ActorCritic(load_model(presets.resolve(presets.TINY, ''), dtype=jnp.float32, param_dtype=jnp.float32))
  return ActorCritic(Qwen(QwenConfig(), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))


class Work:
  """Conversations, and how long each of their parts is."""

  def __init__(self, arguments: argparse.Namespace, vocab: int):
    self.turns, self.reply = arguments.turns, arguments.reply
    self.observation, self.prompt = arguments.observation, arguments.prompt
    self.vocab = vocab
    self._same = np.random.default_rng(0).integers(300, vocab, arguments.prompt // 2).tolist()

  def parts(self, conversation: int) -> list[list[int]]:
    """The first prompt, and the observations."""
    rng = np.random.default_rng(1 + conversation)
    first = [*self._same, *rng.integers(300, self.vocab, self.prompt - len(self._same)).tolist()]
    return [first, *rng.integers(300, self.vocab, (self.turns - 1, self.observation)).tolist()]

  @property
  def columns(self) -> int:
    return self.prompt + self.turns * self.reply + (self.turns - 1) * self.observation


def play(engine: Engine, work: Work, conversation: int) -> None:
  """A conversation, call by call."""
  params = SamplingParams(1.0, 1.0, 0, max_tokens=work.reply, stop=(), top_logprobs=0)
  row: list[int] = []
  for part in work.parts(conversation):
    row += part
    done, outcomes = threading.Event(), []

    def on_done(outcome, done=done, outcomes=outcomes):
      outcomes.append(outcome)
      done.set()

    engine.submit(GenerateRequest(tuple(row), (0, conversation), params), lambda _: None, on_done)
    if not done.wait(_PATIENCE) or isinstance(outcomes[0], BaseException):
      raise RuntimeError(f'conversation {conversation}: {outcomes or "no reply"}')
    row += outcomes[0].ids


def run(engine: Engine, work: Work, callers: int, conversations: int) -> float:
  """Seconds that some callers take for some conversations together."""
  left, lock, errors = iter(range(conversations)), threading.Lock(), []

  def caller() -> None:
    while not errors:
      with lock:
        conversation = next(left, None)
      if conversation is None:
        return
      try:
        play(engine, work, conversation)
      except RuntimeError as e:
        errors.append(e)

  threads = [threading.Thread(target=caller) for _ in range(callers)]
  start = time.perf_counter()
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  if errors:
    raise errors[0]
  return time.perf_counter() - start


def lockstep(sampler: Sampler, params, work: Work, rows: int, conversations: int) -> float:
  """Seconds that the sampler's programs take for the same conversations, `rows` at a time."""
  start = time.perf_counter()
  for first in range(0, conversations, rows):
    parts = [work.parts(c) for c in range(first, first + rows)]
    keys = jax.random.wrap_key_data(np.asarray([(0, first + i) for i in range(rows)], np.uint32))
    state = sampler.init(rows, work.columns + work.reply)
    for turn in range(work.turns):
      tokens = np.asarray([p[turn] for p in parts], np.int32)
      state = sampler.extend(params, state, tokens, np.full(rows, tokens.shape[1], np.int32), all_begin=turn == 0)
      state, reply, _ = sampler.decode(
        params, state, keys, np.full(rows, work.reply, np.int32), columns=work.reply, sampling=PLAIN
      )
      jax.device_get(reply)
  return time.perf_counter() - start


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--shape', choices=('tiny', '0.5b'), default='tiny')
  parser.add_argument('--callers', type=int, nargs='+', default=[1, 2, 4, 8, 16, 32, 64])
  parser.add_argument('--slots', type=int, default=64)
  parser.add_argument('--chunk', type=int, default=16)
  parser.add_argument('--widths', type=int, nargs='+', default=[32, 128])
  parser.add_argument('--turns', type=int, default=4)
  parser.add_argument('--prompt', type=int, default=128)
  parser.add_argument('--observation', type=int, default=24)
  parser.add_argument('--reply', type=int, default=32)
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--out', type=pathlib.Path)
  arguments = parser.parse_args()
  model = make_model(arguments.shape)
  cfg, tokenizer = model.policy.cfg, ChatTokenizer(presets.resolve(presets.TINY, ''))
  vocab = min(tokenizer.size, cfg.vocab_size)  # also of a larger model, so that replies can be written as text
  sampler = Sampler(model, stop_ids=(cfg.vocab_size,), vocab_limit=vocab)
  work = Work(arguments, vocab)
  params = sampler.decode_weights(nnx.split(model)[1])
  found = {}

  def measure(name: str, conversations: int, seconds: float, **more: float) -> None:
    calls = conversations * work.turns
    numbers = {'calls_per_s': calls / seconds, 'tokens_per_s': calls * work.reply / seconds, **more}
    found[name] = {k: round(x, 3) for k, x in numbers.items()}
    print(f'{name:>12}  ' + '  '.join(f'{k} {x:10.2f}' for k, x in numbers.items()), flush=True)

  def engine_of(slots: int) -> Engine:
    context = work.columns
    widths = tuple(sorted({min(width, context) for width in arguments.widths}))
    settings = EngineSettings(slots=slots, max_context=context, chunk=arguments.chunk, widths=widths, max_queue=1024)
    engine = Engine(sampler, tokenizer, settings, params=params, version=0)
    engine.compile()
    return engine

  print(f'{hardware()}; {vars(arguments)}')
  repeats = range(arguments.repeats + 1)  # the first is not timed
  with engine_of(1) as engine:
    measure('alone', 4, min([run(engine, work, 1, 4) for _ in repeats][1:]))
  with engine_of(arguments.slots) as engine:
    for callers in arguments.callers:
      conversations = max(2 * callers, 4)
      before, start = engine.stats(), time.perf_counter()
      seconds = [run(engine, work, callers, conversations) for _ in repeats]
      after, passed = engine.stats(), time.perf_counter() - start
      measure(
        f'{callers} callers',
        conversations,
        min(seconds[1:]),
        useful=(after.sampled_tokens - before.sampled_tokens) / (after.row_steps - before.row_steps),
        idle=1 - (after.busy_seconds - before.busy_seconds) / passed,
      )
  rows = arguments.slots
  measure('lockstep', 2 * rows, min([lockstep(sampler, params, work, rows, 2 * rows) for _ in repeats][1:]))
  if arguments.out:
    record = {'hardware': hardware(), 'arguments': {k: str(x) for k, x in vars(arguments).items()}, 'found': found}
    arguments.out.write_text(json.dumps(record, indent=2) + '\n')


if __name__ == '__main__':
  main()
