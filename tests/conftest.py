"""Shared by all tests: Hypothesis profiles, and the tiny random models that the cases speak of. Floor 9."""
from models import built_in, hybrid, qwen3, qwen3_folder, recurrent, smollm2, t_folder, t_model, t_native, t_ties  # noqa: F401
from profiles import load_profile

load_profile()
