"""Modules of optional integrations are read for doctests where what they need is installed."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("lm_eval") else ["hf_multilora/integrations/lm_eval.py"]
