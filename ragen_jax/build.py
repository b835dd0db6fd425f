"""From a config to the parts of a run: environments, tokenizer, model, and the checks that come before any of them."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from ragen_jax import envs as registry
from ragen_jax.agent.agent_proxy import AgentProxy
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.context_manager import ContextManager, ContextSettings
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.episode import Limits
from ragen_jax.algorithms.advantages import ESTIMATORS
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.sharding import place, row_sharding, tree_shardings, weight_spec
from ragen_jax.envs.base import Budget
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.evaluation.evaluator import EvaluationSettings, Evaluator
from ragen_jax.models import lora, presets
from ragen_jax.models.checkpoint import peft as adapter_files
from ragen_jax.models.checkpoint.config import critic_directory, read_config
from ragen_jax.models.checkpoint.export import ExportSettings
from ragen_jax.models.checkpoint.load import load_model, load_value_head
from ragen_jax.models.checkpoint.names import weights
from ragen_jax.models.qwen import Qwen, QwenConfig
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.sampling.sampler import Sampler, Sampling
from ragen_jax.utils.errors import UserError

_log = logging.getLogger(__name__)

_BUDGET_FIELDS = ('max_turns', 'max_actions', 'max_actions_per_turn')

_Settings = TypeVar('_Settings')


def fill(settings: type[_Settings], section: Mapping[str, Any], **given: Any) -> _Settings:
  """A settings dataclass filled by name from a section of the config.

  Args:
    settings: a dataclass without defaults.
    section: values by field name; names that the dataclass does not have are ignored.
    **given: values that take precedence over the section's.

  Raises:
    TypeError: a field is neither in the section nor given.
  """
  names = {f.name for f in dataclasses.fields(settings)}
  found = {name: section[name] for name in names if name in section}
  return settings(**found | given)


def env_groups(
  config: ConfigDict, tags: tuple[str, ...], groups: tuple[int, ...], field: str = 'tags'
) -> list[EnvSpec]:
  """The environments behind tags.

  Args:
    config: the run's; reads `envs`.
    tags: names in `config.envs`.
    groups: prompt groups of each.
    field: where the tags come from, for the error.

  Raises:
    UserError: a tag or an option is not known, or has a value that is not allowed.
  """
  specs = []
  for tag, count in zip(tags, groups, strict=True):
    if tag not in config.envs:
      raise UserError(f'{field}: {tag!r} is not defined in envs; allowed: {", ".join(config.envs)}')
    options = dict(config.envs[tag])
    env_type = options.pop('type', None)
    if not isinstance(env_type, str):
      raise UserError(f'envs.{tag}.type={env_type!r}: must name an environment, such as {", ".join(registry.TYPES)}')
    # What is missing reads as None.
    numbers = {name: options.pop(name, None) for name in (*_BUDGET_FIELDS, 'max_words')}
    for name, value in numbers.items():
      if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f'envs.{tag}.{name}={value!r}: must be a whole number of at least 1')
    max_words = numbers.pop('max_words')
    budget = Budget(**numbers)
    try:
      env = registry.make(env_type, options)
      env.check_budget(budget)
    except ValueError as e:
      raise UserError(f'envs.{tag}: {e}') from e
    specs.append(EnvSpec(tag, env, budget, max_words, count))
  return specs


def group_counts(section: ConfigDict, name: str) -> tuple[int, ...]:
  """How many prompt groups each tag plays: `tag_groups`, or equal shares of `groups` where that is empty.

  Args:
    section: `config.train` or `config.eval`.
    name: which of them, for the errors.

  Returns:
    One number a tag, in the order of `section.tags`; they add up to `section.groups`.

  Raises:
    UserError: no tag or one named twice, or numbers that do not fit the tags and the groups.
  """
  tags, counts, total = tuple(section.tags), tuple(section.tag_groups), section.groups
  if not tags:
    raise UserError(f'{name}.tags=(): name at least one environment')
  if len(set(tags)) != len(tags):
    raise UserError(f'{name}.tags={tags}: a tag may be named once')
  if not counts:
    if total < 1 or total % len(tags):
      raise UserError(
        f'{name}.groups={total}: must be a positive multiple of the number of tags, {len(tags)}, '
        f'or be divided by {name}.tag_groups'
      )
    return (total // len(tags),) * len(tags)
  if len(counts) != len(tags) or not all(isinstance(count, int) and count > 0 for count in counts):
    raise UserError(f'{name}.tag_groups={counts}: must be one positive number for each of {name}.tags={tags}, or empty')
  if sum(counts) != total:
    raise UserError(
      f'{name}.tag_groups={counts}: must add up to {name}.groups={total}, not {sum(counts)}; '
      f'--config.{name}.tag_groups="()" divides them equally'
    )
  return counts


def context_manager(config: ConfigDict, tokenizer: ChatTokenizer, specs: list[EnvSpec]) -> ContextManager:
  """The prompts of a run."""
  return ContextManager(tokenizer, specs, fill(ContextSettings, config.agent))


def episode_limits(config: ConfigDict, specs: list[EnvSpec]) -> Limits:
  """The bounds of the episodes of some environments, in turns and in tokens."""
  max_turns = max(s.budget.max_turns for s in specs)
  return fill(Limits, config.agent, max_turns=max_turns, length_step=config.length_step)


def agent_proxy(
  config: ConfigDict,
  tokenizer: ChatTokenizer,
  sampler: Sampler,
  specs: list[EnvSpec],
  group_size: int,
  held_out: frozenset[bytes] = frozenset(),
) -> AgentProxy:
  """The rollout loop over a batch of environments, which are never reset to a level that is held out."""
  share = sampler.share
  envs = EnvStateManager(specs, group_size, share=share.index, shares=share.parts, held_out=held_out)
  return AgentProxy(envs, context_manager(config, tokenizer, specs), episode_limits(config, specs), share=share)


def sampling(section: ConfigDict) -> Sampling:
  """How `config.train` or `config.eval` draws tokens."""
  return Sampling(temperature=section.temperature, top_p=section.top_p, top_k=section.top_k)


def evaluation_settings(config: ConfigDict) -> EvaluationSettings:
  """How levels are played in the evaluations of a run."""
  return fill(EvaluationSettings, config.eval, episodes=config.logging.episodes)


def make_evaluator(config: ConfigDict, policy: Policy) -> Evaluator:
  """The evaluation of weights on the levels of `config.eval`; nothing is played before its first call."""
  specs = env_groups(config, tuple(config.eval.tags), group_counts(config.eval, 'eval'))
  proxy = agent_proxy(config, policy.tokenizer, policy.sampler, specs, config.eval.group_size)
  return Evaluator(evaluation_settings(config), proxy, policy.sampler)


def compute_dtype(config: ConfigDict) -> Any:
  """The type of computations."""
  if config.model.dtype == 'auto':
    return jnp.float32 if jax.default_backend() == 'cpu' else jnp.bfloat16
  return jnp.dtype(config.model.dtype)


@dataclasses.dataclass
class Policy:
  """A model and what belongs to it.

  Attributes:
    directory: the checkpoint that it came from.
    model: policy and critic.
    tokenizer: of the checkpoint.
    sampler: for the model's structure.
    mesh: the devices that it is laid out on.
  """

  directory: str
  model: ActorCritic
  tokenizer: ChatTokenizer
  sampler: Sampler
  mesh: Mesh

  def describe(self) -> str:
    """Size, precision and devices in a few words: '123k parameters, float32, 1 device (cpu)'."""
    params = param_state(self.model)
    trained, frozen = lora.partition(params)
    count = f'{_count(trained["policy"])} parameters'
    if frozen:
      count = f'{_count(frozen)} frozen parameters and {_count(trained["policy"])} in adapters'
    if self.model.critic is not None:
      count += f', {_count(params["critic"])} of the critic'
    devices = f'{jax.device_count()} device{"s" * (jax.device_count() > 1)} ({jax.devices()[0].device_kind})'
    return f'{count}, {jnp.dtype(self.model.policy.dtype).name}, {devices}'


def _count(params: Any) -> str:
  size = sum(x.size for x in jax.tree.leaves(params))
  return f'{size / 1e6:.0f}M' if size >= 1e6 else f'{size / 1e3:.0f}k'


def lora_config(config: ConfigDict) -> lora.LoraConfig | None:
  """The adapters that `config.lora` asks for; None where it is off.

  Raises:
    UserError: unknown targets.
  """
  try:
    targets = lora.parse_targets(config.lora.targets)
  except ValueError as e:
    raise UserError(f'lora.targets={config.lora.targets!r}: {e}') from e
  return lora.LoraConfig(config.lora.rank, config.lora.alpha, targets) if config.lora.rank else None


def attend_by_row() -> bool:
  """Whether rows may be looped over in attention: on one CPU device, where it is faster."""
  return jax.default_backend() == 'cpu' and jax.device_count() == 1


def weight_shardings(cfg: QwenConfig, mesh: Mesh) -> dict[tuple[str | int, ...], NamedSharding]:
  """Where each weight of a policy lives, by its path.

  Raises:
    UserError: the mesh does not divide one of them; nothing has been read or compiled yet.
  """
  return {w.path: NamedSharding(mesh, weight_spec('/'.join(map(str, w.path)), w.shape, mesh)) for w in weights(cfg)}


def load_policy(config: ConfigDict) -> Policy:
  """The policy that `config.model` names, with the adapters of `config.lora`; fresh is what no checkpoint has.

  Every weight goes from the file to its own devices, so that a model may be larger than any of them.

  Raises:
    UserError: there is no such checkpoint, it cannot be used, or the mesh does not divide it.
  """
  mesh = make_mesh(**config.mesh)
  directory = presets.resolve(config.model.preset, config.model.path)
  tokenizer = ChatTokenizer(directory)
  critic, home = None, directory
  qwen = _load_model(config, directory, tokenizer, mesh, jnp.dtype(config.model.param_dtype))
  adapters = lora_config(config)
  if adapters is not None:
    lora.attach(qwen, adapters, nnx.Rngs(config.seed))
  if config.lora.path:
    adapter_files.load(config.lora.path, qwen)
  if config.model.separate_critic:
    home = critic_directory(directory)
    critic = _load_model(config, home, tokenizer, mesh, jnp.float32, trunk_only=True)
  elif critic_directory(directory) != directory:
    _log.info('%s is left unused: model.separate_critic is off', critic_directory(directory))
  model = ActorCritic(qwen, critic)
  # The head beside adapters was trained on what they make of the policy's trunk, which a separate critic is not.
  beside = '' if critic is not None else config.lora.path
  if not (beside and load_value_head(beside, model.value_head)):
    load_value_head(home, model.value_head)
  # What no sharding function has placed yet.
  _, rest = nnx.split_state(param_state(model), _is_loaded, ...)
  nnx.update(model, place(rest, tree_shardings(rest, mesh)))
  a = config.algorithm
  values = ESTIMATORS[a.adv_estimator].needs_critic and a.old_logprobs == 'sampler'
  return Policy(directory, model, tokenizer, make_sampler(model, tokenizer, mesh, values=values), mesh)


def _is_loaded(path: tuple[str | int, ...], _: Any) -> bool:
  """Whether a weight comes from a checkpoint's model, and so lies on its own devices already."""
  return path[0] != 'value_head' and 'adapter' not in path


