"""Log-probs, entropies and values of sampled tokens, from one forward pass over their rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ragen_jax.algorithms import losses
from ragen_jax.distributed import processes
from ragen_jax.distributed.sharding import copied_to_rows, row_shards
from ragen_jax.models import vocabulary
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.training.batches import MicroBatch, TokenRows, micro_batches
from ragen_jax.training.images import CRITIC, POLICY
from ragen_jax.training.logits import SUMS, logprobs_and_entropies
from ragen_jax.training.packing import PackedBatch
from ragen_jax.utils.alike import made_once
from ragen_jax.utils.observer import Observer

# The logit of a token that has no probability.
_IMPOSSIBLE = -1e30
# More columns than any device can take.
ANY_COLUMNS = 2**31

# Micro-batches that are scored one after the other.
Plans = Sequence[MicroBatch | PackedBatch]


@dataclasses.dataclass(frozen=True)
class RematSettings:
  """What the backward pass computes again, by the columns that go through the model at once on one device.

  Attributes:
    choices: pairs of one of `qwen.REMAT` and the most columns for it, the fastest first. With more columns than all of
      them allow, whole layers are computed again.
  """

  choices: tuple[tuple[str, int], ...]

  @classmethod
  def always(cls, remat: str) -> RematSettings:
    """The same for any number of columns."""
    return cls(((remat, ANY_COLUMNS),))

  def choose(self, columns: int) -> str:
    return next((remat for remat, most in self.choices if columns <= most), 'layers')


@dataclasses.dataclass(frozen=True)
class ScoringSettings:
  """How tokens are scored. Fields of `config.model`, and the following.

  Attributes:
    temperature: divides the logits, as when the tokens were drawn.
    vocab_limit: ids from here on are padding of the embedding, which the sampler never draws; they get no probability.
      0 is no limit.
    banned: other ids that the sampler never draws.
  """

  temperature: float
  vocab_limit: int
  banned: tuple[int, ...]
  logits_chunk: int
  remat: RematSettings


def _states_before(trunk: Qwen, rows: TokenRows, remat: RematSettings, name: str) -> tuple[jax.Array, jax.Array | None]:
  """[B, R, D]: the hidden states that emit the scored tokens, each that of the column before; `name` as in `images`.

  And, if experts are replayed, f32[B, R]: the share of those of these columns that the routers would not choose.
  """
  experts = rows.experts if name == POLICY else None
  images = rows.images
  chosen = remat.choose(rows.tokens.size // _row_shards(trunk))
  seen = None if images is None else images.columns(trunk, name, remat=chosen != 'none')
  x, deepstack = trunk.embed_columns(rows.tokens, seen)
  positions = None if images is None else images.positions
  hidden, _, own = trunk.run(
    x, positions, remat=chosen, seen_until=rows.seen_until, deepstack=deepstack, experts=experts,
    with_choices=experts is not None,
  )  # fmt: skip
  before = rows.columns - 1 if rows.before is None else rows.before
  hidden = jnp.take_along_axis(hidden, before[:, :, None], axis=1)
  if experts is None:
    return hidden, None
  own, experts = (jnp.take_along_axis(x, before[:, :, None, None], axis=1) for x in (own, experts))
  same = functools.reduce(jnp.logical_or, (experts == own[..., i : i + 1] for i in range(own.shape[-1])))
  return hidden, jnp.sum(~same, axis=(2, 3)) / (sum(trunk.cfg.with_experts) * trunk.cfg.experts.chosen)


def value_tokens(
  module: ActorCritic, rows: TokenRows, settings: ScoringSettings, *, freeze_policy: bool = False
) -> jax.Array:
  """The critic's values f32[B, R] of the states that sampled tokens were drawn from; no logits are computed.

  `freeze_policy` stops the gradient before the policy's trunk; a separate critic is trained as usual.
  """
  trunk, name = (module.policy, POLICY) if module.critic is None else (module.critic, CRITIC)
  hidden, _ = _states_before(trunk, rows, settings.remat, name)
  return module.value_head(jax.lax.stop_gradient(hidden) if freeze_policy and module.critic is None else hidden)


def score_tokens(
  module: ActorCritic, rows: TokenRows, settings: ScoringSettings
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Log-probs, entropies and values of sampled tokens, each f32[B, R], from one forward pass of each trunk.

  The rotary positions of text are those in a token's row, 0, 1, ...; of images, `rows.images` has them.
  """
  return score_and_compare(module, rows, settings)[:3]


