"""python -m pagedjax"""

import sys

from pagedjax.commands.cli import main

sys.exit(main())
