"""python -m refengine. Floor 8."""
import sys

from refengine.cli import main

if __name__ == "__main__":
    sys.exit(main())
