"""The time of a compiled program on a chip, its kernels and what it sends to other chips, estimated from its text.

For TPUs, the compiler writes its own estimate in cycles beside each kernel. Where there is none, a kernel takes the
longer of two times: its products at a share of the chip's peak, and its bytes of HBM at a share of the bandwidth.
TPUs copy between HBM and the memory of the core while kernels run. The schedule is replayed: a copy begins when the
memory is free, and whoever needs it waits for its end. Collectives are not part of the time; their bytes are told by
kind.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ragen_jax.distributed.chips import Chip
from ragen_jax.planning.hlo import Instruction, Program

# Shares of peak and bandwidth that large kernels are assumed to reach.
_PRODUCTS, _MEMORY = 0.8, 0.9
# Attention kernels: share of what the matrix units can reach for the width of the heads. Those of `attention_tpu` by
# name. By the instructions that libtpu schedules for a row of 1,408 columns, heads of 64 and groups of 7, the three
# kernels of splash attention have 0.40, 0.58 and 0.56.
_ATTENTION, _ATTENTION_OF = 0.5, {'attention_forward': 0.64, 'attention_backward': 0.85}
# Beginning of the names of the TPU compiler's kernels for `jax.lax.ragged_dot`.
_GROUPED = 'ragged-dot'
# Least seconds from the start of a GPU's kernel to the start of the next.
_GPU_KERNEL = 2e-6
# The compiler writes cycles above this where it has no estimate.
_NO_CYCLES = 2**60

_COLLECTIVES = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute', 'ragged-all-to-all')
# Copies that go on while kernels run. Their results are both ends and a counter; those of slices have the source first.
_COPIES, _ENDS_OF_COPIES = ('copy-start', 'slice-start'), ('copy-done', 'slice-done')
_CALLS = ('while', 'conditional', 'call', 'async-start')
# Instructions that move no data.
_FREE = frozenset({
  'parameter', 'constant', 'get-tuple-element', 'tuple', 'bitcast', 'after-all', 'partition-id', 'replica-id', 'domain',
  'opt-barrier', 'add-dependency', 'async-done', 'async-update', 'send-done', 'recv-done',
  'all-gather-done', 'all-reduce-done', 'collective-permute-done',
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Work:
  """What a device does."""

  seconds: float = 0.0  # without collectives, with `memory_waits`
  kernels: int = 0  # number of those that are started
  collectives: dict[str, float] = dataclasses.field(default_factory=dict)  # bytes of results, by kind
  sent: float = 0.0  # bytes that a device sends at least for collectives, in a ring
  waits: float = 0.0  # seconds that the collectives take besides, however few their bytes
  loops: tuple[Work, ...] = ()  # whose number of runs the compiler does not know, and those in them, one run each
  memory_waits: float = 0.0  # of `seconds`, those in which the next kernel waits for a copy between HBM and the core

  def __add__(self, other: Work) -> Work:
    return Work(
      self.seconds + other.seconds,
      self.kernels + other.kernels,
      {
        kind: self.collectives.get(kind, 0) + other.collectives.get(kind, 0)
        for kind in self.collectives | other.collectives
      },
      self.sent + other.sent,
      self.waits + other.waits,
      self.loops + other.loops,
      self.memory_waits + other.memory_waits,
    )

  @classmethod
  def from_dict(cls, found: dict[str, Any] | None) -> Work | None:
    """The work that `dataclasses.asdict` gave."""
    if found is None:
      return None
    loops = tuple(cls.from_dict(x) for x in found['loops'])
    return cls(**found | {'loops': loops})

  def times(self, n: float) -> Work:
    """`n` runs; its loops are still told for one run."""
    collectives = {kind: size * n for kind, size in self.collectives.items()}
    return dataclasses.replace(
      self,
      seconds=self.seconds * n,
      kernels=self.kernels * n,
      collectives=collectives,
      sent=self.sent * n,
      waits=self.waits * n,
      memory_waits=self.memory_waits * n,
    )

  def link_seconds(self, chip: Chip) -> float:
    """Seconds of the collectives, none of them hidden behind work."""
    return self.sent / chip.link_bandwidth + self.waits


def work_of(program: Program, chip: Chip, devices: int, loop_trips: int = 1) -> Work:
  """The work of a whole program on one of its devices; loops that end when data says so run `loop_trips` times."""
  return _Reader(program, chip, devices, loop_trips).of(program.entry)


class _Reader:
  """Adds up the work of the computations of a program."""

  def __init__(self, program: Program, chip: Chip, devices: int, loop_trips: int):
    self._program, self._chip, self._devices, self._loop_trips = program, chip, devices, loop_trips
    self._known: dict[str, Work] = {}

  def of(self, name: str) -> Work:
    if name not in self._known:
      self._known[name] = self._replay(self._program.computations.get(name, {}))
    return self._known[name]

  def _replay(self, lines: dict[str, Instruction]) -> Work:
    """The work of instructions in the order of their schedule, with the waits for copies."""
    total, clock, free = Work(), 0.0, 0.0  # seconds; `free`: when HBM has done what was asked of it
    ready: dict[str, float] = {}  # when a copy ends
    for x in lines.values():
      if x.opcode in _COPIES:
        free = ready[x.name] = max(free, clock) + x.results[1].bytes / self._chip.hbm_bandwidth
      elif x.opcode in _ENDS_OF_COPIES:
        waits = max(ready.get(x.operands[0], 0.0) - clock, 0.0)
        clock += waits
        total += Work(waits, memory_waits=waits)
      else:
        work = self._one(x, lines)
        if work.seconds and x.opcode not in _CALLS:  # what a kernel reads and writes itself delays the copies
          operands = [lines[name] for name in x.operands if name in lines]
          moved = self._moved(x, operands) / self._chip.hbm_bandwidth
          free = max(free, clock) + min(moved, work.seconds)
        clock += work.seconds
        total += work
    return total

  def _one(self, x: Instruction, lines: dict[str, Instruction]) -> Work:
    if x.opcode == 'while':
      return self._loop(x)
    if x.opcode == 'conditional':
      return max((self.of(name) for name in x.called), key=lambda w: w.seconds, default=Work())
    if x.opcode in ('call', 'async-start'):
      return sum((self.of(name) for name in x.called), Work())
    kind = x.opcode.removesuffix('-start')
    if kind in _COLLECTIVES:
      return self._collective(kind, x)
    if x.opcode in _FREE:
      return Work()
    inside = self._collectives_inside(x) if x.opcode == 'fusion' else Work()
    return Work(self._kernel_seconds(x, lines), 1) + inside

  def _loop(self, x: Instruction) -> Work:
    trips = self._program.trip_count(x)
    body = sum((self.of(name) for name in x.called), Work())
    if trips is not None:
      return body.times(trips)
    return dataclasses.replace(body.times(self._loop_trips), loops=(body,))

  def _collective(self, kind: str, x: Instruction) -> Work:
    results = x.results
    if x.opcode.endswith('-start') and kind != 'all-reduce':
      # (operands, results); tokens and counters apart.
      data = [a for a in results if a.shape]
      results = tuple(data[len(data) // 2 :])
    size = sum(a.bytes for a in results)
    group = _group_size(x, self._devices)
    # A sum that all devices get is a sum whose parts stay divided, and a gather of the parts.
    exchanges = 2 if kind == 'all-reduce' else 1
    return Work(0.0, 1, {kind: size}, _sent(kind, size, group), exchanges * self._chip.exchange_seconds(group))

  def _collectives_inside(self, x: Instruction) -> Work:
    """Of a fusion; a reduction that keeps its own part only sends half as much as one that gives all to all.

    A collective that other work hides stands in all kernels that run meanwhile. It counts in the one that starts it.
    """
    found = Work()
    for lines in self._program.called(x):
      if _goes_on(x, lines):
        continue
      for y in lines.values():
        kind = y.opcode.removesuffix('-start')
        if kind not in _COLLECTIVES:
          continue
        work = self._collective(kind, y)
        if kind == 'all-reduce' and any('all-reduce-scatter' in name for name in (x.name, *x.called)):
          work = Work(0.0, 1, {'reduce-scatter': work.collectives[kind]}, work.sent / 2, work.waits / 2)
        found += dataclasses.replace(work, kernels=0)
    return found

  def _kernel_seconds(self, x: Instruction, lines: dict[str, Instruction]) -> float:
    cycles = x.attribute(r'"estimated_cycles":"(\d+)"')
    if cycles is not None and int(cycles) < _NO_CYCLES:
      return int(cycles) / self._chip.clock
    operands = [lines[name] for name in x.operands if name in lines]
    if x.opcode == 'custom-call' and _is_kernel(x) and not x.name.startswith(_GROUPED):
      return self._attention_seconds(x, operands)
    if self._chip.platform == 'tpu' and x.opcode not in ('fusion', 'convolution', 'dot', 'custom-call', 'sort'):
      return 0.0  # what the compiler gives no cycles is done while something else runs
    flops, moved = self._operations(x, lines), self._moved(x, operands)
    least = _GPU_KERNEL if self._chip.platform == 'cuda' else 0.0
    return max(flops / (_PRODUCTS * self._chip.flops), moved / (_MEMORY * self._chip.hbm_bandwidth), least)

  def _attention_seconds(self, x: Instruction, operands: list[Instruction]) -> float:
    """A kernel that the compiler knows nothing of, taken for attention.

    It takes [..., heads, T, H] or [..., heads, H, T], or on GPUs [..., T, heads, H].
    """
    inputs = [a for y in operands for a in y.results]
    moved = sum(a.bytes for a in (*inputs, *x.results) if not a.on_chip) / (_MEMORY * self._chip.hbm_bandwidth)
    wide = [a for a in inputs if len(a.shape) >= 3 and a.shape[-1] >= 32 and a.dtype in ('bf16', 'f16', 'f32')]
    results = [a for a in x.results if a.dtype in ('bf16', 'f16', 'f32') and any(a.shape == b.shape for b in wide)]
    if len(wide) < 2 or not results:  # such as the sums that a backward pass begins with
      return moved
    queries = max(wide, key=lambda a: a.size)
    # Rows are longer than heads are wide, and than there are heads.
    last = queries.shape[-2:]
    width = min(last) if max(queries.shape[-3:]) in last else last[-1]
    keys = min((a for a in wide if width in a.shape[-2:]), key=lambda a: a.size)
    columns = max(keys.shape[-3:])
    # Forward: scores and output. Backward: scores again, gradients of probabilities and of what is returned.
    backward = len(wide) >= 4
    products = 2 + (max(len([a for a in x.results if a.size >= keys.size]), 1) if backward else 0)
    flops = 2 * products * (queries.size // width) * columns * width / 2  # a causal mask leaves half
    reached = next((share for name, share in _ATTENTION_OF.items() if name in x.name), _ATTENTION)
    return max(flops / (reached * min(width / self._chip.matrix_width, 1) * self._chip.flops), moved)

  def _operations(self, x: Instruction, lines: dict[str, Instruction]) -> float:
    """Operations of the products in an instruction, or in a fusion."""
    if x.opcode == 'dot':
      left = lines[x.operands[0]].results[0]
      return 2 * x.results[0].size * math.prod(left.shape[d] for d in _dims(x, 'lhs_contracting_dims'))
    if x.opcode == 'convolution':
      # The TPU compiler writes products as convolutions; kernel dimensions 'io01', of which o is in the result.
      kernel, labels = lines[x.operands[1]].results[0], x.attribute(r'dim_labels=\w+_(\w+)->')
      contracted = 1 if labels is None else kernel.shape[labels.index('i')]
      return 2 * x.results[0].size * contracted
    if x.opcode == 'custom-call' and 'gemm' in (x.attribute(r'custom_call_target="([^"]*)"') or ''):
      left, contracted = lines[x.operands[0]].results[0], x.attribute(r'"lhs_contracting_dimensions":\["(\d+)"\]')
      return 2 * x.results[0].size * left.shape[int(contracted or -1)]
    if x.name.startswith(_GROUPED) and x.results[0].dtype != 's32':
      # Rows [M, K] and matrices [E, K, N] are the last operands; each row meets one matrix.
      return 2 * x.results[0].size * lines[x.operands[-2]].results[0].shape[-1]
    if x.opcode != 'fusion':
      return 0.0
    return sum(self._operations(y, inner) for inner in self._program.called(x) for y in inner.values())

  def _moved(self, x: Instruction, operands: list[Instruction]) -> float:
    """Bytes of HBM that an instruction reads and writes; of what is cut or updated in place only the part."""
    written = sum(a.bytes for a in x.results if not a.on_chip)
    if x.opcode == 'dynamic-update-slice':
      return 2 * _bytes(operands[1]) if len(operands) > 1 else written
    if x.opcode in ('dynamic-slice', 'slice', 'gather'):
      return 2 * written
    inner = next(iter(self._program.called(x)), {})
    if x.opcode != 'fusion' or not inner:
      return written + sum(_bytes(y) for y in operands)
    roots = [y for y in inner.values() if y.is_root]
    if roots and roots[0].opcode == 'tuple':
      roots = [inner[name] for name in roots[0].operands if name in inner]
    updates = [_source(y, inner) for y in roots]
    in_place = set()
    for y in updates:
      if y.opcode == 'dynamic-update-slice':
        whole, part = _source(inner[y.operands[0]], inner), inner[y.operands[1]]
        written -= sum(a.bytes for a in y.results) - sum(a.bytes for a in part.results)
        in_place.add(whole.name)
    parameters = {int(y.argument): y for y in inner.values() if y.opcode == 'parameter'}
    read = 0.0
    for i, operand in enumerate(operands):
      if i in parameters and parameters[i].name not in in_place:
        read += min(_bytes(operand), _read_of(parameters[i], inner))
    return max(written, 0) + read


def _goes_on(x: Instruction, lines: dict[str, Instruction]) -> bool:
  """Whether the collectives in a fusion were started by another one."""
  ends = any('AsyncCollectiveDone' in y.rest for y in lines.values() if y.opcode == 'custom-call')
  return ends or any('async_collective_fusion' in name for name in x.called)


def _is_kernel(x: Instruction) -> bool:
  """Whether a custom call is a kernel of Pallas, Triton or cuDNN."""
  target = x.attribute(r'custom_call_target="([^"]*)"') or ''
  return any(word in target for word in ('tpu_custom_call', 'triton', 'cudnn', 'fmha', 'mosaic'))


def _source(x: Instruction, lines: dict[str, Instruction]) -> Instruction:
  """What an instruction is another view of."""
  while x.opcode in ('bitcast', 'copy', 'reshape', 'convert') and x.operands and x.operands[0] in lines:
    x = lines[x.operands[0]]
  return x


def _read_of(parameter: Instruction, lines: dict[str, Instruction]) -> float:
  """Bytes that a fusion reads of a parameter: the parts, if it only cuts parts out."""
  users = [y for y in lines.values() if parameter.name in y.operands]
  if users and all(y.opcode in ('dynamic-slice', 'slice', 'gather') for y in users):
    return sum(a.bytes for y in users for a in y.results)
  return math.inf


def _bytes(x: Instruction) -> int:
  return sum(a.bytes for a in x.results if not a.on_chip)


def _dims(x: Instruction, name: str) -> tuple[int, ...]:
  found = x.attribute(rf'\b{name}=\{{([\d,]*)\}}') or ''
  return tuple(int(d) for d in found.split(',') if d)


def _group_size(x: Instruction, devices: int) -> int:
  """Devices that exchange with one another in a collective."""
  listed = x.attribute(r'replica_groups=\{\{([\d,]+)\}')
  if listed is not None:
    return listed.count(',') + 1
  tiled = x.attribute(r'replica_groups=\[\d+,(\d+)\]')
  if tiled is not None:
    return int(tiled)
  axes = x.attribute(r'replica_groups=mesh\[([^\]]*)\]')
  if axes is None:
    return devices
  sizes = dict(pair.split('=') for pair in axes.replace("'", '').split(','))
  used = (x.attribute(r'replica_groups=mesh\[[^\]]*\] ?\{([^}]*)\}') or '').replace("'", '').split(',')
  # An axis may be written with the part of it that is used, 'axis:(1)2'.
  return math.prod(int(name.split(')')[-1]) if ':(' in name else int(sizes.get(name.strip(), 1)) for name in used)


def _sent(kind: str, size: float, group: int) -> float:
  """Bytes that each device of a group sends at least, for a result of `size` bytes."""
  if group <= 1:
    return 0.0
  share = (group - 1) / group
  return {
    'all-gather': size * share,
    'all-reduce': 2 * size * share,
    'reduce-scatter': size * (group - 1),
    'collective-permute': size,
  }.get(kind, size * share)
