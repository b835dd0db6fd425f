"""Objects in worker processes: calls, and whatever code that is not ours may do to them and to us."""

from __future__ import annotations

import gc
import logging
import math
import os
import pathlib
import pickle
import re
import signal
import struct
import subprocess
import sys
import threading
from concurrent import futures

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.utils import workers
from ragen_jax.utils.messages import Foreign
from ragen_jax.utils.threads import Fault
from ragen_jax.utils.worker_link import last_words
from ragen_jax.utils.workers import Worker, Workers
from tests.support.paths import ROOT
from tests.support.worker_objects import CRASHES, THING, is_running, wait_until

LONG = 200.0  # seconds that no call takes unless it hangs
SOURCE = 'tests.support.worker_objects'


@pytest.fixture(scope='module')
def thing():
  """A worker for calls that leave it alive."""
  worker = Worker(THING)
  yield worker
  assert worker.process == 1, worker.last_end
  worker.close()


@pytest.fixture
def mortal():
  """A worker for calls that end it; it must serve afterwards."""
  worker = Worker(THING)
  yield worker
  ended = worker.process
  assert worker.call('echo', 'again', timeout_s=LONG) == ('again', None)
  assert worker.process == ended or ended == 0
  worker.close()


def call(worker, *what, timeout_s=LONG):
  return worker.call(*what, timeout_s=timeout_s)


# -- calls and values --------------------------------------------------------------------------------------------------


def test_another_interpreter_finds_its_own_modules_and_this_package(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'here.py').write_text('import sys\n\nclass Path:\n  def of(self):\n    return list(sys.path)\n')
  monkeypatch.setattr(sys, 'path', [*sys.path, '/only/in/this/process'])
  found = {}
  for python in ('', sys.executable):
    worker = Worker('here:Path' if python else f'{tmp_path}/here.py:Path', python=python)
    found[python], fault = worker.call('of', timeout_s=LONG)
    assert fault is None
    worker.close()
  assert found[''][-1] == '/only/in/this/process'
  assert found[sys.executable][-2:] == [str(ROOT), str(tmp_path)]
  assert '/only/in/this/process' not in found[sys.executable]


_plain = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
  lambda part: (
    st.lists(part, max_size=4) | st.tuples(part, part) | st.dictionaries(st.text(max_size=3), part, max_size=4)
  ),
  max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(_plain)
def test_plain_values_travel_there_and_back(thing, value):
  back, fault = call(thing, 'echo', value)
  assert fault is None and back == value and repr(back) == repr(value)


@pytest.mark.parametrize('value', ['\ud83d\ude00 \ud800', -(2**64), [math.inf, -0.0], {1: {(2,): b'\xff'}}], ids=ascii)
def test_awkward_values_travel_too(thing, value):
  back, fault = call(thing, 'echo', value)
  assert fault is None and back == value and repr(back) == repr(value)


def test_numbers_beyond_the_digits_that_python_writes_travel(thing):
  assert call(thing, 'echo', 10**6000) == (10**6000, None)


def test_large_messages_and_arrays_travel_both_ways(thing):
  image = np.random.default_rng(0).integers(256, size=(512, 512, 3), dtype=np.uint8)
  back, fault = call(thing, 'echo', {'images': [image, image[::2]], 'text': 'x' * (3 << 20)})
  assert fault is None and np.array_equal(back['images'][0], image) and np.array_equal(back['images'][1], image[::2])
  assert back['text'] == 'x' * (3 << 20)
  back['images'][0][:] = 0  # it may be changed


def test_the_factory_gets_its_arguments_from_a_module_or_a_file():
  path = ROOT / 'tests' / 'support' / 'worker_objects.py'
  for factory in (THING, f'{path}:Thing'):
    worker = Worker(factory, (1, 'b', [None]))
    assert worker.process == 0  # it starts at its first call
    assert call(worker, 'given') == ((1, 'b', [None]), None) and worker.process == 1
    worker.close()


