"""A language model for playing and training: weights, tokenizer, sampler and mesh."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.distributed.sharding import place, row_sharding, trained_spec, weight_spec
from ragen_jax.models import int8, lora, presets
from ragen_jax.models.attention_choice import choose_attention
from ragen_jax.models.checkpoint import peft
from ragen_jax.models.checkpoint.config import critic_directory, read_config
from ragen_jax.models.checkpoint.load import load_model, load_value_head
from ragen_jax.models.checkpoint.names import weights
from ragen_jax.models.layers import freeze
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.qwen_config import QwenConfig
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.models.vision.encoder import Encoder
from ragen_jax.models.vision.processor import ProcessorConfig, read_processor
from ragen_jax.sampling import division
from ragen_jax.sampling.sampler import Sampler
from ragen_jax.utils.errors import UserError

# Values of `config.model.vision`.
VISION = ('frozen', 'trained')
# Values of `config.model.weights`.
WEIGHTS = (FLOAT, INT8) = 'float', 'int8'

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class LanguageModel:
  """A model with its tokenizer, sampler and mesh.

  Attributes:
    directory: directory of the loaded checkpoint.
    model: policy and critic.
    processor: how images become patches; None for models that read text only.
    encoders: the vision towers by trunk, 'policy' and 'critic'; empty for models that read text only. A critic whose
      frozen tower is that of the policy has none of its own, see `has_policys_tower`.
  """

  directory: str
  model: ActorCritic
  tokenizer: ChatTokenizer
  sampler: Sampler
  mesh: Mesh
  processor: ProcessorConfig | None = None
  encoders: Mapping[str, Encoder] = dataclasses.field(default_factory=dict)

  def describe(self) -> str:
    """Size, precision and devices in a few words: '123k parameters, float32, 1 device (cpu)'."""
    params = param_state(self.model)
    trained, frozen = lora.partition(params)
    count = f'{_count(trained["policy"])} parameters'
    if frozen:
      kind = 'in adapters' if lora.has_adapters(params) else 'that are trained'
      count = f'{_count(frozen)} frozen parameters and {_count(trained["policy"])} {kind}'
    if self.model.critic is not None:
      count += f', {_count(params["critic"])} of the critic'
    devices = f'{jax.device_count()} device{"s" * (jax.device_count() > 1)} ({jax.devices()[0].device_kind})'
    of_layers = ', matrices of layers in int8' if self.model.policy.int8 else ''
    return f'{count}, {jnp.dtype(self.model.policy.dtype).name}{of_layers}, {devices}'


@dataclasses.dataclass(frozen=True)
class ModelSettings:
  """The model to load. Fields of `config.model`, and the following.

  Attributes:
    adapters: LoRA adapters; None for none.
    adapter_path: directory of initial adapters; '' for fresh ones.
    seed: seed of fresh adapters.
    records_values: whether the sampler records values.
    replay_experts: whether it records experts. Field of `config.algorithm`.
    decode_shards: `config.agent.decode_shards`, see `sampling.division`.
  """

  preset: str
  path: str
  param_dtype: str
  separate_critic: bool
  weights: str
  vision: str
  attention: str
  dtype: Any
  adapters: lora.LoraConfig | None
  adapter_path: str
  seed: int
  records_values: bool
  replay_experts: bool
  decode_shards: int


def load(settings: ModelSettings, mesh: Mesh) -> LanguageModel:
  """Loads a checkpoint with its adapters, and initialises a missing value head or missing adapters.

  Each weight goes from the file directly to its devices, so a model may be larger than the memory of one device.

  Raises:
    UserError: the checkpoint does not exist or cannot be used, or the mesh does not divide its weights.
  """
  directory = presets.resolve(settings.preset, settings.path)
  cfg = read_config(directory)
  check_vision(settings.vision, cfg)
  tokenizer = ChatTokenizer(directory, images=cfg.vision is not None)
  processor = None if cfg.vision is None else read_processor(directory, cfg.vision)
  if processor is not None and tokenizer.placeholder != cfg.vision.image_token_id:
    raise UserError(
      f"model.path={directory}: config.json has image_token_id={cfg.vision.image_token_id}, and the tokenizer's "
      f'placeholder of images is {tokenizer.placeholder}'
    )
  critic, home = None, directory
  param_dtype = jnp.dtype(settings.param_dtype)
  qwen = _load_trunk(directory, tokenizer, mesh, settings, param_dtype)
  if settings.adapters is not None:
    lora.attach(qwen, settings.adapters, nnx.Rngs(settings.seed))
  if settings.adapter_path:
    peft.load(settings.adapter_path, qwen)
  if settings.separate_critic:
    home = critic_directory(directory)
    critic = _load_trunk(home, tokenizer, mesh, settings, jnp.float32, trunk_only=True)
  elif critic_directory(directory) != directory:
    _log.info('%s is not used: model.separate_critic is off', critic_directory(directory))
  model = ActorCritic(qwen, critic)
  # A value head saved with adapters belongs to the adapted trunk, so a separate critic must not load it.
  beside = '' if critic is not None else settings.adapter_path
  if not (beside and load_value_head(beside, model.value_head)):
    load_value_head(home, model.value_head)
  # Places the weights that no loader has placed yet; the others have these layouts already.
  params = param_state(model)
  nnx.update(model, place(params, lora.shardings(params, mesh)))
  shards = division.choose(settings.decode_shards, model.policy.cfg, settings.dtype, mesh)
  sampler = make_sampler(
    model, tokenizer, mesh, values=settings.records_values, experts=settings.replay_experts, decode_shards=shards
  )
  shared = has_policys_tower(settings.vision, settings.param_dtype, directory)
  encoders = {} if processor is None else make_encoders(model, processor, mesh, shared=shared)
  return LanguageModel(directory, model, tokenizer, sampler, mesh, processor, encoders)


def check_vision(vision: str, cfg: QwenConfig) -> None:
  """Raises UserError if a tower that the model does not have is to be trained."""
  if vision == 'trained' and cfg.vision is None:
    raise UserError(f'model.vision={vision!r}: the model reads text only, so there is no vision tower to train')


def has_policys_tower(vision: str, param_dtype: str, directory: str) -> bool:
  """Whether a separate critic, whose weights are float32, has the weights of the policy's tower for the whole run."""
  return vision == 'frozen' and jnp.dtype(param_dtype) == jnp.float32 and critic_directory(directory) == directory


