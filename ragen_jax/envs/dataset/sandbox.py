"""Runs programs that nobody has read, confined by bubblewrap (bwrap) and resource limits.

A program sees an empty read-only file system with Python's own files, a folder of limited size, and no network; it has
namespaces of its own for users, processes, mounts, network, IPC, host name and cgroups. Nothing is run without them.
docs/programs.md says what this protects against, and what not.

The chain of commands is `unshare sh setpriv bwrap prlimit PROGRAM`; each replaces the one before, so that the process
that was started is bwrap, and bwrap ends with the process that started it. Only root needs the first three:

- The limit of processes does not bind root, so bwrap runs as another user. It is one of 64 in turn, because before
  Linux 5.14 the limit counts the processes of a user in all sandboxes together.
- That user may not enter the folder that Python lies in, such as one in /root. `unshare` makes a mount namespace, in
  which `sh` mounts such folders where everybody may go.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from ragen_jax.envs.dataset.confined import Confined, Limits, Outcome, SandboxError, memory_file
from ragen_jax.envs.dataset.system_calls import call_filter
from ragen_jax.utils.errors import one_line

# A range that systemd's table of users leaves free.
_USERS = range(60600, 60664)
_user = itertools.count()
# Where root mounts folders that others cannot reach: folders that every system has.
_STAGES = ('/mnt', '/media', '/srv', '/opt')
# On most systems links to folders in /usr.
_LINKS = ('/lib', '/lib64', '/lib32')
# $1 is such a folder; then come what is mounted there as 0, 1, ..., a `--`, and the next command.
_MOUNT = """
stage=$1; i=0; shift; mount -t tmpfs none "$stage"
while [ "$1" != -- ]; do
  if [ -d "$1" ]; then mkdir "$stage/$i"; else : >"$stage/$i"; fi
  mount --rbind "$1" "$stage/$i"; i=$((i + 1)); shift
