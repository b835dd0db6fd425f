"""The time and the collectives of compiled programs, by hand and beside XLA's own count of operations."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from ragen_jax.planning import hlo, kernel_times, topologies
from ragen_jax.planning.kernel_times import Work

TPU = topologies.CHIPS['v5e']
GPU = topologies.CHIPS['h100']

_ENTRY = """\
{computations}
ENTRY %main (x: bf16[1024,1024]) -> bf16[1024,1024] {{
  %x = bf16[1024,1024]{{1,0}} parameter(0)
{lines}
}}
"""


def _of(lines, computations='', chip=TPU, devices=8, loop_trips=1):
  text = _ENTRY.format(lines='\n'.join(f'  {line}' for line in lines), computations=computations)
  return kernel_times.work_of(hlo.parse(text), chip, devices, loop_trips)


_SIZE = 2 * 1024 * 1024  # bytes of x


def test_cycles_are_the_compilers_own_and_none_where_it_has_no_estimate():
  kernel = '%f = bf16[1024,1024]{1,0} fusion(%x), kind=kLoop, calls=%none, backend_config={"estimated_cycles":"3000"}'
  assert _of([kernel]).seconds == pytest.approx(3000 / 1.5e9)
  unknown = _of([kernel.replace('"3000"', f'"{2**62}"')])
  assert unknown.seconds == pytest.approx(2 * _SIZE / (0.9 * 819e9)) and unknown.kernels == 1


@pytest.mark.parametrize(
  ('groups', 'size'),
  [
    ('{{0,1,2,3},{4,5,6,7}}', 4),
    ('[4,2]<=[8]', 2),
    ("mesh['a'=8,'b'=1] {'a'}", 8),
    ("mesh['a'=4,'b'=2] {'b'}", 2),
    ("mesh['a'=4,'b'=2] {'a','b'}", 8),
  ],
)
@pytest.mark.parametrize(
  ('kind', 'sent'),
  [
    ('all-gather', lambda n: _SIZE * (n - 1) / n),
    ('all-reduce', lambda n: 2 * _SIZE * (n - 1) / n),
    ('reduce-scatter', lambda n: _SIZE * (n - 1)),
    ('all-to-all', lambda n: _SIZE * (n - 1) / n),
    ('collective-permute', lambda n: _SIZE),
  ],
)
def test_bytes_of_collectives_by_kind_and_group(groups, size, kind, sent):
  found = _of([f'%c = bf16[1024,1024]{{1,0}} {kind}(%x), channel_id=1, replica_groups={groups}'])
  assert found.collectives == {kind: _SIZE} and found.sent == pytest.approx(sent(size)) and found.seconds == 0
  waits = (1 + (kind == 'all-reduce')) * TPU.exchange_seconds(size)  # a sum for all is exchanged twice
  assert found.waits == pytest.approx(waits)
  assert found.link_seconds(TPU) == pytest.approx(found.sent / TPU.link_bandwidth + waits)


def test_of_a_started_collective_the_results_count_once():
  found = _of(
    [
      '%s = (bf16[128,1024]{1,0}, bf16[1024,1024]{1,0}) all-gather-start(%x), replica_groups={{0,1,2,3,4,5,6,7}}',
      '%d = bf16[1024,1024]{1,0} all-gather-done(%s)',
      '%r = bf16[1024,1024]{1,0} all-reduce-start(%d), replica_groups={{0,1,2,3,4,5,6,7}}',
      '%e = bf16[1024,1024]{1,0} all-reduce-done(%r)',
    ]
  )
  assert found.collectives == {'all-gather': _SIZE, 'all-reduce': _SIZE}


def test_a_fused_reduction_that_keeps_its_part_sends_half():
  inner = """\
