"""Calls and tokens a second of the serving engine against the number of callers.

  python benchmarks/serving.py
  python benchmarks/serving.py --http        # each call goes through the server, and is stored
  python benchmarks/serving.py --shape=0.5b --prompt=512 --reply=128      # random weights, for an accelerator

Each caller plays conversations: a first prompt, then in each turn a reply and an observation, as an agent does. Prompts
are random ids; the first half of each first prompt is the same for all. Replies have no stop token, so that all runs do
the same work. Two ways to compare with: `alone` is an engine with a single row, for one caller; `lockstep` calls the
sampler's programs directly, once for the prompts and once for the replies of a turn of all rows, as a rollout does.
Compilation is not timed: every run is played once before. With --http a conversation is an attempt of a rollout whose
prompts are ids, and each caller keeps its connection.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.client
import json
import pathlib
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learning_curves import hardware  # noqa: E402
from ragen_jax.agent.chat import ChatTokenizer  # noqa: E402
from ragen_jax.agent.reply_reader import BadCalls  # noqa: E402
from ragen_jax.models import presets  # noqa: E402
from ragen_jax.models.checkpoint.load import load_model  # noqa: E402
from ragen_jax.models.qwen import Qwen, QwenConfig  # noqa: E402
from ragen_jax.models.value_head import ActorCritic  # noqa: E402
from ragen_jax.sampling.draw import PLAIN  # noqa: E402
from ragen_jax.sampling.sampler import Sampler  # noqa: E402
from ragen_jax.serving.conversation.chat_format import QwenFormat  # noqa: E402
from ragen_jax.serving.engine.engine import Engine  # noqa: E402
from ragen_jax.serving.engine.engines import Engines  # noqa: E402
from ragen_jax.serving.engine.settings import EngineSettings  # noqa: E402
from ragen_jax.serving.http.app import App  # noqa: E402
from ragen_jax.serving.http.server import HttpServer  # noqa: E402
from ragen_jax.serving.http.service import ServerSettings, Service  # noqa: E402
from ragen_jax.serving.rollouts.lifecycle import Lifecycle  # noqa: E402
from ragen_jax.serving.rollouts.records import AttemptLimits, NewRollout  # noqa: E402
from ragen_jax.serving.rollouts.store import Store  # noqa: E402
from ragen_jax.serving.types import GenerateRequest, SamplingParams  # noqa: E402
from ragen_jax.serving.wire.spec import RequestLimits  # noqa: E402

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


Ask = Callable[[int, list[int]], Sequence[int]]  # number of a conversation, and its ids so far -> ids of the reply


def ask_engine(engine: Engine, work: Work, conversation: int, row: list[int]) -> Sequence[int]:
  """A call of the engine itself."""
  params = SamplingParams(1.0, 1.0, 0, max_tokens=work.reply, stop=(), top_logprobs=0)
  done, outcomes = threading.Event(), []

  def on_done(outcome):
    outcomes.append(outcome)
    done.set()

  engine.submit(GenerateRequest(tuple(row), (0, conversation), params), lambda _: None, on_done)
  if not done.wait(_PATIENCE) or isinstance(outcomes[0], BaseException):
    raise RuntimeError(f'conversation {conversation}: {outcomes or "no reply"}')
  return outcomes[0].ids


class Server:
  """A server with a store; `ask` is a call over HTTP."""

  def __init__(self, engine: Engine, tokenizer: ChatTokenizer, work: Work, stack: contextlib.ExitStack):
    directory = stack.enter_context(tempfile.TemporaryDirectory())
    self._lifecycle = Lifecycle(stack.enter_context(Store(f'{directory}/agents.sqlite')), time.time)
    sampling = SamplingParams(1.0, 1.0, 0, max_tokens=work.reply, stop=(), top_logprobs=0)
    context = engine.settings.max_context
    limits = AttemptLimits(timeout_s=_PATIENCE, heartbeat_s=0.0, max_attempts=1, retry_on=())
    settings = ServerSettings(
      host='127.0.0.1', port=0, max_connections=1024, max_body=1 << 24, keep_thoughts=True, open_access=False,
      creates=False, prompt='', rollout_limits=limits, frozen=(), engine=engine.settings,
      model='policy', limits=RequestLimits(work.vocab, context + 1, 1, 1, 1, lenient=False), training=sampling,
      evaluation=sampling, trained='.*', bad_calls=BadCalls.CONTENT, max_calls=work.turns, grace_s=1.0,
    )  # fmt: skip
    chat_format = QwenFormat(tokenizer, keep_thoughts=True)
    engines = Engines(engine, {}, ())
    service = Service(settings, engines, self._lifecycle, tokenizer, chat_format)
    app = App(service, 'no admin calls', engines.stats)
    self._http = stack.enter_context(HttpServer(app.asgi, app.stop, '127.0.0.1', 0, 1024))
    self._of_caller = threading.local()

  def ask(self, conversation: int, row: list[int]) -> Sequence[int]:
    """The reply to the ids of a conversation; the first call of one begins an attempt."""
    mine = self._of_caller
    if getattr(mine, 'conversation', None) != conversation:
      limits = AttemptLimits(timeout_s=_PATIENCE, heartbeat_s=0.0, max_attempts=1, retry_on=())
      new = NewRollout('', conversation, '', 'train', limits, None, (0, conversation))
      mine.key = self._lifecycle.start(self._lifecycle.create(new).rollout_id, 'benchmark').api_key
      mine.conversation = conversation
    if not hasattr(mine, 'connection'):
      address = urllib.parse.urlsplit(self._http.url)
      mine.connection = http.client.HTTPConnection(address.hostname, address.port, timeout=_PATIENCE)
    body = json.dumps({'model': 'policy', 'prompt': row, 'return_token_ids': True})
    mine.connection.request('POST', '/v1/completions', body, {'Authorization': f'Bearer {mine.key}'})
    answer = json.loads(mine.connection.getresponse().read())
    if 'choices' not in answer:
      raise RuntimeError(f'conversation {conversation}: {answer}')
    return answer['choices'][0]['token_ids']


def play(ask: Ask, work: Work, conversation: int) -> None:
  """A conversation, call by call."""
  row: list[int] = []
  for part in work.parts(conversation):
    row += part
    row += ask(conversation, row)


def run(ask: Ask, work: Work, callers: int, conversations: int) -> float:
  """Seconds that some callers take for some conversations together."""
  left, lock, errors = iter(range(conversations)), threading.Lock(), []

  def caller() -> None:
    while not errors:
      with lock:
        conversation = next(left, None)
      if conversation is None:
        return
      try:
        play(ask, work, conversation)
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
      state = sampler.extend(params, state, tokens, np.full(rows, tokens.shape[1], np.int32))
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
  parser.add_argument('--http', action='store_true')
  parser.add_argument('--out', type=pathlib.Path)
  arguments = parser.parse_args()
  model = make_model(arguments.shape)
  cfg, tokenizer = model.policy.cfg, ChatTokenizer(presets.resolve(presets.TINY, ''))
  vocab = min(tokenizer.size, cfg.vocab_size)  # also of a larger model, so that replies can be written as text
  sampler = Sampler(model, stop_ids=(cfg.vocab_size,), vocab_limit=vocab)
  work = Work(arguments, vocab)
  params = sampler.decode_weights(nnx.split(model)[1])
  found, lines = {}, []

  def measure(name: str, conversations: int, seconds: float, **more: float) -> None:
    calls = conversations * work.turns
    numbers = {'calls_per_s': calls / seconds, 'tokens_per_s': calls * work.reply / seconds, **more}
    found[name] = {k: round(x, 3) for k, x in numbers.items()}
    lines.append(f'{name:>12}  ' + '  '.join(f'{k} {x:10.2f}' for k, x in numbers.items()))
    print(lines[-1], flush=True)

  @contextlib.contextmanager
  def engine_of(slots: int) -> Iterator[tuple[Engine, Ask]]:
    context = work.columns
    widths = tuple(sorted({min(width, context) for width in arguments.widths}))
    settings = EngineSettings(slots=slots, max_context=context, chunk=arguments.chunk, widths=widths, max_queue=1024)
    with contextlib.ExitStack() as stack:
      engine = stack.enter_context(Engine(sampler, tokenizer, settings, params=params, version=0))
      engine.compile()
      yield (
        engine,
        (Server(engine, tokenizer, work, stack).ask if arguments.http else functools.partial(ask_engine, engine, work)),
      )

  print(f'{hardware()}; {vars(arguments)}')
  with engine_of(1) as (_, ask):
    for _ in range(2):
      seconds = run(ask, work, 1, 4)
    measure('alone', 4, seconds)
  with engine_of(arguments.slots) as (engine, ask):
    for callers in arguments.callers:
      conversations = max(2 * callers, 4)
      run(ask, work, callers, callers)
      before = engine.stats()
      seconds = run(ask, work, callers, conversations)
      after = engine.stats()
      steps = after.row_steps - before.row_steps
      measure(
        f'{callers} callers',
        conversations,
        seconds,
        useful=(after.sampled_tokens - before.sampled_tokens) / steps,
        idle=1 - (after.busy_seconds - before.busy_seconds) / seconds,
      )
  for _ in range(2):
    seconds = lockstep(sampler, params, work, arguments.slots, 2 * arguments.slots)
  measure('lockstep', 2 * arguments.slots, seconds)
  if arguments.out:
    record = {'hardware': hardware(), 'arguments': {k: str(x) for k, x in vars(arguments).items()}, 'found': found}
    arguments.out.write_text(json.dumps(record, indent=2) + '\n')


if __name__ == '__main__':
  main()
