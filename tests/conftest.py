"""Eight fake CPU devices for every test, set before JAX starts; one Hypothesis profile."""

import os

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "")
  + " --xla_force_host_platform_device_count=8"
  # A third less compile time, which is most of a run; XLA's own passes are not affected.
  + " --xla_backend_optimization_level=0"
)
if (
  os.environ["JAX_PLATFORMS"] != "cpu"
):  # a GPU's default is TF32, far from the float32 that tests compare
  os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")

from hypothesis import settings

settings.register_profile("vsa_jax", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("vsa_jax")
