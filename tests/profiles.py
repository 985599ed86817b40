"""How much Hypothesis tries: ci (derandomised, the default), dev (random), deep (as long as you have). Floor 9."""
import os

from hypothesis import HealthCheck, settings


def load_profile() -> None:
    """Register the profiles and load the one that HYPOTHESIS_PROFILE names."""
    common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]}
    settings.register_profile("ci", max_examples=60, derandomize=True, print_blob=True, **common)
    settings.register_profile("dev", max_examples=30, **common)
    settings.register_profile("deep", max_examples=int(os.environ.get("EXAMPLES", "5000")), print_blob=True, **common)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