%sum (p: bf16[1024,1024]) -> bf16[1024,1024] {
  %p = bf16[1024,1024]{1,0} parameter(0)
  ROOT %r = bf16[1024,1024]{1,0} all-reduce(%p), replica_groups={{0,1,2,3,4,5,6,7}}
}
"""
  fusion = '%NAME = bf16[128,1024]{1,0} fusion(%x), kind=kCustom, calls=%sum'
  whole, part = (_of([fusion.replace('NAME', name)], inner) for name in ('fusion.1', 'all-reduce-scatter.1'))
  assert whole.collectives == {'all-reduce': _SIZE} and part.collectives == {'reduce-scatter': _SIZE}
  assert part.sent == whole.sent / 2 == _SIZE * 7 / 8
  assert part.waits == pytest.approx(whole.waits / 2) and part.waits == pytest.approx(TPU.exchange_seconds(8))
  # Or only the computation has the name.
  named = _of(
    [fusion.replace('NAME', 'fusion.2').replace('%sum', '%all-reduce-scatter.3')],
    inner.replace('%sum ', '%all-reduce-scatter.3 '),
  )
  assert named == part


def test_a_collective_that_other_work_hides_counts_where_it_starts():
  gather = '%g = bf16[1024,1024]{1,0} all-gather(%p), replica_groups={{0,1}}'
  inner = ''.join(
    f"""\
%{name} (p: bf16[512,1024]) -> bf16[1024,1024] {{
  %p = bf16[512,1024]{{1,0}} parameter(0)
  {gather}
  ROOT %r = bf16[1024,1024]{{1,0}} {root}
}}

"""
    for name, root in (
      ('start', 'custom-call(%g), custom_call_target="AsyncCollectiveStart"'),
      ('async_collective_fusion.1', 'add(%g, %g)'),
      ('async_collective_fusion.2', 'add(%g, %g)'),
      ('done', 'custom-call(%g), custom_call_target="AsyncCollectiveDone"'),
      ('plain', 'add(%g, %g)'),
    )
  )

  def collectives(*names):
    lines = [f'%f{i} = bf16[1024,1024]{{1,0}} fusion(%x), kind=kCustom, calls=%{x}' for i, x in enumerate(names)]
    return _of(lines, inner).collectives

  one = {'all-gather': _SIZE}
  assert collectives('start', 'async_collective_fusion.1', 'async_collective_fusion.2', 'done') == one
  assert collectives('plain') == one and not collectives('async_collective_fusion.1') and not collectives('done')


_LOOP = """\
%inner_condition (c: s32[]) -> pred[] {
  %i = s32[] parameter(0)
  %n = s32[] constant(5)
  ROOT %l = pred[] compare(%i, %n), direction=LT
}

%inner (b: s32[]) -> s32[] {
  %i = s32[] parameter(0)
  %y = bf16[1024,1024]{1,0} custom-call(), backend_config={"estimated_cycles":"10"}
  ROOT %g = bf16[1024,1024]{1,0} all-gather(%y), replica_groups={{0,1}}
}

%condition (c: s32[]) -> pred[] {
  %i = s32[] parameter(0)
  ROOT %l = pred[] custom-call(%i), backend_config={"estimated_cycles":"1"}
}

%body (b: s32[]) -> s32[] {
  %i = s32[] parameter(0)
  ROOT %w = s32[] while(%i), condition=%inner_condition, body=%inner
}
"""


def test_loops_count_as_often_as_they_run_and_unknown_ones_as_often_as_said():
  loop = '%w = s32[] while(%x), condition=%condition, body=%body'
  found = _of([loop], _LOOP, loop_trips=300)
  assert found.seconds == pytest.approx(300 * (5 * 10 + 1) / 1.5e9)
  assert found.collectives == {'all-gather': 300 * 5 * _SIZE}
  (body,) = found.loops
  assert body.seconds == pytest.approx(51 / 1.5e9) and body.collectives == {'all-gather': 5 * _SIZE}
  assert not _of(['%w = s32[] while(%x), condition=%inner_condition, body=%inner'], _LOOP).loops


def test_of_a_branch_the_longer_side_counts():
  sides = """\
%short (p: s32[]) -> s32[] {
  ROOT %a = s32[] custom-call(), backend_config={"estimated_cycles":"10"}
}

%long (p: s32[]) -> s32[] {
  ROOT %a = s32[] custom-call(), backend_config={"estimated_cycles":"70"}
}
"""
  found = _of(['%c = s32[] conditional(%x, %x), branch_computations={%short, %long}'], sides)
  assert found.seconds == pytest.approx(70 / 1.5e9)


def test_what_is_updated_in_place_is_not_moved_whole():
  inner = """\