def _load_model(
  config: ConfigDict, directory: str, tokenizer: ChatTokenizer, mesh: Mesh, param_dtype: Any, trunk_only: bool = False
) -> Qwen:
  qwen = load_model(
    directory,
    dtype=compute_dtype(config),
    param_dtype=param_dtype,
    attend_by_row=attend_by_row(),
    trunk_only=trunk_only,
    sharding_fn=weight_shardings(read_config(directory), mesh).__getitem__,
  )
  if tokenizer.size > qwen.cfg.vocab_size:
    raise UserError(
      f'model.path={directory}: the tokenizer has {tokenizer.size} tokens, the model only {qwen.cfg.vocab_size}'
    )
  if mesh.size > 1:
    qwen.activation_sharding = row_sharding(mesh)
  return qwen


def make_sampler(
  model: ActorCritic, tokenizer: ChatTokenizer, mesh: Mesh | None = None, *, values: bool = True
) -> Sampler:
  """A sampler that ends replies where the tokenizer's chat format does; `values` says whether it records any."""
  return Sampler(model, stop_ids=tokenizer.stop_ids, vocab_limit=tokenizer.size, values=values, mesh=mesh)


def param_state(model: ActorCritic) -> nnx.State:
  """All weights of the model."""
  return nnx.split(model)[1]


def export_settings(config: ConfigDict, policy: Policy) -> ExportSettings:
  """How `config.export` writes the policy."""
  hub_name = None if config.model.path else presets.PRESETS.get(config.model.preset)
  return fill(
    ExportSettings,
    config.export,
    adapters=lora_config(config),
    base=hub_name or os.path.abspath(policy.directory),
    tokenizer_dir=policy.directory,
  )
