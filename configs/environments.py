"""The environments by tag, with their budgets and options; `config.envs` in default.py.

A tag names an environment and its settings. `train.tags` and `eval.tags` choose among them.
"""

from ml_collections import ConfigDict, FieldReference

from ragen_jax.envs import bandit
from ragen_jax.envs.spec import OPTIONAL

# Tag with the held-out part of a data set -> the tag whose fields it follows: one flag sets the file of both.
HELD_OUT = {
  'DatasetTest': 'Dataset',
  'MetamathQATest': 'MetamathQA',
  'GSM8KTest': 'GSM8K',
  'DeepCoderTest': 'DeepCoder',
  'SearchQATest': 'SearchQA',
  'TextWorldTest': 'TextWorld',
  'LeanTest': 'Lean',
  'WebShopValidation': 'WebShop',
  'WebShopTest': 'WebShop',
  'VerifiersTest': 'Verifiers',
  'ALFWorldSeen': 'ALFWorld',
  'ALFWorldUnseen': 'ALFWorld',
  'SVGTest': 'SVG',
  'NavigationValidation': 'Navigation',
  'NavigationTest': 'Navigation',
  'AlignTwoCubeTest': 'AlignTwoCube',
  'PlaceTwoCubeTest': 'PlaceTwoCube',
  'StackThreeCubeTest': 'StackThreeCube',
  'PutAppleInDrawerTest': 'PutAppleInDrawer',
}


