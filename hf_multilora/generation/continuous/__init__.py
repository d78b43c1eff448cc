"""Continuous batching: requests that come at any time, each under its own adapter, over the slots of one model.

transformers brings the paged cache, its schedulers and CUDA graphs; here is what makes them know adapters.
"""
