"""Supervised warm start: imitation of exact solvers or of given conversations, and the making of the built-in model."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.context_manager import SYSTEM, describe_task
from ragen_jax.agent.env_manager import EnvGroup, EnvStateManager
from ragen_jax.config import command_line
from ragen_jax.config.checks import check_config, check_sft
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.sharding import place, place_rows, row_sharding, row_shards, tree_shardings
from ragen_jax.evaluation import evaluator as evaluate
from ragen_jax.models import lora
from ragen_jax.models.checkpoint import hf
from ragen_jax.models.qwen import Qwen, QwenConfig
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.modes import export
from ragen_jax.runs.checkpoints import Checkpointer, record_config, workdir_lock
from ragen_jax.runs.interrupt import Interrupt, Stopped
from ragen_jax.runs.metrics import MetricWriter, Timer
from ragen_jax.runs.progress import Progress
from ragen_jax.sft import conversations, tiny_tokenizer
from ragen_jax.sft import data as sft_data
from ragen_jax.train import log_evaluation, use_compilation_cache
from ragen_jax.training.learner import LossConfig, decayed, score_tokens
from ragen_jax.utils.errors import UserError
from ragen_jax.viewer.store import EpisodeWriter

_log = logging.getLogger(__name__)

# Texts from which the fresh tokenizer's pieces are cut, levels an environment.
_SAMPLE_LEVELS = 64
# Steps between two lines of metrics.
_LOG_EVERY = 10
# Sections and fields that do not change what has been learnt, and so may differ when a warm start goes on.
_OTHER_SECTIONS = (
  'train', 'algorithm', 'reward', 'filter', 'replay', 'monitor', 'checkpoint', 'logging', 'export', 'plan',
)  # fmt: skip
_FREE_FIELDS = (
  'num_iterations', 'compilation_cache', 'sft.output', 'sft.save_data', 'sft.eval_every', 'sft.checkpoint_every',
)  # fmt: skip
_NUMBER = r'\(\d+, \d+\)|\d+(?:\.\d+)?'


def prompt_pieces(specs: list[EnvGroup], config: ConfigDict) -> list[str]:
  """The fixed stretches of a run's texts: what is left when boards, numbers, coordinates and action names are cut out.

  Args:
    specs: the environments.
    config: reads `agent`.
  """
  sep = f' {config.agent.action_sep} '
  pieces = ['user\n', 'assistant\n', 'system\n' + SYSTEM, '<think>', '</think>', '<answer>', '</answer>']
  pieces += ['</think><answer>', sep, '10', *(str(spec.max_words) for spec in specs), '\n\n']
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


def _fresh_policy(config: ConfigDict, specs: list[EnvGroup], directory: str) -> build.Policy:
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
    dtype=build.compute_dtype(config),
    attend_by_row=build.attend_by_row(),
    rngs=nnx.Rngs(config.seed),
  )
  model = ActorCritic(qwen)
  mesh = make_mesh(**config.mesh)
  if mesh.size > 1:
    qwen.activation_sharding = row_sharding(mesh)
    params = build.param_state(model)
    nnx.update(model, place(params, tree_shardings(params, mesh)))
  return build.Policy(directory, model, tokenizer, build.make_sampler(model, tokenizer, mesh), mesh)


def train_sft(config: ConfigDict, workdir: str) -> None:
  """Trains on replies, of the solvers or of `sft.data`, and writes a Hugging Face checkpoint to `config.sft.output`.

  With LoRA the adapters and the value head are trained, and `config.export.lora` says what is written. What is there at
  `sft.output` is replaced in one step, once the new one is whole.

  Args:
    config: see configs/default.py.
    workdir: checkpoints, metrics and TensorBoard files are kept here; a warm start that was stopped goes on from there.

  Raises:
    UserError: the config cannot be run, the data cannot be learnt from, or the workdir is another config's.
  """
  check_config(config)
  check_sft(config)
  hf.check_target(config.sft.output)
  found = conversations.read(config.sft.data) if config.sft.data else []
  with contextlib.ExitStack() as stack:
    stack.enter_context(workdir_lock(workdir))
    others = {f'{section}.{name}' for section in _OTHER_SECTIONS for name in config[section]}
    record_config(workdir, config.to_dict(), free_fields=others | set(_FREE_FIELDS))
    use_compilation_cache(config, workdir)
    needs_specs = config.sft.from_scratch or not found
    specs = build.env_groups(config, config.sft.tags, config.sft.levels) if needs_specs else []
    scratch = stack.enter_context(tempfile.TemporaryDirectory())
    policy = _fresh_policy(config, specs, scratch) if config.sft.from_scratch else build.load_policy(config)
    if config.lora.rank:  # adapters would take the place of what they belong to
      for source in filter(None, (policy.directory, config.lora.path)):
        export.check_output(config.sft.output, 'sft.output', source)
    evaluator = evaluate.Evaluator(config, policy)
    if found:
      data = sft_data.join([sft_data.from_file(config, found, policy.tokenizer)])
    else:
      held_out = _held_out(config, evaluator)
      played = sft_data.play(config, specs, policy.tokenizer, held_out)
      if config.sft.save_data:
        count = conversations.write(config.sft.save_data, played, policy.tokenizer)
        _log.info('%d conversations written to %s', count, config.sft.save_data)
      data = sft_data.join(played)
    _run(config, workdir, policy, evaluator, data)


def _held_out(config, evaluator) -> frozenset[bytes]:
  """Levels that must not be demonstrated: those of `eval`, and those of the configs in `sft.skip_held_out_of`."""
  if not config.sft.skip_held_out:
    return frozenset()
  levels = set(evaluator.held_out())
  for name in config.sft.skip_held_out_of:
    other = command_line.load_config(f'configs/{name}.py', flag='')
    specs = build.env_groups(other, tuple(other.eval.tags), build.group_counts(other.eval, 'eval'))
    levels |= EnvStateManager(specs, 1).levels_from(other.eval.first_level)
  return frozenset(levels)


class SftTrainer:
  """The optimiser and the compiled programs."""

  def __init__(self, config: ConfigDict, policy: build.Policy):
    sft = config.sft
    self._mesh = policy.mesh
    graphdef, params = nnx.split(policy.model)
    self.params, self.frozen = lora.partition(params)
    loss_config = LossConfig(
      vocab_limit=policy.tokenizer.size, remat=config.model.remat, logits_chunk=config.model.logits_chunk
    )
    warmup = max(sft.steps // 20, 1)
    self.schedule = optax.warmup_cosine_decay_schedule(
      0.0, sft.learning_rate, warmup, max(sft.steps, warmup + 1), 0.1 * sft.learning_rate
    )
    optimizer = optax.chain(
      optax.clip_by_global_norm(config.optimizer.grad_clip),
      optax.adamw(
        self.schedule,
        b1=config.optimizer.b1,
        b2=config.optimizer.b2,
        weight_decay=config.optimizer.weight_decay,
        mask=decayed,
      ),
    )
    self.opt_state = self._as_weights(optimizer.init(self.params))

    def loss(params, frozen, batch):
      model = lora.merge(graphdef, params, frozen)
      logprobs, _, values = score_tokens(model, batch.tokens, batch.columns, loss_config, batch.segments)
      nll = -jnp.sum(logprobs * batch.weights)
      vf_loss = 0.5 * jnp.sum(jnp.square(values - batch.values) * batch.value_weights)
      return nll + sft.value_coef * vf_loss, jnp.stack([nll, vf_loss])

    @functools.partial(jax.jit, donate_argnums=2)
    def accumulate(params, frozen, gradients, batch):
      new, parts = jax.grad(loss, has_aux=True)(params, frozen, batch)
      return self._as_weights(jax.tree.map(jnp.add, gradients, new)), parts

    @jax.jit
    def apply(params, opt_state, gradients):
      updates, opt_state = optimizer.update(gradients, opt_state, params)
      return self._as_weights(optax.apply_updates(params, updates)), self._as_weights(opt_state)

    self._accumulate, self._apply = accumulate, apply
    self._losses = jax.jit(lambda params, frozen, batch: loss(params, frozen, batch)[1])

  def _as_weights(self, tree: Any) -> Any:
    """Lays a tree out as the weights are."""
    if self._mesh.size == 1:
      return tree
    return jax.lax.with_sharding_constraint(tree, tree_shardings(tree, self._mesh))

  def _place(self, batch: sft_data.Batch) -> sft_data.Batch:
    return batch if self._mesh.size == 1 else place_rows(batch, self._mesh)

  def gradients(self, batches: list[sft_data.Batch]) -> tuple[Any, jax.Array]:
    """Those of the whole step, and f32[2], its loss and value loss."""
    gradients, parts = jax.tree.map(jnp.zeros_like, self.params), 0.0
    for batch in batches:
      gradients, part = self._accumulate(self.params, self.frozen, gradients, self._place(batch))
      parts = parts + part
    return gradients, parts

  def step(self, batches: list[sft_data.Batch]) -> jax.Array:
    """One optimiser step; f32[2], loss and value loss before it."""
    gradients, parts = self.gradients(batches)
    self.params, self.opt_state = self._apply(self.params, self.opt_state, gradients)
    return parts

  def losses(self, batches: list[sft_data.Batch]) -> jax.Array:
    """f32[2], loss and value loss."""
    return sum(self._losses(self.params, self.frozen, self._place(batch)) for batch in batches)


def _run(
  config: ConfigDict,
  workdir: str,
  policy: build.Policy,
  evaluator: evaluate.Evaluator,
  data: sft_data.Conversations,
) -> None:
  sft = config.sft
  shown, withheld = sft_data.split(data, sft.val_fraction, config.seed)
  if sft.batch_size > len(shown):
    raise UserError(f'sft.batch_size={sft.batch_size}: must be at most the conversations to learn from, {len(shown)}')
  cut = functools.partial(
    sft_data.batches, data, batch_size=sft.batch_size, length_step=config.length_step, packing=sft.packing,
    shards=row_shards(policy.mesh),
  )  # fmt: skip
  trainer = SftTrainer(config, policy)
  rng = np.random.default_rng(config.seed + 1)
  names = ('loss', 'value_loss') if sft.value_coef > 0 else ('loss',)
  timer, seen = Timer(), 0
  with Checkpointer(workdir, keep=config.checkpoint.keep) as checkpointer:
    done = checkpointer.latest_step() or 0
    if done:
      like = {'params': trainer.params, 'opt_state': trainer.opt_state}
      state, meta = checkpointer.restore(like)
      if meta['data'] != data.checksum:
        raise UserError(f'--workdir={workdir}: what is learnt from has changed since; choose another --workdir')
      trainer.params, trainer.opt_state = state['params'], state['opt_state']
      _log.info('going on in %s after step %d' if done < sft.steps else '%s is finished: %d steps', workdir, done)
      for _ in range(done):  # the batches that are behind us
        rng.choice(len(shown), size=sft.batch_size, replace=False)
    start_step = done + 1 if done else 0
    kept = EpisodeWriter(workdir, start_step=start_step)
    with (
      Interrupt('step') as interrupt,
      MetricWriter(workdir, start_step=start_step) as writer,
      Progress(sft.steps, start=done, noun='step') as progress,
    ):
      for step in range(done + 1, sft.steps + 1):
        last = step == sft.steps
        with timer('step'):
          rows = shown[rng.choice(len(shown), size=sft.batch_size, replace=False)]
          batches = list(cut(rows))
          parts = trainer.step(batches)
          seen += int(data.length[rows].sum())
          if step % _LOG_EVERY == 0 or last:
            parts = np.asarray(parts).tolist()
        if step % _LOG_EVERY == 0 or last:
          columns = sum(batch.tokens.size for batch in batches)
          metrics = {f'sft/{name}': x for name, x in zip(names, parts, strict=False)}
          metrics |= {'sft/lr': float(trainer.schedule(step - 1))}
          metrics |= {'sft/padding': 1 - int(data.length[rows].sum()) / columns}
          metrics |= {'perf/throughput': seen / timer.pop()['timing_s/step']}
          writer.scalars(step, metrics)
          progress.update(step, {name.replace('_', ' '): x for name, x in zip(names, parts, strict=False)}, tokens=seen)
          seen = 0
        if last:
          _write(config, policy, trainer)
        if last or (sft.eval_every and step % sft.eval_every == 0):
          if len(withheld):
            parts = np.asarray(trainer.losses(list(cut(withheld)))).tolist()
            writer.scalars(step, {f'sft/val_{name}': x for name, x in zip(names, parts, strict=False)})
          evaluation = evaluator(lora.join(trainer.params, trainer.frozen), step)
          log_evaluation(writer, kept, progress, step, evaluation, config)
        if last or interrupt.requested or (sft.checkpoint_every and step % sft.checkpoint_every == 0):
          writer.flush()
          state = {'params': trainer.params, 'opt_state': trainer.opt_state}
          checkpointer.save(step, state, {'data': data.checksum})
        if interrupt.requested and not last:
          raise Stopped(interrupt.requested)
      if done >= sft.steps:
        _write(config, policy, trainer)
  _log.info('checkpoint: %s; metrics and TensorBoard files: %s', os.path.abspath(sft.output), workdir)


def _write(config: ConfigDict, policy: build.Policy, trainer: SftTrainer) -> None:
  """The weights so far, as a Hugging Face directory."""
  nnx.update(policy.model, trainer.params)
  has_head = any(hf.has_value_head(directory) for directory in (policy.directory, config.lora.path))
  export.write_policy(config.sft.output, config, policy, with_value_head=config.sft.value_coef > 0 or has_head)