def test_the_process_is_light_and_calls_run_in_its_main_thread():
  worker = Worker(THING, name='the name')
  modules, _ = call(worker, 'modules')
  assert not {'jax', 'jaxlib', 'flax', 'numpy', 'pytest', 'multiprocessing.spawn'} & set(modules)
  assert {name for name in modules if name.startswith('ragen_jax.')} == {
    'ragen_jax.utils',
    *(f'ragen_jax.utils.{x}' for x in ('errors', 'foreign', 'imports', 'messages', 'threads', 'worker_process')),
  }
  (pid, group, session, main, jax_platforms), _ = call(worker, 'about')
  assert main and jax_platforms == 'cpu'
  # Ctrl-C at the terminal reaches the process group in the foreground, which is not the child's.
  assert group == session == pid and os.getpgid(0) != group and os.getsid(0) != session
  assert b'the name' in pathlib.Path(f'/proc/{pid}/cmdline').read_bytes().split(b'\0')
  worker.close()
  assert not is_running(pid)


@pytest.mark.parametrize('value', [object(), [lambda: 0], {'a': Fault}, 1j])
def test_an_argument_that_is_not_plain_is_refused(thing, value):
  with pytest.raises(TypeError, match='cannot hold a'):
    call(thing, 'echo', value)
  with pytest.raises(TypeError, match='cannot hold a'):
    Workers(THING, count=1).map('echo', [(1,), (value,)], timeout_s=LONG)
  with pytest.raises(TypeError, match='cannot hold a'):
    Worker(THING, (value,))
  assert call(thing, 'echo', 1) == (1, None)


@pytest.mark.parametrize(
  ('name', 'written'),
  [('object', r'<object object at 0x\w+>'), ('function', r'\[1, <built-in function print>\]'), ('class', None)],
)
def test_parts_of_results_that_are_not_plain_are_described(thing, name, written):
  result, fault = call(thing, 'make', name)
  assert fault is None and (written is None or re.fullmatch(written, repr(result)))
  if name == 'class':
    assert isinstance(result[0], Foreign) and 'Nameless' in repr(result[1]['a']) and type(result[0]).__name__ == 'type'


# -- exceptions, hangs, crashes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['KeyError', 'SystemExit', 'KeyboardInterrupt', 'GeneratorExit', 'Nameless'])
def test_an_exception_is_a_fault_and_ends_nothing(thing, name):
  result, fault = call(thing, 'fail', name)
  assert result is None and fault.kind == f'fail raised {name}' and 'worker_objects.py:' in fault.detail
  assert ('lost' in fault.detail) == (name != 'Nameless')


def test_calls_that_are_wrong_are_faults(thing):
  assert call(thing, 'nothing')[1].kind == 'nothing raised AttributeError'
  assert call(thing, 'echo')[1].kind == 'echo raised TypeError'
  assert call(thing, 'recurse')[1].kind == 'recurse raised RecursionError'
  assert call(thing, 'make', 'strange')[1].kind == 'make raised RuntimeError'


@pytest.mark.parametrize('what', [('hang',), ('hold',), ('make', 'slow')])
def test_a_call_that_hangs_is_ended_with_its_process(mortal, what):
  pid = call(mortal, 'about')[0][0]
  result, fault = call(mortal, *what, timeout_s=0.3)
  assert result is None and fault == Fault(f'{what[0]} took longer than 0.3 s', 'its process was ended')
  assert not is_running(pid) and mortal.process == 0
  assert mortal.last_end == f'{what[0]} took longer than 0.3 s'
  assert call(mortal, 'about')[0][0] != pid and mortal.process == 2


@pytest.mark.parametrize('status', [0, 1, 3, 255])
def test_an_exit_is_named_by_its_status_and_the_last_lines_of_stderr(mortal, status):
  result, fault = call(mortal, 'leave', status)
  assert result is None and fault == Fault('leave ended its process', f'exit status {status}; second | third | fourth')


