"""Which rows a process owns, and that functions across processes pass values through in a run of one process."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.distributed import processes
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.processes import RowShare, shares_of
from ragen_jax.utils.background import Background
from ragen_jax.utils.errors import DiskError, Diverged, StoreAway, UserError


@pytest.mark.parametrize(
  ('process', 'shares'),
  [
    # One process with all four shards.
    ([[0], [0], [0], [0]], {0: RowShare(4, 0, 4)}),
    # Two processes with two shards each.
    ([[0], [0], [1], [1]], {0: RowShare(4, 0, 2), 1: RowShare(4, 2, 2)}),
    # `tensor` spans two processes: both own all rows.
    ([[0, 1], [0, 1]], {0: RowShare(2, 0, 2), 1: RowShare(2, 0, 2)}),
    # Four processes, pairs of which own the same rows.
    ([[0, 1], [2, 3]], {0: RowShare(2, 0, 1), 1: RowShare(2, 0, 1), 2: RowShare(2, 1, 1), 3: RowShare(2, 1, 1)}),
    # Shares that are not contiguous, differ in size, or overlap partially.
    ([[0], [1], [0], [1]], None),
    ([[0], [0], [0], [1]], None),
    ([[0, 0], [0, 1], [1, 1], [1, 1]], None),
  ],
)
def test_shares_are_equal_contiguous_ranges_or_there_are_none(process, shares):
  assert shares_of(np.asarray(process)) == shares


def test_a_share_knows_its_place_among_the_shares():
  share = RowShare(shards=8, first=4, own=2)
  assert (share.parts, share.index) == (4, 2)
  assert processes.row_share(None) == processes.row_share(make_mesh(1, 1, 1)) == RowShare()


def test_one_process_is_first_and_passes_everything_through():
  tree = {'rows': np.arange(6.0).reshape(3, 2)}
  mesh = make_mesh(1, 1, 1)
  assert processes.is_first()
  assert processes.largest([3, 1]) == [3, 1]
  assert processes.gather('x') == ['x'] and processes.gather_shares('x', RowShare()) == ['x']
  placed = processes.place_own_rows(tree, mesh, RowShare())
  assert isinstance(placed['rows'], jnp.ndarray)
  for back in (processes.own_rows(placed), processes.all_rows(placed)):
    np.testing.assert_array_equal(back['rows'], tree['rows'])


def test_an_error_of_one_process_is_raised_as_it_is():
  with pytest.raises(UserError, match='wrong') as e, processes.same_errors():
    raise UserError('wrong')
  assert not e.value.everywhere


@pytest.mark.parametrize(
  ('count', 'everywhere', 'by_all'), [(1, False, True), (1, True, True), (2, False, False), (2, True, True)]
)
def test_an_error_is_raised_by_all_processes_or_by_some(monkeypatch, count, everywhere, by_all):
  monkeypatch.setattr(jax, 'process_count', lambda: count)
  assert processes.raised_by_all(UserError('wrong', everywhere=everywhere)) == by_all


@pytest.mark.parametrize('kind', [UserError, Diverged, DiskError, StoreAway])
def test_an_error_of_another_process_keeps_its_exit_status(monkeypatch, kind):
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(processes, 'gather', lambda own: [own, ('wrong', kind.status)])
  with pytest.raises(kind, match=r'^wrong$') as e, processes.same_errors():
    pass
  assert type(e.value) is kind and e.value.everywhere
  monkeypatch.setattr(processes, 'gather', lambda own: [own, None])
  with pytest.raises(kind, match=r'^own$') as e, processes.same_errors():
    raise kind('own')
  assert type(e.value) is kind


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ((None, 2, None), 'need --coordinator'),
    (('auto', None, 1), r'--process_id=1: .*must not be given'),
    (('localhost', 2, 0), 'as HOST:PORT'),
    (('localhost:1', None, 0), r'--num_processes=None: must be the number'),
    (('localhost:1', 2, 2), 'from 0 to 1'),
  ],
)
def test_arguments_that_do_not_fit_are_named(arguments, message):
  with pytest.raises(UserError, match=message):
    processes.connect(*arguments, patience=600.0)


@pytest.mark.parametrize('patience', [-1.0, float('nan'), float('inf')])
def test_a_patience_that_is_no_time_is_named(patience):
  with pytest.raises(UserError, match=r'--patience=.*: must be a number of seconds, or 0'):
    processes.connect(None, None, None, patience=patience)


def test_no_coordinator_means_a_run_of_one_process():
  processes.connect(None, None, None, patience=600.0)
  assert processes.is_first()


def test_a_process_ends_at_once_while_a_program_is_compiled(monkeypatch):
  """The interpreter's own end would abort it, with another status."""
  started, go_on, background = threading.Event(), threading.Event(), Background(1)
  background.want([('a', lambda: (started.set(), go_on.wait(60)))], urgency=0)
  assert started.wait(60)

  def end(status):
    raise RuntimeError(f'ended with {status}')

  monkeypatch.setattr(processes.os, '_exit', end)
  try:
    with pytest.raises(RuntimeError, match='ended with 143'):
      processes.exit_process(143)
  finally:
    go_on.set()
    background.close()
  with pytest.raises(SystemExit) as left:
    processes.exit_process(143)
  assert left.value.code == 143


def test_an_address_that_jax_does_not_tell_is_not_known(monkeypatch):
  distributed = pytest.importorskip('jax._src.distributed', reason='this JAX has no such module')
  monkeypatch.delattr(distributed, 'global_state', raising=False)
  assert processes._address('auto') is None and processes._address('a:1') == 'a:1'
  assert processes._problem(None) == 'the address of process 0 is not known'
