"""The names of a setting as a flag and as a variable."""


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    return "ADAPTER_" + name.upper()