done
shift; exec "$@"
"""
_INSTALL = 'apt-get install bubblewrap'
_ASK_PYTHON = 'import sys, json; print(json.dumps([sys.base_prefix, getattr(sys, "_base_executable", sys.executable)]))'


class Sandbox:
  """Starts confined programs in Python. Threads may share it."""

  def __init__(self, python: str = '', packages: Sequence[str] = ()):
    """Finds what is needed and runs nothing but Python itself.

    Args:
      python: the interpreter; '' for that of this process. Its site-packages are hidden from programs.
      packages: folders of packages that programs may import, made by `pip install --target`.

    Raises:
      ValueError: a file is missing; one line says what to install.
    """
    self._bwrap, self._prlimit = _program('bwrap', _INSTALL), _program('prlimit', 'apt-get install util-linux')
    prefix, self._python = _locate(python)
    # Source -> place in the sandbox, read-only.
    self._binds = {path: path for path in _library_folders(prefix)} | {self._python: self._python}
    self._binds[self._prlimit] = '/run/prlimit'
    for i, folder in enumerate(packages):
      if not os.path.isdir(folder):
        raise ValueError(f'packages={folder!r} is not a folder; allowed: folders made by pip install --target')
      self._binds[os.path.realpath(folder)] = f'/packages/{i}'
    self._hidden = sorted({p for source in self._binds for p in _site_folders(source)})
    self._environment = {
      'HOME': '/work',
      'TMPDIR': '/work',
      'LANG': 'C.UTF-8',
      'LD_LIBRARY_PATH': f'{prefix}/lib',
      'PYTHONPATH': ':'.join(f'/packages/{i}' for i in range(len(packages))),
      'PYTHONDONTWRITEBYTECODE': '1',
      # The order of a set is the same each time, and so is the verdict.
      'PYTHONHASHSEED': '0',
      # Libraries would start a thread for each core of the machine.
      'OPENBLAS_NUM_THREADS': '1',
      'OMP_NUM_THREADS': '1',
    }
    self._as_user = os.geteuid() == 0 and _maps_users()
    unreadable = [s for s in self._binds if self._as_user and not os.stat(s).st_mode & 0o004]
    if unreadable:
      raise ValueError(f'{unreadable[0]!r}, which programs need, cannot be read by every user; chmod o+rx')
    self._staged = [s for s in self._binds if not _is_reachable(s)] if self._as_user else []
    self._stage = next((s for s in _STAGES if os.path.isdir(s) and not any(_is_in(b, s) for b in self._binds)), '')
    if self._as_user:
      self._setpriv = _program('setpriv', 'apt-get install util-linux')
    if self._staged:
      self._unshare = _program('unshare', 'apt-get install util-linux')
      if not self._stage:
        raise ValueError(f'no folder to mount {self._staged[0]} in; needed: one of {", ".join(_STAGES)}')

  def check(self) -> None:
    """Runs a program that tries the walls.

    Raises:
      ValueError: programs cannot be confined here; one line says why.
    """
    limits = Limits(processes=4, memory_mib=256)
    try:
      outcome = self.run({'probe.py': _PROBE.encode()}, ['/program/probe.py'], b'', limits)
    except (SandboxError, OSError) as e:
      raise ValueError(
        f'bubblewrap cannot confine programs here ({one_line(e, str)}); needed: {_INSTALL} (0.8 or newer), Linux 5.3 '
        'or newer, and in a container the permission to make user namespaces'
      ) from e
    found = outcome.stdout.decode(errors='replace').strip()
    if outcome.verdict != 'ok' or not found.isdigit() or not 1 <= int(found) < limits.processes:
      stderr = one_line(outcome.stderr[-300:].decode(errors='replace'), str)
      raise ValueError(
        f'bubblewrap does not confine programs here (a test program that may have {limits.processes} processes made '
        f'{found[:20] or "none"}; it ended as {outcome.verdict}: {stderr}); no program is run'
      )

  def run(self, files: Mapping[str, bytes], argv: Sequence[str], stdin: bytes, limits: Limits) -> Outcome:
    """Runs a program to its end.

    Args:
      files: name -> content of files in /program, which are read-only.
      argv: the arguments of Python.

    Raises:
      SandboxError: the program did not start.
    """
    with memory_file(stdin) as source, self._open(files, argv, source, limits) as running:
      return running.finish()

  def start(self, files: Mapping[str, bytes], argv: Sequence[str], limits: Limits) -> Confined:
    """Starts a program to talk with; see `run`."""
    return self._open(files, argv, subprocess.PIPE, limits)

  def _open(self, files: Mapping[str, bytes], argv: Sequence[str], stdin: int, limits: Limits) -> Confined:
    with contextlib.ExitStack() as stack:
      contents = {name: stack.enter_context(memory_file(data)) for name, data in files.items()}
      rules = stack.enter_context(memory_file(call_filter()))
      reader, writer = os.pipe()
      try:
        words = self._options(contents, writer, rules, limits)
        options = stack.enter_context(memory_file('\0'.join(words).encode() + b'\0'))
        command = [*self._prefix(), self._bwrap, '--args', str(options), '--', *self._limited(limits)]
        process = subprocess.Popen(
          [*command, self._python, *argv],
          stdin=stdin,
          stdout=subprocess.PIPE,
          stderr=subprocess.PIPE,
          bufsize=0,
          pass_fds=[*contents.values(), rules, options, writer],
          cwd='/',
          env={},  # programs can read the environment of bwrap, which holds nothing then
          start_new_session=True,  # a Ctrl-C in the terminal must not look like a crash
        )
      except BaseException:
        os.close(reader)
        raise
      finally:
        os.close(writer)
      return Confined(process, reader, limits)

  def _prefix(self) -> list[str]:
    """The commands that become another user."""
    if not self._as_user:
      return []
    user = _USERS[next(_user) % len(_USERS)]
    become = [self._setpriv, f'--reuid={user}', f'--regid={user}', '--clear-groups', '--inh-caps=-all']
    if not self._staged:
      return become
    mount = [self._unshare, '--mount', '--propagation', 'private', '/bin/sh', '-ec', _MOUNT, 'sh', self._stage]
    return [*mount, *self._staged, '--', *become]

  def _options(self, contents: Mapping[str, int], status: int, rules: int, limits: Limits) -> Iterator[str]:
    """The options of bwrap. They are passed in a file: a program sees the command lines of its sandbox."""
    yield from ('--unshare-all', '--unshare-user', '--disable-userns', '--assert-userns-disabled')
    yield from ('--die-with-parent', '--new-session', '--clearenv', '--json-status-fd', str(status))
    if call_filter():
      yield from ('--seccomp', str(rules))
    yield from ('--uid', '1000', '--gid', '1000', '--hostname', 'sandbox')
    for name, value in self._environment.items():
      yield from ('--setenv', name, value)
    for link in _LINKS:
      if os.path.islink(link):
        yield from ('--symlink', os.readlink(link), link)
    for source, place in self._binds.items():
      staged = f'{self._stage}/{self._staged.index(source)}' if source in self._staged else source
      yield from ('--ro-bind', staged, place)
    for folder in self._hidden:
      yield from ('--size', '4096', '--tmpfs', folder, '--remount-ro', folder)
    yield from ('--proc', '/proc', '--dev', '/dev')
    for name, content in contents.items():
      yield from ('--perms', '0444', '--file', str(content), f'/program/{name}')
    yield from ('--size', str(limits.disk_mib << 20), '--tmpfs', '/work', '--symlink', 'work', '/tmp')
    # What bwrap makes itself is writable, and of no limited size.
    yield from ('--chdir', '/work', '--remount-ro', '/dev', '--remount-ro', '/')

  def _limited(self, limits: Limits) -> list[str]:
    """The command that sets limits, in the sandbox: Linux counts processes there, from 5.14 on."""
    values = {
      'as': limits.memory_mib << 20,
      'cpu': f'{limits.cpu_s}:{limits.cpu_s + 1}',
      'fsize': limits.file_mib << 20,
      'nofile': limits.open_files,
      'nproc': limits.processes + 1,  # the first process of the sandbox is bwrap's
      'core': 0,
      'msgqueue': 0,
      'memlock': 0,
      'sigpending': 64,
    }
    return ['/run/prlimit', *(f'--{name}={value}' for name, value in values.items()), '--']


# Prints how many children it could have at a time. It asks for more than it may, and for a bounded number.
_PROBE = """
import os, signal
children = []
try:
  while len(children) < 12:
    child = os.fork()
    if not child:
      signal.pause()
    children.append(child)
