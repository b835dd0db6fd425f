"""What the chips' compilers say of the linear attention of Qwen3.5 over a prompt: in chunks, and column by column.

  python benchmarks/delta_rule.py                        v5e:2x2 and h100:1, as far as their compilers are installed
  python benchmarks/delta_rule.py --topology=v5e:2x2     one of them

One layer of the 0.8B model in float32, as the sampler reads prompts: 16 heads of width 128, 16 rows. Nothing runs; the
seconds are estimates of the compiled programs (docs/performance.md). Needs requirements-aot.txt.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

ROWS, HEADS, WIDTH = 16, 16, 128
COLUMNS = (64, 256)
CHUNKS = (32, 64, 128)


def measure(name: str, add: Callable[[dict[str, Any]], None]) -> None:
  """Gives `add` milliseconds and MiB of temporary memory of each form and number of columns."""
  from ragen_jax.planning import topologies

  topology = topologies.parse(name)
  topologies.prepare(topology)

  import jax
  import jax.numpy as jnp
  from jax.sharding import SingleDeviceSharding

  from ragen_jax.models import delta_rule
  from ragen_jax.planning import cost

  def by_column(q, k, v, g, beta, memory):
    def step(memory, column):
      read, memory = delta_rule.one_column(*column, memory)
      return memory, read

    memory, read = jax.lax.scan(step, memory, [jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta)])
    return jnp.moveaxis(read, 0, 1), memory

  def chunked(chunk):
    return lambda *given: delta_rule.chunked(*given, chunk=chunk)

  forms = {'column by column': by_column} | {f'chunks of {c}': chunked(c) for c in CHUNKS}
  place = SingleDeviceSharding(topologies.devices(topology)[0])
  for columns in COLUMNS:
    shapes = [
      (ROWS, columns, HEADS, WIDTH), (ROWS, columns, HEADS, WIDTH), (ROWS, columns, HEADS, 1, WIDTH),
      (ROWS, columns, HEADS, 1), (ROWS, columns, HEADS, 1), (ROWS, HEADS, 1, WIDTH, WIDTH),
    ]  # fmt: skip
    given = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place) for shape in shapes]
    for form, run in forms.items():
      made = cost.compile_program(jax.jit(run).lower(*given), topology)
      add({
        'columns': columns, 'form': form, 'ms': round(1e3 * made.work.seconds, 3),
        'temporary_mib': round(made.temporary / 2**20, 1),
      })  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--topology', help='one machine; both by default')
  given = parser.parse_args().topology
  out = ROOT / 'benchmarks' / 'results' / 'delta_rule.json'
  record = json.loads(out.read_text()) if out.exists() else {}
  from ragen_jax.planning import topologies

  for name in [given] if given else ['v5e:2x2', 'h100:1']:
    if topologies.missing(topologies.parse(name).chip.platform):
      print(f'{name}: its compiler is not installed (requirements-aot.txt)')
      continue
    record[name] = []

    def add(found: dict[str, Any], name: str = name) -> None:
      print(f'{name}: {json.dumps(found)}', flush=True)
      record[name].append(found)
      out.write_text(json.dumps(record, indent=1) + '\n')

    measure(name, add)


if __name__ == '__main__':
  main()
