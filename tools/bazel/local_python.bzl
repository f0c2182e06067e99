"""The C++ sides of packages of the Python on PATH: XLA's FFI headers, nanobind, Python itself."""

_FOLDERS = """
import jaxlib, nanobind, os, sysconfig
print(os.path.join(os.path.dirname(jaxlib.__file__), "include"))
print(os.path.dirname(nanobind.__file__))
print(sysconfig.get_path("include"))
print(jaxlib.__version__)
"""

_BUILD = """
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

cc_library(
    name = "xla_ffi",
    hdrs = glob(["xla/**/*.h"]),
    includes = ["xla"],
)

cc_library(
    name = "python",
    hdrs = glob(["python/**/*.h"]),
    includes = ["python"],
)

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob(["nanobind/**/*.h"]),
    copts = ["-std=c++17", "-fno-strict-aliasing", "-fvisibility=hidden"],
    includes = ["nanobind/include", "nanobind/ext/robin_map/include"],
    textual_hdrs = glob(["nanobind/src/*.cpp"], exclude = ["nanobind/src/nb_combined.cpp"]),
    deps = [":python"],
)
"""

def _implementation(context):
    python = context.os.environ.get("PYTHON_BIN_PATH") or str(context.which("python3"))
    found = context.execute([python, "-c", _FOLDERS])
    if found.return_code != 0:
        fail("%s has no jaxlib or no nanobind: %s" % (python, found.stderr))
    xla, nanobind, headers, jaxlib = found.stdout.strip().split("\n")
    context.symlink(xla, "xla")
    context.symlink(nanobind, "nanobind")
    context.symlink(headers, "python")
    context.file("BUILD.bazel", _BUILD)
    context.file("facts.bzl", "JAXLIB = \"%s\"\n" % jaxlib)

local_python = repository_rule(
    implementation = _implementation,
    environ = ["PYTHON_BIN_PATH", "PATH"],
    local = True,
)
