"""`python -m ddplab` is the command `ddplab`; so `torchrun -m ddplab bench ...` works."""

import gc
import sys

from ddplab.cli import main

if __name__ == "__main__":
    gc.set_threshold(50_000)  # nearly all that a command makes it needs to its end, above all the modules it imports
    sys.exit(main())
