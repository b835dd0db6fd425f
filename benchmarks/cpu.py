"""Times sampling and learning on a CPU beside other libraries, and how they grow; draws the growth.

  python benchmarks/cpu.py                 all parts, on a machine with 24 GB
  python benchmarks/cpu.py --parts=turns   some parts
  python benchmarks/cpu.py --quick         all parts at tiny sizes, to runs/quick

What is compared is timed in one run, and the ratio is of their medians: in turns, A B A B, but in `update` one after
the other, because the optimiser states do not fit in memory together. All numbers are float32, and all sides use all
cores. Weights are random, except those of the built-in model.

  decode  tokens a second of the sampler at temperature 1, of `transformers`' `generate` (needs PyTorch) and of
          google-tunix' `Sampler`: the built-in model with 128 rows, and Qwen2.5-0.5B's shape with 8 rows
  update  seconds of one AdamW step on the mean log-prob of a mini-batch, of the same step in PyTorch and of one by
          google-tunix' `PeftTrainer`: the same models. The losses are compared too.
  turns   seconds of an episode of several turns with the cache, and of reading the conversation again in each turn
  growth  seconds of sampling and of an update with more rows, turns, longer replies and a larger vocabulary
  divided seconds of sampling and of the update in runs of FrozenLake whose work is divided among more devices of the
          same cores, and among more processes
  context processor milliseconds of a decode step of the built-in models for text behind 128 to 8,192 columns, and the
          bytes of a row's state there

PyTorch and google-tunix are not in requirements.txt: `pip install torch`, and see benchmarks/requirements-tunix.txt.
The comparisons with what is not installed are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from benchmarks import cpu_growth, tunix_side  # noqa: E402
from benchmarks.accelerator_decode import sampler_of  # noqa: E402
from benchmarks.accelerator_work import SHAPE, has_torch  # noqa: E402
from benchmarks.learning_curves import hardware  # noqa: E402
from ragen_jax.distributed.mesh import AXES  # noqa: E402
from ragen_jax.models import presets  # noqa: E402
from ragen_jax.models.attention_choice import choose_attention  # noqa: E402
from ragen_jax.models.checkpoint.config import read_config  # noqa: E402
from ragen_jax.models.checkpoint.load import load_model  # noqa: E402
from ragen_jax.models.checkpoint.save import save_model  # noqa: E402
from ragen_jax.models.qwen import Qwen, QwenConfig  # noqa: E402
from ragen_jax.models.value_head import ActorCritic  # noqa: E402
from ragen_jax.sampling.capacity import bytes_per_device  # noqa: E402
from ragen_jax.sampling.draw import PLAIN  # noqa: E402
from ragen_jax.training.batches import TokenRows  # noqa: E402
from ragen_jax.training.scoring import RematSettings, ScoringSettings, score_tokens  # noqa: E402

REPEATS = 3
LEARNING_RATE = 1e-5
NONE = RematSettings.always('none')


@dataclasses.dataclass(frozen=True)
class Work:
  """What is sampled or learnt.

  Attributes:
    rows: number of rows.
    prompt: tokens of a prompt.
    new: tokens of a reply.
    turns: replies of an episode.
  """

  rows: int
  prompt: int
  new: int
  turns: int = 1


CASES = {'built-in': Work(128, 160, 32), '0.5B': Work(8, 64, 32)}
QUICK = {'built-in': Work(4, 16, 4), '0.5B': Work(2, 8, 4)}
QUICK_SHAPE = dataclasses.replace(SHAPE, vocab_size=512, hidden_size=32, intermediate_size=64, num_layers=2,
                                  num_heads=2, num_kv_heads=1, head_dim=16)  # fmt: skip


def interleaved(
  *runs: Callable[[], Any], repeats: int = REPEATS, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
  """Median seconds of functions that wait for their results, run in turns; the first call of each, which compiles, is
  left out."""
  for run in runs:
    run()
  times: list[list[float]] = [[] for _ in runs]
  for _ in range(repeats):
    for own, run in zip(times, runs, strict=True):
      start = clock()
      run()
      own.append(clock() - start)
  return [statistics.median(own) for own in times]


def tokens_of(rows: int, width: int, vocab_size: int) -> np.ndarray:
  """Random token ids i32[rows, width]."""
  return np.random.default_rng(0).integers(0, vocab_size, (rows, width)).astype(np.int32)


def checkpoints(directory: str, quick: bool) -> dict[str, str]:
  """The checkpoint of each case."""
  shape = QUICK_SHAPE if quick else SHAPE
  path = f'{directory}/half'
  save_model(path, Qwen(shape, rngs=nnx.Rngs(0)), shape, 'float32', tokenizer_dir=presets.resolve('tiny', ''))
  return {'built-in': str(presets.resolve('tiny', '')), '0.5B': path}


def load(path: str) -> Qwen:
  """A model in float32, which attends as in a run on these processors."""
  mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), AXES)
  attention = choose_attention('auto', read_config(path), jnp.float32, mesh)
  return load_model(path, dtype=jnp.float32, param_dtype=jnp.float32, attention=attention)


def load_torch(path: str) -> Any:
  """The same model of `transformers`."""
  import torch
  from transformers import AutoModelForCausalLM

  return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def sampling(model: Qwen, work: Work, cached: bool) -> Callable[[], Any]:
  """A function that samples whole episodes: prompts of `prompt` tokens and replies of `new` tokens in `turns` turns."""
  sampler, params = sampler_of(model)
  prompts = tokens_of(work.rows, work.prompt * work.turns, model.cfg.vocab_size)
  parts = prompts.reshape(work.rows, work.turns, work.prompt)
  keys, budget = jax.random.split(jax.random.key(0), work.rows), np.full(work.rows, work.new)
  columns = (work.prompt + work.new) * work.turns

  def run() -> Any:
    state, history, reply = sampler.init(work.rows, columns), np.zeros((work.rows, 0), np.int32), None
    for turn in range(work.turns):
      fed = parts[:, turn]
      if not cached:
        history = np.concatenate([history, fed], axis=1)
        state, fed = sampler.init(work.rows, columns), history
      state = sampler.extend(params, state, fed, np.full(work.rows, fed.shape[1], np.int32))
      state, reply, _ = sampler.decode(params, state, keys, budget, columns=work.new, sampling=PLAIN)
      if not cached:
        history = np.concatenate([history, np.asarray(reply.tokens)], axis=1)
    return jax.block_until_ready(reply.tokens)

  return run


def updating(model: Qwen, work: Work) -> Callable[[], float]:
  """A function that makes an AdamW step on the mean log-prob of all replies, and returns the loss before it.

  It overwrites the weights of the model, which cannot be used any more.
  """
  policy = ActorCritic(model)
  graph, state = nnx.split(policy)
  settings = ScoringSettings(temperature=1.0, vocab_limit=0, banned=(), logits_chunk=0, remat=NONE)
  width = (work.prompt + work.new) * work.turns
  tokens = jnp.asarray(tokens_of(work.rows, width, model.cfg.vocab_size))
  sampled = jnp.arange(width).reshape(work.turns, -1)[:, work.prompt :].reshape(-1)
  columns = jnp.broadcast_to(sampled, (work.rows, len(sampled)))
  rows = TokenRows(tokens, columns, jnp.ones(columns.shape, bool))
  optimizer = optax.adamw(LEARNING_RATE)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(state, moments):
    def loss_of(state):
      return -score_tokens(nnx.merge(graph, state), rows, settings)[0].mean()

    loss, gradient = jax.value_and_grad(loss_of)(state)
    updates, moments = optimizer.update(gradient, moments, state)
    return optax.apply_updates(state, updates), moments, loss

  held = [state, optimizer.init(state)]

  def run() -> float:
    held[0], held[1], loss = step(*held)
    return float(loss)

  return run


def updating_torch(model: Any, work: Work) -> Callable[[], float]:
  """The same step in PyTorch; logits are computed only where they are needed."""
  import torch

  width = (work.prompt + work.new) * work.turns
  tokens = torch.as_tensor(tokens_of(work.rows, width, model.config.vocab_size), dtype=torch.long)
  columns = torch.arange(width).reshape(work.turns, -1)[:, work.prompt :].reshape(-1)
  optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-4)

  def run() -> float:
    logits = model(tokens, logits_to_keep=columns - 1).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, columns].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return float(loss.detach())

  return run


def updating_tunix(path: str, work: Work) -> Callable[[], float]:
  """The same step by google-tunix."""
  vocab_size = json.loads((pathlib.Path(path) / 'config.json').read_text())['vocab_size']
  tokens = tokens_of(work.rows, (work.prompt + work.new) * work.turns, vocab_size)
  sampled = np.arange(tokens.shape[1]).reshape(work.turns, -1)[:, work.prompt :].reshape(-1)
  return tunix_side.updating(path, tokens, sampled, LEARNING_RATE)


def generating(path: str, prompts: np.ndarray, new: int) -> Callable[[], None]:
  """A function that samples `new` tokens after prompts i32[B, T] with `transformers`."""
  import torch

  model, ids = load_torch(path).eval(), torch.as_tensor(prompts, dtype=torch.long)

  def run() -> None:
    with torch.no_grad():
      model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=True, top_k=0,
        top_p=1.0, temperature=1.0, pad_token_id=0,
      )  # fmt: skip

  return run


def decode(paths: dict[str, str], cases: dict[str, Work]) -> dict[str, Any]:
  """See the top."""
  found = {}
  for name, work in cases.items():
    model = load(paths[name])
    prompts = tokens_of(work.rows, work.prompt, model.cfg.vocab_size)
    runs = {'': sampling(model, work, cached=True)}
    if has_torch():
      runs['transformers_'] = generating(paths[name], prompts, work.new)
    if tunix_side.has_tunix():
      runs['tunix_'] = tunix_side.sampling(paths[name], prompts, work.new)
    seconds = dict(zip(runs, interleaved(*runs.values()), strict=True))
    found[name] = dataclasses.asdict(work) | {'tokens_per_s': work.rows * work.new / seconds['']} | compared(seconds)
  return found


def compared(seconds: dict[str, float]) -> dict[str, float]:
  """The seconds of all sides, and how often this project's, '', fit into those of each other side."""
  found = {f'{side}seconds': own for side, own in seconds.items()}
  return found | {f'{side}ratio': own / seconds[''] for side, own in seconds.items() if side}


