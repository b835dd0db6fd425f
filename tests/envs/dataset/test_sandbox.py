"""Programs that try to leave the sandbox, or to use more than they may. Each of them is bounded by itself, too."""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from ragen_jax.envs.dataset.confined import Limits, Outcome, SandboxError
from ragen_jax.envs.dataset.sandbox import Sandbox
from ragen_jax.envs.dataset.system_calls import call_filter
from tests.support.paths import ROOT

LIMITS = Limits(memory_mib=256, cpu_s=5, wall_s=30.0, processes=6, file_mib=2, disk_mib=4, output_bytes=1 << 20)


def run(sandbox: Sandbox, program: str, stdin: bytes = b'', **limits) -> Outcome:
  changed = dataclasses.replace(LIMITS, **limits)
  return sandbox.run({'program.py': program.encode()}, ['/program/program.py'], stdin, changed)


def printed(outcome: Outcome) -> str:
  assert outcome.verdict == 'ok', outcome
  return outcome.stdout.decode().strip()


def test_a_program_reads_stdin_and_its_output_and_status_come_back(sandbox):
  text = ('äöü 123\n' * 400_000).encode()  # more than a pipe holds
  outcome = run(sandbox, 'import sys\nprint(len(sys.stdin.buffer.read()))\nprint("oh", file=sys.stderr)', text)
  assert (outcome.verdict, outcome.status, outcome.stderr) == ('ok', 0, b'oh\n')
  assert int(outcome.stdout) == len(text)
  assert 0 < outcome.seconds < 30
  failed = run(sandbox, 'print(1)\nraise SystemExit(3)')
  assert (failed.verdict, failed.status, failed.stdout) == ('crash', 3, b'1\n')
  killed = run(sandbox, 'import os\nos.kill(os.getpid(), 11)')
  assert (killed.verdict, killed.status) == ('crash', 139)


def test_input_is_the_program_s_own_and_cannot_be_changed(sandbox):
  program = """
import os
print(input())
for path in ('/dev/stdin', '/proc/self/fd/0'):
  try:
    with open(path, 'r+b', buffering=0) as f:
      f.write(b'x')
    print('written')
  except OSError:
    print('refused')
"""
  assert printed(run(sandbox, program, b'hello\n')).split() == ['hello', 'refused', 'refused']


@pytest.mark.parametrize(
  'program, limits, verdict',
  [
    ('while True: pass', {'cpu_s': 1}, 'timeout'),
    ('import time\ntime.sleep(60)', {'wall_s': 0.5}, 'timeout'),
    # Without output, only the end of the process tells that it runs.
    ('import os, time\nos.closerange(0, 4096)\ntime.sleep(60)', {'wall_s': 0.5}, 'timeout'),
    ('x = bytearray(300 << 20)', {}, 'memory'),
    pytest.param('x = []\nwhile True: x.append(bytes(1 << 20))', {}, 'memory', marks=pytest.mark.slow),
    ('print("x" * 10_000_000)', {}, 'output'),
    pytest.param(
      'import sys\nfor i in range(200): sys.stderr.write("x" * 50_000)', {}, 'output', marks=pytest.mark.slow
    ),
    ('class A:\n  def __del__(self): raise ValueError\nA()\nx = A()', {}, 'ok'),
  ],
)
@pytest.mark.slow_cases('while True: pass-limits0-timeout')
def test_limits_have_named_verdicts(sandbox, program, limits, verdict):
  outcome = run(sandbox, program, **limits)
  assert outcome.verdict == verdict
  assert len(outcome.stdout) + len(outcome.stderr) <= LIMITS.output_bytes + (1 << 17)


def test_files_can_be_written_in_the_work_folder_only_and_not_many(sandbox):
  program = """
import os
for folder in ('/', '/usr/lib', '/program', '/dev', '/dev/shm', '/proc', '/run', '/etc', os.path.dirname(os.__file__)):
  try:
    open(os.path.join(folder, 'x'), 'w').close()
    print('written in', folder)
  except OSError:
    pass
for folder in ('/work', '/tmp', '.'):
  with open(os.path.join(folder, 'y'), 'w') as f:
    f.write('z')
try:
  with open('large', 'wb') as f:
    f.write(bytes(3 << 20))
except OSError as e:
  print(e.errno, os.path.getsize('large') >> 20)
try:
  for i in range(20):
    with open(str(i), 'wb') as f:
      f.write(bytes(1 << 20))
except OSError as e:
  print(e.errno, i)
"""
  too_large, full = printed(run(sandbox, program)).split('\n')
  assert too_large == '27 2'  # EFBIG
  assert full in ('28 1', '28 2')  # ENOSPC


