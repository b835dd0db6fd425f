"""The update: from a rollout and its advantages to new weights.

Rows are sorted by length within a mini-batch and cut into micro-batches, each only as wide as its longest row, so that
the few long episodes do not make all others pay. Every token's weight in the loss is made from the whole mini-batch
before it is cut, so the gradients of the micro-batches just add up.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct
from jax.sharding import Mesh

from ragen_jax.algorithms import losses
from ragen_jax.algorithms.diagnostics import ratio_counts
from ragen_jax.distributed import processes
from ragen_jax.distributed.sharding import place_rows, tree_shardings
from ragen_jax.models import lora
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.value_head import ActorCritic


@struct.dataclass
class TokenBatch:
  """Rows for the model, with what the loss needs of their R sampled tokens.

  Attributes:
    tokens: i32[B, T].
    columns: i32[B, R], the column of each sampled token, in order; 1 behind the last.
    mask: bool[B, R], there is such a token.
    turn: i32[B, R].
    old_logprobs: f32[B, R].
    old_values: f32[B, R].
    advantages: f32[B, R].
    returns: f32[B, R].
    weights: f32[B, R], of the policy loss; they sum to 1 over a mini-batch under 'token-mean'. 0 is not trained.
    value_weights: f32[B, R], of the value loss.
    ref_logprobs: f32[B, R], under the reference model; zeros where there is none.
    importance: f32[B, R], factors of the policy loss (truncated importance sampling).
  """

  tokens: np.ndarray
  columns: np.ndarray
  mask: np.ndarray
  turn: np.ndarray
  old_logprobs: np.ndarray
  old_values: np.ndarray
  advantages: np.ndarray
  returns: np.ndarray
  weights: np.ndarray
  value_weights: np.ndarray
  ref_logprobs: np.ndarray
  importance: np.ndarray


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """The loss; most fields are those of `config.algorithm`.

  `temperature` is the rollout's, and so is `vocab_limit`: ids from there on are padding of the embedding, which the
  sampler never draws, so they have no share in the probabilities here either. 0 is no limit. `pg_coef` is 1 but where
  the other parts are looked at alone.
  """

  temperature: float = 1.0
  vocab_limit: int = 0
  ratio_level: str = 'token'
  clip_ratio_low: float = 0.2
  clip_ratio_high: float = 0.28
  clip_ratio_c: float | None = 3.0
  pg_coef: float = 1.0
  kl_coef: float = 0.0
  kl_kind: str = 'k3'
  value_clip: float | None = 0.5
  value_coef: float = 0.5
  entropy_coef: float = 0.001
  logits_chunk: int = 0
  remat: bool = False


def sampled_columns(loss_mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Where each row's sampled tokens are.

      loss_mask  0 0 1 1 0 1   ->  columns  2 3 5    mask  1 1 1
                 0 1 0 0 0 0                1 1 1          1 0 0

  Args:
    loss_mask: bool[B, T]; column 0 is never sampled.

  Returns:
    columns i32[B, R] and mask bool[B, R], with R the most that any row has.
  """
  counts = loss_mask.sum(axis=1)
  mask = np.arange(max(int(counts.max(initial=0)), 1))[None, :] < counts[:, None]
  columns = np.ones(mask.shape, np.int32)
  columns[mask] = np.nonzero(loss_mask)[1]
  return columns, mask


def gather(x: np.ndarray, columns: np.ndarray, mask: np.ndarray) -> np.ndarray:
  """[B, T] -> [B, R]: a timeline's array at the sampled columns, 0 where there is none."""
  return np.where(mask, np.take_along_axis(x, columns, axis=1), 0).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class MicroBatch:
  """Which rows go through the model together, and how wide.

  Attributes:
    rows: i32[micro], -1 where there is none.
    width: T.
    replies: R.
  """

  rows: np.ndarray
  width: int
  replies: int


