"""Models to copy into a project; they use only public names of vsa_jax, JAX and Flax."""
