"""What a host has left, read from the files of made-up machines, and the return of freed arrays, beside a control."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ragen_jax.utils import host_memory
from tests.support.paths import ROOT

_GIB = 2**30


def _host(root, files):
  for name, text in {'proc/meminfo': f'MemTotal: 9 kB\nMemAvailable: {20 * 2**20} kB\n', **files}.items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
  return str(root)


def _group(folder, limit, usage, inactive, *, second):
  names = ('memory.max', 'memory.current') if second else ('memory.limit_in_bytes', 'memory.usage_in_bytes')
  stat = f'anon 7\n{"inactive_file" if second else "total_inactive_file"} {inactive}\n'
  return {f'{folder}/{names[0]}': f'{limit}\n', f'{folder}/{names[1]}': f'{usage}\n', f'{folder}/memory.stat': stat}


def test_without_a_cgroup_it_is_what_the_kernel_has_available(tmp_path):
  assert host_memory.available(_host(tmp_path, {})) == 20 * _GIB


@pytest.mark.parametrize('second', [True, False])
def test_the_tightest_cgroup_of_the_process_decides(tmp_path, second):
  base = 'sys/fs/cgroup' if second else 'sys/fs/cgroup/memory'
  own = {'proc/self/cgroup': '0::/jobs/mine\n' if second else '3:cpuset:/\n4:memory:/jobs/mine\n'}
  outer = _group(f'{base}/jobs', 12 * _GIB, 9 * _GIB, _GIB, second=second)
  inner = _group(f'{base}/jobs/mine', 10 * _GIB, 2 * _GIB, 0, second=second)
  assert host_memory.available(_host(tmp_path, own | inner)) == 8 * _GIB
  assert host_memory.available(_host(tmp_path, own | inner | outer)) == 4 * _GIB  # files of 1 GiB are dropped first
  full = _group(f'{base}/jobs', 12 * _GIB, 13 * _GIB, 0, second=second)
  assert host_memory.available(_host(tmp_path, own | inner | full)) == 0


@pytest.mark.parametrize('second', [True, False])
def test_a_container_sees_its_own_group_as_the_outermost(tmp_path, second):
  base = 'sys/fs/cgroup' if second else 'sys/fs/cgroup/memory'
  own = {'proc/self/cgroup': '0::/of/the/host\n' if second else '4:memory,hugetlb:/of/the/host\n'}
  files = _group(base, 6 * _GIB, 5 * _GIB, 0, second=second)
  assert host_memory.available(_host(tmp_path, own | files)) == _GIB


@pytest.mark.parametrize(('second', 'limit'), [(True, 'max'), (False, 2**63 - 4096)])
def test_a_cgroup_without_a_limit_does_not_count(tmp_path, second, limit):
  base = 'sys/fs/cgroup' if second else 'sys/fs/cgroup/memory'
  own = {'proc/self/cgroup': '0::/\n' if second else '4:memory:/\n'}
  assert host_memory.available(_host(tmp_path, own | _group(base, limit, 1, 0, second=second))) == 20 * _GIB


_HOLES = """
import sys
import numpy as np
from ragen_jax.utils import host_memory

def held():
  return next(int(x.split()[1]) / 1024 for x in open('/proc/self/status') if x.startswith('VmRSS'))

if sys.argv[1] == 'return':
  host_memory.return_what_is_freed()
del_first = np.ones(31 << 17)  # 31 MiB; freeing it raises glibc's threshold
del del_first
before = held()
arrays = [np.ones(16 << 17) for _ in range(20)]
arrays = arrays[1::2]
print(held() - before)
"""


@pytest.mark.skipif(sys.platform != 'linux', reason='glibc')
def test_freed_arrays_of_a_layer_leave_no_holes():
  def held(how):
    result = subprocess.run(
      [sys.executable, '-c', _HOLES, how], cwd=ROOT, capture_output=True, text=True, check=True
    )  # fmt: skip
    return float(result.stdout)

  assert held('return') < 1.1 * 10 * 16
  assert held('keep') > 1.8 * 10 * 16


_FAULTS = """
import resource, sys, threading
from ragen_jax.utils import host_memory

if sys.argv[1] == 'keep':
  host_memory.keep_what_is_freed()

def work():
  for _ in range(20):
    b'x' * (48 << 20)  # more than glibc's largest threshold

def faults():
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""


@pytest.mark.skipif(sys.platform != 'linux', reason='glibc')
@pytest.mark.parametrize('given', [{}, {'MALLOC_ARENA_MAX': '4'}, {'GLIBC_TUNABLES': 'glibc.malloc.arena_max=4'}])
@pytest.mark.slow
def test_arrays_of_a_thread_get_the_memory_of_freed_ones(given):
  def faults(how):
    command = [sys.executable, '-c', _FAULTS, how]
    clean = {k: v for k, v in os.environ.items() if not k.startswith('MALLOC_') and k != 'GLIBC_TUNABLES'}
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=clean | given)
    return int(found.stdout)

  whole = 20 * 48 * 2**20 / 4096
  assert faults('leave') > 0.9 * whole
  kept = faults('keep')
  assert kept > 0.9 * whole if given else kept < 0.1 * whole
