"""Profiles and models of the proofs: those of tests/. HYPOTHESIS_PROFILE chooses how much is tried."""
from models import built_in, hybrid, recurrent, t_folder, t_model, t_native, t_ties  # noqa: F401
from profiles import load_profile

load_profile()