def update(paths: dict[str, str], cases: dict[str, Work]) -> dict[str, Any]:
  """See the top."""
  makers = {'': lambda path, work: updating(load(path), work)}
  if has_torch():
    makers['torch_'] = lambda path, work: updating_torch(load_torch(path).train(), work)
  if tunix_side.has_tunix():
    makers['tunix_'] = updating_tunix
  found = {}
  for name, work in cases.items():
    found[name], seconds = dataclasses.asdict(work), {}
    for side, make in makers.items():
      run = make(paths[name], work)
      found[name][f'{side}loss'] = run()
      (seconds[side],) = interleaved(run)
      # Weights, gradients and moments of one side are freed before the other's are made.
      del run
      jax.clear_caches()
      gc.collect()
    found[name] |= compared(seconds)
  return found


def turns(paths: dict[str, str], cases: dict[str, Work]) -> dict[str, Any]:
  """See the top."""
  work = dataclasses.replace(cases['built-in'], prompt=cases['built-in'].prompt // 4, turns=5)
  model = load(paths['built-in'])
  cached, read = interleaved(sampling(model, work, cached=True), sampling(model, work, cached=False))
  return dataclasses.asdict(work) | {'seconds': cached, 'seconds_without_cache': read, 'ratio': read / cached}


def growth(paths: dict[str, str], cases: dict[str, Work]) -> dict[str, Any]:
  """See the top."""
  base = cases['built-in']
  base = dataclasses.replace(base, rows=base.rows // 4, prompt=base.prompt // 4)
  model = load(paths['built-in'])
  found: dict[str, Any] = {'base': dataclasses.asdict(base)}
  for field, name in (('rows', 'rows'), ('turns', 'turns'), ('new', 'tokens of a reply')):
    found[name] = []
    for factor in (1, 2, 4, 8):
      work = dataclasses.replace(base, **{field: getattr(base, field) * factor})
      (sampled,), (learnt,) = (
        interleaved(sampling(model, work, cached=True)),
        interleaved(updating(load(paths['built-in']), work)),
      )
      found[name].append({'value': getattr(work, field), 'sampling_s': sampled, 'update_s': learnt})
  found['vocabulary'] = []
  for factor in (1, 4, 16, 64):
    config: QwenConfig = dataclasses.replace(model.cfg, vocab_size=model.cfg.vocab_size * factor)
    other = Qwen(config, attention=model.attention, rngs=nnx.Rngs(0))
    (sampled,), (learnt,) = interleaved(sampling(other, base, cached=True)), interleaved(updating(other, base))
    found['vocabulary'].append({'value': config.vocab_size, 'sampling_s': sampled, 'update_s': learnt})
  return found


def stepping(model: Qwen, work: Work) -> tuple[Callable[[], Any], int]:
  """A function that samples `new` tokens of each row behind `prompt` columns, and the bytes of a row's state there.

  The columns hold zeros, which are read like others.
  """
  sampler, params = sampler_of(model)
  keys, budget = jax.random.split(jax.random.key(0), work.rows), np.full(work.rows, work.new)
  behind = np.full(work.rows, work.prompt, np.int32)
  state = sampler.init(work.rows, work.prompt)
  row_bytes = bytes_per_device(state.cache) // work.rows
  held = [sampler.resize(state, work.prompt + work.new)]

  def run() -> Any:
    # The same columns in each run. Copies, because `decode` overwrites what it is given.
    held[0] = held[0].replace(count=jnp.array(behind), rotary=jnp.array(behind))
    held[0], reply, _ = sampler.decode(params, held[0], keys, budget, columns=work.new, sampling=PLAIN)
    return jax.block_until_ready(reply.tokens)

  return run, row_bytes


def context(paths: dict[str, str], cases: dict[str, Work]) -> dict[str, Any]:
  """See the top."""
  base = dataclasses.replace(cases['built-in'], rows=min(cases['built-in'].rows, 8))
  models = {name: load(presets.resolve(name, '')) for name in (presets.TINY, presets.TINY_HYBRID)}
  found: dict[str, Any] = {'rows': base.rows, 'tokens': base.new, 'points': []}
  for columns in (128, 512, 2048, 8192):
    work = dataclasses.replace(base, prompt=columns)
    runs, sizes = zip(*(stepping(model, work) for model in models.values()), strict=True)
    # Short runs: processor time, which other work on the machine lengthens less.
    times = interleaved(*runs, repeats=9, clock=time.process_time)
    for name, seconds, size in zip(models, times, sizes, strict=True):
      step = 1000 * seconds / work.new
      found['points'].append({'model': name, 'columns': columns, 'step_ms': step, 'row_bytes': size})
  return found


def main() -> None:
  import matplotlib

  parts = {
    'decode': decode,
    'update': update,
    'turns': turns,
    'growth': growth,
    'divided': cpu_growth.divided,
    'context': context,
  }
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--parts', default=','.join(parts), help='parts to run, separated by commas')
  parser.add_argument('--quick', action='store_true', help='tiny sizes')
  arguments = parser.parse_args()
  wanted = arguments.parts.split(',')
  unknown = sorted(set(wanted) - set(parts))
  if unknown:
    sys.exit(f'error: --parts={unknown[0]}: allowed: {", ".join(parts)}')
  out = ROOT / ('runs/quick/cpu.json' if arguments.quick else 'benchmarks/results/cpu.json')
  figures = out.parent if arguments.quick else ROOT / 'docs' / 'images'
  out.parent.mkdir(parents=True, exist_ok=True)
  record = json.loads(out.read_text()) if out.is_file() else {}
  with tempfile.TemporaryDirectory() as directory:
    large = not arguments.quick and bool({'decode', 'update'} & set(wanted))  # the other parts do not read this model
    paths = checkpoints(directory, not large)
    for part in wanted:
      record[part] = parts[part](paths, QUICK if arguments.quick else CASES) | {'hardware': hardware()}
      print(f'{part}: {json.dumps(record[part])}', flush=True)
      out.write_text(json.dumps(record, indent=1) + '\n')
  matplotlib.use('Agg')
  if {'growth', 'divided', 'context'} & {*wanted}:
    for path in cpu_growth.draw(record, figures):
      print(f'drawn to {path}')
  print(f'written to {out}')


if __name__ == '__main__':
  main()
