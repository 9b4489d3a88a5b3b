import sys

from flexfloor.cli import main

sys.exit(main())
