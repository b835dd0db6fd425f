"""The chips that programs can be compiled for without one: their names, their numbers, and devices to compile for.

XLA's compilers for TPUs and GPUs run on a CPU. `devices` gives devices that can be put into a mesh and compiled for,
and on which nothing can run. Whatever needs them must call `prepare` before JAX starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies as jax_topologies

from ragen_jax.distributed.chips import CHIPS, Chip
from ragen_jax.utils.errors import UserError


@dataclasses.dataclass(frozen=True)
class Topology:
  """Some chips of one kind."""

  name: str  # such as 'v5e:2x4'
  chip: Chip
  shape: tuple[int, ...]  # chips along each axis; one number for GPUs

  @property
  def size(self) -> int:
    """Number of chips."""
    return math.prod(self.shape)


def names() -> str:
  """The allowed names, in one line."""
  return '; '.join(f'{kind}:{"|".join(chip.shapes)}' for kind, chip in CHIPS.items())


def parse(name: str, field: str = 'plan.topology') -> Topology:
  """The topology of a name such as 'v5e:2x4' or 'h100:8'. Raises UserError, which names the `field`, for others."""
  kind, _, shape = name.partition(':')
  if kind not in CHIPS or shape not in CHIPS[kind].shapes:
    raise UserError(f'{field}={name!r}: allowed: {names()}')
  return Topology(name, CHIPS[kind], tuple(int(x) for x in shape.split('x')))


def missing(platform: str) -> str:
  """What has to be installed to compile for a platform, in one line; '' if it is there."""
  version = jax.__version__
  if platform == 'tpu':
    if importlib.util.find_spec('libtpu') is not None:
      return ''
    return (
      f'the TPU compiler is not installed: pip install -r requirements-aot.txt, or pip install "jax[tpu]=={version}"'
    )
  if any(_found(f'jax_plugins.xla_cuda{n}') for n in (12, 13)) and _cuda_tools() is not None:
    return ''
  return (
    f'the GPU compiler is not installed: pip install --no-deps jax-cuda12-plugin=={version} '
    f'jax-cuda12-pjrt=={version} nvidia-cuda-nvcc-cu12'
  )


def _found(module: str) -> bool:
  try:
    return importlib.util.find_spec(module) is not None
  except ModuleNotFoundError:  # its parent is not there either
    return False


def _cuda_tools() -> pathlib.Path | None:
  """The folder of NVIDIA's package that has `bin/ptxas` and `nvvm/libdevice`."""
  spec = importlib.util.find_spec('nvidia')
  for place in (spec and spec.submodule_search_locations) or ():
    for folder in ('cuda_nvcc', 'cu13'):
      if (pathlib.Path(place) / folder / 'bin' / 'ptxas').is_file():
        return pathlib.Path(place) / folder
  return None


def prepare(topology: Topology) -> None:
  """Sets what the compilers read when they are loaded. Call it before any other use of JAX; JAX then runs on CPU.

  Raises UserError if the compiler is not installed.
  """
  problem = missing(topology.chip.platform)
  if problem:
    raise UserError(f'plan.topology={topology.name!r}: {problem}')
  # The plugins then take no part in a run, and do not ask for their chips.
  jax.config.update('jax_platforms', 'cpu')
  # Programs for chips that are not there cannot be read back from a cache, and what compilation costs is a result.
  jax.config.update('jax_enable_compilation_cache', False)
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  if topology.chip.platform == 'tpu':
    # No TPU is looked for, several processes may compile at the same time, and only errors are written.
    found = {
      'TPU_ACCELERATOR_TYPE': 'none', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'TPU_SKIP_MDS_QUERY': '1',
      'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_STDERR_LOG_LEVEL': '3', 'TPU_MIN_LOG_LEVEL': '3',
    }  # fmt: skip
    for variable, value in found.items():
      os.environ.setdefault(variable, value)
  else:
    tools = _cuda_tools()
    # Autotuning would run the candidates on a GPU.
    flags = (f'--xla_gpu_cuda_data_dir={tools}', '--xla_gpu_autotune_level=0')
    os.environ['XLA_FLAGS'] = ' '.join([os.environ.get('XLA_FLAGS', ''), *flags]).strip()
    os.environ['PATH'] = f'{tools / "bin"}{os.pathsep}{os.environ.get("PATH", "")}'


def devices(topology: Topology) -> list[Any]:
  """Devices to compile for, in the order of a run's: by host, then by index.

  Raises UserError if this version of the compiler does not know the topology.
  """
  try:
    with quiet():
      if topology.chip.platform == 'tpu':
        found = jax_topologies.get_topology_desc(
          platform='tpu', topology_name=topology.name, chips_per_host_bounds=_host_bounds(topology)
        )
      else:
        found = jax_topologies.get_topology_desc(
          platform='cuda', topology_name='', topology=f'1x1x{topology.size}', target_config=_gpu_target(topology.chip)
        )
  except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, NotImplementedError) as e:
    reason = ' '.join(str(e).split())[:300]
    raise UserError(f'plan.topology={topology.name!r}: the installed compiler does not take it ({reason})') from e
  return sorted(found.devices, key=lambda d: (d.process_index, d.id))


def _host_bounds(topology: Topology) -> list[int]:
  """Chips of one host along each axis: up to eight of a flat TPU are one host, larger ones have hosts of four."""
  shape = (*topology.shape, 1, 1)[:3]
  return list(shape) if len(topology.shape) == 2 and topology.size <= 8 else [2, 2, 1]


def _gpu_target(chip: Chip) -> str:
  """A GPU as XLA's compiler describes it to itself (`stream_executor.GpuTargetConfigProto` in text form)."""
  text = (pathlib.Path(__file__).parent / 'hopper.txtpb').read_text()
  text = re.sub(r'memory_bandwidth: \d+', f'memory_bandwidth: {chip.hbm_bandwidth:.0f}', text)
  return re.sub(r'device_memory_size: \d+', f'device_memory_size: {chip.hbm_bytes:.0f}', text)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Keeps what libraries write to the process's standard error off the terminal, for as long as no error is raised."""
  with tempfile.TemporaryFile() as held:
    kept = os.dup(2)
    os.dup2(held.fileno(), 2)
    try:
      yield
    finally:
      os.dup2(kept, 2)
      os.close(kept)
