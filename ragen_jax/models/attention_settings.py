"""How a model attends, and what is known of its kernels without importing them."""

from __future__ import annotations

import dataclasses

from jax.sharding import Mesh

from ragen_jax.models import trees

# The implementations of `attention.causal`.
IMPLEMENTATIONS = ('einsum', 'blocks', 'flash', 'splash', 'cudnn')
# Those that hold scores in memory, of all columns or of blocks.
HOLDING_SCORES = ('einsum', 'blocks')

# Columns of a row whose keys, values and gradients 'flash' holds on the chip, for heads of up to 128: 3 kB each. Wider
# rows attend as with 'splash', which knows sequences and no trees.
MOST_FLASH_COLUMNS = 8192

# The name of results that a backward pass may keep instead of attending again. Kernels without it have operations of
# their own, whose results include the sums that their backward pass needs.
KEPT = 'attention'


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
  """How a model attends; `attention_choice.choose_attention` chooses it for the devices.

  Attributes:
    implementation: one of `IMPLEMENTATIONS`: 'einsum' is `attention.attend` with all scores in memory, 'blocks' is
      `attention.attend_causal_by_row`, and the others are the kernels of `attention_kernels`.
    interpret: run the kernels of 'flash' and 'splash' as ordinary operations, on any device; for tests.
  """

  implementation: str
  mesh: Mesh | None
  interpret: bool = False

  @property
  def shards(self) -> int:
    """Number of devices that the scores are divided over."""
    return 1 if self.mesh is None else self.mesh.size

  @property
  def for_tpu(self) -> bool:
    """Whether the kernels are those of TPUs."""
    return self.implementation in ('flash', 'splash')

  def tree_columns(self, head_dim: int) -> int:
    """Columns of the widest rows that may be token trees, see `models.trees`; 0 for sequences only."""
    if self.implementation == 'flash':
      return MOST_FLASH_COLUMNS // -(-head_dim // 128)
    return 0 if self.implementation == 'splash' else trees.ALWAYS

  @property
  def by_row(self) -> bool:
    """Whether rows attend one after the other to any columns. Rows that are divided over devices cannot."""
    return self.implementation == 'blocks' and self.mesh is None


EINSUM = AttentionSettings('einsum', None)