def by_tag() -> ConfigDict:
  """Tag -> its class, budget and options."""
  envs = ConfigDict()
  envs.FrozenLake = ConfigDict(
    {
      'type': 'frozen_lake',
      # Rows and columns.
      'size': 4,
      # Probability that a square is ice; RAGEN-2 has 0.9.
      'p': 0.8,
      # Whether a move can slide sideways.
      'is_slippery': True,
      # On slippery ice, probability of moving in the chosen direction; the two at right angles share the rest. RAGEN-2
      # has 0.8 or 1.
      'success_rate': 1 / 3,
      # How the prompt shows the state: 'grid', 'spaced' (a blank between squares, so that each is a token of pretrained
      # models), 'coord', 'grid_coord' or 'image' (for models that read images).
      'observation': 'grid',
      # Side of a tile of the image in pixels, 8 to 64; 0 for the smallest whole number of visual tokens.
      'tile': 0,
      # Symbols for player, ice, hole, goal, player in a hole, player on the goal.
      'symbols': 'P_OGX√',
      'max_turns': 5,
      'max_actions': 10,
      'max_actions_per_turn': 5,
      'max_words': 100,
    }
  )
  # FrozenLake with coordinates in addition to the grid.
  envs.CoordFrozenLake = _like(envs.FrozenLake, observation='grid_coord', max_words=120)
  envs.SimpleSokoban = ConfigDict(
    {
      'type': 'sokoban',
      # Rows and columns, including the outer walls.
      'dim': (6, 6),
      # Number of boxes and of targets.
      'num_boxes': 1,
      # Actions after which the game itself ends; at least max_actions.
      'max_steps': 100,
      # Maximum moves of the reverse play that generates a level.
      'search_depth': 300,
      # Minimum moves of a level's shortest solution; 0 for no bound.
      'min_solution': 0,
      # Maximum moves of a level's shortest solution; 0 for no bound. Both bounds set the difficulty.
      'max_solution': 0,
      # File of levels in Boxoban's format, played in place of generated levels (set dim and num_boxes to match); empty
      # for none.
      'levels': '',
      # How the prompt shows the state: 'grid', 'spaced' (a blank between squares, so that each is a token of pretrained
      # models), 'coord', 'grid_coord' or 'image' (for models that read images).
      'observation': 'grid',
      # Side of a tile of the image in pixels, 8 to 64; 0 for the smallest whole number of visual tokens.
      'tile': 0,
      # Symbols for wall, floor, target, box on target, box, player, player on target.
      'symbols': ('#', '_', 'O', '√', 'X', 'P', 'S'),
      'max_turns': 5,
      'max_actions': 10,
      'max_actions_per_turn': 5,
      'max_words': 100,
    }
  )
  # Sokoban on a larger board with two boxes.
  envs.LargerSokoban = _like(envs.SimpleSokoban, dim=(8, 8), num_boxes=2, search_depth=10)
  # The same game in other symbols: tests whether the policy memorised the usual ones.
  envs.SokobanDifferentGridVocab = _like(
    envs.SimpleSokoban, search_depth=30, symbols=('W', '.', 'G', 'C', 'B', 'A', '@')
  )
  # Sokoban with coordinates in addition to the grid, RAGEN-2's default.
  envs.CoordSokoban = _like(envs.SimpleSokoban, observation='grid_coord', max_words=120)
  envs.Bandit = ConfigDict(
    {
      'type': 'bandit',
      # Pairs of (safe arm, risky arm); a level shows one pair.
      'arms': bandit.PHOENIX_DRAGON,
      # Reward of the safe arm; 0.15 in the paper's text.
      'low_reward': 0.1,
      # Reward of the risky arm when it pays.
      'high_reward': 1.0,
      # Probability that the risky arm pays.
      'high_probability': 0.25,
      'max_turns': 1,
      'max_actions': 1,
      'max_actions_per_turn': 1,
      'max_words': 100,
    }
  )
  # RAGEN's test for a policy that was trained on Bandit.
  envs.BanditTest = _like(envs.Bandit, arms=bandit.TRADER_LIBRARIAN)
  # The paper's test of generalisation: a training pair in which the risky arm is the profession that sounds risky.
  envs.BanditProfessions = _like(envs.Bandit, arms=bandit.PROFESSIONS_TRAIN)
  # The evaluation pair for BanditProfessions.
  envs.BanditProfessionsTest = _like(envs.Bandit, arms=bandit.PROFESSIONS_TEST)
  # The reverse: a training pair in which the risky arm is the profession that sounds safe.
  envs.BanditRev = _like(envs.Bandit, arms=bandit.REVERSED_TRAIN)
  # The evaluation pair for BanditRev.
  envs.BanditRevTest = _like(envs.Bandit, arms=bandit.REVERSED_TEST)
  # RAGEN-2's twelve training pairs of professions.
  envs.BanditPairs = _like(envs.Bandit, arms=bandit.RAGEN2_TRAIN)
  # RAGEN-2's eight evaluation pairs.
  envs.BanditPairsTest = _like(envs.Bandit, arms=bandit.RAGEN2_TEST)
  # Arithmetic: write an expression that uses every given number once and equals the target.
  envs.Countdown = ConfigDict(
    {
      'type': 'countdown',
      # Minimum count of given numbers, 2 to 5.
      'min_numbers': 3,
      # Maximum count of given numbers, up to 5.
      'max_numbers': 4,
      # Largest given number; at most 999, 812, 127, 42 for max_numbers = 2, 3, 4, 5.
      'largest_number': 99,
      # Largest target.
      'largest_target': 99,
      # Operators from which levels are generated: '+-' (RAGEN's levels; signs alone solve them), '+-*' or '+-*/'.
      'level_operators': '+-*/',
      # Reward for an expression with the right numbers and a wrong value.
      'numbers_reward': 0.1,
      'max_turns': 1,
      'max_actions': 1,
      'max_actions_per_turn': 1,
      'max_words': 100,
    }
  )
  # Sliding tiles that double. RAGEN-2 plays up to the tile 2048 with 700 actions in 800 turns.
  envs.Game2048 = ConfigDict(
    {
      'type': 'game_2048',
      # The tile that wins, a power of two from 8 to 131072.
      'goal': 64,
      # Reward of a move whose merged tiles have the sum m: 'log' is 0.1 * log2(1 + m), 'raw' is m.
      'reward': 'log',
      # How the prompt shows the board: 'text' or 'image' (for models that read images).
      'observation': 'text',
      # Side of a tile of the image in pixels, 8 to 64; 0 for the smallest whole number of visual tokens.
      'tile': 0,
      'max_turns': 20,
      'max_actions': 60,
      'max_actions_per_turn': 5,
      'max_words': 100,
    }
  )
  # Rubik's cube of 2 x 2 x 2.
  envs.Rubik2x2 = ConfigDict(
    {
      'type': 'rubik_2x2',
      # Random quarter turns of a level, 1 to 14; no turn undoes the one before.
      'scramble_depth': 1,
      # Whether a level is exactly scramble_depth turns from solved (uniform over all such positions).
      'exact_distance': False,
      # How the prompt shows the board: 'text' or 'image' (for models that read images).
      'observation': 'text',
      # Side of a tile of the image in pixels, 8 to 64; 0 for the smallest whole number of visual tokens.
      'tile': 0,
      'max_turns': 5,
      'max_actions': 20,
      'max_actions_per_turn': 4,
      'max_words': 100,
    }
  )
  envs.Sudoku = ConfigDict(
    {
      'type': 'sudoku',
      # Cells in a row: 4 or 9.
      'side': 4,
      # Empty cells of a level, 1 to 12 (side 4) or 64 (side 9); the budget must be able to fill them.
      'empty_cells': 6,
      # Reward of a wrong digit that breaks no rule, once for each cell and digit: from -0.1, the reward of other wrong
      # digits, to below 1; RAGEN's is 0.5.
      'legal_reward': -0.1,
      # Whether the prompt lists the possible digits of each empty cell, if at most 10 are empty; as in RAGEN-2.
      'hints': True,
      # How the prompt shows the board: 'text' or 'image' (for models that read images).
      'observation': 'text',
      # Side of a tile of the image in pixels, 8 to 64; 0 for the smallest whole number of visual tokens.
      'tile': 0,
      'max_turns': 5,
      'max_actions': 10,
      'max_actions_per_turn': 5,
      'max_words': 100,
    }
  )
  # Sudoku on the usual board of 9 x 9 cells; its prompt and ten turns need a long agent.max_context.
  envs.Sudoku9x9 = _like(envs.Sudoku, side=9, empty_cells=40, max_turns=10, max_actions=50)
  # Find an object in a room, with first-person pictures, see docs/navigation.md. The type 'ai2thor' is the same
  # game in scenes of this simulator, see docs/simulators.md.
  envs.Navigation = ConfigDict(
    {
      'type': 'navigation',
      # Rows and columns of cells, including the outer walls; 6 to 32.
      'dim': (11, 11),
      # Metres of a step, which is the side of a cell; VAGEN's later version has 0.3.
      'stride': 0.5,
      # Metres from the target within which it is found; VAGEN's later version has 1.0.
      'radius': 1.5,
      # Whether the target must also be in view; VAGEN's rule is False.
      'must_see': True,
      # Field of view in degrees, 40 to 140.
      'fov': 100.0,
      # Walls inside the room, 0 to 3.
      'inner_walls': 1,
      # Objects of a room, the target included; 2 to 8.
      'num_objects': 6,
      # Shapes of objects: 'ball', 'cube', 'post', 'cone'.
      'kinds': ('ball', 'cube', 'post', 'cone'),
      # Colours of objects: 'red', 'green', 'blue', 'yellow', 'purple', 'orange'.
      'colours': ('red', 'green', 'blue', 'yellow', 'purple', 'orange'),
      # Minimum actions of a level's shortest play.
      'min_path': 3,
      # Maximum actions of a level's shortest play; 0 for no bound. Both bounds set the difficulty.
      'max_path': 0,
      # Starts: 'any', 'facing' (the target is in view) or 'away' (it is not).
      'start': 'any',
      # Which part of all rooms is played: 'all', 'train', 'validation' or 'test'; they have no room in common.
      'split': 'train',
      # Reward of finding the target; VAGEN's later version has 1.
      'success_reward': 10.0,
      # Actions after which the game itself ends; at least max_actions.
      'max_steps': 30,
      # Rows, and columns, of tiles of the picture; 2 to 64.
      'picture': 9,
      # Names of the actions: 'thor' (moveahead) or 'words' (move_forward, as in VAGEN's later version).
      'names': 'thor',
      # With type='ai2thor'. What describes rooms of the type 'navigation' (dim, inner_walls, num_objects, kinds,
      # colours, min_path, max_path, start, picture, tile) has no effect then.
      'simulator': {
        # JSON file of tasks, in VAGEN's form.
        'tasks': '',
        # The program of Unity; empty for the build that the package ai2thor downloads.
        'executable': '',
        # Platform of this build: 'CloudRendering' (no display), 'Linux64', 'OSXIntel64', or empty for what the package
        # chooses.
        'platform': '',
        # Sides of a picture in pixels, 32 to 1024.
        'size': 252,
        # Interpreter of the worker processes, of Python 3.11 or newer, which has the simulator; '' for that of the run.
        'python': '',
        # Worker processes, which the episodes are spread over; at least 1.
        'processes': 2,
        # MiB that each process may write to; 0 for no limit.
        'memory_mib': 0,
        # Seconds of an action or a reset, with the start of the simulator.
        'step_timeout_s': 300.0,
      },
      # How the prompt shows the state: 'text' or 'image' (for models that read images).
      'observation': 'text',
      # Side of a tile of the picture in pixels, 8 to 64; 0 for the smallest whole number of visual tokens.
      'tile': 0,
      'max_turns': 5,
      'max_actions': 25,
      'max_actions_per_turn': 5,
      'max_words': 100,
    }
  )
  # Rooms that training does not play.
  envs.NavigationValidation = _like(envs.Navigation, split='validation')
  # Rooms that neither of the two plays.
  envs.NavigationTest = _like(envs.Navigation, split='test')
  # Move cubes on a table by skills with coordinates, see docs/manipulation.md; the names are those of VAGEN's tasks.
  # The type 'maniskill' is the same game with this simulator's robot arm, see docs/simulators.md.
  envs.PlaceTwoCube = ConfigDict(
    {
      'type': 'manipulation',
      # The goal: 'align', 'place', 'stack' or 'drawer'.
      'task': 'place',
      # What an observation says of the places of objects: 'named', 'list' (without their names, as in VAGEN) or 'none'.
      'positions': 'named',
      # Pictures of an observation: 1, or 2 with one from above.
      'cameras': 1,
      # Which part of all levels is played: 'all', 'train', 'validation' or 'test'; they have no level in common.
      'split': 'train',
      # Rows, and columns, of tiles of a picture; 2 to 64.
      'picture': 9,
      # With type='maniskill', where picture and tile have no effect.
      'simulator': {
        # Where pictures are drawn: 'gpu', or 'cpu' (needs Mesa 25 or newer with lavapipe).
        'render': 'gpu',
        # Sides of a picture in pixels, 32 to 1024.
        'size': 252,
        # Interpreter of the worker processes, of Python 3.11 or newer, which has the simulator; '' for that of the run.
        'python': '',
        # Worker processes, which the episodes are spread over; at least 1.
        'processes': 2,
        # MiB that each process may write to; 0 for no limit.
        'memory_mib': 0,
        # Seconds of an action or a reset, with the start of the simulator.
        'step_timeout_s': 300.0,
      },
      # How the prompt shows the state: 'text' or 'image' (for models that read images).
      'observation': 'text',
      # Side of a tile of a picture in pixels, 8 to 64; 0 for the smallest whole number of visual tokens.
      'tile': 0,
      'max_turns': 3,
      'max_actions': 6,
      'max_actions_per_turn': 2,
      'max_words': 100,
    }
  )
  # Levels that training does not play.
  envs.PlaceTwoCubeTest = _like(envs.PlaceTwoCube, split='test')
  # Bring two cubes to a line.
  envs.AlignTwoCube = _like(envs.PlaceTwoCube, task='align')
  envs.AlignTwoCubeTest = _like(envs.AlignTwoCube, split='test')
  # Make a stack of three cubes.
  envs.StackThreeCube = _like(envs.PlaceTwoCube, task='stack')
  envs.StackThreeCubeTest = _like(envs.StackThreeCube, split='test')
  # Put an apple into a drawer, and close it.
  envs.PutAppleInDrawer = _like(envs.PlaceTwoCube, task='drawer')
  envs.PutAppleInDrawerTest = _like(envs.PutAppleInDrawer, split='test')
  # Tasks that programs outside play over HTTP, see docs/agents.md.
  envs.Agent = ConfigDict(
    {
      'type': 'agent',
      # File of tasks, one JSON value a line; '' for the tasks {"seed": n, "member": i}.
      'tasks': '',
      # What plays a task: a Python function 'package.module:function' or 'file.py:function'; 'env:TAG', the environment
      # of another tag; or a command; '' for workers that claim tasks.
      'runner': '',
      # Calls of an attempt.
      'max_turns': 20,
      'max_actions': 20,
      'max_actions_per_turn': 1,
      'max_words': 100,
    }
  )
  # Tasks of a package of the library `verifiers`, whose rollouts call the policy, see docs/verifiers.md.
  envs.Verifiers = ConfigDict(
    {
      'type': 'verifiers',
      # The package as `verifiers` names it, such as 'gsm8k' or 'owner/gsm8k'; it is installed.
      'package': '',
      # Fields of the package's own config (those of its taskset).
      'options': {},
      # The other fields of its environment's config: id, agent (harness, runtime, sampling, ...), timeout, retries.
      'environment': {},
      # The most tasks, the first ones; 0 for all.
      'limit': 0,
      # Which part of the tasks is played: 'all', 'train' or 'test'.
      'split': 'train',
      # About this share of the tasks is in the test part.
      'test_share': 0.1,
      # Whether the policy may execute commands on this machine, as some packages want.
      'allow_commands': False,
      # Seconds of a call of a tool, with its repetitions; a package with a harness of its own has its own limits.
      'tool_timeout_s': 30.0,
      # Worker processes of the package.
      'processes': 1,
      # Memory that each of them may write to, in MiB (on Linux); 0 for no limit.
      'memory_mib': 0,
      # Time limit of the start of a process, in which it loads the tasks, in seconds.
      'start_timeout_s': 600.0,
      # The interpreter that has `verifiers` and the package; '' for the one of the run.
      'python': '',
      # Calls of an attempt.
      'max_turns': 20,
      'max_actions': 20,
      'max_actions_per_turn': 1,
      'max_words': 100,
    }
  )
  # The held-out part of the same tasks.
  envs.VerifiersTest = _like(envs.Verifiers, split='test')
  # Questions of your own with known answers, see docs/datasets.md.
  envs.Dataset = ConfigDict(
    {
      'type': 'dataset',
      # Files of questions, with commas: .jsonl, .json, .csv or .parquet; one of `path`, `generator` and `hub` is set.
      'path': '',
      # 'reasoning_gym:NAME' generates the questions.
      'generator': '',
      # Options of the generator; `size` is the number of questions (5000), `seed` makes others (0).
      'generator_options': {},
      # A data set's name on the Hugging Face Hub, or a local folder of one.
      'hub': '',
      # Arguments of datasets.load_dataset: name, split, revision, data_dir, data_files, cache_dir.
      'hub_options': {},
      # Names of the fields of a row; '' for none. Rows with equal `group` are on one side of the split; without `group`
      # that holds for equal questions.
      # `difficulty` is a number by which a curriculum sorts.
      'fields': {
        'question': 'question',
        'answer': 'answer',
        'choices': '',
        'solution': '',
        'group': '',
        'difficulty': '',
      },
      # Regular expression with one group that finds the gold in the text of the field `answer`; '' for the whole field.
      'answer_pattern': '',
      # Which part of the questions is played: 'all', 'train' or 'test'.
      'split': 'train',
      # Share of the groups that make the test part.
      'test_share': 0.1,
      # Maximum number of questions, the first ones of the source; 0 for all.
      'limit': 0,
      # Longer questions are left out, and their number is logged; 0 for no limit.
      'max_question_chars': 2000,
      # Rows that cannot be read: 'refuse' the source, or 'drop' them and log their number.
      'bad_rows': 'refuse',
      # Order of the questions: 'shuffled' (the same on every machine) or 'fixed'.
      'order': 'shuffled',
      # What decides answers: 'exact', 'number', 'choice', 'f1', 'math', 'reasoning_gym', 'code' (programs, see
      # docs/programs.md), or a function of yours, 'package.module:function' or 'file.py:function', from gold and answer
      # to a score.
      'verifier': 'exact',
      # Options of the verifier, such as {'threshold': 0.3} of 'f1'; keyword arguments of a function.
      'verifier_options': {},
      # Answers that an episode may give; max_turns and max_actions must allow as many.
      'attempts': 1,
      # The k-th attempt pays decay**(k-1) of its score.
      'decay': 0.5,
      # What the policy can call before it answers: 'search'; functions of yours, 'package.module:function' or
      # 'file.py:function', whose options are in docs/search.md; MCP servers, 'mcp:COMMAND' or 'mcp:ADDRESS', whose
      # options are in docs/mcp.md; () for none.
      'tools': (),
      # Options of the tools by name, those of 'search' are used with this tool only.
      'tool_options': {
        'search': {
          # 'bm25:PATH.jsonl' ranks the passages of a file; or 'http://host:port', a server; or 'mock'.
          'retriever': '',
          # What the server speaks: 'ragen' or 'search_r1'.
          'protocol': 'ragen',
          # Passages of a result, 1 to 50.
          'top_k': 3,
          # Maximum characters of a passage, and of a whole result.
          'max_passage_chars': 800,
          'max_chars': 4000,
          # Maximum calls of an episode; 0 for no limit.
          'budget': 0,
          # Seconds of a request.
          'timeout_s': 30.0,
        },
        # Whether text that is no call is the answer, as in RAGEN.
        'finish': {'free_text_is_answer': False},
      },
      # What describes the tools to the policy: 'text', the rules in the prompt; 'template', the model's chat template,
      # whose form calls and results then have.
      'tools_format': 'text',
      # Whether the policy reads the verifier's word for a wrong answer, such as 'unreadable'.
      'show_verdict': False,
      # The rules in the prompt; '' for a sentence that fits the options.
      'instruction': '',
      # Seconds that a function or a package may take to decide one answer.
      'timeout_s': 10.0,
      # Answers that a function (in threads) or a package (in processes) decides at a time.
      'workers': 2,
      'max_turns': 1,
      'max_actions': 1,
      'max_actions_per_turn': 1,
      'max_words': 100,
    }
  )
  # The held-out part of the same questions.
  envs.DatasetTest = _like(envs.Dataset, split='test')
  # RAGEN's MetaMathQA: 395,000 problems made from those of GSM8K and MATH. Paraphrases of a problem are one group. A
  # reply of the wrong form may be repeated, but the first answer counts.
  envs.MetamathQA = _like(
    envs.Dataset,
    hub='meta-math/MetaMathQA',
    fields={'question': 'query', 'answer': 'response', 'group': 'original_question'},
    answer_pattern=r'(?s).*The answer is: (.*)$',
    bad_rows='drop',
    verifier='math',
    max_turns=5,
  )
  # The held-out part of its problems.
  envs.MetamathQATest = _like(envs.MetamathQA, split='test')
  # Word problems of grade school, whose answers are whole numbers.
  envs.GSM8K = _like(
    envs.Dataset,
    hub='openai/gsm8k',
    hub_options={'name': 'main', 'split': 'train'},
    answer_pattern=r'(?s).*#### (.*)$',
    split='all',
    verifier='number',
    max_turns=5,
  )
  # The problems that its authors hold out.
  envs.GSM8KTest = _like(envs.GSM8K, hub_options={'name': 'main', 'split': 'test'})
  # RAGEN's DeepCoder: problems that a program solves, tested in a sandbox, see docs/programs.md.
  envs.DeepCoder = _like(
    envs.Dataset,
    fields={'question': 'problem', 'answer': 'tests'},
    max_question_chars=0,
    verifier='code',
    verifier_options={
      # What is paid: 'all' for 1 if all tests pass, otherwise 0; 'share' for the share of passed tests.
      'score': 'all',
      # Tests of a problem that are run: those with the longest inputs.
      'max_tests': 15,
      # Largest relative or absolute difference of numbers; 0 for equal values.
      'tolerance': 0.0,
      # Processor seconds of a test.
      'cpu_s': 6,
      # Seconds of a test.
      'wall_s': 30.0,
      # MiB of memory of each process of a program.
      'memory_mib': 1024,
      # MiB that a program may write in files.
      'disk_mib': 32,
      # Processes and threads of a program.
      'processes': 8,
      # MiB that a test may print; more if more is expected.
      'output_mib': 4,
      # The interpreter of programs; '' for the one that runs this.
      'python': '',
      # Folders of packages that programs may import, made by `pip install --target`.
      'packages': (),
    },
    # Seconds that all tests of a program may take, at least wall_s; a program that takes longer fails.
    timeout_s=300.0,
    # Programs that are tested at a time; at most the number of cores.
    workers=8,
    max_words=8000,
  )
  # The held-out part of its problems; for a file of its own, set `path` here and `split` of both tags to 'all'.
  envs.DeepCoderTest = _like(envs.DeepCoder, split='test')
  # RAGEN's SearchQA: questions of HotpotQA, whose answers are looked up with a retrieval server. See docs/search.md for
  # a corpus in place of the server.
  envs.SearchQA = _like(
    envs.Dataset,
    hub='hotpotqa/hotpot_qa',
    hub_options={'name': 'distractor', 'split': 'train'},
    split='all',
    verifier='f1',
    tools=('search',),
    tool_options={'search': {'retriever': 'http://127.0.0.1:8000', 'top_k': 5}},
    max_turns=5,
    max_actions=10,
    max_words=300,
  )
  # The validation questions of HotpotQA.
  envs.SearchQATest = _like(envs.SearchQA, hub_options={'name': 'distractor', 'split': 'validation'})
  # SearchQA without a server: its passages are made up, so that answers cannot be found. For rehearsals.
  envs.SearchQAMock = _like(envs.SearchQA, tool_options={'search': {'retriever': 'mock'}})
  # Text adventures of the package TextWorld, see docs/textworld.md.
  envs.TextWorld = ConfigDict(
    {
      'type': 'textworld',
      # Game files of your own: a folder, or a pattern such as 'games/*.z8', each with its .json; '' makes games.
      'path': '',
      # Number of games that are made, of the train part and the test part together.
      'games': 100,
      # Another seed makes other games.
      'seed': 0,
      # Rooms of a game that is made, 1 to 20.
      'rooms': 3,
      # Things in it, 1 to 50.
      'objects': 5,
      # Commands of its walkthrough, 1 to 20.
      'quest_length': 3,
      # Folder that keeps games that were made.
      'cache': '~/.cache/ragen_jax/textworld',
      # Which part of the games is played: 'all', 'train' or 'test'.
      'split': 'train',
      # Share of the games that make the test part.
      'test_share': 0.2,
      # What is paid: 'score' for the points of the game, 'win' for 1 if it is won.
      'reward': 'score',
      # Whether each observation lists the possible commands.
      'show_commands': True,
      # Worker processes that play the episodes; at least 1.
      'processes': 2,
      # MiB that each process may write to; 0 for no limit.
      'memory_mib': 4096,
      # Seconds of a step or a reset.
      'step_timeout_s': 60.0,
      # Seconds for making one game.
      'make_timeout_s': 300.0,
      'max_turns': 10,
      'max_actions': 10,
      'max_actions_per_turn': 1,
      'max_words': 100,
    }
  )
  # The held-out part of the same games.
  envs.TextWorldTest = _like(envs.TextWorld, split='test')
  # RAGEN's Lean: theorems that are proven step by step, checked by a server, see docs/lean.md.
  envs.Lean = ConfigDict(
    {
      'type': 'lean',
      # Files of statements, separated by commas: .jsonl, .json, .csv or .parquet; either `path` or `hub` is set.
      'path': '',
      # A data set's name on the Hugging Face Hub, or a local folder of one.
      'hub': '',
      # Arguments of datasets.load_dataset: name, split, revision, data_dir, data_files, cache_dir.
      'hub_options': {},
      # Names of the fields of a row; '' for none. `header` is the preamble of this statement, `proof` a proof for
      # demonstrations; rows with equal `group` are on one side of the split.
      'fields': {
        'statement': 'formal_statement',
        'informal': '',
        'header': '',
        'proof': '',
        'group': '',
        'difficulty': '',
      },
      # Which part of the statements is played: 'all', 'train' or 'test'.
      'split': 'train',
      # Share of the groups that make the test part.
      'test_share': 0.1,
      # Maximum number of statements, the first ones of the source; 0 for all.
      'limit': 0,
      # Longer statements are left out, and their number is logged; 0 for no limit.
      'max_question_chars': 2000,
      # Rows that cannot be read: 'refuse' the source, or 'drop' them and log their number.
      'bad_rows': 'refuse',
      # Address of the server, in front of /api/check; its key, if it has one, is in the environment variable
      # LEAN_SERVER_API_KEY.
      'url': 'http://127.0.0.1:8000',
      # Lines above statements that have none of their own.
      'preamble': (
        'import Mathlib\nimport Aesop\nset_option maxHeartbeats 400000\nopen BigOperators Real Nat Topology Rat'
      ),
      # Reward of the tactics that complete the proof.
      'success_reward': 10.0,
      # Reward of tactics after which other things are to be shown than ever before in the episode.
      'progress_reward': 1.0,
      # The most that progress pays in an episode, below success_reward.
      'most_progress': 3.0,
      # Reward of tactics that are not accepted.
      'rejected_reward': -1.0,
      # Reward of every action, added to the others.
      'step_reward': -0.1,
      # Maximum characters of the goals in an observation; longer ones are cut.
      'max_goal_chars': 2000,
      # Maximum characters of Lean's messages in an observation; longer ones are cut.
      'max_feedback_chars': 1000,
      # Seconds that Lean may take for a proof, a whole number.
      'tactic_timeout_s': 30,
      # Seconds of a request, which may hold many proofs.
      'timeout_s': 600.0,
      # Maximum number of repetitions of a request that fails.
      'retries': 3,
      # Seconds before the second try; each further wait is twice as long, up to 30.
      'backoff_s': 1.0,
      # Proofs in one request.
      'batch_size': 64,
      # Requests at a time.
      'workers': 1,
      'max_turns': 15,
      'max_actions': 15,
      'max_actions_per_turn': 1,
      'max_words': 512,
    }
  )
  # The held-out part of the same statements.
  envs.LeanTest = _like(envs.Lean, split='test')
  # RAGEN's WebShop: shopping on a server, see docs/webshop.md.
  envs.WebShop = ConfigDict(
    {
      'type': 'webshop',
      # Address of the server.
      'url': 'http://127.0.0.1:3000',
      # Number of goals of the server, which tools/serve_webshop.py prints.
      'goals': 0,
      # Which goals are played: 'train' (1500 and above), 'validation' (500 to 1499), 'test' (0 to 499) or 'all'.
      'split': 'train',
      # What a purchase pays: 'success' for 1 if its score is 1, 'raw' for its score.
      'reward': 'success',
      # Whether each observation lists the possible actions.
      'show_actions': True,
      # Seconds of a request.
      'timeout_s': 60.0,
      # Maximum number of repetitions of a request that fails.
      'retries': 3,
      # Seconds before the second try; each further wait is twice as long, up to 30.
      'backoff_s': 0.5,
      # Requests at a time.
      'workers': 8,
      'max_turns': 9,
      'max_actions': 9,
      'max_actions_per_turn': 1,
      'max_words': 200,
    }
  )
  # Goals for evaluations during a run.
  envs.WebShopValidation = _like(envs.WebShop, split='validation')
  # Goals that neither of the two plays.
  envs.WebShopTest = _like(envs.WebShop, split='test')
  # Household tasks of ALFWorld in text, see docs/alfworld.md. RAGEN's tag has 10 actions.
  envs.ALFWorld = ConfigDict(
    {
      'type': 'alfworld',
      # Folder with the parts train, valid_seen and valid_unseen; '' for $ALFWORLD_DATA/json_2.1.1.
      'path': '',
      # The part that is played: 'train', 'valid_seen' (rooms of training) or 'valid_unseen' (other rooms).
      'split': 'train',
      # Types of tasks: 'pick_and_place_simple', 'look_at_obj_in_light', 'pick_clean_then_place_in_recep',
      # 'pick_heat_then_place_in_recep', 'pick_cool_then_place_in_recep', 'pick_two_obj_and_place'; () for all.
      'tasks': (),
      # Whether each observation lists the possible commands.
      'show_commands': True,
      # Worker processes that play the episodes; at least 1.
      'processes': 2,
      # MiB that each process may write to; 0 for no limit.
      'memory_mib': 4096,
      # Seconds of a step or a reset.
      'step_timeout_s': 120.0,
      'max_turns': 50,
      'max_actions': 50,
      'max_actions_per_turn': 1,
      'max_words': 100,
    }
  )
  # New games in the rooms of training.
  envs.ALFWorldSeen = _like(envs.ALFWorld, split='valid_seen')
  # Games in rooms that training does not have.
  envs.ALFWorldUnseen = _like(envs.ALFWorld, split='valid_unseen')
  # Pictures that the policy reproduces as SVG programs, for models that read images, see docs/svg.md.
  envs.SVG = ConfigDict(
    {
      'type': 'svg',
      # Drawings of your own: a folder of .svg files, a pattern, a .jsonl, .json, .csv or .parquet file. '' makes some.
      'path': '',
      # Name of the field with the drawing's text in the rows of such a file.
      'field': 'svg',
      # Drawings that cannot be drawn here: 'drop' them and log their number, or 'refuse' the source.
      'bad_drawings': 'drop',
      # Minimum number of shapes of a target that is made.
      'min_shapes': 1,
      # Maximum number of its shapes, up to 12.
      'max_shapes': 3,
      # Its shapes: 'rect', 'circle', 'ellipse', 'line', 'polygon', 'path'.
      'kinds': ('rect', 'circle', 'ellipse', 'line', 'polygon'),
      # Its colours, by name.
      'colours': ('red', 'green', 'blue', 'gold', 'purple', 'orange', 'black', 'gray'),
      # Whether shapes may overlap.
      'overlap': True,
      # Whether a third of the shapes are outlines.
      'outlines': False,
      # Coordinates are multiples of 1, 2, 5 or 10, on a canvas of 100 x 100.
      'grid': 5,
      # Which part of the targets is played: 'all', 'train' or 'test'; they have no picture in common.
      'split': 'train',
      # Share of the targets that make the test part.
      'test_share': 0.1,
      # Pictures of an observation: 2 for target and drawing, 1 for the target and later only the drawing, as in VAGEN.
      'images': 2,
      # Height and width of a picture in pixels, which are equal; 16 to 512.
      'image_size': (256, 256),
      # Weights of the parts of the score; that of dino needs dino_path.
      'weights': {'pixels': 0.5, 'edges': 0.3, 'colours': 0.2, 'dino': 0.0},
      # Folder with a DINO or DINOv2 model in Hugging Face's format, which adds the part dino to the score; '' for none.
      'dino_path': '',
      # What is paid: 'best' for what a drawing adds to the best score, 'each' for each score, as in VAGEN.
      'pay': 'best',
      # Reward of a score of 1.
      'score_reward': 1.0,
      # Score from which an episode is won, and over; with pay='each' it goes on.
      'success_score': 0.95,
      'max_turns': 3,
      'max_actions': 3,
      'max_actions_per_turn': 1,
      'max_words': 300,
    }
  )
  # Pictures that training does not play.
  envs.SVGTest = _like(envs.SVG, split='test')
  for env in envs.values():
    env.update(OPTIONAL)
  return envs


def _like(env: ConfigDict, **changes) -> ConfigDict:
  """An environment with some fields changed."""
  env = env.copy_and_resolve_references()
  env.update(changes)
  return env


def follow(envs: ConfigDict) -> None:
  """Lets the fields of each held-out tag that equal those of its training tag follow them when they change."""
  for other in dict.fromkeys(HELD_OUT.values()):
    _follow([envs[tag] for tag, source in HELD_OUT.items() if source == other], envs[other])


def _follow(held_out: list[ConfigDict], other: ConfigDict) -> None:
  for name, value in other.items():
    if isinstance(value, ConfigDict) and value:
      _follow([env[name] for env in held_out], value)
    elif isinstance(value, ConfigDict):
      for env in held_out:
        if not env[name]:
          env[name] = value  # the same object, which all tags fill
  # As `get_oneway_ref` does for one field, which walks through all sections each time.
  with other.ignore_type():
    for name, value in other.items():
      if not isinstance(value, ConfigDict) and any(env[name] == value for env in held_out):
        reference = FieldReference(value)
        for env in held_out:
          if env[name] == value:
            env[name] = reference.identity()
        other[name] = reference
