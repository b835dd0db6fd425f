"""Supervised warm start: imitation of the environments' exact solvers, and the making of the built-in model."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from ragen_jax import evaluate, experiment, export
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.context_manager import SYSTEM, describe_task
from ragen_jax.agent.demonstrations import DemonstrationStyle, demonstrate
from ragen_jax.agent.env_manager import EnvGroup, EnvStateManager
from ragen_jax.agent.trajectory import Trajectory
from ragen_jax.config_check import check_config, check_sft
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.learner import LossConfig, decayed, gather, plan_micro_batches, sampled_columns, score_tokens
from ragen_jax.models import hf, lora, tiny_tokenizer
from ragen_jax.models.qwen import Qwen, QwenConfig
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.utils.progress import Progress

_log = logging.getLogger(__name__)

# Texts from which the fresh tokenizer's pieces are cut, levels an environment.
_SAMPLE_LEVELS = 64
_NUMBER = r'\(\d+, \d+\)|\d+(?:\.\d+)?'


def prompt_pieces(specs: list[EnvGroup], config: ConfigDict) -> list[str]:
  """The fixed stretches of a run's texts: what is left when boards, numbers, coordinates and action names are cut out.

  Args:
    specs: the environments.
    config: reads `agent`.
  """
  sep = f' {config.agent.action_sep} '
  pieces = ['user\n', 'assistant\n', 'system\n' + SYSTEM, '<think>', '</think>', '<answer>', '</answer>']
  pieces += ['</think><answer>', sep, '10', '100', '\n\n']
  pieces += [f'({r}, {c})' for r in range(8) for c in range(8)]
  for spec in specs:
    env = spec.env
    keys = jax.vmap(jax.random.key)(jnp.arange(_SAMPLE_LEVELS, dtype=jnp.uint32))
    states = jax.device_get(jax.vmap(env.reset)(keys))
    names = sorted(env.action_words, key=len, reverse=True)
    symbols = list(env.legend())
    pieces += names + [s for s in symbols if len(s.encode()) > 1]
    cut = re.compile('|'.join([_NUMBER, *(re.escape(n) for n in names)]))
    task = describe_task(spec, config.agent.action_sep)
    # Decimals of the rules (probabilities, rewards) are one token; whole numbers are digits, which limits can change.
    pieces += re.findall(r'\d+\.\d+', task) + re.split(_NUMBER, task)
    texts = env.rationale(states) if symbols else env.rationale(states) + env.render(states)
    for text in texts:
      pieces += cut.split(text)
    form = '<think>your thoughts</think>' if config.agent.think else ''
    pieces += ['Reward: ', '\n\nTurn ', ':\nState:\n', '\nActions left: ', ' words.']
    pieces.append(f'\nAnswer as {form}<answer>your actions</answer> and nothing else, in at most ')
  return [p for p in dict.fromkeys(pieces) if p]


def _fresh_policy(config: ConfigDict, specs: list[EnvGroup], directory: str) -> experiment.Policy:
  """A new tokenizer, saved to `directory`, and a model with fresh weights."""
  tiny_tokenizer.save(tiny_tokenizer.build(prompt_pieces(specs, config)), directory)
  tokenizer = ChatTokenizer(directory)
  width, layers, heads, kv_heads, head_dim, mlp = config.sft.shape
  cfg = QwenConfig(
    vocab_size=-(-tokenizer.size // 8) * 8,
    hidden_size=width,
    intermediate_size=mlp,
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=head_dim,
    rope_theta=10_000.0,
  )
  qwen = Qwen(
    cfg,
    dtype=experiment.compute_dtype(config),
    attend_by_row=experiment.attend_by_row(),
    rngs=nnx.Rngs(config.seed),
  )
  model = ActorCritic(qwen)
  mesh = make_mesh(**config.mesh)
  return experiment.Policy(directory, model, tokenizer, experiment.make_sampler(model, tokenizer, mesh), mesh)


def _demonstrations(config: ConfigDict, specs: list[EnvGroup], tokenizer: ChatTokenizer) -> list[Trajectory]:
  sft = config.sft
  style = DemonstrationStyle(
    discount=sft.discount,
    noise=sft.noise,
    hurry=sft.hurry,
    beginner=sft.beginner,
    timid=sft.timid,
    actions_per_turn=sft.actions_per_turn,
  )
  rng = np.random.default_rng(config.seed)
  data = []
  for spec in specs:
    envs = EnvStateManager([spec], sft.group_size)
    context = experiment.context_manager(config, tokenizer, [spec])
    start = time.monotonic()
    trajectory, episodes = demonstrate(envs, context, sft.first_level, rng, style, config.agent.max_context)
    _log.info(
      '%s: %d demonstrations in %.0f s, success %.2f, %.1f tokens each',
      spec.tag,
      len(episodes),
      time.monotonic() - start,
      np.mean([e.success for e in episodes]),
      trajectory.length.mean(),
    )
    data.append(trajectory)
  return data


@dataclasses.dataclass
class _Data:
  """Demonstrations of all environments, N rows padded to the widest.

  Attributes:
    tokens: i32[N, T].
    length: i32[N].
    columns: i32[N, R], see `sampled_columns`.
    mask: bool[N, R].
    values: f32[N, R], what the best play would still bring, which the value head learns: a sum of rewards that
      happened to come would be mostly luck.
    value_scale: f32[N], one over the mean square of the environment's values, so that an environment that pays tens
      does not drown one that pays ones.
  """

  tokens: np.ndarray
  length: np.ndarray
  columns: np.ndarray
  mask: np.ndarray
  values: np.ndarray
  value_scale: np.ndarray


def _concatenate(parts: list[Trajectory]) -> _Data:
  width = max(p.tokens.shape[1] for p in parts)

  def join(name):
    arrays = [getattr(p, name) for p in parts]
    return np.concatenate([np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in arrays])

  columns, mask = sampled_columns(join('loss_mask'))
  values = gather(join('values'), columns, mask)
  value_scale, start = np.ones((len(mask),), np.float32), 0
  for part in parts:
    rows = slice(start, start + len(part.length))
    square = float(np.square(values[rows][mask[rows]]).mean())
    value_scale[rows] = 1 / square if square > 0 else 1.0
    start = rows.stop
  return _Data(join('tokens'), np.concatenate([p.length for p in parts]), columns, mask, values, value_scale)


def train_sft(config: ConfigDict) -> None:
  """Makes demonstrations, trains on their replies and writes a Hugging Face checkpoint to `config.sft.output`.

  With LoRA the adapters and the value head are trained, and `config.export.lora` says what is written.
  """
  check_config(config)
  check_sft(config)
  sft = config.sft
  specs = experiment.env_groups(config, sft.tags, sft.levels)
  with tempfile.TemporaryDirectory() as scratch:
    policy = _fresh_policy(config, specs, scratch) if sft.from_scratch else experiment.load_policy(config)
    if config.lora.rank:  # adapters would take the place of what they belong to
      for source in filter(None, (policy.directory, config.lora.path)):
        export.check_output(sft.output, 'sft.output', source)
    data = _concatenate(_demonstrations(config, specs, policy.tokenizer))
    graphdef, params = nnx.split(policy.model)
    params, frozen = lora.partition(params)
    loss_config = LossConfig(
      vocab_limit=policy.tokenizer.size, remat=config.model.remat, logits_chunk=config.model.logits_chunk
    )
    warmup = max(sft.steps // 20, 1)
    schedule = optax.warmup_cosine_decay_schedule(
      0.0, sft.learning_rate, warmup, max(sft.steps, warmup + 1), 0.1 * sft.learning_rate
    )
    optimizer = optax.chain(
      optax.clip_by_global_norm(config.optimizer.grad_clip),
      optax.adamw(
        schedule,
        b1=config.optimizer.b1,
        b2=config.optimizer.b2,
        weight_decay=config.optimizer.weight_decay,
        mask=decayed,
      ),
    )
    opt_state = optimizer.init(params)

    def loss(params, frozen, tokens, columns, best, weights, value_weights):
      logprobs, _, values = score_tokens(lora.merge(graphdef, params, frozen), tokens, columns, loss_config)
      nll = -jnp.sum(logprobs * weights)
      vf_loss = 0.5 * jnp.sum(jnp.square(values - best) * value_weights)
      return nll + sft.value_coef * vf_loss, jnp.stack([nll, vf_loss])

    @functools.partial(jax.jit, donate_argnums=2)
    def accumulate(params, frozen, gradients, *batch):
      new, parts = jax.grad(loss, has_aux=True)(params, frozen, *batch)
      return jax.tree.map(jnp.add, gradients, new), parts

    @jax.jit
    def apply(params, opt_state, gradients):
      updates, opt_state = optimizer.update(gradients, opt_state, params)
      return optax.apply_updates(params, updates), opt_state

    rng = np.random.default_rng(config.seed + 1)
    sampled = data.mask.sum(axis=1)
    seen = 0
    with Progress(sft.steps, noun='step') as progress:
      for step in range(sft.steps):
        rows = rng.choice(len(data.length), size=sft.batch_size, replace=False)
        total = np.float32(sampled[rows].sum())
        gradients, parts = jax.tree.map(jnp.zeros_like, params), 0.0
        plans = plan_micro_batches(
          rows, data.length, sampled, size=max(sft.batch_size // 2, 1), length_step=config.length_step
        )
        for plan in plans:
          at = np.maximum(plan.rows, 0)
          weights = _fit(data.mask[at], plan.replies) * (plan.rows >= 0)[:, None] / total
          gradients, part = accumulate(
            params,
            frozen,
            gradients,
            _fit(data.tokens[at], plan.width),
            _fit(data.columns[at], plan.replies, 1),
            _fit(data.values[at], plan.replies),
            weights,
            weights * data.value_scale[at, None],
          )
          parts = parts + part
        params, opt_state = apply(params, opt_state, gradients)
        seen += int(data.length[rows].sum())
        if (step + 1) % 10 == 0 or step + 1 == sft.steps:
          nll, vf_loss = np.asarray(parts).tolist()
          progress.update(step + 1, {'loss': nll, 'value loss': vf_loss}, tokens=seen)
          seen = 0
    nnx.update(policy.model, params)
    has_head = any(hf.has_value_head(directory) for directory in (policy.directory, config.lora.path))
    export.write_policy(sft.output, config, policy, with_value_head=sft.value_coef > 0 or has_head)
    _log.info('checkpoint written to %s', os.path.abspath(sft.output))
    result = evaluate.Evaluator(config, policy)(lora.join(params, frozen))
    for name, value in result.metrics.items():
      _log.info('%s %.4f', name, value)


def _fit(x: np.ndarray, width: int, fill: int = 0) -> np.ndarray:
  """x cut or padded to `width` columns."""
  x = x[:, :width]
  return np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=fill)
