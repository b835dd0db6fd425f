"""Compiles a program for chips that are not there, and says what it needs and costs."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import tempfile
import time
from typing import Any

import jax

from ragen_jax.planning import hlo, kernel_times
from ragen_jax.planning.kernel_times import Work
from ragen_jax.planning.topologies import Topology, quiet
from ragen_jax.utils.errors import one_line


@dataclasses.dataclass(frozen=True)
class Cost:
  """What one device needs for a program, and what the compilation costs.

  Sizes are in bytes; results that take the place of arguments are `aliased`.
  """

  arguments: int
  results: int
  aliased: int
  temporary: int
  compile_seconds: float  # of the clock
  compile_cpu_seconds: float  # of all cores together
  work: Work | None  # the estimate of `kernel_times.work_of`; None where the compiled program cannot be read
  timed: bool  # the compiler estimates the time; else bytes and operations are divided by what a chip reaches

  @property
  def hbm(self) -> int:
    """Bytes while the program runs."""
    return self.arguments + self.results - self.aliased + self.temporary


class CompileFailure(Exception):
  """The compiler refused a program; the message is its reason in one line."""


def compile_program(lowered: jax.stages.Lowered, topology: Topology, loop_trips: int = 1) -> Cost:
  """Compiles a lowered program for the devices that its arguments are laid out on.

  For the time, loops that end when data says so run `loop_trips` times. Raises CompileFailure if the compiler refuses
  the program, for instance as it does not fit into the memory.
  """
  start, cpu = time.perf_counter(), time.process_time()
  with tempfile.TemporaryDirectory(prefix='ragen-jax-hlo-') as dump:
    # The text of some programs can only be read from the compiler's own dump.
    options: dict[str, Any] = {'xla_dump_to': dump, 'xla_dump_hlo_as_text': True}
    try:
      with quiet():
        compiled = lowered.compile(options)
    except Exception as e:  # the errors of compilers differ; what they say is the result
      raise CompileFailure(_reason(str(e))) from e
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    text = _text(compiled, pathlib.Path(dump))
  memory = compiled.memory_analysis()
  found = text and kernel_times.work_of(hlo.parse(text), topology.chip, topology.size, loop_trips)
  return Cost(
    arguments=memory.argument_size_in_bytes,
    results=memory.output_size_in_bytes,
    aliased=memory.alias_size_in_bytes,
    temporary=memory.temp_size_in_bytes,
    compile_seconds=seconds,
    compile_cpu_seconds=cpu,
    work=found or None,
    timed='"estimated_cycles"' in text,
  )


def _text(compiled: jax.stages.Compiled, dump: pathlib.Path) -> str:
  """The compiled program as text, '' if there is none."""
  try:
    return compiled.as_text()
  except jax.errors.JaxRuntimeError:  # an instruction that this version cannot print
    files = list(dump.glob('*after_optimizations*.txt'))
    whole = [f for f in files if 'ENTRY' in f.read_text(errors='replace')]
    return max(whole, key=lambda f: f.stat().st_size).read_text(errors='replace') if whole else ''


def _reason(message: str) -> str:
  """The sentence of a compiler's message that says what is wrong."""
  found = re.search(r'(Ran out of memory.*?|RESOURCE_EXHAUSTED.*?)(\n\n|$)', message, re.S)
  return one_line(found.group(1) if found else message, str)[:400]
