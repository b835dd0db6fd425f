"""Times an iteration on a pretrained model beside `transformers` and PyTorch: the same prompts, replies and batch.

  python benchmarks/beside_torch.py --model=qwen2.5-0.5b-instruct=DIR --model=smollm2-135m=DIR
  python benchmarks/beside_torch.py --quick      the built-in model, a few episodes

DIR is the folder of a Hugging Face checkpoint; 'NAME=DIR' uses the settings of the preset NAME, with adapters (LoRA).
Needs `pip install torch` and, with adapters, `pip install --no-deps peft accelerate`. All numbers are float32, and all
sides use all cores. The two sides run in turns, A B A B, and the ratio is of their medians.

  sampling  seconds of a rollout of Bandit episodes: reading the prompts and drawing the replies. `transformers` draws
            as many tokens as the longest reply has, for the whole batch at once. Both sides count the replies only.
  update    seconds of an AdamW step of GRPO on these episodes. PyTorch gets micro-batches of rows of similar lengths,
            with logits for the replies only. The log-probs of the sampled tokens are compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402

import ragen_jax  # noqa: E402
from benchmarks.learning_curves import hardware  # noqa: E402
from ragen_jax import build  # noqa: E402
from ragen_jax.models import presets  # noqa: E402

MICRO_BATCH = 8  # rows that PyTorch computes at once
RANK = 64


@dataclasses.dataclass(frozen=True)
class Episodes:
  """Rows of one prompt and one reply.

  Attributes:
    tokens: i32[B, T].
    prompt: i32[B], columns of the prompts.
    length: i32[B], columns of the rows.
    logprobs: f32[B, T], of the sampled tokens, as they were sampled.
    advantages: f32[B].
  """

  tokens: np.ndarray
  prompt: np.ndarray
  length: np.ndarray
  logprobs: np.ndarray
  advantages: np.ndarray

  def left_padded(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Tokens and mask [b, T] of rows that end in the last column, and the columns of the longest reply."""
    width = int(self.length[rows].max())
    tokens, mask = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.int64)
    for i, row in enumerate(rows):
      n = self.length[row]
      tokens[i, width - n :], mask[i, width - n :] = self.tokens[row, :n], 1
    return tokens, mask, int((self.length - self.prompt)[rows].max())


def timed(run: Callable[[], Any]) -> float:
  """Seconds of a function that waits for its result."""
  start = time.perf_counter()
  run()
  return time.perf_counter() - start


def in_turns(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
  """Seconds of functions that run in turns; their first calls, which compile, are left out."""
  for run in runs.values():
    run()
  found: dict[str, list[float]] = {name: [] for name in runs}
  for _ in range(repeats):
    for name, run in runs.items():
      found[name].append(timed(run))
  return found


class Torch:
  """The same model of `transformers`, which samples and learns."""

  def __init__(self, path: str, episodes: Episodes, never: np.ndarray, lora: bool, lr: float):
    """Loads the model; `never` are ids that are never drawn."""
    import torch
    from transformers import AutoModelForCausalLM

    self._torch, self._episodes, self._never = torch, episodes, torch.as_tensor(never)
    self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if lora:
      import peft

      config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules='all-linear', task_type='CAUSAL_LM')
      self._model = peft.get_peft_model(self._model, config)
    trained = [p for p in self._model.parameters() if p.requires_grad]
    self._optimizer = torch.optim.AdamW(trained, lr=lr)

  def sample(self) -> None:
    """Draws as many tokens for each prompt as the longest reply has."""
    torch, e = self._torch, self._episodes
    new = int((e.length - e.prompt).max())
    prompts = dataclasses.replace(e, length=e.prompt)
    tokens, mask, _ = prompts.left_padded(np.arange(len(e.prompt)))
    with torch.no_grad():
      self._model.generate(
        input_ids=torch.as_tensor(tokens), attention_mask=torch.as_tensor(mask), max_new_tokens=new,
        min_new_tokens=new, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, pad_token_id=0,
      )  # fmt: skip

  def _logprobs(self, rows: np.ndarray) -> tuple[Any, Any]:
    """Log-probs and mask [b, R] of the replies, which end in the last column."""
    torch, e = self._torch, self._episodes
    tokens, mask, new = e.left_padded(rows)
    ids, attended = torch.as_tensor(tokens), torch.as_tensor(mask)
    logits = self._model(
      input_ids=ids, attention_mask=attended, position_ids=(attended.cumsum(1) - 1).clamp(min=0),
      logits_to_keep=new + 1, use_cache=False,
    ).logits[:, :-1].index_fill(-1, self._never, -torch.inf)  # fmt: skip
    found = torch.log_softmax(logits, -1).gather(-1, ids[:, -new:, None])[..., 0]
    replies = np.arange(new)[None] >= new - (e.length - e.prompt)[rows][:, None]
    return found, torch.as_tensor(replies)

  def update(self) -> None:
    """One optimiser step on all rows."""
    torch, e = self._torch, self._episodes
    total = int((e.length - e.prompt).sum())
    order = np.argsort(e.length, kind='stable')
    self._optimizer.zero_grad(set_to_none=True)
    for start in range(0, len(order), MICRO_BATCH):
      rows = order[start : start + MICRO_BATCH]
      found, mask = self._logprobs(rows)
      old = torch.zeros_like(found)
      for i, row in enumerate(rows):
        own = e.logprobs[row, e.prompt[row] : e.length[row]]
        old[i, found.shape[1] - len(own) :] = torch.as_tensor(own)
      ratio = torch.exp(torch.where(mask, found - old, 0.0))
      advantage = torch.as_tensor(e.advantages[rows])[:, None]
      loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
      (torch.where(mask, loss, 0.0).sum() / total).backward()
    torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
    self._optimizer.step()

  def logprobs(self) -> np.ndarray:
    """f32[B, T] of the sampled tokens; 0 elsewhere."""
    e, found = self._episodes, np.zeros(self._episodes.tokens.shape, np.float32)
    for start in range(0, len(e.length), MICRO_BATCH):
      rows = np.arange(start, min(start + MICRO_BATCH, len(e.length)))
      with self._torch.no_grad():
        own = self._logprobs(rows)[0].numpy()
      for i, row in enumerate(rows):
        n = e.length[row] - e.prompt[row]
        found[row, e.prompt[row] : e.length[row]] = own[i, own.shape[1] - n :]
    return found


def measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
  """One model, on both sides."""
  preset, _, path = model.partition('=')
  lora = args.lora and bool(path)
  fields = {
    'train.groups': args.groups, 'train.group_size': args.group_size, 'train.tags': ('Bandit',),
    'optimizer.mini_batch_size': args.groups * args.group_size, 'agent.max_response_tokens': args.tokens,
    'model.dtype': 'float32', 'model.param_dtype': 'float32', 'seed': args.seed,
  }  # fmt: skip
  if path:
    fields['model.path'] = path
  config = ragen_jax.load_config(f'bandit_grpo:{preset}{"-lora" if lora else ""}', fields)
  policy = build.load_policy(config)
  trainer = build.make_trainer(config, policy)
  held = [trainer.init()]
  rollout, selection = trainer.collect(held[0])
  batch, _ = trainer.estimate(held[0], selection)
  episodes = _episodes(rollout.trajectory)
  t, vocabulary = policy.tokenizer, policy.model.policy.cfg.vocab_size
  never = np.unique([*t.banned, *range(t.size, vocabulary)]).astype(np.int64)
  torch = Torch(path or str(presets.resolve('tiny', '')), episodes, never, lora, config.optimizer.actor_lr)
  differ = np.abs(torch.logprobs() - np.where(rollout.trajectory.loss_mask, episodes.logprobs, 0)).max()

  def sample() -> None:
    # The same iteration's rollout again, with weights that have not changed.
    trainer.collect(held[0])

  def update() -> None:
    copied = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, held[0])
    start = time.perf_counter()
    held[0] = jax.block_until_ready(trainer.update(copied, batch, selection)[0])
    spent.append(time.perf_counter() - start)

  spent: list[float] = []
  sampling = in_turns({'ours': sample, 'transformers': torch.sample}, args.repeat)
  learning = in_turns({'ours': update, 'torch': torch.update}, args.repeat)
  learning['ours'] = spent[1:]  # without the copy
  sampled = int((episodes.length - episodes.prompt).sum())
  return {
    'model': preset, 'lora': lora, 'episodes': len(episodes.length), 'prompt_tokens': int(episodes.prompt.sum()),
    'sampled_tokens': sampled, 'largest_logprob_difference': float(differ),
    'sampling': _compared(sampling, sampled), 'update': _compared(learning, int(episodes.length.sum())),
  }  # fmt: skip


def _episodes(t: Any) -> Episodes:
  """The rows of a trajectory; advantages are random, because their values do not matter for the time."""
  advantages = np.random.default_rng(0).normal(size=len(t.length)).astype(np.float32)
  return Episodes(t.tokens, t.loss_mask.argmax(axis=1), np.asarray(t.length), t.logprobs, advantages)


def _compared(seconds: dict[str, list[float]], tokens: int) -> dict[str, Any]:
  medians = {name: statistics.median(own) for name, own in seconds.items()}
  ours, other = medians
  return {
    'seconds': {name: [round(s, 2) for s in own] for name, own in seconds.items()},
    'tokens_per_s': {name: round(tokens / s, 1) for name, s in medians.items()},
    'ratio': round(medians[other] / medians[ours], 2),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--model', action='append', help="NAME=DIR; 'tiny' for the built-in model")
  parser.add_argument('--groups', type=int, default=4)
  parser.add_argument('--group_size', type=int, default=8)
  parser.add_argument('--tokens', type=int, default=60, help='the most tokens of a reply')
  parser.add_argument('--repeat', type=int, default=3)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--no-lora', dest='lora', action='store_false', help='train all weights')
  parser.add_argument('--quick', action='store_true', help='the built-in model, a few episodes')
  parser.add_argument('--output', type=pathlib.Path, default=ROOT / 'benchmarks' / 'results' / 'beside_torch.json')
  args = parser.parse_args()
  if args.quick:
    args.model, args.group_size, args.repeat, args.output = ['tiny'], 2, 1, ROOT / 'runs/quick/beside_torch.json'
  if not args.model:
    parser.error('--model=NAME=DIR is missing')
  args.output.parent.mkdir(parents=True, exist_ok=True)
  rows = json.loads(args.output.read_text()) if args.output.is_file() and not args.quick else []
  for model in args.model:
    told = {'date': time.strftime('%Y-%m-%d'), 'seed': args.seed, 'hardware': hardware()}
    rows.append(measure(model, args) | told)
    print(json.dumps(rows[-1], indent=1), flush=True)
    args.output.write_text(json.dumps(rows, indent=1) + '\n')
    gc.collect()


if __name__ == '__main__':
  main()
