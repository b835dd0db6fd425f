"""Uploads to a stand-in of the hub: the model with its card, the episodes as a data set, and refusals in one line.

The client is the hub's own, imported anew in processes of its own, because it then reads the hub's address.
"""

from __future__ import annotations

import gzip
import json
import os

import numpy as np
import pytest
import yaml

from ragen_jax.config.checks import check_config
from ragen_jax.modes import hub
from ragen_jax.runs.metrics import MetricWriter
from ragen_jax.runs.workdir import record_config
from ragen_jax.viewer.store import EpisodeWriter
from tests.support import hub as hubs
from tests.support.configs import assert_refused, small_config
from tests.support.made_up_episodes import episode_record
from tests.support.processes import copy_python

_PUSH = """
import pickle, sys
for name in [name for name in sys.modules if name.partition('.')[0] == 'huggingface_hub']:
  del sys.modules[name]
from ragen_jax.modes import hub
from ragen_jax.utils.errors import UserError
config, workdir, output = pickle.load(open(sys.argv[1], 'rb')), sys.argv[2], sys.argv[3]
try:
  print(hub.push_model(config, workdir, output, 2) if output else hub.push_episodes(config, workdir))
except UserError as e:
  print(f'refused: {e}')
"""
_SECRET = 'keepThisOutOfCards'


@pytest.fixture
def run(tmp_path):
  """A workdir with metrics, an evaluation by --mode=eval and episodes, and an exported directory."""
  config = small_config(export__push='me/games', export__push_episodes='me/played')
  config.agent.request = f'{{form}} in {{max_words}} words for https://me:{_SECRET}@host {{example}}'
  workdir = tmp_path / 'frozen'
  record_config(workdir, config.to_dict())
  with MetricWriter(workdir) as writer:
    for step in range(4):
      values = {'success': 0.1 + step / 4, 'optimal': 0.9}
      row = {f'val-env/FrozenLake/{name}': x for name, x in values.items()}
      writer.scalars(step, row | {'val-env/success': values['success'], 'val-greedy/FrozenLake/success': 0.5})
  (workdir / 'evaluation').mkdir()
  success = {'mean': 0.625, 'low': 0.5, 'high': None}
  row = {'policy': 'checkpoint 2', 'kind': 'model', 'tag': 'FrozenLake', 'sampling': 'greedy'}
  head = {'version': 1, 'model': 'tiny', 'checkpoint': 2, 'trained_on': [], 'eval': {'tags': ['FrozenLake']}}
  evaluation = head | {'rows': [row | {'levels': 4, 'episodes': 4, 'metrics': {'success': success}}]}
  (workdir / 'evaluation' / 'step_2.json').write_text(json.dumps(evaluation))
  episodes = EpisodeWriter(workdir)
  picture = np.zeros((2, 2, 3), np.uint8)
  for kind, step in (('train', 1), ('eval', 0), ('eval', 2)):
    episodes.write(kind, step, [episode_record(step=step, tag='FrozenLake') | {'final_picture': picture}])
  output = tmp_path / 'export'
  output.mkdir()
  (output / 'config.json').write_text('{}')
  (output / 'model.safetensors').write_bytes(b'weights')
  return config, workdir, output


def _push(stand_in, tmp_path, config, workdir, output='', token=hubs.TOKEN):
  import pickle

  (tmp_path / 'config.pkl').write_bytes(pickle.dumps(config.copy_and_resolve_references()))
  done = copy_python(
    _PUSH, tmp_path / 'config.pkl', workdir, output, check=True, HF_ENDPOINT=stand_in.url, HF_TOKEN=token,
    HF_HUB_DISABLE_XET='1', HF_HOME=str(tmp_path / 'home'), HF_HUB_OFFLINE='0', HF_HUB_DISABLE_TELEMETRY='1',
    SOME_SECRET=_SECRET,
  )  # fmt: skip
  assert token not in done.stdout
  return done.stdout.strip().splitlines()[-1]


def _front_matter(card):
  _, head, text = card.decode().split('---\n', 2)
  return yaml.safe_load(head), text


@pytest.mark.slow
def test_a_model_is_uploaded_with_its_card(run, tmp_path):
  config, workdir, output = run
  with hubs.stand_in() as stand_in:
    assert _push(stand_in, tmp_path, config, workdir, output) == f'{stand_in.url}/me/games/commit/1'
  assert stand_in.repositories[('model', 'me/games')].get('private') is True or (
    stand_in.repositories[('model', 'me/games')].get('visibility') == 'private'
  )
  assert stand_in.messages == ['Iteration 2 of frozen']
  files = stand_in.files[('model', 'me/games')]
  assert files['model.safetensors'] == b'weights' and files['config.json'] == b'{}'
  assert files['curves.png'].startswith(b'\x89PNG')
  head, text = _front_matter(files['README.md'])
  assert head['library_name'] == 'transformers' and 'base_model' not in head
  lines = text.splitlines()
  assert '| in training, iteration 2 | FrozenLake | temperature 0.5 | 0.600 | 0.900 |' in lines
  assert '| in training, iteration 2 | FrozenLake | greedy | 0.500 | 0.900 |' in lines
  assert '| `--mode=eval`, checkpoint 2 | FrozenLake | greedy | 0.625 |  |' in lines
  assert [line for line in lines if line.startswith(('| 0 |', '| 3 |'))] == ['| 0 | 0.100 |', '| 3 | 0.850 |']
  assert 'algorithm.policy_loss: "ppo"' in lines and 'train.groups: 4' in lines
  assert not any(_SECRET.encode() in content for content in files.values())