@pytest.mark.parametrize('number', [*CRASHES, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_is_named_and_a_crash_has_its_line(mortal, number):
  result, fault = call(mortal, 'signal', int(number))
  assert result is None and fault.kind == 'signal ended its process' and fault.detail.startswith(number.name)
  assert ('worker_objects.py", line' in fault.detail and 'in signal' in fault.detail) == (number in CRASHES)
  assert ('where memory is full' in fault.detail) == (number == signal.SIGKILL)


def test_a_process_that_cuts_the_connection_is_ended(mortal):
  pid = call(mortal, 'about')[0][0]
  fault = call(mortal, 'cut')[1]
  assert fault == Fault('cut ended its process', 'it ended the connection') and not is_running(pid)


def test_memory_is_limited_for_each_process():
  worker = Worker(THING, memory_mib=256)
  assert call(worker, 'take', 100) == (100 << 20, None)
  result, fault = call(worker, 'take', 512)
  assert result is None and fault.kind == 'take ran out of memory'
  assert fault.detail.startswith('the limit is 256 MiB; its process was ended;')
  # What filled the memory may not be given back, so there is a new process.
  assert worker.process == 0 and call(worker, 'take', 100) == (100 << 20, None) and worker.process == 2
  worker.close()
  free = Worker(THING)
  assert call(free, 'take', 300) == (300 << 20, None)
  free.close()


def test_a_death_between_two_calls_is_logged_and_the_next_call_is_made(mortal, caplog):
  pid = call(mortal, 'about')[0][0]
  os.kill(pid, signal.SIGKILL)
  wait_until(lambda: not is_running(pid))
  with caplog.at_level(logging.WARNING):
    assert call(mortal, 'echo', 5) == (5, None)
  assert mortal.process == 2
  assert [r.getMessage().split(', as')[0] for r in caplog.records] == [
    f'{THING}: the process ended between two calls: SIGKILL'
  ]


def test_a_restart_ends_the_process_and_the_next_call_starts_another(mortal):
  mortal.restart('nothing has started yet')
  pid = call(mortal, 'about')[0][0]
  mortal.restart('it was slow')
  assert not is_running(pid) and mortal.process == 0 and mortal.last_end == 'it was slow'
  assert call(mortal, 'about')[0][0] != pid and mortal.process == 2


# -- output and the connection -----------------------------------------------------------------------------------------


def test_output_disturbs_nothing(mortal, capfd):
  for _ in range(2):
    assert call(mortal, 'talk', 1 << 20) == ('', None)  # and there is nothing to read from stdin
  assert call(mortal, 'leave', 3)[1].detail == 'exit status 3; second | third | fourth'
  assert capfd.readouterr() == ('', '')


def _message(value):
  data = pickle.dumps(value) if not isinstance(value, bytes) else value
  return struct.pack('>Q', len(data)) + data


class Bomb:
  def __reduce__(self):
    return os._exit, (13,)


# Messages that are no answer to request 2: another number, another type, a fault that is none, ...
LIES = [
  b'', b'\xc1', b'\x91' * 2000, b'\xdd\xff\xff\xff\xff', b'\x95\xa1t\x07\x01\xc0\xc2', b'\x95\xa1t\x02\x01\xa4lies\xc2',
  b'\x95\xa1t\x02\xc0\x95\xa1o\x00\x05\xa0\xc2\xc2',
  b'\x93\xa1o\x00\x01', b'\xc7\x01\x05x', b'\x94\xa1a\xa1O\x90\xc4\x08abcdefgh',
  b'\x94\xa1a\xa2u1\x91\xcf\x00\xff\xff\xff\xff\xff\xff\xff\xc4\x00', b'\x93\xa1x\xa1a\xa1b', b'\x92\xa1l\x80',
]  # fmt: skip
SIZES = [b'\xff' * 16, struct.pack('>Q', (1 << 30) + 1)]


@pytest.mark.parametrize('data', [*SIZES, _message(Bomb()), *map(_message, LIES)], ids=range(len(LIES) + 3))
@pytest.mark.slow_cases('1', '2', '5', '6', '8', '9', '10', '11', '13', '14', '15')
def test_what_foreign_code_writes_to_the_connection_runs_nothing_and_is_a_fault(mortal, data):
  assert call(mortal, 'echo', 1) == (1, None)
  result, fault = call(mortal, 'meddle', data)
  assert result is None and fault.kind == mortal.last_end == 'meddle sent what is no answer'
  assert mortal.process == 0


@pytest.mark.parametrize(
  ('data', 'kind'),
  [
    (struct.pack('>Q', 1 << 30), 'meddle took longer than 1 s'),
    (b'\0', 'meddle took longer than 1 s'),
    (b'+' + _message(LIES[4]), 'meddle sent what is no answer'),
    (b'+\0', 'meddle sent what is no answer'),
  ],
)
def test_what_comes_too_much_or_too_little_is_a_fault(mortal, data, kind):
  result, fault = call(mortal, 'meddle', data, timeout_s=1.0 if 'took' in kind else LONG)
  assert result is None and fault.kind == kind and mortal.process == 0


# -- processes of the process, and the end -----------------------------------------------------------------------------


@pytest.mark.parametrize('end', ['hang', 'leave', 'close'])
def test_children_of_the_process_end_with_it(mortal, end):
  worker = Worker(THING)
  child, _ = call(worker, 'start_child')
  assert is_running(child)
  if end == 'close':
    worker.close()
  else:
    call(worker, end, *([1] if end == 'leave' else []), timeout_s=1.0)
  wait_until(lambda: not is_running(child))
  worker.close()


def test_a_copy_that_holds_the_connection_does_not_hide_the_end(tmp_path):
  path = tmp_path / 'pid'
  worker = Worker(THING, (str(path),))
  assert call(worker, 'start_child', 'copy and leave')[1] == Fault('start_child ended its process', 'exit status 4')
  wait_until(lambda: not is_running(int(path.read_text())))


def test_a_copy_that_comes_back_answers_nothing(thing):
  assert [call(thing, 'copy') for _ in range(3)] == [(False, None)] * 3


_PARENT = """
import pathlib, sys, threading, time
from ragen_jax.utils.workers import Worker
worker = Worker('tests.support.worker_objects:Thing')
pids = worker.call('about', timeout_s=99)[0][0], worker.call('start_child', timeout_s=99)[0]
print(*pids, flush=True)
if sys.argv[1] == 'idle':
  time.sleep(600)
worker.call(sys.argv[1], sys.argv[2], timeout_s=600)
"""


@pytest.mark.parametrize('busy', ['idle', 'hang', 'hold'])
def test_a_parent_that_is_killed_leaves_no_worker(busy, tmp_path):
  begun = tmp_path / 'begun'
  command = [sys.executable, '-c', _PARENT, busy, str(begun)]
  with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as parent:
    pids = [int(x) for x in parent.stdout.readline().split()]
    wait_until(lambda: busy == 'idle' or begun.exists())
    assert len(pids) == 2 and all(map(is_running, pids))
    parent.kill()
  wait_until(lambda: not any(map(is_running, pids)))


_WITHOUT_KERNEL = """
import os, sys, time
from ragen_jax.utils.worker_process import end_with_parent
end_with_parent(int(sys.argv[1]), by_kernel=sys.argv[2] == 'True')
print('ready', flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize('by_kernel', [True, False])
@pytest.mark.parametrize('early', [True, False])
def test_the_end_of_a_parent_is_seen_with_and_without_the_kernel(by_kernel, early):
  child_end, ours = os.pipe()
  command = [sys.executable, '-c', _WITHOUT_KERNEL, str(child_end), str(by_kernel)]
  if early:
    os.close(ours)
  with subprocess.Popen(
    command, stdout=subprocess.PIPE, cwd=ROOT, pass_fds=[child_end], start_new_session=True
  ) as child:
    if not early:
      assert child.stdout.readline() == b'ready\n' and child.poll() is None
      os.close(ours)
    assert child.wait(100) == -signal.SIGKILL
  os.close(child_end)


def test_ctrl_c_in_a_call_ends_it_and_the_next_call_has_its_own_answer(mortal, tmp_path):
  begun = tmp_path / 'begun'

  def interrupt():
    wait_until(begun.exists)
    os.kill(os.getpid(), signal.SIGINT)

  thread = threading.Thread(target=interrupt)
  thread.start()
  with pytest.raises(KeyboardInterrupt):
    call(mortal, 'hang', str(begun))
  thread.join()
  assert mortal.last_end == 'hang was interrupted'
  assert call(mortal, 'echo', 'own') == ('own', None)


_EXITS = """
import sys
from ragen_jax.utils.workers import Worker
worker = Worker('tests.support.worker_objects:Closing', (sys.argv[1],))
worker.call('about', timeout_s=99)
"""


@pytest.mark.parametrize('way', ['close', 'collect', 'exit', 'many'])
@pytest.mark.slow_cases('close')
def test_the_object_is_closed_once_whatever_ends_the_worker(way, tmp_path):
  path = tmp_path / 'closed'
  if way == 'exit':
    subprocess.run([sys.executable, '-c', _EXITS, str(path)], cwd=ROOT, check=True)
  elif way == 'many':
    group = Workers(f'{SOURCE}:Closing', (str(path),), count=3)
    pids = [worker.call('about', timeout_s=LONG)[0][0] for worker in group.workers[:2]]
    group.close()
    group.close()
    assert not any(map(is_running, pids)) and call(group.workers[2], 'about')[1] == Fault('the worker is closed')
  else:
    worker = Worker(f'{SOURCE}:Closing', (str(path),))
    pid = call(worker, 'about')[0][0]
    if way == 'close':
      worker.close()
      worker.close()
      assert call(worker, 'about') == (None, Fault('the worker is closed'))
    del worker
    gc.collect()
    assert not is_running(pid)
  assert path.read_text() == 'closed\n' * (2 if way == 'many' else 1)


@pytest.mark.parametrize(
  ('how', 'message'), [('hang', 'close took longer than 0.2 s'), ('fail', "close raised KeyError: 'stuck' (work")]
)
def test_a_close_that_hangs_or_fails_is_logged(how, message, monkeypatch, caplog):
  monkeypatch.setattr(workers, '_CLOSE_S', 0.2 if how == 'hang' else LONG)
  worker = Worker(f'{SOURCE}:Closing', ('', how), name='it')
  pid = call(worker, 'about')[0][0]
  with caplog.at_level(logging.WARNING):
    worker.close()
  assert not is_running(pid) and [r.getMessage()[: len(message) + 4] for r in caplog.records] == [f'it: {message}']


def test_one_object_that_hangs_in_close_takes_no_time_of_others(monkeypatch, tmp_path, caplog):
  path = tmp_path / 'closed'
  group = Workers(f'{SOURCE}:Closing', (str(path), 'one hangs'), count=3)
  for worker in group.workers:
    call(worker, 'about')
  monkeypatch.setattr(workers, '_CLOSE_S', 1.0)
  with caplog.at_level(logging.WARNING):
    group.close()
  assert path.read_text() == 'closed\n' * 2 and len(caplog.records) == 1


def test_a_worker_that_is_closed_during_a_call_of_another_thread_ends_the_call(tmp_path):
  worker, begun, outcomes = Worker(THING), tmp_path / 'begun', []
  thread = threading.Thread(target=lambda: outcomes.append(call(worker, 'hang', str(begun))))
  thread.start()
  wait_until(begun.exists)
  worker.close()
  thread.join(100)
  assert outcomes[0][1].kind == 'hang ended its process' and call(worker, 'about')[1] == Fault('the worker is closed')


def test_a_copy_of_the_parent_closes_nothing(thing):
  assert call(thing, 'echo', 1) == (1, None)
  pid = os.fork()
  if not pid:
    try:
      thing.close()
    finally:
      os._exit(0)
  assert os.waitpid(pid, 0)[1] == 0 and call(thing, 'echo', 2) == (2, None)


# -- the start ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('what', 'kind', 'detail'),
  [
    ('fail', 'start raised KeyError', "'lost' (worker_objects.py:"),
    ('leave', 'start ended its process', 'exit status 5; second | third | fourth'),
    ('hang', 'start took longer than 2 s', 'its process was ended'),
    ('take', 'start ran out of memory', 'the limit is 200 MiB; its process was ended; '),
  ],
)
@pytest.mark.slow_cases('hang-start took longer than 2 s-its process was ended')
def test_a_start_that_fails_is_a_fault_and_is_tried_again(what, kind, detail, tmp_path):
  path = tmp_path / 'started'
  limit = 2.0 if what == 'hang' else LONG
  worker = Worker(f'{SOURCE}:BadStart', (str(path), what), memory_mib=200, start_timeout_s=limit)
  for tries in (1, 2):
    result, fault = call(worker, 'echo', 1)
    assert result is None and fault.kind == kind and fault.detail.startswith(detail)
    assert worker.process == 0 and worker.failed_starts == tries
    assert what == 'hang' or path.read_text() == 'started\n' * tries


def test_a_factory_that_does_not_exist_is_named():
  fault = call(Worker('no_such_module:thing'), 'echo', 1)[1]
  assert fault.kind == 'start raised ValueError' and "factory='no_such_module:thing' cannot be imported" in fault.detail


# -- several workers ---------------------------------------------------------------------------------------------------


def test_calls_of_a_map_run_side_by_side_and_keep_their_order(tmp_path):
  group = Workers(THING, count=2)
  a, b = str(tmp_path / 'a'), str(tmp_path / 'b')
  assert group.map('meet', [(a, b), (b, a)], timeout_s=LONG) == [(a, None), (b, None)]
  assert group.map('echo', [(i,) for i in range(9)], timeout_s=LONG) == [(i, None) for i in range(9)]
  assert group.map('echo', [], timeout_s=LONG) == []
  assert {worker.process for worker in group.workers} == {1}
  group.close()
  assert group.map('echo', [(1,)], timeout_s=LONG) == [(None, Fault('the worker is closed'))]


def test_maps_of_several_threads_use_the_workers_that_are_idle(tmp_path):
  group = Workers(THING, count=2)
  a, b = str(tmp_path / 'a'), str(tmp_path / 'b')
  group.map('meet', [(a, b), (b, a)], timeout_s=LONG)
  for file in (a, b):
    pathlib.Path(file).unlink()
  with futures.ThreadPoolExecutor(2) as threads:
    one = threads.submit(group.map, 'meet', [(a, b)], timeout_s=20.0)
    wait_until(pathlib.Path(a).exists)
    assert group.map('echo', [(i,) for i in range(20)], timeout_s=LONG) == [(i, None) for i in range(20)]
    other = threads.submit(group.map, 'meet', [(b, a)], timeout_s=20.0)
    assert one.result(LONG) == [(a, None)] and other.result(LONG) == [(b, None)]
  assert {worker.process for worker in group.workers} == {1}
  group.close()


@pytest.mark.slow
def test_calls_of_a_map_that_hang_or_crash_cost_no_other_call():
  group = Workers(THING, count=2)
  left = Fault('leave ended its process', 'exit status 7; second | third | fourth')
  assert group.map('leave', [(7,)] * 5, timeout_s=LONG) == [(None, left)] * 5
  names = ['KeyError', 'SystemExit', 'KeyError']
  assert [fault.kind for _, fault in group.map('fail', [(n,) for n in names], timeout_s=LONG)] == [
    f'fail raised {n}' for n in names
  ]
  outcomes = group.map('make', [('slow',)] * 4 + [('strange',)], timeout_s=2.0)
  kinds = [fault.kind for _, fault in outcomes]
  assert kinds == ['make took longer than 2 s'] * 4 + ['make raised RuntimeError']
  group.close()


def test_a_map_stops_where_no_process_starts(tmp_path):
  path = tmp_path / 'started'
  group = Workers(f'{SOURCE}:BadStart', (str(path), 'fail'), count=2)
  outcomes = group.map('echo', [(i,) for i in range(50)], timeout_s=LONG)
  assert {fault.kind for _, fault in outcomes} == {'start raised KeyError'}
  tried = path.read_text().count('started')
  assert (
    3 <= tried <= 6
    and [f.detail for _, f in outcomes].count('not tried, because no process can be started') == 50 - tried
  )


@pytest.mark.parametrize('count', [0, -1, 257])
def test_the_number_of_processes_is_limited(count):
  with pytest.raises(ValueError, match='allowed: 1 to 256'):
    Workers(THING, count=count)


def test_the_last_words_of_a_process():
  assert last_words('') == '' and last_words('a\n\n b \nc\nd') == 'b | c | d'
  crash = (
    'x\nFatal Python error: Aborted\n\nThread 1 (most recent call first):\n  File "a.py", line 3 in f\n  File "b"\n'
  )
  assert last_words(crash) == 'Fatal Python error: Aborted File "a.py", line 3 in f'
