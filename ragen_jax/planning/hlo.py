"""Reads the text of a compiled program: its computations, and how often each of them runs."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

_DTYPE_BYTES = {
  'pred': 1, 's8': 1, 'u8': 1, 's16': 2, 'u16': 2, 's32': 4, 'u32': 4, 's64': 8, 'u64': 8, 'f16': 2, 'bf16': 2,
  'f32': 4, 'f64': 8, 'f8e4m3fn': 1, 'f8e5m2': 1, 'c64': 8,
}  # fmt: skip
_ARRAY = re.compile(r'(\w+)\[([\d,]*)\](\{[^{}]*\})?')
_CALLED = re.compile(r'\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)')
_BRANCHES = re.compile(r'\bbranch_computations=\{([^}]*)\}')


@dataclasses.dataclass(frozen=True)
class Array:
  """An array of a program."""

  dtype: str  # such as 'bf16'
  shape: tuple[int, ...]
  on_chip: bool = False  # it lies in the memory of the chip's core, not in HBM

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.shape)

  @property
  def bytes(self) -> int:
    """Bytes of the elements; 0 for what is no data, such as tokens."""
    return self.size * _DTYPE_BYTES.get(self.dtype, 0)


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation."""

  name: str  # without the leading '%'
  results: tuple[Array, ...]  # the arrays that it gives; several for a tuple
  opcode: str  # such as 'fusion'
  operands: tuple[str, ...]  # names of its operands
  rest: str  # the attributes, as they are written
  is_root: bool  # its result is the computation's
  argument: str  # what stands in the brackets: the index of a parameter, the value of a constant

  @property
  def called(self) -> tuple[str, ...]:
    """The computations that the instruction runs."""
    found = _CALLED.findall(self.rest)
    for group in _BRANCHES.findall(self.rest):
      found += [name.strip().lstrip('%') for name in group.split(',')]
    return tuple(found)

  def attribute(self, pattern: str) -> str | None:
    """The first group of a pattern in the attributes; None without a match."""
    found = re.search(pattern, self.rest)
    return found and found.group(1)


@dataclasses.dataclass(frozen=True)
class Program:
  """The computations of a compiled program."""

  computations: dict[str, dict[str, Instruction]]  # instructions by name, by computation
  entry: str  # the computation that runs first

  def called(self, instruction: Instruction) -> list[dict[str, Instruction]]:
    """The computations that an instruction runs and that the text has."""
    return [self.computations[name] for name in instruction.called if name in self.computations]

  def trip_count(self, loop: Instruction) -> int | None:
    """How often a `while` runs; None where that depends on data.

    The compiler states it, or the condition compares a counter from 0 with a constant and nothing else.
    """
    known = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
    if known is not None:
      return int(known)
    condition = loop.attribute(r'\bcondition=%?([\w.\-]+)')
    lines = self.computations.get(condition or '', {}).values()
    root = next((x for x in lines if x.is_root), None)
    if root is None or root.opcode != 'compare' or 'direction=LT' not in root.rest:
      return None
    limit = {x.name: x for x in lines}[root.operands[1]]
    return int(limit.argument) if limit.opcode == 'constant' else None


def parse(text: str) -> Program:
  """The program of the text of `jax.stages.Compiled.as_text`. Raises ValueError if it has no entry computation."""
  computations: dict[str, dict[str, Instruction]] = {}
  entry, current = '', None
  # The metadata of a kernel stands on lines of its own.
  for line in re.sub(r'\n(?="|\}\})', ' ', text).splitlines():
    if current is None:
      opened = re.match(r'^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$', line)
      if opened:
        current = computations[opened.group(2)] = {}
        entry = opened.group(2) if opened.group(1) else entry
    elif line.startswith('}'):
      current = None
    else:
      found = _instruction(line)
      if found is not None:
        current[found.name] = found
  if not entry:
    raise ValueError('the text of the program has no entry computation')
  return Program(computations, entry)


def _instruction(line: str) -> Instruction | None:
  head = re.match(r'^\s*(ROOT )?%?([\w.\-]+) = ', line)
  if head is None:
    return None
  start = head.end()
  end = _closing(line, start) + 1 if line[start] == '(' else line.index(' ', start)
  shape = line[start:end]
  opened = line.index('(', end)
  opcode = line[end:opened].strip()
  closed = _closing(line, opened)
  inside = line[opened + 1 : closed]
  operands = tuple(re.findall(r'%([\w.\-]+)', inside))
  return Instruction(head.group(2), arrays(shape), opcode, operands, line[closed + 1 :], bool(head.group(1)), inside)


def _closing(line: str, opened: int) -> int:
  """Index of the bracket that closes the one at `opened`."""
  depth = 0
  for i in range(opened, len(line)):
    depth += {'(': 1, ')': -1}.get(line[i], 0)
    if depth == 0:
      return i
  raise ValueError(f'a bracket is not closed: {line[:200]}')


@functools.lru_cache(maxsize=65536)
def arrays(shape: str) -> tuple[Array, ...]:
  """The arrays of a shape as the text writes it: 'f32[8,2]{1,0}', or a tuple of such in round brackets."""
  return tuple(
    Array(dtype, tuple(int(d) for d in dims.split(',') if d), 'S(1)' in layout)
    for dtype, dims, layout in _ARRAY.findall(shape)
  )
