"""A Slurm cluster of one machine, without changes of the machine: all files are in one directory.

The nodes are several `slurmd` of this machine. The first has the machine's name, which JAX's coordinator is found by.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

from tests.support.paths import ROOT

_DAEMONS = ('munged', 'slurmctld', 'slurmd')
_CLIENTS = ('sbatch', 'srun', 'scontrol', 'squeue', 'scancel')
# Slurm waits `cred_expire` seconds before it starts a job again. A start that is forced earlier can be refused: a node
# takes a credential of the same second as the end of the first run for a revoked one, and the job ends.
_CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=60
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=1
KillWait=10
SlurmdParameters=config_overrides
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_PATH = f'/usr/sbin:/sbin:{os.environ.get("PATH", "")}'


def missing() -> str:
  """What this machine lacks for a cluster; '' if it has all."""
  if os.name != 'posix' or os.geteuid():
    return 'slurmd needs root'
  lacking = [name for name in (*_DAEMONS, *_CLIENTS) if shutil.which(name, path=_PATH) is None]
  if lacking:
    return f'{", ".join(lacking)} not installed (Debian: slurm-wlm, munge)'
  try:
    socket.gethostbyname(_host())
  except OSError:
    return f'the name {_host()} of this machine does not resolve'
  return ''


def _host() -> str:
  return socket.gethostname().partition('.')[0]


class Cluster:
  """An open cluster.

  Attributes:
    nodes: the names of the nodes.
    directory: logs and state.
  """

  def __init__(self, directory: pathlib.Path, nodes: tuple[str, ...]):
    self.directory, self.nodes = directory, nodes

  def environment(self) -> dict[str, str]:
    """The variables of Slurm's commands."""
    return os.environ | {'SLURM_CONF': f'{self.directory}/slurm.conf', 'PATH': _PATH}

  def run(self, *command: str, **variables: str) -> str:
    """The output of one of Slurm's commands, in the repository's root."""
    done = subprocess.run(
      command, cwd=ROOT, env=self.environment() | variables, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout.strip()

  def submit(self, log: pathlib.Path, *arguments: str, options: tuple[str, ...], variables: Mapping[str, str]) -> str:
    """Submits launch/slurm.sbatch for machines without GPUs; returns the job's number."""
    settings = ('--parsable', '--gpus-per-node=0', '--cpus-per-task=1', f'--output={log}', *options)
    python = {'PYTHON': sys.executable, **variables}
    return self.run('sbatch', *settings, 'launch/slurm.sbatch', *arguments, **python)

  def job(self, number: str) -> dict[str, str]:
    """What `scontrol show job` says of a job, by field."""
    words = self.run('scontrol', '--oneliner', 'show', 'job', number).split()
    return dict(word.split('=', 1) for word in words if '=' in word)


@contextlib.contextmanager
def open_cluster(directory: pathlib.Path, nodes: int) -> Iterator[Cluster]:
  """Context manager: starts a cluster, and ends its jobs and daemons."""
  host = _host()
  names = (host, *(f'zz-{i}' for i in range(1, nodes)))  # nodes are listed in this order
  cluster, daemons = Cluster(directory, names), []
  directory.mkdir(mode=0o755)
  (directory / 'state').mkdir()
  with contextlib.ExitStack() as held:
    ports = [held.enter_context(_free()).getsockname()[1] for _ in range(nodes + 2)]
  text = _CONFIG.format(host=host, ports=ports, directory=directory)
  for name, port in zip(names, ports[2:], strict=True):
    (directory / f'spool-{name}').mkdir()
    text += f'NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=1000\n'
  (directory / 'slurm.conf').write_text(text)
  key = directory / 'munge.key'
  key.touch(0o600)
  key.write_bytes(os.urandom(1024))

  def start(*command: str) -> None:
    with (directory / 'output').open('a') as output:
      daemons.append(
        subprocess.Popen(command, env=cluster.environment(), stdout=output, stderr=output, start_new_session=True)
      )

  try:
    files = [f'--{name}={directory}/munge.{end}' for name, end in _MUNGE.items()]
    start('munged', '--force', '--foreground', *files)
    wait(lambda: (directory / 'munge.socket').exists())
    start('slurmctld', '-D')
    for name in names:
      start('slurmd', '-D', '-N', name)
    wait(lambda: cluster.run('squeue', '--noheader') == '' and len(_idle(cluster)) == nodes)
    yield cluster
    cluster.run('scancel', '--full', '--signal=KILL', '--user=root')
    cluster.run('scancel', '--user=root')
    wait(lambda: cluster.run('squeue', '--noheader') == '')
  finally:
    for daemon in reversed(daemons):
      daemon.terminate()
    for daemon in daemons:
      try:
        daemon.wait(20)
      except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


_MUNGE = {
  'key-file': 'key', 'socket': 'socket', 'pid-file': 'pid', 'log-file': 'log', 'seed-file': 'seed',
}  # fmt: skip


def _free() -> socket.socket:
  free = socket.socket()
  free.bind(('127.0.0.1', 0))
  return free


def _idle(cluster: Cluster) -> list[str]:
  return [name for name in cluster.nodes if 'State=IDLE' in cluster.run('scontrol', 'show', 'node', name)]


def wait(condition, limit_s: float = 60.0) -> None:
  """Waits until a condition holds; a command that fails in the meantime, as while daemons start, is no end."""
  end = time.monotonic() + limit_s
  while True:
    try:
      if condition():
        return
    except AssertionError:
      if time.monotonic() > end:
        raise
    assert time.monotonic() < end, 'the condition does not hold in time'
    time.sleep(0.5)
