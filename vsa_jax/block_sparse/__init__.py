"""Exact softmax attention over the key tiles that each query tile keeps."""