def make_encoders(model: ActorCritic, processor: ProcessorConfig, mesh: Mesh, *, shared: bool) -> dict[str, Encoder]:
  """The vision towers of the trunks of a model that reads images; one for both if they are `shared`."""
  trunks = {'policy': model.policy, 'critic': None if shared else model.critic}
  divided = mesh if mesh.size > 1 else None
  return {name: Encoder(trunk, processor, divided) for name, trunk in trunks.items() if trunk is not None}


def make_sampler(
  model: ActorCritic,
  tokenizer: ChatTokenizer,
  mesh: Mesh | None = None,
  *,
  values: bool = True,
  experts: bool = False,
  decode_shards: int = 1,
) -> Sampler:
  """A sampler that ends replies at the stop tokens of the tokenizer's chat format.

  Args:
    mesh: the devices that rows are divided over.
    values: whether to record the critic's values.
    experts: whether to record the experts that tokens are given to, if there are any.
    decode_shards: see `Sampler`.
  """
  return Sampler(
    model,
    stop_ids=tokenizer.stop_ids,
    vocab_limit=tokenizer.size,
    banned=tokenizer.banned,
    values=values,
    experts=experts,
    mesh=mesh,
    decode_shards=decode_shards,
  )


def param_state(model: ActorCritic) -> nnx.State:
  return nnx.split(model)[1]


def weight_shardings(
  cfg: QwenConfig, mesh: Mesh, *, frozen: bool = False
) -> dict[tuple[str | int, ...], NamedSharding]:
  """The layout of each weight of a trunk between programs, by its path. Weights under adapters are `frozen`.

  Raises:
    UserError: the mesh does not divide a weight. At this point nothing has been read or compiled.
  """
  spec = weight_spec if frozen else trained_spec
  return {w.path: NamedSharding(mesh, spec('/'.join(map(str, w.path)), w.whole_shape, mesh)) for w in weights(cfg)}


def _load_trunk(
  directory: str,
  tokenizer: ChatTokenizer,
  mesh: Mesh,
  settings: ModelSettings,
  param_dtype: Any,
  *,
  trunk_only: bool = False,
) -> Qwen:
  cfg, frozen = read_config(directory), settings.adapters is not None and not trunk_only
  qwen = load_model(
    directory,
    dtype=settings.dtype,
    param_dtype=param_dtype,
    attention=choose_attention(settings.attention, cfg, settings.dtype, mesh),
    trunk_only=trunk_only,
    sharding_fn=weight_shardings(cfg, mesh, frozen=frozen).__getitem__,
    in_int8=frozen and settings.weights == INT8,
  )
  qwen.int8 = settings.weights == INT8 and not trunk_only
  if tokenizer.size > qwen.cfg.vocab_size:
    raise UserError(
      f'model.path={directory}: the tokenizer has {tokenizer.size} tokens, the model only {qwen.cfg.vocab_size}'
    )
  if mesh.size > 1:
    qwen.activation_sharding = row_sharding(mesh)
  if qwen.visual is not None and settings.vision == 'frozen':
    freeze(qwen.visual)
  return qwen


def _count(params: Any) -> str:
  size = sum(x.size for x in int8.leaves(params))
  return f'{size / 1e6:.0f}M' if size >= 1e6 else f'{size / 1e3:.0f}k'
