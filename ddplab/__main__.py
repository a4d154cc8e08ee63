"""`python -m ddplab` is the command `ddplab`; so `torchrun -m ddplab bench ...` works."""

import sys

from ddplab.cli import main

if __name__ == "__main__":
    sys.exit(main())
