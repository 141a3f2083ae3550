"""`python -m eae_runtime` is `eae`."""

import sys

from .cli import main

sys.exit(main())
