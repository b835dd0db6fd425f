"""Starts the site of WebShop (princeton-nlp/WebShop) for environments of the type 'webshop'; docs/webshop.md.

Run it with the Python of WebShop's own installation, in WebShop's folder:

python /path/to/ragen-jax/tools/serve_webshop.py --port=3000

It differs from WebShop's own start in four ways. The price limits of goals are drawn from a seed, so that goals are the
same in each start. Products are loaded before the first request. Requests are answered one after another, since the
search engine is a virtual machine of Java in this process. And the sessions of all visitors are not printed at each
purchase.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import random
import sys


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--host', default='127.0.0.1', help='address to listen at')
  parser.add_argument('--port', type=int, default=3000, help='port to listen at')
  parser.add_argument('--seed', type=int, default=0, help='seed of the price limits; one seed for all servers of a run')
  arguments = parser.parse_args(argv)
  sys.path.insert(0, str(pathlib.Path.cwd()))
  try:
    site = importlib.import_module('web_agent_site.app')
  except ModuleNotFoundError as e:
    if e.name not in ('web_agent_site', 'web_agent_site.app'):
      raise
    sys.exit(f"{pathlib.Path.cwd()} has no web_agent_site; run this in WebShop's folder")
  site.print = lambda *values, **options: None
  random.seed(arguments.seed)
  answer = site.app.test_client().get('/load_fixed_0')
  if answer.status_code != 200:
    sys.exit(f'WebShop cannot load its products: status {answer.status_code}')
  print(f'{len(site.goals)} goals: --config.envs.WebShop.goals={len(site.goals)}', flush=True)
  site.app.run(host=arguments.host, port=arguments.port, threaded=False)


if __name__ == '__main__':
  main()
