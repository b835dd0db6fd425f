"""Settings, batches, learners and trainers for tests of the update."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from ragen_jax import build
from ragen_jax.agent.language_model import LanguageModel
from ragen_jax.config.checks import check_config
from ragen_jax.models import lora
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.training import bad_steps, objective
from ragen_jax.training.batches import MicroBatch, MiniBatch, micro_batches, plan_micro_batches, sampled_columns
from ragen_jax.training.learner import Learner
from ragen_jax.training.objective import LossSettings
from ragen_jax.training.optimizer import OptimizerSettings, make_optimizer
from ragen_jax.training.scoring import RematSettings, ScoringSettings, score_tokens
from ragen_jax.training.state import TrainState
from ragen_jax.training.trainer import Trainer
from ragen_jax.utils.observer import Observer
from tests.support.configs import small_config

_SCORING = {'temperature': 1.0, 'vocab_limit': 0, 'banned': (), 'logits_chunk': 0, 'remat': 'none'}
_LOSS = {
  'policy_loss': 'ppo', 'ratio_level': 'token', 'clip_ratio_low': 0.2, 'clip_ratio_high': 0.28, 'clip_ratio_c': 3.0,
  'tau_pos': 1.0, 'tau_neg': 1.05, 'dro_beta': 0.05, 'pg_coef': 1.0,
  'kl_loss_coef': 0.0, 'kl_kind': 'k3', 'value_clip': 0.5, 'value_coef': 0.5, 'entropy_coef': 0.001,
}  # fmt: skip
_OPTIMIZER = {
  'actor_lr': 1e-2, 'critic_lr': 1e-2, 'warmup_steps': 0, 'decay_steps': 10, 'final_lr_fraction': 1.0, 'b1': 0.9,
  'b2': 0.999, 'weight_decay': 0.0, 'grad_clip': 1.0, 'critic_steps': 0, 'separate_critic': False,
}  # fmt: skip


def scoring(**fields: Any) -> ScoringSettings:
  """Scoring as the sampler draws by default; `fields` differ, `remat` is one of `qwen.REMAT`."""
  found = _SCORING | fields
  return ScoringSettings(**found | {'remat': remat(found['remat'])})


# Scores by one program; without it, each operation would be compiled by itself.
score = nnx.jit(score_tokens, static_argnums=2)


def remat(name: str) -> RematSettings:
  """Settings that take one of `qwen.REMAT` for any number of columns."""
  return RematSettings.always(name)


def loss(**fields: Any) -> LossSettings:
  """PPO's loss; `fields` of `LossSettings` or of `ScoringSettings` differ."""
  own = {name: x for name, x in fields.items() if name in _SCORING}
  return LossSettings(scoring=scoring(**own), **_LOSS | {n: x for n, x in fields.items() if n not in own})


def optimizer(**fields: Any) -> optax.GradientTransformation:
  """AdamW without decay or schedule; `fields` of `OptimizerSettings` differ."""
  return make_optimizer(OptimizerSettings(**_OPTIMIZER | fields))


def learner(
  model: ActorCritic, update: optax.GradientTransformation | None = None, mesh: Mesh | None = None,
  observer: Observer | None = None, **fields: Any,
) -> Learner:  # fmt: skip
  """A learner of PPO's loss; `fields` as for `loss`."""
  settings = loss(**fields)
  return Learner(
    nnx.split(model)[0],
    update or optimizer(),
    objective.PolicyAndValueLoss(settings),
    mesh,
    critic_loss=objective.CriticLoss(settings),
    observer=observer,
  )


def state_of(update: Learner, params: Any) -> TrainState:
  """The state before the first step, of weights that are given away."""
  trained, frozen = lora.partition(params)
  return TrainState(trained, frozen, update.init(trained))


def copied(tree: Any) -> Any:
  """The tree in arrays of its own, for steps that donate theirs."""
  return jax.tree.map(jnp.copy, tree)


def mini_batch(loss_mask: np.ndarray, vocab: int, *, seed: int = 0, **fields: Any) -> MiniBatch:
  """A mini-batch of random tokens, log-probs, advantages and returns, all sampled tokens of the same weight.

  Args:
    loss_mask: bool[B, T], the sampled tokens.
    vocab: tokens are below it.
    seed: of the numbers.
    **fields: that differ.
  """
  rng = np.random.default_rng(seed)
  columns, mask = sampled_columns(loss_mask)

  def noise():
    return np.where(mask, rng.normal(size=mask.shape), 0).astype(np.float32)

  mean = (mask / mask.sum()).astype(np.float32)
  values = {
    'tokens': rng.integers(0, vocab, size=loss_mask.shape).astype(np.int32), 'columns': columns, 'mask': mask,
    'turn': np.zeros(mask.shape, np.int32), 'trained': mask, 'valued': mask, 'old_logprobs': noise() - 3,
    'old_values': noise(), 'advantages': noise(), 'returns': noise(), 'ref_logprobs': noise() - 3,
    'importance': np.ones(mask.shape, np.float32), 'weights': mean, 'value_weights': mean,
  }  # fmt: skip
  return MiniBatch(**values | fields)


def plans(batch: MiniBatch, size: int, length: np.ndarray | None = None, length_step: int | None = None) -> list:
  """Micro-batches of all rows of a batch; rows are as wide as the batch unless `length` says otherwise."""
  rows, width = batch.tokens.shape
  length = np.full(rows, width) if length is None else length
  return plan_micro_batches(
    np.arange(rows, dtype=np.int32), length, batch.mask.sum(axis=1), size=size, length_step=length_step or width
  )


def step(update: Learner, state: TrainState, batch: MiniBatch, parts: list[MicroBatch], **options: Any):
  """One optimiser step: the new state, and metrics as `Trainer.update` has them before it averages over steps."""
  state, found = update.step(state, micro_batches(batch, parts, update.mesh), **options)
  return state, objective.token_means(bad_steps.split(found)[0])


def make_trainer(policy: LanguageModel, **fields: Any) -> tuple[Trainer, TrainState]:
  """A trainer on eight groups, and a state whose arrays are copies, as updates donate them; `policy` may be shared."""
  config = small_config(**{'train__groups': 8} | fields)
  check_config(config)
  trainer = build.make_trainer(config, policy)
  return trainer, copied(trainer.init())