%write (a: bf16[1024,1024], b: bf16[1,1024], i: s32[]) -> bf16[1024,1024] {
  %a = bf16[1024,1024]{1,0} parameter(0)
  %b = bf16[1,1024]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %u = bf16[1024,1024]{1,0} dynamic-update-slice(%a, %b, %i, %i)
}
"""
  lines = ['%row = bf16[1,1024]{1,0} custom-call()', '%i = s32[] constant(0)']
  fusion = '%f = bf16[1024,1024]{1,0} fusion(%x, %row, %i), kind=kLoop, calls=%write'
  chip = dataclasses.replace(GPU, platform='tpu')  # without the least time of a kernel
  with_it, without = _of([*lines, fusion], inner, chip), _of(lines, inner, chip)
  moved = (with_it.seconds - without.seconds) * 0.9 * chip.hbm_bandwidth
  assert moved == pytest.approx(2 * 2 * 1024, abs=8)


def test_of_what_is_cut_only_the_part_is_read():
  inner = """\
%cut (a: bf16[1024,1024], i: s32[]) -> f32[1,1024] {
  %a = bf16[1024,1024]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %s = bf16[1,1024]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,1024}
  ROOT %c = f32[1,1024]{1,0} convert(%s)
}
"""
  lines = ['%i = s32[] constant(0)', '%f = f32[1,1024]{1,0} fusion(%x, %i), kind=kLoop, calls=%cut']
  chip = dataclasses.replace(GPU, platform='tpu')
  assert _of(lines, inner, chip).seconds * 0.9 * chip.hbm_bandwidth == pytest.approx((2 + 4) * 1024, abs=8)


def test_a_product_takes_the_peak_and_a_gpus_kernel_a_least_time():
  dot = '%d = bf16[1024,1024]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}'
  fast = dataclasses.replace(GPU, hbm_bandwidth=1e18, platform='tpu')
  assert _of([dot], chip=fast).seconds == pytest.approx(2 * 1024**3 / (0.8 * 989e12))
  assert _of(['%n = bf16[8]{0} negate(%x)'], chip=dataclasses.replace(GPU, hbm_bandwidth=1e18)).seconds == 2e-6


@pytest.mark.parametrize('width', [64, 128])
@pytest.mark.parametrize('columns_last', [False, True])
@pytest.mark.parametrize(('kind', 'products'), [('forward', 2), ('keys and values', 4), ('queries', 3)])
def test_attention_kernels_count_by_their_shapes(width, columns_last, kind, products):
  """Forward: scores and output. Backward: scores and gradients of probabilities, and of what is returned."""
  size = f'{width},2048' if columns_last else f'2048,{width}'
  of_queries, of_keys, layout = f'bf16[4,14,{size}]', f'bf16[4,2,{size}]', '{3,2,1,0}'
  block = 'f32[4,512,64]{2,1,0}'  # which a kernel keeps to itself
  out = {'forward': f'{of_queries}{layout}', 'queries': f'({block}, {of_queries}{layout})'}
  out['keys and values'] = f'({block}, {of_keys}{layout}, {of_keys}{layout})'
  more = ', %q, %s' if kind != 'forward' else ''
  found = _of([
    f'%q = {of_queries}{layout} constant(0)', f'%k = {of_keys}{layout} constant(0)',
    '%s = f32[4,14,1,2048]{3,2,1,0} constant(0)',
    f'%o = {out[kind]} custom-call(%q, %k, %k{more}), custom_call_target="tpu_custom_call"',
  ])  # fmt: skip
  operations = 2 * products * (4 * 14 * 2048) * 2048 * width / 2
  assert found.seconds == pytest.approx(operations / (0.5 * width / 128 * 197e12))


@pytest.mark.parametrize(('kernel', 'products', 'share'), [('forward', 2, 0.64), ('backward', 5, 0.85)])
@pytest.mark.parametrize(('chip', 'part'), [('v5e', 0.5), ('v6e', 0.25)])
def test_kernels_of_this_project_reach_more_and_narrow_heads_fill_a_part_of_the_units(
  kernel, products, share, chip, part
):
  of_queries, of_keys, sums = 'bf16[4,14,64,2048]{3,2,1,0}', 'bf16[4,2,2048,64]{3,2,1,0}', 'f32[4,14,1,2048]{3,2,1,0}'
  out, more = {
    'forward': (f'({of_queries}, {sums})', ''), 'backward': (f'({of_queries}, {of_keys}, {of_keys})', ', %q, %s, %q')
  }[kernel]  # fmt: skip
  found = _of([
    f'%q = {of_queries} constant(0)', f'%k = {of_keys} constant(0)', f'%s = {sums} constant(0)',
    f'%attention_{kernel}.1 = {out} custom-call(%q, %k, %k{more}), custom_call_target="tpu_custom_call"',
  ], chip=topologies.CHIPS[chip])  # fmt: skip
  operations = 2 * products * (4 * 14 * 2048) * 2048 * 64 / 2
  assert found.seconds == pytest.approx(operations / (share * part * topologies.CHIPS[chip].flops))


def test_products_of_groups_multiply_each_row_once():
  kernel = 'custom_call_target="tpu_custom_call"'
  lines = [
    '%rows = bf16[65536,2048]{1,0} constant(0)', '%w = bf16[128,2048,768]{2,1,0} constant(0)',
    f'%ragged-dot-metadata = (s32[129]{{0}}, s32[639]{{0}}) custom-call(%x), {kernel}',
    f'%ragged-dot-none.1 = bf16[65536,768]{{1,0}} custom-call(%x, %x, %x, %rows, %w), {kernel}',
  ]  # fmt: skip
  product = 2 * 65536 * 2048 * 768 / (0.8 * 197e12)
  assert product < _of(lines).seconds < product + 1e-5  # what prepares it moves little


@pytest.mark.parametrize('heads', [28, 192])
@pytest.mark.parametrize('kernel', ['forward', 'preprocess', 'backward'])
def test_attention_kernels_of_gpus_have_the_heads_behind_the_columns(kernel, heads):
  """The arrays of JAX's Pallas kernels; the sums that the backward pass begins with are no product."""
  queries, sums = f'bf16[4,1408,{heads},128]{{3,2,1,0}}', f'f32[4,{heads},1408]{{2,1,0}}'
  out, operands, products = {
    'forward': (f'({queries}, {sums})', '%q, %q, %q, %t', 2), 'preprocess': (sums, '%q, %q', 0),
    'backward': (f'({queries}, {queries}, {queries})', '%q, %q, %q, %t, %q, %q, %s, %s', 5),
  }[kernel]  # fmt: skip
  found = _of([
    f'%q = {queries} constant(0)', f'%s = {sums} constant(0)', '%t = s32[4,1408]{1,0} constant(0)',
    f'%o = {out} custom-call({operands}), custom_call_target="__gpu$xla.gpu.triton"',
  ], chip=GPU)  # fmt: skip
  operations = 2 * products * (4 * heads * 1408) * 1408 * 128 / 2
  read = (4 * heads * 1408) * (2 * 2 * 128 + 4) / (0.9 * GPU.hbm_bandwidth)
  assert found.seconds == pytest.approx(operations / (0.5 * GPU.flops) if products else read)


