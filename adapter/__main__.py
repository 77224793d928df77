"""`python -m adapter`, the same as the command triton-adapter."""

import os
import sys

from adapter import cli


def main() -> int:
    return cli.main(sys.argv[1:], os.environ)


if __name__ == "__main__":
    sys.exit(main())