def score_and_compare(
  module: ActorCritic, rows: TokenRows, settings: ScoringSettings
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
  """The results of `score_tokens`; and, if experts are replayed, f32[B, R], see `_states_before`."""
  hidden, differ = _states_before(module.policy, rows, settings.remat, POLICY)
  values = module.value_head(hidden) if module.critic is None else value_tokens(module, rows, settings)
  targets = jnp.take_along_axis(rows.tokens, rows.columns, axis=1)  # [B, R]
  b, r, _ = hidden.shape
  shards = _row_shards(module.policy)
  width = max(settings.logits_chunk // -(-b // shards), 1)
  if settings.logits_chunk and width < r:
    return *_score_in_chunks(module.policy, hidden, targets, settings, width), values, differ
  logits = module.policy.logits(hidden) / settings.temperature
  logits = vocabulary.masked(logits, settings.vocab_limit, settings.banned, -jnp.inf)
  return losses.token_logprobs(logits, targets), losses.token_entropy(logits), values, differ


def _score_in_chunks(
  trunk: Qwen, hidden: jax.Array, targets: jax.Array, settings: ScoringSettings, width: int
) -> tuple[jax.Array, jax.Array]:
  """Log-probs and entropies f32[B, R] of targets i32[B, R] from hidden states [B, R, D], `width` columns at a time.

  A chunk holds some columns of all rows, so that every device has its rows' part of each chunk. The rows of a device
  have a copy of the output projection to themselves: the gradient of the copy adds up over the chunks on the device,
  and the devices exchange it once.
  """
  b, r, d = hidden.shape
  shards = _row_shards(trunk)
  width = -(-r // -(-r // width))  # chunks of equal size
  pad = -r % width
  # [R/c, s, B/s, c, ...] for s parts of the rows.
  chunks = (
    jnp.moveaxis(jnp.pad(hidden, ((0, 0), (0, pad), (0, 0))).reshape(shards, b // shards, -1, width, d), 2, 0),
    jnp.moveaxis(jnp.pad(targets, ((0, 0), (0, pad))).reshape(shards, b // shards, -1, width), 2, 0),
  )
  graphdef, head, rest = nnx.split(trunk, lambda path, _: path[0] in ('embed_tokens', 'lm_head'), ...)
  head = jax.tree.map(lambda x: x.astype(hidden.dtype), head)  # once, and its gradient is half as large
  if shards > 1:
    head = copied_to_rows(head, trunk.activation_sharding.mesh)
  else:
    head = jax.tree.map(lambda x: x[None], head)

  def score(head, hidden, targets):
    logits = nnx.merge(graphdef, head, rest).logits(hidden) / settings.temperature
    logits = vocabulary.masked(logits, settings.vocab_limit, settings.banned, _IMPOSSIBLE)
    return logprobs_and_entropies(logits, targets)

  # Under checkpoint neither pass holds more than one chunk's [B, c, V].
  policy = jax.checkpoint_policies.save_only_these_names(SUMS)
  one = jax.checkpoint(lambda xs: jax.vmap(score)(head, *xs), policy=policy)
  found = jax.lax.map(one, chunks)
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2).reshape(b, -1)[:, :r], found)


def _row_shards(trunk: Qwen) -> int:
  """Number of parts that the rows of a trunk's activations are divided into."""
  return 1 if trunk.activation_sharding is None else row_shards(trunk.activation_sharding.mesh)


def token_rows(rows: TokenRows) -> TokenRows:
  """What programs that score read of a batch."""
  return TokenRows(**{f.name: getattr(rows, f.name) for f in dataclasses.fields(TokenRows)})


class _Programs:
  """The compiled programs of a `Scorer`; they hold no weights."""

  def __init__(self, graphdef: Any, settings: ScoringSettings):
    self.traces = {'score': 0, 'logprobs': 0, 'values': 0}

    def score(params, rows):
      self.traces['score'] += 1
      logprobs, _, values = score_tokens(nnx.merge(graphdef, params).gathered(), rows, settings)
      return logprobs, values

    def logprobs(params, rows):
      self.traces['logprobs'] += 1
      return (score_tokens(nnx.merge(graphdef, params).gathered(), rows, settings)[0],)

    def values(params, rows):
      self.traces['values'] += 1
      return (value_tokens(nnx.merge(graphdef, params).gathered(), rows, settings),)

    self.programs = {f.__name__: jax.jit(f) for f in (score, logprobs, values)}


_programs = made_once(8)(_Programs)  # of a policy and of a reference


class Scorer:
  """The compiled programs that score the rows of a batch without gradients, traced once for each pair of widths.

  Those of equal models and settings share programs, and `traces`: how often each was traced, by name.
  """

  def __init__(
    self, graphdef: Any, settings: ScoringSettings, mesh: Mesh | None = None, observer: Observer | None = None
  ):
    """Nothing is compiled before the first call."""
    self._mesh, self._observer = mesh, observer or Observer()
    shared = _programs(graphdef, settings)
    self.programs, self.traces = shared.programs, shared.traces

  def score(self, params: Any, rows: TokenRows, plans: Plans) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs and values of all sampled tokens under `params`, each f32[B, R], 0 off the mask."""
    logprobs, values = self._run('score', 2, params, rows, plans)
    return logprobs, values

  def logprobs(self, params: Any, rows: TokenRows, plans: Plans) -> np.ndarray:
    """Log-probs of all sampled tokens under `params`, f32[B, R]; a separate critic is not run, and routers choose."""
    if 'critic' not in params and rows.experts is None:  # values cost nothing, and the program may be compiled already
      return self.score(params, rows, plans)[0]
    return self._run('logprobs', 1, params, rows.replace(experts=None), plans)[0]

  def values(self, params: Any, rows: TokenRows, plans: Plans) -> np.ndarray:
    """Values of the states that sampled tokens were drawn from, f32[B, R]; no log-probs are computed."""
    return self._run('values', 1, params, rows, plans)[0]

  def _run(self, name, count, params, rows, plans) -> list[np.ndarray]:
    """The `count` arrays f32[B, R] that a program gives, 0 off the mask."""
    rows = token_rows(rows)
    found = [np.zeros(rows.mask.shape, np.float32) for _ in range(count)]
    for plan, part in zip(plans, micro_batches(rows, plans, self._mesh), strict=True):
      self._observer.runs(name, (*part.tokens.shape, part.columns.shape[1]))
      scores = processes.all_rows(self.programs[name](params, part))
      for into, x in zip(found, scores, strict=True):
        plan.put(into, x, rows.mask)
    return [np.where(rows.mask, x, 0) for x in found]
