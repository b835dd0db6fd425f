"""How much of the update fits into a device's memory at once, known before anything is compiled."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ragen_jax.agent.language_model import LanguageModel, param_state
from ragen_jax.distributed import processes
from ragen_jax.distributed.sharding import optimizer_shardings, trained_shardings, tree_shardings
from ragen_jax.models import lora
from ragen_jax.models.attention import row_scores
from ragen_jax.models.attention_settings import HOLDING_SCORES
from ragen_jax.models.layers import is_frozen
from ragen_jax.models.qwen import REMAT, Qwen
from ragen_jax.models.qwen_config import LINEAR, QwenConfig
from ragen_jax.utils import host_memory

# Share of a device's memory that a run may fill. The rest is for the runtime, its libraries and fragmentation.
USABLE = 0.9
# Share of what the kept arrays leave on a GPU that a program may take in one piece: its allocator does not move arrays.
# A warm start of Qwen2.5-0.5B that could fill 21.6 GiB of a GPU found no 11 GiB in one piece after ten steps.
_ONE_PIECE = 0.75
# On CPUs, bytes that compilers and the libraries of matrix products take during a run.
WORKSPACE = 5 * 2**28
# On CPUs, what may be filled is a multiple of this, so that runs of one machine mostly choose the same.
_STEP = 2**29
# The arrays of logits that a CPU holds at once: its compiler fuses less.
_HOST_LOGITS = 5
# `attention.attend` holds no more scores than this on a device.
_MOST_SCORES = 2**28
# More columns than any device can take.
_MOST_COLUMNS = 2**24


def device_memory() -> int:
  """Bytes of the smallest device of all processes.

  On CPUs, what the arrays of this process hold and what the host has left, but for `WORKSPACE`, divided by the devices.
  What else the process holds is not left, so it counts.
  """
  limits = [(device.memory_stats() or {}).get('bytes_limit') for device in jax.local_devices()]
  if None in limits:
    limits = [max(host_memory.available() + _held() - WORKSPACE, 0) // _STEP * _STEP // jax.local_device_count()]
  return min(processes.gather(int(min(limits))))


def _held() -> int:
  """Bytes of the arrays of this process, on all its devices."""
  found = {}
  for x in jax.live_arrays():
    devices = len(x.sharding.addressable_devices)
    # Some arrays are views of others.
    buffer = x.unsafe_buffer_pointer() if devices == 1 else id(x)
    found[buffer] = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize * devices
  return sum(found.values())


def usable() -> float:
  """Bytes of a device that a run may fill."""
  return USABLE * device_memory()


@dataclasses.dataclass(frozen=True)
class SeenColumns:
  """What the columns of the update read of images.

  Attributes:
    tokens: of a table of images, for each column that reads it.
    patches: of the largest image.
    shards: parts into which rows are divided; each device holds the table of all.
  """

  tokens: float
  patches: int
  shards: int


@dataclasses.dataclass(frozen=True)
class UpdateMemory:
  """The memory of the update in bytes per device, by the columns that go through the model at once on one device.

  The program holds most either in the product with the vocabulary or in the backward pass through the layers.

  Attributes:
    kept: weights, reference, gradients and the optimiser's state.
    saved: by `qwen.REMAT`, what the layers keep for the backward pass: bytes, and bytes for each column.
    head: in the product with the vocabulary.
    head_column: the same for each column.
    layers: in the backward pass.
    layers_column: the same for each column, scores apart.
    scores_column: attention's scores, for each column.
    most_scores: attention's scores at most.
    head_columns: the most columns that count for the product with the vocabulary.
    one_piece: share of what `kept` leaves that a program may take.
  """

  kept: int
  saved: Mapping[str, tuple[int, int]]
  head: int
  head_column: int
  layers: int
  layers_column: int
  scores_column: int
  most_scores: int
  head_columns: int = _MOST_COLUMNS
  one_piece: float = 1.0

  def activations(self, columns: int, remat: str) -> int:
    """What the gradient program needs in addition to its arguments and results; `remat` is one of `qwen.REMAT`."""
    saved, saved_column = self.saved[remat]
    scores = min(columns * self.scores_column, self.most_scores)
    head = self.head + min(columns, self.head_columns) * self.head_column
    most = max(head, self.layers + columns * self.layers_column + scores)
    return saved + columns * saved_column + most

  def total(self, columns: int, remat: str) -> int:
    """All memory of the update."""
    return self.kept + self.activations(columns, remat)

  def columns(self, limit: float, remat: str) -> int:
    """The most columns whose total is at most `limit`, in one piece; 0 if none is."""
    room = self.one_piece * (limit - self.kept)
    found = bisect.bisect_right(range(_MOST_COLUMNS), room, key=lambda columns: self.activations(columns, remat))
    return max(found - 1, 0)


def update_memory(
  model: LanguageModel,
  *,
  logits_chunk: int,
  width: int,
  reference: bool,
  platform: str,
  images: SeenColumns | None,
  dtype: Any = None,
) -> UpdateMemory:
  """Estimates the memory of the update from the shapes of a model and its layout.

  With a bytes for a number in computations, L layers of width D with P weights in all, N query and K key/value heads of
  width H, an MLP of width F and a vocabulary of V, the program holds

    always          L D a for each column: the inputs of the layers, with remat of 'layers'
                    L N H a for each column more: what attention gives, with 'attention'
                    L (2 D + (2 N + 2 K) H + 2 F) a for each column: what 'elementwise' keeps
                    L w a for each column: all that the layers keep, with 'none'
                    P a: the layers' weights as computed with, if they are stacked, gathered over `data` or kept for the
                    backward pass
                    V D a: the embedding, if it is gathered over `data`
                    V D 4: the gradient of the embedding as head; on TPUs, a device has its part along `data` only until
                    the backward pass reaches the layers
    with logits     V D a: the head as computed with
                    V D a: a second gradient of the head, which adds up over the chunks
                    V (4 + a) for each position of `logits_chunk`: logits and their gradient
                    4 V 4 for each column without chunks: more is kept for the backward pass
    in the layers   V D 4: the gradient of the embedding as input, if it is another sum
                    P a: gradients of the layers' weights, if layers are scanned; divided over `data`
                    P (4 + a): TPUs only, the same once more and as they are added up, if layers are scanned; their
                    compiler has a place of its own for them
                    w a for each column, w = 6 D + 4 (N + 2 K) H + 6 F: the layer that is differentiated
                    3 T N 4 for each column: its scores, their softmax and gradient, up to the blocks of `attend`;
                    kernels of attention hold none

  A layer with linear attention, of J key heads of width E with G value heads of width W each, M = J (2 E + G W)
  channels and chunks of C columns, holds instead

    always          L J G W a for each column more: what it gives, with 'attention'
                    L (2 D + M + 3 J G W + 2 F) a for each column: what 'elementwise' keeps
    in the layers   w a for each column, w = 6 D + 4 (M + 2 J G W) + 6 F
                    2 d 4 for each column, d = 3 M + J G (5 C + 5 W + 5 E + E W / C): the chunks' matrices, their
                    memories and gradients

  In layers with E experts of width I, of which a column uses k, F is E + k (I + D), on every device, and the gradient
  of one of their kernels takes E D I 4 until it has the type of computations.

  With adapters, 'elementwise' keeps L (2 D + (N + 2 K) H + 2 F + 7 r) a for each column more, of rank r, and w is
  larger by twice that of a layer. Beside experts, F is the width of the shared one, which alone has adapters. Where
  rows attend one after the other, which is on one CPU, the program holds

    with logits     V D a: the head as computed with, if that is another type
                    5 V 4 for each position, up to `logits_chunk`
                    P a: the gradients of the layers' weights, if layers are scanned, which are set to 0 before
    in the layers   V D 4 twice: the sums of the gradient of the embedding, which logits do not hold; or V D a of frozen
                    weights as above
                    T^2 N 4 / 2: the scores of a row; 3 B T N 4 if it is long, of a block of B queries

  With images, a trunk also holds what `_tower` counts for each column.

  Frozen matrices in 8 bits need P instead of P a, and those of one layer are held as computed with, too.

  Weights are divided over `fsdp` and `tensor`, and those that are trained, with gradients and moments, over `data` as
  well; heads, MLP and vocabulary of activations over `tensor`; with `fsdp` two layers are gathered at a time, and the
  gradient of the head is whole on each device. The numbers of arrays (6, 4, 6, 3, 4) bound from above what compilers
  hold at the same time, which a test compares with a compiler's.

  `model` is concrete or abstract; its mesh divides weights and columns. `width` is T of a row or of a bin, `platform`
  that of `jax.Device`, and `dtype` that of computations, None for the model's. With `reference`, the first weights of
  the policy are kept for KL terms.
  """
  mesh, params = model.mesh, param_state(model.model)
  trained, frozen = lora.partition(params)
  tensor, copies = mesh.shape['tensor'], mesh.shape['data'] > 1
  kept = _bytes(frozen, mesh) + _bytes(trained, mesh, shardings=trained_shardings)
  kept += 3 * _bytes(trained, mesh, shardings=optimizer_shardings)  # gradients and two moments
  if reference:
    kept += _bytes(trained['policy'], mesh, shardings=trained_shardings)
  always = layers = widest = scores = one_row = stacked = 0
  saved = {remat: (0, 0) for remat in REMAT}
  for name, trunk in (('policy', model.model.policy), ('critic', model.model.critic)):
    if trunk is None:
      continue
    c, size = trunk.cfg, np.dtype(dtype or trunk.dtype).itemsize
    of_trunk, layer = _of_all_layers(c, size, tensor, _rank(params[name]))
    casts = _bytes(params[name]['layers'], mesh, size)
    for remat, column in of_trunk.items():
      once = casts if trunk.scan_layers or copies or remat == 'none' else 0
      saved[remat] = saved[remat][0] + once, saved[remat][1] + column
    if trunk.scan_layers and 'layers' in trained[name]:
      stacked += _bytes(trained[name]['layers'], mesh, size, optimizer_shardings)
      if platform == 'tpu':
        layers += _bytes(trained[name]['layers'], mesh, size + 4, optimizer_shardings)
    layers += size * _in_8_bits(params[name]) // (c.num_layers * tensor)
    layers += _gradient_of_experts(c, _rank(params[name]), tensor)
    if mesh.shape['fsdp'] > 1:
      layers += 2 * _bytes(params[name]['layers'], None, size) // (c.num_layers * tensor)
    if 'embed_tokens' in trained[name]:
      layers += _bytes({'embed_tokens': params[name]['embed_tokens']}, mesh, 4)
      if copies:
        always += _bytes({'embed_tokens': params[name]['embed_tokens']}, mesh, size)
    holds_scores = trunk.attention.implementation in HOLDING_SCORES
    if images is not None:
      tower = _tower(trunk, images, size)
      saved = {remat: (once, column + tower.saved[remat]) for remat, (once, column) in saved.items()}
      # The layers have given back what they held when the gradient of the tower begins.
      widest = max(widest, tower.block)
      scores = max(scores, tower.scores * holds_scores)
      if 'visual' in trained[name]:
        layers += _bytes(trained[name]['visual'], mesh, size)
    # The trunks run one after the other.
    widest = max(widest, layer)
    if trunk.attention.by_row:
      one_row = max(one_row, 4 * row_scores(width) * c.num_heads // tensor)
    elif holds_scores:
      scores = max(scores, 3 * 4 * width * c.num_heads // tensor)
  layers += stacked
  c, size = model.model.policy.cfg, np.dtype(dtype or model.model.policy.dtype).itemsize
  embedding, logits = c.vocab_size * c.hidden_size // tensor, 4 * c.vocab_size // tensor
  if model.model.policy.attention.by_row:
    head_type = params['policy']['embed_tokens' if c.tie_word_embeddings else 'lm_head']
    if 'embed_tokens' in trained['policy']:
      layers += 4 * embedding
    cast = 0 if all(x.dtype.itemsize == size for x in jax.tree.leaves(head_type)) else size * embedding
    return UpdateMemory(
      kept, saved=saved, head=always + cast + stacked, head_column=_HOST_LOGITS * logits,
      head_columns=logits_chunk or _MOST_COLUMNS, layers=always + cast + layers + one_row, layers_column=widest,
      scores_column=scores, most_scores=3 * 4 * _MOST_SCORES,
    )  # fmt: skip
  head = size * embedding
  if copies and c.tie_word_embeddings and 'embed_tokens' in trained['policy']:
    head -= size * embedding // mesh.shape['fsdp']  # it is the embedding that was gathered
  if 'embed_tokens' in trained['policy']:
    always += 4 * embedding // mesh.shape['fsdp']
    head += (4 + size) * embedding - 4 * embedding // mesh.shape['fsdp'] if logits_chunk else 0
    if copies and logits_chunk and platform == 'tpu':  # it is exchanged before it is cast
      head -= 4 * (embedding - embedding // mesh.shape['data']) // mesh.shape['fsdp']
  return UpdateMemory(
    kept, saved=saved, head=always + head + logits_chunk * (logits + size * c.vocab_size // tensor),
    head_column=0 if logits_chunk else 4 * logits, layers=always + layers, layers_column=widest, scores_column=scores,
    most_scores=3 * 4 * _MOST_SCORES, one_piece=1.0 if platform in ('cpu', 'tpu') else _ONE_PIECE,
  )  # fmt: skip


def _of_all_layers(c: QwenConfig, size: int, tensor: int, rank: int) -> tuple[dict[str, int], int]:
  """The sums over the layers of what `_of_column` says is kept, and the most that one of them holds."""
  by_structure = {of: _of_column(c, *of, size, tensor, rank) for of in set(c.structures)}
  kept = {remat: sum(by_structure[of][0][remat] for of in c.structures) for remat in REMAT}
  return kept, max(held for _, held in by_structure.values())


def _gradient_of_experts(c: QwenConfig, rank: int, tensor: int) -> int:
  """Bytes of the float32 gradient of one kernel of all experts of a layer; 0 if they are frozen or there are none."""
  if c.experts is None or rank:
    return 0
  return 4 * c.experts.count * c.hidden_size * c.experts.width // tensor


def _of_column(
  c: QwenConfig, kind: str, with_experts: bool, size: int, tensor: int, rank: int
) -> tuple[dict[str, int], int]:
  """Bytes for each column of a layer: kept for the backward pass, by `remat`, and held while it is differentiated.

  `size` is the bytes of a number in computations, `tensor` the parts that heads and MLP are divided into, and `rank`
  that of adapters, 0 for none.
  """
  chunks = 0
  if kind == LINEAR:
    n = c.linear
    read = n.value_heads * n.value_dim
    heads = n.key_heads * n.channels + 2 * read
    chunks = 2 * 4 * n.chunk_values // tensor
  else:
    read = c.num_heads * c.head_dim
    heads = read * (1 + c.output_gate) + 2 * c.num_kv_heads * c.head_dim
  mlp = c.mlp_numbers(with_experts, tensor)
  if c.output_norms:  # and an activation of more operations, and scaled queries
    chunks += size * (9 * c.hidden_size + 2 * mlp + heads // tensor)
  layer = chunks + size * (6 * (c.hidden_size + mlp) + 4 * heads // tensor)
  costly = size * (2 * (c.hidden_size + mlp) + (heads + read) // tensor)
  if rank:
    own = c.experts.shared_width // tensor if with_experts else mlp
    adapted = size * (2 * (c.hidden_size + own) + heads // tensor + 7 * rank)
    layer, costly = layer + 2 * adapted, costly + adapted
  attended = size * read // tensor
  inputs = size * c.hidden_size
  held = 2 * layer if c.window else layer  # a turn of the loop has layers with and without windows
  return {'none': layer, 'elementwise': costly, 'attention': inputs + attended, 'layers': inputs}, held


@dataclasses.dataclass(frozen=True)
class _Tower:
  """What a trunk holds for the images of each column, in bytes.

  Attributes:
    saved: until the gradient, by `qwen.REMAT`.
    block: in the gradient of a block.
    scores: of attention, in the gradient of a block.
  """

  saved: Mapping[str, int]
  block: int
  scores: int


def _tower(trunk: Qwen, images: SeenColumns, size: int) -> _Tower:
  """Estimates what the tower of a trunk holds, with `size` bytes for a number in computations.

  The table has 1 + n features of width D for each token, of n levels of DeepStack, on every device. A frozen tower
  does not run. With b blocks of width V and an MLP of width F, a trained one holds

    for each token      the table's gradient
    for each patch      its numbers, in float32 and as computed with
                        4 (1 + n) V a: the mergers
                        b V a: the inputs of the blocks
                        b w a instead: all that they keep, with remat of 'none' or blocks that are not scanned
                        w a, w = 18 V + 6 F: the block that is differentiated
                        3 P N 4: its scores with the P patches of an image
  """
  c = trunk.cfg.vision
  levels = 1 + len(c.deepstack_blocks)
  table = images.tokens * images.shards * levels * c.out_hidden_size * size
  if is_frozen(trunk.visual):
    return _Tower(dict.fromkeys(REMAT, math.ceil(table)), 0, 0)
  patches = images.tokens * c.merge_size**2
  block = size * (18 * c.hidden_size + 6 * c.intermediate_size)
  always = 2 * table + patches * ((4 + size) * c.patch_values + 4 * levels * c.hidden_size * size)
  everything = math.ceil(always + patches * c.depth * block)
  inputs = math.ceil(always + patches * c.depth * c.hidden_size * size) if trunk.visual.scan_blocks else everything
  saved = dict.fromkeys(REMAT, inputs) | {'none': everything}
  return _Tower(saved, math.ceil(patches * block), math.ceil(patches * 3 * 4 * images.patches * c.num_heads))


def _rank(params: Any) -> int:
  """The rank of a trunk's adapters; 0 for none."""
  adapters = [x for path, x in nnx.to_flat_state(params['layers']) if path[-1] == 'lora_b']
  return adapters[0].shape[0] if adapters else 0


def _in_8_bits(params: Any) -> int:
  """Weights of a trunk's layers that are kept in 8 bits."""
  return sum(x.size for x in jax.tree.leaves(params['layers']) if x.dtype == np.int8)


def _bytes(tree: Any, mesh: Mesh | None, size: int = 0, shardings: Callable[[Any, Mesh], Any] = tree_shardings) -> int:
  """Bytes of a tree of weights on one device of a mesh; of one copy without a mesh. `size` is that of all but int8."""
  leaves = jax.tree.leaves(tree)
  shapes = [x.shape for x in leaves]
  if mesh is not None:
    shapes = [s.shard_shape(x.shape) for x, s in zip(leaves, jax.tree.leaves(shardings(tree, mesh)), strict=True)]
  own = [x.dtype.itemsize if x.dtype == np.int8 or not size else size for x in leaves]
  return sum(math.prod(shape) * n for shape, n in zip(shapes, own, strict=True))