def test_the_card_names_the_base_model_and_adapters(run):
  config, workdir, _ = run
  config.model.preset, config.lora.rank, config.export.lora = 'qwen2.5-0.5b', 4, 'adapter'
  head, text = _front_matter(hub.model_card(config, workdir, 0, figure=False).encode())
  assert (head['library_name'], head['base_model']) == ('peft', 'Qwen/Qwen2.5-0.5B')
  assert 'curves.png' not in text and 'mode=eval' not in text
  config.model.path = '/where/it/lies'
  assert 'base_model' not in _front_matter(hub.model_card(config, workdir, 0, figure=False).encode())[0]
  (workdir / 'metrics.jsonl').unlink()
  assert 'The run has no evaluation of this checkpoint.' in hub.model_card(config, workdir, 0, figure=False)


@pytest.mark.slow
def test_episodes_are_uploaded_as_a_data_set(run, tmp_path):
  config, workdir, _ = run
  with hubs.stand_in() as stand_in:
    assert _push(stand_in, tmp_path, config, workdir) == f'{stand_in.url}/me/played/commit/1'
  files = stand_in.files[('dataset', 'me/played')]
  rows = {split: gzip.decompress(files[f'{split}.jsonl.gz']).decode().splitlines() for split in ('train', 'eval')}
  assert [len(rows[split]) for split in ('train', 'eval')] == [1, 2]
  row = json.loads(rows['eval'][1])
  assert (row['step'], row['tag']) == (2, 'FrozenLake') and 'final_picture' not in row and row['turns']
  assert not any('picture' in turn or 'images' in turn for turn in row['turns'])
  head, text = _front_matter(files['README.md'])
  assert head['configs'][0]['data_files'] == [{'split': x, 'path': f'{x}.jsonl.gz'} for x in ('train', 'eval')]
  assert '| eval | 2 |' in text
  # The hub's library reads the files as one table, of columns with one type each.
  datasets = pytest.importorskip('datasets', reason='needs datasets: pip install datasets')
  for name in ('train', 'eval'):
    (tmp_path / f'{name}.jsonl.gz').write_bytes(files[f'{name}.jsonl.gz'])
  paths = {name: str(tmp_path / f'{name}.jsonl.gz') for name in ('train', 'eval')}
  read = datasets.load_dataset('json', data_files=paths, cache_dir=str(tmp_path / 'cache'))
  assert read['eval'][1]['turns'][0]['prompt'] == row['turns'][0]['prompt']


@pytest.mark.slow
def test_a_hub_that_refuses_is_told_in_one_line(run, tmp_path):
  config, workdir, output = run
  with hubs.stand_in() as stand_in:
    token = 'hf_notTheTokenOfTheHub'
    told = _push(stand_in, tmp_path, config, workdir, output, token=token)
  assert told.startswith("refused: export.push='me/games': was not uploaded (") and '401' in told
  assert token not in told and not stand_in.repositories
  told = _push(stand_in, tmp_path, config, workdir)  # nothing answers
  assert told.startswith("refused: export.push_episodes='me/played': was not uploaded (")


def test_a_damaged_file_of_episodes_is_left_out_of_the_data_set(run, monkeypatch, caplog):
  config, workdir, _ = run
  (damaged,) = (workdir / 'episodes').glob('train*')
  content = bytearray(damaged.read_bytes())
  content[-6] ^= 1  # of the checksum of what stands behind the summaries
  damaged.write_bytes(content)
  uploaded = []
  monkeypatch.setattr(hub, '_upload', lambda c, field, directory, *_: uploaded.append(os.listdir(directory)))
  hub.push_episodes(config, workdir)
  assert sorted(*uploaded) == ['README.md', 'eval.jsonl.gz']
  assert [m for m in caplog.messages if str(damaged) in m and 'is left out' in m]


def test_a_run_without_episodes_has_no_data_set(run):
  config, workdir, _ = run
  for path in (workdir / 'episodes').iterdir():
    path.unlink()
  with pytest.raises(hub.UserError, match=r"^export\.push_episodes='me/played': the run has no episodes$"):
    hub.push_episodes(config, workdir)


@pytest.mark.parametrize('name', ['games', 'me/', 'a/b/c', '../b', 'me/ga mes'])
def test_names_of_repositories(name):
  for field in ('export.push', 'export.push_episodes'):
    message = rf"^{field}='.*': must be 'USER/NAME', a repository on the hub"
    assert_refused(check_config, small_config({field: name}), message)