def plan_micro_batches(
  rows: np.ndarray, length: np.ndarray, sampled: np.ndarray, *, size: int, length_step: int
) -> list[MicroBatch]:
  """Cuts a mini-batch into micro-batches of rows of about the same length.

  Args:
    rows: i32[M], the mini-batch.
    length: i32[B], used columns of each row of the rollout.
    sampled: i32[B], sampled tokens of each.
    size: rows a micro-batch.
    length_step: T is rounded up to a multiple of this, R to half of it.

  Returns:
    The micro-batches, longest last. Every row is in exactly one.
  """
  rows = rows[np.argsort(length[rows], kind='stable')]
  half = max(length_step // 2, 1)
  plans = []
  for start in range(0, len(rows), size):
    part = rows[start : start + size]
    width = -(-int(length[part].max()) // length_step) * length_step
    replies = -(-max(int(sampled[part].max()), 1) // half) * half
    padded = np.concatenate([part, np.full(size - len(part), -1, part.dtype)])
    plans.append(MicroBatch(padded, width, replies))
  return plans


def take(batch: TokenBatch, plan: MicroBatch) -> TokenBatch:
  """The rows and columns of one micro-batch; rows of -1 become rows without sampled tokens."""
  present = (plan.rows >= 0)[:, None]
  rows = np.maximum(plan.rows, 0)

  def cut(x, width, fill):
    x = x[rows, :width]
    x = np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=fill)
    return np.where(present, x, fill).astype(x.dtype)

  return TokenBatch(
    tokens=cut(batch.tokens, plan.width, 0),
    columns=cut(batch.columns, plan.replies, 1),
    mask=cut(batch.mask, plan.replies, False),
    turn=cut(batch.turn, plan.replies, -1),
    **{
      name: cut(getattr(batch, name), plan.replies, 0)
      for name in (
        'old_logprobs',
        'old_values',
        'advantages',
        'returns',
        'weights',
        'value_weights',
        'ref_logprobs',
        'importance',
      )
    },
  )


# Metrics that are means over trained tokens.
_TOKEN_MEANS = (
  'actor/entropy', 'actor/kl_loss', 'actor/pg_clipfrac', 'actor/pg_clipfrac_lower', 'actor/ppo_kl',
  'actor/logprob_gap_mean',
)  # fmt: skip


def _states_before(
  trunk: Qwen, tokens: jax.Array, columns: jax.Array, remat: bool, segments: jax.Array | None = None
) -> jax.Array:
  """[B, R, D]: the hidden states that emit the tokens at `columns`, each the one after the token before."""
  hidden, _ = trunk(trunk.embed(tokens), remat=remat, segments=segments)
  return jnp.take_along_axis(hidden, (columns - 1)[:, :, None], axis=1)


def value_tokens(
  module: ActorCritic, tokens: jax.Array, columns: jax.Array, cfg: LossConfig, *, freeze_policy: bool = False
) -> jax.Array:
  """The critic's values of the states that sampled tokens were drawn from, f32[B, R]; the vocabulary is left alone.

  Args:
    module: policy and critic.
    tokens: i32[B, T].
    columns: i32[B, R], columns of the sampled tokens, at least 1.
    cfg: remat.
    freeze_policy: no gradient reaches the policy, also where the trunk is its own.
  """
  trunk = module.policy if module.critic is None else module.critic
  hidden = _states_before(trunk, tokens, columns, cfg.remat)
  return module.value_head(jax.lax.stop_gradient(hidden) if freeze_policy and module.critic is None else hidden)


def score_tokens(
  module: ActorCritic, tokens: jax.Array, columns: jax.Array, cfg: LossConfig, segments: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The model's view of sampled tokens, from one forward pass over the timeline, or one of each trunk.

  Args:
    module: policy and critic.
    tokens: i32[B, T].
    columns: i32[B, R], columns of the sampled tokens, at least 1.
    cfg: temperature, chunking and remat.
    segments: i32[B, T], of rows that hold several sequences, see `Qwen`; not with a separate critic.

  Returns:
    (logprobs, entropies, values), each f32[B, R].
  """
  hidden = _states_before(module.policy, tokens, columns, cfg.remat, segments)
  values = module.value_head(hidden) if module.critic is None else value_tokens(module, tokens, columns, cfg)
  targets = jnp.take_along_axis(tokens, columns, axis=1)  # [B, R]
  b, r, d = hidden.shape
  graphdef, params = nnx.split(module.policy)

  def score(params, hidden, targets):
    logits = nnx.merge(graphdef, params).logits(hidden) / cfg.temperature
    if 0 < cfg.vocab_limit < logits.shape[-1]:
      logits = jnp.where(jnp.arange(logits.shape[-1]) < cfg.vocab_limit, logits, -jnp.inf)
    return losses.token_logprobs(logits, targets), losses.token_entropy(logits)

  if 0 < cfg.logits_chunk < b * r:
    # Some columns of all rows make a chunk, so that every device has its rows' part of each.
    columns = max(cfg.logits_chunk // b, 1)
    pad = -r % columns
    chunks = (
      jnp.moveaxis(jnp.pad(hidden, ((0, 0), (0, pad), (0, 0))).reshape(b, -1, columns, d), 1, 0),  # [R/c, B, c, D]
      jnp.moveaxis(jnp.pad(targets, ((0, 0), (0, pad))).reshape(b, -1, columns), 1, 0),  # [R/c, B, c]
    )
    # Under remat neither pass ever holds more than one chunk's [B, c, V].
    one = jax.checkpoint(lambda xs: score(params, *xs))
    logprobs, entropies = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(b, -1)[:, :r], jax.lax.map(one, chunks))
  else:
    logprobs, entropies = score(params, hidden, targets)
  return logprobs, entropies, values


def loss_and_stats(module: ActorCritic, batch: TokenBatch, cfg: LossConfig):
  """The weighted sum of token losses, and what to report.

  Returns:
    (loss f32[], (sums, maxima)): `sums` are weighted like the loss, so over a mini-batch's micro-batches they add up to
    the mini-batch's means.
  """
  logprobs, entropies, values = score_tokens(module, batch.tokens, batch.columns, cfg)
  trained = batch.weights != 0
  policy, stats = losses.policy_loss(
    logprobs,
    batch.old_logprobs,
    batch.advantages,
    trained,
    clip_ratio_low=cfg.clip_ratio_low,
    clip_ratio_high=cfg.clip_ratio_high,
    clip_ratio_c=cfg.clip_ratio_c,
    ratio_level=cfg.ratio_level,
    turn=batch.turn,
    importance_weights=batch.importance,
  )
  vf_loss, value_sums = _value_loss_and_stats(values, batch, cfg)
  pg_loss = losses.aggregate(policy, batch.weights)
  entropy = losses.aggregate(entropies, batch.weights)
  kl = losses.aggregate(losses.kl_penalty(logprobs, batch.ref_logprobs, trained, cfg.kl_kind), batch.weights)
  loss = cfg.pg_coef * pg_loss - cfg.entropy_coef * entropy + cfg.kl_coef * kl
  if cfg.value_coef:  # without, no program runs a critic for its gradient
    loss = loss + cfg.value_coef * vf_loss
  gap = jnp.where(batch.mask, jnp.abs(logprobs - batch.old_logprobs), 0.0)
  sums = {
    'actor/pg_loss': pg_loss,
    # Means over trained tokens, weighted as the loss is: divided by the weights' sum in the end.
    'actor/entropy': entropy,
    'actor/kl_loss': kl,
    'actor/pg_clipfrac': losses.aggregate(stats['clipfrac'], batch.weights),
    'actor/pg_clipfrac_lower': losses.aggregate(stats['clipfrac_lower'], batch.weights),
    'actor/ppo_kl': losses.aggregate(stats['approx_kl'], batch.weights),
    'actor/logprob_gap_mean': losses.aggregate(gap, batch.weights),
    'weights': jnp.sum(batch.weights),
    'ratio_counts': ratio_counts(stats['ratio'], trained),
  }
  return loss, (sums | value_sums, {'actor/logprob_gap_max': jnp.max(gap)})


def critic_loss_and_stats(module: ActorCritic, batch: TokenBatch, cfg: LossConfig):
  """The critic's part of `loss_and_stats` by itself, of which nothing reaches the policy."""
  values = value_tokens(module, batch.tokens, batch.columns, cfg, freeze_policy=True)
  vf_loss, sums = _value_loss_and_stats(values, batch, cfg)
  return cfg.value_coef * vf_loss, (sums, {})


def _value_loss_and_stats(values: jax.Array, batch: TokenBatch, cfg: LossConfig):
  value, stats = losses.value_loss(values, batch.returns, batch.old_values, batch.mask, clip=cfg.value_clip)
  vf_loss = losses.aggregate(value, batch.value_weights)
  return vf_loss, {
    'critic/vf_loss': vf_loss,
    'critic/vf_clipfrac': losses.aggregate(stats['clipfrac'], batch.value_weights),
    'critic/vpred_mean': losses.aggregate(values, batch.value_weights),
  }


def of_critic(path: tuple[Any, ...]) -> bool:
  """Whether a leaf of the weights, or of the optimiser's state for them, is the critic's: trunk or value head."""
  return not {str(getattr(p, 'key', '')) for p in path}.isdisjoint(('critic', 'value_head'))


def decayed(params: Any) -> Any:
  """Which weights AdamW decays: matrices, and neither norms nor biases (a bias of heads has two axes as well)."""
  return jax.tree_util.tree_map_with_path(
    lambda path, x: x.ndim >= 2 and 'bias' not in jax.tree_util.keystr(path[-2:]), params
  )


def make_optimizer(
  *,
  actor_lr: float,
  critic_lr: float,
  warmup_steps: int,
  decay_steps: int,
  final_lr_fraction: float,
  b1: float,
  b2: float,
  weight_decay: float,
  grad_clip: float,
  critic_steps: int = 0,
  separate_critic: bool = False,
) -> optax.GradientTransformation:
  """AdamW with the gradient clipped by its global norm; the critic has its own learning rate.

  Args:
    actor_lr: of the policy.
    critic_lr: of the value head, and of a separate critic's trunk.
    warmup_steps: optimiser steps over which both rise from 0.
    decay_steps: optimiser steps after which `final_lr_fraction` of them is left.
    final_lr_fraction: 1 keeps them constant.
    b1: decay of the first moment.
    b2: decay of the second moment.
    weight_decay: of matrices; vectors are left alone.
    grad_clip: greatest global norm: of all gradients together, or of the policy's and of a separate critic's each.
    critic_steps: optimiser steps at the beginning that are the critic's alone; the policy's schedule begins after them.
    separate_critic: the critic has a trunk of its own.
  """

  def schedule(lr, steps):
    def at(step):
      warm = jnp.minimum(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
      left = 1.0 - (1.0 - final_lr_fraction) * jnp.minimum(step / max(steps, 1), 1.0)
      return lr * warm * left

    return at

  clip = optax.clip_by_global_norm(grad_clip)

  def model(lr, steps):
    adamw = optax.adamw(
      schedule(lr, steps),
      b1=b1,
      b2=b2,
      weight_decay=weight_decay,
      mask=decayed,
    )
    return optax.chain(clip, adamw) if separate_critic else adamw

  def label(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: 'critic' if of_critic(path) else 'actor', params)

  models = {'actor': model(actor_lr, decay_steps - critic_steps), 'critic': model(critic_lr, decay_steps)}
  return optax.chain(optax.identity() if separate_critic else clip, optax.multi_transform(models, label))


class Learner:
  """The compiled parts of the update. With LoRA, gradients and optimiser state exist for what is trained only.

  Attributes:
    traces: how often the gradient program has been traced: once for each pair of widths.
  """

  def __init__(self, graphdef: Any, optimizer: optax.GradientTransformation, cfg: LossConfig, mesh: Mesh | None = None):
    """Nothing is compiled before the first call.

    Args:
      graphdef: of the `ActorCritic`.
      optimizer: see `make_optimizer`.
      cfg: the loss.
      mesh: rows are divided over it; one device where not given.
    """
    self._mesh = mesh
    self.optimizer = optimizer
    self.traces = 0

    def accumulate(trained, frozen, gradients, batch):
      self.traces += 1

      def loss(trained):
        return loss_and_stats(lora.merge(graphdef, trained, frozen), batch, cfg)

      new, (sums, maxima) = jax.grad(loss, has_aux=True)(trained)
      return self._as_weights(jax.tree.map(jnp.add, gradients, new)), (self._as_weights(sums), maxima)

    def accumulate_critic(trained, frozen, gradients, batch):
      self.traces += 1

      def loss(trained):
        return critic_loss_and_stats(lora.merge(graphdef, trained, frozen), batch, cfg)

      new, stats = jax.grad(loss, has_aux=True)(trained)
      return self._as_weights(jax.tree.map(jnp.add, gradients, new)), stats

    def apply(params, opt_state, gradients, lr_scale):
      updates, opt_state = optimizer.update(gradients, opt_state, params)
      updates = jax.tree.map(lambda u: lr_scale * u, updates)
      new = optax.apply_updates(params, updates)
      return self._as_weights(new), self._as_weights(opt_state), _norms(gradients)

    def apply_critic(params, opt_state, gradients, lr_scale):
      def pick(path, new, old):
        return new if of_critic(path) else old

      new_params, new_state, norms = apply(params, opt_state, gradients, lr_scale)
      new_params = jax.tree_util.tree_map_with_path(pick, new_params, params)
      new_state = jax.tree_util.tree_map_with_path(pick, new_state, opt_state)
      return new_params, new_state, {'critic/grad_norm': norms['critic/grad_norm']}

    def accumulate_part(trained, frozen, gradients, batch, cfg):
      new = jax.grad(lambda p: loss_and_stats(lora.merge(graphdef, p, frozen), batch, cfg)[0])(trained)
      return jax.tree.map(jnp.add, gradients, new)

    def score(params, tokens, columns):
      logprobs, _, values = score_tokens(nnx.merge(graphdef, params), tokens, columns, cfg)
      return logprobs, values

    def logprobs(params, tokens, columns):
      return (score(params, tokens, columns)[0],)

    def values(params, tokens, columns):
      return (value_tokens(nnx.merge(graphdef, params), tokens, columns, cfg),)

    self._accumulate = jax.jit(accumulate, donate_argnums=2)
    self._accumulate_critic = jax.jit(accumulate_critic, donate_argnums=2)
    self._apply = jax.jit(apply, donate_argnums=(0, 1))
    self._apply_critic = jax.jit(apply_critic, donate_argnums=(0, 1))
    self._score = jax.jit(score)
    self._logprobs = jax.jit(logprobs)
    self._values = jax.jit(values)
    self._accumulate_part = jax.jit(accumulate_part, donate_argnums=2, static_argnames='cfg')
    self._cfg = cfg

  def _as_weights(self, tree: Any) -> Any:
    """Inside a program: lays a tree out as the weights are; programs for another layout would be compiled anew."""
    return tree if self._mesh is None else jax.lax.with_sharding_constraint(tree, tree_shardings(tree, self._mesh))

  def _take(self, batch: TokenBatch, plan: MicroBatch) -> TokenBatch:
    part = take(batch, plan)
    return part if self._mesh is None else place_rows(part, self._mesh)

  def init(self, params: Any) -> Any:
    """The optimiser's state for what is trained of `params`, laid out as they are."""
    trained, _ = lora.partition(params)
    if self._mesh is None:
      return jax.jit(self.optimizer.init)(trained)
    shardings = tree_shardings(jax.eval_shape(self.optimizer.init, trained), self._mesh)
    return jax.jit(self.optimizer.init, out_shardings=shardings)(trained)

  def score(self, params: Any, batch: TokenBatch, plans: list[MicroBatch]) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs and values of all sampled tokens under `params`, each f32[B, R]."""
    logprobs, values = self._forward(self._score, 2, params, batch, plans)
    return logprobs, values

  def logprobs(self, params: Any, batch: TokenBatch, plans: list[MicroBatch]) -> np.ndarray:
    """Log-probs of all sampled tokens under `params`, f32[B, R]; a separate critic is not run."""
    if 'critic' not in params:  # the values cost nothing, and the program may be there already
      return self.score(params, batch, plans)[0]
    return self._forward(self._logprobs, 1, params, batch, plans)[0]

  def values(self, params: Any, batch: TokenBatch, plans: list[MicroBatch]) -> np.ndarray:
    """Values of the states that sampled tokens were drawn from, f32[B, R]; no log-probs are computed."""
    return self._forward(self._values, 1, params, batch, plans)[0]

  def _forward(self, program, count, params, batch, plans) -> list[np.ndarray]:
    """The `count` arrays f32[B, R] that a program gives, 0 where no token was sampled."""
    found = [np.zeros(batch.mask.shape, np.float32) for _ in range(count)]
    for plan in plans:
      part = self._take(batch, plan)
      rows, width = plan.rows >= 0, min(plan.replies, batch.mask.shape[1])
      for into, x in zip(found, processes.all_rows(program(params, part.tokens, part.columns)), strict=True):
        into[plan.rows[rows], :width] = x[rows, :width]
    return [np.where(batch.mask, x, 0) for x in found]

  def lower(self, params: Any, opt_state: Any, batch: TokenBatch) -> dict[str, jax.stages.Lowered]:
    """The programs of `step` for these shapes, to be compiled without being run; arguments may be abstract."""
    trained, frozen = lora.partition(params)
    return {
      'accumulate': self._accumulate.lower(trained, frozen, trained, batch),
      'apply': self._apply.lower(trained, opt_state, trained, np.float32(1)),
    }

  def gradient_norms(self, params: Any, batch: TokenBatch, plans: list[MicroBatch]) -> dict[str, float]:
    """Global norms of the gradients of the loss's parts on some rows, without a step.

    Returns:
      {'task': ..., 'entropy': ..., 'kl': ...}: of the policy's surrogate, and of the other two as they enter the loss;
      those whose coefficient is 0 are left out.
    """
    off = dataclasses.replace(self._cfg, pg_coef=0.0, entropy_coef=0.0, kl_coef=0.0, value_coef=0.0)
    parts = {
      'task': dataclasses.replace(off, pg_coef=1.0),
      'entropy': dataclasses.replace(off, entropy_coef=self._cfg.entropy_coef),
      'kl': dataclasses.replace(off, kl_coef=self._cfg.kl_coef),
    }
    trained, frozen = lora.partition(params)
    norms = {}
    for name, cfg in parts.items():
      if cfg == off:
        continue
      gradients = _zeros_like(trained)
      for plan in plans:
        gradients = self._accumulate_part(trained, frozen, gradients, self._take(batch, plan), cfg=cfg)
      norms[name] = float(optax.tree.norm(gradients))
    return norms

  def step(
    self,
    params: Any,
    opt_state: Any,
    batch: TokenBatch,
    plans: list[MicroBatch],
    lr_scale: float = 1.0,
    *,
    critic_only: bool = False,
  ) -> tuple[Any, Any, dict[str, jax.Array]]:
    """One optimiser step over a mini-batch.

    Args:
      params: weights; those that are trained are given away.
      opt_state: the optimiser's state; given away.
      batch: the rollout, with `weights` made for this mini-batch.
      plans: its micro-batches.
      lr_scale: multiplies the learning rates.
      critic_only: leave the policy and its part of the optimiser's state as they are; with a shared trunk the value
        head alone learns.

    Returns:
      New weights, new optimiser state, and metrics as device scalars; among them, where the policy learns,
      'ratio_counts', i32[K], of the tokens that are trained (`diagnostics.ratio_counts`).
    """
    accumulate, apply = self._accumulate, self._apply
    if critic_only:
      accumulate, apply = self._accumulate_critic, self._apply_critic
    trained, frozen = lora.partition(params)
    gradients = _zeros_like(trained)
    sums: dict[str, Any] = {}
    for plan in plans:
      gradients, (new_sums, new_maxima) = accumulate(trained, frozen, gradients, self._take(batch, plan))
      for name, x in new_sums.items():
        sums[name] = sums[name] + x if name in sums else x
      for name, x in new_maxima.items():
        sums[name] = jnp.maximum(sums[name], x) if name in sums else x
    if not critic_only:
      whole = sums.pop('weights')
      sums |= {name: sums[name] / jnp.maximum(whole, 1e-9) for name in _TOKEN_MEANS}
    trained, opt_state, norms = apply(trained, opt_state, gradients, np.float32(lr_scale))
    return lora.join(trained, frozen), opt_state, sums | norms


def _norms(gradients: Any) -> dict[str, jax.Array]:
  """As they are clipped: that of all together, or of the policy's where nothing is shared; and that of the critic's."""
  leaves = jax.tree_util.tree_leaves_with_path(gradients)
  critic = optax.tree.norm([x for path, x in leaves if of_critic(path)])
  actor = optax.tree.norm([x for path, x in leaves if 'critic' not in gradients or not of_critic(path)])
  return {'actor/grad_norm': actor, 'critic/grad_norm': critic}


def _zeros_like(params: Any) -> Any:
  """Gradients to begin with, laid out as the weights are, so that the first micro-batch runs the others' program."""
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=getattr(x, 'sharding', None)), params)
