"""ALFWorld as an environment: household tasks in text, which the planning language PDDL describes."""
