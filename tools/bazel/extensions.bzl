"""What MODULE.bazel uses."""

load(":local_python.bzl", "local_python")

def _implementation(_):
    local_python(name = "local_python")

local_python_extension = module_extension(implementation = _implementation)