@pytest.mark.parametrize('filtered', [True, False])
def test_there_is_no_network(sandbox, monkeypatch, filtered):
  if not filtered:
    monkeypatch.setattr('ragen_jax.envs.dataset.sandbox.call_filter', lambda: b'')
  with socket.create_server(('127.0.0.1', 0)) as server:
    program = f"""
import socket
for family, kind, address in (
  (socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', {server.getsockname()[1]})),
  (socket.AF_INET, socket.SOCK_DGRAM, ('192.0.2.1', 53)),
):
  try:
    socket.socket(family, kind).connect(address)
    print('connected')
  except OSError as e:
    print('refused')
print([line.split(':')[0].strip() for line in open('/proc/net/dev').readlines()[2:]])
"""
    assert printed(run(sandbox, program)).split('\n') == ['refused', 'refused', "['lo']"]


def test_processes_and_threads_are_counted(sandbox):
  program = """
import os, signal, threading
children = 0
try:
  for _ in range(50):
    if not os.fork():
      signal.pause()
    children += 1
except OSError:
  print(children)
try:
  threading.Thread(target=print).start()
except RuntimeError:
  print('no thread')
"""
  count, thread = printed(run(sandbox, program)).split('\n')
  assert 1 <= int(count) < LIMITS.processes
  assert thread == 'no thread'
  # The next programs start: the processes of the first count no more.
  for _ in range(3):
    assert printed(run(sandbox, 'import threading\nthreading.Thread(target=print, args=(1,)).start()')) == '1'


def test_the_end_of_a_program_is_the_end_of_its_children(sandbox):
  program = 'import os, time\nif not os.fork():\n  time.sleep(60)\nprint("over")'
  outcome = run(sandbox, program)
  assert printed(outcome) == 'over'
  assert outcome.seconds < 30


def test_host_files_and_variables_are_not_there(sandbox, monkeypatch, tmp_path):
  monkeypatch.setenv('RAGEN_SECRET', 'a key')
  (tmp_path / 'secret').write_text('a key')
  site = [p for p in sys.path if p.endswith('site-packages')]
  paths = ['/etc/passwd', '/etc/hostname', '/home', '/sys', str(ROOT / 'README.md'), str(tmp_path / 'secret')]
  program = f"""
import glob, os
for path in {paths + site!r}:
  try:
    if os.path.isfile(path) or os.listdir(path):
      print(path)
  except OSError:
    pass
for path in [p for name in ('environ', 'cmdline', 'root/etc/passwd') for p in glob.glob('/proc/[0-9]*/' + name)]:
  try:
    text = open(path, 'rb').read()
  except OSError:
    continue
  if b'RAGEN' in text or {str(ROOT).encode()!r} in text or 'passwd' in path:
    print(path, text)
print(sorted(os.environ), os.getcwd())
try:
  import numpy
  print('numpy')
except ImportError:
  pass
"""
  (environment,) = printed(run(sandbox, program)).split('\n')
  assert 'RAGEN' not in environment and 'HOME' in environment and environment.endswith('/work')


def test_processes_outside_cannot_be_reached(sandbox):
  with subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE) as bystander:
    program = f"""
import os, signal
for pid in ({bystander.pid}, {os.getpid()}):
  try:
    os.kill(pid, 9)
    print('killed')
  except ProcessLookupError:
    pass
child = os.fork()
if not child:
  signal.pause()
os.kill(-1, 9)
print(os.WTERMSIG(os.waitpid(child, 0)[1]), [x for x in os.listdir('/proc') if x.isdigit()])
"""
    assert printed(run(sandbox, program)) == "9 ['1', '2']"  # bwrap's first process, and the program
    assert bystander.poll() is None
    bystander.communicate(b'\n')


def test_a_program_has_no_rights_and_gets_none(sandbox):
  program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for flag in (0x10000000, 0x20000, 0x40000000):  # user, mount, network namespaces
  print(libc.unshare(flag))