except OSError:
  pass
links = [line.split(':')[0].strip() for line in open('/proc/net/dev').readlines()[2:]]
assert links == ['lo'], links
assert not os.path.exists('/etc/passwd') and not os.access('/', os.W_OK)
print(len(children))
"""


def _program(name: str, install: str) -> str:
  path = shutil.which(name, path=os.environ.get('PATH', os.defpath) + ':/usr/sbin:/sbin')
  if sys.platform != 'linux' or path is None:
    raise ValueError(f'programs are graded in a sandbox that needs {name} on Linux, which is not there; {install}')
  return os.path.realpath(path)


def _locate(python: str) -> tuple[str, str]:
  """The folder of an interpreter's own files, and its file, without virtual environments."""
  if not python:
    prefix, executable = sys.base_prefix, getattr(sys, '_base_executable', sys.executable)
  else:
    try:
      answer = subprocess.run([python, '-I', '-c', _ASK_PYTHON], capture_output=True, check=True, timeout=60).stdout
      prefix, executable = json.loads(answer)
    except (OSError, subprocess.SubprocessError, ValueError) as e:
      raise ValueError(f'python={python!r} cannot be run ({one_line(e, str)}); allowed: a Python interpreter') from e
  return os.path.realpath(prefix), os.path.realpath(executable)


def _library_folders(prefix: str) -> list[str]:
  """Folders of libraries: the system's, and those in the folder of an interpreter."""
  folders = [
    '/usr/lib',
    '/usr/lib64',
    '/usr/lib32',
    *(f for f in ('/lib', '/lib64', '/lib32') if not os.path.islink(f)),
  ]
  folders += [f'{prefix}/lib', f'{prefix}/lib64']
  return [f for f in dict.fromkeys(folders) if os.path.isdir(f) and not os.path.islink(f)]


def _site_folders(source: str) -> Iterator[str]:
  """Folders of installed packages below a folder of libraries: they may hold data sets, solutions included."""
  for pattern in ('python*/site-packages', 'python*/dist-packages'):
    yield from (str(p) for p in pathlib.Path(source).glob(pattern) if p.is_dir() and not p.is_symlink())


def _maps_users() -> bool:
  """Whether the users of `_USERS` exist for the kernel, which is not so for the root of some containers."""
  for line in pathlib.Path('/proc/self/uid_map').read_text().splitlines():
    first, _, count = map(int, line.split())
    if first <= _USERS[0] and _USERS[-1] < first + count:
      return True
  return False


def _is_reachable(path: str) -> bool:
  """Whether every user may enter the folders above a file or folder."""
  return all(folder.stat().st_mode & 0o001 for folder in pathlib.Path(path).parents)


def _is_in(path: str, folder: str) -> bool:
  return path == folder or path.startswith(folder + '/')
