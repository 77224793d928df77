"""Says which form of the hot modules runs: the build compiles all modules with a .pxd, or none."""

FORM = "pure" if __file__.endswith(".py") else "compiled"
