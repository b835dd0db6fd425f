"""The text of compiled programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from ragen_jax.planning import hlo
from ragen_jax.planning.hlo import Array

TEXT = """\
HloModule jit_f, is_scheduled=true

%condition (c: (s32[], bf16[4,8])) -> pred[] {
  %c = (s32[]{:T(128)}, bf16[4,8]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%c), index=0
  %limit = s32[]{:T(128)} constant(24)
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%body (b: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %b = (s32[], /*index=1*/bf16[4,8]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  ROOT %t = (s32[], bf16[4,8]) tuple(%b)
}

ENTRY %main (x: bf16[4,8]) -> bf16[4,8] {
  %x = bf16[4,8]{1,0} parameter(0), metadata={op_name="f(x) {"}
  %start = (s32[], bf16[4,8]{1,0}) tuple(%x, %x)
  %loop = (s32[], bf16[4,8]{1,0}) while(%start), condition=%condition, body=%body
  %cond = bf16[4,8]{1,0} conditional(%x, %x), branch_computations={%body, %condition}
  ROOT %out = bf16[4,8]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_instructions_have_arrays_operands_and_what_they_run():
  program = hlo.parse(TEXT)
  assert program.entry == 'main' and set(program.computations) == {'condition', 'body', 'main'}
  loop = program.computations['main']['loop']
  assert loop.results == (Array('s32', ()), Array('bf16', (4, 8)))
  assert loop.operands == ('start',) and loop.called == ('condition', 'body') and not loop.is_root
  assert program.computations['main']['cond'].called == ('body', 'condition')
  carried = program.computations['condition']['c']
  assert carried.results[1] == Array('bf16', (4, 8), on_chip=True) and carried.results[1].bytes == 64
  assert program.computations['condition']['limit'].argument == '24'


def test_trip_counts_are_those_of_plain_counters():
  program = hlo.parse(TEXT)
  loop = program.computations['main']['loop']
  assert program.trip_count(loop) == 24
  known = hlo.parse(TEXT.replace('body=%body', 'body=%body, backend_config={"known_trip_count":{"n":"7"}}'))
  assert known.trip_count(known.computations['main']['loop']) == 7


@pytest.mark.parametrize(
  ('old', 'new'),
  [
    ('compare(%i, %limit), direction=LT', 'compare(%i, %limit), direction=NE'),
    ('compare(%i, %limit), direction=LT', 'and(%i, %limit)'),
    ('%limit = s32[]{:T(128)} constant(24)', '%limit = s32[]{:T(128)} get-tuple-element(%c), index=0'),
  ],
)
def test_loops_that_end_when_data_says_so_have_no_trip_count(old, new):
  program = hlo.parse(TEXT.replace(old, new))
  assert program.trip_count(program.computations['main']['loop']) is None


def test_a_text_without_an_entry_is_refused():
  with pytest.raises(ValueError, match='no entry'):
    hlo.parse(TEXT.replace('ENTRY ', ''))


def test_the_program_of_a_real_compiler_is_read_whole():
  """Every instruction of the text is found, and the loop's count is the scan's."""

  def f(x):
    return jax.lax.scan(lambda c, _: (jnp.sin(c @ c), None), x, length=13)[0]

  text = jax.jit(f).lower(jnp.ones((64, 64))).compile().as_text()
  program = hlo.parse(text)
  lines = [line for line in text.splitlines() if ' = ' in line and line.startswith('  ')]
  assert sum(map(len, program.computations.values())) == len(lines)
  loops = [x for c in program.computations.values() for x in c.values() if x.opcode == 'while']
  assert [program.trip_count(x) for x in loops] == [13]


def test_metadata_of_a_kernel_on_lines_of_its_own_does_not_end_a_computation():
  text = """ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %kernel = f32[8]{0} custom-call(%a), frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, backend_config={"estimated_cycles":"7"}
  ROOT %b = f32[8]{0} negate(%kernel)
}
"""
  (lines,) = hlo.parse(text).computations.values()
  assert list(lines) == ['a', 'kernel', 'b'] and lines['b'].is_root
  assert lines['kernel'].attribute(r'"estimated_cycles":"(\d+)"') == '7'
