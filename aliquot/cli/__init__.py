"""Floor 9: the command line, one verb per file; the only place with options, printing and exit
codes.

Importing this must stay quick: everything that needs JAX is imported inside the verbs.
"""

from ._main import main as main