def test_operations_are_those_that_xla_counts():
  """Several products, one of them inside of a scan, beside `cost_analysis` of one run of each loop body."""

  def f(x, w):
    y = jnp.einsum('bij,bjk->bik', x, x)
    y = jax.lax.scan(lambda c, _: (c @ w, None), y, length=3)[0]
    return jnp.einsum('bij,kj->bik', y, w)

  x, w = jnp.ones((4, 96, 96)), jnp.ones((96, 96))
  compiled = jax.jit(f).lower(x, w).compile()
  program = hlo.parse(compiled.as_text())
  reader = kernel_times._Reader(program, GPU, 1, 1)
  found = sum(reader._operations(y, c) for c in program.computations.values() for y in c.values() if y.opcode == 'dot')
  assert found == 3 * 4 * 2 * 96**3
  assert found == pytest.approx(compiled.cost_analysis()['flops'], rel=0.02)


def _kernel(name, of, cycles, memory=''):
  config = f'backend_config={{"estimated_cycles":"{cycles}"}}'
  return f'%{name} = bf16[1024,1024]{{1,0:T(8,128){memory}}} fusion({of}), kind=kLoop, calls=%none, {config}'


def _copy(k, of='%x'):
  both = 'bf16[1024,1024]{1,0:T(8,128)}, bf16[1024,1024]{1,0:T(8,128)S(1)}, u32[]{:S(2)}'
  return f'%copy-start.{k} = ({both}) copy-start({of})'


