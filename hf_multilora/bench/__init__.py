"""Benchmarks: what `hf-multilora bench` and the scripts in benchmarks/ share. Nothing of the runtime imports this."""
