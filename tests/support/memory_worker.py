"""Compiles programs for eight devices, ordered for memory, and prints what they need as JSON; run by test_memory.py."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
from flax import nnx

from ragen_jax import build
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.sharding import row_sharding, tree_shardings
from ragen_jax.models import attention as attention_lib
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.planning import abstract, memory
from ragen_jax.planning.lowering import abstract_rows, lower_gradient, lower_sampler, lower_score, step_programs
from ragen_jax.sampling.draw import PLAIN
from ragen_jax.sampling.sampler import Sampler
from ragen_jax.training.batches import abstract_mini_batch
from ragen_jax.training.scoring import Scorer
from ragen_jax.training.state import TrainState
from tests.support import learning
from tests.support.configs import small_config

VOCAB, ROWS, WIDTH, REPLIES = 16384, 8, 256, 128


def optimizer():
  return learning.optimizer(actor_lr=1e-3, critic_lr=1e-3, decay_steps=1, b2=0.99)


def model(vocab=VOCAB, mesh=None, **shape):
  cfg = QwenConfig(
    **{'vocab_size': vocab, 'hidden_size': 32, 'intermediate_size': 64, 'num_layers': 2, 'num_heads': 4,
       'num_kv_heads': 2, 'head_dim': 8} | shape
  )  # fmt: skip

  def make():
    made = ActorCritic(Qwen(cfg, rngs=nnx.Rngs(0)))
    made.policy.activation_sharding = mesh and row_sharding(mesh)
    return made

  return nnx.eval_shape(make)


def batch(replies=REPLIES, sharding=None):
  return abstract_mini_batch(ROWS, WIDTH, replies, reference=True, importance=True, sharding=sharding)


def update(made, mesh=None, replies=REPLIES, score=False, **loss):
  """Temporary bytes of the update's gradient program, and of the one that only scores."""
  graphdef, params = nnx.split(made)
  learner = learning.learner(made, optimizer(), mesh, **loss)
  sharding = None
  if mesh is not None:
    sharding = row_sharding(mesh)
    params = abstract.laid_out(params, tree_shardings(params, mesh))
  micro = batch(replies, sharding)
  state = TrainState(params, nnx.State({}), jax.eval_shape(learner.optimizer.init, params))
  found = {'accumulate': abstract.temporary_bytes(lower_gradient(learner, state, micro))}
  if score:
    scorer = Scorer(graphdef, learning.loss(**loss).scoring, mesh)
    found['score'] = abstract.temporary_bytes(lower_score(scorer, params, micro))
  return found


def rollout(made):
  sampler = Sampler(made, stop_ids=(1,), mesh=make_mesh(8, 1, 1))
  lowered = lower_sampler(
    sampler, nnx.split(made)[1], abstract_rows(sampler, ROWS, WIDTH), width=WIDTH // 2, columns=8, sampling=PLAIN
  )
  return {name: abstract.temporary_bytes(x) for name, x in lowered.items()}


def attention(most):
  """Temporary bytes of attention and its gradient over 64 heads of 1024 columns, with `_MAX_SCORES` set."""
  attention_lib._MAX_SCORES, attention_lib._BLOCK_SCORES = most, 2**22
  q = jax.ShapeDtypeStruct((8, 1024, 8, 8), jnp.float32)
  kv = jax.ShapeDtypeStruct((8, 1024, 2, 8), jnp.float32)
  mask = jax.ShapeDtypeStruct((1, 1024, 1024), bool)
  gradient = jax.jit(jax.grad(lambda q, k, v, mask: jnp.sum(attention_lib.attend(q, k, v, mask)), argnums=(0, 1, 2)))
  return abstract.temporary_bytes(gradient.lower(q, kv, kv, mask))


def on_device(tree):
  """Bytes that the first device really holds."""
  first = jax.devices()[0]
  return sum(s.data.nbytes for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device == first)


def held():
  """Bytes of all arrays that there are on the first device; those that share their memory count once."""
  first = jax.devices()[0]
  shards = [s.data for x in jax.live_arrays() for s in x.addressable_shards if s.device == first]
  return sum({s.unsafe_buffer_pointer(): s.nbytes for s in shards}.values())


def real():
  """A run's arrays and programs on a mesh of 2 x 2 x 2, and what was planned."""
  config = small_config(
    mesh__data=2, mesh__fsdp=2, mesh__tensor=2, algorithm__kl_loss_coef=0.1, eval__groups=16, length_step=64,
    agent__max_context=128, plan__prompt_tokens=64,
  )  # fmt: skip
  config.plan.devices, config.model.dtype = 8, 'float32'
  policy = build.load_policy(config)
  trainer = build.make_trainer(config, policy)
  state = trainer.init()
  live = held()
  rows = policy.sampler.init(config.train.groups * config.train.group_size, abstract.cache_columns(config))
  _, shape = abstract.micro_batches(config, trainer, trainer.settings.estimate.batching)
  batch = abstract.abstract_batch(config, trainer, shape)
  step = (program.lower() for program in step_programs(trainer.learner, state, batch))
  lowered = [lower_gradient(trainer.learner, state, batch), *step]
  found = memory.estimate(config, {memory.shaped_by(config, 'rollout', 16): 0})
  return {
    'planned': found.phases['update'] | {'cache': found.phases['rollout']['key/value cache']},
    'live': live,
    'params': on_device(state.params),
    'whole': sum(x.nbytes for x in jax.tree.leaves(state.params)),
    'opt_state': on_device(state.opt_state),
    'reference': on_device(state.reference),
    'cache': on_device(rows.cache),
    'activations': max(abstract.temporary_bytes(x) for x in lowered),
  }


def main() -> None:
  memory.use_cpu_devices(8)
  one = model(num_layers=1)
  by_weights, by_rows = make_mesh(1, 8, 1), dict(remat='layers', logits_chunk=256)
  found = {
    'whole': update(one, score=True),
    'chunk_128': update(one, score=True, logits_chunk=128),
    'chunk_128_twice': update(one, score=True, replies=2 * REPLIES, logits_chunk=128),
    'chunk_256': update(one, score=True, logits_chunk=256),
    'keep': update(model(64, num_layers=6)),
    'remat': update(model(64, num_layers=6), remat='layers'),
    'rollout': rollout(one),
    'attention_whole': attention(2**40),
    'attention_blocks': attention(2**20),
    'one_device': update(model(512, num_layers=3, hidden_size=64), **by_rows),
    # A chunk is of one device, so its eighth for an eighth of the rows.
    'fsdp': update(model(512, by_weights, num_layers=3, hidden_size=64), by_weights, remat='layers', logits_chunk=32),
    'fsdp_left_alone': update(model(512, num_layers=3, hidden_size=64), by_weights, **by_rows),
    'real': real(),
  }
  print(json.dumps(found))


if __name__ == '__main__':
  main()