print(libc.mount(b'none', b'/work', b'tmpfs', 0, None), libc.chroot(b'/work'), libc.sethostname(b'x', 1))
status = [line.split() for line in open('/proc/self/status')]
print(os.getuid(), [words[1] for words in status if words[0] in ('CapEff:', 'CapPrm:', 'NoNewPrivs:')])
"""
  lines = printed(run(sandbox, program)).split('\n')
  assert lines[:3] == ['-1'] * 3
  assert lines[3] == '-1 -1 -1'
  assert lines[4] == "1000 ['0000000000000000', '0000000000000000', '1']"


@pytest.mark.skipif(not call_filter(), reason='needs a machine whose system calls are known')
def test_memory_that_no_limit_counts_is_refused(sandbox):
  program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.shmget(0, 1 << 20, 0o1600), ctypes.get_errno())
print(*(libc.semget(0, 100, 0o1600) for _ in range(3)), ctypes.get_errno())
print(libc.msgget(0, 0o1600), ctypes.get_errno())
print(libc.ptrace(0, 0, None, None), ctypes.get_errno())
try:
  print(os.memfd_create('x'))
except OSError as e:
  print(e.errno)
"""
  assert printed(run(sandbox, program)).split('\n') == ['-1 1', '-1 -1 -1 1', '-1 1', '-1 1', '1']  # EPERM


@pytest.mark.skipif(not call_filter(), reason='needs a machine whose system calls are known')
def test_sockets_are_local(sandbox):
  program = """
import asyncio, socket
for family in (2, 10, 16, 17, 38, 40):  # INET, INET6, NETLINK, PACKET, ALG, VSOCK
  for kind in (1, 2, 3, 5):
    try:
      socket.socket(family, kind)
      print('made', family, kind)
    except PermissionError:
      pass
a, b = socket.socketpair()
a.send(b'x')
print(b.recv(1).decode(), asyncio.run(asyncio.sleep(0, 'y')))
"""
  assert printed(run(sandbox, program)) == 'x y'


def test_signals_that_wait_are_limited(sandbox):
  """Each timer and each waiting signal takes memory of the kernel."""
  program = 'import resource\nprint(resource.getrlimit(resource.RLIMIT_SIGPENDING))'
  assert printed(run(sandbox, program)) == '(64, 64)'


def test_nothing_of_the_host_is_inherited(sandbox):
  reader, writer = os.pipe()
  os.set_inheritable(writer, True)
  try:
    assert printed(run(sandbox, 'import os\nprint(sorted(map(int, os.listdir("/proc/self/fd")))[:-1])')) == '[0, 1, 2]'
  finally:
    os.close(reader)
    os.close(writer)


@pytest.mark.slow
def test_the_same_program_prints_the_same(sandbox):
  program = 'print({str(i) for i in range(100)})'
  assert printed(run(sandbox, program)) == printed(run(sandbox, program))


def test_packages_are_those_that_are_given(sandbox, tmp_path):
  (tmp_path / 'mine.py').write_text('value = 7')
  tmp_path.chmod(0o755)
  program = """
import mine
try:
  open(mine.__file__, 'w')
except OSError:
  print(mine.value)
"""
  assert printed(run(Sandbox(packages=[str(tmp_path)]), program)) == '7'
  assert run(sandbox, program).verdict == 'crash'
  with pytest.raises(ValueError, match=r"packages='/nowhere' is not a folder"):
    Sandbox(packages=['/nowhere'])


@pytest.mark.skipif(os.geteuid() != 0, reason='needs root, which runs programs as another user')
def test_packages_that_the_other_user_cannot_read_are_refused(sandbox, tmp_path):
  tmp_path.chmod(0o750)
  with pytest.raises(ValueError, match=r'cannot be read by every user.*chmod o\+rx'):
    Sandbox(packages=[str(tmp_path)])


@pytest.mark.skipif(not os.access('/usr/bin/python3', os.X_OK), reason='needs /usr/bin/python3')
def test_another_interpreter(sandbox):
  other = Sandbox('/usr/bin/python3')
  other.check()
  assert printed(run(other, 'import sys\nprint(sys.executable)')).startswith('/usr/bin/python3')
  with pytest.raises(ValueError, match=r"python='/bin/false' cannot be run"):
    Sandbox('/bin/false')


def test_a_program_ends_with_the_process_that_started_it(sandbox):
  mark = f'mark-{os.getpid()}'
  code = f"""
import os
from ragen_jax.envs.dataset.confined import Limits
from ragen_jax.envs.dataset.sandbox import Sandbox
program = b'import time; print(1, flush=True); time.sleep(60)'
running = Sandbox().start({{'p.py': program}}, ['/program/p.py', {mark!r}], Limits())
print(running.read_line(30), flush=True)
os.kill(os.getpid(), 9)
"""
  ended = subprocess.run([sys.executable, '-c', code], capture_output=True, cwd=ROOT, timeout=120)
  assert ended.stdout == b"b'1'\n"
  end = time.monotonic() + 30
  while any_process_with(mark) and time.monotonic() < end:
    time.sleep(0.02)
  assert not any_process_with(mark)


