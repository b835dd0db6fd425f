"""Costs of compiled programs, of this machine's own compiler in place of a chip's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from ragen_jax.planning import cost, topologies

TOPOLOGY = topologies.parse('h100:1')


def _program(x, w):
  def body(carry):
    i, y = carry
    return i + 1, jnp.tanh(y @ w)

  return jax.lax.while_loop(lambda carry: (carry[0] < 9) & jnp.any(carry[1] > 0), body, (0, x))[1]


def test_memory_is_the_compilers_and_time_grows_with_the_runs_of_loops():
  lowered = jax.jit(_program, donate_argnums=0).lower(jnp.ones((256, 256)), jnp.ones((256, 256)))
  one, many = (cost.compile_program(lowered, TOPOLOGY, loop_trips=n) for n in (1, 50))
  said = lowered.compile().memory_analysis()
  assert one.hbm == (
    said.argument_size_in_bytes + said.output_size_in_bytes - said.alias_size_in_bytes + said.temp_size_in_bytes
  )
  assert one.aliased == 4 * 256 * 256 and one.compile_seconds > 0 and one.compile_cpu_seconds > 0
  (body,) = many.work.loops
  assert many.work.seconds - one.work.seconds == pytest.approx(49 * body.seconds)
  assert not one.timed


def test_a_refused_program_says_why_in_one_line():
  class Refused:
    def compile(self, options):
      raise RuntimeError('XLA:TPU compile error: stack\n\nRan out of memory in hbm. Used 17G of 16G.\n\nmany\nlines')

  with pytest.raises(cost.CompileFailure) as e:
    cost.compile_program(Refused(), TOPOLOGY)
  assert str(e.value) == 'Ran out of memory in hbm. Used 17G of 16G.'


def test_a_program_that_cannot_be_printed_is_read_from_the_compilers_dump(tmp_path):
  class Unprintable:
    def as_text(self):
      raise jax.errors.JaxRuntimeError('INTERNAL: cannot print')

  assert cost._text(Unprintable(), tmp_path) == ''
  (tmp_path / 'module_0.jit_f.after_optimizations.txt').write_text('HloModule f\n\nENTRY %main')
  (tmp_path / 'module_0.jit_f.after_optimizations-memory-usage.txt').write_text('longer, and no program at all' * 9)
  assert cost._text(Unprintable(), tmp_path).endswith('ENTRY %main')
