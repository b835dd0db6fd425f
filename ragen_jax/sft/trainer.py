"""The optimiser and the compiled programs of supervised training on replies."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from ragen_jax.models import lora
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.sft import step_watch
from ragen_jax.sft.packing import SftBatch
from ragen_jax.training import bad_steps
from ragen_jax.training.learner import Learner
from ragen_jax.training.optimizer import clip_by_norm, weight_decay_mask
from ragen_jax.training.optimizer_step import SKIPPED
from ragen_jax.training.scoring import ScoringSettings, score_tokens
from ragen_jax.training.state import TrainState
from ragen_jax.utils.alike import made_once


@dataclasses.dataclass(frozen=True)
class SftSettings:
  """The optimiser and the loss. Fields of `config.sft`, and of `config.optimizer` for AdamW and the clipping."""

  steps: int
  learning_rate: float
  value_coef: float
  b1: float
  b2: float
  weight_decay: float
  grad_clip: float


def make_schedule(settings: SftSettings) -> optax.Schedule:
  """The learning rate of each step: linear warm-up, then a cosine."""
  warmup = max(settings.steps // 20, 1)
  rate = settings.learning_rate
  return optax.warmup_cosine_decay_schedule(0.0, rate, warmup, max(settings.steps, warmup + 1), 0.1 * rate)


@made_once(8)
def make_optimizer(settings: SftSettings) -> optax.GradientTransformationExtraArgs:
  """AdamW with the schedule and the clipping of the settings; equal settings give one optimiser."""
  adamw = optax.adamw(
    make_schedule(settings),
    b1=settings.b1,
    b2=settings.b2,
    weight_decay=settings.weight_decay,
    mask=weight_decay_mask,
  )
  return optax.chain(clip_by_norm(settings.grad_clip, 'all'), adamw)


@dataclasses.dataclass(frozen=True)
class SftLoss:
  """A loss of (module, `SftBatch`) for a `Learner`: the negative log-likelihood of trained tokens, and the value loss.

  The weights of the tokens sum to 1 over a step, so the losses and gradients of its micro-batches are added.
  """

  scoring: ScoringSettings
  value_coef: float

  def __call__(
    self, module: ActorCritic, batch: SftBatch
  ) -> tuple[jax.Array, tuple[dict[str, jax.Array], dict[str, jax.Array]]]:
    logprobs, _, values = score_tokens(module, batch, self.scoring)
    nll = -jnp.sum(logprobs * batch.weights)
    vf_loss = 0.5 * jnp.sum(jnp.square(values - batch.values) * batch.value_weights)
    return nll + self.value_coef * vf_loss, ({'loss': nll, 'value_loss': vf_loss}, {})


class SftTrainer:
  """Trains a model on batches of replies; with LoRA, only adapters and the value head.

  Batches are on the devices of its mesh already. A step donates the arrays of `state`.
  """

  def __init__(self, settings: SftSettings, scoring: ScoringSettings, model: ActorCritic, mesh: Mesh):
    """Compiles nothing before the first call; the first step donates the trained weights of `model`."""
    self.schedule = make_schedule(settings)
    graphdef, params = nnx.split(model)
    divided = mesh if mesh.size > 1 else None
    self.learner = Learner(graphdef, make_optimizer(settings), SftLoss(scoring, settings.value_coef), divided)
    trained, frozen = lora.partition(params)
    self._value_loss = settings.value_coef > 0
    self.state = TrainState(trained, frozen, self.learner.init(trained), lr_scale=None)

  def gradients(self, batches: list[SftBatch]) -> tuple[Any, jax.Array]:
    """The gradients of a step from its micro-batches, and f32[2], loss and value loss."""
    gradients, found = self.learner.gradients(self.state, batches)
    return gradients, _parts(found)

  def step(self, batches: list[SftBatch]) -> tuple[jax.Array, dict[str, Any]]:
    """Takes one optimiser step: f32[2], loss and value loss before the step, and metrics.

    They are those of `Learner.step`, with `step_watch.GRAD_NORM`, the global norm of the gradient before it is clipped.
    """
    self.state, found = self.learner.step(self.state, batches)
    self.state = self.state.replace(iteration=self.state.iteration + 1)
    norm = found['actor/grad_norm']  # of all gradients, unless there is a separate critic
    if 'critic' in self.state.trained:
      norm = jnp.hypot(norm, found['critic/grad_norm'])
    return _parts(found), found | {step_watch.GRAD_NORM: norm}

  def watched(self, found: dict[str, Any]) -> dict[str, float]:
    """The metrics of a step, on the host, that are watched for spikes."""
    own = {step_watch.LOSS: float(found['loss']), step_watch.GRAD_NORM: float(found[step_watch.GRAD_NORM])}
    return own | ({step_watch.VALUE_LOSS: float(found['value_loss'])} if self._value_loss else {})

  def describe_skipped(self, found: dict[str, Any]) -> str:
    """Text about a skipped step from its metrics on the host; '' for a step that was taken."""
    stats, bad = bad_steps.split(found)
    skipped = stats.pop(SKIPPED)
    return bad_steps.describe(stats, bad, self.state.trained, self.state.opt_state) if skipped else ''

  def has_finite_loss(self, batches: list[SftBatch]) -> bool:
    """Whether the weights give finite losses on the last of these micro-batches; compiles nothing after a step."""
    return bool(np.all(np.isfinite(self.gradients(batches[-1:])[1])))

  def losses(self, batches: list[SftBatch]) -> jax.Array:
    """f32[2], loss and value loss of the current weights, which do not change."""
    return _parts(self.learner.evaluate(self.state, batches))


def _parts(found: dict[str, jax.Array]) -> jax.Array:
  return jnp.stack([found['loss'], found['value_loss']])