def any_process_with(argument: str) -> bool:
  return any(argument.encode() in text.split(b'\0') for text in of_processes('cmdline'))


def of_processes(file: str) -> list[bytes]:
  texts = []
  for path in pathlib.Path('/proc').glob(f'[0-9]*/{file}'):
    with contextlib.suppress(OSError):  # the process has ended
      texts.append(path.read_bytes())
  return [text for text in texts if text]


# -- talking -----------------------------------------------------------------------------------------------------------


def start(sandbox: Sandbox, program: str, **limits):
  changed = dataclasses.replace(LIMITS, **limits)
  return sandbox.start({'program.py': program.encode()}, ['/program/program.py'], changed)


def test_lines_go_both_ways(sandbox):
  program = 'import sys\nfor line in sys.stdin: print(len(line), flush=True)\nprint("end")'
  with start(sandbox, program) as running:
    for length in (1, 70_000, 300_000):
      running.send(b'x' * length + b'\n')
      assert running.read_line(20) == str(length + 1).encode()


def test_a_line_that_does_not_come_is_none(sandbox):
  with start(sandbox, 'print("no line", end="")') as running:
    running.send(b'x' * 1_000_000)  # nobody reads it
    assert running.read_line(20) is None
    assert running.finish().verdict == 'ok'
  with start(sandbox, 'import time\nprint(1, flush=True)\ntime.sleep(60)') as running:
    assert running.read_line(20) == b'1'
    assert running.read_line(0.3) is None
    assert running.finish().verdict == 'timeout'
  with start(sandbox, 'while True: print("x" * 1000, end="")') as running:
    assert running.read_line(20) is None
    assert running.finish().verdict == 'output'


def test_an_interrupt_of_the_terminal_does_not_reach_a_program(sandbox):
  def groups_of_children():
    stats = [text.partition(b' (')[0:1] + tuple(text.rpartition(b') ')[2].split()) for text in of_processes('stat')]
    return {int(pid): int(group) for pid, _, parent, group, *_ in stats if int(parent) == os.getpid()}

  others = groups_of_children()
  with start(sandbox, 'import time\nprint(1, flush=True)\ntime.sleep(60)') as running:
    assert running.read_line(20) == b'1'
    groups = [group for pid, group in groups_of_children().items() if pid not in others]
    assert groups and os.getpgid(0) not in groups


@pytest.mark.slow
def test_a_program_ends_with_its_context(sandbox):
  with start(sandbox, 'import time\nprint(1, flush=True)\ntime.sleep(60)') as running:
    assert running.read_line(20) == b'1'
    before = time.monotonic()
  assert time.monotonic() - before < 20


# -- what is missing ---------------------------------------------------------------------------------------------------


def test_without_bubblewrap_one_line_says_what_to_install(monkeypatch):
  found = shutil.which
  monkeypatch.setattr(shutil, 'which', lambda name, path=None: None if name == 'bwrap' else found(name, path=path))
  with pytest.raises(ValueError, match=r'needs bwrap.*apt-get install bubblewrap') as error:
    Sandbox()
  assert '\n' not in str(error.value)


@pytest.mark.parametrize(
  'script, message',
  [
    ('echo "bwrap: No permissions to create new namespace" >&2; exit 1', 'cannot confine.*No permissions.*apt-get'),
    # It says that the program ran, and runs nothing.
    ('echo \'{"exit-code": 0}\' >&"$(tr "\\0" "\\n" <&$2 | grep -A1 json-status | tail -n 1)"', 'does not confine'),
  ],
)
def test_a_bubblewrap_that_does_not_confine_is_refused(monkeypatch, script, message):
  with tempfile.TemporaryDirectory() as folder:
    os.chmod(folder, 0o755)
    fake = pathlib.Path(folder, 'bwrap')
    fake.write_text(f'#!/bin/bash\n{script}\n')
    fake.chmod(0o755)
    monkeypatch.setenv('PATH', f'{folder}:{os.environ["PATH"]}')
    with pytest.raises(ValueError, match=message) as error:
      Sandbox().check()
    assert '\n' not in str(error.value)


def test_a_program_that_cannot_start_is_an_error_and_no_verdict(sandbox, tmp_path):
  folder = tmp_path / 'gone'
  folder.mkdir()
  folder.chmod(0o755)
  other = Sandbox(packages=[str(folder)])
  folder.rmdir()
  with pytest.raises(SandboxError, match='could not be started'):
    run(other, 'print(1)')
