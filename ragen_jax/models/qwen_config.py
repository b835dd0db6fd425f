"""The shape of a decoder of `models.qwen`."""

from __future__ import annotations

import dataclasses
import itertools

from ragen_jax.models.feed_forward import ExpertsConfig
from ragen_jax.models.linear_attention import LinearConfig
from ragen_jax.models.rotary import LinearScaling, Llama3Scaling, frequency_axes
from ragen_jax.models.vision.config import VisionConfig

# Kinds of layers, by the names of Hugging Face: attention to all columns before, the memory of `linear_attention`, or
# attention to the last columns.
FULL, LINEAR, WINDOWED = 'full_attention', 'linear_attention', 'sliding_attention'


@dataclasses.dataclass(frozen=True)
class QwenConfig:
  """The shape of a model; fields correspond to those of a Hugging Face `config.json`.

  Of `ragen_jax`'s letters, `hidden_size` is D, `intermediate_size` F, `num_layers` L, `num_heads` N, `num_kv_heads` K,
  which divides N, and `head_dim` H, which is even.

  Attributes:
    architecture: 'qwen2' (q/k/v biases), 'qwen3' (RMS norm of each head's q and k, no biases), 'qwen3_5' (the same, an
      output gate of attention, norms that store their factor's difference from 1), 'llama' (none of these) or 'gemma3'
      (norms as in 'qwen3_5', and behind attention and MLP as well; GELU; embeddings times sqrt(D)).
    vocab_size: V, rows of the embedding; checkpoints pad it beyond the tokenizer's size.
    rope_theta: base of the wavelengths of the rotary embedding.
    rope_scaling: how the wavelengths are stretched; None for no scaling.
    rope_sections: frequencies of the rotary embedding on each axis of an image's positions; () for models that never
      read images.
    rope_interleaved: whether the axes take turns among the frequencies, see `rotary.frequency_axes`.
    vision: the shape of the tower that reads images; None for text models.
    rope_width: numbers of a head that the rotary embedding rotates, the first ones; 0 for all.
    layer_kinds: `FULL`, `LINEAR` or `WINDOWED` of each layer; () if all have full attention.
    linear: the shape of the linear attention; None if no layer has it.
    experts: the shape of the mixtures of experts that layers have in place of an MLP; None if no layer has one.
    mlp_layers: the layers that have an MLP of `intermediate_size` all the same, in order.
    window: columns that a column of a `WINDOWED` layer attends to, itself included; 0 if there is no such layer.
    window_rope_theta: `rope_theta` of these layers, whose wavelengths are not stretched.
    query_scalar: scores are divided by its square root; 0 for `head_dim`.
  """

  architecture: str = 'qwen2'
  vocab_size: int = 151936
  hidden_size: int = 896
  intermediate_size: int = 4864
  num_layers: int = 24
  num_heads: int = 14
  num_kv_heads: int = 2
  head_dim: int = 64
  rope_theta: float = 1e6
  rms_norm_eps: float = 1e-6
  tie_word_embeddings: bool = True
  rope_sections: tuple[int, ...] = ()
  rope_interleaved: bool = False
  vision: VisionConfig | None = None
  rope_scaling: Llama3Scaling | LinearScaling | None = None
  rope_width: int = 0
  layer_kinds: tuple[str, ...] = ()
  linear: LinearConfig | None = None
  experts: ExpertsConfig | None = None
  mlp_layers: tuple[int, ...] = ()
  window: int = 0
  window_rope_theta: float = 1e4
  query_scalar: float = 0

  def __post_init__(self):
    if self.layer_kinds and len(self.layer_kinds) != self.num_layers:
      raise ValueError(f'layer_kinds={self.layer_kinds}: must be {self.num_layers}, one for each layer')
    if (LINEAR in self.layer_kinds) != (self.linear is not None):
      raise ValueError(f'linear={self.linear}: goes with layer_kinds that have {LINEAR!r}, not {self.layer_kinds}')
    if (WINDOWED in self.layer_kinds) != (self.window > 0):
      raise ValueError(f'window={self.window}: goes with layer_kinds that have {WINDOWED!r}, not {self.layer_kinds}')
    if self.mlp_layers and (self.experts is None or not {*self.mlp_layers} < {*range(self.num_layers)}):
      raise ValueError(
        f'mlp_layers={self.mlp_layers}: goes with experts, and some of {self.num_layers} layers have them'
      )

  @property
  def kinds(self) -> tuple[str, ...]:
    """The kind of each layer."""
    return self.layer_kinds or (FULL,) * self.num_layers

  @property
  def attention_layers(self) -> int:
    """Number of layers with keys and values of all columns: the cache of a window is no smaller."""
    return self.num_layers - self.kinds.count(LINEAR)

  @property
  def with_experts(self) -> tuple[bool, ...]:
    """Whether each layer has experts in place of an MLP."""
    return tuple(self.experts is not None and i not in self.mlp_layers for i in range(self.num_layers))

  @property
  def choices_shape(self) -> tuple[int, int]:
    """(L, k): what the routers of all layers choose for a column. Layers without experts have a place, too."""
    return self.num_layers, self.experts.chosen

  @property
  def structures(self) -> tuple[tuple[str, bool], ...]:
    """The kind of each layer, and whether it has experts: layers of one structure have the same weights."""
    return tuple(zip(self.kinds, self.with_experts, strict=True))

  @property
  def period(self) -> int:
    """After how many layers their structures repeat, at least twice, or the number of layers."""
    kinds, n = self.structures, self.num_layers
    return next((p for p in range(1, n // 2 + 1) if kinds == (kinds[:p] * n)[:n]), n)

  @property
  def runs(self) -> tuple[int, ...]:
    """Lengths of the runs of layers of one structure within a `period`; one layer if all have one."""
    return tuple(len(list(run)) for _, run in itertools.groupby(self.structures[: self.period]))

  @property
  def mixer_matrices(self) -> int:
    """Numbers of the matrices of all layers but those of the MLP."""
    full = self.head_dim * ((2 + self.output_gate) * self.num_heads + 2 * self.num_kv_heads)
    c = self.linear
    linear = 0 if c is None else c.key_heads * c.channels + 2 * c.value_heads * (c.value_dim + 1)
    return self.hidden_size * (self.attention_layers * full + self.kinds.count(LINEAR) * linear)

  def mlp_matrices(self, *, active: bool = False) -> int:
    """Numbers of the matrices of all layers' MLPs and experts, or of those that a column uses."""
    mlps = self.num_layers - sum(self.with_experts)
    found = mlps * 3 * self.hidden_size * self.intermediate_size
    if self.experts is not None:
      used = self.experts.chosen if active else self.experts.count
      found += (self.num_layers - mlps) * self.experts.matrices(self.hidden_size, used)
    return found

  def mlp_parts(self) -> tuple[int, ...]:
    """The numbers that are divided among devices that share MLPs and experts."""
    c = self.experts
    widths = (self.intermediate_size,) if c is None or self.mlp_layers else ()
    return widths if c is None else (*widths, c.count, *[c.shared_width] * (c.shared_width > 0))

  def mlp_numbers(self, with_experts: bool, tensor: int) -> int:
    """Numbers of a column between the matrices of an MLP, on one of `tensor` devices that divide it.

    With experts, these are the rows of all chosen experts and what they give, which every device has room for.
    """
    if not with_experts:
      return self.intermediate_size // tensor
    c = self.experts
    return c.count + c.chosen * (c.width + self.hidden_size) + c.shared_width // tensor

  @property
  def rope_axes(self) -> tuple[int, ...]:
    """The axis of each frequency of the rotary embedding; () for models that never read images."""
    return frequency_axes(self.rope_sections, interleaved=self.rope_interleaved) if self.rope_sections else ()

  @property
  def qkv_bias(self) -> bool:
    return self.architecture == 'qwen2'

  @property
  def qk_norm(self) -> bool:
    return self.architecture in ('qwen3', 'qwen3_5', 'gemma3')

  @property
  def output_gate(self) -> bool:
    """Whether attention's output is multiplied by a gate, which `q_proj` computes behind each head's query."""
    return self.architecture == 'qwen3_5'

  @property
  def norm_offset(self) -> int:
    """What is added to the weights of norms."""
    return int(self.architecture in ('qwen3_5', 'gemma3'))

  @property
  def output_norms(self) -> bool:
    """Whether what attention and MLP give is normed before it is added."""
    return self.architecture == 'gemma3'

  @property
  def activation(self) -> str:
    """The activation of MLPs, by its name in `feed_forward.ACTIVATIONS`."""
    return 'gelu_pytorch_tanh' if self.architecture == 'gemma3' else 'silu'

  @property
  def embedding_scale(self) -> float:
    """What embeddings are multiplied by."""
    return self.hidden_size**0.5 if self.architecture == 'gemma3' else 1.0