def _end(k):
  return f'%copy-done.{k} = bf16[1024,1024]{{1,0:T(8,128)S(1)}} copy-done(%copy-start.{k})'


def test_kernels_wait_for_copies_that_work_does_not_hide():
  copy, short, long = _SIZE / TPU.hbm_bandwidth, 1500, 15000  # 2.56 us; cycles of 1 and of 10 us
  on_chip = 'S(1)'
  waits = _of([_copy(1), _kernel('a', '', short, on_chip), _end(1), _kernel('b', '%copy-done.1', short, on_chip)])
  assert waits.memory_waits == pytest.approx(copy - 1e-6) and waits.seconds == pytest.approx(copy + 1e-6)
  assert waits.kernels == 2
  hidden = _of([_copy(1), _kernel('a', '', long, on_chip), _end(1), _kernel('b', '%copy-done.1', short, on_chip)])
  assert hidden.memory_waits == 0 and hidden.seconds == pytest.approx(11e-6)
  # One after the other; the second one ends later than the kernel.
  two = _of([_copy(1), _copy(2), _kernel('a', '', short, on_chip), _end(1), _end(2)])
  assert two.memory_waits == pytest.approx(2 * copy - 1e-6)
  # What a kernel reads and writes itself takes its part of the memory's time, and no more than its own time.
  reads = _of([_kernel('a', '%x', short), _copy(1), _kernel('b', '%x', long), _end(1)])
  assert reads.memory_waits == 0
  busy = _of([_copy(1), _kernel('a', '%x', short), _end(1), _copy(2), _end(2)])
  # The kernel uses the memory for as long as it runs, so the second copy begins 1 us later.
  assert busy.memory_waits == pytest.approx(2 * copy)
  # Of a slice, the part is copied.
  part = 'bf16[128,1024]{1,0:T(8,128)S(1)}'
  cut = [f'%slice-start.1 = ((bf16[1024,1024]{{1,0:T(8,128)}}), {part}, u32[]{{:S(2)}}) slice-start(%x)']
  assert _of([*cut, f'%slice-done.1 = {part} slice-done(%slice-start.1)']).memory_waits == pytest.approx(copy / 8)
  # A loop has a schedule of its own; its operands are not what it reads.
  inner = _LOOP.replace('"estimated_cycles":"10"', '"estimated_cycles":"300"')
  loop = '%w = s32[] while(%x), condition=%inner_condition, body=%inner'
  around = _of([_copy(1), loop, _end(1), _copy(2), _end(2)], inner)
  assert around.memory_waits == pytest.approx(2 * copy - 5 * 300 / 1.5e9)


def test_waits_count_as_often_as_loops_run():
  body = """\
%body (p: (s32[], bf16[1024,1024])) -> (s32[], bf16[1024,1024]) {
  %p = (s32[], bf16[1024,1024]{1,0}) parameter(0)
  %x = bf16[1024,1024]{1,0} get-tuple-element(%p), index=1
  COPY
  END
  ROOT %t = (s32[], bf16[1024,1024]{1,0}) tuple(%p, %copy-done.1)
}
""".replace('COPY', _copy(1)).replace('END', _end(1))
  loop = '%w = (s32[], bf16[1024,1024]{1,0}) while(%x), condition=%none, body=%body'
  known = _of([f'{loop}, backend_config={{"known_trip_count":{{"n":"7"}}}}'], body)
  assert known.memory_waits == pytest.approx(7 * _SIZE / TPU.hbm_bandwidth) == known.seconds
  unknown = _of([loop], body, loop_trips=3)
  assert unknown.memory_waits == pytest.approx(3 * _SIZE / TPU.hbm_bandwidth)
  assert unknown.loops[0].memory_waits == pytest.approx(_SIZE / TPU.hbm_bandwidth)


def test_work_goes_through_json():
  found = Work(1.0, 2, {'all-gather': 3}, 4.0, 0.5, (Work(5.0, 6, {'all-reduce': 7}, 8.0, 0.25),), 0.75)
  assert Work.from_dict(dataclasses.asdict(found)) == found and Work.from_dict(None) is None
