"""The command line, where `aliquot` is not on the path: `python -m aliquot`."""

from .cli import main

if __name__ == "__main__":
    main()
